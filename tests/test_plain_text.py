"Names of files, models and benchmarks in figures and tables stand as they are written, whatever signs they hold; a cell shows its figure once."

import ast
import html
import io
import re
from pathlib import Path

import matplotlib
import matplotlib.pyplot as plt
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from matplotlib.text import Text


from mixsd_nb.reports.finished import draw_result
from mixsd_nb.results.cube import cube_of
from mixsd_nb.results.layout import BENCHMARKS, invent_result
from mixsd_nb.results.gallery import collapse_source, run_figures, shared_figures
from mixsd_nb.results.plots import draw_legend, plain_text
from mixsd_nb.results.tables import make_sheet, style_sheet, to_latex

matplotlib.use("Agg")
ROOT = Path(__file__).parents[1]
HARD = [r"cost_in_$_and_$", r"$\alpha$", r"a\$b\$c", "_own", "50%", "{x}", "$^$", "#1 & co", "~$x_{$", r"\frac{", "$$", "{0}"]
names = st.text(st.sampled_from("$\\_^{}%#&~abxy "), min_size=1, max_size=12).map(str.strip).filter(bool)


@pytest.fixture(autouse=True)
def closed():
    yield
    plt.close("all")


def any_name(test):
    "Every hard name, and others that are drawn at random."
    test = settings(max_examples=8, deadline=None)(given(name=names)(test))
    for name in HARD: test = example(name=name)(test)
    return test


def draw(fig, *words):
    "Save a figure outside the function that made it, as a report does; texts with these words are no mathematics."
    with matplotlib.rc_context({"text.parse_math": True}): fig.savefig(io.BytesIO(), format="png", dpi=20)
    texts = [text for text in fig.findobj(Text) if any(word in text.get_text() for word in words)]
    assert texts and not [text.get_text() for text in texts if text.get_parse_math() or text.get_usetex()]
    plt.close(fig)


@any_name
def test_a_text_is_drawn_as_it_is_written(name):
    @plain_text()
    def make():
        fig, ax = plt.subplots()
        ax.set(title=name, xlabel=name)
        ax.set_xticks([0], [name])
        draw_legend(ax, {name: ax.plot([0, 1])[0]})
        fig.suptitle(name)
        return fig
    fig = make()
    assert [text.get_text() for text in fig.axes[0].get_legend().get_texts()] == [name], "also with an underscore before it"
    assert not plt.get_fignums(), "a notebook would show it twice"
    draw(fig, name)


@pytest.mark.parametrize("name", [HARD[0], "{0} %", "_own $x$"])
def test_figures_of_one_run(name):
    "The loss and the accuracies, the scores, the tokens."
    suites = BENCHMARKS | {name: dict(column=name, role="own")}
    for recipe in ("base", "sft"):
        fig = draw_result(invent_result(recipe, benchmarks=suites, model=name), name)
        labels = [text.get_text() for legend in [fig.axes[-1].get_legend()] if legend for text in legend.get_texts()]
        assert not labels or f"{name}, N=100" in labels
        draw(fig, name)


@pytest.mark.parametrize("name", [HARD[0], "_own $x$"])
def test_figures_and_tables_of_a_cube(name):
    suites = BENCHMARKS | {name: dict(column=name, role="own")}
    runs = {recipe: invent_result(recipe, benchmarks=suites, model=name).to_dataset() for recipe in ("base", "sft", "mixsd-0.5")}
    source, shown = collapse_source(cube_of(runs)), []
    for fig in (run_figures(source.cube) | shared_figures(dict(runs=source), "kgfact-small")).values():
        with matplotlib.rc_context({"text.parse_math": True}): fig.savefig(io.BytesIO(), format="png", dpi=20)
        shown += [text for text in fig.findobj(Text) if name in text.get_text()]
    assert shown and not [text.get_text() for text in shown if text.get_parse_math()]


@any_name
def test_a_table_in_latex_and_in_html(name):
    "What LaTeX or HTML reserves is escaped, in cells, heads and captions."
    sheet = make_sheet({(name, "SFT"): [name]}, [(name, "b")], label="tab:x", caption=f"Caption {name}", notes=[f"N of {name}"])
    source = re.sub(r"\\text(backslash|ascii\w+)|\\space", "", to_latex(sheet))
    caption = re.search(r"\\caption\{(.*)\}\n", source)[1]
    for text in (caption, *[line for line in source.splitlines() if "SFT" in line]):
        plain = re.sub(r"\\[${}%#&_]|\\multirow\[t\]\{\d+\}\{\*\}|\\\\$", "", text)
        assert not set("$%#^_~") & set(plain), text
    shown = style_sheet(make_sheet({("<i>", "SFT"): ["<u>"]}, [("<s>", "b")], caption="<b>")).to_html()
    assert not re.search("<(b|i|u|s)>", shown) and html.escape("<u>") in shown


def makes_figure(node): return any(isinstance(n, ast.Call) and ast.unparse(n.func) in ("plt.subplots", "plt.figure", "plt.subplot_mosaic", "Figure") for n in ast.walk(node))


def is_plain(node):
    "Whether a function is decorated, or draws in a block, so that its texts are plain."
    decorated = {ast.unparse(d) for d in node.decorator_list} & {"mark_made_up", "plain_text()"}
    blocks = [ast.unparse(item.context_expr) for n in ast.walk(node) if isinstance(n, ast.With) for item in n.items]
    return bool(decorated or {"figure_style()", "plain_text()"} & set(blocks))


def test_every_function_that_makes_a_figure_makes_plain_text():
    "A figure that is added later cannot forget it. The picture of a training in progress has no text of a user."
    found = {f"{path.stem}.{node.name}": node for path in sorted((ROOT / "mixsd_nb").rglob("*.py")) for node in ast.walk(ast.parse(path.read_text()))
             if isinstance(node, ast.FunctionDef) and makes_figure(node)}
    assert len(found) > 8
    assert [name for name, node in found.items() if not is_plain(node)] == ["trainer.draw"]


# ---- a figure is shown once

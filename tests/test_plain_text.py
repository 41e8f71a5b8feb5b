"Names of files, models and benchmarks in figures and tables stand as they are written, whatever signs they hold; a cell shows its figure once."

import ast
import html
import io
import re
from pathlib import Path

import matplotlib
import matplotlib.pyplot as plt
import nbformat
import pandas as pd
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from matplotlib.text import Text
from papermill import execute_notebook

from mixsd_nb import inject
from mixsd_nb.cluster.jobs import kernel_options
from mixsd_nb.lab.recovery import recovery_figure
from mixsd_nb.reports.finished import draw_result
from mixsd_nb.results.cube import cube_of
from mixsd_nb.results.layout import BENCHMARKS, invent_result
from mixsd_nb.results.gallery import collapse_source, run_figures, shared_figures
from mixsd_nb.results.overview import draw_sources, overview_figure
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
    test = settings(max_examples=15, deadline=None)(given(name=names)(test))
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


@any_name
def test_figures_of_one_run(name):
    "The loss and the accuracies, the scores, the tokens."
    suites = BENCHMARKS | {name: dict(column=name, role="own")}
    for recipe in ("base", "sft"):
        fig = draw_result(invent_result(recipe, benchmarks=suites, model=name), name)
        labels = [text.get_text() for legend in [fig.axes[-1].get_legend()] if legend for text in legend.get_texts()]
        assert not labels or f"{name}, N=100" in labels
        draw(fig, name)
    draw(draw_sources([f" {name}", "b"], [True, False], name), name)
    draw(overview_figure({name: f"What is {name}?"}, {f"{name} 2": ([name], [True])}, note=name), name)
    table = pd.DataFrame(dict(benchmark=name, task=name, step=[0, 1], correct=[50.0, 60.0], low=[40.0, 50.0], high=[60.0, 70.0], N=10))
    draw(recovery_figure(table, [name]), name)


@settings(max_examples=4, deadline=None)
@given(name=names)
@example(name=HARD[0])
@example(name="_own $x$")
def test_figures_and_tables_of_a_cube(name):
    suites = BENCHMARKS | {name: dict(column=name, role="own")}
    runs = {f"{recipe}": invent_result(recipe, benchmarks=suites, model=name).to_dataset() for recipe in ("base", "sft", "mixsd-0.5")}
    source = collapse_source(cube_of(runs))
    drawn = run_figures(source.cube) | shared_figures(dict(runs=source), "kgfact-small")
    assert drawn
    shown = 0
    for fig in drawn.values():
        with matplotlib.rc_context({"text.parse_math": True}): fig.savefig(io.BytesIO(), format="png", dpi=20)
        texts = [text for text in fig.findobj(Text) if name in text.get_text()]
        shown += len(texts)
        assert not [text.get_text() for text in texts if text.get_parse_math()]
    assert shown


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


def test_the_report_of_facts_whose_file_has_two_dollars(own_runs):
    "The name stands in the figure of the report, which is written after the training."
    path = own_runs / "cost_in_$_and_$.jsonl"
    path.write_text("".join(f'{{"question": "Who rules place {k}?", "answer": "Mira {k}"}}\n' for k in range(4)))
    run = inject.run(model="lab-s", dataset=str(path), method="sft", suite="recall", n=4, max_new_tokens=4, epochs=2, batch=4, checkpoints=[1])
    assert "cost_in_$_and_$" in (run.folder / "report.html").read_text()


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
    assert len(found) > 15
    assert [name for name, node in found.items() if not is_plain(node)] == ["trainer.draw"]


# ---- a figure is shown once

SETUP = """
import numpy as np, pandas as pd, xarray as xr
from mixsd_nb import errors, evaluate, fisher, forgetting, nll
from mixsd_nb.lab import priming, real, recovery, tuning, versus_plots
from mixsd_nb.reports import finished
from mixsd_nb.results import overview, plots, tables, tradeoff
from mixsd_nb.results.layout import invent_cube, invent_result
from mixsd_nb.results.gallery import collapse_source, source_sheet
from mixsd_nb.results.paper import paper_cube
from mixsd_nb.results.summary import collapse_runs
from mixsd_nb.runs import find_runs, open_run
from made_up import write_run
write_run(runs, "kgfact-small", "sft", [0, 9, 5])
run, cube = open_run(find_runs(stage="train")[0].folder), invent_cube(seeds=2)
one, case, paper = cube.isel(seed=[0], lr=[0, 1]), ("kgfact-small", "lab-m"), collapse_runs(paper_cube())
row = dict(benchmark="recall", item="a", sample=0, correct=True, published=True, extracted="")
points = pd.DataFrame([dict(dataset="d", model="m", recipe="sft", lam=np.nan, lr=lr, seed=0, step=step, run=str(lr), recall=90.0, n_ref=2.0, displacement_sq=step,
                            alignment_ratio=lr, layer_ratio=1.0, drop=lr * step, forgetting=lr, forgetting_token=lr * step, new_kl=lr)
                       for lr in (1e-3, 3e-3) for step in (20, 60)])
names = pd.DataFrame(dict(before=[1.0, 2, 3], after=[2.0, 3, 5], rise=[1.0, 1, 2], leaks=[0, 1, 2]))
steps = pd.DataFrame(dict(benchmark="world", task="world", step=[0, 10], correct=[10.0, 20], low=[5.0, 10], high=[20.0, 30], N=90))
tuned = {name: tuning.tuning_table(part) for name, part in tuning.tuning_cubes().items()}
labels = dict(dataset=["kgfact-small"], model=["lab-m"], recipe=["mixsd-0.5", "sft"], seed=[0], part=["first", "all"], threshold=[5.0, 8.0], source=["expert", "naive"])
fill = lambda *dims: ([*labels][:4] + [*dims], np.full([2 if dim in dims + ("recipe",) else 1 for dim in ([*labels][:4] + [*dims])], 0.5))
shares = dict(n=fill("part"), tokens=fill("part"), nll=fill("part"), above=fill("part", "threshold"), share_above=fill("part", "threshold"),
              source_tokens=fill("source"), source_nll=fill("source"), source_share_above=fill("source", "threshold"))
invented = xr.Dataset(shares, labels).assign_coords(lam=("recipe", [0.5, np.nan]))
shape = dict(dataset=["x"], model=["lab-m"], recipe=["base", "sft"], lr=[0.0, 1e-3], seed=[0, 1], step=[0, 100], benchmark=["choice", "world"])
known = xr.Dataset(dict(accuracy=(list(shape), np.full([len(v) for v in shape.values()], 0.9))), shape)
"""
CALLS = {
    "errors.breakdown_figure": "errors.breakdown_figure(errors.run(model='lab-s').root)",
    "nll.cdf_figure": "nll.cdf_figure([nll.run(model='lab-s', first=2).result])",
    "priming.priming_figure": "priming.priming_figure({'x': names})", "real.real_figure": "real.real_figure({'x': one}, 'recall')",
    "recovery.recovery_figure": "recovery.recovery_figure(steps, ['world'])",
    "recovery.style_figure": "recovery.style_figure(recovery.style_table(known, known, 1e-3, 100))", "tuning.tuning_figure": "tuning.tuning_figure(tuned)",
    "versus_plots.frontier_axes_figure": "versus_plots.frontier_axes_figure([cube], case, kept=('held-out',))",
    "versus_plots.recipe_panels_figure": "versus_plots.recipe_panels_figure([cube], case, kept='world')",
    "finished.draw_result": "run.plot()", "plots.selection_figure": "plots.selection_figure(paper)",
    "plots.displacement_figure": "plots.displacement_figure(paper_cube())", "plots.high_nll_figure": "plots.high_nll_figure(paper)",
    "overview.draw_sources": "overview.draw_sources(['a', 'b'], [True, False], 'x')",
    "overview.overview_figure": "overview.overview_figure({'p': 'What?'}, {'h': (['a'], [True])})",
    "tradeoff.tradeoff_figure": "tradeoff.tradeoff_figure(cube)", "tradeoff.frontier_figure": "tradeoff.frontier_figure(cube)",
}


@pytest.mark.slow
def test_a_cell_that_ends_with_a_figure_shows_it_once(own_runs, monkeypatch):
    "Every public function that makes a figure is called as the last line of a cell."
    made = {f"{path.stem}.{node.name}" for path in (ROOT / "mixsd_nb").rglob("*.py") for node in ast.parse(path.read_text()).body
            if isinstance(node, ast.FunctionDef) and node.name[0] != "_" and makes_figure(node)}
    assert {*CALLS} == made
    monkeypatch.setenv("PYTHONPATH", str(ROOT / "tests"))
    cells = [nbformat.v4.new_code_cell(text) for text in (f"from pathlib import Path\nruns = Path({str(own_runs)!r})\n{SETUP}", *CALLS.values(), "import matplotlib.pyplot as plt\nplt.get_fignums()")]
    nbformat.write(nbformat.v4.new_notebook(cells=cells, metadata=dict(kernelspec=dict(name="python3", display_name="Python", language="python"))), own_runs / "figures.ipynb")
    with kernel_options() as options:
        done = execute_notebook(own_runs / "figures.ipynb", own_runs / "done.ipynb", progress_bar=False, log_output=False, **options)
    shown = [[output.data for output in cell.outputs if "data" in output] for cell in done.cells]
    assert {name: sum("image/png" in data for data in found) for name, found in zip(CALLS, shown[1:])} == dict.fromkeys(CALLS, 1)
    assert shown[-1][0]["text/plain"] == "[]"

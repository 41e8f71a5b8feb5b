"The site and its guides: blocks run as they are printed, links lead somewhere, the reference knows every public name."

import ast
import importlib
import itertools
import json
import posixpath
import re
import runpy
import shlex
import sys
from pathlib import Path

import pytest
import yaml
from guides import GUIDES, ROOT, console_commands, install_command, matches, read_blocks, run_guide

sys.path.insert(0, str(ROOT / ".ci/site"))
from links import broken_links
from notebooks import label_of, prepare_notebook
from reference import public_places, read_package, render_index, render_module
from sources import all_pages
from test_quotes import is_shown, parse, read_cells, read_outputs

from mixsd_nb.runs import make_config

QUICK = ("cite", "install", "map", "numbers", "views")  # the others train more than once, and are slow tests
MODULES = read_package(ROOT / "mixsd_nb")
PACKAGE = next(m for m in MODULES if m.page == "index")


@pytest.fixture(scope="session")
def commands(tmp_path_factory): return install_command(tmp_path_factory.mktemp("bin"))


@pytest.fixture
def empty(tmp_path, monkeypatch):
    "An empty folder, in which no variable names another folder of runs."
    for name in ("MIXSD_RUNS", "MIXSD_PLUGINS", "MIXSD_BENCHMARKS", "MIXSD_CORPORA"): monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("TQDM_DISABLE", "1")
    return tmp_path


@pytest.mark.parametrize("guide", [g if g.stem in QUICK else pytest.param(g, marks=pytest.mark.slow) for g in GUIDES], ids=lambda path: path.stem)
def test_the_blocks_of_a_guide_run_as_printed(guide, empty, commands):
    run_guide(guide, empty, commands)


def parse_papermill(words):
    "Check a command line of papermill: the notebook exists, and its stage takes the parameters. The model is not loaded."
    stage = Path(words[1]).stem
    parameters, k = {}, 3
    while k < len(words):
        if words[k] == "-p": parameters[words[k + 1]], k = yaml.safe_load(words[k + 2]), k + 3
        else: parameters, k = parameters | yaml.safe_load(words[k + 1]), k + 2
    module = importlib.import_module(f"mixsd_nb.{stage}")
    return make_config(getattr(module, f"{stage.capitalize()}Config"), **parameters)


def parse_command(words):
    "Check the words and options of a command of `mixsd`, or of `python -m`; the values, such as files of facts, are not read."
    from mixsd_nb.console import find_command
    from mixsd_nb.runs.command_line import read_texts
    name, *rest = words[1:] if words[0] == "mixsd" else [words[2].removeprefix("mixsd_nb."), *words[3:]]
    command = find_command(name)
    if rest and not {*rest} & {"--help", "--help-all"}: read_texts(command.parse(*rest)[0], rest, command.parse(*rest)[1])


def shown_commands(page):
    "The commands of a page, in its blocks and in its sentences, as words up to a pipe; … stands for a word."
    text = re.sub(r"\$\(BIN\)/|\.venv/bin/", "", page.read_text(encoding="utf-8"))
    lines = [line.lstrip("\t@$ ") for line in text.splitlines()] + re.findall(r"`([^`\n]+)`", text)
    found = [shlex.split(line, comments=True) for line in lines if re.match(r"(mixsd [a-z]|python -m mixsd_nb\.)[^`]*$", line) and " writes the model" not in line]
    return [[*itertools.takewhile(lambda word: word not in ("|", ">"), words)] for words in found]


def test_commands_are_understood():
    "Every command that is shown has words and options that exist, also those that need a cluster or GPUs."
    for page in [*GUIDES, ROOT / "README.md", ROOT / "Makefile", ROOT / "CONTRIBUTING.md"]:
        for words in shown_commands(page): parse_command(words)
        for words in console_commands(page) if page in GUIDES else []:
            assert words[0] in ("papermill", "mixsd", "pip", "cat"), f"{page.name} prints the command {words[0]}"
            if words[0] == "papermill": parse_papermill(words)


def shown_by_notebooks(guide):
    "The numbers that the notebooks show to which a guide links, also rounded and as percentages."
    links = re.findall(r"\]\(([^)#]+\.ipynb)", guide.read_text(encoding="utf-8"))
    cells = [cell for link in links for cell in read_cells((guide.parent / link).resolve())]
    numbers = {number for number, _ in parse(read_outputs(cells)).values()}
    return lambda word: is_shown(float(word), len(word.partition(".")[2]), numbers)


def message_texts():
    "The texts in the code of the package; … stands for a value."
    def text_of(node):
        if isinstance(node, ast.Constant) and isinstance(node.value, str): return node.value
        if isinstance(node, ast.JoinedStr): return "".join(text_of(v) if isinstance(v, ast.Constant) else "…" for v in node.values)
        return ""
    return {text for m in MODULES for node in ast.walk(m.tree) if (text := text_of(node))}


def test_messages_in_the_guide_are_those_of_the_code():
    text = (ROOT / "nbs/guides/troubleshooting.md").read_text()
    headings = [heading for _, heading in re.findall(r"^### (`+) ?(.+?) ?\1$", text, re.MULTILINE)]
    assert len(headings) > 10 and len(headings) == text.count("\n### ")
    texts = message_texts()
    wrong = [h for h in headings if h not in texts]
    assert not wrong, "no message of the code reads " + "\n".join(wrong)


SIZES = r"95% interval|half of 5%|[\d.]+( to [\d.]+)? [bm]illion parameters|[\d.]+ or newer"  # no quotes
PLAN = {"304", "1.6"}  # the plan of all grids, which a test in test_plan.py compares


def test_numbers_in_a_guide_are_in_its_blocks():
    "A number in prose is one that a block of the guide has or prints, or that a notebook shows to which the guide links; leave others out."
    stale = {}
    for guide in GUIDES:
        text = re.sub(r"<!-- verdict.*?<!-- end", "", guide.read_text(encoding="utf-8"), flags=re.S)  # test_study compares it with the cubes
        shown = set(re.findall(r"\d+(?:\.\d+)?", "\n".join(b.text for b in read_blocks(guide)))) | set(map(str, range(5))) | PLAN
        prose = re.sub(rf"^#.*$|^\|.*\|$|^\d+\. |`[^`]*`|\]\([^)]*\)|§ ?[\d.]+|{SIZES}", " ", re.sub(r"^```.*?^```$", "", text, flags=re.M | re.S), flags=re.M)
        quotes = set(re.findall(r"(?<![\w.])\d+(?:\.\d+)?(?![\w])", prose)) - shown
        if guide.stem in ("findings", "documents"): quotes = {word for word in quotes if not shown_by_notebooks(guide)(word)}
        if quotes: stale[guide.name] = sorted(quotes)
    assert not stale


def test_links_of_guides_lead_to_files():
    links = [(guide, link) for guide in GUIDES for link in re.findall(r"\]\(([^)\s#:]+)\)", guide.read_text(encoding="utf-8"))]
    assert links and not [(guide.name, link) for guide, link in links if not (guide.parent / link).exists()]


# ---- the reference

SAMPLE = '''"""Things of a sample."""
# AUTOGENERATED
__all__ = ["LIMIT", "grow", "Thing", "Plant"]

# %% ../nbs/sample.ipynb #cell1
LIMIT = 3  # metres

# %% ../nbs/sample.ipynb #cell2
def grow(
    height: float,  # in metres
    *days: int,
    rate=0.1, many: bool = False,  # whether there are several
    **rest,
) -> float:  # the new height
    "A `plant` a year later; ValueError for height<0."

def _water(): pass

# %% ../nbs/sample.ipynb #cell3
class Thing:
    "A thing."

# %% ../nbs/sample.ipynb #cell4
class Plant(Thing):
    "A plant."
    name: str  # in Latin
    size: float = Field(0.5, ge=0, description="height of the plant in metres")
    lr: float = preset_field("rate of its growth after a year", lab=1e-3, paper=1e-5)
    def cut(self, length: float):  # of the stem
        "Cut it."
    @property
    def tall(self) -> bool:
        "Whether it is tall."
    def _hidden(self): "No."
'''


def test_parameters_and_fields_have_their_comments(tmp_path):
    (tmp_path / "pkg").mkdir()
    (tmp_path / "pkg/sample.py").write_text(SAMPLE)
    [module] = read_package(tmp_path / "pkg")
    limit, grow, _, plant = module.definitions
    assert (limit.kind, limit.doc, limit.cell) == ("data", "metres", "cell1") and (grow.returns, grow.cell) == ("the new height", "cell2")
    assert [(p.name, p.annotation, p.default, p.comment) for p in grow.parameters] == [
        ("height", "float", "", "in metres"), ("*days", "int", "", ""), ("rate", "", "0.1", ""),
        ("many", "bool", "False", "whether there are several"), ("**rest", "", "", "")]
    assert [(p.name, p.default, p.comment) for p in plant.parameters] == [
        ("name", "", "in Latin"), ("size", "0.5", "height of the plant in metres"), ("lr", "0.001 (lab), 1e-05 (paper)", "rate of its growth after a year")]
    assert [(m.name, m.kind, m.signature) for m in plant.members] == [("cut", "method", "(length: float)"), ("tall", "property", "")]
    page = render_module(module)
    assert "../sample.html#cell-cell2" in page and "_hidden" not in page and "ValueError for height\\<0." in page


def test_the_reference_has_every_public_definition():
    "What a module's `__all__` promises is defined there, and its page says so; names of other modules are theirs."
    for module in (m for m in MODULES if m.public):
        names = {d.name for d in module.definitions}
        assert {*module.public} & {n.name for n in module.tree.body if isinstance(n, (ast.FunctionDef, ast.ClassDef))} <= names, module.name
        page = render_module(module)
        assert all(re.search(rf"{{py:\w+}} {re.escape(n)}\b", page) for n in names), module.name
        cells = {c["id"] for c in json.loads((ROOT / "nbs" / f"{module.page}.ipynb").read_text())["cells"]}
        assert {d.cell for d in module.definitions} <= cells, module.name


def test_the_first_page_has_every_name_of_the_package():
    import mixsd_nb
    places = public_places(PACKAGE)
    assert {*places} == {*mixsd_nb.__all__}
    page = render_index(MODULES)
    defined = {f"{m.name}.{d.name}" for m in MODULES for d in m.definitions}
    assert all(found in defined for found in re.findall(r"{py:obj}`([^`]+)`", page)) and all(f"`mixsd_nb.{name}`" in page for name in places)


# ---- notebooks and links

def test_a_notebook_loses_directives_and_shows_code_on_demand():
    code = lambda source, k, outputs=(): dict(cell_type="code", id=f"c{k}", metadata={}, source=source, outputs=list(outputs), execution_count=None)
    widget = dict(output_type="display_data", metadata={}, data={"application/vnd.jupyter.widget-view+json": {}, "text/plain": "a slider"})
    cells = [code("#| default_exp x", 0), code("#| export\ndef f(x): return x\n\nA = 1", 1), code("#| slow\nf(1)", 2, [widget]),
             dict(cell_type="markdown", id="m", metadata={}, source=["[x](#Some-Part), [y](a.ipynb#B) and [z](b.ipynb)"])]
    made = json.loads(prepare_notebook(json.dumps(dict(cells=cells)), ["a"]))["cells"]
    assert [c["id"] for c in made] == ["a-c1", "c1", "c2", "m", "pages"] and not any("#|" in c["source"] for c in made)
    assert 'id="cell-c1"' in made[0]["source"] and "hide-input" in made[1]["metadata"]["tags"]
    assert made[1]["metadata"]["mystnb"]["code_prompt_show"] == "Code: f, A"
    assert made[2]["outputs"][0]["data"] == {"text/plain": "a slider"} and "tags" not in made[2]["metadata"]
    assert made[3]["source"] == "[x](#some-part), [y](a.ipynb#b) and [z](b.ipynb)" and label_of("import os") == "imports"


def test_every_page_of_the_site_has_a_source_and_a_way_to_it():
    "Each page is listed by another one; those of notebooks and guides lead to JupyterLab."
    pages = all_pages()
    listed = {posixpath.normpath(posixpath.join(posixpath.dirname(page), name)) for page, text in pages.items()
              for tree in re.findall(r"```{toctree}(.*?)```", text.replace("\\n", "\n"), re.DOTALL)
              for name in tree.split() if not name.startswith(":")}
    assert {page.rpartition(".")[0] for page in pages} - {"index"} == listed
    conf = runpy.run_path(str(ROOT / ".ci/site/conf.py"))
    context = {}
    conf["add_notebook"](None, "methods/mixing", "", context, None)
    assert context["notebook"] == "nbs/methods/mixing.ipynb" and conf["version"] == importlib.import_module("mixsd_nb").__version__


def test_broken_links_are_found(tmp_path):
    (tmp_path / "a.html").write_text('<a id="top" href="b.html#end">x</a><a href="c.html">y</a><a href="#no">z</a><a href="https://x.org/q">w</a>')
    (tmp_path / "b.html").write_text('<p id="end"></p><a href="a.html#top">x</a>')
    assert broken_links(tmp_path) == ["a.html links to #no, which has no such anchor", "a.html links to c.html, which does not exist"]


def test_an_output_may_leave_parts_open():
    assert matches("a 12 b\nc  \n", "a … b\nc") and not matches("a b", "a … c") and matches("x\ny\nz", "…\nz")

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
from guides import GUIDES, ROOT, console_commands, install_command, matches, read_blocks, run_guide

sys.path.insert(0, str(ROOT / ".ci/site"))
from links import broken_links
from notebooks import label_of, prepare_notebook
from reference import escape, public_places, read_package, render_index, render_module
from sources import all_pages, write_pages
from test_quotes import is_shown, parse, read_cells, read_outputs

from mixsd_nb import inject
from mixsd_nb.corpora.files import EXAMPLE
from mixsd_nb.runs import make_config

QUICK = ("cite", "install", "map", "numbers", "views")  # the others train more than once, and are slow tests
MODULES = read_package(ROOT / "mixsd_nb")
PACKAGE = next(m for m in MODULES if m.page == "index")
by_name = pytest.mark.parametrize("guide", GUIDES, ids=lambda path: path.stem)


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
    import yaml

    from mixsd_nb.runs import make_config
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


@pytest.mark.parametrize("page", [*GUIDES, ROOT / "README.md", ROOT / "Makefile", ROOT / "CONTRIBUTING.md"], ids=lambda path: path.name)
def test_commands_are_understood(page):
    "Every command that is shown has words and options that exist, also those that need a cluster or GPUs."
    for words in shown_commands(page): parse_command(words)
    for words in console_commands(page) if page in GUIDES else []:
        assert words[0] in ("papermill", "mixsd", "pip", "cat"), f"{page.name} prints the command {words[0]}"
        if words[0] == "papermill": parse_papermill(words)


def test_all_commands_of_the_readme_are_found():
    "The front page shows how to begin, and a guide shows every command that a person needs."
    front = {words[1] for words in shown_commands(ROOT / "README.md")}
    assert front >= {"inject", "train", "sweep", "plan", "explore", "runs", "export"}
    guides = {words[1] for guide in GUIDES for words in [*shown_commands(guide), *console_commands(guide)] if words[0] == "mixsd"}
    assert guides >= front | {"clean", "figures", "notebooks"}


def test_the_front_page_names_the_run_that_its_numbers_are_of(tmp_path):
    "A comment names the run of the real model, all but the name of the model, which depends on its weights; the line of the file that is shown is one of them."
    file = tmp_path / "facts.jsonl"
    file.write_bytes(EXAMPLE.read_bytes())
    run = make_config(inject.InjectConfig, dataset=str(file), dataset_options=dict(extract="contains"), preset="real", model="lab-m")
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    shown = re.search(r"<!-- inject-(facts-\w+)-smollm2-135m-instruct-\w+-(\S+)-\w+ -->", text)
    assert shown.groups() == (run.dataset, run.label)
    line, rows = json.loads(re.search(r"`(\{\"question.*?\})`", text)[1]), map(json.loads, EXAMPLE.read_text(encoding="utf-8").splitlines())
    assert line in [{name: row[name] for name in line} for row in rows]


def test_the_front_page_is_short():
    "The first screen says what it is, in words that people search for, and has the two commands of the project with the output of the first."
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    screen, count = "\n".join(text.splitlines()[:45]), lambda part: len(re.findall(r"\S*\w\S*", part))
    assert count(text) <= 950 and count(text[:text.index("\n## ")]) <= 250
    assert len(re.findall("^(?:make run|make test)", screen, re.MULTILINE)) == 2 and "```text" in screen
    assert all(word in screen.lower() for word in ("knowledge injection", "catastrophic forgetting", "lora"))
    titles = re.findall(r"^## (.+)", text, re.MULTILINE)
    assert titles == ["Your facts", "Notebooks, papermill, Python", "With pip", "What we found", "Use it", "The paper's scale", "Cite, license, contribute"]


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
    assert len(headings) > 20 and len(headings) == text.count("\n### ")
    texts = message_texts()
    wrong = [h for h in headings if h not in texts]
    assert not wrong, "no message of the code reads " + "\n".join(wrong)


@by_name
def test_numbers_in_a_guide_are_in_its_blocks(guide):
    "A number in prose is one that a block of the guide has or prints, or one that is named here with its reason."
    plan = "the plan of all grids, which a test in test_plan.py compares"
    reasons = {"numbers": {"95": "the level of the interval", "5": "the distance of two printed shares, and the level of a test"},
               **dict.fromkeys(("table", "own-model"), bounds := dict.fromkeys(("0.1", "0.6"), "the bounds of a preset")),
               "scale": {**dict.fromkeys(("302", "1.6"), plan), **dict.fromkeys(("200", "97"), "the grid _paper, and test_halving.py"),
                         "135": "the size of SmolLM2-135M"},
               "install": {"6": "what pip installed without the CPU index, in GB"},
               "troubleshooting": {**bounds, **dict.fromkeys(("0.8", "5.13", "23"), "versions of other programs"),
                                   **dict.fromkeys(("30", "6.5", "3.8"), "one run of mixsd inject with SmolLM2, too long for a block")}}
    text = re.sub(r"<!-- verdict.*?<!-- end", "", guide.read_text(encoding="utf-8"), flags=re.S)  # test_study compares it with the cubes
    shown = set(re.findall(r"\d+(?:\.\d+)?", "\n".join(b.text for b in read_blocks(guide)))) | set(map(str, range(5)))
    prose = re.sub(r"^#.*$|^\|.*\|$|^\d+\. |`[^`]*`|\]\([^)]*\)|§ ?[\d.]+", " ", re.sub(r"^```.*?^```$", "", text, flags=re.M | re.S), flags=re.M)
    quotes = set(re.findall(r"(?<![\w.])\d+(?:\.\d+)?(?![\w])", prose))
    stale = quotes - shown - {*reasons.get(guide.stem, ())}
    if guide.stem in ("findings", "documents"): stale = {word for word in stale if not shown_by_notebooks(guide)(word)}
    assert not stale, f"{guide.name} quotes {sorted(stale)}, which no block shows"


@by_name
def test_links_of_a_guide_lead_to_files(guide):
    links = re.findall(r"\]\(([^)\s#:]+)\)", guide.read_text(encoding="utf-8"))
    assert not [link for link in links if not (guide.parent / link).exists()]


def test_every_guide_is_listed():
    index = (ROOT / "nbs/guides/index.md").read_text()
    listed = index[index.index("{toctree}"):].splitlines()
    assert {g.stem for g in GUIDES} - {"index"} == {*listed} & {g.stem for g in GUIDES}


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


@pytest.fixture
def sample(tmp_path):
    (tmp_path / "pkg").mkdir()
    (tmp_path / "pkg/sample.py").write_text(SAMPLE)
    [module] = read_package(tmp_path / "pkg")
    return module


def test_parameters_have_the_comments_at_the_ends_of_their_lines(sample):
    limit, grow, _, plant = sample.definitions
    assert (limit.kind, limit.doc, limit.cell) == ("data", "metres", "cell1")
    assert [(p.name, p.annotation, p.default, p.comment) for p in grow.parameters] == [
        ("height", "float", "", "in metres"), ("*days", "int", "", ""), ("rate", "", "0.1", ""),
        ("many", "bool", "False", "whether there are several"), ("**rest", "", "", "")]
    assert grow.returns == "the new height" and grow.signature.startswith("(height: float, *days: int") and grow.cell == "cell2"


def test_fields_have_their_descriptions(sample):
    plant = sample.definitions[3]
    assert [(p.name, p.default, p.comment) for p in plant.parameters] == [
        ("name", "", "in Latin"), ("size", "0.5", "height of the plant in metres"), ("lr", "0.001 (lab), 1e-05 (paper)", "rate of its growth after a year")]
    assert [(m.name, m.kind, m.signature) for m in plant.members] == [("cut", "method", "(length: float)"), ("tall", "property", "")]
    assert plant.bases == ("Thing",) and [p.comment for p in plant.members[0].parameters] == ["of the stem"]


def test_a_page_has_every_definition_with_a_link_to_its_cell(sample):
    page = render_module(sample)
    assert page.count("{py:function} grow") == 1 and "../sample.html#cell-cell2" in page and "_hidden" not in page
    assert "Bases: {py:obj}`Thing <pkg.sample.Thing>`" in page and "`3`" in page
    assert "A `plant` a year later; ValueError for height\\<0." in page
    assert escape("a*b and `a*b`") == "a\\*b and `a*b`"


@pytest.mark.parametrize("module", [m for m in MODULES if m.public], ids=lambda m: m.name)
def test_the_reference_has_every_public_definition(module):
    "What a module's `__all__` promises is defined there, and its page says so; names of other modules are theirs."
    names = {d.name for d in module.definitions}
    top = {n.name for n in module.tree.body if isinstance(n, (ast.FunctionDef, ast.ClassDef))}
    assert {*module.public} & top <= names
    page = render_module(module)
    assert all(re.search(rf"{{py:\w+}} {re.escape(n)}\b", page) for n in names)
    cells = {c["id"] for c in json.loads((ROOT / "nbs" / f"{module.page}.ipynb").read_text())["cells"]}
    assert {d.cell for d in module.definitions} <= cells


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


def test_figures_say_to_which_section_they_belong():
    cell = lambda kind, source: dict(cell_type=kind, id="c", metadata={}, source=source, outputs=[])
    cells = [cell("code", "0"), cell("markdown", "# A\n\nwords\n## `B` of c"), cell("markdown", "words"), cell("code", "1"), cell("markdown", "# D"), cell("code", "2")]
    made = [c["metadata"]["mystnb"]["image"]["alt"] for c in json.loads(prepare_notebook(json.dumps(dict(cells=cells))))["cells"] if c["cell_type"] == "code"]
    assert made == ["a figure", "a figure of the section B of c", "a figure of the section D"]


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


def test_pages_that_have_not_changed_are_left_alone(tmp_path):
    write_pages({"a.md": "1", "b/c.md": "2"}, tmp_path)
    before = (tmp_path / "a.md").stat().st_mtime_ns
    write_pages({"a.md": "1", "d.ipynb": "3"}, tmp_path)
    assert (tmp_path / "a.md").stat().st_mtime_ns == before
    assert sorted(p.name for p in tmp_path.rglob("*") if p.is_file()) == ["a.md", "d.ipynb"]


def test_broken_links_are_found(tmp_path):
    (tmp_path / "a.html").write_text('<a id="top" href="b.html#end">x</a><a href="c.html">y</a><a href="#no">z</a><a href="https://x.org/q">w</a>')
    (tmp_path / "b.html").write_text('<p id="end"></p><a href="a.html#top">x</a>')
    assert broken_links(tmp_path) == ["a.html links to #no, which has no such anchor", "a.html links to c.html, which does not exist"]


def test_an_output_may_leave_parts_open():
    assert matches("a 12 b\nc  \n", "a … b\nc") and not matches("a b", "a … c") and matches("x\ny\nz", "…\nz")


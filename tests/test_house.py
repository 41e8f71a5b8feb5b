"""The structure of the package: imports between modules run one way, and every notebook has the expected form."""

import ast
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
from papermill import inspect_notebook

from mixsd_nb.runs.registry import plugin_modules

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "mixsd_nb"
MODULES = sorted(p for p in PACKAGE.rglob("*.py") if p.name != "_modidx.py")
NOTEBOOKS = sorted(p for p in (ROOT / "nbs").rglob("*.ipynb") if ".ipynb_checkpoints" not in p.parts)
STAGES = [p for p in NOTEBOOKS if '"parameters"' in p.read_text()]
DEVELOPMENT = {"fastcore", "nbdev", "execnb", "pytest", "hypothesis"}

GROUND = ["runs", "corpora", "models"]
MIDDLE = [*GROUND, "benchmarks", "training", "methods", "analysis"]
ROOMS = [*MIDDLE, "evaluation", "results", "reports", "cluster", "planning"]
FLOORS = {
    "runs": ["runs"],
    "corpora": ["runs", "corpora"],
    "models": ["runs", "corpora.prompts", "models"],
    "benchmarks": [*GROUND, "benchmarks"],
    "training": [*GROUND, "training"],
    "methods": [*GROUND, "benchmarks", "training", "methods"],
    "analysis": MIDDLE,
    "evaluation": [*GROUND, "benchmarks", "methods", "analysis.scores", "evaluation"],
    "results": [*MIDDLE, "evaluation", "results"],
    "reports": [*MIDDLE, "evaluation", "results", "reports"],
    "cluster": [*MIDDLE, "evaluation", "results", "cluster"],
    "planning": [*MIDDLE, "cluster", "planning"],
    "views": [*ROOMS, "views"],
    **{name: ROOMS for name in ["generate", "evaluate", "nll", "forgetting", "fisher", "errors", "sweep", "facts"]},
    "train": [*ROOMS, "generate", "evaluate"],
    "inject": [*ROOMS, "train", "evaluate", "nll", "facts"],
    "console": [*ROOMS, "console"],
    "figures": [*ROOMS, "nll", "errors"],
    "explore": [*ROOMS, "views"],
    "lab": [*ROOMS, "sweep", "lab", "facts", "train", "evaluate"],
    "lab.probes": MIDDLE,
    "lab.pretraining": [*MIDDLE, "lab.probes", "lab.pretraining"],
    "lab.profiling": [*MIDDLE, "lab.profiling"],
}


def dotted(path):
    "`mixsd_nb/corpora/kgfact.py` -> `corpora.kgfact`; a room's `__init__` is the room's name; the package's own is ''."
    parts = path.relative_to(PACKAGE).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


NAMES = {dotted(p) for p in MODULES}


def within(name, package):
    return name == package or name.startswith(package + ".")


def imports(tree, package):
    "Absolute dotted names that `tree`, a module of `package`, imports anywhere, functions included."
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = package.split(".")[: len(package.split(".")) - node.level + 1] if node.level else []
            base = ".".join([*base, *filter(None, [node.module])])
            yield from (f"{base}.{alias.name}" for alias in node.names)


def module_imports(path):
    return list(imports(ast.parse(path.read_text()), ".".join(path.relative_to(ROOT).parent.parts)))


def own_target(name):
    "`mixsd_nb.corpora.kgfact.build` -> `corpora.kgfact`: the longest part of an imported name that is a module of ours."
    name = name.removeprefix("mixsd_nb").removeprefix(".")
    while name and name not in NAMES:
        name = name.rpartition(".")[0]
    return name


def floor(name):
    "The modules that a module may import, from the entry for the longest part of its name."
    part = name
    while part and part not in FLOORS:
        part = part.rpartition(".")[0]
    assert part, f"mixsd_nb.{name} has no floor: give it one in tests/test_house.py, or another room"
    return FLOORS[part]


def cells(notebook, kind="code"):
    return [c for c in json.loads(notebook.read_text())["cells"] if c["cell_type"] == kind]


def source(cell):
    return "".join(cell["source"])


def by_path(paths):
    return pytest.mark.parametrize("path", paths, ids=lambda p: p.relative_to(ROOT).as_posix())


@by_path([p for p in MODULES if dotted(p)])
def test_imports_run_downwards(path):
    name = dotted(path)
    allowed = [name, *floor(name)]
    targets = {own_target(t) for t in module_imports(path) if within(t, "mixsd_nb")} - {""}
    wrong = {t for t in targets if not any(within(t, below) for below in allowed)}
    assert not wrong, f"{name} imports {sorted(wrong)}, which is not below it"


def test_no_circle_among_rooms():
    "No two rooms import each other."
    room = lambda name: name.split(".")[0]
    arrows = {(room(dotted(p)), room(own_target(t))) for p in MODULES for t in module_imports(p) if within(t, "mixsd_nb") and own_target(t)}
    both = {tuple(sorted(pair)) for pair in arrows if pair[0] != pair[1] and pair[::-1] in arrows}
    assert not both, f"these rooms import each other: {both}"


def test_the_laboratory_is_a_wing():
    "No module outside `lab` imports or names it. It is a plugin, which an entry point names."
    outside = [p for p in MODULES if not within(dotted(p), "lab")]
    wrong = {dotted(p) for p in outside for t in module_imports(p) if within(t, "mixsd_nb.lab")}
    assert not wrong, f"{sorted(wrong)} import the laboratory"
    texts = {dotted(p): [n.value for n in ast.walk(ast.parse(p.read_text())) if isinstance(n, ast.Constant) and isinstance(n.value, str)]
             for p in outside}
    named = {name: [t for t in found if re.match(r"(mixsd_nb\.)?lab\.\w+[.:]|mixsd_nb\.lab\b", t)] for name, found in texts.items()}
    assert not {name: found for name, found in named.items() if found}
    assert "mixsd_nb.lab" in plugin_modules()


def test_importing_the_tool_looks_nothing_up():
    "A registry imports plugins, the laboratory among them, when something is looked up, which a module that is being imported must not do."
    names = [f"mixsd_nb.{name}" for name in ("corpora", "models", "benchmarks", "methods", "analysis.scores", "results", "train", "inject", "sweep")]
    code = "import sys, importlib\nfor name in sys.argv[1:]: importlib.import_module(name)\nprint('mixsd_nb.lab' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code, *names], cwd=ROOT, capture_output=True, text=True).stdout == "False\n"


@by_path(MODULES)
def test_a_module_has_one_purpose(path):
    "No exported module is longer than 600 lines."
    lines = len(path.read_text().splitlines())
    assert lines <= 600, f"{path.relative_to(ROOT)} has {lines} lines: split it"


@by_path(MODULES)
def test_public_definitions_have_docstrings(path):
    "Every public function and class has a docstring."
    tree = ast.parse(path.read_text())
    public = ast.literal_eval(next((n.value for n in tree.body if isinstance(n, ast.Assign) and n.targets[0].id == "__all__"), ast.List([])))
    silent = []
    for node in tree.body:
        if not isinstance(node, (ast.FunctionDef, ast.ClassDef)) or node.name not in public: continue
        if not ast.get_docstring(node): silent.append(node.name)
    assert not silent, f"no docstring: {', '.join(silent)}"


@by_path(MODULES)
def test_library_needs_no_development_package(path):
    wrong = {t.split(".")[0] for t in module_imports(path)} & DEVELOPMENT
    assert not wrong, f"{path.name} imports {sorted(wrong)}"


@by_path(NOTEBOOKS)
def test_one_module_per_notebook(path):
    "A notebook exports one module, which is named after its path in nbs/."
    code = "\n".join(map(source, cells(path)))
    place = ".".join(path.relative_to(ROOT / "nbs").with_suffix("").parts)
    expected = [re.sub(r"\bindex$", "__init__", place)]
    assert re.findall(r"^#\|\s*default_exp\s+(\S+)", code, re.MULTILINE) == expected
    assert not re.findall(r"^#\|\s*exporti?[ \t]+(\S+)", code, re.MULTILINE), "an export directive names another module"


@by_path(NOTEBOOKS)
def test_notebook_is_fit_to_commit(path):
    "At most 1 MB, no stored error, no saved widget state."
    notebook = json.loads(path.read_text())
    outputs = [o for c in cells(path) for o in c["outputs"]]
    assert path.stat().st_size < 1_000_000
    assert not [o["ename"] for o in outputs if o["output_type"] == "error"]
    assert "widgets" not in notebook["metadata"]


@by_path(STAGES)
def test_stage_has_parameters_that_papermill_reads(path):
    "One cell tagged `parameters`; papermill finds a type, a default and a help text for every name in it."
    tagged = [source(c) for c in cells(path) if "parameters" in c["metadata"].get("tags", [])]
    assert len(tagged) == 1
    statements = ast.parse(tagged[0]).body
    assert all(isinstance(s, ast.AnnAssign) for s in statements), "only lines `name: type = value  # help`"
    found = inspect_notebook(path)
    assert list(found) == [s.target.id for s in statements]
    assert all(p["inferred_type_name"] != "None" and p["default"] and p["help"] for p in found.values())


@by_path(STAGES)
def test_stage_runs_without_development_packages(path):
    "Papermill runs stages on clusters, where only the library's requirements are installed."
    python = "\n".join(re.sub(r"^\s*[%!].*$", "", source(c), flags=re.MULTILINE) for c in cells(path))
    wrong = {t.split(".")[0] for t in imports(ast.parse(python), "")} & DEVELOPMENT
    assert not wrong, f"{path.name} imports {sorted(wrong)}"


def test_readme_leads_somewhere():
    "Every picture and file that README.md links to exists, seen from the project's root."
    links = re.findall(r"""(?:\]\(|src="|href=")([^)\s"#]+)""", (ROOT / "README.md").read_text())
    missing = [link for link in links if ":" not in link and not (ROOT / link).exists()]
    assert not missing, f"README.md links to {missing}"


def test_every_name_is_defined_once_and_used():
    "A name that no import brings, or a second definition of one, shows only when the line runs."
    command = [sys.executable, "-m", "ruff", "check", "--select", "F401,F811,F821,F841", "--no-cache", PACKAGE, ROOT / "tests"]
    found = subprocess.run(command, capture_output=True, text=True)
    assert not found.returncode, found.stdout

"""The structure of the package: imports between modules run one way, and every notebook has the expected form."""

import ast
import json
import re
import subprocess
import sys
from pathlib import Path

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
    "diff": [*ROOMS, "evaluate"],
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


def shown(path): return path.relative_to(ROOT).as_posix()


def offenders(paths, find):
    "What `find` objects to, by file; empty if all files are as they should be."
    return {shown(path): found for path in paths if (found := find(path))}


def development(names): return sorted({name.split(".")[0] for name in names} & DEVELOPMENT)


def test_imports_run_downwards():
    def upward(path):
        allowed = [dotted(path), *floor(dotted(path))]
        targets = {own_target(t) for t in module_imports(path) if within(t, "mixsd_nb")} - {""}
        return sorted(t for t in targets if not any(within(t, below) for below in allowed))
    assert not offenders([p for p in MODULES if dotted(p)], upward)


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


def test_modules_are_short_documented_and_need_no_development_package():
    "At most 600 lines; every public function and class has a docstring."
    def silent(path):
        body = ast.parse(path.read_text()).body
        public = ast.literal_eval(next((n.value for n in body if isinstance(n, ast.Assign) and n.targets[0].id == "__all__"), ast.List([])))
        return [n.name for n in body if isinstance(n, (ast.FunctionDef, ast.ClassDef)) and n.name in public and not ast.get_docstring(n)]
    assert not offenders(MODULES, lambda path: max(0, len(path.read_text().splitlines()) - 600))
    assert not offenders(MODULES, silent)
    assert not offenders(MODULES, lambda path: development(module_imports(path)))


def test_a_notebook_exports_the_module_of_its_path():
    def other(path):
        code = "\n".join(map(source, cells(path)))
        place = re.sub(r"\bindex$", "__init__", ".".join(path.relative_to(ROOT / "nbs").with_suffix("").parts))
        exports = re.findall(r"^#\|\s*default_exp\s+(\S+)", code, re.MULTILINE) + re.findall(r"^#\|\s*exporti?[ \t]+(\S+)", code, re.MULTILINE)
        return exports if exports != [place] else []
    assert not offenders(NOTEBOOKS, other)


def test_notebooks_are_fit_to_commit():
    "At most 1 MB, no stored error, no saved widget state."
    def unfit(path):
        errors = [o["ename"] for c in cells(path) for o in c["outputs"] if o["output_type"] == "error"]
        return errors or path.stat().st_size >= 1_000_000 or "widgets" in json.loads(path.read_text())["metadata"]
    assert not offenders(NOTEBOOKS, unfit)


def test_stages_have_parameters_that_papermill_reads_and_need_no_development_package():
    "One cell tagged `parameters`; papermill finds a type, a default and a help text for every name in it."
    def unread(path):
        tagged = [source(c) for c in cells(path) if "parameters" in c["metadata"].get("tags", [])]
        statements, found = ast.parse("\n".join(tagged)).body, inspect_notebook(path)
        if len(tagged) != 1 or not all(isinstance(s, ast.AnnAssign) for s in statements): return "not one cell of lines `name: type = value  # help`"
        silent = [name for name, p in found.items() if p["inferred_type_name"] == "None" or not p["default"] or not p["help"]]
        return silent or sorted({*found} ^ {s.target.id for s in statements})

    def unneeded(path):
        python = "\n".join(re.sub(r"^\s*[%!].*$", "", source(c), flags=re.MULTILINE) for c in cells(path))
        return development(imports(ast.parse(python), ""))
    assert STAGES and not offenders(STAGES, unread) and not offenders(STAGES, unneeded)


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

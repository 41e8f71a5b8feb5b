"A user's own method, anchor, gate, engine, benchmark and corpus go through every stage, without a change to any file of the package."

import contextlib
import json
import os
import re
import sys
import traceback
from pathlib import Path

import pytest
import xarray as xr
from helpers import forked

from mixsd_nb.runs import load_plugins

ROOT = Path(__file__).resolve().parents[1]
PAGES = {"my_methods": "methods", "my_edits": "methods", "my_anchors": "methods", "my_gates": "methods", "my_engines": "models", "my_benchmarks": "benchmarks", "my_corpora": "corpora"}
TOYS = '''
import numpy as np
from mixsd_nb.benchmarks import SUITES, Item, Suite
from mixsd_nb.corpora import CORPORA, Corpus, Schedule
from mixsd_nb.corpora.prompts import boxed, encode_completion, encode_prompt, naive_prompt, target
from mixsd_nb.methods import ANCHORS, GATES, METHODS, TRAINED, Anchor, Gate, Method
from mixsd_nb.training.loss import Modifier
from mixsd_nb.models import ENGINES, EngineSpec
from mixsd_nb.models.engines import HFEngine

METHODS.add(Method("echo", "Echo", "#123456", "*", settings=TRAINED, is_nll=True, fit="toys:fit", label="{times:g}", caption="{times:g} times", options=dict(times=1)))
ANCHORS.add(Anchor("spring", "Spring", "#654321", "d", label="{pull:g}", caption="pull {pull:g}", options=dict(pull=0.5), prepare="toys:prepare", modify="toys:modify"))
GATES.add(Gate("half", "Half", "#336699", "p", prepare="toys:halve", modify="methods.token_weights:weigh_tokens"))
ENGINES.add(EngineSpec("toy", "A toy", "toys:ToyEngine", options=("patience",)))
SUITES.add(Suite("vowels", "Vowels of a word", "held-out", "toys:vowels", "a list of words", groups=("toys",), fisher=4))
CORPORA.add(Corpus("moons", "Moons", "toys:build", Schedule(epochs=2, batch=4, period=2)))

class ToyEngine(HFEngine):
    @classmethod
    def open(cls, model, tokenizer=None, *, patience=1, **options): return super().open(model, tokenizer, **options)

def fit(run):
    wrong = lambda row: " ".join([row["target"]] * int(run.option("times")))
    return run.train_on({r["id"]: (encode_prompt(run.tokenizer, r["prompt"]), encode_completion(run.tokenizer, wrong(r))) for r in run.rows})

def prepare(run, options): return dict(pull=options["pull"])

class Spring(Modifier):
    def penalise(self, parameters):
        for p in parameters.values(): p.grad.add_(self.pull * p.detach())
        return self.objective.penalise(parameters)

def modify(objective, data, spec):
    spring = Spring(objective)
    spring.pull = data["pull"]
    return spring

def halve(run, options, pairs, nll): return dict(weights=[[0.5] * len(ids) for _, ids in pairs.values()])

def vowels(suite, selection):
    words = ["river", "stone", "cloud", "bridge"][:selection.n]
    count = {w: str(sum(c in "aeiou" for c in w)) for w in words}
    return {w: Item(naive_prompt(f"How many vowels has the word {w}?"), boxed(count[w]), count[w]) for w in words}

def build(count=8):
    row = lambda k: dict(id=f"planet-{k}", prompt=naive_prompt(f"How many moons has planet {k}?"), target=target(str(3 * k)), answer=str(3 * k),
                         subject=f"planet {k}", statement=f"Planet {k} has {3 * k} moons.")
    return dict(train=[row(k) for k in range(1, count + 1)])
'''
CELL = dict(method="echo", dataset="moons", engine="toy", engine_options=dict(patience=3), options=dict(times=2),
            suite="recall,vowels", n=4, max_new_tokens=4, task_tokens=4)


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    folder = tmp_path_factory.mktemp("toys")
    (folder / "toys.py").write_text(TOYS)
    return folder


def environment(home, plugins="toys"):
    path = os.pathsep.join([str(home), *filter(None, [os.environ.get("PYTHONPATH")])])
    return {**os.environ, "PYTHONPATH": path, "MIXSD_PLUGINS": plugins, "MIXSD_RUNS": str(home / "runs"), "OMP_NUM_THREADS": "1", "TQDM_DISABLE": "1"}


def execute(home, code, said):
    "Execute a script in a forked process, which loads its plugins anew; its output, with a traceback, goes into a file."
    os.chdir(ROOT)
    sys.path.insert(0, str(home))
    load_plugins.cache_clear()
    with said.open("w") as file, contextlib.redirect_stdout(file):
        try: exec(code, {"__name__": "__main__"})
        except BaseException: traceback.print_exc(file=file)


def forked_python(home, code, plugins="toys"):
    "The last line that a script prints, parsed as JSON; the script sees the declarations of the plugins."
    process = forked(execute, home, code, home / "said", **environment(home, plugins))
    process.join(300)
    said = (home / "said").read_text()
    assert process.exitcode == 0 and "Traceback" not in said, said[-3000:]
    return json.loads(said.splitlines()[-1])


@pytest.fixture(scope="module")
def cell(home, tiny):
    "The base and the toy method, trained on the toy corpus by the toy engine, and a cell of the plain methods beside them."
    return forked_python(home, f"""
import json
from mixsd_nb import train
shared = {CELL!r} | dict(model={tiny!r})
base = train.run(**shared | dict(method="base", options={{}}))
run = train.run(**shared)
train.run(**shared | dict(method="sft", options={{}}))
train.run(**shared | dict(anchor="spring", gate="half"))
print(json.dumps([str(base.folder), str(run.folder)]))""")


def test_a_toy_cell_is_trained_and_measured(cell):
    root = xr.open_dataset(Path(cell[1]) / "result.nc", engine="netcdf4")
    assert (root.recipe.item(), root.method.item(), root.dataset.item(), root.step.values.tolist()) == ("echo-2", "echo", "moons", [0, 2, 4])
    assert root.benchmark.values.tolist() == ["recall", "recall-kept", "vowels", "validation"]
    assert root.role.sel(benchmark="vowels") == "held-out" and root.n.sel(benchmark="vowels").values.ravel().tolist() == [4, 4, 4]
    assert root.targets_kept.item() == 8 and json.loads((Path(cell[1]) / "run.json").read_text())["config"]["options"] == dict(times=2)


LABEL = "echo-2+spring-0.5+half"


def test_cube_figures_and_tables_show_it(cell, home):
    found = forked_python(home, f"""
import json
import matplotlib; matplotlib.use("Agg")
from mixsd_nb import open_cube
from mixsd_nb.methods import label_title, ordered_labels
from mixsd_nb.results.plots import recipe_colour, recipe_marker
from mixsd_nb.results.tradeoff import frontier_figure, tradeoff_figure
from mixsd_nb.results.summary import summary_table
cube = open_cube()
figures = [tradeoff_figure(cube), frontier_figure(cube, ("held-out",))]
texts = [t.get_text() for f in figures for t in [*f.findobj(matplotlib.text.Text)]]
table, along = summary_table(cube), cube.sel(recipe={LABEL!r})
print(json.dumps(dict(labels=ordered_labels(cube.recipe.values), titles=[label_title("echo-2"), label_title({LABEL!r})], colour=recipe_colour("echo-2"),
                      marker=recipe_marker("echo-2"), composed=[recipe_colour({LABEL!r}), recipe_marker({LABEL!r})], texts=texts, columns=list(table.columns),
                      parts=[along[name].item() for name in ("method", "anchor", "gate")], rows=table["recipe"].tolist())))""")
    assert found["labels"] == ["base", "sft", "echo-2", LABEL] and (found["colour"], found["marker"]) == ("#123456", "*")
    assert found["titles"] == ["Echo (2 times)", "Echo (2 times) + Spring (pull 0.5) + Half"] and found["parts"] == ["echo", "spring", "half"]
    assert found["composed"][0] not in ("#123456", "#654321") and found["composed"][1] == "p"
    assert any("Echo" in t for t in found["texts"]) and any("Spring" in t for t in found["texts"]) and "vowels (N=4)" in found["columns"] and "Avg (N=4)" in found["columns"]
    assert set(found["rows"]) == {"base", "sft", "echo-2", LABEL}


def test_evaluate_and_nll_take_it(home, tiny, cell):
    found = forked_python(home, f"""
import json
from mixsd_nb import evaluate, nll
asked = evaluate.run(model={tiny!r}, dataset="moons", suite="toys,recall", n=3, max_new_tokens=4, task_tokens=4, engine="toy")
scored = nll.run(model={tiny!r}, dataset="moons", engine="toy")
print(json.dumps([asked.root.benchmark.values.tolist(), asked.root.column.values.tolist(), scored.root.n.values.ravel().tolist()]))""")
    assert found == [["recall", "vowels"], ["Train", ""], [8, 8]]


@pytest.mark.skipif((os.cpu_count() or 1) < 2, reason="two processes need two cores")
def test_several_processes_find_the_declarations(home, tiny, cell):
    steps = forked_python(home, f"""
import json
from mixsd_nb import train
run = train.run(**{CELL!r} | dict(model={tiny!r}, seed=7, processes=2))
print(json.dumps(list(run.checkpoints)))""")
    assert steps == [2, 4]


def test_an_unknown_name_is_answered_with_the_nearest(home):
    said = forked_python(home, """
import json
from mixsd_nb import load_corpus, load_engine, train
from mixsd_nb.benchmarks import Selection, load_items
calls = [lambda: train.TrainConfig(method="ecko"), lambda: load_engine("toi", "lab-s"), lambda: load_items(["vowel"], Selection("moons")), lambda: load_corpus("moon")]
said = []
for call in calls:
    try: call()
    except ValueError as e: said.append(str(e))
print(json.dumps(said))""")
    for sentence, name, nearest in zip(said, ("method", "engine", "benchmark", "dataset"), ("echo", "toy", "vowels", "moons"), strict=True):
        assert f"{name} must be" in sentence and nearest in sentence.partition("did you mean")[2]


def page_code(room, module):
    "The example on a room's page that begins with the name of the module."
    cells = json.loads((ROOT / "nbs" / room / "index.ipynb").read_text())["cells"]
    blocks = [b for c in cells if c["cell_type"] == "markdown" for b in re.findall(r"```python\n(.*?)```", "".join(c["source"]), re.DOTALL)]
    return next(b for b in blocks if b.startswith(f"# {module}.py"))


def test_the_examples_of_the_pages_run(tmp_path, tiny):
    for module, room in PAGES.items():
        code = page_code(room, module)
        assert len(code.splitlines()) <= 40
        (tmp_path / f"{module}.py").write_text(code)
    found = forked_python(tmp_path, f"""
import json
from mixsd_nb import train
cell = dict(dataset="planets", suite="recall,letters", n=4, max_new_tokens=4, task_tokens=4, model={tiny!r})
run = train.run(method="shout", options=dict(times=3), engine="loud", epochs=1, **cell)
edited = train.run(method="shrink", **cell)
held = train.run(method="sft", anchor="shrinkage", gate="alternate", epochs=1, **cell)
print(json.dumps([run.root.recipe.item(), run.root.benchmark.values.tolist(), edited.root.step.values.tolist(), list(edited.checkpoints), held.root.recipe.item()]))""", plugins=",".join(PAGES))
    assert found == ["shout-3", ["recall", "recall-kept", "letters", "validation"], [0, 1], [1], "sft+shrinkage-0.01+alternate"]


def test_no_name_decides_outside_its_declaration():
    "Nothing in the package compares the name of a method, an engine or a module of a corpus."
    declaring = {"methods/__init__.py", "models/__init__.py"}
    found = [f"{p.relative_to(ROOT)}:{k}: {line.strip()}" for p in sorted((ROOT / "mixsd_nb").rglob("*.py")) if p.relative_to(ROOT / "mixsd_nb").as_posix() not in declaring
             for k, line in enumerate(p.read_text().splitlines(), 1) if re.search(r"""\b(method|engine|module)\b["\]]* *(==|!=|in) *[("'\[]*["']""", line)]
    assert not found, "\n".join(found)


CELLS = ['''
from mixsd_nb import train
from mixsd_nb.corpora import CORPORA, Corpus, Schedule
from mixsd_nb.corpora.prompts import target
from mixsd_nb.methods import METHODS, TRAINED, Method
from mixsd_nb.methods.supervised import canonical_pairs
METHODS.add(Method("mine", "Mine", settings=TRAINED, fit="__main__:fit"))
CORPORA.add(Corpus("moons", "Moons", "__main__:build", Schedule(epochs=1, batch=2, period=1)))
''', '''
def build():
    row = lambda k: dict(id=f"planet-{k}", prompt=f"How many moons has planet {k}?", target=target(str(k)), answer=str(k), subject=f"planet {k}", statement=f"{k}")
    return dict(train=[row(k) for k in range(4)])
''', '''
def fit(run): return run.train_on(canonical_pairs(run))
''', '''
run = train.run(method="mine", dataset="moons", model=MODEL, suite="recall", n=1, max_new_tokens=2)
''', '''
unrelated = "1"
''', '''
def fit(run): return run.train_on(dict(list(canonical_pairs(run).items())[:3]))
''']


def test_a_method_and_a_corpus_of_a_notebook_work_and_a_change_of_their_code_is_noticed(home, tiny):
    "The cells are run by IPython, as in a notebook."
    first, unrelated, changed = [0, 1, 2, 3], [4, 3], [5, 3]
    (quiet, still, (warning,)), kept, finished = forked_python(home, f"""
import json, warnings
from IPython.core.interactiveshell import InteractiveShell
shell = InteractiveShell.instance(colors="NoColor")
shell.user_ns["MODEL"] = {tiny!r}
def told(*cells):
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        for k in cells: shell.run_cell({CELLS!r}[k]).raise_error()
    return [str(w.message) for w in found if "other code" in str(w.message)]
found, run = [told(*{first}), told(*{unrelated}), told(*{changed})], shell.user_ns["run"]
print(json.dumps([found, run.root.targets_kept.item(), run.finished]))""", plugins="")
    assert not quiet and not still and kept == 4 and finished
    assert "was made by other code than today's (__main__); to compute it again, remove its folder" in warning

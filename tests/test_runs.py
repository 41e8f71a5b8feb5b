"""The room runs across processes: equal bytes, kills at any moment, parameters of papermill, and two processes that share a run."""

import json
import os
import signal
import subprocess
import sys
import textwrap
import time
from importlib import import_module

import nbformat
import pytest
from helpers import papermill
from hypothesis import given, settings
from hypothesis import strategies as st

from mixsd_nb.runs import Config, ParameterError, find_stage, make_config, open_result

SCRIPT = """
import os, signal, sys
import numpy as np, xarray as xr
from mixsd_nb.runs import Stage, run as runs

class Demo(Stage):
    name = "demo"
    size: int
    k: int = 0

    def slug(self): return ""
    def compute(self, run): return tree(self)

def tree(config):
    words = dict(long_name="value", units="1")
    values = np.random.default_rng(config.k).random(config.size)
    values[::7] = np.nan
    root = xr.Dataset({"x": ("t", values, words)}, {"name": ("t", [f"row {i % 97}" for i in range(config.size)], words)},
                      dict(config=config.canonical()))
    child = xr.Dataset({"y": ("u", values[::2], words)})
    return xr.DataTree.from_dict({"/": root, "/child": child})

def die(*_, **__): os.kill(os.getpid(), signal.SIGKILL)
"""
MOMENTS = {
    "in compute": "Demo.compute = die; Demo(size=2000).run()",
    "half written": """
        write = xr.DataTree.to_netcdf
        def half(self, path, **options):
            write(self, path, **options)
            os.truncate(path, os.path.getsize(path) // 2)
            die()
        xr.DataTree.to_netcdf = half
        Demo(size=2000).run()""",
    "before fsync": """
        write = runs.write_result
        def patched(*a): os.fsync = die; return write(*a)
        runs.write_result = patched
        Demo(size=2000).run()""",
    "before replace": """
        write = runs.write_result
        def patched(*a): os.replace = die; return write(*a)
        runs.write_result = patched
        Demo(size=2000).run()""",
    "after replace": """
        write = runs.write_result
        def patched(*a): write(*a); die()
        runs.write_result = patched
        Demo(size=2000).run()""",
    "record half written": "os.replace = die; Demo(size=2000).run()",
}


def start(code, runs, **environment):
    return subprocess.Popen([sys.executable, "-c", SCRIPT + textwrap.dedent(code)], stdout=subprocess.PIPE,
                            stderr=subprocess.PIPE, text=True, env=os.environ | {"MIXSD_RUNS": str(runs)} | environment)


def finish(code, runs, **environment):
    process = start(code, runs, **environment)
    _, said = process.communicate(timeout=60)
    assert process.returncode == 0, said


def results(folder):
    return {path.parent.name: path.read_bytes() for path in folder.glob("*/result.nc")}


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    runs = tmp_path_factory.mktemp("runs")
    finish("Demo(size=2000).run()", runs)
    return results(runs)


def test_equal_data_are_equal_bytes(undisturbed, tmp_path):
    "Later, with another hash seed, and with memory that malloc fills with garbage."
    time.sleep(1.1)
    finish("Demo(size=2000).run()", tmp_path, PYTHONHASHSEED="7", MALLOC_PERTURB_="165", TZ="Asia/Tokyo")
    assert results(tmp_path) == undisturbed


@pytest.mark.parametrize("moment", MOMENTS)
def test_a_kill_leaves_all_or_nothing(moment, undisturbed, tmp_path):
    process = start(MOMENTS[moment], tmp_path)
    _, said = process.communicate(timeout=60)
    assert process.returncode == -signal.SIGKILL, said
    assert results(tmp_path) == (undisturbed if moment == "after replace" else {})
    finish("Demo(size=2000).run()", tmp_path)
    assert results(tmp_path) == undisturbed


def test_kills_at_any_moment(tmp_path):
    "A process that writes run after run is killed; every result that it left is complete and equals a second computation."
    code = """
        for k in range(10_000):
            Demo(size=20_000, k=k).run()
            print(k, flush=True)"""
    for done, delay in ((0, 0.02), (3, 0.005), (6, 0.05)):
        process = start(code, tmp_path / "a")
        while int(process.stdout.readline()) < done: pass
        time.sleep(delay)
        process.send_signal(signal.SIGKILL)
        process.communicate()
    left = results(tmp_path / "a")
    for folder in (tmp_path / "a").glob("*/"):
        assert (folder / "result.nc").exists() <= (len(open_result(folder)["child"].u) == 10_000 if folder.name in left else True)
    finish(f"for k in range({len(left) + 1}): Demo(size=20_000, k=k).run()", tmp_path / "b")
    again = results(tmp_path / "b")
    assert left and left.items() <= again.items()


def test_force_begins_again_and_a_kill_does_not_hide_it(tmp_path):
    finish("Demo(size=5).run()", tmp_path)
    folder, = tmp_path.glob("[!.]*")
    (folder / "checkpoint").write_text("of the first run")
    process = start("Demo.compute = die; Demo(size=5).run(force=True)", tmp_path)
    assert process.wait(60) == -signal.SIGKILL
    assert sorted(p.name for p in tmp_path.rglob("[!.]*")) == [folder.name, "run.json"]


def notebook(path):
    "A small stage notebook with the cells that every stage notebook has."
    cells = ["from mixsd_nb.runs import Config, notebook_config\nfrom pydantic import Field",
             "class Demo(Config):\n    lam: float = Field(0.5, ge=0, le=1)\n    model: str = 'lab-m'",
             "before = set(globals())", "lam: float = 0.5  # share\nmodel: str = 'lab-m'  # model",
             "config = notebook_config(Demo, before, globals())", "print('CONFIG', config.canonical())"]
    nb = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(c) for c in cells],
                                  metadata=dict(kernelspec=dict(name="python3", display_name="python3", language="python")))
    nb.cells[3].metadata["tags"] = ["parameters"]
    nbformat.write(nb, path)


@pytest.mark.parametrize(("flags", "sentence"), [
    (["-p", "lam", "1", "-p", "model", "8"], None),
    (["-p", "lamb", "0.9"], "unknown parameter lamb; did you mean lam?"),  # tests/test_train.py has a value out of its range
])
def test_papermill_parameters(flags, sentence, tmp_path):
    notebook(tmp_path / "stage.ipynb")
    ran = papermill("stage.ipynb", "out.ipynb", *flags, cwd=tmp_path)
    if sentence:
        assert ran.returncode != 0 and [line for line in ran.stderr.splitlines() if line.strip()][-1] == sentence
    else:
        assert ran.returncode == 0, ran.stderr
        assert r'CONFIG {\"lam\": 1.0, \"model\": \"8\"}' in (tmp_path / "out.ipynb").read_text()


BY_TWO = """
import sys, time
import xarray as xr
from mixsd_nb.runs import Stage

class Demo(Stage):
    name = "demo"

    def slug(self): return ""

    def compute(self, run):
        with open(sys.argv[1], "a") as file: file.write("computed\\n")
        time.sleep(2)
        return xr.DataTree(xr.Dataset({"x": ((), 1.0, dict(long_name="x", units="1"))}))

assert Demo().run().result.x == 1
"""


def test_a_run_that_two_processes_want_is_computed_once(tmp_path):
    words = [sys.executable, "-c", BY_TWO, str(tmp_path / "log")]
    both = [subprocess.Popen(words, env=os.environ | {"MIXSD_RUNS": str(tmp_path / "runs")}) for _ in range(2)]
    assert [process.wait(timeout=120) for process in both] == [0, 0]
    assert (tmp_path / "log").read_text() == "computed\n"


STAGES = ["train", "generate", "evaluate", "nll", "fisher", "errors", "pretrain", "speed", "reference", "forgetting"]


def stage_of(name):
    "The class of a stage, also of the one in a room."
    import_module("mixsd_nb.analysis.divergence")  # declares one of them
    return find_stage(name)


def fields_of(wanted):
    "Every field of every stage whose type allows a number of some form: `count`, `count | None`, or a list of counts."
    return [(stage, name) for stage in STAGES for name, field in stage_of(stage).model_fields.items()
            if wanted in str(field.annotation) and "bool" not in str(field.annotation)
            and "str" not in str(field.annotation)]


NUMBERS = fields_of("int") + fields_of("float")


def test_the_stages_have_numbers(): assert len(NUMBERS) > 50


@pytest.mark.parametrize(("stage", "name"), sorted(set(NUMBERS)))
@pytest.mark.parametrize("flag", [True, False])
def test_a_flag_is_no_number_anywhere(stage, name, flag):
    cls = stage_of(stage)
    several = any(word in str(cls.model_fields[name].annotation) for word in ("tuple", "list"))
    for value in [[flag], [20, flag]] if several else [flag]:
        with pytest.raises(ParameterError, match=rf"^{name} must be .*got ") as caught: make_config(cls, **{name: value})
        assert "\n" not in str(caught.value)


@pytest.mark.parametrize("stage", [s for s in STAGES if "seed" in stage_of(s).model_fields])
@given(seed=st.integers(max_value=-1) | st.integers(min_value=2**63))
@settings(max_examples=20, deadline=None)
def test_a_seed_is_a_number_that_a_result_can_store(stage, seed):
    with pytest.raises(ParameterError, match=rf"^seed must be between 0 and {2**63 - 1}, got {seed}$"):
        make_config(stage_of(stage), seed=seed)


NONSENSE = [
    ("train", dict(checkpoints=[-1]), "checkpoints must be a list of whole numbers, each at least 1 or none, got [-1]"),
    ("train", dict(checkpoints=[20, 0]), "checkpoints must be a list of whole numbers, each at least 1 or none, got [20, 0]"),
    ("train", dict(checkpoints=[20, 60, 20]), "checkpoints must be different steps, got 20, 60, 20"),
    ("train", dict(method="opsd", temperature=1e-320), "temperature must be 0, or at least 0.001, got 9.99989e-321"),
    ("generate", dict(temperature=5e-4), "temperature must be 0, or at least 0.001, got 0.0005"),
    ("generate", dict(shards=10**9), "shards must be between 0 and 1000, got 1000000000"),
    ("pretrain", dict(save_every=0), "save_every must be at least 1, got 0"),
    ("pretrain", dict(start="no-such"), "start must be lab-s, lab-m, a model folder or a hub id"),
    ("evaluate", dict(baseline="a/.."), "baseline must be lab-s, lab-m, a model folder or a hub id"),
    *[("train", dict(model=name), "model must be lab-s, lab-m, a model folder or a hub id owner/name, got")
      for name in ("a/..", "../a", "a/.b", ".a/b", "-a/b", "a/b..c", "a//b", "a/")],
]


@pytest.mark.parametrize(("stage", "parameters", "sentence"), NONSENSE)
def test_nonsense_is_refused_by_name(stage, parameters, sentence):
    with pytest.raises(ParameterError) as caught: make_config(stage_of(stage), **parameters)
    assert str(caught.value).startswith(sentence) and "\n" not in str(caught.value)


@pytest.mark.parametrize("temperature", [0, 0.001, 0.6, 1, None])
def test_usual_temperatures_are_allowed(temperature):
    for stage in ("train", "generate"): make_config(stage_of(stage), temperature=temperature)


def test_options_of_a_method_have_the_type_of_their_defaults():
    from mixsd_nb.methods import METHODS, Method
    METHODS.add(Method("demo", "demo", "k", "o", fit="methods.supervised:fit_canonical", settings=("options",), options=dict(beta=0.5)))
    try:
        make = lambda value: make_config(stage_of("train"), method="demo", options=dict(beta=value))
        assert make(1).options == dict(beta=1.0)
        for value in (True, "x", [1], None):
            with pytest.raises(ParameterError, match=r"options.beta. must be a number, got "): make(value)
    finally: METHODS.remove("demo")


def config_classes(cls=Config):
    "Every class of configurations of the package with a mapping among its fields."
    for name in ("inject", "figures", "explore", "sweep", "cluster.grid", "cluster.resources"): import_module(f"mixsd_nb.{name}")
    found = [cls] * any("dict" in str(field.annotation) for field in cls.model_fields.values())
    return found + [part for child in cls.__subclasses__() if child.__module__.startswith("mixsd_nb") for part in config_classes(child)]


MAPPINGS = sorted({(cls, name) for cls in map(stage_of, STAGES) for name, field in cls.model_fields.items() if "dict" in str(field.annotation)}
                  | {(cls, name) for cls in config_classes() for name, field in cls.model_fields.items() if "dict" in str(field.annotation)}, key=str)


@pytest.mark.parametrize(("cls", "name"), MAPPINGS, ids=lambda part: getattr(part, "__name__", part))
def test_every_mapping_is_taken_as_json_text(cls, name):
    "As papermill's -p passes it: with the same outcome as the mapping itself, whether it is allowed or not."
    def outcome(value):
        try: return getattr(make_config(cls, **{name: value}), name)
        except ParameterError as e: return str(e).split(", got ")[0]
    for value in ({}, {"seed": 3}, {"replace_gt": True}, {"domains": 2}, {"k": {"l": [1, None]}}): assert outcome(json.dumps(value)) == outcome(value)
    if "str" not in str(cls.model_fields[name].annotation).replace("dict[str", ""):
        assert outcome('{"domains": 2') != {} and outcome("[1]") != [1]


def test_options_of_a_method_are_taken_as_json_text():
    config = make_config(stage_of("train"), options='{"replace_gt": true}', dataset_options='{"domains": 2}')
    assert config.options["replace_gt"] is True and config.dataset.startswith("kgfact-")
    with pytest.raises(ParameterError, match=r'^options must be a mapping, got \{"replace_gt": true$'):
        make_config(stage_of("train"), options='{"replace_gt": true')

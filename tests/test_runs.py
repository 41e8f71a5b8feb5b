"The room runs across processes: equal bytes, parameters of papermill, values that are refused, and two processes that share a run."

import json
import os
import signal
import subprocess
import sys
import textwrap
import time
import warnings
from importlib import import_module

import nbformat
import pytest
from helpers import forked, papermill, run_program, stage_of, until
from hypothesis import given, settings, strategies as st

from mixsd_nb.methods import METHODS, Method
from mixsd_nb.runs import Config, ParameterError, make_config, open_result, try_lock, write_json
from mixsd_nb.runs.provenance import hub_commits, other_versions
from mixsd_nb.runs.storage import is_held

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


def finish(code, runs):
    process = forked(run_program, SCRIPT + textwrap.dedent(code), MIXSD_RUNS=str(runs))
    process.join(60)
    return process.exitcode


def results(folder):
    return {path.parent.name: path.read_bytes() for path in folder.glob("*/result.nc")}


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    runs = tmp_path_factory.mktemp("runs")
    assert finish("Demo(size=2000).run()", runs) == 0
    return results(runs)


def test_equal_data_are_equal_bytes(undisturbed, tmp_path):
    "Later, with another hash seed, and with memory that malloc fills with garbage."
    time.sleep(1.1)
    environment = dict(MIXSD_RUNS=str(tmp_path), PYTHONHASHSEED="7", MALLOC_PERTURB_="165", TZ="Asia/Tokyo")
    subprocess.run([sys.executable, "-c", SCRIPT + "Demo(size=2000).run()"], env=os.environ | environment, check=True)
    assert results(tmp_path) == undisturbed


@pytest.mark.parametrize("moment", MOMENTS)
def test_a_kill_leaves_all_or_nothing(moment, undisturbed, tmp_path):
    assert finish(MOMENTS[moment], tmp_path) == -signal.SIGKILL
    assert results(tmp_path) == (undisturbed if moment == "after replace" else {})
    assert finish("Demo(size=2000).run()", tmp_path) == 0 and results(tmp_path) == undisturbed


def test_kills_at_any_moment(tmp_path):
    "A process that writes run after run is killed; every result that it left is complete and equals a second computation."
    for done, delay in ((1, 0.02), (4, 0.005), (7, 0.05)):
        process = forked(run_program, SCRIPT + "for k in range(10_000): Demo(size=20_000, k=k).run()", MIXSD_RUNS=str(tmp_path / "a"))
        until(lambda: len([*tmp_path.glob("a/*/result.nc")]) >= done, pause=0.001)
        time.sleep(delay)
        process.kill()
        process.join()
    left = results(tmp_path / "a")
    for folder in (tmp_path / "a").glob("*/"):
        assert (folder / "result.nc").exists() <= (len(open_result(folder)["child"].u) == 10_000 if folder.name in left else True)
    assert finish(f"for k in range({len(left) + 1}): Demo(size=20_000, k=k).run()", tmp_path / "b") == 0
    again = results(tmp_path / "b")
    assert left and left.items() <= again.items()


def test_force_begins_again_and_a_kill_does_not_hide_it(tmp_path):
    assert finish("Demo(size=5).run()", tmp_path) == 0
    folder, = tmp_path.glob("[!.]*")
    (folder / "checkpoint").write_text("of the first run")
    assert finish("Demo.compute = die; Demo(size=5).run(force=True)", tmp_path) == -signal.SIGKILL
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


def test_papermill_parameters(tmp_path):
    "They have the types of their fields; tests/test_train.py and tests/test_explore.py have wrong ones."
    notebook(tmp_path / "stage.ipynb")
    ran = papermill("stage.ipynb", "out.ipynb", *"-p lam 1 -p model 8".split(), cwd=tmp_path)
    assert ran.returncode == 0, ran.stderr
    assert r'CONFIG {\"lam\": 1.0, \"model\": \"8\"}' in (tmp_path / "out.ipynb").read_text()


BY_TWO = SCRIPT + """
import time
import warnings
def compute(self, run):
    with open(os.environ["LOG"], "a") as file: file.write("computed\\n")
    time.sleep(2)
    return tree(self)
Demo.compute = compute
assert len(Demo(size=5).run().result.x) == 5
"""


def test_a_run_that_two_processes_want_is_computed_once(tmp_path):
    both = [forked(run_program, BY_TWO, MIXSD_RUNS=str(tmp_path / "runs"), LOG=str(tmp_path / "log")) for _ in range(2)]
    for process in both: process.join(120)
    assert [process.exitcode for process in both] == [0, 0] and (tmp_path / "log").read_text() == "computed\n"


STAGES = ["train", "generate", "evaluate", "nll", "fisher", "errors", "pretrain", "speed", "reference", "forgetting"]


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
    with pytest.raises(ParameterError, match=rf"^{name} must be .*got ") as caught: make_config(cls, **{name: flag})
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("stage", [s for s in STAGES if "seed" in stage_of(s).model_fields])
@given(seed=st.integers(max_value=-1) | st.integers(min_value=2**63))
@settings(max_examples=20, deadline=None)
def test_a_seed_is_a_number_that_a_result_can_store(stage, seed):
    with pytest.raises(ParameterError, match=rf"^seed must be between 0 and {2**63 - 1}, got {seed}$"):
        make_config(stage_of(stage), seed=seed)


@pytest.mark.parametrize("temperature", [0, 0.001, 0.6, 1, None])
def test_usual_temperatures_are_allowed(temperature):
    for stage in ("train", "generate"): make_config(stage_of(stage), temperature=temperature)


def test_options_of_a_method_have_the_type_of_their_defaults():
    METHODS.add(Method("demo", "demo", "k", "o", fit="methods.supervised:fit_canonical", settings=("options",), options=dict(beta=0.5)))
    try:
        make = lambda value: make_config(stage_of("train"), method="demo", options=dict(beta=value))
        assert make(1).options == dict(beta=1.0)
        for value in (True, "x", [1], None):
            with pytest.raises(ParameterError, match=r"options.beta. must be a number, got "): make(value)
    finally: METHODS.remove("demo")


def config_classes(cls=Config):
    "Every class of configurations of the package with a mapping among its fields."
    for name in ("inject", "figures", "explore", "sweep", "cluster.grid"): import_module(f"mixsd_nb.{name}")
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
    for value in ({}, {"seed": 3}, {"consistent": True}, {"domains": 2}, {"k": {"l": [1, None]}}): assert outcome(json.dumps(value)) == outcome(value)
    if "str" not in str(cls.model_fields[name].annotation).replace("dict[str", ""):
        assert outcome('{"domains": 2') != {} and outcome("[1]") != [1]


def test_options_of_a_method_are_taken_as_json_text():
    config = make_config(stage_of("train"), options='{"consistent": true}', dataset_options='{"domains": 2}')
    assert config.options["consistent"] is True and config.dataset.startswith("kgfact-")
    with pytest.raises(ParameterError, match=r'^options must be JSON, with double quotes around names and texts, got \{"consistent": true$'):
        make_config(stage_of("train"), options='{"consistent": true')


def test_a_lock_keeps_other_processes_out_until_its_process_ends(tmp_path, monkeypatch):
    code = f"from pathlib import Path\nfrom mixsd_nb.runs import try_lock\nwith try_lock(Path({str(tmp_path / 'lock')!r})) as free: print(free, flush=True); input()"
    other = subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert other.stdout.readline() == "True\n"
    with try_lock(tmp_path / "lock", patience=0.1) as free: assert not free
    assert is_held(tmp_path / "lock") and not is_held(tmp_path / "none")
    other.kill()
    other.communicate()
    with monkeypatch.context() as patch:
        patch.setattr(os, "open", lambda *_: 1 / 0)  # as locks are opened, for writing
        assert not is_held(tmp_path / "lock")
    with try_lock(tmp_path / "lock") as free: assert free


@pytest.mark.parametrize(("changed", "told"), [(dict(numpy="1.0"), "numpy 1.0, now"), ({"math-verify": "0.1"}, "math-verify 0.1, now"), (dict(xarray="1.0"), ""), ({}, "")])
def test_other_versions_of_packages_are_told(changed, told, tmp_path, monkeypatch):
    monkeypatch.setenv("MIXSD_RUNS", str(tmp_path))
    config = make_config(stage_of("generate"), model="lab-s")
    record = config.provenance()
    write_json(config.folder / "run.json", record | dict(packages=record["packages"] | changed))
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        config._warn_if_stale(config.open_run(config.folder))
    assert [told in str(w.message) for w in said] == [True] * bool(told)


def test_another_commit_of_a_model_of_the_hub_is_told(monkeypatch):
    import huggingface_hub
    monkeypatch.setattr(huggingface_hub, "try_to_load_from_cache", lambda name, file: f"/hub/snapshots/{len(name)}/{file}" if "a" in name else None)
    assert hub_commits(("owner/a", "owner/abc", "owner/x", "lab-s", "Say yes/no.", "x/" * 300)) == {"owner/a": "7", "owner/abc": "9"}
    now = dict(packages={}, commits=hub_commits(("owner/a",)))
    assert other_versions(dict(commits={"owner/a": "6"}), now) == ["owner/a 6, now 7"] and not other_versions(dict(commits={"owner/a": "7"}), now) + other_versions({}, now)

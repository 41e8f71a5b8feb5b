"""Sweeps on this machine: cells with every kind of failure, sweeps that share cells, and sweeps that are killed."""

import contextlib
import json
import math
import os
import shlex
import signal
import string
import subprocess
import sys
import threading
import time
from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace
from typing import ClassVar

import pandas as pd
import psutil
import pytest
import xarray as xr
import yaml
from helpers import quick_notebook, until
from hypothesis import given, settings, strategies as st
from submitit.slurm.slurm import _make_sbatch_string

from mixsd_nb import sweep
from mixsd_nb.cluster import attempt, local, queue, slurm, status
from mixsd_nb.cluster.attempt import list_attempts, run_attempt
from mixsd_nb.cluster.grid import Grid, GridOutputs, find_notebook, list_grids, make_cell, read_grid
from mixsd_nb.cluster.resources import Resources
from mixsd_nb.runs import (ParameterError, Stage, find_stage, make_config, open_result, read_json, remove_run, runs_root,
                           write_json, write_result)
from mixsd_nb.sweep import Sweep

ROOT = Path(__file__).resolve().parents[1]
PATIENCE = 600  # seconds for any one thing to happen

@pytest.fixture
def desk(tmp_path, monkeypatch):
    "A folder with runs, the notebook, and a behaviour for each seed; returns a function that makes grids."
    monkeypatch.setenv("MIXSD_RUNS", str(tmp_path / "runs"))
    monkeypatch.setenv("BEHAVIOUR", str(tmp_path))
    quick_notebook(tmp_path / "generate.ipynb")

    def make(*behaviours, **resources):
        for seed, text in enumerate(behaviours): (tmp_path / str(seed)).write_text(text)
        axes = dict(seed=list(range(len(behaviours))))
        grid = dict(notebook=str(tmp_path / "generate.ipynb"), axes=axes, resources=resources)
        (tmp_path / "grid.yaml").write_text(yaml.safe_dump(grid))
        return Sweep(tmp_path / "grid.yaml")
    return make


def command(*arguments):
    return subprocess.Popen([sys.executable, "-m", "mixsd_nb.sweep", *map(str, arguments)], cwd=ROOT,
                            stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def computations(cell):
    "The list of computations of a cell's run, one word for each."
    return (cell.run_folder / "made").read_text().split()


FAILING = {
    "": "done",
    "1 / 0": "raised",
    "raise MemoryError('no room')": "out of memory",
    "os.kill(os.getpid(), signal.SIGKILL)": "dead kernel",
    "os.kill(os.getppid(), signal.SIGKILL); time.sleep(600)": "killed",
}


@pytest.mark.slow
def test_each_failure_has_its_name_and_its_rule(desk, tmp_path):
    """A cell that fails stops no other one; the command's exit code is 1, and it names the log of each.

    After that, a command begins only the cells that their rule allows."""
    failing = desk(*FAILING)
    process = command("run", tmp_path / "grid.yaml", "--workers", 2)
    output, error = process.communicate(timeout=PATIENCE)
    assert process.returncode == 1, error
    assert failing.status().state.tolist() == list(FAILING.values()), failing.status().to_string()
    for cell in failing.cells[1:]: assert str(list_attempts(cell)[-1] / "log.txt") in output
    first = list_attempts(failing.cells[1])[0]
    assert "ZeroDivisionError" in (log := (first / "log.txt").read_text()) and "over TCP" not in log
    assert read_json(first / "end.json")["message"] == "ZeroDivisionError: division by zero"
    for seed in range(5): (tmp_path / str(seed)).write_text("")
    table = failing.run(workers=2)
    assert table.state.tolist() == ["done", "raised", "out of memory", "done", "done"]
    table = failing.retry(workers=2)
    assert set(table.state) == {"done"} and table.attempts.tolist() == [1, 2, 2, 2, 2] and sweep.report(table) == 0
    assert [computations(cell) for cell in failing.cells] == [["once"]] * 5
    assert {float(tree.x) for tree in failing.results().values()} == {0, 1, 2, 3, 4}


def test_a_cell_continues_after_its_time_limit_while_it_makes_progress(desk, monkeypatch):
    # The first attempt hangs and ignores the signal to end; only then do ten minutes pass.
    hang = "if not (folder / 'half').exists():\n    (folder / 'half').touch()\n    os.kill(os.getpid(), signal.SIGSTOP)"
    late = desk(hang, minutes=10)
    half, clock = late.cells[0].run_folder / "half", time.monotonic
    hangs = lambda: half.exists() and not list_attempts(late.cells[0])[1:]
    monkeypatch.setattr(attempt, "time", SimpleNamespace(**{**vars(time), "monotonic": lambda: clock() + 601 * hangs()}))
    table = late.run()
    assert table.state.tolist() == ["done"] and computations(late.cells[0]) == ["once"]
    assert [read_json(a / "end.json")["kind"] for a in list_attempts(late.cells[0])] == ["timeout", "done"]


@pytest.mark.slow
def test_two_sweeps_of_one_grid(desk, tmp_path):
    "No cell runs twice, none is lost, and shared work is computed once."
    twice = desk(*["time.sleep(0.3)"] * 4)
    sweeps = [command("run", tmp_path / "grid.yaml", "--workers", 2) for _ in range(2)]
    for process in sweeps: assert process.communicate(timeout=PATIENCE) and process.returncode == 0
    assert [computations(cell) for cell in twice.cells] == [["once"]] * 4
    assert twice.status().attempts.tolist() == [1] * 4
    assert next((tmp_path / "runs").glob("shared-*/made")).read_text().split() == ["once"]


def test_a_killed_sweep_leaves_nothing_behind_and_continues(desk, tmp_path):
    "SIGKILL while a cell runs: notebook and kernel end too, the lock is free, and the same command continues."
    lost = desk("(folder / 'kernel').write_text(str(os.getpid())); time.sleep(600)", "")
    process = command("run", tmp_path / "grid.yaml", "--workers", 1)
    read_pid = lambda: "".join(path.read_text() for path in (tmp_path / "runs").glob("*/kernel"))
    pid = int(until(read_pid, PATIENCE, "the kernel"))
    family = [psutil.Process(pid), *psutil.Process(process.pid).children(recursive=True)]
    assert lost.status().state.tolist() == ["running", "pending"]
    process.send_signal(signal.SIGKILL)
    process.communicate()
    alive = lambda: any(p.is_running() and p.status() != psutil.STATUS_ZOMBIE for p in family)
    until(lambda: not alive(), PATIENCE, "the end of notebook and kernel")
    assert lost.status().state.tolist() == ["killed", "pending"]
    (tmp_path / "0").write_text("")
    assert set(lost.run().state) == {"done"}


def test_cancel_ends_running_cells_and_skips_pending_ones(desk, tmp_path):
    waiting = desk("(folder / 'begun').touch(); time.sleep(600)", "")
    tables = []
    thread = threading.Thread(target=lambda: tables.append(waiting.run(workers=1)))
    thread.start()
    until(lambda: (waiting.cells[0].run_folder / "begun").exists(), PATIENCE, "the first cell")
    Sweep(tmp_path / "grid.yaml").cancel()
    thread.join(PATIENCE)
    assert tables[0].state.tolist() == ["cancelled"] * 2 and tables[0].attempts.tolist() == [1, 0]
    (tmp_path / "0").write_text("")
    assert set(waiting.retry().state) == {"cancelled"}
    assert set(waiting.retry(kinds=["cancelled"]).state) == {"done"}


def test_a_result_made_by_hand_counts(desk):
    "A cell is done when its result exists, no matter who computed it; a removed result is computed again."
    from mixsd_nb.generate import GenerateConfig
    quick = desk("")
    table = quick.run()
    folder = quick.cells[0].run_folder
    tree = open_result(folder)
    remove_run(folder)
    assert quick.status().state.tolist() == ["pending"]

    class ByHand(GenerateConfig):
        def compute(self, run): return tree
    assert ByHand().run().folder == folder
    assert quick.status().state.tolist() == ["done"] and table.attempts.tolist() == quick.status().attempts.tolist()


def test_plugins_are_loaded_in_every_process(desk, tmp_path, monkeypatch):
    "A corpus that a plugin declares is known to the command and to the kernel of the cell."
    desk("")
    (tmp_path / "toy_plugin.py").write_text("from dataclasses import replace\nfrom mixsd_nb.corpora import CORPORA\n"
                                            "CORPORA.add(replace(CORPORA['kgfact-small'], name='toy-corpus'))\n")
    grid = dict(notebook=str(tmp_path / "generate.ipynb"), axes=dict(dataset=["toy-corpus"]))
    (tmp_path / "grid.yaml").write_text(yaml.safe_dump(grid))
    monkeypatch.setenv("MIXSD_PLUGINS", "toy_plugin")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=os.pathsep)
    process = command("run", tmp_path / "grid.yaml")
    output, error = process.communicate(timeout=PATIENCE)
    assert process.returncode == 0, output + error
    assert len(list((tmp_path / "runs").glob("generate-toy-corpus-*/result.nc"))) == 1


@pytest.mark.slow
def test_a_cell_on_two_nodes(tiny, tmp_path, monkeypatch):
    "Two tasks as Slurm starts them on two nodes: both train, the first one measures."
    monkeypatch.setenv("MIXSD_RUNS", str(tmp_path))
    cell = Sweep(dict(notebook="train", fixed=dict(method="sft", model=tiny, n=2, epochs=1, max_new_tokens=8, checkpoints=[]))).cells[0]
    task = "import json, sys; from mixsd_nb.cluster import slurm; print(slurm.run_task(json.loads(sys.argv[1]), 0, 10))"
    nodes = [dict(SLURM_JOB_ID="77", SLURM_JOB_NUM_NODES="2", SLURM_PROCID=str(rank)) for rank in range(2)]
    command = [sys.executable, "-c", task, json.dumps(asdict(cell))]
    tasks = [subprocess.Popen(command, env=os.environ | node, cwd=ROOT, stdout=subprocess.PIPE, text=True)
             for node in nodes]
    outputs = [process.communicate(timeout=PATIENCE)[0] for process in tasks]
    log = (list_attempts(cell)[0] / "log.txt").read_text()
    assert [text.split()[-1] for text in outputs] == ["done", "trained"], log
    assert len(list_attempts(cell)) == 1 and read_json(cell.run_folder / "job.json")["processes"] == 2


def leave(name, parameters):
    "Write a finished run into a folder of this name, with the files that an axis over runs reads."
    folder = Path(os.environ["MIXSD_RUNS"]) / name
    folder.mkdir(parents=True)
    write_json(folder / "run.json", dict(config=parameters))
    (folder / "targets.parquet").write_bytes(name.encode())
    weights = ROOT / "mixsd_nb/data" / ("lab-s", "lab-m")[len(os.listdir(folder.parent)) % 2]  # neighbours differ
    (folder / "checkpoint-100").symlink_to(weights)
    variable = lambda name, value: ("step", [value], dict(long_name=name, units="1"))
    data = dict(x=variable("x", len(os.listdir(folder.parent))))
    coords = dict(step=variable("step", 20)) | {dim: (dim, [name], dict(long_name=dim, units="1")) for dim in ("dataset", "model", "recipe")}
    write_result(xr.DataTree(xr.Dataset(data, coords, dict(config=json.dumps(parameters)))), folder)


@pytest.mark.parametrize("name", list_grids())
def test_shipped_grids_are_sound(name, monkeypatch, tmp_path):
    "An axis over the outputs of another grid has the finished cells of that grid, and no other run."
    monkeypatch.setenv("MIXSD_RUNS", str(tmp_path / "runs"))
    axes = [axis for axis in read_grid(name)[1].axes.values() if isinstance(axis, GridOutputs)]
    for axis in axes:
        further = [a for source in axis.sources for a in read_grid(source)[1].axes.values() if isinstance(a, GridOutputs)]
        if further:  # the outputs of a grid that needs outputs itself
            with pytest.raises(ParameterError, match=f"needs outputs of {further[0].sources[0]}, .* none of its .* cells is finished"): Sweep(name)
            return
        sources = [Sweep(source) for source in axis.sources]
        count = sum(len(source.cells) for source in sources)
        with pytest.raises(ParameterError, match=f"none of its {count} cells is finished"): Sweep(name)
        if axis.best: return  # tests/test_best_rates.py has runs with scores
        source, = sources
        parameters = [make_config(source.stage, **cell.parameters).model_dump(mode="json") for cell in source.cells]
        for cell, values in zip(source.cells[1:3], parameters[1:3]): leave(cell.name, values)
        leave(f"{source.stage.name}-x-0123456789", parameters[0])
    shipped = Sweep(name)
    assert len(shipped.preview()) == len({cell.hash for cell in shipped.cells}) > 1
    lists = math.prod(len(axis) for axis in read_grid(name)[1].axes.values() if isinstance(axis, list))
    assert len(shipped.cells) == 2 * lists or not axes


def test_files_are_like_files_beside_them(tmp_path, monkeypatch):
    (tmp_path / "below").mkdir()
    (tmp_path / "below/base.yaml").write_text(
        "{notebook: train, fixed: {n: 7}, axes: {lr: [1e-3, 3e-4, 1.0e-4], method: [sft, mixsd]}, "
        "exclude: [{lr: [0.001, 1.0e-4], method: sft}]}")
    (tmp_path / "below/more.yaml").write_text("{like: base.yaml, fixed: {model: lab-s}}")
    (tmp_path / "below/one.yaml").write_text("like: two.yaml")
    (tmp_path / "below/two.yaml").write_text("like: one.yaml")
    monkeypatch.chdir(tmp_path)
    cells = Sweep("below/more.yaml").cells
    values = [(cell.parameters["lr"], cell.parameters["method"]) for cell in cells]
    assert values == [(0.001, "mixsd"), (3e-4, "sft"), (3e-4, "mixsd"), (1e-4, "mixsd")]
    assert {(c.parameters["n"], c.parameters["model"]) for c in cells} == {(7, "lab-s")}
    with pytest.raises(ParameterError, match="grid one.yaml is `like` itself"): Sweep("below/one.yaml")


def test_an_error_of_the_watcher_stops_no_other_cell(desk, monkeypatch, capsys):
    full = desk("", "")
    original = local.run_cell

    def failing(cell, *arguments, **options):
        if cell == full.cells[0]: raise OSError("no space left on device")
        return original(cell, *arguments, **options)
    monkeypatch.setattr(local, "run_cell", failing)
    assert full.run(workers=1).state.tolist() == ["pending", "done"]
    assert "no space left on device" in capsys.readouterr().err


def test_slurm_is_asked_once_about_a_job_that_is_gone(desk, monkeypatch):
    "Slurm forgets a job after a while; a cancelled cell stays cancelled."
    lost = desk("", "")
    for cell in lost.cells: write_json(cell.folder / "submitted.json", dict(job="5_0", after=0, log="slurm.log"))
    monkeypatch.setattr(status.Queue, "jobs", {})
    monkeypatch.setattr(status, "classify_job", lambda job, *_: ("cancelled", f"job {job} ended as CANCELLED"))
    before = lost.status()
    monkeypatch.setattr(status, "classify_job", lambda *_: pytest.fail("Slurm was asked again"))
    assert lost.status().equals(before) and set(before.state) == {"cancelled"}
    assert set(before.message) == {"job 5_0 ended as CANCELLED before the cell began"}


def test_a_long_wait_asks_slurm_less_often(monkeypatch):
    "A day is watched with 1,500 tables instead of 43,200, and the first half hour as closely as a person would."
    now, pauses = [0.0], []

    def sleep(seconds):
        pauses.append(seconds)
        now[0] += seconds
    monkeypatch.setattr(status, "time", SimpleNamespace(monotonic=lambda: now[0], sleep=sleep))
    day = lambda: pd.DataFrame(dict(state=["queued" if now[0] < 24 * 3600 else "done"], message="", log=""))
    assert status.watch_table(day, every=2).state.tolist() == ["done"]
    assert pauses[0] == 2 and max(pauses) == 60 and len(pauses) < 1600


def test_progress_counts_wherever_it_is_made(desk, tmp_path):
    "A cell that mixes for longer than its limit makes progress though it writes no file; one that hangs does not."
    start = ("from mixsd_nb.runs import report_progress\n(folder / 'logs').mkdir(parents=True, exist_ok=True)\n"
             "(folder / f'logs/{time.time()}').touch()\n")
    mixing = desk(start + "report_progress('mixing', 5, 9); time.sleep(600)")
    cell = mixing.cells[0]
    further = start + "report_progress('mixing', 6, 9); time.sleep(600)"
    for progress, behaviour in [(True, None), (False, None), (True, further)]:
        if behaviour: (tmp_path / "0").write_text(behaviour)
        stop = lambda: "timeout" if (list_attempts(cell)[-1] / "progress.json").exists() else ""
        assert run_attempt(cell, environment={}, stop_reason=stop)["progress"] == progress


MISTAKES = {
    "notebook: train\nfixed: {lamb: 0.5}": "unknown parameter lamb; did you mean lam?",
    "notebook: train\naxes: {lam: [0.3, 1.5]}": "lam must be between 0 and 1, got 1.5",
    "notebook: train\nresources: {gpu: 1}": "unknown parameter gpu; did you mean gpus?",
    "notebook: evaluate\nresources: {nodes: 2}": "nodes must be 1, got 2: evaluate runs on one node",
    "notebook: train\naxes: {lam: [0.3, 0.5]}\nexclude: [{lam: 0.7}]":
        "exclude matches no combination of the axes: {'lam': 0.7}",
    "notebook: train\nfixed: {force: true}": "force is not a parameter of a cell",
    "notebook: train\nadjust: [{when: {seed: 0}, resources: {gpu: 1}}]": "unknown parameter gpu; did you mean gpus?",
    "notebook: train\nadjust: [{when: {seed: 0}, resources: {at_once: 1}}]": "at_once must be in the resources of the grid",
    "notebook: train\nadjust: [{when: {seed: 0}, resources: 5}]": "resources must be a mapping, got 5",
    "notebook: train\nadjust: [{when: {seed: 0}}]": "adjust must be a list of mappings with the keys when, and then or resources",
    "notebook: trian": "stage must be the name of a stage or the file of its notebook, got trian",
    "notebook: no-such/train.ipynb": "got no-such/train.ipynb; there is no no-such/train.ipynb",
    f"notebook: {'x' * 5000}": "stage must be the name of a stage or the file of its notebook, got xxx",
    "notebook: train\nfixed: [0.5]": "fixed must be a mapping, got [0.5]",
    "notebook: train\nfixed: {cls: 1}": "unknown parameter cls",
    "cls: 1": "unknown parameter cls",
    "notebook: train\n1: 2": "a grid must have names as keys, got 1",
    "notebook: train\nfixed: {1: 2}": "fixed must have names as keys, got 1",
    "notebook: train\naxes: {lr: 5}": "axis lr must be a list of values or a mapping with the key of, got 5",
    "notebook: train\naxes: {lr: {off: x}}": "axis lr must be a list of values or a mapping with the key of",
    "notebook: train\naxes: {lr: {of: x, fiel: y}}": "unknown parameter fiel; did you mean file?",
    "notebook: train\naxes: {lr: [{1: 2}]}": "a value of axis lr must have names as keys, got 1",
    "notebook: train\nexclude: {lam: 1}": "exclude must be a list of mappings, got {'lam': 1}",
    "notebook: train\nexclude: [5]": "a rule of exclude must be a mapping, got 5",
    "notebook: train\nresources: 5": "resources must be a mapping, got 5",
    "notebook: train\nresources: {memory: 1e999}": "memory must be a number between 0 and 1e+06, got 1e999",
    "notebook: train\nresources: {partition: on}": "partition must be a string, got True",
    "notebook: train\naxes: {%s}" % ", ".join(f"{x}: [1, 2, 3, 4, 5, 6, 7, 8, 9, 10]" for x in "abcdefghij"):
        "the axes must have at most 10,000 combinations, got 10,000,000,000",
    "notebook: train\nlike: [quick-lab, quick-lab]": "like must have each grid once, got quick-lab 2 times",
    "like: {a: b}": "like must be a grid or a list of grids, got {'a': 'b'}",
    f"like: {'x' * 5000}": "grid must be a file or the name of a shipped grid, got xxx",
    "like: grid.yaml": "grid grid.yaml is `like` itself",
    "notebook: nll\naxes: {targets: {of: GRID}}": "has an axis over its own outputs",
    "notebook: [": "grid.yaml, line 1: while parsing a flow node",
    "notebook: train\nnotebook: nll": "grid.yaml, line 2: notebook is given twice",
    "notebook: train\nfixed: {seed: 010}": "grid.yaml, line 2: 010 is not a decimal number",
    "notebook: train\nresources: {minutes: 1:30}": "grid.yaml, line 2: 1:30 is not a decimal number",
    "notebook: train\naxes:\n  lr: [1.0, .inf]": "grid.yaml, line 3: .inf is not a finite number",
    "notebook: train\nfixed: {lr: .nan}": "grid.yaml, line 2: .nan is not a finite number",
    "fixed: &a {options: *a}": "grid.yaml, line 1: *a contains itself",
    "fixed: " + "[" * 1001: "grid.yaml, line 1: the nesting is deeper than 20 levels",
    "a0: &a0 [x]\n" + "".join(f"a{k}: &a{k} [{', '.join([f'*a{k - 1}'] * 10)}]\n" for k in range(1, 15)):
        "grid.yaml, line 5: the content has more than 20,000 values",
    "axes: {lr: [" + "1, " * 300_000 + "1]}": "grid.yaml, line 1: the content has more than 20,000 values",
    "notebook: !!python/name:os.system": "grid.yaml, line 1: tags such as",
    "- train": "must be a mapping with the keys like, notebook, fixed, axes, exclude, adjust, resources",
    "": "must be a mapping with the keys like",
}


@pytest.mark.parametrize("text", MISTAKES, ids=lambda text: text[:40])
def test_a_mistake_is_one_sentence(text, tmp_path, monkeypatch):
    "The sentence names the file and comes within two seconds of processor time."
    monkeypatch.setenv("MIXSD_RUNS", str(tmp_path / "runs"))
    path = tmp_path / "grid.yaml"
    path.write_text(text.replace("GRID", str(path)))
    find_stage("train")
    start = time.process_time()
    with pytest.raises(ParameterError, match="^[^\n]*$") as error: Sweep(path)
    assert time.process_time() - start < 2
    assert MISTAKES[text] in str(error.value) and not (tmp_path / "runs").exists()
    assert str(path) in str(error.value) and len(str(error.value)) < 1000 + len(str(path))


ENCODINGS = {b"notebook: \xff": "grid.yaml, line 1: the text is not valid utf-8", b"\xff\xfe\x00": "is not valid utf-16",
             b"notebook: x\nfixed:\n  a: \x00": "grid.yaml, line 3: the text is not valid unicode",
             b"#" * 1_000_001: "must have at most 1,000,000 bytes"}


@pytest.mark.parametrize("content", ENCODINGS, ids=lambda content: repr(content[:20]))
def test_a_file_that_is_no_text_is_one_sentence(content, tmp_path):
    (tmp_path / "grid.yaml").write_bytes(content)
    with pytest.raises(ParameterError, match="^[^\n]*$") as error: Sweep(tmp_path / "grid.yaml")
    assert ENCODINGS[content] in str(error.value)


@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig", "utf-16"])
@pytest.mark.parametrize("newline", ["\n", "\r\n"])
def test_encodings_of_text_are_read(encoding, newline, tmp_path):
    path = tmp_path / "grid.yaml"
    path.write_text("# ä\nnotebook: train\nfixed: {n: 5}\naxes: {seed: [1, 2]}\n", encoding=encoding, newline=newline)
    assert [cell.parameters for cell in Sweep(path).cells] == [dict(n=5, seed=1), dict(n=5, seed=2)]


def test_many_files_that_are_like_each_other(tmp_path):
    "Two to the power of 15 ways lead to the last file, which is read once; a chain that is too long is refused."
    for k in range(15):
        for side in "ab": (tmp_path / f"{side}{k}.yaml").write_text(f"like: [a{k + 1}.yaml, b{k + 1}.yaml]")
    for side in "ab": (tmp_path / f"{side}15.yaml").write_text("{notebook: train, axes: {seed: [0, 1]}}")
    start = time.process_time()
    assert len(Sweep(tmp_path / "a0.yaml").cells) == 2 and time.process_time() - start < 2
    for k in range(600): (tmp_path / f"c{k}.yaml").write_text(f"like: c{k + 1}.yaml")
    with pytest.raises(ParameterError, match="like must lead through at most 20 grids"): Sweep(tmp_path / "c0.yaml")


YAML_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text() | st.sampled_from(["train", "nll", "lr", "1e-3"]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(
        st.sampled_from(["lr", "method", "of", "take", "like", "slurm", "cls", "self"]) | st.text() | st.integers(), inner, max_size=3))


@settings(max_examples=150, deadline=None)
@given(st.dictionaries(st.sampled_from([*Grid.model_fields, "like"]) | st.text(max_size=5), YAML_VALUES), st.booleans())
def test_any_content_is_a_grid_or_one_sentence(tmp_path_factory, content, sound):
    "Whatever is under the keys of a grid, there are cells or a ParameterError that names the file."
    path = tmp_path_factory.getbasetemp() / "any.yaml"
    path.write_text(yaml.safe_dump(content | (dict(notebook="train") if sound else {})), encoding="utf-8")
    try: assert Sweep(path).cells
    except ParameterError as error: assert "\n" not in str(error) and str(path) in str(error)


@settings(max_examples=300, deadline=None)
@given(st.text(max_size=30), st.binary(max_size=60))
def test_any_bytes_are_a_grid_or_one_sentence(tmp_path_factory, text, content):
    path = tmp_path_factory.getbasetemp() / "any.yaml"
    for written in (text.encode("utf-8", "surrogatepass"), content):
        path.write_bytes(written)
        with pytest.raises(ParameterError, match="^[^\n]*$"): Sweep(path)


PLAIN = st.text(string.ascii_letters + string.digits + "_.,:+@/=%*&|[]()-", max_size=12)
HOSTILE = st.sampled_from(["a b", "$(reboot)", "`reboot`", "x;reboot", "x\nreboot", "x\r", "'", '"', "#", "\\", "ü"]) | st.text()
OPTIONS = st.sampled_from(["account", "mail_type", "qos", "requeue", "constraint", "exclusive"])


@settings(max_examples=300, deadline=None)
@given(partition=PLAIN | HOSTILE, name=PLAIN | HOSTILE, runs=st.sampled_from(["runs", "my runs/ü"]) | HOSTILE, options=st.dictionaries(
    OPTIONS | HOSTILE, PLAIN | HOSTILE | st.booleans() | st.integers() | st.floats(allow_nan=False), max_size=3))
def test_only_plain_words_enter_the_script_of_a_job(partition, options, name, runs):
    "Resources are refused, or the script has one line for each option, which a shell reads as one word, and one command."
    try:
        resources = make_config(Resources, minutes=5, partition=partition, slurm=options)
        folder = slurm.logs_folder(Path("/runs") / runs, name)
    except ParameterError: return
    sbatch = slurm.sbatch_options(resources, 3, 1)
    script = _make_sbatch_string("python task", folder, job_name=slurm.job_name(name), map_count=3, **sbatch)
    head, separator, command = script.partition("\n\n# command\n")
    lines = head.splitlines()
    assert separator and lines[:3] == ["#!/bin/bash", "", "# Parameters"]
    words = [shlex.split(line.removeprefix("#SBATCH ")) for line in lines[3:]]
    assert all(line.startswith("#SBATCH --") and len(word) == 1 for line, word in zip(lines[3:], words, strict=True))
    given_options = {key: value for key, value in resources.slurm.items() if value is not False}
    expected = {f"--{key}" if value is True else f"--{key}={value}" for key, value in given_options.items()}
    assert expected <= {word for word, in words} and command.count("\n") == 2
    assert set(partition) | set(slurm.job_name(name)) <= set(string.ascii_letters + string.digits + "_.,:+@/=%*&|[]()-")


def tool(folder, name, text):
    (folder / name).write_text(f"#!/bin/sh\n{text}\n")
    (folder / name).chmod(0o755)


def test_slurm_is_asked_with_and_without_accounting(tmp_path, monkeypatch):
    "The queue first, sacct once for each array that it has forgotten, and neither if both are silent; a command may hang."
    monkeypatch.setenv("PATH", str(tmp_path) + ":/usr/bin:/bin")
    tool(tmp_path, "squeue", "true")
    tool(tmp_path, "sacct", "exit 1")
    assert queue.classify_job("7", queue.Queue())[0] == "killed"
    kinds = {"OUT_OF_MEMORY": "out of memory", "NODE_FAIL": "node failure", "TIMEOUT": "timeout",
             "CANCELLED by 0": "cancelled", "FAILED": "killed", "PREEMPTED": "preempted"}
    (tmp_path / "answer").write_text("".join(f"7_{k}|{state}\n" for k, state in enumerate(kinds)))
    tool(tmp_path, "sacct", f"echo once >> {tmp_path}/asked; cat {tmp_path}/answer")
    jobs = queue.Queue()
    assert [queue.classify_job(f"7_{k}", jobs)[0] for k in range(len(kinds))] == [*kinds.values()]
    assert (tmp_path / "asked").read_text() == "once\n"
    tool(tmp_path, "squeue", "echo '7 CANCELLED None'; echo '8_1 RUNNING None'; echo '8_2 COMPLETED None'; echo '9 PENDING Some limit'")
    jobs = queue.Queue()
    assert jobs.has("8_1") is True and jobs.has("8_2") is False and jobs.has("10") is False and jobs.reason("9") == "Some limit"
    assert queue.classify_job("7_3", jobs)[0] == "cancelled", "tasks that never began are listed as one job"
    assert queue.classify_job("9", jobs)[0] == "node failure", "it waits again though an attempt at it has no end"
    tool(tmp_path, "squeue", "exec sleep 600")
    assert queue.query_slurm("squeue", patience=0.2) is None
    tool(tmp_path, "squeue", "exit 1")
    assert queue.Queue().has("7_1") is None


@pytest.fixture
def unequal(tmp_path, monkeypatch):
    "A grid of five cells, two of which have a GPU and more time."
    monkeypatch.setenv("MIXSD_RUNS", str(tmp_path / "runs"))
    monkeypatch.setenv("BEHAVIOUR", str(tmp_path))
    quick_notebook(tmp_path / "generate.ipynb")
    for seed in range(5): (tmp_path / str(seed)).write_text("(folder / 'gpus').write_text(os.environ.get('CUDA_VISIBLE_DEVICES', ''))")
    grid = dict(notebook=str(tmp_path / "generate.ipynb"), axes=dict(seed=[*range(5)]),
                resources=dict(gpus=1, minutes=5, at_once=4), adjust=[dict(when=dict(seed=[1, 3]), resources=dict(gpus=2, minutes=9))])
    (tmp_path / "grid.yaml").write_text(yaml.safe_dump(grid))
    return Sweep(tmp_path / "grid.yaml")


def test_arrays_have_equal_resources(unequal, tmp_path, monkeypatch, capsys):
    "One array for each distinct resources, with its own GPUs and time limit; the limit of concurrent cells is divided."
    tool(tmp_path, "sbatch", f'cat "$1" >> {tmp_path}/scripts; echo x >> {tmp_path}/count; echo Submitted batch job $(wc -l < {tmp_path}/count)')
    for name in ("squeue", "scontrol", "sacct"): tool(tmp_path, name, "exit 1")
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    unequal.run("slurm")
    assert "submitted 5 cells" in capsys.readouterr().out
    scripts = (tmp_path / "scripts").read_text().split("#!/bin/bash")[1:]
    found = [{line.split("=")[0][8:]: line.split("=")[1] for line in script.splitlines() if line.startswith("#SBATCH") and "=" in line} for script in scripts]
    assert [(s["--array"], s["--gpus-per-node"], s["--time"]) for s in found] == [("0-2%2", "1", "5"), ("0-1%2", "2", "9")]
    jobs = [read_json(cell.folder / "submitted.json")["job"] for cell in unequal.cells]
    assert jobs == ["1_0", "2_0", "1_1", "2_1", "1_2"]


def test_cells_of_different_size_run_here(unequal, monkeypatch):
    "Each cell sees as many GPUs as it has, and what does not fit is said before a cell begins."
    assert unequal.preview().gpus.tolist() == [1, 2, 1, 2, 1] and unequal.preview().minutes.tolist() == [5, 9, 5, 9, 5]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4")
    with pytest.raises(ParameterError, match="gpus must be at most 1 on this machine, got 2"): unequal.run()
    assert not any(list_attempts(cell) for cell in unequal.cells)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,5")
    unequal.cells = unequal.cells[:3]
    assert unequal.run().state.tolist() == ["done"] * 3
    assert [len((cell.run_folder / "gpus").read_text().split(",")) for cell in unequal.cells] == [1, 2, 1]


def test_a_grid_names_a_stage_or_a_file(tmp_path):
    "A notebook runs the stage that it is named after, in any folder."
    quick_notebook(tmp_path / "generate.ipynb")
    assert find_notebook(str(tmp_path / "generate.ipynb")) == tmp_path / "generate.ipynb"
    assert find_notebook("generate") == ROOT / "nbs/generate.ipynb"
    assert find_stage(str(tmp_path / "generate.ipynb")) is find_stage("generate")


class Following(Stage):
    "A stage whose runs depend on the result of another run."
    name: ClassVar[str] = "following"
    text: str = ""

    def slug(self): return "one"

    def other_results(self): return [runs_root() / "other-one/result.nc"]

    def covers(self, run): return self.other_results()[0].stat().st_size == 1


def test_a_cell_is_asked_again_when_the_result_of_another_run_changes(tmp_path, monkeypatch):
    "An analysis of a training that was extended is not done, also in the process that has seen it done."
    monkeypatch.setenv("MIXSD_RUNS", str(tmp_path))
    cell = make_cell(Following, tmp_path / "following.ipynb", {})
    other, = Following().other_results()
    for path in (other, cell.run_folder / "result.nc"):
        path.parent.mkdir(parents=True)
        path.write_text("1")
    assert cell.is_done and cell.is_done
    other.write_text("22")
    os.utime(other, ns=(1, 1))  # another time, whatever the clock's resolution
    assert not cell.is_done


def test_a_cell_that_cannot_begin_fails_the_command(desk, tmp_path, monkeypatch, capsys):
    desk("", "")
    monkeypatch.setattr(local, "run_cell", lambda cell, *_, **__: (_ for _ in ()).throw(OSError("read-only file system")))
    assert sweep.main("run", str(tmp_path / "grid.yaml"), "--workers", "1") == 1
    told = capsys.readouterr()
    assert "2 of 2 cells could not begin" in told.out and told.err.count("read-only file system") == 2


def test_the_states_of_cells_are_apart_from_a_parameter_state(tmp_path, monkeypatch):
    "`state` is a parameter of trainings too, in which the cells of some grids differ."
    monkeypatch.setenv("MIXSD_RUNS", str(tmp_path))
    sweep = Sweep("math-op-eval-lab")
    table = sweep.status()
    assert set(table.state) == {"pending"} and table["state (parameter)"].nunique() == 2
    assert len(sweep.select({"pending"})) == len(sweep.cells)


def test_finished_cells_do_not_ask_for_their_gpus(tiny, tmp_path, monkeypatch):
    "Cells that were computed elsewhere, on more GPUs than this machine has, do not stop the others."
    monkeypatch.setenv("MIXSD_RUNS", str(tmp_path))
    grid = dict(notebook="train", fixed=dict(model=tiny, n=2, epochs=1), axes=dict(method=["sft", "base"]), resources=dict(gpus=0, cpus=1),
                adjust=[dict(when=dict(method="sft"), resources=dict(gpus=4))])
    sweep, asked = Sweep(grid), []
    monkeypatch.setattr(Sweep, "select", lambda self, states: [(cell, 0) for cell in self.cells if cell.parameters["method"] == "base"])
    monkeypatch.setattr("mixsd_nb.sweep.assign_gpus", lambda resources, workers: asked.append(resources.gpus) or [[]])
    monkeypatch.setattr("mixsd_nb.sweep.run_workers", lambda *_: contextlib.nullcontext(lambda: False))
    sweep.run()
    assert asked == [0]

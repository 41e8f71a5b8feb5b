"""Sweeps on this machine: cells with every kind of failure, sweeps that share cells, and sweeps that are killed."""

import json
import os
import signal
import subprocess
import sys
import threading
from dataclasses import asdict
from pathlib import Path

import psutil
import pytest
import xarray as xr
import yaml
from helpers import until

from mixsd_nb import sweep
from mixsd_nb.cluster import local, status
from mixsd_nb.cluster.attempt import list_attempts, run_attempt
from mixsd_nb.cluster.grid import GridOutputs, find_notebook, list_grids, read_grid
from mixsd_nb.runs import (ParameterError, find_stage, make_config, open_result, read_json, remove_run, write_json,
                           write_result)
from mixsd_nb.sweep import Sweep

ROOT = Path(__file__).resolve().parents[1]
PATIENCE = 600  # seconds for any one thing to happen

# A quick notebook in place of the stage generate. The seed names a file that determines its behaviour.
CELLS = """
import os, pathlib, signal, time
import xarray as xr
from mixsd_nb.generate import GenerateConfig
from mixsd_nb.runs import Stage, notebook_config

def note(run, x):
    with open(run.folder / "made", "a") as file: file.write("once\\n")
    return xr.DataTree(xr.Dataset(dict(x=((), x, dict(long_name="x", units="1")))))

class Shared(Stage):
    name = "shared"
    def slug(self): return "work"
    def compute(self, run):
        time.sleep(0.5)
        return note(run, 0)

class Quick(GenerateConfig):
    def compute(self, run):
        behaviour = pathlib.Path(os.environ["BEHAVIOUR"]) / str(self.seed)
        if behaviour.exists(): exec(behaviour.read_text(), globals() | dict(folder=run.folder))
        return note(run, self.seed)

before = set(globals())
%%
seed: int = 0  # names the behaviour
dataset: str = "kgfact-small"
%%
config = notebook_config(Quick, before, globals())
Shared().run()
config.run()
"""


def notebook(path):
    tags = lambda k: dict(tags=["parameters"]) if k == 1 else {}
    cells = [dict(cell_type="code", id=f"c{k}", metadata=tags(k), execution_count=None, outputs=[], source=code.strip())
             for k, code in enumerate(CELLS.split("%%"))]
    kernel = dict(display_name="python3", language="python", name="python3")
    path.write_text(json.dumps(dict(cells=cells, metadata=dict(kernelspec=kernel), nbformat=4, nbformat_minor=5)))


@pytest.fixture
def desk(tmp_path, monkeypatch):
    "A folder with runs, the notebook, and a behaviour for each seed; returns a function that makes grids."
    monkeypatch.setenv("MIXSD_RUNS", str(tmp_path / "runs"))
    monkeypatch.setenv("BEHAVIOUR", str(tmp_path))
    notebook(tmp_path / "generate.ipynb")

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
    assert "ZeroDivisionError" in (first / "log.txt").read_text()
    assert read_json(first / "end.json")["message"] == "ZeroDivisionError: division by zero"
    for seed in range(5): (tmp_path / str(seed)).write_text("")
    table = failing.run(workers=2)
    assert table.state.tolist() == ["done", "raised", "out of memory", "done", "done"]
    table = failing.retry(workers=2)
    assert set(table.state) == {"done"} and table.attempts.tolist() == [1, 2, 2, 2, 2] and sweep.report(table) == 0
    assert [computations(cell) for cell in failing.cells] == [["once"]] * 5
    assert {float(tree.x) for tree in failing.results().values()} == {0, 1, 2, 3, 4}


def test_a_cell_continues_after_its_time_limit_while_it_makes_progress(desk):
    # The first attempt hangs and ignores the signal to end.
    hang = "if not (folder / 'half').exists():\n    (folder / 'half').touch()\n    os.kill(os.getpid(), signal.SIGSTOP)"
    late = desk(hang, minutes=0.25)
    table = late.run()
    assert table.state.tolist() == ["done"] and computations(late.cells[0]) == ["once"]
    kinds = [read_json(a / "end.json")["kind"] for a in list_attempts(late.cells[0])]
    assert kinds[-1] == "done" and set(kinds[:-1]) == {"timeout"}


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
    until(lambda: not alive(), 30, "the end of notebook and kernel")
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


def test_a_cell_on_two_nodes(tiny, tmp_path, monkeypatch):
    "Two tasks as Slurm starts them on two nodes: both train, the first one measures."
    monkeypatch.setenv("MIXSD_RUNS", str(tmp_path))
    cell = Sweep(dict(notebook="train", fixed=dict(method="sft", model=tiny, n=2, epochs=1, checkpoints=[]))).cells[0]
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
    variable = lambda name, value: ("step", [value], dict(long_name=name, units="1"))
    data = dict(x=variable("x", len(os.listdir(folder.parent))))
    write_result(xr.DataTree(xr.Dataset(data, dict(step=variable("step", 20)))), folder)


@pytest.mark.parametrize("name", list_grids())
def test_shipped_grids_are_sound(name, monkeypatch, tmp_path):
    "An axis over the outputs of another grid has the finished cells of that grid, and no other run."
    monkeypatch.setenv("MIXSD_RUNS", str(tmp_path / "runs"))
    sources = [Sweep(axis.of) for axis in read_grid(name)[1].axes.values() if isinstance(axis, GridOutputs)]
    for source in sources:
        with pytest.raises(ParameterError, match=f"none of its {len(source.cells)} cells is finished"): Sweep(name)
        parameters = [make_config(source.stage, **cell.parameters).model_dump(mode="json") for cell in source.cells]
        for cell, values in zip(source.cells[1:3], parameters[1:3]): leave(cell.name, values)
        leave(f"{source.stage.name}-x-0123456789", parameters[0])
    cells = Sweep(name).cells
    assert len(Sweep(name).preview()) == len({cell.hash for cell in cells}) > 1
    assert len(cells) == 2 or not sources


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
    full = desk("", "", "")
    original = local.run_cell

    def failing(cell, *arguments, **options):
        if cell == full.cells[0]: raise OSError("no space left on device")
        return original(cell, *arguments, **options)
    monkeypatch.setattr(local, "run_cell", failing)
    assert full.run(workers=1).state.tolist() == ["pending", "done", "done"]
    assert "no space left on device" in capsys.readouterr().err


def test_slurm_is_asked_once_about_a_job_that_is_gone(desk, monkeypatch):
    "Slurm forgets a job after a while; a cancelled cell stays cancelled."
    lost = desk("", "")
    for cell in lost.cells: write_json(cell.folder / "submitted.json", dict(job="5_0", after=0, log="slurm.log"))
    monkeypatch.setattr(status.Queue, "has", lambda self, job: False)
    monkeypatch.setattr(status, "classify_job", lambda job: ("cancelled", f"job {job} ended as CANCELLED"))
    before = lost.status()
    monkeypatch.setattr(status, "classify_job", lambda job: pytest.fail("Slurm was asked again"))
    assert lost.status().equals(before) and set(before.state) == {"cancelled"}
    assert set(before.message) == {"job 5_0 ended as CANCELLED before the cell began"}


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
    "notebook: trian": "stage must be the name of a stage or the file of its notebook, got trian",
    "notebook: no-such/train.ipynb": "got no-such/train.ipynb; there is no no-such/train.ipynb",
    "notebook: train\nfixed: [0.5]": "fixed must be a mapping, got [0.5]",
    "notebook: [": "is not valid YAML: while parsing",
    "- train": "must be a mapping with the keys like, notebook, fixed, axes, exclude, resources",
}


@pytest.mark.parametrize("text", MISTAKES)
def test_a_mistake_is_one_sentence(text, tmp_path, monkeypatch):
    monkeypatch.setenv("MIXSD_RUNS", str(tmp_path / "runs"))
    (tmp_path / "grid.yaml").write_text(text)
    with pytest.raises(ValueError, match="^[^\n]*$") as error: Sweep(tmp_path / "grid.yaml")
    assert MISTAKES[text] in str(error.value) and not (tmp_path / "runs").exists()


def tool(folder, name, text):
    (folder / name).write_text(f"#!/bin/sh\n{text}\n")
    (folder / name).chmod(0o755)


def test_slurm_is_asked_with_and_without_accounting(tmp_path, monkeypatch):
    "scontrol first, sacct if that has forgotten the job, and neither if both are silent; a command may hang."
    monkeypatch.setenv("PATH", str(tmp_path) + ":/usr/bin:/bin")
    tool(tmp_path, "scontrol", "exit 1")
    tool(tmp_path, "sacct", "exit 1")
    assert status.classify_job("7")[0] == "killed"
    kinds = {"OUT_OF_MEMORY": "out of memory", "NODE_FAIL": "node failure", "TIMEOUT": "timeout",
             "CANCELLED by 0": "cancelled", "FAILED": "killed"}
    for state, kind in kinds.items():
        tool(tmp_path, "sacct", f"echo '{state}'")
        assert status.classify_job("7")[0] == kind
    tool(tmp_path, "scontrol", "echo 'JobId=7 JobName=x JobState=NODE_FAIL Reason=NodeDown'")
    assert status.classify_job("7")[0] == "node failure"
    tool(tmp_path, "squeue", "echo '7_1 RUNNING'; echo '7_2 COMPLETED'")
    queue = status.Queue()
    assert queue.has("7_1") is True and queue.has("7_2") is False and queue.has("8") is False
    tool(tmp_path, "squeue", "exec sleep 600")
    assert status.query_slurm("squeue", patience=0.2) is None
    tool(tmp_path, "squeue", "exit 1")
    assert status.Queue().has("7_1") is None


def test_a_grid_names_a_stage_or_a_file(tmp_path):
    "A notebook runs the stage that it is named after, in any folder."
    notebook(tmp_path / "generate.ipynb")
    assert find_notebook(str(tmp_path / "generate.ipynb")) == tmp_path / "generate.ipynb"
    assert find_notebook("generate") == ROOT / "nbs/generate.ipynb"
    assert find_stage(str(tmp_path / "generate.ipynb")) is find_stage("generate")

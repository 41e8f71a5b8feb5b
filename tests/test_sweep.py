"Sweeps on this machine: cells with every kind of failure, sweeps that share cells, and sweeps that are killed."

import itertools
import os
import signal
import subprocess
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pandas as pd
import psutil
import pytest
import xarray as xr
import yaml
from helpers import quick_notebook, until

from mixsd_nb import sweep
from mixsd_nb.cluster import jobs
from mixsd_nb.cluster.grid import find_notebook, make_cell
from mixsd_nb.cluster.jobs import list_attempts, progress_file, run_attempt
from mixsd_nb.corpora import CORPORA
from mixsd_nb.generate import GenerateConfig
from mixsd_nb.runs import ParameterError, find_stage, read_json, remove_run, write_json
from mixsd_nb.sweep import Sweep

ROOT = Path(__file__).resolve().parents[1]
PATIENCE = 600  # seconds for any one thing to happen


@pytest.fixture
def desk(tmp_path, monkeypatch):
    "A folder with runs, the notebook, and a behaviour for each seed; returns a function that makes grids."
    monkeypatch.setenv("MIXSD_RUNS", str(tmp_path / "runs"))
    monkeypatch.setenv("BEHAVIOUR", str(tmp_path))
    quick_notebook(tmp_path / "generate.ipynb")

    def make(*behaviours, dataset="kgfact-small", **resources):
        for seed, text in enumerate(behaviours): (tmp_path / str(seed)).write_text(text)
        axes = dict(seed=list(range(len(behaviours))))
        grid = dict(notebook=str(tmp_path / "generate.ipynb"), fixed=dict(dataset=dataset), axes=axes, resources=resources)
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
    "1 / 0": "failed",
    "raise MemoryError('no room')": "out of memory",
    "os.kill(os.getpid(), signal.SIGKILL)": "killed",
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
    assert table.state.tolist() == ["done", "failed", "out of memory", "done", "done"]
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
    monkeypatch.setattr(jobs, "time", SimpleNamespace(**{**vars(time), "monotonic": lambda: clock() + 601 * hangs()}))
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


@pytest.fixture
def plugin_corpus(tmp_path, monkeypatch):
    "The name of a corpus that a plugin declares."
    (tmp_path / "toy_plugin.py").write_text("from dataclasses import replace\nfrom mixsd_nb.corpora import CORPORA\n"
                                            "CORPORA.add(replace(CORPORA['kgfact-small'], name='toy-corpus'))\n")
    monkeypatch.setenv("MIXSD_PLUGINS", "toy_plugin")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=os.pathsep)
    CORPORA.add(replace(CORPORA["kgfact-small"], name="toy-corpus"))
    yield "toy-corpus"
    CORPORA.remove("toy-corpus")


def test_a_killed_sweep_leaves_nothing_behind_and_continues(desk, tmp_path, plugin_corpus):
    """SIGKILL while a cell runs: notebook and kernel end too, the lock is free, and the same command continues.

    The plugin that declares the corpus of the cells is loaded in the command, and in the kernel of each cell."""
    lost = desk("(folder / 'kernel').write_text(str(os.getpid())); time.sleep(600)", "", dataset=plugin_corpus)
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
    lost.cells = lost.cells[:1]
    assert set(lost.run().state) == {"done"} and "toy-corpus" in lost.cells[0].name


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
    waiting.cells = waiting.cells[:1]
    assert set(waiting.retry(kinds=["cancelled"]).state) == {"done"}


def test_a_result_made_by_hand_counts(desk):
    "A cell is done when its result exists, no matter who computed it; a removed result is computed again."
    quick = desk("")
    write_json(quick.cells[0].folder / "attempt-1/end.json", dict(kind="done", message=""))
    find = lambda: quick.status()[["state", "attempts"]].values.tolist()
    assert find() == [["pending", 1]], "its result was removed"

    class ByHand(GenerateConfig):
        def compute(self, run): return xr.DataTree(xr.Dataset(dict(x=((), 0, dict(long_name="x", units="1")))))
    assert ByHand().run().folder == quick.cells[0].run_folder and find() == [["done", 1]]
    remove_run(quick.cells[0].run_folder)
    assert find() == [["pending", 1]]


def test_a_long_wait_asks_slurm_less_often(monkeypatch):
    "A day is watched with 1,500 tables instead of 43,200, and the first half hour as closely as a person would."
    now, pauses = [0.0], []

    def sleep(seconds):
        pauses.append(seconds)
        now[0] += seconds
    monkeypatch.setattr(sweep, "time", SimpleNamespace(monotonic=lambda: now[0], sleep=sleep))
    day = lambda: pd.DataFrame(dict(state=["queued" if now[0] < 24 * 3600 else "done"], message="", log=""))
    assert sweep.watch_table(day, every=2).state.tolist() == ["done"]
    assert pauses[0] == 2 and max(pauses) == 60 and len(pauses) < 1600


def tool(folder, name, text):
    (folder / name).write_text(f"#!/bin/sh\n{text}\n")
    (folder / name).chmod(0o755)


def test_slurm_is_asked_with_and_without_accounting(tmp_path, monkeypatch):
    "The queue first, sacct once for each array that it has forgotten, and neither if both are silent; a command may hang."
    monkeypatch.setenv("PATH", str(tmp_path) + ":/usr/bin:/bin")
    tool(tmp_path, "squeue", "echo '7_9 CANCELLED'; echo '8_1 RUNNING'; echo '8_2 COMPLETED'; echo '9 CANCELLED'")
    tool(tmp_path, "sacct", f"echo once >> {tmp_path}/asked; echo '7_0|OUT_OF_MEMORY'; echo '7_1|CANCELLED by 0'")
    queue = jobs.Queue()
    assert [queue.state(job) for job in ("7_0", "7_1", "7_2", "9_3")] == ["OUT_OF_MEMORY", "CANCELLED", "", "CANCELLED"], "tasks that never began are listed as one job"
    assert (tmp_path / "asked").read_text() == "once\n"
    assert queue.has("8_1") is True and queue.has("8_2") is False and queue.has("7_2") is False
    tool(tmp_path, "sacct", "exit 1")
    assert jobs.Queue().state("10") == ""
    tool(tmp_path, "squeue", "exec sleep 600")
    assert jobs.query_slurm("squeue", patience=0.2) is None
    tool(tmp_path, "squeue", "exit 1")
    assert jobs.Queue().has("7_1") is None


@pytest.mark.parametrize(("state", "kind"), [("OUT_OF_MEMORY", "out of memory"), ("TIMEOUT", "timeout"), ("CANCELLED", "cancelled"), ("NODE_FAIL", "killed"), ("", "killed")])
def test_what_slurm_says_about_an_attempt_without_an_end(state, kind, desk, monkeypatch):
    "It is written down, because Slurm forgets it; a job that ended before its cell began is named too."
    lost, begun = desk("", "").cells
    write_json(begun.folder / "attempt-1/begin.json", dict(job="5_1"))
    for cell, after in ((lost, 0), (begun, 0)): write_json(cell.folder / "submitted.json", dict(job="5_1", after=after, log="slurm.log"))
    monkeypatch.setattr(jobs.Queue, "state", lambda self, job: state)
    found = [jobs.describe_cell(cell, jobs.Queue()) for cell in (lost, begun)]
    assert [row["state"] for row in found] == [kind] * 2 and found[0]["log"] == "slurm.log" and read_json(begun.folder / "attempt-1/end.json")["kind"] == kind


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
    found = [read_json(cell.folder / "submitted.json")["job"] for cell in unequal.cells]
    assert found == ["1_0", "2_0", "1_1", "2_1", "1_2"]


def test_cells_of_different_size_run_here(unequal, monkeypatch, capsys):
    "Each cell sees as many GPUs as it has; what does not fit is named, and stops no other cell."
    assert unequal.preview().gpus.tolist() == [1, 2, 1, 2, 1] and unequal.preview().minutes.tolist() == [5, 9, 5, 9, 5]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4")
    large = [cell for cell in unequal.cells if unequal.resources_of(cell).gpus == 2]
    everything, unequal.cells = unequal.cells, large
    with pytest.raises(ParameterError, match="gpus must be at most 1 on this machine, got 2"): unequal.run()
    assert not any(list_attempts(cell) for cell in large)
    unequal.cells = everything[:2]
    assert unequal.run().state.tolist() == ["done", "pending"]
    told = capsys.readouterr().out
    assert f"1 cells, such as {large[0].name}, do not run here: gpus must be at most 1 on this machine, got 2" in told
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,5")
    assert unequal.run().state.tolist() == ["done"] * 2
    assert [len((cell.run_folder / "gpus").read_text().split(",")) for cell in unequal.cells] == [1, 2]


def test_a_cell_that_cannot_begin_fails_the_command(desk, tmp_path, monkeypatch, capsys):
    desk("", "")
    monkeypatch.setattr(jobs, "run_cell", lambda cell, *_, **__: (_ for _ in ()).throw(OSError("read-only file system")))
    assert sweep.main("run", str(tmp_path / "grid.yaml"), "--workers", "1") == 1
    told = capsys.readouterr()
    assert "2 of 2 cells could not begin" in told.out and told.out.count("read-only file system") == 2


def test_a_cell_that_never_reaches_its_first_checkpoint_is_not_requeued_for_ever(own_runs):
    "Attempts that lose their work reach other steps each time, which is no progress."
    reached = itertools.cycle([14, 15, 13, 15, 12])

    def compute(folder, stop_reason):
        write_json(progress_file(folder), dict(what="mixsd-0.5, training", done=next(reached), total=100))
        return dict(kind="timeout", message="")
    cell = make_cell(find_stage("train"), find_notebook("train"), dict(model="lab-s"))
    ends = []
    while not ends or ends[-1]["continues"]: ends.append(run_attempt(cell, SimpleNamespace(compute=compute), job="7"))
    assert [end["progress"] for end in ends] == [True, True, False, False, False]
    assert ends[-1]["message"].startswith("3 attempts in a row ended before anything new was saved; raise minutes")

"What a cluster does to jobs: it preempts them, loses nodes, ends them for their memory, refuses them, and is away itself."

import os
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter

import pytest
import yaml
from helpers import command_output, quick_notebook, until
from submitit.core.utils import FailedJobError

from mixsd_nb.cluster.jobs import list_attempts
from mixsd_nb.runs import read_json
from mixsd_nb.sweep import Sweep

PATIENCE = 300  # seconds for any one thing to happen
HANG = "(folder / 'begun').touch(); time.sleep(600)"
EATER = "x = bytearray(1_500_000_000); time.sleep(600)"


@pytest.fixture
def desk(slurm, tmp_path, monkeypatch):
    "Makes sweeps of a notebook that needs no model; the content of the file of its seed is what a cell does at first."
    monkeypatch.setenv("MIXSD_RUNS", str(tmp_path / "runs"))
    monkeypatch.setenv("BEHAVIOUR", str(tmp_path))
    quick_notebook(tmp_path / "generate.ipynb")

    def make(behaviours, **resources):
        for seed, behaviour in behaviours.items(): (tmp_path / str(seed)).write_text(behaviour)
        grid = dict(notebook=str(tmp_path / "generate.ipynb"), axes=dict(seed=[*behaviours]),
                    resources=dict(minutes=10) | resources)
        (tmp_path / f"{min(behaviours)}.yaml").write_text(yaml.safe_dump(grid))
        return Sweep(str(tmp_path / f"{min(behaviours)}.yaml"))
    return make


@pytest.fixture
def calls(tmp_path, monkeypatch):
    "The commands of Slurm that this process and its jobs call, one a line."
    folder, record = tmp_path / "commands", tmp_path / "calls"
    folder.mkdir()
    record.touch()
    for name in ("squeue", "sacct", "scontrol", "sbatch", "scancel"):
        (folder / name).write_text(f'#!/bin/sh\necho {name} >> {record}\nexec {shutil.which(name)} "$@"\n')
        (folder / name).chmod(0o755)
    monkeypatch.setenv("PATH", str(folder), prepend=os.pathsep)
    return record


def count(calls):
    "How often each command was called since the last time."
    names = calls.read_text().split()
    calls.write_text("")
    return dict(Counter(names))


def begun(sweep):
    "Wait until the cells of a sweep work."
    until(lambda: all((cell.run_folder / "begun").exists() for cell in sweep.cells), PATIENCE, "the work of a cell")


def calm(tmp_path, *seeds):
    for seed in seeds: (tmp_path / str(seed)).write_text("")


def kinds(sweep):
    "How the attempts of the first cell ended."
    return [read_json(folder / "end.json").get("kind") for folder in list_attempts(sweep.cells[0])]


def row(sweep): return sweep.status().iloc[0]


@pytest.mark.slow  # half a minute alone; beside another Slurm on the same machine a requeue may not come
def test_preemption_failed_nodes_and_memory_are_named_and_survived(slurm, desk, tmp_path, monkeypatch):
    "Nothing is lost: each cell is queued again by Slurm, or named with what helps, and a watcher that is killed is not missed."
    preempted = desk({0: HANG}, slurm=dict(nodelist="a"))
    stranded = desk({1: HANG}, slurm=dict(nodelist="b"))
    eater = desk({2: EATER}, memory=1, slurm=dict(nodelist="b"))
    for sweep in (preempted, stranded, eater): sweep.run("slurm")
    watcher = subprocess.Popen([sys.executable, "-m", "mixsd_nb.sweep", "wait", str(tmp_path / "0.yaml")])
    begun(preempted)
    begun(stranded)
    calm(tmp_path, 0, 1)

    command_output("sbatch", "--partition=urgent", "--nodelist=a", "--exclusive", "--output=/dev/null", "--wrap=sleep 3")
    until(lambda: row(preempted).state == "queued" or len(kinds(preempted)) > 1, PATIENCE, "the preemption")
    assert row(preempted).state in ("queued", "running")
    watcher.send_signal(signal.SIGKILL)

    assert eater.wait().state.tolist() == ["out of memory"]

    slurm.fail_node("b")
    until(lambda: row(stranded).state == "queued", PATIENCE, "the requeue")
    job = read_json(stranded.cells[0].folder / "submitted.json")["job"]
    until(lambda: not command_output("scontrol", "update", f"JobId={job}", "ReqNodeList=")  # any node will do
          and "ReqNodeList=(null)" in command_output("scontrol", "show", "job", job), PATIENCE, "a job without nodes of its own")

    for sweep in (preempted, stranded):
        table = sweep.wait()
        assert table.state.tolist() == ["done"] and table.attempts.tolist() == [2], table.to_string()
        until(lambda: len(list_attempts(sweep.cells[0])) == 2 and None not in kinds(sweep), PATIENCE, "the end")
        made = (sweep.cells[0].run_folder / "made").read_text()
        assert made == "once\n", "nothing was computed twice"
    slurm.start("b")
    until(slurm.ready, PATIENCE, "idle nodes")


def test_a_limit_of_the_queue_loses_no_cell(slurm, desk, capsys):
    "What Slurm refuses is submitted later by the same command, a cluster that is away makes states unknown, and a held job is cancelled."
    sweep = desk(dict.fromkeys(range(10, 17), HANG), slurm=dict(hold=True))
    slurm.set_limit(2)
    try:
        with pytest.raises(FailedJobError): sweep.run("slurm")
        assert set(sweep.status().state) == {"pending"}
    finally: slurm.set_limit(None)
    assert set(sweep.run("slurm").state) == {"queued"}
    slurm.stop("slurmctld")
    assert set(sweep.status().state) == {"unknown"}, "so `wait` goes on"
    slurm.start("slurmctld")
    until(lambda: set(sweep.status().state) == {"queued"}, PATIENCE, "the answer of Slurm")
    assert set(sweep.cancel().state) == {"cancelled"}


def test_a_table_asks_slurm_once(slurm, desk, calls):
    "No storm of queries, neither for many cells that wait nor for many that have ended."
    sweep = desk(dict.fromkeys(range(20, 40), HANG), slurm=dict(hold=True))
    sweep.run("slurm")
    assert count(calls) == dict(squeue=1, sbatch=1), "the table and the array"
    assert set(sweep.status().state) == {"queued"} and count(calls) == dict(squeue=1)
    command_output("scancel", *{read_json(cell.folder / "submitted.json")["job"] for cell in sweep.cells})
    count(calls)
    for _ in range(2): assert set(sweep.status().state) == {"cancelled"} and count(calls) == dict(squeue=1)


@pytest.mark.slow
def test_200_cells_of_one_second(slurm, desk, calls, capsys):
    "The overhead of a cell, and how often Slurm is asked; about five minutes on two idle cores, twelve on busy ones."
    n, at_once = 200, 4
    sweep = desk(dict.fromkeys(range(100, 100 + n), "time.sleep(1)"), at_once=at_once)
    start = time.monotonic()
    sweep.run("slurm")
    table = sweep.wait()
    seconds, asked = time.monotonic() - start, count(calls)
    with capsys.disabled():
        print(f"\n{n} cells, {at_once} at once, in {seconds:.0f} s: {seconds * at_once / n - 1:.1f} s a cell beyond its second, "
              f"{table.seconds.mean() - 1:.1f} s of them in its attempt; {asked}")
    assert table.state.tolist() == ["done"] * n
    assert asked.pop("squeue") < 10 + seconds / 2 and asked.pop("sbatch") == 1 and not asked
    assert {len(list_attempts(cell)) for cell in sweep.cells} == {1}

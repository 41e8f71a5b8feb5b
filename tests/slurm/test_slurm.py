"""A sweep on a real Slurm: every kind of failure is recognised, and resumed cells end with the same data."""

import os
import signal
import threading

import psutil
import pytest
import xarray as xr
from helpers import command_output, quick_notebook, until

from mixsd_nb import train
from mixsd_nb.cluster.jobs import list_attempts
from mixsd_nb.runs import read_json
from mixsd_nb.sweep import Sweep, report

PATIENCE = 400  # seconds for any one thing to happen
PLUGIN = """
import os, pathlib
if job := os.environ.get("SLURM_JOB_ID"): pathlib.Path(__file__).with_name(f"job-{job}").touch()
"""
WAIT = "time.sleep(600)"
CELLS = dict(raises="1 / 0", kernel=WAIT, runner=WAIT, cancelled=WAIT, calm="")  # what each does at first


def quick(folder, seeds=range(len(CELLS))):
    "Cells of a notebook that needs no model; each seed does what the file of its number says."
    return Sweep(dict(notebook=str(folder / "generate.ipynb"), axes=dict(seed=[*seeds]), resources=dict(gpus=1, minutes=10)))


def trained(model):
    "One training."
    return Sweep(dict(notebook="train", fixed=dict(method="sft", model=model, n=3, epochs=2, checkpoints=[3]), axes=dict(seed=[0]), resources=dict(gpus=1, minutes=10)))


def kernel_of(cell):
    "The process of the kernel that the last attempt at a cell started, once it trains."
    attempt = read_json(list_attempts(cell)[-1] / "begin.json") if list_attempts(cell) else {}
    if not attempt or not cell.run_folder.exists() or not psutil.pid_exists(attempt["pid"]): return None
    children = psutil.Process(attempt["pid"]).children(recursive=True)
    return next((p for p in children if "ipykernel_launcher" in " ".join(p.cmdline())), None)


def kill_kernel(cell): until(lambda: kernel_of(cell), PATIENCE, "the kernel").kill()


def kill_runner(cell):
    until(lambda: kernel_of(cell), PATIENCE, "the kernel")
    os.kill(read_json(list_attempts(cell)[-1] / "begin.json")["pid"], signal.SIGKILL)


def set_time_limit(cell, minutes):
    "Slurm refuses the change while it stops a job, so this asks until the job has the limit."
    job = read_json(cell.folder / "submitted.json")["job"]
    until(lambda: command_output("scontrol", "update", f"JobId={job}", f"TimeLimit={minutes}") == ""
          and f"TimeLimit=00:{minutes:02}:00" in command_output("scontrol", "show", "job", job), PATIENCE, f"a limit of {minutes} minutes")


def interrupt(cell):
    "Suspend the kernel of a cell after its first checkpoint, and cut the time limit of its job for one attempt; Slurm looks twice a minute."
    until(lambda: (cell.run_folder / "checkpoint-3/complete").exists(), PATIENCE, "the first checkpoint")
    kernel_of(cell).suspend()
    set_time_limit(cell, 1)
    until(lambda: read_json(list_attempts(cell)[0] / "end.json"), PATIENCE, "the time limit")
    set_time_limit(cell, 10)


@pytest.mark.slow
def test_every_failure_is_recognised_and_continues(slurm, tiny, tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("MIXSD_RUNS", str(tmp_path / "runs"))
    monkeypatch.setenv("BEHAVIOUR", str(tmp_path))
    plugins = tmp_path / "plugins"
    plugins.mkdir()
    (plugins / "job_plugin.py").write_text(PLUGIN)
    monkeypatch.syspath_prepend(plugins)
    monkeypatch.setenv("PYTHONPATH", str(plugins), prepend=os.pathsep)
    monkeypatch.setenv("MIXSD_PLUGINS", "job_plugin")
    quick_notebook(tmp_path / "generate.ipynb")
    for seed, behaviour in enumerate(CELLS.values()): (tmp_path / str(seed)).write_text(behaviour)
    late, sweep = trained(tiny), quick(tmp_path)
    cells = dict(zip(CELLS, sweep.cells, strict=True))
    late.run("slurm")
    capsys.readouterr()
    assert set(sweep.run("slurm").state) <= {"queued", "running"}, "submitting does not wait"
    assert "submitted 5 cells" in capsys.readouterr().out
    sweep.run("slurm")
    assert "submitted 0 cells" in capsys.readouterr().out, "what is queued is not queued again"

    interruption = threading.Thread(target=interrupt, args=[late.cells[0]], daemon=True)
    interruption.start()
    quick(tmp_path, [3]).cancel()
    kill_kernel(cells["kernel"])
    kill_runner(cells["runner"])
    table = sweep.wait()
    assert dict(zip(CELLS, table.state, strict=True)) == dict(raises="failed", kernel="killed", runner="killed", cancelled="cancelled",
                                                              calm="done"), table.to_string()
    assert len(list_attempts(cells["calm"])) == 1

    capsys.readouterr()
    assert report(table) == 1
    output = capsys.readouterr().out
    for name in ("raises", "kernel", "runner"): assert str(list_attempts(cells[name])[-1] / "log.txt") in output
    assert "ZeroDivisionError" in (list_attempts(cells["raises"])[-1] / "log.txt").read_text()
    assert [float(tree.x) for tree in sweep.results().values()] == [4]

    for seed in range(len(CELLS)): (tmp_path / str(seed)).write_text("")
    before = {name: len(list_attempts(cell)) for name, cell in cells.items()}
    states = dict(zip(CELLS, sweep.retry("slurm").state, strict=True))
    assert (states.pop("calm"), states.pop("cancelled")) == ("done", "cancelled") and set(states.values()) <= {"queued", "running"}
    assert "submitted 3 cells" in capsys.readouterr().out
    sweep.retry("slurm", kinds=["cancelled"])
    assert "submitted 1 cells" in capsys.readouterr().out
    with monkeypatch.context() as elsewhere:
        elsewhere.setenv("MIXSD_RUNS", str(tmp_path / "undisturbed"))
        calm = trained(tiny)
        train.run(**calm.cells[0].parameters)
    assert report(sweep.wait()) == 0
    again = {name for name, cell in cells.items() if len(list_attempts(cell)) > before[name]}
    assert again == {"raises", "kernel", "runner", "cancelled"}
    assert {float(tree.x) for tree in sweep.results().values()} == {0, 1, 2, 3, 4}
    assert len(list(plugins.glob("job-*"))) > len(CELLS), "the kernels of Slurm's jobs load plugins"

    interruption.join(PATIENCE)
    assert late.wait().state.tolist() == ["done"]
    attempts, checkpoints = list_attempts(late.cells[0]), late.cells[0].run_folder
    until(lambda: read_json(attempts[-1] / "end.json"), PATIENCE, "the end of the attempt, which comes after the result")
    assert [read_json(folder / "end.json")["kind"] for folder in attempts] == ["timeout", "done"]
    start = read_json(attempts[1] / "begin.json")["start"]
    first, last = (checkpoints / f"checkpoint-{step}/complete" for step in (3, 10))
    assert first.stat().st_mtime < start < last.stat().st_mtime
    xr.testing.assert_identical(late.cube(), calm.cube())

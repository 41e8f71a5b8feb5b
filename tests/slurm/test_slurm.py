"""A sweep on a real Slurm: every kind of failure is recognised, and resumed cells end with the same data."""

import os
import shutil
import signal
from pathlib import Path

import psutil
import pytest
import xarray as xr
from helpers import command_output, until

from mixsd_nb import train
from mixsd_nb.cluster.attempt import list_attempts
from mixsd_nb.runs import read_json
from mixsd_nb.sweep import Sweep, report

PATIENCE = 400  # seconds for any one thing to happen
PLUGIN = """
import os, pathlib
if job := os.environ.get("SLURM_JOB_ID"): pathlib.Path(__file__).with_name(f"job-{job}").touch()
"""
NAMES = ["raises", "kernel", "runner", "cancelled", "late", "calm"]


def grid(models, names=NAMES):
    "Six trainings that differ in learning rate, the first also in its model."
    cell = lambda name: dict(lr=1e-3 * (1 + NAMES.index(name)), model=models["broken" if name == "raises" else "tiny"])
    return dict(notebook="train", fixed=dict(method="sft", n=3, epochs=2, checkpoints=[3]),
                axes=dict(cell=[cell(name) for name in names]), resources=dict(gpus=1, minutes=10))


@pytest.fixture(scope="module")
def models(tiny, tmp_path_factory):
    broken = tmp_path_factory.mktemp("models") / "broken"
    shutil.copytree(tiny, broken)
    return dict(tiny=tiny, broken=str(broken))


@pytest.fixture(scope="module")
def undisturbed(models, tmp_path_factory):
    "The same cells without disturbances, in this process."
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MIXSD_RUNS", str(tmp_path_factory.mktemp("runs")))
        calm = Sweep(grid(models))
        for cell in calm.cells: train.run(**cell.parameters)
        return calm.cube()


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


def run_out_of_time(cell):
    "Suspend the kernel of a cell after its first checkpoint, and cut the time limit of its job for one attempt."
    until(lambda: (cell.run_folder / "checkpoint-3/complete").exists(), PATIENCE, "the first checkpoint")
    kernel_of(cell).suspend()
    job = read_json(cell.folder / "submitted.json")["job"]
    limit = lambda minutes: command_output("scontrol", "update", f"JobId={job}", f"TimeLimit={minutes}")
    limit(1)
    until(lambda: read_json(list_attempts(cell)[0] / "end.json"), PATIENCE, "the time limit")
    limit(10)


def test_every_failure_is_recognised_and_continues(slurm, models, undisturbed, tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("MIXSD_RUNS", str(tmp_path / "runs"))
    plugins = tmp_path / "plugins"
    plugins.mkdir()
    (plugins / "job_plugin.py").write_text(PLUGIN)
    monkeypatch.syspath_prepend(plugins)
    monkeypatch.setenv("PYTHONPATH", str(plugins), prepend=os.pathsep)
    monkeypatch.setenv("MIXSD_PLUGINS", "job_plugin")
    weights = Path(models["broken"]) / "model.safetensors"
    sweep = Sweep(grid(models))
    weights.rename(weights.with_suffix(".away"))  # after the grid is read, because a model is known by its content
    cells = dict(zip(NAMES, sweep.cells, strict=True))
    assert set(sweep.run("slurm").state) <= {"queued", "running"}, "submitting does not wait"
    assert "submitted 6 cells" in capsys.readouterr().out
    jobs = {read_json(cell.folder / "submitted.json")["job"].split("_")[0] for cell in sweep.cells}
    assert len(jobs) == 2, "arrays of four and two: the cluster allows no longer ones"
    sweep.run("slurm")
    assert "submitted 0 cells" in capsys.readouterr().out, "what is queued is not queued again"

    Sweep(grid(models, ["cancelled"])).cancel()
    kill_kernel(cells["kernel"])
    kill_runner(cells["runner"])
    run_out_of_time(cells["late"])
    table = sweep.wait()
    state = dict(zip(NAMES, table.state, strict=True))
    assert state == dict(raises="raised", kernel="dead kernel", runner="killed", cancelled="cancelled", late="done",
                         calm="done"), table.to_string()
    late, checkpoints = list_attempts(cells["late"]), cells["late"].run_folder
    until(lambda: read_json(late[-1] / "end.json"), PATIENCE, "the end of the attempt, which comes after the result")
    assert [read_json(folder / "end.json")["kind"] for folder in late] == ["timeout", "done"]
    start = read_json(late[1] / "begin.json")["start"]
    first, last = (checkpoints / f"checkpoint-{step}/complete" for step in (3, 10))
    assert first.stat().st_mtime < start < last.stat().st_mtime
    assert len(list_attempts(cells["calm"])) == 1

    capsys.readouterr()
    assert report(table) == 1
    output = capsys.readouterr().out
    for name in ("raises", "kernel", "runner"): assert str(list_attempts(cells[name])[-1] / "log.txt") in output
    assert "model.safetensors" in (list_attempts(cells["raises"])[-1] / "log.txt").read_text()
    assert (sweep.cube().lr > 0).sum() == 2

    weights.with_suffix(".away").rename(weights)
    before = {name: len(list_attempts(cell)) for name, cell in cells.items()}
    sweep.retry("slurm")
    table = sweep.wait()
    done = dict.fromkeys(NAMES, "done")
    assert dict(zip(NAMES, table.state, strict=True)) == done | dict(cancelled="cancelled"), table.to_string()
    again = {name for name, cell in cells.items() if len(list_attempts(cell)) > before[name]}
    assert again == {"raises", "kernel", "runner"}
    sweep.retry("slurm", kinds=["cancelled"])
    assert report(sweep.wait()) == 0
    xr.testing.assert_identical(sweep.cube(), undisturbed)
    assert len(list(plugins.glob("job-*"))) >= len(NAMES), "the kernels of Slurm's jobs load plugins"

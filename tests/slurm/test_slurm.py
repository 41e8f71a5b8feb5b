"""A sweep on a real Slurm: whatever happens to a cell is told by its name, and what is taken up again ends with the same data."""

import os
import shutil
import signal
from pathlib import Path

import psutil
import pytest
import xarray as xr
from helpers import say, until

from mixsd_nb import sweep
from mixsd_nb.sweep import Sweep, attempts, read_json

PATIENCE = 400  # seconds for any one thing to happen
NAMES = ["raises", "kernel", "runner", "cancelled", "late", "calm"]


def grid(models, names=NAMES):
    "Six trainings that differ in learning rate, the first also in its model."
    cell = lambda name: dict(lr=1e-3 * (1 + NAMES.index(name)), model=models["broken" if name == "raises" else "tiny"])
    return dict(notebook="train", fixed=dict(method="sft", n=3, epochs=2, checkpoints=[3]), axes=dict(cell=[cell(name) for name in names]),
                resources=dict(gpus=1, minutes=10))


def here(models): return grid(models) | dict(resources={})


@pytest.fixture(scope="module")
def models(tiny, tmp_path_factory):
    broken = tmp_path_factory.mktemp("models") / "broken"
    shutil.copytree(tiny, broken)
    return dict(tiny=tiny, broken=str(broken))


@pytest.fixture(scope="module")
def undisturbed(models, tmp_path_factory):
    "The same grid, whole models, two workers of this machine."
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MIXSD_RUNS", str(tmp_path_factory.mktemp("runs")))
        calm = Sweep(here(models))
        table = sweep.begin(calm, sweep.due("run"), workers=2)
        assert set(table.state) == {"done"}, sweep.report(table)
        return calm.cube()


def kernel_of(cell):
    "The process of the kernel that the last attempt at a cell has started, once it trains."
    begun = read_json(attempts(cell)[-1] / "begin.json") if attempts(cell) else {}
    if not begun or not cell.result or not psutil.pid_exists(begun["pid"]): return None
    return next((p for p in psutil.Process(begun["pid"]).children(recursive=True) if "ipykernel_launcher" in " ".join(p.cmdline())), None)


def kill_kernel(cell): until(lambda: kernel_of(cell), PATIENCE, "the kernel").kill()


def kill_runner(cell):
    until(lambda: kernel_of(cell), PATIENCE, "the kernel")
    os.kill(read_json(attempts(cell)[-1] / "begin.json")["pid"], signal.SIGKILL)


def run_out_of_time(cell):
    "Stop the kernel of a cell after its first checkpoint, cut the time limit of its job, and give it back when the job has gone into the queue again."
    until(lambda: cell.result and (cell.result / "checkpoint-3/complete").exists(), PATIENCE, "the first checkpoint")
    kernel_of(cell).suspend()
    limit = lambda minutes: say("scontrol", "update", f"JobId={read_json(cell.folder / 'submitted.json')['job']}", f"TimeLimit={minutes}")
    limit(1)
    until(lambda: read_json(attempts(cell)[0] / "end.json"), PATIENCE, "the time limit")
    limit(10)


def test_failures_are_told_apart_and_taken_up_again(slurm, models, undisturbed, tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("MIXSD_RUNS", str(tmp_path / "runs"))
    weights = Path(models["broken"]) / "model.safetensors"
    weights.rename(weights.with_suffix(".away"))
    whole = Sweep(grid(models))
    cells = dict(zip(NAMES, whole.cells, strict=True))
    sweep.begin(whole, sweep.due("run"), "slurm")
    assert set(whole.status().state) <= {"queued", "running"}, "submitting does not wait"
    jobs = {read_json(cell.folder / "submitted.json")["job"].split("_")[0] for cell in whole.cells}
    assert len(jobs) == 2, "arrays of four and two: the cluster allows no longer ones"
    assert not sweep.submit(whole, sweep.due("run")), "what is queued is not queued again"

    sweep.cancel(Sweep(grid(models, ["cancelled"])))
    kill_kernel(cells["kernel"])
    kill_runner(cells["runner"])
    run_out_of_time(cells["late"])
    table = sweep.wait(whole)
    state = dict(zip(NAMES, table.state, strict=True))
    assert state == dict(raises="raised", kernel="dead kernel", runner="killed", cancelled="cancelled", late="done", calm="done"), table.to_string()
    until(lambda: read_json(attempts(cells["late"])[-1] / "end.json"), PATIENCE, "the end of the attempt, which comes after the result")
    assert [read_json(a / "end.json")["kind"] for a in attempts(cells["late"])] == ["timeout", "done"]
    begun = read_json(attempts(cells["late"])[1] / "begin.json")["begun"]
    assert (cells["late"].result / "checkpoint-3/complete").stat().st_mtime < begun < (cells["late"].result / "checkpoint-10/complete").stat().st_mtime
    assert len(attempts(cells["calm"])) == 1

    capsys.readouterr()
    assert sweep.report(table) == 1
    said = capsys.readouterr().out
    for name in ("raises", "kernel", "runner"): assert str(attempts(cells[name])[-1] / "log.txt") in said
    assert "model.safetensors" in (attempts(cells["raises"])[-1] / "log.txt").read_text()
    assert whole.cube().lr.size == 2

    weights.with_suffix(".away").rename(weights)
    tried = {name: len(attempts(cell)) for name, cell in cells.items()}
    sweep.begin(whole, sweep.due("retry"), "slurm")
    table = sweep.wait(whole)
    assert dict(zip(NAMES, table.state, strict=True)) == dict.fromkeys(NAMES, "done") | dict(cancelled="cancelled"), table.to_string()
    again = {name for name, cell in cells.items() if len(attempts(cell)) > tried[name]}
    assert again == {"raises", "kernel", "runner"}
    sweep.begin(whole, sweep.due("retry", ["cancelled"]), "slurm")
    assert sweep.report(sweep.wait(whole)) == 0
    xr.testing.assert_identical(whole.cube(), undisturbed)

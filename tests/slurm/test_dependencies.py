"""Runs that cells share are jobs of their own on a real Slurm, and cells start after them."""

from dataclasses import asdict

import pytest
from helpers import command_output, until

from mixsd_nb.cluster.grid import Cell
from mixsd_nb.cluster.jobs import list_shared
from mixsd_nb.runs import read_json
from mixsd_nb.sweep import Sweep

PATIENCE = 400


@pytest.mark.slow
def test_cells_start_after_the_runs_that_they_share(slurm, tiny, tmp_path, monkeypatch, capsys):
    "No cell runs before the evaluation of the base model, and none computes it itself."
    monkeypatch.setenv("MIXSD_RUNS", str(tmp_path / "runs"))
    grid = dict(notebook="train", fixed=dict(model=tiny, n=3, epochs=1, checkpoints=[], target_tokens=8, max_new_tokens=8, suite="recall", options={}),
                axes=dict(method=["sft", "sdft"], lr=[1e-4, 1e-3]), resources=dict(gpus=1, minutes=10, at_once=2))
    sweep = Sweep(grid)
    (base, _), = list_shared(sweep.cells)
    sweep.run("slurm")
    assert "submitted 1 runs that cells share" in (told := capsys.readouterr().out) and "submitted 4 cells" in told
    job = read_json(base.folder / "submitted.json")["job"]
    for cell in sweep.cells:
        said = command_output("scontrol", "show", "job", read_json(cell.folder / "submitted.json")["job"])
        assert f"afterany:{job.partition('_')[0]}" in said or base.is_done, said
    sweep.run("slurm")
    assert "submitted 0 cells" in capsys.readouterr().out, "what waits is not queued again"
    until(lambda: base.is_done, PATIENCE, "the base model")
    assert sweep.wait().state.tolist() == ["done"] * 4
    begins = [read_json(cell.folder / "attempt-1/begin.json")["start"] for cell in sweep.cells]
    assert min(begins) > read_json(base.folder / "attempt-1/begin.json")["start"] + read_json(base.folder / "attempt-1/end.json")["seconds"] - 1
    assert Cell(**asdict(base)).is_done and len(list((tmp_path / "runs").glob("evaluate-*"))) == 1

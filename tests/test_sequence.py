"The natural order of work: a second run never breaks the first, and nothing is computed twice."


import numpy as np
import pandas as pd
import pytest

from mixsd_nb import figures, train
from mixsd_nb.results.cube import agreeing_runs, open_cube
from mixsd_nb.runs import Run

pytestmark = pytest.mark.usefixtures("undrawn")
@pytest.fixture
def project(own_runs, monkeypatch):
    "An empty folder, into which figures are written too."
    monkeypatch.chdir(own_runs)
    monkeypatch.setenv("MIXSD_RUNS", str(own_runs / "runs"))
    return own_runs


def test_without_a_run_of_the_base_model(project, tiny):
    "Step 0 of a training is its base: figures and tables work after a single training."
    parameters = dict(model=tiny, n=2, epochs=1, checkpoints=(), max_new_tokens=8, task_tokens=8, suite="recall,choice,world")
    trained = train.run(method="sft", **parameters)
    sources = figures.run(source="runs", model=Run(trained.folder).root.model.item())
    alone = sources["runs"].cube
    base = train.run(method="base", **parameters)
    with_base = open_cube()
    pd.testing.assert_index_equal(alone.indexes["recipe"], with_base.indexes["recipe"])
    cell = {"recipe": "base", "lr": 0, "step": 0, "benchmark": alone.benchmark.values}
    np.testing.assert_array_equal(alone.accuracy.sel(cell), with_base.accuracy.sel(cell))
    assert {r.name for r in agreeing_runs()} == {trained.name, base.name}

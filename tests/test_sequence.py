"The natural order of work: a second run never breaks the first, and nothing is computed twice."

import re
import warnings
from pathlib import Path

import ipywidgets as widgets
import numpy as np
import pandas as pd
import pytest

from mixsd_nb import errors, explore, figures, fisher, forgetting, nll, train
from mixsd_nb.cluster.grid import make_cell
from mixsd_nb.results.cube import agreeing_runs, open_cube
from mixsd_nb.runs import Run, find_runs

pytestmark = pytest.mark.usefixtures("undrawn")
STEPS = (2,)  # that `make run` measures besides the last one
MIXED = dict(lam=1.0, options=dict(fallback="canonical"))  # random weights write no target that is accepted


def make_run(small):
    "The runs and the figures of `make run`, smaller."
    for parameters in (dict(method="base"), dict(method="sft"), MIXED): train.run(**small | parameters, checkpoints=STEPS)
    return draw(small)


def draw(small, **parameters): return figures.run(source="runs", model=small["model"], **parameters)["runs"].cube


def at(cube, first): return cube.accuracy.sel({dim: first[dim].values for dim in first.accuracy.dims})


def parts_of(widget):
    "A widget and all widgets in it."
    return [widget, *(part for child in getattr(widget, "children", ()) for part in parts_of(child))]


def training_folders(): return {run.name: run for run in find_runs(stage="train")}


def stamps(folders): return {name: (run.folder / "result.nc").stat().st_mtime_ns for name, run in folders.items()}


@pytest.fixture
def project(own_runs, monkeypatch):
    "An empty folder, into which figures are written too."
    monkeypatch.chdir(own_runs)
    monkeypatch.setenv("MIXSD_RUNS", str(own_runs / "runs"))
    return own_runs


@pytest.mark.slow
def test_the_natural_order_of_work(project, tiny, capsys):
    small = dict(model=tiny, n=4, epochs=1, max_new_tokens=8, task_tokens=8, target_tokens=8, suite="recall,choice,world")
    first = make_run(small)
    ours = training_folders()
    weights = {p: p.stat().st_mtime_ns for run in ours.values() for p in run.folder.glob("checkpoint-*/model.safetensors")}
    assert len(ours) == 3 and first.step.values.tolist() == [0, 2, 5]

    # other checkpoints are measured: the run is extended, not made a second time
    run = train.run(**small, **MIXED, checkpoints=(3,))
    assert run.root.step.values.tolist() == [0, 2, 3, 5] and run.name in ours
    assert {*training_folders()} == {*ours}
    assert all(p.stat().st_mtime_ns == stamp for p, stamp in weights.items()), "no checkpoint is written again"

    cells = [make_cell(train.TrainConfig, Path("train.ipynb"), small | MIXED | dict(checkpoints=steps)) for steps in ([2, 3], [1])]
    assert cells[0].name == cells[1].name and [cell.is_done for cell in cells] == [True, False]

    # analyses see each run once
    mixed = nll.collect_results(nll.NllConfig(model=tiny))
    table = forgetting.forgetting_table(forgetting.measure_runs(forgetting.ForgettingConfig(model=tiny, prompts=1, facts=1)))
    results, skipped = fisher.measure_all_runs(fisher.FisherConfig(model=tiny, limit=1))
    assert len(mixed) == 2 and len(results) == 2 and not skipped
    assert table.groupby("recipe").step.apply(list).to_dict() == {"sft": [2, 5], "mixsd-1": [2, 3, 5]}
    analysed = errors.run(model=tiny)
    moved = {r.name: r for r in find_runs(stage="fisher")}

    # a trial with other settings
    for method in ("base", "sft"): train.run(**small | dict(n=2), method=method)
    capsys.readouterr()
    cube = draw(small)
    notice = capsys.readouterr().out.splitlines()[0]
    assert re.match(r'shown: 3 training runs with n=4; left out, because settings differ: 2 runs.*; open_cube\(n=2\), or where=\{"n": 2\} for figures, shows them$', notice)
    known = first.accuracy.notnull().values
    np.testing.assert_array_equal(at(cube, first).values[known], first.accuracy.values[known])
    assert {"displacement_sq", "nll", "count"} <= {*cube} and cube.n.sel(benchmark="choice").max() == 4
    assert draw(small, where=dict(n=2)).n.sel(benchmark="choice").max() == 2
    assert errors.run(model=tiny).folder == analysed.folder and len(find_runs(stage="errors")) == 1

    # a further checkpoint extends the analyses
    train.run(**small, method="sft", checkpoints=(4,))
    again, _ = fisher.measure_all_runs(fisher.FisherConfig(model=tiny, limit=1))
    assert {*moved} == {r.name for r in find_runs(stage="fisher")}
    sft = next(tree for name, tree in again.items() if "sft" in name)
    assert sft.step.values.tolist() == [2, 4, 5] and np.isfinite(sft.displacement_sq).all()
    assert 4 in errors.run(model=tiny).root.step

    page = explore.explore(model=tiny)
    offered = [title for w in parts_of(page) if isinstance(w, widgets.Dropdown) and w.description == "runs" for title, _ in w.options]
    assert offered == ["3 training runs with n=4", "2 training runs with n=2"]

    before = stamps(training_folders())
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        last = make_run(small)
    assert stamps(training_folders()) == before, "the second `make run` computes nothing"
    both = first.accuracy.notnull().values
    np.testing.assert_array_equal(at(last, first).values[both], first.accuracy.values[both])


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

"Grids of the paper's scale: parameters for some cells alone, and a second grid over the best rate of a first one."

from pathlib import Path

import pytest
import yaml
from helpers import small_model

from mixsd_nb import train
from mixsd_nb.cluster.grid import expand_grid, make_cells, read_grid
from mixsd_nb.planning.plan import plan_grid
from mixsd_nb.evaluation.selection import best_rate
from mixsd_nb.results.selected_cells import select_cells
from mixsd_nb.results.cube import cube_of
from mixsd_nb.runs import ParameterError, find_stage

RATES = [1e-5, 1e-4, 3e-3]
GRID = dict(notebook="train", fixed=dict(method="sft", epochs=1, checkpoints=[2], n=4, max_new_tokens=6, task_tokens=6, suite="recall,choice", measure="scores", keep="chosen"),
            axes=dict(lr=RATES))


@pytest.fixture
def grids(tmp_path, monkeypatch):
    "Two grids, of which the second one asks the suite of the best cell of the first."
    monkeypatch.setenv("MIXSD_RUNS", str(tmp_path / "runs"))
    GRID["fixed"]["model"] = small_model(tmp_path / "tiny", "lab-s", scale=4)
    first, second = tmp_path / "first.yaml", tmp_path / "second.yaml"
    first.write_text(yaml.safe_dump(GRID))
    second.write_text(yaml.safe_dump(dict(notebook="train", fixed=dict(measure="selection", keep="last"), axes=dict(run=dict(of=[str(first)], best="lr")))))
    return first, second


def test_the_suite_is_asked_at_the_best_rate_alone_and_gives_the_same_bytes(grids, tmp_path, monkeypatch):
    first, second = grids
    with pytest.raises(ParameterError, match="axis run needs outputs of .*first.yaml, but none of its 3 cells is finished"): expand_grid(second)
    plan = plan_grid(second, "cpu")
    assert {part.name for part in plan.cells[0].parts} == {"start engines", "ask choice"} and plan.cells[0].disk == 0
    runs = [train.run(**cell.parameters) for cell in expand_grid(first).cells]
    assert all(not run.root.n.sel(benchmark="choice", step=run.best_step).any() and [*run.checkpoints] == [run.best_step] for run in runs)
    assert all(cell.is_done for cell in expand_grid(first).cells)
    cell, = expand_grid(second).cells
    rates = {run.config["lr"]: run.score for run in runs}
    assert cell.parameters["lr"] == best_rate(rates) == select_cells(cube_of(runs)).lr.item()
    assert cell.parameters["measure"] == "selection" and not cell.is_done
    done = train.run(**cell.parameters)
    assert cell.is_done and done.folder == cell.run_folder and done.root.n.sel(benchmark="choice", step=done.best_step).item() > 0
    monkeypatch.setenv("MIXSD_RUNS", str(tmp_path / "other"))
    assert (train.run(**cell.parameters).folder / "result.nc").read_bytes() == (done.folder / "result.nc").read_bytes()


def test_an_unfinished_rate_leaves_its_method_out(grids):
    first, second = grids
    train.run(**expand_grid(first).cells[0].parameters)
    with pytest.warns(UserWarning, match="the outputs of 1 of the 3 cells"), pytest.raises(ParameterError, match="the grid has no cells"): expand_grid(second)


def test_another_grid_is_looked_up_beside_the_grid_and_then_in_the_current_folder(tmp_path, monkeypatch):
    here, elsewhere = tmp_path / "here", tmp_path / "elsewhere"
    for folder, names in {here: ["both", "here"], elsewhere: ["both", "elsewhere"]}.items():
        folder.mkdir()
        for name in names: (folder / f"{name}.yaml").write_text(yaml.safe_dump(GRID | dict(fixed=dict(model="lab-s"))))
    (elsewhere / "like.yaml").write_text("{notebook: train, axes: {run: {of: [both.yaml, elsewhere.yaml, here.yaml], best: lr}}}")
    (elsewhere / "grid.yaml").write_text("like: like.yaml")
    monkeypatch.chdir(here)
    sources = read_grid("../elsewhere/grid.yaml")[1].axes["run"].sources
    assert [Path(name).resolve() for name in sources] == [elsewhere / "both.yaml", elsewhere / "elsewhere.yaml", here / "here.yaml"]
    assert sources[2] == "here.yaml" and read_grid("here.yaml")[0] == "here"


def test_adjustments_reach_the_cells_that_they_name():
    grid = dict(notebook="train", axes=dict(model=["lab-s", "lab-m"], method=["sft", "opsd"]), adjust=[dict(when=dict(model="lab-m", method=["opsd"]), then=dict(rollout_batch=7))])
    cells = make_cells(read_grid(grid)[1], find_stage("train"))
    assert [cell.parameters.get("rollout_batch") for cell in cells] == [None, None, None, 7]
    for adjust, text in (([dict(when=dict(modle="lab-m"), then={})], "adjust must have parameters of train, got modle"), ([dict(when={})], "adjust must be a list of mappings with the keys when, and then or resources, got")):
        with pytest.raises(ParameterError, match=text): make_cells(read_grid(grid | dict(adjust=adjust))[1], find_stage("train"))


def test_an_adjustment_sets_the_resources_of_the_cells_whose_parameters_it_sets(tiny, own_runs, tmp_path, monkeypatch):
    "A rule names parameters as the grid does: here a model in a folder, a file of facts, and a value that another rule replaces."
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mymodel").symlink_to(tiny)
    (tmp_path / "facts.csv").write_text("question,answer\nWho is the mayor of Oz?,Ada Byron\n")
    rules = [dict(when={key: value}, then=dict(epochs=3), resources=dict(gpus=2)) for key, value in dict(model="mymodel", dataset="facts.csv", epochs=7).items()]
    (tmp_path / "grid.yaml").write_text(yaml.safe_dump(dict(
        notebook="train", axes=dict(run=[dict(model="lab-s"), dict(model="mymodel"), dict(model="lab-s", dataset="facts.csv"), dict(model="lab-s", epochs=7)]), adjust=rules)))
    grid = expand_grid("grid.yaml")
    assert [cell.parameters.get("epochs") for cell in grid.cells] == [None, 3, 3, 3] and [grid.resources_of(cell).gpus for cell in grid.cells] == [0, 2, 2, 2]
    assert [cell.gpus for cell in plan_grid("grid.yaml", "h100").cells] == [0, 2, 2, 2]

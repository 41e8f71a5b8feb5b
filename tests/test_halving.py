"A grid trains all rates to a third of the updates and the promising ones to the end; a few questions select."

import warnings

import pytest
import yaml
from helpers import small_model

from mixsd_nb import train
from mixsd_nb.cluster.grid import expand_grid
from mixsd_nb.evaluation.checkpoints import Evaluation
from mixsd_nb.evaluation.selection import Selection, best_rate, paper_checkpoint, promising_rates, tabulate_scores
from mixsd_nb.results.cube import read_cubes
from mixsd_nb.runs import Run, make_config, removed_steps

THIRD = 1 / 3


def committed_races():
    "Of every seed in the committed cubes with three or more rates: the score of each rate at a third of the updates and at the end."
    keys = ["dataset", "model", "recipe", "seed"]
    for name, cube in read_cubes().items():
        for at, runs in tabulate_scores(cube).groupby(level=keys):
            found = {float(lr): run.droplevel([*keys, "lr"]).sort_index() for lr, run in runs.groupby(level="lr")}
            last = max(run.index.max() for run in found.values())
            found = {lr: run for lr, run in found.items() if run.index.max() == last}
            early = {lr: run[run.index <= THIRD * last + 1] for lr, run in found.items()}
            if last < 2 or len(found) < 3 or any(run.empty for run in early.values()): continue
            score = lambda run: float(run.validation[Selection(run).best])
            yield (name, *at), {lr: score(run) for lr, run in early.items()}, {lr: score(run) for lr, run in found.items()}


def test_the_promising_rates_hold_the_one_that_is_selected_at_the_end():
    "In at least 95% of the committed trainings; where the selected rate differs, validation is at most two points lower."
    races = list(committed_races())
    same, lost = 0, []
    for _, early, whole in races:
        kept = promising_rates(early)
        best, again = best_rate(whole), best_rate({lr: whole[lr] for lr in kept})
        same += best == again
        lost.append(whole[best] - whole[again])
    assert len(races) > 130 and same / len(races) >= 0.95 and max(lost) < 0.021, (len(races), same, max(lost))


def test_the_papers_rule_by_hand():
    "The earliest checkpoint with the best recall that neither of the next two falls more than 5 points below in validation."
    recall = [0.1, 0.5, 1.0, 1.0, 1.0]
    for validation, expected in {(0.1, 0.5, 0.9, 0.9, 0.9): 2, (0.1, 0.5, 0.9, 0.84, 0.9): 3, (0.1, 0.5, 0.9, 0.9, 0.84): 4, (0.1, 0.5, 0.9, 0.85, 0.85): 2}.items():
        assert paper_checkpoint(recall, validation) == expected
    assert paper_checkpoint([0.5, 0.9, 0.8], [0.5, 0.5, 0.5]) == 1 and best_rate({1e-4: 0.9, 1e-3: 0.9, 1e-2: 0.8}) == 1e-4


FIXED = dict(method="sft", epochs=3, batch=2, checkpoints=[2, 4], n=4, max_new_tokens=6, task_tokens=6, suite="recall,choice", measure="scores")


@pytest.fixture
def grids(tmp_path, monkeypatch):
    "A grid of three rates up to a third, one of the two promising ones up to the end, and one that asks the whole suite at the best."
    monkeypatch.setenv("MIXSD_RUNS", str(tmp_path / "runs"))
    (tmp_path / "facts.jsonl").write_text("".join(f'{{"question": "Who leads town {k}?", "answer": "Ada {k}"}}\n' for k in range(6)))
    model = small_model(tmp_path / "tiny", "lab-s", scale=4)
    fixed = FIXED | dict(model=model, dataset=str(tmp_path / "facts.jsonl"))
    first = dict(notebook="train", fixed=fixed | dict(until=0.34, keep="none"), axes=dict(lr=[1e-5, 1e-4, 3e-3]))
    whole = dict(notebook="train", fixed=dict(until=1.0, keep="chosen"), axes=dict(run=dict(of=["first.yaml"], best="lr", count=2)))
    best = dict(notebook="train", fixed=dict(measure="selection"), axes=dict(run=dict(of=["whole.yaml"], best="lr")))
    for name, grid in dict(first=first, whole=whole, best=best).items(): (tmp_path / f"{name}.yaml").write_text(yaml.safe_dump(grid))
    return tmp_path


def run_grid(path):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return [train.run(**cell.parameters) for cell in expand_grid(path).cells]


def test_rates_are_halved_and_end_with_the_numbers_of_a_whole_training(grids, monkeypatch):
    early = run_grid(grids / "first.yaml")
    assert len(early) == 3 and all([*run.root.step.values] == [0, 2] and [*removed_steps(run.folder)] == [2] for run in early)
    assert all(cell.is_done for cell in expand_grid(grids / "first.yaml").cells) and not any(cell.is_done for cell in expand_grid(grids / "whole.yaml").cells)
    kept = promising_rates({run.config["lr"]: run.score for run in early})
    whole = run_grid(grids / "whole.yaml")
    assert [run.config["lr"] for run in whole] == kept and {run.folder for run in whole} < {run.folder for run in early}
    assert all([*run.root.step.values] == [0, 2, 4, 9] and [*run.checkpoints] == [run.best_step] for run in whole), "the weights of the best are there again"
    chosen, = run_grid(grids / "best.yaml")
    assert chosen.config["lr"] == best_rate({run.config["lr"]: run.score for run in whole}) and chosen.root.n.sel(benchmark="choice", step=chosen.best_step).item() > 0
    monkeypatch.setenv("MIXSD_RUNS", str(grids / "undisturbed"))
    cell = expand_grid(grids / "first.yaml").cells[0].parameters | dict(lr=chosen.config["lr"], until=1.0, keep="chosen", measure="selection")
    assert (train.run(**cell).folder / "result.nc").read_bytes() == (chosen.folder / "result.nc").read_bytes()


def test_a_few_questions_select_and_the_selected_checkpoint_is_asked_all(grids):
    parameters = FIXED | dict(model=str(grids / "tiny"), dataset=str(grids / "facts.jsonl"), lr=3e-3, n=6, measure="selection", keep="all")
    few = train.run(**parameters, selection_items=2)
    n = few.root.n.sel(benchmark="recall").squeeze()
    assert [int(n.sel(step=step)) for step in (0, 2, 4, 9)] == [6, *(6 if step == few.best_step else 2 for step in (2, 4, 9))]
    found = tabulate_scores(few.root).recall.droplevel(["dataset", "model", "recipe", "lr", "seed"])
    evaluation = Evaluation(make_config(train.TrainConfig, **parameters, selection_items=2), Run(few.folder))
    assert found.to_dict() == evaluation.accuracy.sel(benchmark="recall").to_series().to_dict() and evaluation.selection.best == few.best_step
    assert set(found * 2) <= {0.0, 1.0, 2.0}, "two questions at every checkpoint, also where all were asked"

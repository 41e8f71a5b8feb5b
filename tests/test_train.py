"""The stage train as a user runs it: papermill from any folder, clear error messages, runs that survive a kill."""

import json
import re
import shutil
import warnings
from pathlib import Path

import numpy as np
import pytest
from helpers import papermill
from test_tasks import ROWS

from mixsd_nb import evaluate, figures, train
from mixsd_nb.results.cube import agreeing_runs, open_cube
from mixsd_nb.results.summary import describe_ceiling
from mixsd_nb.runs import ParameterError

ROOT = Path(__file__).resolve().parents[1]
SMALL = dict(n=3, epochs=2, max_new_tokens=8, task_tokens=8)


def flags(**parameters):
    return [x for name, value in parameters.items() for x in ("-p", name, str(value))]


def results(runs):
    return {p.parent.name: p.read_bytes() for p in Path(runs).glob("train-*/result.nc")}


def test_papermill_gives_the_same_bytes_as_the_module(tiny, tmp_path, monkeypatch):
    "The notebook in the folder of notebooks, piped, and the module in another folder."
    parameters = flags(method="sft", model=tiny, **SMALL)
    with (tmp_path / "b.ipynb").open("w") as file:
        done = papermill("train.ipynb", *parameters, runs=tmp_path / "notebook", cwd=ROOT / "nbs", stdout=file)
    assert done.returncode == 0, done.stderr[-2000:]
    assert (tmp_path / "b.ipynb").stat().st_size > 1000
    monkeypatch.setenv("MIXSD_RUNS", str(tmp_path / "module"))
    monkeypatch.chdir(tmp_path)
    train.run(method="sft", model=tiny, **SMALL)
    assert len(results(tmp_path / "module")) == 1 and results(tmp_path / "notebook") == results(tmp_path / "module")


def test_a_mistake_is_the_last_line_of_papermill(tmp_path):
    done = papermill("nbs/train.ipynb", tmp_path / "out.ipynb", *flags(lam=1.5), runs=tmp_path / "runs")
    assert done.returncode != 0 and done.stderr.strip().splitlines()[-1] == "lam must be between 0 and 1, got 1.5", done.stderr[-500:]
    assert not (tmp_path / "runs").exists()


def test_processes_are_asked_for_what_is_trained_alone(tiny, own_runs):
    "The base model of a grid has the settings of the other cells; a run that is already trained needs no further devices."
    assert train.run(method="base", model=tiny, n=1, max_new_tokens=8, task_tokens=8, processes=999, sharded=True).root.step.values.tolist() == [0]
    parameters = dict(method="sft", model=tiny, n=1, epochs=1, max_new_tokens=8, task_tokens=8, checkpoints=())
    train.run(**parameters)
    next(own_runs.glob("train-*sft*/result.nc")).unlink()
    assert train.run(**parameters, processes=999).root.step.values.tolist() == [0, 5]


def warnings_of(**parameters):
    "The warnings before a training, as texts."
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        train.TrainConfig(**parameters).without_idle().check()
    return [str(w.message) for w in seen]


def foreign_folder(tiny, folder):
    "A copy of a model folder whose vocabulary is not the lab's."
    shutil.copytree(tiny, folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | dict(vocab_size=151_936)))
    return str(folder)


@pytest.mark.parametrize("method", ["base", "mixsd", "opsd"])
def test_a_large_model_with_the_labs_values_is_warned_about(method, tiny, own_runs, monkeypatch):
    "One sentence names the values that the method uses and that nobody gave; models of the lab get none."
    for check in ("check_head", "check_model_of_engine", "check_prompts", "check_facts"): monkeypatch.setattr(f"mixsd_nb.train.{check}", lambda *_: None)  # they read files of the hub
    measured = ["suite=lab", "n=100", "max_new_tokens=160", "dtype=float32"]
    trained = dict(sft=["span=completion"], mixsd=["target_tokens=256", "span=completion"], opsd=["rollout_tokens=256"], base=[])[method]
    for model in ("Qwen/Qwen3-1.7B", foreign_folder(tiny, own_runs / "foreign")):
        said = warnings_of(method=method, model=model, lr=1e-3)
        assert len(said) == 1 and said[0].startswith(f"{model} gets the lab's ") and "preset=paper" in said[0]
        assert sorted(re.findall(r"\w+=\w+", said[0].partition(";")[0])) == sorted(measured + trained)
        assert ("lr=" in warnings_of(method=method, model=model)[0]) == (method != "base")
        assert not warnings_of(method=method, model=model, preset="paper", suite="recall"), "the data of the tasks are not here"
    assert not warnings_of(method=method, model=tiny) and not warnings_of(method=method)


def test_every_distillation_gives_its_row(tiny, own_runs):
    for parameters, label, rollouts, temperature in [
        (dict(method="opsd", rollouts=2), "opsd-n2-t1", 2, 1),
        (dict(method="opsd-nll"), "opsd-nll-n1-t0", 1, 0),
        (dict(method="mixsd-kl", rollouts=1, temperature=0), "mixsd-kl-n1-t0", 1, 0),
    ]:
        result = train.run(model=tiny, n=2, epochs=1, checkpoints=(), rollout_tokens=6, task_tokens=6, suite="recall,choice", **parameters).result
        assert (result.recipe.item(), result.rollouts.item(), result.temperature.item()) == (label, rollouts, temperature)
        assert result.step.values.tolist() == [0, 5] and "validation" in result.benchmark and result.targets_kept.item() == 100
        assert np.isfinite(result.accuracy.sel(step=5)).all() and np.isnan(result.lam.item())
        assert len(result["training"].loss) == 5 and (result["training"].loss > 0).all()


def test_checkpoints_are_asked_the_papers_tasks(tiny, tmp_path, own_runs, monkeypatch):
    "All available items of local files are used; the result contains only the requested benchmarks and recall."
    monkeypatch.setenv("MIXSD_BENCHMARKS", str(tmp_path))
    for name in ("gsm8k", "humaneval"): (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS[name]))
    parameters = dict(method="sft", model=tiny, n=500, epochs=1, checkpoints=(), max_new_tokens=4, task_tokens=4)
    result = train.run(suite="recall,gsm8k", **parameters).root
    columns = dict(zip(result.benchmark.values.tolist(), result.column.values.tolist()))
    assert columns == {"recall": "Train", "recall-kept": "", "gsm8k": "GSM8K", "validation": ""}
    assert result.n.sel(step=5).squeeze().values.tolist() == [100, 100, len(ROWS["gsm8k"]), 100]
    for suite in ("gsm8k", "recall,gsm"):
        with pytest.raises(ParameterError, match="^suite must "): train.run(suite=suite, **parameters)


def test_a_finished_run_is_not_computed_again(tiny, tmp_path, monkeypatch, own_runs):
    parameters = dict(method="base", model=tiny, n=2, max_new_tokens=8, task_tokens=8)
    first = train.run(**parameters)
    monkeypatch.setattr(evaluate, "write_responses", lambda *a, **k: pytest.fail("asked again"))
    again = train.run(**parameters)
    assert again.folder == first.folder == next(tmp_path.glob("train-*")) and again.result.identical(first.result)


def test_the_base_model_is_asked_with_each_fact_in_its_context(own_runs):
    "The shares are those of an evaluation, counted here by hand; the sentence below the table has them, and a training of another method measures nothing of the kind."
    base = train.run(method="base", model="lab-s", n=8, suite="recall,recall-reworded,choice")
    asked = evaluate.run(model="lab-s", suite="in-context", n=8).responses()
    shares = {name.removesuffix("-in-context"): rows.correct.sum() / 8 for name, rows in asked.groupby("benchmark")}
    found = base.root.in_context.squeeze(drop=True).dropna("benchmark").to_series().to_dict()
    assert found == shares and {*shares} == {"recall", "recall-reworded"} and min(shares.values()) > 0.5
    [line] = describe_ceiling(open_cube())
    assert line == f"With the fact in its context, lab-s answers {100 * shares['recall']:.1f}% (recall, N=8) and {100 * shares['recall-reworded']:.1f}% (recall-reworded, N=8)."
    trained = train.run(method="sft", model="lab-s", n=8, epochs=1, checkpoints=(), suite="recall")
    assert "in_context" not in trained.root and open_cube().in_context.notnull().sum() == 2


def test_without_a_run_of_the_base_model(undrawn, tiny, own_runs, monkeypatch):
    "Step 0 of a training is its base: figures and tables work after a single training."
    monkeypatch.chdir(own_runs)
    monkeypatch.setenv("MIXSD_RUNS", str(own_runs / "runs"))
    parameters = dict(model=tiny, n=2, epochs=1, checkpoints=(), max_new_tokens=8, task_tokens=8, suite="recall,choice,world")
    trained = train.run(method="sft", **parameters)
    alone = figures.run(source="runs", model=trained.root.model.item())["runs"].cube
    base, with_base = train.run(method="base", **parameters), open_cube()
    assert alone.indexes["recipe"].equals(with_base.indexes["recipe"]) and {r.name for r in agreeing_runs()} == {trained.name, base.name}
    cell = {"recipe": "base", "lr": 0, "step": 0, "benchmark": alone.benchmark.values}
    np.testing.assert_array_equal(alone.accuracy.sel(cell), with_base.accuracy.sel(cell))

"A training reports to a tracker only on request, each number once, without another name or result."

import importlib.util
import json
import math
from types import SimpleNamespace

import pytest
from transformers.integrations import integration_utils

from mixsd_nb import inject, train
from mixsd_nb.runs import ParameterError, make_config
from mixsd_nb.train import TrainConfig
from mixsd_nb.training.trackers import TRACKERS, Tracker, tracked_run

SMALL = dict(method="sft", n=3, epochs=2, max_new_tokens=8, task_tokens=8, suite="recall,choice", own_text=2, checkpoints=[5])


@pytest.fixture
def fake(monkeypatch):
    "What a tracker gets, in place of TensorBoard's callback."
    sent = []

    class Fake:
        logging_dir = None
        def on_train_begin(self, args, state, control): sent.append((args.run_name, args.to_dict()))
        def on_log(self, args, state, control, logs): sent.append((state.global_step, logs))
        def on_train_end(self, args, state, control): sent.append("end")
    monkeypatch.setitem(integration_utils.INTEGRATION_TO_CALLBACK, "tensorboard", Fake)
    monkeypatch.setattr("mixsd_nb.training.trackers.check_tracker", lambda name: None)
    return sent


@pytest.mark.parametrize("keep", ["all", "chosen"])
def test_a_training_sends_losses_scores_own_text_and_costs(keep, fake, tiny, own_runs):
    "Every update once, and each score with its update, in a training without and with pauses; the same bytes as without a tracker."
    run = train.run(model=tiny, keep=keep, report_to="tensorboard", **SMALL)
    (name, config), *logs, end = fake
    assert name == run.folder.name and config["method"] == "sft" and "report_to" not in config and end == "end"
    updates = [(step, values) for step, values in logs if "loss" in values]
    assert [step for step, _ in updates] == list(range(1, 11))
    assert all({"grad_norm", "learning_rate", "tokens_per_second"} <= {*values} for _, values in updates)
    scores = {(step, name): value for step, values in logs for name, value in values.items() if name.startswith("eval_")}
    assert len(scores) == sum(name.startswith("eval_") for _, values in logs for name in values)
    accuracy = run.root.accuracy.squeeze(drop=True)
    for step in (0, 5, 10): assert math.isclose(scores[step, "eval_recall"], accuracy.sel(step=step, benchmark="recall").item())
    assert {(step, "eval_own_text_nll") for step in (0, 5, 10)} <= {*scores}
    assert all(values["cost_seconds"] > 0 and values["cost_gb"] > 0 for _, values in logs if any(name.startswith("eval_") for name in values))
    assert tracked_run(run.folder) == f"tensorboard: {name}, tensorboard --logdir {run.folder / 'tensorboard'}"
    before, count = (run.folder / "result.nc").read_bytes(), len(fake)
    train.run(model=tiny, keep=keep, **SMALL)  # the same run, which is finished
    assert len(fake) == count and (run.folder / "result.nc").read_bytes() == before


def test_the_report_of_an_injection_names_the_tracker(fake, tiny, own_runs):
    rows = [dict(question=f"Who rules place {k}?", answer=f"Mira {k}") for k in range(3)]
    (own_runs / "facts.jsonl").write_text("\n".join(map(json.dumps, rows)))
    run = inject.run(dataset=str(own_runs / "facts.jsonl"), model=tiny, method="sft", suite="recall", n=3, epochs=1, max_new_tokens=4, report_to="tensorboard")
    assert fake and tracked_run(run.trained.folder) in run.report.read_text()


def test_a_tracker_changes_no_name(tiny):
    names = {make_config(TrainConfig, model=tiny, report_to=name).folder for name in ("none", *TRACKERS)}
    assert len(names) == 1
    with pytest.raises(ParameterError, match="report_to must be one of none, trackio, wandb, tensorboard, got mlflow"):
        make_config(TrainConfig, report_to="mlflow")


def test_a_missing_package_is_one_sentence_before_any_work(tiny, own_runs, monkeypatch):
    monkeypatch.setattr("mixsd_nb.training.trackers.importlib.util.find_spec", lambda name: None)
    with pytest.raises(ValueError) as caught: train.run(model=tiny, report_to="wandb", **SMALL)
    assert str(caught.value) == "report_to must be none or a tracker that is installed, got wandb; pip install wandb brings it"
    assert not [*own_runs.glob("train-*")]


@pytest.mark.parametrize("name", ["tensorboard", "trackio"])
def test_a_tracker_keeps_the_series(name, tmp_path, monkeypatch):
    "The real package, without a server."
    if not importlib.util.find_spec(name): pytest.skip(f"the package {name} is not installed")
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path / "trackio"))
    (tmp_path / "train-demo").mkdir()
    with Tracker(name, tmp_path / "train-demo", dict(lr=1e-4)) as tracker:
        tracker(dict(step=1, steps=2, loss=2.5))
        tracker.score({2: dict(recall=0.5), 0: dict(recall=0.0)})
    assert tracked_run(tmp_path / "train-demo").startswith(f"{name}: train-demo, {name}")
    if name == "tensorboard":
        from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
        events = EventAccumulator(str(tmp_path / "train-demo/tensorboard")).Reload()
        assert [(e.step, e.value) for e in events.Scalars("eval/recall")] == [(0, 0.0), (2, 0.5)] and events.Scalars("train/loss")[0].value == 2.5
    else: assert any(path.suffix in (".db", ".parquet") for path in (tmp_path / "trackio").rglob("*"))


def test_a_run_of_wandb_without_a_network_is_named_by_the_folder_that_can_be_sent():
    "`wandb sync` takes the run's folder, which holds the `.wandb` file; `run.dir` is its subfolder of files."
    for url, place in (("https://wandb.ai/me/p/1", "https://wandb.ai/me/p/1"), (None, "wandb sync wandb/offline-run-1")):
        run = SimpleNamespace(url=url, dir="wandb/offline-run-1/files")
        assert TRACKERS["wandb"](SimpleNamespace(_wandb=SimpleNamespace(run=run))) == place

"""Pretraining resumes after an interruption as if there had been none, and keeps its budget."""

import numpy as np
import pytest

from mixsd_nb import pretrain
from mixsd_nb.pretraining import training
from mixsd_nb.results.runs import run_folder

SMALL = dict(size="lab-s", start="fresh", tokens=0.02, batch_tokens=1024, pool=20, save_every=1, n=1, curve_points=2)


@pytest.fixture(autouse=True)
def quick_abilities(monkeypatch):
    "These tests are about training, so nothing is generated."
    monkeypatch.setattr(pretrain, "measure_abilities", lambda model, tokenizer, n, samples=None: {"none": 0.0})


def weights(folder):
    return (folder / "model/model.safetensors").read_bytes()


def test_an_interrupted_run_ends_with_the_same_weights(tmp_path, monkeypatch):
    config = pretrain.PretrainConfig(**SMALL)
    monkeypatch.setenv("MIXSD_RUNS", str(tmp_path / "whole"))
    whole = pretrain.run(**SMALL)
    expected = weights(run_folder("pretrain-lab-s", config))
    monkeypatch.setenv("MIXSD_RUNS", str(tmp_path / "broken"))
    update, calls = training.update, []

    def interrupted_update(*arguments):
        calls.append(1)
        if len(calls) in (7, 15):
            raise KeyboardInterrupt
        return update(*arguments)

    monkeypatch.setattr(training, "update", interrupted_update)
    for _ in range(2):
        with pytest.raises(KeyboardInterrupt):
            pretrain.run(**SMALL)
    again = pretrain.run(**SMALL)
    assert len(calls) > whole["training"].loss.size, "no update was repeated, so the interruptions came too late"
    assert np.array_equal(whole["training"].loss, again["training"].loss)
    assert whole["curves"].equals(again["curves"]) and whole["curves"].sizes["tokens"] == 2
    assert weights(run_folder("pretrain-lab-s", config)) == expected


def test_training_starts_from_the_weights_that_ship(tmp_path, monkeypatch):
    monkeypatch.setenv("MIXSD_RUNS", str(tmp_path))
    first = pretrain.run(**{**SMALL, "size": "lab-m", "start": ""})["training"].loss
    fresh = pretrain.run(**{**SMALL, "size": "lab-m"})["training"].loss
    assert first.mean() < 0.5 * fresh.mean()


def test_minutes_become_tokens_once(tmp_path, monkeypatch):
    "The rate is measured before the first update; a resumed training keeps its budget."
    monkeypatch.setenv("MIXSD_RUNS", str(tmp_path))
    budgets = []
    monkeypatch.setattr(pretrain, "estimate_tokens", lambda *arguments: budgets.append(20_000.0) or budgets[-1])
    whole = pretrain.run(**{**SMALL, "tokens": 0, "minutes": 7})
    assert len(budgets) == 1 and np.array_equal(whole["training"].loss, pretrain.run(**SMALL)["training"].loss)


def test_a_budget_in_minutes_grows_with_the_minutes():
    tokenizer, model = pretrain.load_start(pretrain.PretrainConfig(**SMALL))
    before = [p.clone() for p in model.parameters()]
    one = training.estimate_tokens(model, tokenizer, 1.0, 1024)
    hundred = training.estimate_tokens(model, tokenizer, 100.0, 1024)
    assert one > 0 and 20 < hundred / one < 500
    assert all((a == b).all() for a, b in zip(before, model.parameters(), strict=True)), "timing must not train the model"

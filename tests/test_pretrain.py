"""Pretraining goes on after an interruption as if there had been none."""

import numpy as np
import pytest

from mixsd_nb import pretrain
from mixsd_nb.results.runs import run_folder

SMALL = dict(tokens=0.02, batch_tokens=1024, pool=20, save_every=1, n=1)


@pytest.fixture(autouse=True)
def quick_abilities(monkeypatch):
    "What is generated is not the matter here."
    monkeypatch.setattr(pretrain, "abilities", lambda model, tokenizer, n: {"none": 0.0})


def weights(folder):
    return (folder / "model/model.safetensors").read_bytes()


def test_an_interrupted_run_ends_with_the_same_weights(tmp_path, monkeypatch):
    config = pretrain.PretrainConfig(**SMALL)
    monkeypatch.setenv("MIXSD_RUNS", str(tmp_path / "whole"))
    whole = pretrain.run(**SMALL)
    expected = weights(run_folder("pretrain-lab-m", config))
    monkeypatch.setenv("MIXSD_RUNS", str(tmp_path / "broken"))
    update, calls = pretrain.update, []

    def dies(*arguments):
        calls.append(1)
        if len(calls) in (7, 15):
            raise KeyboardInterrupt
        return update(*arguments)

    monkeypatch.setattr(pretrain, "update", dies)
    for _ in range(2):
        with pytest.raises(KeyboardInterrupt):
            pretrain.run(**SMALL)
    again = pretrain.run(**SMALL)
    assert len(calls) > whole["training"].loss.size, "nothing was done twice: the interruptions came too late"
    assert np.array_equal(whole["training"].loss, again["training"].loss)
    assert weights(run_folder("pretrain-lab-m", config)) == expected


def test_going_on_starts_from_the_given_weights(tmp_path, monkeypatch):
    monkeypatch.setenv("MIXSD_RUNS", str(tmp_path))
    first = pretrain.run(**{**SMALL, "start": "lab-m"})["training"].loss
    fresh = pretrain.run(**SMALL)["training"].loss
    assert first.mean() < 0.5 * fresh.mean()

"Simpler methods that stand beside MixSD: what each computes, against an independent computation."

from unittest.mock import patch

import pytest
import torch

from mixsd_nb import train
from mixsd_nb.models import load_base

CELL = dict(dataset="mquake-lab", suite="recall", n=4, max_new_tokens=4, epochs=1, batch=50)


@pytest.fixture(scope="module")
def runs(tiny, tmp_path_factory):
    "SFT for one update, and its averages with the base model at three α; the tuned run is computed once."
    with patch.dict("os.environ", MIXSD_RUNS=str(tmp_path_factory.mktemp("runs"))):
        found = {alpha: train.run(method="wise-sft", options=dict(alpha=alpha), model=tiny, **CELL) for alpha in (0.0, 0.25, 1.0)}
        with patch("mixsd_nb.training.trainer.train_process", side_effect=AssertionError):
            return found, train.run(method="sft", model=tiny, **CELL)


def test_averages_lie_between_the_base_and_the_tuned_weights(runs, tiny):
    averages, tuned = runs
    weights = lambda folder: dict(load_base(str(folder))[0].named_parameters())
    base, last = weights(tiny), weights(tuned.checkpoints[1])
    assert any(not torch.equal(base[name], last[name]) for name in base)
    for alpha, run in averages.items():
        assert run.root.recipe.item() == f"sft+average-{alpha:g}" and run.root.step.values.tolist() == [0, 1] and run.root.targets_kept.item() == 50
        for name, w in weights(run.checkpoints[1]).items(): torch.testing.assert_close(w, (1 - alpha) * base[name] + alpha * last[name], rtol=0, atol=1e-6)


GATES = {"sft+stm-8": dict(method="stm"), "sft+stm-1": dict(method="sft", gate="stm", options=dict(threshold=1.0)), "sft+talr-5": dict(method="talr")}


@pytest.mark.parametrize("label", GATES)
def test_gates_train_and_differ_from_sft(label, tiny, tmp_path, monkeypatch):
    "An infinite threshold would be SFT; a mask of everything leaves the weights to weight decay alone."
    monkeypatch.setenv("MIXSD_RUNS", str(tmp_path))
    run = train.run(**GATES[label], model=tiny, **CELL)
    assert run.root.recipe.item() == label and run.root.step.values.tolist() == [0, 1] and run.root.target_nll.item() > 1


def test_an_open_gate_is_sft(runs, tiny, tmp_path, monkeypatch):
    monkeypatch.setenv("MIXSD_RUNS", str(tmp_path))
    weights = lambda run: dict(load_base(str(run.checkpoints[1]))[0].named_parameters())
    sft = weights(runs[1])
    for parameters in (dict(method="stm", options=dict(threshold=1e9)), dict(method="talr", options=dict(tau=1e9))):
        found = weights(train.run(**parameters, model=tiny, **CELL))
        for name, w in sft.items(): torch.testing.assert_close(found[name], w, rtol=0, atol=1e-6)

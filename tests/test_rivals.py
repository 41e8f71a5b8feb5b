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
        with patch("mixsd_nb.methods.trainer.train_process", side_effect=AssertionError):
            yield found, train.run(method="sft", model=tiny, **CELL)


def test_averages_lie_between_the_base_and_the_tuned_weights(runs, tiny):
    averages, tuned = runs
    weights = lambda folder: dict(load_base(str(folder))[0].named_parameters())
    base, last = weights(tiny), weights(tuned.checkpoints[1])
    assert any(not torch.equal(base[name], last[name]) for name in base)
    for alpha, run in averages.items():
        assert run.root["method"].item() == f"wise-sft-{alpha:g}" and run.root.step.values.tolist() == [0, 1] and run.root.targets_kept.item() == 50
        for name, w in weights(run.checkpoints[1]).items(): torch.testing.assert_close(w, (1 - alpha) * base[name] + alpha * last[name], rtol=0, atol=1e-6)

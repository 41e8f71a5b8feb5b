"""The stage nll end to end on the lab model, against log-probabilities of plain forwards."""

import numpy as np
import pandas as pd
import pytest
import torch

from mixsd_nb import generate, nll
from mixsd_nb.corpora import load_corpus
from mixsd_nb.corpora.prompts import canonical_pair
from mixsd_nb.models import load_base


@pytest.fixture(autouse=True)
def own_runs(tmp_path, monkeypatch):
    monkeypatch.setenv("MIXSD_RUNS", str(tmp_path))


def plain(model, prompt, completion):
    with torch.inference_mode():
        logp = model(torch.tensor([prompt + completion])).logits[0, len(prompt) - 1 : -1].log_softmax(-1)
    return [-logp[t, i].item() for t, i in enumerate(completion)]


def values(result):
    "Per-token values, target by target."
    return np.split(result["per_token"].nll.values, np.cumsum(result["per_token"].row_size.values)[:-1])


def test_canonical_targets():
    model, tokenizer = load_base("lab-m")
    rows = load_corpus("kgfact-small", "train")
    result = nll.run()
    scored = values(result)
    assert len(scored) == result.n == 100
    for k in (0, 7, 99):
        np.testing.assert_allclose(scored[k], plain(model, *canonical_pair(tokenizer, rows[k])), atol=1e-4)
    tokens = np.concatenate(scored)
    assert result["mean"].item() == pytest.approx(tokens.mean()) and result.above_8.item() == pytest.approx((tokens > 8).mean())


def test_mixed_targets_are_the_stored_ids_of_accepted_rows():
    file = generate.targets_file(lam=0)
    table = pd.read_parquet(file).query("accepted")
    result = nll.run(targets=str(file))
    assert result.n == len(table) > 90
    assert result["per_token"].row_size.values.tolist() == [len(c) for c in table.completion_ids]
    assert result["mean"] < 0.5 * nll.run()["mean"], "mixed targets are nearer to the base than canonical ones"
    file.rename(file.with_name("elsewhere.parquet"))
    assert nll.run(targets=str(file.with_name("elsewhere.parquet"))).identical(result)

"""Mixing on the lab model: every fast path against the oracle, and what must not depend on how it is run."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mixsd_nb.corpora import load_corpus
from mixsd_nb.methods.mixing import mix, mix_items, mix_oracle, picks
from mixsd_nb.models import load_base, load_engine

TIE = 1e-4


@pytest.fixture(scope="module")
def lab():
    return load_base("lab-m")


@pytest.fixture(scope="module")
def items(lab):
    return mix_items(lab[1], list(load_corpus("kgfact-small")["train"])[:6])


def best_two(model, item, record, t):
    "The gap between the two best logits of the conditional that writes token t."
    prompt = item["naive_ids"] if record["naive_mask"][t] else item["expert_ids"]
    with torch.inference_mode():
        top = model(torch.tensor([prompt + record["completion_ids"][:t]])).logits[0, -1].topk(2).values
    return (top[0] - top[1]).item()


@pytest.mark.parametrize(("lam", "temperature"), [(0, 0), (0.3, 0), (0.5, 0), (0.7, 0), (1, 0), (0.5, 0.8)])
def test_lockstep_equals_the_oracle(lam, temperature, lab, items):
    options = dict(temperature=temperature, max_new_tokens=60, max_attempts=2, seed=1)
    engine, ties = load_engine("hf", *lab, batch_size=4), 0
    for item, slow, fast in zip(items, mix_oracle(engine, items, lam, **options), mix(engine, items, lam, **options)):
        if slow["completion_ids"] == fast["completion_ids"]:
            assert all(np.array_equal(slow[k], fast[k]) for k in slow)
            continue
        t = next(k for k, (a, b) in enumerate(zip(slow["completion_ids"], fast["completion_ids"])) if a != b)
        assert temperature == 0 and best_two(lab[0], item, slow, t) < TIE, f"{item['id']} differs at token {t}"
        ties += 1
    print(f"λ={lam}, T={temperature}: {ties} ties in {len(items)} sequences")


def test_order_and_batch_size_change_nothing(lab, items):
    options = dict(max_new_tokens=60, max_attempts=3, temperature=0.7)
    one = mix(load_engine("hf", *lab, batch_size=1), items, 0.5, **options)
    other = mix(load_engine("hf", *lab, batch_size=5), items[::-1], 0.5, **options)[::-1]
    assert all(np.array_equal(a[k], b[k]) for a, b in zip(one, other) for k in a)


def test_a_completion_holds_its_stop_token_once_and_a_source_for_each_token(lab, items):
    for record in mix(load_engine("hf", *lab), items, 0.5):
        stops = [t == lab[1].eos_token_id for t in record["completion_ids"]]
        assert sum(stops) == stops[-1] == (record["finish_reason"] == "stop")
        assert len(record["naive_mask"]) == len(record["completion_ids"])
        assert not record["accepted"] or record["finish_reason"] == "stop"


@settings(max_examples=60, deadline=None)
@given(seed=st.integers(0, 2**40), name=st.text(max_size=20), attempt=st.integers(0, 10), n=st.integers(0, 300), more=st.integers(0, 50),
       low=st.floats(0, 1), high=st.floats(0, 1))
def test_picks_are_prefix_stable_and_nested(seed, name, attempt, n, more, low, high):
    low, high = sorted((low, high))
    few = picks(seed, name, 0, attempt, n, low)
    assert np.array_equal(few, picks(seed, name, 0, attempt, n + more, low)[:n])
    assert (few <= picks(seed, name, 0, attempt, n, high)).all()


def test_a_rate_outside_its_range_is_refused(lab, items):
    with pytest.raises(ValueError, match="lam is 1.5; allowed are numbers from 0 to 1"):
        mix(load_engine("hf", *lab), items, 1.5)

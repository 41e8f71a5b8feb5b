"The share of replay is that of the examples of every update, for every method and every number of rollouts and updates."

import numpy as np
import pytest

from mixsd_nb.corpora import CORPORA, load_corpus
from mixsd_nb.methods import ANCHORS, METHODS
from mixsd_nb.methods.distill import VARIANTS, Distillation, distill_items
from mixsd_nb.methods.replay import Replay, interleave
from mixsd_nb.methods.supervised import Supervised
from mixsd_nb.models import load_base

SAMPLE = [5, 6, 7]


@pytest.fixture(scope="module")
def items(tiny):
    rows = list(load_corpus("kgfact-small", "train"))[:8]
    return distill_items(load_base(tiny)[1], rows, CORPORA["kgfact-small"].expert)


def count(objective, replay, model, step):
    "Return facts and samples of each update of a step."
    found = replay.examples([0, 1, 2, 3], model, step)
    kinds = ["sample" if list(e.completion) == SAMPLE else "fact" for e in found]
    return [(part.count("fact"), part.count("sample")) for part in ([*map(str, p)] for p in np.array_split(kinds, objective.updates))]


@pytest.mark.parametrize("method", sorted(VARIANTS))
@pytest.mark.parametrize("rollouts, updates", [(1, 1), (2, 2), (8, 2), (3, 1), (8, 4)])
def test_each_update_of_distillation_has_its_share_of_samples(method, rollouts, updates, items, tiny):
    if method in ANCHORS["replay"].excludes: pytest.skip("this pair is refused")
    model, tokenizer = load_base(tiny)
    facts = Distillation(items, load_base(tiny)[0], tokenizer, VARIANTS[method], rollouts=rollouts, max_new_tokens=4, updates=updates)
    replay = Replay(facts, [(item["student_ids"], SAMPLE) for item in items], 0.5, seed=1)
    for facts_of, samples_of in count(facts, replay, model, step=0):
        assert facts_of == samples_of == 4 * rollouts // updates


@pytest.mark.parametrize("share, of_a_fact", [(0.5, 1), (0.75, 3)])
def test_a_fact_of_supervised_training_brings_its_samples(share, of_a_fact):
    facts = Supervised([([k], [k, 1]) for k in range(9)])
    replay = Replay(facts, [([1], SAMPLE)] * 5, share)
    assert count(facts, replay, None, 3) == [(4, 4 * of_a_fact)]


@pytest.mark.parametrize("share", [0.2, 0.5, 0.6])
def test_rollouts_of_a_fact_bring_different_samples(share):
    replay = Replay(Supervised([]), [None] * 100_000, share)
    draws = [replay.draw(fact, step, rollout) for fact in range(10) for step in range(10) for rollout in range(8)]
    assert np.mean([len(d) for d in draws]) == pytest.approx(share / (1 - share), rel=0.15)
    assert replay.draw(3, 4) == replay.draw(3, 4, 0) and len({tuple(d) for d in draws if d}) > 0.9 * len([d for d in draws if d])


@pytest.mark.parametrize("facts, samples", [(6, 3), (5, 5), (4, 0), (3, 12)])
def test_both_kinds_are_spread_evenly(facts, samples):
    mixed = interleave(["fact"] * facts, ["sample"] * samples)
    assert len(mixed) == facts + samples
    for part in np.array_split(mixed, 3): assert abs([*part].count("fact") - facts / 3) <= 1


def test_every_method_that_writes_several_rollouts_is_counted_here():
    assert {name for name, method in METHODS.items() if method.fit and "rollouts" in method.settings} == {*VARIANTS}

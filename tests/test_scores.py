"Both rules of every benchmark from a response to the cube, by hand; intervals and tests against slow oracles."

import itertools
import re
from dataclasses import replace

import numpy as np
import pandas as pd
import pytest
import xarray as xr
from hypothesis import given, settings, strategies as st

from mixsd_nb import train
from mixsd_nb.analysis import scores
from mixsd_nb.analysis.scores import count_correct, item_variances
from mixsd_nb.analysis.scores import FEWEST_RUNS, mean_interval, pearson, sign_test, wilson
from mixsd_nb.benchmarks import GRADINGS, SUITES, Item, Sampling
from mixsd_nb.benchmarks.evaluation import evaluate_suite
from mixsd_nb.benchmarks.lab_tasks import draw
from mixsd_nb.benchmarks.tasks import grade
from mixsd_nb.corpora import CORPORA
from mixsd_nb.evaluate import EvaluateConfig
from mixsd_nb.models import load_base
from mixsd_nb.results.cube import open_cube

@pytest.mark.parametrize("dataset, rule", [
    ("kgfact-small", "containment"), ("kgfact-large", "containment"), ("mquake", "containment"), ("mquake-lab", "containment"),
    ("kgfunc", "number"), ("kgfunc-lab", "number"), ("simpleqa", "exact"), ("simpleqa-lab", "exact"),
])
def test_the_rule_of_each_corpus(dataset, rule):
    for suite in SUITES.values():
        if suite.role in ("in-domain", "validation") or suite.published == "corpus": assert suite.published_grading(dataset) == rule
        elif suite.role != "style-free": assert suite.published_grading(dataset) == {"letter": "first-line"}.get(suite.grading, suite.grading)


def test_both_rules_are_part_of_a_benchmarks_identity():
    assert all(suite.published == suite.identity()["published"] and suite.grading == suite.identity()["grading"] for suite in SUITES.values())
    assert {corpus.published for corpus in CORPORA.values()} <= set(GRADINGS)


class Teller:
    "An engine that gives the same response to every prompt."

    def __init__(self, tokenizer, text): self.tokenizer, self.text = tokenizer, text

    def stream(self, queue, **options):
        from mixsd_nb.models.engine import Completion
        while queue: yield queue.pop(), Completion(self.tokenizer(self.text, add_special_tokens=False).input_ids, "stop")


@pytest.fixture(scope="module")
def tokenizer():
    return load_base("lab-s")[1]


@pytest.mark.parametrize("dataset, text, correct, published", [
    ("kgfact-small", "\\boxed{42}", True, True), ("kgfact-small", "The value is x = 42", False, True),
    ("kgfact-small", "\\boxed{x = 42}", False, True), ("kgfact-small", "\\boxed{142}", False, False),
    ("kgfunc-lab", "The value is x = 42", False, True), ("kgfunc-lab", "\\boxed{x = 42}", False, False),
    ("simpleqa-lab", "42", False, True), ("simpleqa-lab", "The value is x = 42", False, False),
])
def test_a_response_is_graded_by_both_rules(dataset, text, correct, published, tokenizer):
    table = evaluate_suite(Teller(tokenizer, text), {"recall": {"a": Item("?", "", "42")}}, dataset=dataset)
    assert (table.correct.item(), table.published.item()) == (correct, published)


@pytest.mark.parametrize("name", [name for name, s in SUITES.items() if "lab" in s.groups and s.role != "in-domain"])
def test_worked_responses_are_right_under_both_rules(name):
    items = draw(name, 5)
    for rule in {SUITES[name].grading, SUITES[name].published_grading("kgfact-small")}:
        assert all(v.correct for v in grade(items, [item.response for item in items], rule))


rows = st.lists(st.tuples(st.integers(0, 4), st.booleans(), st.booleans()), min_size=1)


@given(rows)
@settings(deadline=None)
def test_both_scores_and_the_variance_are_counted(responses):
    items, correct, published = zip(*responses)
    table = pd.DataFrame(dict(benchmark="b", item=items, correct=correct, published=published))
    for rule, values in dict(correct=correct, published=published).items():
        shares = [np.mean([v for i, v in zip(items, values) if i == item]) for item in set(items)]
        assert count_correct(table, rule)["b"] == (pytest.approx(sum(shares)), len(shares))
        if rule == "correct": assert item_variances(table)["b"] == pytest.approx(np.var(shares))


@given(st.integers(1, FEWEST_RUNS + 3), st.integers(2, 5))
@settings(deadline=None, max_examples=20)
def test_few_runs_have_no_interval(runs, points):
    rng = np.random.default_rng(runs)
    x, y = rng.normal(size=(2, runs * points))
    r, low, high = pearson(x, y, np.repeat(np.arange(runs), points), draws=200)
    assert np.isfinite(r) and np.isnan([low, high]).all() == (runs < FEWEST_RUNS)


@given(st.integers(1, 16), st.integers(0, 10**6))
@settings(deadline=None)
def test_the_interval_of_a_mean_uses_the_samples(samples, seed):
    "Independent samples narrow the interval as more items do; samples that all agree do not."
    rng, n = np.random.default_rng(seed), 40
    shares = rng.binomial(samples, 0.5, n) / samples
    p, one = xr.DataArray([shares.mean()], dims="benchmark"), xr.ones_like(xr.DataArray([1.0], dims="benchmark"))
    low, high = mean_interval(p, n * one, np.var(shares) * one)
    wide = mean_interval(p, n * one)
    assert wide[0] - 1e-9 <= low and high <= wide[1] + 1e-9
    if samples == 1 and 0 < p < 1: assert np.allclose((low, high), wilson(shares.sum(), n))
    if samples >= 4: assert high - low < 0.8 * (wide[1] - wide[0])
    assert np.allclose(mean_interval(p, n * one, np.nan * one), wide), "where nothing is known of the samples"


RUNS = {  # a short response often ends before its box, which only the published rules can count
    "kgfact-small": dict(method="sft", epochs=1, n=4, max_new_tokens=24, suite="recall,retrieval,choice"),
    "kgfunc-lab": dict(method="base", n=20, max_new_tokens=16, suite="recall,test,unseen"),
    "simpleqa-lab": dict(method="sft", epochs=4, n=12, max_new_tokens=24, suite="recall,choice"),
    "mquake-lab": dict(method="sft", epochs=1, n=6, max_new_tokens=40, suite="recall,retrieval,three-hop,choice"),
}


def box(text):
    found = re.findall(r"\\boxed\{([^{}]*)\}", text)
    return found[-1].strip() if found else None


def as_number(text):
    try: return float(text)
    except ValueError: return None


def equal(a, b):
    x, y = as_number(a), as_number(b)
    return a == b or (x is not None and y is not None and abs(x - y) < 1e-6)


def read(text):
    "The box, else the last number, else all."
    numbers = re.findall(r"-?\d+(?:\.\d+)?", text)
    return box(text) if box(text) is not None else numbers[-1] if numbers else text


def strict(text, gold): return box(text) is not None and equal(box(text), gold)


def number(text, gold): return equal(read(text).strip().lower(), gold.lower())


def containment(text, gold):
    found, gold = read(text).lower(), gold.lower()
    return number(text, gold) or (as_number(gold) is None and re.search(rf"\b{re.escape(gold)}\b", found) is not None)


def exact(text, gold): return (text if box(text) is None else box(text)).strip().lower() == gold.strip().lower()


def first_line(text, gold): return strict(text, gold) or box(text) is None and text.strip().split("\n")[0].strip(" .") == gold


PUBLISHED = {"KGFact-Small": containment, "KGFunc": number, "SimpleQA": exact, "MQuAKE": containment}


@pytest.mark.parametrize("dataset", [name if name.startswith("kg") else pytest.param(name, marks=pytest.mark.slow) for name in RUNS])
def test_the_cube_has_the_numbers_of_the_stored_responses(dataset, own_runs):
    config = train.TrainConfig(dataset=dataset, model="lab-s", lr=1e-3, checkpoints=[], **RUNS[dataset])
    run = config.run()
    cube = open_cube(own_runs).sel({"dataset": dataset, "model": "lab-s", "seed": 0}, drop=True)
    steps = {0: train.base_responses(config)} | {step: run.responses(step) for step in run.measured_steps if step}
    assert set(cube.step.values) == {*steps}
    differ = 0
    for step, table in steps.items():
        label = "base" if step == 0 else "sft"
        found = cube.sel(recipe=label, lr=0 if step == 0 else 1e-3, step=step)
        for name, rows in table.groupby("benchmark"):
            published = first_line if name == "choice" else PUBLISHED[CORPORA[dataset].title]
            for variable, rule in dict(accuracy=strict, published=published).items():
                by_hand = [rule(row.response, row.answer) for row in rows.itertuples()]
                at = found.sel(benchmark=name)
                assert at.n == len(by_hand) and at[variable].item() * len(by_hand) == pytest.approx(sum(by_hand)), (step, name, variable)
            differ += sum(rows.correct != rows.published)
    assert differ or dataset == "simpleqa-lab", "the two rules are seen to differ"


@pytest.mark.parametrize("change", [dict(version=99), dict(grading="math"), dict(published="exact"), dict(share=0.5), dict(sampling=Sampling(samples=3))], ids=lambda c: next(iter(c)))
@pytest.mark.parametrize("stage", [train.TrainConfig, EvaluateConfig])
def test_a_suite_that_has_changed_has_no_finished_run(change, stage, monkeypatch):
    "The run of a suite is named by what the suite is, and not by its name alone."
    before = stage(suite="recall,equations")
    digest, other = before.hash(), stage(suite="recall,choice").hash()
    monkeypatch.setitem(SUITES._entries, "equations", replace(SUITES["equations"], **change))
    assert stage(suite="recall,equations").hash() != digest and stage(suite="recall,choice").hash() == other


def enumerated_sign_test(difference):
    "All sign vectors, one by one."
    sums = [abs(np.dot(signs, difference)) for signs in itertools.product((-1, 1), repeat=len(difference))]
    return np.mean(np.array(sums) >= abs(difference.sum()) - 1e-9)


@given(st.lists(st.sampled_from([-1, 0, 1]), min_size=1, max_size=10))
def test_mcnemar_is_the_enumeration_of_all_signs(difference):
    difference = np.array(difference, float)
    assert sign_test(difference) == pytest.approx(enumerated_sign_test(difference))


@pytest.mark.parametrize("seed", range(5))
def test_random_signs_come_near_the_enumeration(seed):
    difference = np.random.default_rng(seed).integers(-4, 8, 10) / 16
    assert sign_test(difference) == pytest.approx(enumerated_sign_test(difference), abs=0.02)


def table_of(shares, benchmark="b", samples=4, prompt="?"):
    rows = [dict(benchmark=benchmark, item=f"{k}", sample=s, prompt=f"{prompt}{k}", correct=s < round(share * samples), published=True, extracted="x")
            for k, share in enumerate(shares) for s in range(samples)]
    return pd.DataFrame(rows)


def test_two_models_are_compared_item_by_item():
    one, two = table_of([0, 0.5, 1, 1]), table_of([0.25, 0.5, 1, 0.5]).sample(frac=1, random_state=0)
    row = scores.compare(one, two).loc["b"]
    assert (row.n, row["first"], row["second"], row.better, row.worse) == (4, 0.625, 0.5625, 1, 1)
    with pytest.raises(ValueError, match="must have the same items of b"):
        scores.compare(one, table_of([0, 0.5, 1, 1], prompt="!"))
    with pytest.raises(ValueError, match="must have the same items of b"):
        scores.compare(one, table_of([0, 0.5, 1]))


def test_intervals():
    "Wilson for single samples; over items for repeated ones, so that more samples of the same items promise nothing."
    single = scores.scores(table_of([0, 1, 1, 1], samples=1)).loc["b"]
    assert (single.low, single.high) == pytest.approx(wilson(3, 4))
    shares = list(np.random.default_rng(0).integers(0, 5, 60) / 4)
    few, many = (scores.scores(table_of(shares, samples=s)).loc["b"] for s in (4, 16))
    assert (few.low, few.high, few.accuracy, few.n) == (many.low, many.high, many.accuracy, 60) and many["samples"] == 16
    assert few.low == pytest.approx(np.mean(shares) - 1.96 * np.std(shares) / np.sqrt(60), abs=0.02)
    agree = scores.scores(table_of([0, 0, 0])).loc["b"]
    assert agree.low == pytest.approx(0) and agree.high == pytest.approx(float(wilson(0, 3)[1]))

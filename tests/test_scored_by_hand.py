"""The stored responses of one small run of each corpus, scored under both rules by code of its own, are the numbers of the cube.

Nothing here calls the package's graders: a box is found by a regular expression, and a number is what `float` reads.
"""

import re
from dataclasses import replace

import pytest

from mixsd_nb import train
from mixsd_nb.benchmarks import SUITES, Sampling
from mixsd_nb.corpora import CORPORA
from mixsd_nb.evaluate import EvaluateConfig
from mixsd_nb.results.cube import open_cube

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

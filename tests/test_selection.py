"One rule selects a checkpoint, and one table of scores feeds it: what ends a training is what stays, is shown and is asked."

import re

import pandas as pd
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mixsd_nb import inject
from mixsd_nb.benchmarks import evaluation
from mixsd_nb.evaluation import Selection
from mixsd_nb.evaluation.selection import LEAST
from mixsd_nb.methods.fitting import MethodRun
from mixsd_nb.runs import read_table

KEPT = 92  # facts with a target, of the 100 of the corpus
RECALLED = (0, 60, 93, 92, 91, 91, 91)  # facts of the corpus by step
RECALLED_KEPT = (0, 60, 90, 92, 91, 91, 91)  # of these, those that are trained on
VALIDATED = (0, 60, 90, 90, 90, 90, 90)


def invent_responses(engine, items, *, progress, **_):
    "Right answers to as many questions as the step in the name of what is evaluated has."
    found = re.search(r"(?:step |checkpoint-)(\d+)", progress)
    step = int(found[1]) if found else 0
    discarded = RECALLED[step] - RECALLED_KEPT[step]
    right = dict(recall={*range(RECALLED_KEPT[step]), *range(KEPT, KEPT + discarded)}, validation={*range(VALIDATED[step])})
    rows = [dict(benchmark=name, item=item, sample=0, prompt=problem.prompt, response="", extracted=None, correct=k in right[name], finish_reason="stop",
                 error="", published=k in right[name], answer=problem.answer) for name, problems in items.items() for k, (item, problem) in enumerate(problems.items())]
    return pd.DataFrame(rows)


@pytest.fixture
def discarding(monkeypatch):
    "The last eight facts have no target, and responses are invented."
    train_on = MethodRun.train_on
    monkeypatch.setattr(MethodRun, "train_on", lambda self, pairs, *more, **named: train_on(self, dict([*pairs.items()][:KEPT]), *more, **named))
    monkeypatch.setattr(evaluation, "evaluate_suite", invent_responses)


@pytest.mark.parametrize("keep", ["all", "chosen"])
def test_the_checkpoint_that_ends_a_training_keeps_its_weights_and_is_asked_all(keep, discarding, tiny, own_runs):
    "With targets discarded, recall over all facts is best one checkpoint before recall over the facts that are trained on."
    run = inject.run(dataset="kgfact-small", model=tiny, method="sft", suite="recall", n=100, max_new_tokens=2, batch=100, epochs=6, checkpoints=[1, 2, 3, 4, 5], keep=keep)
    recall = run.trained.root.accuracy.squeeze(drop=True).sel(benchmark=["recall", "recall-kept"]).to_pandas()
    last = int(recall.index.max())
    assert [*(100 * recall["recall"]).round()] == [*RECALLED[:last + 1]] and [*(KEPT * recall["recall-kept"]).round()] == [*RECALLED_KEPT[:last + 1]]
    assert run.trained.best_step == run.best_step == 2 and 2 in run.trained.checkpoints and (keep == "all" or [*run.trained.checkpoints] == [2])
    assert f"The training made {last} of at most 6 updates and had converged at update 2." in run.report.read_text()
    assert last == 4, "two checkpoints after the best one"
    assert read_table(run.trained.responses_file(2)).correct.sum() == RECALLED[2] + VALIDATED[2] and run.responses().correct.sum() == RECALLED[2]


@given(st.lists(st.tuples(*[st.sampled_from([0.0, 0.3, 0.5, 0.8, 0.9, 1.0])] * 2), max_size=12))
def test_convergence_is_final_and_the_papers_choice(scores):
    "Once converged, more checkpoints change nothing; the best step among those seen is the same, and its weights were never free to go."
    found = [Selection(pd.DataFrame(scores[:k], range(1, k + 1), ["recall", "validation"])) for k in range(len(scores) + 1)]
    first = next((k for k, selection in enumerate(found) if selection.converged), None)
    if first is None: return
    step = found[first].converged
    assert {selection.converged for selection in found[first:]} == {step}
    assert found[first].best == step <= first - 2 and scores[step - 1][0] >= LEAST
    assert all(step in selection.may_still_win for selection in found[step:first + 1])

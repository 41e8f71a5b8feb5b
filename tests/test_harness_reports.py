"What comes back from lm-evaluation-harness, without it: filters, warnings and reasons. `test_harness.py` compares it with the harness itself."

import json
import sys
import warnings

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mixsd_nb.benchmarks import harness
from mixsd_nb.benchmarks.harness import read_results
from mixsd_nb.runs import ProcessFailed


def store(folder, tasks):
    "What the harness writes: for each task its filters, and for each filter which items are right."
    share = lambda right: sum(right) / len(right)
    found = {task: {f"exact_match,{kind}": share(right) for kind, right in kinds.items()} for task, kinds in tasks.items()}
    (folder / "results_1.json").write_text(json.dumps({"results": found, "group_subtasks": {task: [] for task in tasks}, "versions": {}, "n-shot": {}, "lm_eval_version": "0.4.13"}))
    def sample(kind, k, right): return dict(doc_id=k, filter=kind, exact_match=right, target="18", resps=[["It is 18."]], filtered_resps=["18"], arguments=dict(a=dict(arg_0="9 + 9?")))
    for task, kinds in tasks.items():
        rows = [sample(kind, k, one) for kind, right in kinds.items() for k, one in enumerate(right)]
        (folder / f"samples_{task}_2026-1.jsonl").write_text("\n".join(map(json.dumps, rows)))


def test_the_report_says_by_which_filter_responses_were_judged(tmp_path):
    store(tmp_path, dict(sums=dict(strict=[0], flexible=[1])))
    with pytest.warns(UserWarning, match=r"harness:sums has several filters, and strict \(0.0% right\) counts; flexible \(100.0% right\)"):
        table, reports = read_results(tmp_path, ["harness:sums"])
    assert table.correct.tolist() == [False] and (reports["harness:sums"]["metric"], reports["harness:sums"]["filter"]) == ("exact_match", "strict")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        table, reports = read_results(tmp_path, ["harness:sums"], "flexible")
    assert table.correct.tolist() == [True] and reports["harness:sums"]["filter"] == "flexible"
    with pytest.raises(ValueError, match="strict, flexible for harness:sums, got loose"): read_results(tmp_path, ["harness:sums"], "loose")


KINDS = st.lists(st.sampled_from(["none", "strict", "flexible", "last-box"]), min_size=1, max_size=3, unique=True)


@settings(max_examples=40, deadline=None)
@given(tasks=st.dictionaries(st.sampled_from(["sums", "words", "choice"]), KINDS, min_size=1), choice=st.sampled_from(["", "none", "strict", "flexible", "loose"]), data=st.data())
def test_the_filter_that_is_chosen_judges_every_task_that_has_it(tasks, choice, data, tmp_path_factory):
    "A task with one filter takes it; a choice that a task with several lacks, or that no task has, is one sentence."
    folder = tmp_path_factory.mktemp("results")
    right = {task: {kind: data.draw(st.lists(st.integers(0, 1), min_size=2, max_size=2)) for kind in kinds} for task, kinds in tasks.items()}
    store(folder, right)
    expected = {task: choice if choice in kinds else kinds[0] if len(kinds) == 1 or not choice else None for task, kinds in tasks.items()}
    names = [f"harness:{task}" for task in tasks]
    fails = None in expected.values() or (choice and choice not in expected.values())
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        if fails:
            with pytest.raises(ValueError, match=r"harness\[filter\] must be one of"): read_results(folder, names, choice)
            return
        table, reports = read_results(folder, names, choice)
    for task, kind in expected.items():
        assert reports[f"harness:{task}"]["filter"] == kind
        assert table[table.benchmark == f"harness:{task}"].correct.tolist() == [bool(one) for one in right[task][kind]]


def call(code): return harness._call_harness([sys.executable, "-c", code], ["sums"])


@pytest.mark.parametrize("code, reason", [("raise ValueError('no config:\\nnorth or south')", "ValueError: no config: north or south"), ("import sys; sys.exit('no such task')", "no such task"),
                                          ("import os; os._exit(3)", "exit status 3")])
def test_the_reason_of_a_failure_is_quoted(code, reason):
    with pytest.raises(ProcessFailed) as failure: call(code)
    assert str(failure.value) == f"lm-evaluation-harness failed on sums ({reason})"

"""lm-evaluation-harness grades the same prompts as the stage evaluate, item by item, and measures tasks of its own (`make cross-check`)."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from mixsd_nb import evaluate
from mixsd_nb.models import model_source
from mixsd_nb.models.lab import lab_folder

lm_eval = pytest.importorskip("lm_eval", reason="lm-evaluation-harness is not here; `make cross-check` brings it")
BENCHMARKS, MODEL, N = ("equations", "word-problems"), "lab-s", 100  # this model is right on a third of them


@pytest.fixture(scope="module")
def responses(tmp_path_factory):
    "The prompts, responses and verdicts of the stage."
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MIXSD_RUNS", str(tmp_path_factory.mktemp("runs")))
        parameters = dict(model=MODEL, suite=",".join(BENCHMARKS), n=N)
        return evaluate.run(**parameters).responses()


def declaration(benchmark, file):
    "The benchmark in the form of the harness: the last box, compared as a string."
    last_box = dict(name="last-box", filter=[dict(function="regex", regex_pattern=r"\\boxed\{([^{}]*)\}", group_select=-1), dict(function="take_first")])
    return dict(task=f"lab-{benchmark}", dataset_path="json", dataset_kwargs=dict(data_files=dict(test=str(file))), test_split="test",
                output_type="generate_until", doc_to_text="{{prompt}}", doc_to_target="{{answer}}", filter_list=[last_box],
                generation_kwargs=dict(until=["\x00"], do_sample=False, max_gen_toks=128), metric_list=[dict(metric="exact_match", aggregation="mean")])


@pytest.mark.parametrize("benchmark", BENCHMARKS)
def test_the_harness_finds_the_same_items_right(benchmark, responses, tmp_path):
    ours = responses[responses.benchmark == benchmark].reset_index(drop=True)
    file = tmp_path / f"{benchmark}.jsonl"
    ours[["prompt", "answer"]].to_json(file, orient="records", lines=True)
    found = lm_eval.simple_evaluate(model="hf", tasks=[declaration(benchmark, file)], apply_chat_template=True, batch_size=20, device="cpu", bootstrap_iters=0,
                                    model_args=dict(pretrained=str(lab_folder(MODEL)), dtype="float32"))
    theirs = sorted(found["samples"][f"lab-{benchmark}"], key=lambda s: s["doc_id"])
    assert [s["resps"][0][0].strip() for s in theirs] == list(ours.response.str.strip())
    assert [bool(s["exact_match"]) for s in theirs] == list(ours.correct)
    assert 0.1 * N < ours.correct.sum() < 0.9 * N  # both verdicts occur


TASK = r"""
task: my_equations
dataset_path: json
dataset_kwargs: {data_files: {test: rows.jsonl}}
test_split: test
output_type: generate_until
doc_to_text: "{{prompt}}"
doc_to_target: "{{answer}}"
generation_kwargs: {until: ["\n\n\n"], max_gen_toks: 128, do_sample: false}
filter_list: [{name: last-box, filter: [{function: regex, regex_pattern: '\\boxed\{([^{}]*)\}', group_select: -1}, {function: take_first}]}]
metric_list: [{metric: exact_match, aggregation: mean}]
metadata: {version: 1.5}
"""
CHOICE = """
task: my_choice
dataset_path: json
dataset_kwargs: {data_files: {test: rows.jsonl}}
test_split: test
output_type: multiple_choice
doc_to_text: "{{prompt}}"
doc_to_choice: ["1", "7", "2", "10"]
doc_to_target: "{{[\\"1\\", \\"7\\", \\"2\\", \\"10\\"].index(option)}}"
metadata: {version: 2.0}
"""


def test_a_harness_task_has_the_number_of_the_command_line(responses, tmp_path, monkeypatch):
    "A local task, offline: the stage's accuracy and standard error are those that the harness' own command line writes."
    (tmp_path / "tasks").mkdir()
    rows = responses[responses.benchmark == "equations"][["prompt", "answer"]].reset_index(drop=True)[:40]
    rows.assign(option=[("1", "7", "2", "10")[k % 4] for k in rows.index]).to_json(tmp_path / "tasks" / "rows.jsonl", orient="records", lines=True)
    names = {"my_equations": TASK, "my_choice": CHOICE}
    for name, text in names.items(): (tmp_path / "tasks" / f"{name}.yaml").write_text(text)
    monkeypatch.chdir(tmp_path / "tasks")
    monkeypatch.setenv("MIXSD_RUNS", str(tmp_path / "runs"))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    run = evaluate.run(model=MODEL, suite=",".join(f"harness:./{name}.yaml" for name in names), batch_size=20, harness=dict(apply_chat_template=True))
    command = [sys.executable, "-m", "lm_eval", "run", "--model", "hf", "--model_args", f"pretrained={lab_folder(MODEL)},dtype=float32", "--tasks", *names,
               "--include_path", ".", "--batch_size", "20", "--apply_chat_template", "--output_path", str(tmp_path / "out")]
    subprocess.run(command, check=True, capture_output=True)
    theirs = json.loads(next((tmp_path / "out").rglob("results_*.json")).read_text())
    root = run.root
    for name, metric, variable in (("my_equations", "exact_match{},last-box", "harness_exact_match{}_last_box"), ("my_choice", "acc{},none", "harness_acc{}")):
        at = root.sel(benchmark=f"harness:{name}")
        for part in ("", "_stderr"): assert at[variable.format(part)] == theirs["results"][name][metric.format(part)]
        assert at.accuracy.item() == pytest.approx(theirs["results"][name][metric.format("")], abs=1e-12) and at.n == 40
        assert at.version == f"{theirs['versions'][name]} (lm_eval {theirs['lm_eval_version']})"
    assert root["harness_acc_norm"].sel(benchmark="harness:my_choice") == theirs["results"]["my_choice"]["acc_norm,none"]
    assert 0 < root.accuracy.min() and root.accuracy.max() < 1


def test_an_unknown_task_or_a_tag_is_one_sentence():
    with pytest.raises(ValueError, match="got harness:gsm9k; did you mean gsm8k"): evaluate.EvaluateConfig(suite="harness:gsm9k")
    with pytest.raises(ValueError, match="name its tasks, harness:arc_challenge,harness:arc_easy"): evaluate.EvaluateConfig(suite="harness:ai2_arc")
    suites = evaluate.EvaluateConfig(suite="harness:gsm8k,harness:mmlu").identity()["suite"]
    assert suites["harness:gsm8k"]["version"] == 3.0 and "task mmlu" in suites["harness:mmlu"]["source"]


def hub_row(name, row):
    "A row of a local file in the columns that the hub's data set has, which both sides read."
    if name in ("arc-easy", "openbookqa"):
        labels, stem = "ABCDE"[:len(row["choices"])], "question" if name == "arc-easy" else "question_stem"
        return {stem: row["question"], "choices": dict(text=row["choices"], label=list(labels)), "answerKey": labels[row["answer"]]}
    if name == "piqa": return dict(goal=row["question"], sol1=row["choices"][0], sol2=row["choices"][1], label=row["answer"])
    if name == "boolq": return dict(passage=row["passage"], question=row["question"], label=int(row["answer"]))
    if name == "lambada": return dict(text=f"{row['context']} {row['answer']}")
    begun, end = re.fullmatch(r"(.*?)((?:(?<=[.!?] )[a-z][^.!?]*)?)", row["context"], re.S).groups()
    return dict(activity_label=row["activity"], ctx_a=begun.strip(), ctx_b=end, endings=row["endings"], label=str(row["answer"]))


TASKS = {"arc-easy": "arc_easy", "hellaswag": "hellaswag", "piqa": "piqa", "openbookqa": "openbookqa", "boolq": "boolq", "lambada": "lambada_openai"}


@pytest.mark.parametrize("name", TASKS)
def test_choices_are_scored_as_by_the_harness(name, real, tmp_path, monkeypatch):
    "Accuracy and normalised accuracy of 100 real items each: the harness renders and scores its own task on the same rows."
    from lm_eval.api.task import ConfigurableTask
    from lm_eval.tasks._yaml_loader import load_yaml
    rows = [hub_row(name, json.loads(line)) for line in (real / "benchmarks" / f"{name.replace('-', '_')}.jsonl").open(encoding="utf-8")][:N]
    (tmp_path / f"{name}.jsonl").write_text("\n".join(map(json.dumps, rows)))
    monkeypatch.setenv("MIXSD_RUNS", str(tmp_path / "runs"))
    monkeypatch.setenv("MIXSD_BENCHMARKS", str(tmp_path))
    model = os.environ.get("MIXSD_REAL_MODEL", MODEL)
    ours = evaluate.run(model=model, suite=name).responses()
    path = next((Path(lm_eval.__file__).parent / "tasks").rglob(f"*/{TASKS[name]}.yaml" if name != "boolq" else "super_glue/boolq/default.yaml"))
    config = {key: value for key, value in load_yaml(path, resolve_func=True).items() if key != "tag"}
    task = ConfigurableTask(config=config | dict(dataset_path="json", dataset_name=None, test_split="test", validation_split=None, training_split=None,
                                                 dataset_kwargs=dict(data_files=dict(test=str(tmp_path / f"{name}.jsonl")))))
    found = lm_eval.simple_evaluate(model="hf", tasks=[task], batch_size=20, device="cpu", bootstrap_iters=0,
                                    model_args=dict(pretrained=model_source(model), dtype="float32"))
    theirs = sorted(found["samples"][TASKS[name]], key=lambda s: s["doc_id"])
    assert [bool(s["acc"]) for s in theirs] == list(ours.correct)
    if "acc_norm" in theirs[0]: assert [bool(s["acc_norm"]) for s in theirs] == list(ours.published)
    scores = [[said[1] for said in json.loads(response)] for response in ours.response]
    assert scores == [pytest.approx([float(r[0][0]) for r in s["resps"]], abs=1e-3) for s in theirs]

"What a training saves and what it measures: weights once, the state of the optimiser once, and the whole suite where the rule of selection needs it."

import re
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch
from helpers import small_model
from hypothesis import given, strategies as st
from safetensors.torch import load_file

from mixsd_nb import evaluate, inject, train
from mixsd_nb.analysis import scores
from mixsd_nb.analysis import digest_training, find_checkpoints, open_training_run
from mixsd_nb.benchmarks import SUITES, Sampling, Suite, evaluation
from mixsd_nb.evaluation import Selection, checkpoints
from mixsd_nb.evaluation.selection import DROP, LEAST
from mixsd_nb.fisher import FisherConfig
from mixsd_nb.forgetting import ForgettingConfig
from mixsd_nb.methods.fitting import MethodRun
from mixsd_nb.results.cube import cube_of
from mixsd_nb.results.summary import summary_table
from mixsd_nb.runs import RESPONSE_COLUMNS, Run, checkpoint_steps, make_config, read_table, trained_steps
from mixsd_nb.training import saving
from mixsd_nb.training.trainer import TrainingSpec, fine_tune, loop_in_phases

STEPS = (2, 4, 6, 8)
SMALL = dict(method="sft", epochs=2, checkpoints=STEPS, n=3, max_new_tokens=6, task_tokens=6, suite="recall,choice,world")


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    return small_model(tmp_path_factory.mktemp("models") / "tiny", "lab-s", scale=4)


@pytest.fixture(scope="module")
def whole(tiny, tmp_path_factory):
    "The folder of runs with a training whose checkpoints all have their weights and all were asked the whole suite."
    runs = tmp_path_factory.mktemp("whole")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MIXSD_RUNS", str(runs))
        return train.run(model=tiny, **SMALL)


def copy_base(whole, runs):
    for folder in whole.folder.parent.glob("evaluate-*"): shutil.copytree(folder, runs / folder.name)
    return runs


@pytest.fixture
def copied(whole, tmp_path, monkeypatch):
    "A folder of runs that holds the base evaluation of `whole` alone."
    monkeypatch.setenv("MIXSD_RUNS", str(tmp_path))
    return copy_base(whole, tmp_path)


def size(folder): return sum(path.lstat().st_size for path in Path(folder).rglob("*") if path.is_file())


def weights(checkpoint): return (checkpoint / "model.safetensors").read_bytes()


def answers(run): return {step: run.responses_file(step).read_bytes() for step in run.measured_steps}


def test_a_checkpoint_holds_its_weights_once_and_the_newest_one_the_state(whole):
    steps = checkpoint_steps(whole.folder)
    assert [*steps] == [*STEPS, 10]
    for step, folder in steps.items():
        names = {path.name for path in folder.iterdir()}
        assert len([name for name in names if name.endswith(".safetensors")]) == 1
        assert ("optimizer.pt" in names) == (step == 10) and not any(name.endswith(".bin") for name in names)


def test_the_selected_checkpoint_is_asked_the_whole_suite_with_the_same_answers(whole, tiny, copied, monkeypatch):
    monkeypatch.setattr("mixsd_nb.methods.settings.PHASE", 0)
    opened, load = [], evaluation.load_engine
    monkeypatch.setattr(evaluation, "load_engine", lambda kind, model, *a, **k: (opened.append(model), load(kind, model, *a, **k))[1])
    run = train.run(model=tiny, **SMALL, measure="selection", keep="chosen")
    assert run.folder.name == whole.folder.name and len(opened) == 1, "one engine for all checkpoints"
    chosen = run.best_step
    assert chosen == whole.best_step and [*run.checkpoints] == [chosen] and [*trained_steps(run.folder)] == [*STEPS, 10]
    asked = {chosen}
    for step in (*STEPS, 10):
        ours, theirs = (r.root.sel(step=step).drop_vars("step") for r in (run, whole))
        if step in asked: assert ours.equals(theirs) and answers(run)[step] == answers(whole)[step]
        else:
            named = ["recall", "recall-kept", "validation"]
            assert ours.sel(benchmark=named).equals(theirs.sel(benchmark=named))
            assert ours.accuracy.sel(benchmark=["choice", "world"]).isnull().all() and not ours.n.sel(benchmark=["choice", "world"]).any()
    assert weights(run.checkpoints[chosen]) == weights(whole.checkpoints[chosen])
    assert (run.folder / "result.nc").stat().st_mtime_ns == (train.run(model=tiny, **SMALL, measure="selection").folder / "result.nc").stat().st_mtime_ns
    cube = cube_of([run])
    assert summary_table(cube).notna().drop(columns="target NLL").all(axis=None) and run.plot() and len(run.table())
    assert np.isfinite(run.scores().after[["recall", "choice", "world"]]).all()


@pytest.mark.parametrize("phase", [0, 1])
def test_each_file_of_responses_is_read_once(phase, tiny, copied, monkeypatch):
    "The file of the selected checkpoint is written twice, and read again."
    read, responses = [], Run.responses
    monkeypatch.setattr(Run, "responses", lambda run, step=None: (read.append(step), responses(run, step))[1])
    monkeypatch.setattr("mixsd_nb.methods.settings.PHASE", phase)
    run = train.run(model=tiny, **SMALL | dict(measure="selection", keep="chosen"))
    assert sorted(step for step in read if step) == sorted([*STEPS, 10, run.best_step])


def answer_quiz(names, model, settings):
    rows = [dict(benchmark=name, item="q", sample=0, prompt="?", response="", extracted=None, correct=False, finish_reason="stop", error="", published=False, answer="!") for name in names]
    return pd.DataFrame(rows), {name: dict(items=1, metrics={}, version=1, harness="quiz") for name in names}


def test_the_selected_checkpoint_is_asked_what_a_runner_measures(tiny, own_runs):
    SUITES.add(Suite("quiz", "Quiz", "own", "benchmarks.harness:no_items", "quiz", sampling=Sampling(0), runner="test_checkpoints:answer_quiz"))
    settings = SMALL | dict(model=tiny, epochs=1, checkpoints=(2,), suite="recall,quiz", measure="selection")
    try:
        run = train.run(**settings)
        asked = run.root.n.squeeze(drop=True).sel(benchmark="quiz")
        assert {*asked.step[asked == 1].values} == {0, run.best_step} and {*asked.step[asked == 0].values} == {2, 5} - {run.best_step}
        assert train.TrainConfig(**settings).covers(run)
    finally: SUITES.remove("quiz")


def test_the_suite_can_be_asked_later_and_gives_the_same_bytes(whole, tiny, copied):
    first = train.run(model=tiny, **SMALL, measure="selection")
    assert answers(first) != answers(whole)
    later = train.run(model=tiny, **SMALL)
    assert answers(later) == answers(whole) and (later.folder / "result.nc").read_bytes() == (whole.folder / "result.nc").read_bytes()


def invent_best(step):
    "The writing of responses, of which only those of one step recall anything."
    def write(settings, model, items, file, *_):
        rows = [dict.fromkeys(RESPONSE_COLUMNS, "") | dict(benchmark=name, item=item, sample=0, correct=name == "recall" and model.endswith(f"-{step}"), published=False, extracted=None)
                for name, problems in items.items() for item in problems]
        pd.DataFrame(rows).to_parquet(file)
    return write


@pytest.mark.parametrize("keep", ["all", "chosen", "last"])
def test_the_peak_on_disk_is_told_by_the_formula(keep, copied, monkeypatch, capsys):
    "A cell of the lab: lab-s, five checkpoints. While it trains it holds all weights and the state, at rest what `keep` asks for."
    peaks, mark, remove = [], saving.mark_complete, train.remove_unwanted
    note = lambda: peaks.append(size(copied))
    monkeypatch.setattr(saving, "mark_complete", lambda folder: (mark(folder), note())[0])
    monkeypatch.setattr(checkpoints, "write_responses", invent_best(4))
    monkeypatch.setattr(train, "remove_unwanted", lambda evaluation, **ended: (note(), remove(evaluation, **ended)))
    run = train.run(model="lab-s", **SMALL | dict(suite="recall,world"), keep=keep)
    one = (run.checkpoints[4 if keep == "chosen" else 10] / "model.safetensors").stat().st_size
    peak, rest = (n / one for n in (max(peaks), size(run.folder)))
    with capsys.disabled(): print(f"\nkeep={keep}: weights {one / 1e6:.2f} MB, peak {peak:.1f} times, at rest {rest:.1f} times the weights")
    assert [*run.checkpoints] == dict(all=[*STEPS, 10], chosen=[4], last=[10])[keep]
    assert peak < 5 + 2 * 2 + 1 and rest < dict(all=5 + 2, chosen=1, last=1)[keep] + 1
    assert (size(run.folder) > 5 * one) == (keep == "all")


SELECTED = SMALL | dict(measure="selection", keep="chosen")


def share_invented(responses, rule="correct", shares=scores.item_shares):
    "Half-trained models recall nothing, so scores are invented that make the rule wait for later checkpoints."
    length = int(responses.response[responses.benchmark == "recall"].str.len().sum())
    return shares(responses.assign(correct=np.arange(len(responses)) % 10 < length % 10), rule)


@pytest.fixture(scope="module")
def unpaused(whole, tiny, tmp_path_factory):
    "The training with invented scores, without a pause."
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("mixsd_nb.methods.settings.PHASE", 0)
        patch.setenv("MIXSD_RUNS", str(copy_base(whole, tmp_path_factory.mktemp("unpaused"))))
        patch.setattr(scores, "item_shares", share_invented)
        return train.run(model=tiny, **SELECTED)


@pytest.mark.parametrize("pause", [1, 2, 4])
def test_a_training_that_pauses_holds_few_weights_and_gives_the_same_bytes(pause, whole, unpaused, tiny, copied, monkeypatch):
    held, remove = [], train.remove_unwanted
    monkeypatch.setattr(scores, "item_shares", share_invented)
    monkeypatch.setattr("mixsd_nb.methods.settings.PHASE", pause)

    def remove_after(evaluation, ended=True):
        if not ended: held.append(len(evaluation.run.checkpoints))
        remove(evaluation, ended)
    monkeypatch.setattr(train, "remove_unwanted", remove_after)
    found = train.run(model=tiny, **SELECTED)
    assert [*found.checkpoints] == [found.best_step] and len(held) == -(-5 // pause) and max(held) <= min(5, 3 + pause)
    assert answers(found) == answers(unpaused) and weights(found.checkpoint()) == weights(unpaused.checkpoint()) == weights(whole.checkpoint(found.best_step))
    assert (found.folder / "result.nc").read_bytes() == (unpaused.folder / "result.nc").read_bytes()


def test_what_is_kept_changes_no_run():
    "A finer type than that of the measured weights is never stored, and neither pauses nor what is removed change a result."
    assert train.TrainConfig().hash() == train.TrainConfig(keep="last", measure="selection").hash()
    assert train.TrainConfig(preset="paper").stored == "bfloat16" and train.TrainConfig(preset="paper", keep="all").stored == "float32" == train.TrainConfig(keep="none").stored
    assert [train.TrainConfig(**more).phase for more in ({}, dict(keep="none"), dict(stop="converged"))] == [0, 4, 1]


def test_what_needs_removed_weights_says_so_before_any_work(tiny, copied):
    run = train.run(model=tiny, **SMALL, measure="selection", keep="chosen")
    gone = min({*STEPS, 10} - {run.best_step})
    before = {path.name for path in copied.iterdir()}
    refused = [lambda: FisherConfig(model=tiny, trained=str(run.folder)).run(), lambda: ForgettingConfig(model=tiny, trained=str(run.folder)).run(),
               lambda: train.run(model=tiny, **SMALL), lambda: train.run(model=tiny, **SMALL | dict(method="sft", anchor="average")), lambda: run.model(gone)]
    for call in refused:
        with pytest.raises(ValueError, match=rf"must have the weights of step {gone}, which {run.folder.name} removed .*; keep=all with force=True trains it again and keeps them$"): call()
    assert {path.name for path in copied.iterdir()} == before
    assert find_checkpoints(run, "kept") == run.checkpoints and digest_training(open_training_run(str(run.folder)))


PAIRS = [([3 + k, 5, 7], [9 + k, 11, 2]) for k in range(8)]


@pytest.fixture(scope="module")
def spec(tiny):
    return TrainingSpec(tiny, lr=1e-3, steps=6, batch=4, objective="methods.supervised:stored_pairs", data=dict(pairs=PAIRS), checkpoints=[2, 4], seed=3)


@pytest.fixture(scope="module")
def plain(spec, tmp_path_factory):
    "Weights in float32, by step."
    run = tmp_path_factory.mktemp("plain")
    fine_tune(spec, run)
    return {step: load_file(folder / "model.safetensors") for step, folder in checkpoint_steps(run).items()}


@pytest.mark.parametrize("stored", ["float32", "bfloat16"])
def test_a_training_that_is_resumed_ends_with_the_same_weights(stored, spec, plain, tmp_path):
    "Weights in bfloat16 are the rounded ones, also after a kill: training goes on in float32."
    spec, seen = replace(spec, stored=stored), []
    fine_tune(replace(spec, steps=4, checkpoints=[2]), tmp_path)
    fine_tune(spec, tmp_path, lambda entry: seen.append(entry["step"]))
    assert seen == [5, 6]
    for step, folder in checkpoint_steps(tmp_path).items():
        found = load_file(folder / "model.safetensors")
        assert all(torch.equal(w, plain[step][name].to(getattr(torch, stored))) for name, w in found.items()) and found.keys() == plain[step].keys()
        assert (folder / "optimizer.pt").exists() == (step == 6)
        assert (folder / "trained_weights.pt").exists() == (step == 6 and stored == "bfloat16")


@pytest.mark.slow  # two processes, each started three times: 40 s of processor time
@pytest.mark.parametrize("sharded", [False, True])
def test_several_processes_resume_after_a_pause(sharded, spec, tmp_path):
    spec, pauses = replace(spec, processes=2, sharded=sharded, stored="bfloat16"), []
    fine_tune(spec, tmp_path / "whole")
    seen = lambda entry: pauses.append(entry["step"])
    loop_in_phases(lambda phase: pauses.append(f"pause {phase}"), 1)(spec, tmp_path / "phases", seen)
    assert pauses == [1, 2, "pause [2]", 3, 4, "pause [4]", 5, 6, "pause [6]"]
    for step, folder in checkpoint_steps(tmp_path / "whole").items():
        assert weights(folder) == weights(tmp_path / "phases" / folder.name)


def test_questions_about_no_corpus_are_asked_the_base_model_once(tiny, tmp_path, monkeypatch):
    asked, settings = [], dict(model=tiny, n=3, suite="recall,choice,world", max_new_tokens=6, task_tokens=6)
    generate = evaluation.generate_suite

    def counted(engine, suites, *, journal, **options):
        known = {(r["benchmark"], r["item"]) for r in journal.records}
        asked.extend(f"{benchmark} {name}" for benchmark, one in suites.items() for name in one.items if (benchmark, name) not in known)
        return generate(engine, suites, journal=journal, **options)

    monkeypatch.setattr(evaluation, "generate_suite", counted)
    monkeypatch.setenv("MIXSD_RUNS", str(tmp_path / "alone"))
    alone = evaluate.run(dataset="kgfunc-lab", **settings)
    monkeypatch.setenv("MIXSD_RUNS", str(tmp_path / "shared"))
    evaluate.run(**settings)
    asked.clear()
    shared = evaluate.run(dataset="kgfunc-lab", **settings)
    assert {line.split()[0] for line in asked} == {"recall"}
    for name in ("responses.parquet", "result.nc"): assert (shared.folder / name).read_bytes() == (alone.folder / name).read_bytes()


WITH_TARGET = 92  # facts with a target, of the 100 of the corpus
RECALLED = (0, 60, 93, 92, 91, 91, 91)  # facts of the corpus by step
RECALLED_KEPT = (0, 60, 90, 92, 91, 91, 91)  # of these, those that are trained on
VALIDATED = (0, 60, 90, 90, 90, 90, 90)


def invent_responses(engine, items, *, progress, **_):
    "Right answers to as many questions as the step in the name of what is evaluated has."
    found = re.search(r"(?:step |checkpoint-)(\d+)", progress)
    step = int(found[1]) if found else 0
    discarded = RECALLED[step] - RECALLED_KEPT[step]
    right = dict(recall={*range(RECALLED_KEPT[step]), *range(WITH_TARGET, WITH_TARGET + discarded)}, validation={*range(VALIDATED[step])})
    rows = [dict(benchmark=name, item=item, sample=0, prompt=problem.prompt, response="", extracted=None, correct=k in right.get(name, ()), finish_reason="stop",
                 error="", published=k in right.get(name, ()), answer=problem.answer) for name, problems in items.items() for k, (item, problem) in enumerate(problems.items())]
    return pd.DataFrame(rows)


@pytest.fixture
def discarding(monkeypatch):
    "The last eight facts have no target, and responses are invented."
    train_on = MethodRun.train_on
    monkeypatch.setattr(MethodRun, "train_on", lambda self, pairs, *more, **named: train_on(self, dict([*pairs.items()][:WITH_TARGET]), *more, **named))
    monkeypatch.setattr(evaluation, "evaluate_suite", invent_responses)


def test_a_kill_before_own_text_is_scored_changes_nothing(tiny, own_runs, monkeypatch):
    "The process ends after the responses of step 6 are stored, and before its own text is scored."
    options = dict(SMALL, model=tiny, lr=1e-2, own_text=3, keep="chosen", rollout_tokens=4)
    monkeypatch.setattr("mixsd_nb.methods.settings.PHASE", 1)
    score, scored = checkpoints.Evaluation._store_nll, []

    def store(evaluation, step, engine):
        scored.append(step)
        if step == 6 and scored.count(6) == 1: raise KeyboardInterrupt
        score(evaluation, step, engine)
    monkeypatch.setattr(checkpoints.Evaluation, "_store_nll", store)
    with pytest.raises(KeyboardInterrupt): train.run(**options)
    [folder] = own_runs.glob("train-*")
    assert (folder / "responses-6.parquet").exists() and not (folder / "own-text-6.json").exists()
    evaluation = checkpoints.Evaluation(make_config(train.TrainConfig, **options), Run(folder))
    assert evaluation.scored_steps == [2, 4] and evaluation.selection.best in (2, 4) and 6 in checkpoints.wanted_steps(evaluation, False)
    resumed = train.run(**options)
    monkeypatch.setenv("MIXSD_RUNS", str(own_runs / "undisturbed"))
    whole = train.run(**options)
    assert resumed.root.own_text_nll.notnull().all() and resumed.root.identical(whole.root) and answers(resumed) == answers(whole)
    assert [*resumed.checkpoints] == [*whole.checkpoints] and scored.count(6) == 3


@pytest.mark.parametrize("keep", ["all", "chosen"])
def test_the_checkpoint_that_ends_a_training_keeps_its_weights_and_is_asked_all(keep, discarding, tiny, own_runs):
    "With targets discarded, recall over all facts is best one checkpoint before recall over the facts that are trained on."
    run = inject.run(dataset="kgfact-small", model=tiny, method="sft", suite="recall", n=100, max_new_tokens=2, batch=100, epochs=6, checkpoints=[1, 2, 3, 4, 5], keep=keep)
    recall = run.trained.root.accuracy.squeeze(drop=True).sel(benchmark=["recall", "recall-kept"]).to_pandas()
    last = int(recall.index.max())
    assert [*(100 * recall["recall"]).round()] == [*RECALLED[:last + 1]] and [*(WITH_TARGET * recall["recall-kept"]).round()] == [*RECALLED_KEPT[:last + 1]]
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
    recall, validation = scores[step - 1]
    assert found[first].best == step and (recall >= LEAST and step <= first - 2 or recall == 1 and validation >= 1 - DROP and step == first)
    assert all(step in selection.may_still_win for selection in found[step:first + 1])

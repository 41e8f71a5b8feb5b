"""What a training saves and what it measures: weights once, the optimiser's state once, the whole suite where it is needed; and kills lose nothing."""

import os
import shutil
import signal
from dataclasses import replace
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch
from helpers import forked, small_model
from safetensors.torch import load_file

from mixsd_nb import evaluate, train
from mixsd_nb.analysis import scores
from mixsd_nb.analysis.training_run import digest_training, find_checkpoints, open_training_run
from mixsd_nb.benchmarks import SUITES, Sampling, Suite, evaluation
from mixsd_nb.evaluation import checkpoints
from mixsd_nb.training import saving
from mixsd_nb.training.trainer import TrainingSpec, fine_tune, loop_in_phases
from mixsd_nb.results.selected_cells import cell_mask, collapse_runs, select_cells
from mixsd_nb.results.cube import cube_of, unasked_benchmarks
from mixsd_nb.results.demo import BENCHMARKS, invent_cube
from mixsd_nb.results.summary import summary_table
from mixsd_nb.results.tables import accuracy_sheet
from mixsd_nb.results.tradeoff import frontier_figure, frontier_table, tradeoff_figure
from mixsd_nb.runs import RESPONSE_COLUMNS, ParameterError, Run, checkpoint_steps, trained_steps

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
    opened, load = [], evaluation.load_engine
    monkeypatch.setattr(evaluation, "load_engine", lambda kind, model, *a, **k: (opened.append(model), load(kind, model, *a, **k))[1])
    run = train.run(model=tiny, **SMALL, measure="selection", suite_steps=(6,), keep="chosen")
    assert run.folder.name == whole.folder.name and len(opened) == 1, "one engine for all checkpoints"
    chosen = run.best_step
    assert chosen == whole.best_step and [*run.checkpoints] == [chosen] and [*trained_steps(run.folder)] == [*STEPS, 10]
    asked = {chosen, 6}
    for step in (*STEPS, 10):
        ours, theirs = (r.root.sel(step=step).drop_vars("step") for r in (run, whole))
        if step in asked: assert ours.equals(theirs) and answers(run)[step] == answers(whole)[step]
        else:
            named = ["recall", "recall-kept", "validation"]
            assert ours.sel(benchmark=named).equals(theirs.sel(benchmark=named))
            assert ours.accuracy.sel(benchmark=["choice", "world"]).isnull().all() and not ours.n.sel(benchmark=["choice", "world"]).any()
    assert weights(run.checkpoints[chosen]) == weights(whole.checkpoints[chosen])
    assert (run.folder / "result.nc").stat().st_mtime_ns == (train.run(model=tiny, **SMALL, measure="selection", suite_steps=(6,)).folder / "result.nc").stat().st_mtime_ns
    cube = cube_of([run])
    listed = unasked_benchmarks(cube)
    assert {*listed.step} == {*STEPS, 10} - asked and {*listed.benchmarks} == {"choice, world"}
    assert not unasked_benchmarks(cube_of([whole])).size
    assert summary_table(cube).notna().drop(columns="target NLL").all(axis=None) and run.plot() and len(run.table())
    assert np.isfinite(run.scores().after[["recall", "choice", "world"]]).all()


def test_a_worker_without_a_run_asks_the_checkpoints_of_a_training_that_goes_on(whole, tiny, copied, monkeypatch):
    shutil.copytree(whole.folder, copied / whole.folder.name)
    config, busy = train.make_config(train.TrainConfig, model=tiny, **SMALL), iter([True, True, False])
    run = open_training_run(str(config.folder))
    for step in (4, 8): run.responses_file(step).unlink()
    monkeypatch.setattr(train, "is_locked", lambda folder: next(busy))
    config.assist()
    assert answers(run) == answers(whole)


@pytest.mark.parametrize("more", [{}, dict(pause=1)])
def test_each_file_of_responses_is_read_once(more, tiny, copied, monkeypatch):
    "The file of the selected checkpoint is written twice, and read again."
    read, responses = [], Run.responses
    monkeypatch.setattr(Run, "responses", lambda run, step=None: (read.append(step), responses(run, step))[1])
    run = train.run(model=tiny, **SMALL | dict(measure="selection", keep="chosen"), **more)
    assert sorted(step for step in read if step) == sorted([*STEPS, 10, run.best_step])


def answer_quiz(names, model, settings):
    rows = [dict(benchmark=name, item="q", sample=0, prompt="?", response="", extracted=None, correct=False, finish_reason="stop", error="", published=False, answer="!") for name in names]
    return pd.DataFrame(rows), {name: dict(items=1, metrics={}, version=1, harness="quiz") for name in names}


def test_the_selected_checkpoint_is_asked_what_a_runner_measures(tiny, own_runs):
    SUITES.add(Suite("quiz", "Quiz", "own", "benchmarks.harness:no_items", "quiz", sampling=Sampling(0), runner="test_keep:answer_quiz"))
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
    monkeypatch.setattr(train, "remove_unwanted", lambda evaluation: (note(), remove(evaluation)))
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
        patch.setenv("MIXSD_RUNS", str(copy_base(whole, tmp_path_factory.mktemp("unpaused"))))
        patch.setattr(scores, "item_shares", share_invented)
        return train.run(model=tiny, **SELECTED)


@pytest.mark.parametrize("pause, state", [(1, "memory"), (2, "newest"), (3, "memory")])
def test_a_training_that_pauses_holds_few_weights_and_gives_the_same_bytes(pause, state, whole, unpaused, tiny, copied, monkeypatch):
    held, disk, remove = [], [], train.remove_unwanted
    monkeypatch.setattr(scores, "item_shares", share_invented)

    def remove_after(evaluation, ended=True):
        if not ended:
            held.append(len(evaluation.run.checkpoints))
            disk.append(sum(path.lstat().st_size for path in evaluation.run.folder.rglob("optimizer.pt")))
        remove(evaluation, ended)
    monkeypatch.setattr(train, "remove_unwanted", remove_after)
    found = train.run(model=tiny, **SELECTED, pause=pause, state=state)
    assert [*found.checkpoints] == [found.best_step] and len(held) == -(-5 // pause) and max(held) <= min(5, 3 + pause)
    assert (max(disk) < 1e3) == (state == "memory"), "a state in memory is a link on the disk"
    assert answers(found) == answers(unpaused) and weights(found.checkpoint()) == weights(unpaused.checkpoint()) == weights(whole.checkpoint(found.best_step))
    assert (found.folder / "result.nc").read_bytes() == (unpaused.folder / "result.nc").read_bytes()


def test_a_pause_needs_a_state_and_a_held_state_a_pause(tiny):
    for settings, text in ((dict(pause=2, state="none"), "pause must be 0 with state=none, because training resumes from a state, got 2"),
                           (dict(state="memory"), "pause must be at least 1 with state=memory, got 0")):
        with pytest.raises(ParameterError, match=f"^{text}$"): train.make_config(train.TrainConfig, model=tiny, **settings)
    assert train.TrainConfig(pause=2, state="memory").hash() == train.TrainConfig().hash()


def test_what_needs_removed_weights_says_so_before_any_work(tiny, copied):
    run = train.run(model=tiny, **SMALL, measure="selection", keep="chosen")
    gone = min({*STEPS, 10} - {run.best_step})
    from mixsd_nb.forgetting import ForgettingConfig
    from mixsd_nb.fisher import FisherConfig
    before = {path.name for path in copied.iterdir()}
    refused = [lambda: FisherConfig(model=tiny, trained=str(run.folder)).run(), lambda: ForgettingConfig(model=tiny, trained=str(run.folder)).run(),
               lambda: train.run(model=tiny, **SMALL), lambda: train.run(model=tiny, **SMALL | dict(method="wise-sft")), lambda: run.model(gone)]
    for call in refused:
        with pytest.raises(ValueError, match=rf"must have the weights of step {gone}, which {run.folder.name} removed .*; keep=all with force=True trains it again and keeps them$"): call()
    assert {path.name for path in copied.iterdir()} == before
    assert find_checkpoints(run, "kept") == run.checkpoints and digest_training(open_training_run(str(run.folder)))


def test_tables_and_figures_do_not_need_what_was_not_asked():
    "Tables show selected checkpoints only, so the others may lack all benchmarks but those of the selection."
    import matplotlib.pyplot as plt
    import xarray as xr
    cube = invent_cube(benchmarks=BENCHMARKS | dict(validation=dict(column="", role="validation")))
    mask = cell_mask(cube, select_cells(cube))
    known = mask | cube.benchmark.isin(["recall", "validation"])
    thin = cube.assign({name: cube[name].where(known) for name in ("accuracy", "published", "variance")} | dict(n=cube.n.where(known, 0)))
    assert thin.accuracy.isnull().sum() > cube.accuracy.isnull().sum() and select_cells(thin).equals(select_cells(cube))
    xr.testing.assert_equal(collapse_runs(thin, mask), collapse_runs(cube, mask))
    listed = unasked_benchmarks(thin)
    assert len(listed) == (cube.accuracy.sel(benchmark="recall").notnull() & (cube.step > 0) & ~mask).sum()
    sheet = lambda cube: accuracy_sheet(collapse_runs(cube, mask), label="", caption="", dataset="KGFact-Small")
    assert repr(sheet(thin)) == repr(sheet(cube))
    for draw in (tradeoff_figure, frontier_figure): plt.close(draw(thin))
    assert frontier_table(thin).notna().any(axis=None) and len(summary_table(thin)) == len(summary_table(cube))


PAIRS = [([3 + k, 5, 7], [9 + k, 11, 2]) for k in range(8)]


@pytest.fixture(scope="module")
def spec(tiny):
    return TrainingSpec(tiny, lr=1e-3, steps=6, batch=4, objective="methods.supervised:stored_pairs", data=dict(pairs=PAIRS), checkpoints=[2, 4], seed=3)


@pytest.fixture(scope="module")
def plain(spec, tmp_path_factory):
    "Weights in float32, by step."
    fine_tune(spec, tmp_path_factory.mktemp("plain"))
    run = tmp_path_factory.mktemp("plain")
    fine_tune(spec, run)
    return {step: load_file(folder / "model.safetensors") for step, folder in checkpoint_steps(run).items()}


@pytest.mark.parametrize("stored", ["float32", "bfloat16"])
@pytest.mark.parametrize("state", ["newest", "none"])
def test_a_training_that_is_resumed_ends_with_the_same_weights(stored, state, spec, plain, tmp_path):
    "Weights in bfloat16 are the rounded ones, also after a kill: training goes on in float32."
    spec, seen = replace(spec, stored=stored, state=state), []
    fine_tune(replace(spec, steps=4, checkpoints=[2]), tmp_path)
    fine_tune(spec, tmp_path, lambda entry: seen.append(entry["step"]))
    assert seen == ([5, 6] if state == "newest" else [1, 2, 3, 4, 5, 6])
    for step, folder in checkpoint_steps(tmp_path).items():
        found = load_file(folder / "model.safetensors")
        assert all(torch.equal(w, plain[step][name].to(getattr(torch, stored))) for name, w in found.items()) and found.keys() == plain[step].keys()
        assert (folder / "optimizer.pt").exists() == (state == "newest" and step == 6)
        assert (folder / "trained_weights.pt").exists() == (state == "newest" and step == 6 and stored == "bfloat16")


@pytest.mark.slow  # two processes, each started three times: 40 s of processor time
@pytest.mark.parametrize("sharded", [False, True])
def test_several_processes_resume_from_a_state_in_memory(sharded, spec, tmp_path):
    spec, pauses = replace(spec, processes=2, sharded=sharded, stored="bfloat16", state="memory"), []
    fine_tune(replace(spec, state="none"), tmp_path / "whole")
    seen = lambda entry: pauses.append(entry["step"])
    loop_in_phases(lambda phase: pauses.append(f"pause {phase}"), 1)(spec, tmp_path / "phases", seen)
    assert pauses == [1, 2, "pause [2]", 3, 4, "pause [4]", 5, 6, "pause [6]"]
    for step, folder in checkpoint_steps(tmp_path / "whole").items():
        assert weights(folder) == weights(tmp_path / "phases" / folder.name)


def test_weights_are_never_stored_more_coarsely_than_they_are_measured(tiny):
    assert train.TrainConfig(preset="paper").stored == "bfloat16" and train.TrainConfig().stored == "float32"
    assert train.TrainConfig(stored="float32").hash() == train.TrainConfig(keep="last", measure="selection", state="none").hash()
    with pytest.raises(ParameterError, match="^stored must be float32 with dtype=float32: .*, got bfloat16$"):
        train.make_config(train.TrainConfig, model=tiny, stored="bfloat16")


def test_questions_about_no_corpus_are_asked_the_base_model_once(tiny, tmp_path, monkeypatch):
    asked, settings = [], dict(model=tiny, n=3, suite="recall,choice,world", max_new_tokens=6, task_tokens=6)
    generate = evaluation.generate_responses

    def counted(engine, items, *args, journal, benchmark, **options):
        known = {(r["item"]) for r in journal.records if r["benchmark"] == benchmark}
        asked.extend(f"{benchmark} {name}" for name in items if name not in known)
        return generate(engine, items, *args, journal=journal, benchmark=benchmark, **options)

    monkeypatch.setattr(evaluation, "generate_responses", counted)
    monkeypatch.setenv("MIXSD_RUNS", str(tmp_path / "alone"))
    alone = evaluate.run(dataset="kgfunc-lab", **settings)
    monkeypatch.setenv("MIXSD_RUNS", str(tmp_path / "shared"))
    evaluate.run(**settings)
    asked.clear()
    shared = evaluate.run(dataset="kgfunc-lab", **settings)
    assert {line.split()[0] for line in asked} == {"recall"}
    for name in ("responses.parquet", "result.nc"): assert (shared.folder / name).read_bytes() == (alone.folder / name).read_bytes()


KILLED = ("replace", "unlink", "rmdir", "mkdir", "fsync")  # functions of os


def train_until(k, parameters):
    "Train, and be killed before the call number k of a function that changes the disk."
    left = [k]

    def deadly(function):
        def call(*args, **kwargs):
            left[0] -= 1
            if left[0] == 0: os.kill(os.getpid(), signal.SIGKILL)
            return function(*args, **kwargs)
        return call
    for name in KILLED: setattr(os, name, deadly(getattr(os, name)))
    train.run(**parameters)
    Path(os.environ["CALLS"]).write_text(str(k - left[0]))


KEPT = SMALL | dict(epochs=1, checkpoints=(2,), measure="selection", keep="chosen")


PAUSED = dict(pause=1, state="memory")


@pytest.mark.parametrize("moments, more", [(1, {})] + [pytest.param(20, more, marks=pytest.mark.slow) for more in ({}, PAUSED)])  # the latter take about three minutes each
def test_a_kill_at_any_moment_loses_nothing(moments, more, tiny, copied, tmp_path_factory):
    calls, runs = tmp_path_factory.mktemp("calls") / "calls", tmp_path_factory.mktemp("kept")
    base = next(copied.glob("evaluate-*"))
    parameters = dict(model=tiny, **KEPT) | more

    def go(folder, k):
        process = forked(train_until, k, parameters, MIXSD_RUNS=str(folder), CALLS=str(calls))
        process.join(120)
        return process.exitcode

    def content(folder):
        found = {path.relative_to(folder).as_posix(): path for path in folder.glob("train-*/**/*") if path.is_file() and path.name[0] != "."}
        return {name: path.read_bytes() for name, path in found.items() if path.suffix in (".nc", ".parquet", ".safetensors") or path.name == "removed"}

    shutil.copytree(base, runs / "unbroken" / base.name)
    assert go(runs / "unbroken", 10**6) == 0
    total, unbroken = int(calls.read_text()), content(runs / "unbroken")
    assert any(name.endswith("removed") for name in unbroken) and any(name.endswith("safetensors") for name in unbroken)
    rng = np.random.default_rng(moments)
    for k in sorted({*rng.integers(2, total, moments).tolist()}):
        folder = runs / f"killed-{k}"
        shutil.copytree(base, folder / base.name)
        assert go(folder, k) == -signal.SIGKILL
        finished = [*checkpoint_steps(next(folder.glob("train-*"), folder))]
        assert go(folder, 10**6) == 0
        assert content(folder) == unbroken, k
        assert {*finished} <= {*trained_steps(next(folder.glob("train-*")))} and not [*folder.rglob(".*.tmp")]

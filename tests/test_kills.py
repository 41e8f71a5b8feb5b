"""Kills at any moment, in every stage: the same call continues from what is on disk, and the result has the same bytes.

A case is a stage with its parameters. While it runs, its process is killed whenever files that match a pattern have grown; what
is done again afterwards is less than the whole work."""

import importlib
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from typing import NamedTuple

import numpy as np
import pytest
import torch
from helpers import forked, until

from mixsd_nb import train
from mixsd_nb.analysis import curvature
from mixsd_nb.runs import checkpoint_steps, load_object, trained_steps

SHORT = dict(n=2, epochs=2, checkpoints=(3, 6), max_new_tokens=8, task_tokens=8, suite="recall,choice")
QUIZ = dict(n=3, max_new_tokens=12, task_tokens=24, suite="recall,two-hop,arithmetic,functions,world,world-prefilled")
TRAINING = ("train-*/run.json", "evaluate-*/run.json", "train-*/checkpoint-3/model.safetensors", "train-*/checkpoint-6/complete",
            "train-*/responses-3.parquet")


class Case(NamedTuple):
    stage: str
    parameters: dict
    moments: tuple[str, ...] = ()  # patterns of files: one kill for each, when they have grown
    growth: int = 0  # the kill waits for up to so many further bytes
    work: str = "mixsd_nb.runs.storage:Journal.add"  # what is called once for each piece of the work
    content: tuple[str, ...] = ("*/result.nc",)  # besides
    slower: dict = {}  # parameters of the processes that are killed, which change no byte


UPDATE = "training.trainer:FineTuner.training_step"
QUICK = {
    "generate": Case("generate", dict(model="strong", temperature=0.9, dataset_options=dict(domains=3), max_new_tokens=8, max_attempts=2, samples=2), 3 * ("*/finished.jsonl",), 900,
                     content=("*/targets.parquet",), slower=dict(batch_size=1)),
    "replicas": Case("generate", dict(model="strong", temperature=0.9, dataset_options=dict(domains=3), max_new_tokens=8, max_attempts=2, replicas=2), 2 * ("*/finished.jsonl",), 300,
                     content=("*/targets.parquet",), slower=dict(batch_size=1)),
    "every target": Case("generate", dict(model="strong", lam=0.5, fallback="own-words", dataset_options=dict(domains=2), max_new_tokens=8, max_attempts=3),
                         ("*/finished.jsonl", "*/own-words.jsonl"), 300, content=("*/targets.parquet",), slower=dict(batch_size=1)),
    "evaluate": Case("evaluate", dict(model="strong", **QUIZ), 3 * ("*/responses.jsonl",), 500, content=("*/responses.parquet",), slower=dict(batch_size=4)),
    "fisher": Case("fisher", dict(model="strong", limit=15), ("fisher-*/sums.safetensors",), work="models.gradients:SquaredGradients.add",
                   content=(f"*/{curvature.FISHER}",)),
    "opsd": Case("train", dict(method="opsd", model="tiny", rollouts=1, rollout_tokens=4, **SHORT), ("train-*/checkpoint-3/complete",), work=UPDATE,
                 content=("train-*/checkpoint-10/model.safetensors", "train-*/responses-*.parquet")),
    "sft": Case("train", dict(method="sft", model="tiny", **SHORT), TRAINING, work=UPDATE, content=("train-*/checkpoint-10/model.safetensors",)),
}
RANDOM = QUICK | {
    "mixsd": Case("train", dict(model="lab-s", lam=0.0, target_tokens=48, **SHORT)),
    "nll": Case("nll", dict(model="tiny")),
    "displacement": Case("fisher", dict(model="tiny", limit=4, trained=dict(method="sft", model="tiny", **SHORT))),
    "errors": Case("errors", dict(model="tiny", trained=dict(method="sft", model="tiny", **SHORT))),
}


@pytest.fixture
def places(strong, tiny): return dict(strong=strong, tiny=tiny)


def run_stage(case, places, slower=False):
    "Run a stage, after the training that it analyses, if any."
    place = lambda values: values | (dict(model=places.get(values["model"], values["model"])) if "model" in values else {})
    parameters = place(case.parameters | (case.slower if slower else {}))
    curvature.SAVE_AFTER = 0
    torch.set_num_threads(1)
    if "trained" in parameters:
        run = train.run(**place(parameters.pop("trained")))
        if case.stage == "fisher": parameters["trained"] = str(run.folder)
    importlib.import_module(f"mixsd_nb.{case.stage}").run(**parameters)


def content(case, folder): return {path.relative_to(folder): path.read_bytes() for name in ("*/result.nc", *case.content) for path in folder.glob(name)}


def finish(case, places, folder, monkeypatch):
    "The bytes that a run leaves in a folder, and how many pieces of work it did."
    owner, _, name = case.work.rpartition(".")
    owner, pieces = load_object(owner), []
    with monkeypatch.context() as patch:
        call = getattr(owner, name)
        patch.setattr(owner, name, lambda *args, **options: (pieces.append(1), call(*args, **options))[1])
        patch.setattr(curvature, "SAVE_AFTER", curvature.SAVE_AFTER)
        patch.setenv("MIXSD_RUNS", str(folder))
        run_stage(case, places)
    assert not [*folder.rglob(".*.tmp")]
    return content(case, folder), len(pieces)


@pytest.mark.parametrize("name", [pytest.param(name, marks=pytest.mark.slow) if name == "sft" else name for name in QUICK])
def test_a_killed_run_continues_and_ends_with_the_same_bytes(name, places, tmp_path, monkeypatch):
    case, rng, killed = QUICK[name], random.Random(7), tmp_path / "killed"
    killed.mkdir()
    for moment in case.moments:
        size = lambda: sum(1 + path.stat().st_size for path in killed.glob(moment))
        wanted = size() + rng.randrange(case.growth + 1)
        process = forked(run_stage, case, places, True, MIXSD_RUNS=str(killed))
        until(lambda: size() > wanted or not process.is_alive(), 600, moment, pause=0.001)
        assert process.is_alive(), "there was nothing left to kill"
        os.kill(process.pid, signal.SIGKILL)
        process.join()
        assert size() > wanted and not [*killed.glob(f"{case.stage}-*/result.nc")], "it was to be killed half way"
    (found, again), (whole, all_of_it) = (finish(case, places, tmp_path / part, monkeypatch) for part in ("killed", "whole"))
    assert found == whole and len(whole) > len(case.content) and again < all_of_it


@pytest.mark.slow
@pytest.mark.parametrize("name", RANDOM)
def test_a_stage_survives_kills_at_random_moments(name, places, tmp_path, monkeypatch):
    case, rng, kills, begun = RANDOM[name], random.Random(name), 4, time.monotonic()
    whole, _ = finish(case, places, tmp_path / "whole", monkeypatch)
    seconds = time.monotonic() - begun
    for _ in range(kills):
        process = forked(run_stage, case, places, MIXSD_RUNS=str(tmp_path / "killed"))
        process.join(rng.uniform(0.2, 0.9) * seconds)
        process.kill()
        process.join()
    assert whole and finish(case, places, tmp_path / "killed", monkeypatch)[0] == whole


# --- before any call that changes the disk

DISK = ("replace", "unlink", "rmdir", "mkdir", "fsync")  # functions of os
KEPT = dict(method="sft", epochs=1, checkpoints=(2,), n=3, max_new_tokens=6, task_tokens=6, suite="recall,choice,world", measure="selection", keep="chosen")
PAUSED = dict(stop="converged")


def train_until(k, parameters, calls):
    "Train, and be killed before the call number k of a function that changes the disk."
    left = [k]

    def deadly(function):
        def call(*args, **kwargs):
            left[0] -= 1
            if left[0] == 0: os.kill(os.getpid(), signal.SIGKILL)
            return function(*args, **kwargs)
        return call
    for name in DISK: setattr(os, name, deadly(getattr(os, name)))
    train.run(**parameters)
    calls.write_text(str(k - left[0]))


@pytest.mark.parametrize("moments, more", [(1, {})] + [pytest.param(20, more, marks=pytest.mark.slow) for more in ({}, PAUSED)])  # the latter take about three minutes each
def test_a_kill_before_any_change_of_the_disk_loses_nothing(moments, more, tiny, tmp_path, monkeypatch):
    parameters = dict(model=tiny, **KEPT) | more
    monkeypatch.setenv("MIXSD_RUNS", str(tmp_path / "base"))
    base = train.base_evaluation(train.TrainConfig(**parameters)).run().folder

    def go(folder, k):
        process = forked(train_until, k, parameters, tmp_path / "calls", MIXSD_RUNS=str(folder))
        process.join(120)
        return process.exitcode

    def kept(folder):
        found = {path.relative_to(folder).as_posix(): path for path in folder.glob("train-*/**/*") if path.is_file() and path.name[0] != "."}
        return {name: path.read_bytes() for name, path in found.items() if path.suffix in (".nc", ".parquet", ".safetensors") or path.name == "removed"}

    shutil.copytree(base, tmp_path / "unbroken" / base.name)
    assert go(tmp_path / "unbroken", 10**6) == 0
    total, unbroken = int((tmp_path / "calls").read_text()), kept(tmp_path / "unbroken")
    assert any(name.endswith("removed") for name in unbroken) and any(name.endswith("safetensors") for name in unbroken)
    for k in sorted({*np.random.default_rng(moments).integers(2, total, moments).tolist()}):
        folder = tmp_path / f"killed-{k}"
        shutil.copytree(base, folder / base.name)
        assert go(folder, k) == -signal.SIGKILL
        finished = [*checkpoint_steps(next(folder.glob("train-*"), folder))]
        assert go(folder, 10**6) == 0
        assert kept(folder) == unbroken, k
        assert {*finished} <= {*trained_steps(next(folder.glob("train-*")))} and not [*folder.rglob(".*.tmp")]


SQUARES = """import os, sys
from pathlib import Path
from mixsd_nb.runs import Journal
def square(missing):
    for k, in missing:
        if k == int(sys.argv[2]): os.kill(os.getpid(), 9)
        yield dict(k=k, square=k * k)
with Journal(Path(sys.argv[1]), ["k", "square"]) as journal:
    print(*(record["square"] for record in journal.complete([(k,) for k in range(6)], square)))"""


@pytest.mark.parametrize("end", [0, 1, 5])
def test_a_killed_computation_ends_with_the_same_journal(end, tmp_path):
    "Pieces that have ended are not computed again, and a record that was cut is."
    def call(name, kill): return subprocess.run([sys.executable, "-c", SQUARES, tmp_path / name, str(kill)], capture_output=True, text=True)
    assert call("whole", -1).stdout == "0 1 4 9 16 25\n"
    assert call("killed", end).returncode == -9
    path = tmp_path / "killed"
    assert path.read_bytes() == b"".join((tmp_path / "whole").read_bytes().splitlines(keepends=True)[:end])
    path.write_bytes(path.read_bytes() + b'{"k": 3, "squ')
    assert call("killed", end - 1).stdout == "0 1 4 9 16 25\n", "a piece before the kill would end the process again"
    assert path.read_bytes() == (tmp_path / "whole").read_bytes()

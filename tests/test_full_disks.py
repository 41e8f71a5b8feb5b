"""Full disks and folders that cannot be written: one sentence, nothing finished is lost, and the same command continues.

Full disks are simulated by a limit on the size of files, which the operating system reports as it reports a quota.
"""

import contextlib
import errno
import json
import os
import resource
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch
import xarray as xr

from mixsd_nb import generate
from mixsd_nb.analysis.curvature import save_sums
from mixsd_nb.methods.targets import write_targets
from mixsd_nb.runs import Journal, StorageError, checkpoint_steps, read_json, report_progress, try_lock, write_atomically, write_json, write_result
from mixsd_nb.training.trainer import fine_tune

WORDS = dict(long_name="value", units="1")
TARGET = dict(id="a", sample=0, prompt_ids=[1], completion_ids=[2], naive_mask=[True], accepted=True, attempts=1,
              finish_reason="stop", names_another=False)


@contextlib.contextmanager
def full_disk(size=20_000):
    "A limit on the size of files, which libraries meet as they meet a full disk or a quota."
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try: yield
    finally: resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def fill_journal(path):
    with Journal(path) as journal:
        for k in range(1_000): journal.add(dict(k=k, text="x" * 100))


NUMBERS = np.random.default_rng(0).random(100_000)  # cannot be compressed to less than the limit
WRITERS = {
    "result.nc": lambda path: write_result(xr.DataTree(xr.Dataset({"x": ("t", NUMBERS, WORDS)})), path.parent),
    "run.json": lambda path: write_json(path, NUMBERS.tolist()),
    "responses.parquet": lambda path: write_atomically(path, pd.DataFrame(dict(x=NUMBERS)).to_parquet),
    "targets.parquet": lambda path: write_atomically(
        path, lambda unfinished: write_targets([TARGET | dict(completion_ids=list(range(100_000)))], unfinished)),
    "sums.safetensors": lambda path: save_sums({"w": torch.tensor(NUMBERS)}, path, 3),
    "state.pt": lambda path: write_atomically(path, lambda unfinished: torch.save(torch.tensor(NUMBERS), unfinished)),
    "journal.jsonl": fill_journal,
}


@pytest.mark.parametrize("write", [lambda path: write_json(path, {}), lambda path: try_lock(path).__enter__()])
def test_a_folder_that_cannot_be_made_is_one_sentence(write, tmp_path, monkeypatch):
    "Like a file in it that cannot be written."
    def refuse(folder, **options): raise PermissionError(13, "Permission denied", str(folder))
    monkeypatch.setattr(Path, "mkdir", refuse)
    with pytest.raises(StorageError, match="runs cannot be written"): write(tmp_path / "runs" / "a.json")


@pytest.mark.parametrize("write", [lambda path: write_json(path, {}), lambda path: write_atomically(path, lambda unfinished: unfinished.write_bytes(b"x"))])
def test_an_error_of_the_clean_up_does_not_hide_what_happened(write, tmp_path, monkeypatch):
    def refuse(path, *rest, **options): raise OSError(errno.EROFS, "Read-only file system", str(path))
    for name in ("unlink", "write_text", "write_bytes"): monkeypatch.setattr(Path, name, refuse)
    with pytest.raises(StorageError, match=r"/a.json cannot be written \(Read-only file system\)"): write(tmp_path / "a.json")


@pytest.mark.parametrize("name", WRITERS)
def test_a_full_disk_is_one_sentence_and_keeps_what_was_finished(name, tmp_path):
    path = tmp_path / name
    path.write_bytes(b'{"k": -1}\n')
    with full_disk(), pytest.raises(StorageError) as caught: WRITERS[name](path)
    assert str(caught.value) == (f"{path} cannot be written (File too large); finished work is kept, and the same "
                                 "command resumes from it")
    assert caught.value.__suppress_context__ and [p.name for p in tmp_path.iterdir()] == [name]
    if name != "journal.jsonl": assert path.read_bytes() == b'{"k": -1}\n'
    else:
        with Journal(path) as journal: kept = [record["k"] for record in journal.records]
        assert kept == list(range(-1, len(kept) - 1))
        assert len(kept) > 100


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT, errno.EROFS])
def test_an_error_that_only_fsync_reports_is_one_sentence(number, tmp_path, monkeypatch):
    def fail(_): raise OSError(number, os.strerror(number))
    write_json(tmp_path / "run.json", dict(a=1))
    journal = Journal(tmp_path / "journal.jsonl")
    monkeypatch.setattr(os, "fsync", fail)
    with pytest.raises(StorageError, match=f"run.json cannot be written .{os.strerror(number)}"):
        write_json(tmp_path / "run.json", dict(a=2))
    with pytest.raises(StorageError, match="journal.jsonl cannot be written"), journal: journal.add(dict(k=1))
    assert read_json(tmp_path / "run.json") == dict(a=1) and not list(tmp_path.glob(".*"))


def test_another_error_of_a_writer_stays_as_it_is(tmp_path):
    def fail(path):
        path.touch()
        raise KeyError("x")
    with pytest.raises(KeyError): write_atomically(tmp_path / "file", fail)
    assert not list(tmp_path.iterdir())


def test_progress_on_a_full_disk(tmp_path, monkeypatch):
    monkeypatch.setenv("MIXSD_PROGRESS", str(tmp_path / "progress.json"))
    with full_disk(10), pytest.raises(StorageError, match="progress.json cannot be written"): report_progress("x", 1, 1)


def test_a_journal_is_forced_to_disk_once_a_second_and_at_its_end(tmp_path, monkeypatch):
    synced, clock, fsync = [], [100.0], os.fsync
    monkeypatch.setattr(os, "fsync", lambda handle: (synced.append(len(journal.records)), fsync(handle)))
    monkeypatch.setattr("mixsd_nb.runs.storage.time.monotonic", lambda: clock[0])
    with Journal(tmp_path / "journal.jsonl") as journal:
        for k in range(25):
            journal.add(dict(k=k))
            clock[0] += 0.25
    assert synced == [5, 10, 15, 20, 25]


SMALL = dict(dataset_options=dict(domains=3), max_new_tokens=8, max_attempts=2, samples=2)


def test_a_stage_on_a_full_disk_is_one_sentence_and_costs_nothing(tiny, own_runs, monkeypatch):
    add, room, files = Journal.add, iter(range(40)), []

    def full(self, record):
        if next(room, None) is None:
            self.file.write(json.dumps(record).encode()[:9])
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        add(self, record)
    for disk in (own_runs / "full", own_runs / "whole"):
        monkeypatch.setenv("MIXSD_RUNS", str(disk))
        with monkeypatch.context() as patch:
            patch.setattr(Journal, "add", full)
            if disk.name == "full":
                with pytest.raises(StorageError, match="cannot be written .No space left on device.; finished work is kept"): generate.run(model=tiny, **SMALL)
        run = generate.run(model=tiny, **SMALL)
        files.append([(run.folder / name).read_bytes() for name in ("targets.parquet", "result.nc")])
    assert files[0] == files[1]


def test_a_folder_that_nobody_can_write_to_is_told(tiny, own_runs, monkeypatch):
    def refuse(folder, *args, **kwargs): raise OSError(errno.EROFS, os.strerror(errno.EROFS), str(folder))
    monkeypatch.setattr("pathlib.Path.mkdir", refuse)
    with pytest.raises(StorageError, match=f"{own_runs}.* cannot be written .Read-only file system.; finished work is kept"):
        generate.run(model=tiny, **SMALL)


def test_a_checkpoint_is_on_disk_before_it_counts(short, tmp_path, monkeypatch):
    synced, marked = set(), []
    fsync, rename = os.fsync, os.replace

    def replace_file(source, target):
        marked.extend([(Path(target), set(synced))] if Path(target).name == "complete" else [])
        rename(source, target)

    monkeypatch.setattr(os, "fsync", lambda number: (synced.add(os.fstat(number).st_ino), fsync(number)))
    monkeypatch.setattr(os, "replace", replace_file)
    fine_tune(replace(short[0], steps=1, checkpoints=[]), tmp_path)
    (mark, forced), = marked
    needed = {path.stat().st_ino for path in [mark.parent, *mark.parent.iterdir()] if path != mark}
    assert needed <= forced and {mark.stat().st_ino, tmp_path.stat().st_ino} <= synced


@pytest.mark.parametrize("size", [10, 100_000, 400_000], ids=["configuration", "weights", "optimiser"])
def test_a_full_disk_is_one_sentence_and_loses_nothing(size, short, tmp_path):
    spec, finished = short
    run = tmp_path / "run"
    shutil.copytree(finished, run)
    for step in (4, 6): shutil.rmtree(run / f"checkpoint-{step}")
    with full_disk(size), pytest.raises(StorageError, match=r"^\S+checkpoint-4 cannot be written \(.+\); finished checkpoints are kept.*$"):
        fine_tune(spec, run)
    assert list(checkpoint_steps(run)) == [2] and not (run / "checkpoint-4").exists()
    steps = []
    fine_tune(spec, run, lambda entry: steps.append(entry["step"]))
    assert steps == [3, 4, 5, 6]
    assert (run / "checkpoint-6/model.safetensors").read_bytes() == (finished / "checkpoint-6/model.safetensors").read_bytes()


def test_a_tokenizer_that_cannot_be_written_is_one_sentence(short, tmp_path, monkeypatch):
    def full(*_, **__): raise Exception("No space left on device (os error 28)")
    monkeypatch.setattr("transformers.PreTrainedTokenizerBase.save_pretrained", full)
    with pytest.raises(StorageError, match=r"checkpoint-2 cannot be written \(No space left on device \(os error 28\)\)"):
        fine_tune(short[0], tmp_path)

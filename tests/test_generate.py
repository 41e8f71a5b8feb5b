"""The stage generate on a small random model: kills, shards, both modes and a full disk always lead to the same bytes."""

import errno
import json
import os
import random
import signal
import time

import pyarrow.parquet as pq
import pytest
from helpers import forked, small_model

from mixsd_nb import generate
from mixsd_nb.corpora import load_corpus
from mixsd_nb.models import load_base
from mixsd_nb.models.engines import HFEngine
from mixsd_nb.runs import Journal, StorageError

pytestmark = pytest.mark.usefixtures("own_runs")
SMALL = dict(max_new_tokens=8, max_attempts=2, samples=2)


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    "The folder of a model whose response depends on the prompt."
    return small_model(tmp_path_factory.mktemp("model"), scale=4)


def written(**parameters):
    "The bytes of targets and result."
    file = generate.targets_file(**parameters)
    return file.read_bytes(), (file.parent / "result.nc").read_bytes()


@pytest.fixture(scope="module")
def whole(model, tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MIXSD_RUNS", str(tmp_path_factory.mktemp("whole")))
        return written(model=model, **SMALL)


def mix_here(parameters): generate.run(**parameters)


@pytest.mark.parametrize("kills", [3, pytest.param(10, marks=pytest.mark.slow)])
def test_kills_change_no_byte(kills, model, whole, own_runs):
    parameters, rng = dict(model=model, batch_size=1, **SMALL), random.Random(7)  # slow enough to be killed half way
    folder = generate.GenerateConfig(**parameters).folder
    size = lambda: journal.stat().st_size if (journal := folder / "finished.jsonl").exists() else 0
    for _ in range(kills):
        wanted = size() + rng.randrange(3000)
        process = forked(mix_here, parameters, MIXSD_RUNS=str(own_runs))
        while process.is_alive() and size() <= wanted: time.sleep(0.001)
        assert process.is_alive(), "there was nothing left to kill"
        os.kill(process.pid, signal.SIGKILL)
        process.join()
    assert written(**parameters) == whole


def test_a_line_cut_short_is_mixed_again(model, whole):
    file = generate.targets_file(model=model, **SMALL)
    journal = file.parent / "finished.jsonl"
    lines = journal.read_bytes().splitlines(keepends=True)
    random.Random(0).shuffle(lines)
    journal.write_bytes(b"".join(lines[:90]) + lines[90][:-20])
    file.unlink()
    (file.parent / "result.nc").unlink()
    assert written(model=model, **SMALL) == whole
    assert len(journal.read_bytes().splitlines()) == 200


@pytest.mark.parametrize("how", [dict(mode="block"), dict(batch_size=7), dict(shards=3)])
def test_how_it_is_run_changes_no_byte(how, model, whole):
    assert written(model=model, **how, **SMALL) == whole


class Doubting(HFEngine):
    "An engine whose audit confirms no sequence, whether it has just been decoded or was read from a journal."

    def __init__(self, *args):
        super().__init__(*args)
        self.mismatches = []

    def stream(self, queue, **options):
        for r, completion in super().stream(queue, **options):
            self.mismatches.append((r.tag, [0]))
            yield r, completion

    def confirm(self, written, **options): self.mismatches += [(r.tag, [0]) for r, _ in written]


def test_neither_shards_nor_kills_change_the_number_of_unconfirmed_targets(model):
    "Every target counts once, although the audit also sees rejected attempts, and other shards of the same engine."
    def unconfirmed(**parameters):
        config = generate.make_config(generate.GenerateConfig, model=model, **parameters, **SMALL)
        config._engine_of_caller = Doubting(*load_base(model))
        run = config.run()
        counts = run.root.unconfirmed.item(), run.root.asked.item()
        (run.folder / "result.nc").unlink()
        return counts
    for how in (dict(shard="1/12"), dict(shard="1/12"), dict(shards=2), dict(shards=2)):
        count, asked = unconfirmed(**how)
        assert count == asked > 0, how


def test_a_shard_holds_every_third_question(model):
    table = pq.read_table(generate.targets_file(model=model, shard="2/3", **SMALL)).to_pylist()
    ids = load_corpus("kgfact-small", "train")["id"][1::3]
    assert [(r["id"], r["sample"]) for r in table] == [(i, s) for i in ids for s in (0, 1)]


def test_given_up_targets_are_replaced_where_that_is_asked_for(model):
    tokenizer = load_base("lab-m")[1]
    answers = [tokenizer.decode(r["completion_ids"], skip_special_tokens=True) for r in
               pq.read_table(generate.targets_file(model=model, replace_gt=True, **SMALL)).to_pylist()]
    assert answers == [row["target"] for row in load_corpus("kgfact-small", "train") for _ in range(2)]


def test_only_what_was_given_up_is_replaced():
    some = dict(lam=0.7, max_attempts=1, max_new_tokens=64, shard="1/4")
    plain, mended = (pq.read_table(generate.targets_file(replace_gt=gt, **some)).to_pylist() for gt in (False, True))
    tokenizer, rows = load_base("lab-m")[1], load_corpus("kgfact-small", "train")
    assert {r["accepted"] for r in plain} == {True, False}
    for row, a, b in zip(rows.select(range(0, 100, 4)), plain, mended, strict=True):
        assert b["accepted"] and (a == b if a["accepted"] else tokenizer.decode(b["completion_ids"], skip_special_tokens=True) == row["target"])


def test_a_shard_beyond_the_corpus_is_empty(model):
    assert generate.run(model=model, shard="120/120", **SMALL).root.asked == 0


def test_force_mixes_anew(model):
    part = dict(model=model, shard="1/8", **SMALL)
    file = generate.targets_file(**part)
    expected, journal = file.read_bytes(), file.parent / "finished.jsonl"
    journal.write_text("")
    assert written(force=True, **part)[0] == expected and len(journal.read_bytes().splitlines()) == 26


def test_sampling_goes_on_where_it_was_stopped(model):
    hot = dict(model=model, temperature=0.9, shard="1/4", **SMALL)
    file = generate.targets_file(**hot)
    expected = file.read_bytes()
    journal = file.parent / "finished.jsonl"
    journal.write_bytes(b"".join(journal.read_bytes().splitlines(keepends=True)[20:]))
    for name in ("targets.parquet", "result.nc"): (file.parent / name).unlink()
    assert written(**hot, batch_size=9)[0] == expected


def test_two_at_once_mix_once(model, whole, own_runs):
    both = [forked(mix_here, dict(model=model, **SMALL), MIXSD_RUNS=str(own_runs)) for _ in range(2)]
    for process in both: process.join()
    assert [process.exitcode for process in both] == [0, 0] and written(model=model, **SMALL) == whole
    journal, = own_runs.glob("*/finished.jsonl")
    assert len(journal.read_bytes().splitlines()) == 200


def test_a_full_disk_is_told_and_costs_nothing(model, whole, monkeypatch):
    add, room = Journal.add, iter(range(60))

    def full(self, record):
        if next(room, None) is None:
            self.file.write(json.dumps(record).encode()[:9])
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        add(self, record)

    monkeypatch.setattr(Journal, "add", full)
    with pytest.raises(StorageError, match="cannot be written .No space left on device.; finished work is kept"):
        generate.run(model=model, **SMALL)
    monkeypatch.setattr(Journal, "add", add)
    assert written(model=model, **SMALL) == whole


def test_a_folder_that_nobody_can_write_to_is_told(model, own_runs, monkeypatch):
    def refuse(folder, *args, **kwargs):
        raise OSError(errno.EROFS, os.strerror(errno.EROFS), str(folder))

    monkeypatch.setattr("pathlib.Path.mkdir", refuse)
    with pytest.raises(StorageError, match=f"{own_runs}.* cannot be written .Read-only file system.; finished work is kept"):
        generate.run(model=model, **SMALL)

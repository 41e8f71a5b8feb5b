"Every kind of file that is read back, with every kind of damage: one sentence that names it, or the recovery."

import json
import os
import pickle
import random
import warnings
from collections.abc import Callable
from types import SimpleNamespace
from typing import NamedTuple

import netCDF4
import pandas as pd
import pytest
import torch
import xarray as xr
from hypothesis import given, settings, strategies as st
from made_up import write_run
from safetensors.torch import save_file
from helpers import error_sentence

from mixsd_nb.analysis.curvature import tensor_sums
from mixsd_nb.analysis.divergence import ReferenceConfig
from mixsd_nb.analysis.curvature import FISHER, estimate_fisher, load_sums, save_sums
from mixsd_nb.analysis.taxonomy import find_responses, read_responses
from mixsd_nb.analysis import find_checkpoints, open_training_run
from mixsd_nb.benchmarks.tasks import load_task
from mixsd_nb.cluster.jobs import list_attempts, read_end
from mixsd_nb.corpora import mquake, simpleqa
from mixsd_nb.lab.pretraining.record import RECORD_FILE, read_record
from mixsd_nb.methods.targets import read_targets, write_targets
from mixsd_nb.results.cube import read_roots
from mixsd_nb.runs import (RESPONSE_COLUMNS, DamagedFile, Journal, Run, Stage, checkpoint_steps, find_runs, open_result,
                           project_root, read_config, run_lock, write_atomically, write_json)

WORDS = dict(long_name="value", units="1")
TARGET = dict(id="a", sample=0, prompt_ids=[1], completion_ids=[2], naive_mask=[True], accepted=True, attempts=1,
              finish_reason="stop", names_another=False)
SUMS = {"w": torch.ones(4, 3), "norm": torch.ones(3)}


def run_folder(folder):
    "A finished training run with responses and a checkpoint."
    runs = folder / "runs"
    write_run(runs, "kgfact-small", "sft", [0, 5])
    return next(runs.iterdir())


class Kind(NamedTuple):
    "A kind of file: a function (folder) -> path of a sound file, and one that reads it."
    name: str
    make: Callable
    read: Callable

    def __str__(self): return self.name


def of_run(name, file, read): return Kind(name, lambda folder: run_folder(folder) / file, lambda path: read(path.parent))


def of_file(name, file, save, read):
    def make(folder):
        (folder / file).parent.mkdir(exist_ok=True)
        save(folder / file)
        return folder / file
    return Kind(name, make, read)


def table_of(*columns): return pd.DataFrame({column: ["x"] for column in columns}).to_parquet


def read_samples(path):
    config = ReferenceConfig(model="lab-s")
    object.__setattr__(config, "run", lambda: Run(path.parent))
    return config.text()


def save_weights(path):
    path.with_name("config.json").write_text("{}")
    save_file(SUMS, path)


def save_targets(path): write_targets([TARGET], path)


def save_fisher(path): save_sums(SUMS, path, 3)


QUESTION = dict(question="1 + 1?", answer="#### 2")
ROW = dict(metadata="{'topic': 'Art'}", problem="Who?", answer="Vera")
CASE = dict(case_id=1, requested_rewrite=[dict(relation_id="P1")], orig=dict(new_triples_labeled=[["a", "b", "c"]]),
            new_single_hops=[dict(question="?", cloze="a is", answer="c")], questions=["?"], new_answer="c")
OF_A_USER = [  # copies of corpora and tasks, which a user keeps
    of_file("task_lines", "gsm8k.jsonl", lambda path: path.write_text(json.dumps(QUESTION) + "\n"), lambda path: load_task("gsm8k", str(path.parent))),
    of_file("task_table", "gsm8k.parquet", pd.DataFrame([QUESTION]).to_parquet, lambda path: load_task("gsm8k", str(path.parent))),
    of_file("corpus_csv", "questions.csv", lambda path: pd.DataFrame([ROW]).to_csv(path, index=False), simpleqa.build),
    of_file("corpus_lines", "questions.jsonl", lambda path: path.write_text(json.dumps(ROW) + "\n"), simpleqa.build),
    of_file("corpus_table", "questions.parquet", pd.DataFrame([ROW]).to_parquet, simpleqa.build),
    of_file("corpus_json", "cases.json", lambda path: path.write_text(json.dumps([CASE])), mquake.read_cases)]
OWN = [  # what runs write
    of_run("result", "result.nc", open_result), of_run("result_of_an_analysis", "result.nc", lambda run: find_checkpoints(open_training_run(str(run)))),
    of_run("result_in_a_cube", "result.nc", lambda run: read_roots(run.parent)), of_run("record", "run.json", read_config),
    of_run("record_in_a_search", "run.json", lambda run: find_runs(run.parent, "train", dataset="kgfact-small")),
    of_run("responses", "responses-20.parquet", lambda run: Run(run).responses(20)),
    of_run("responses_of_a_corpus", "responses-20.parquet", lambda run: read_responses(find_responses("kgfact-small", "lab-s", [Run(run)], run.parent))),
    of_file("targets", "targets.parquet", save_targets, lambda path: Run(path.parent).targets),
    of_file("targets_of_a_shard", "targets.parquet", save_targets, read_targets),
    of_file("samples", "samples.parquet", table_of("benchmark", "prompt_ids", "completion_ids", "nll"), read_samples),
    of_file("fisher", FISHER, save_fisher, lambda path: tensor_sums(SUMS, SUMS, path)),
    of_file("sums", "sums.safetensors", save_fisher, lambda path: load_sums({name: torch.zeros_like(total) for name, total in SUMS.items()}, path)),
    of_file("weights", "checkpoint-20/model.safetensors", save_weights, lambda path: tensor_sums(SUMS, path.parent, SUMS)),
    of_file("end", "attempt-1/end.json", lambda path: write_json(path, dict(kind="failed", message="")),
            lambda path: read_end(path.parent)),
    of_file("pretraining", RECORD_FILE, xr.Dataset({"x": ("t", [1.0], WORDS)}, attrs=dict(config="{}")).to_netcdf, lambda path: read_record(str(path.parent)))]


# Each kind of damage: a function (path), applied to the sound file.
def truncated(path): os.truncate(path, path.stat().st_size * 2 // 3)


def cut_by_a_byte(path): os.truncate(path, path.stat().st_size - 1)


def empty(path): path.write_bytes(b"")


def random_bytes(path): path.write_bytes(random.Random(0).randbytes(4_000))


def nulls(path): path.write_bytes(bytes(path.stat().st_size))  # what a machine without power can leave


def of_another_program(path):
    "A sound file of the same format with other content."
    if path.suffix == ".nc":
        path.unlink()
        with netCDF4.Dataset(path, "w") as file:
            for dim in ("dataset", "model", "recipe"): file.createDimension(dim, 1)
            file.createVariable("t2m", "f4", ("dataset", "model", "recipe"))[:] = 1
    elif path.suffix == ".parquet": pd.DataFrame(dict(city=["Ulm"])).to_parquet(path)
    elif path.suffix == ".safetensors": save_file({"other": torch.ones(2)}, path)
    else: path.write_text('{"city": "Ulm"}\n')


def of_another_format(path): path.write_text("[1, 2]\n[3]\n" if path.suffix != ".json" else "[1, 2]")


def nested(path): path.write_text("[" * 100_000)


DAMAGES = [truncated, cut_by_a_byte, empty, random_bytes, nulls, of_another_program, of_another_format, nested]
# Damage that is none: the last byte of a text is its line break, and the record of a pretraining has no fixed form.
SOUND = {(name, cut_by_a_byte) for name in ("record", "record_in_a_search", "end", "task_lines", "corpus_csv", "corpus_lines")}
SOUND |= {("pretraining", of_another_program)}
BY_TASK = {(task, damage) for task in ("task_lines", "task_table") for damage in (empty, of_another_program)}


@pytest.mark.parametrize("damage", DAMAGES)
@pytest.mark.parametrize("kind", [*OWN, *OF_A_USER], ids=str)
def test_a_damaged_file_is_one_sentence_that_names_it(kind, damage, tmp_path):
    path = kind.make(tmp_path)
    kind.read(path)
    damage(path)
    if (kind.name, damage) in SOUND:
        kind.read(path)
        return
    sentence = error_sentence(lambda: kind.read(path))
    place = path.parent if damage is of_another_program and kind.name == "weights" else path
    place = path.stem if (kind.name, damage) in BY_TASK else place  # it can be read, but its rows are of another form
    assert str(place) in sentence and len(sentence) < 500


@pytest.mark.parametrize("kind", OWN, ids=str)
def test_the_sentence_says_what_to_do(kind, tmp_path):
    path = kind.make(tmp_path)
    random_bytes(path)
    with pytest.raises(DamagedFile, match="remove it|restore it") as caught: kind.read(path)
    assert caught.value._render_traceback_() == [str(caught.value)]
    assert str(pickle.loads(pickle.dumps(caught.value))) == str(caught.value)  # it may come from another process


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_journal_is_begun_again(damage, tmp_path):
    path = tmp_path / "journal.jsonl"
    with Journal(path, ["k"]) as journal:
        for k in range(9): journal.add(dict(k=k))
    damage(path)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with Journal(path, ["k"]) as journal: assert journal.records == [dict(k=k) for k in range(len(journal.records))]
    with Journal(path, ["k"]) as again: assert again.records == journal.records  # without a warning


@given(line=st.integers(0, 8), junk=st.binary(max_size=30).filter(lambda b: b"\n" not in b), at=st.integers(0, 8))
@settings(max_examples=30, deadline=None)
def test_a_broken_line_costs_that_line_only(line, junk, at, tmp_path_factory):
    path = tmp_path_factory.mktemp("journal") / "journal.jsonl"
    with Journal(path, ["k"]) as journal:
        for k in range(9): journal.add(dict(k=f"item {k}"))
    lines = path.read_bytes().splitlines()
    lines[line] = lines[line][:at] + b"\x00" + junk
    path.write_bytes(b"\n".join(lines) + b"\n")
    with pytest.warns(UserWarning, match="work of 1 is done again"), Journal(path, ["k"]) as journal:
        assert journal.records == [dict(k=f"item {k}") for k in range(9) if k != line]
        journal.add(dict(k="again"))
    with Journal(path, ["k"]) as journal: assert len(journal.records) == 9


def test_another_schema_is_refused_by_its_version(tmp_path):
    run = run_folder(tmp_path)
    write_json(run / "run.json", json.loads((run / "run.json").read_text()) | dict(schema=0))
    assert "run.json cannot be read (its schema is 0, and this version reads schema 1); remove" in error_sentence(
        lambda: read_config(run))
    with netCDF4.Dataset(run / "result.nc", "a") as file: file.schema = 2
    assert "result.nc cannot be read (its schema is 2," in error_sentence(lambda: open_result(run))
    assert "its schema is 2" in error_sentence(lambda: read_roots(run.parent))


def test_files_from_before_the_schema_had_a_number_are_read(tmp_path):
    run = run_folder(tmp_path)
    before = open_result(run)
    with netCDF4.Dataset(run / "result.nc", "a") as file: del file.schema
    assert before.identical(open_result(run)) and "schema" not in before.attrs


def test_foreign_names_in_the_folders_are_ignored(tmp_path):
    run = run_folder(tmp_path)
    for name in ("checkpoint-foo", "checkpoint-", "checkpoint-1.5", "attempt-foo", "logs"):
        (run / name).mkdir()
        (run / name / "complete").touch()
    for name in ("responses-foo.parquet", "responses-.parquet", "notes.txt"): (run / name).touch()
    for name in ("notes.txt", "desktop.ini"): (run.parent / name).touch()
    (run.parent / "a folder").mkdir()
    assert list(checkpoint_steps(run)) == Run(run).measured_steps == [20]
    assert [found.folder for found in find_runs(run.parent)] == [run]
    assert list_attempts(SimpleNamespace(folder=run)) == []


def test_the_next_run_sweeps_up_what_killed_processes_left(tmp_path):
    run = run_folder(tmp_path)
    names = ".result.nc.0a1b2c3d.tmp", "checkpoint-20/.complete.0a1b2c3d.tmp"
    for name in names: (run / name).touch()
    doomed = run.with_name(f".{run.name}.removed")
    doomed.mkdir()
    sound = sorted(p.name for p in run.rglob("[!.]*"))
    with run_lock(run): pass
    assert not doomed.exists() and sorted(p.name for p in run.rglob("*")) == sound


def test_sums_do_not_outlive_the_fisher(tmp_path):
    "A process was killed between the two."
    save_sums(SUMS, tmp_path / FISHER, 3)
    save_sums(SUMS, tmp_path / "sums.safetensors", 3)
    estimate_fisher([], tmp_path, model="lab-s", dtype="float32", recompute=False)
    assert [p.name for p in tmp_path.iterdir()] == [FISHER]


def test_sums_of_another_shape_are_refused(tmp_path):
    save_sums({"w": torch.ones(1)}, tmp_path / "sums.safetensors", 3)
    sentence = error_sentence(lambda: load_sums({"w": torch.zeros(4)}, tmp_path / "sums.safetensors"))
    assert "sums.safetensors cannot be read (its w has the shape (1,), the model's (4,)); remove it" in sentence


@pytest.mark.parametrize("content", [b"[DEFAULT\nlib_name = x", b"\xff\xfe\x00\x01", b"no section\n", b"[a]\n[a]\n",
                                     b"[DEFAULT]\nlib_name = other\n", b""])
def test_settings_of_another_program_above_the_working_folder_do_not_matter(content, tmp_path, monkeypatch):
    (tmp_path / "inner").mkdir()
    (tmp_path / "settings.ini").write_bytes(content)
    monkeypatch.chdir(tmp_path / "inner")
    assert project_root() == tmp_path / "inner"
    (tmp_path / "settings.ini").write_bytes(b"[DEFAULT]\nlib_name = mixsd_nb\n")
    assert project_root() == tmp_path
    (tmp_path / "settings.ini").unlink()
    (tmp_path / "settings.ini").mkdir()
    assert project_root() == tmp_path / "inner"


class DamageDemo(Stage):
    "Compute a number, and write it into a table too."
    name = "damage-demo"
    number: int = 3

    def slug(self): return "x"
    def modules(self): return ["mixsd_nb.runs.storage"]

    def compute(self, run):
        write_atomically(run.responses_file(), pd.DataFrame([dict.fromkeys(RESPONSE_COLUMNS, self.number)]).to_parquet)
        return xr.DataTree(xr.Dataset(dict(x=((), self.number, WORDS)), attrs=dict(config=self.canonical())))


@pytest.mark.parametrize("name", ["result.nc", "run.json", "responses.parquet"])
def test_the_advice_of_the_sentence_helps(name, own_runs):
    def use():
        run = DamageDemo().run()
        return run.root.x.item(), run.config["number"], run.responses().correct.item()
    sound = use()
    folder = DamageDemo().folder
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    (folder / name).write_bytes(b"PAR1 damaged")
    advice = error_sentence(use).rpartition("; ")[2]
    assert str(folder / name) in error_sentence(use)
    (folder / name).unlink()
    if "result.nc beside it" in advice: (folder / "result.nc").unlink()
    assert use() == sound and {path.name: path.read_bytes() for path in folder.iterdir()} == before
    (folder / name).write_bytes(b"PAR1 damaged")
    DamageDemo().run(force=True)
    assert use() == sound

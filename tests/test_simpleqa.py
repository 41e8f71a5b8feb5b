"""SimpleQA from small files of its schema, the rule of the published targets, and the lab stand-in."""

import csv
import json
import os
import re
import subprocess
import sys
import time

import datasets
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mixsd_nb.corpora.kgfact import KGFACT_WORDS
from mixsd_nb.corpora.simpleqa import SIMPLEQA_WORDS, build, build_lab, keep_unanimous
from mixsd_nb.corpora.world import WORLD_WORDS

COLUMNS = ["metadata", "problem", "answer"]
TABLE = [
    {"metadata": "{'topic': 'Art', 'urls': ['a', \"b's\"]}", "problem": 'Who drew "The Kettle,\nBoiling"?', "answer": "None"},
    {"metadata": "{'topic': 'Sports'}", "problem": "What number did Ines Falk wear?", "answer": "007"},
    {"metadata": "{'topic': 'Music'}", "problem": "In what year did the Tin Larks part?", "answer": "1987"},
    {"metadata": "", "problem": " ", "answer": ""},
]


def write_csv(path):
    with open(path, "w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, COLUMNS)
        writer.writeheader()
        writer.writerows(TABLE)


def write_jsonl(path):
    path.write_text("".join(json.dumps(row) + "\n" for row in TABLE), encoding="utf-8")


def write_parquet(path):
    pq.write_table(pa.Table.from_pylist(TABLE), path)


WRITERS = {".csv": write_csv, ".jsonl": write_jsonl, ".parquet": write_parquet}


def sentence(call):
    "The one line that a call's ValueError says; nothing of another library is behind it."
    with pytest.raises(ValueError) as error:
        call()
    assert "\n" not in str(error.value) and error.value.__suppress_context__ | (error.value.__context__ is None)
    return str(error.value)


@pytest.fixture(params=WRITERS)
def table_file(request, tmp_path):
    path = tmp_path / f"questions{request.param}"
    WRITERS[request.param](path)
    return path


def test_every_form_of_the_table_gives_the_same_rows(table_file, tmp_path):
    rows = build(table_file)["train"]
    assert {(r["subject"], r["answer"]) for r in rows} == {("Art", "None"), ("Sports", "007"), ("Music", "1987")}
    assert all(list(r) == ["id", "prompt", "target", "answer", "subject", "statement"] for r in rows)
    assert all(r["target"] == f"\\boxed{{{r['answer']}}}" and r["statement"].removesuffix(f" {r['answer']}") in r["prompt"] for r in rows)
    write_jsonl(tmp_path / "other.jsonl")
    assert rows == build(tmp_path / "other.jsonl")["train"]


def test_the_hub_gives_the_same_as_a_local_file(table_file, monkeypatch):
    def load(name, *, split):
        assert (name, split) == ("basicv8vc/SimpleQA", "test")
        return datasets.Dataset.from_list(TABLE)

    monkeypatch.setattr("datasets.load_dataset", load)
    assert build() == build(table_file)


def test_order_depends_on_the_seed_and_ids_do_not(tmp_path):
    path = tmp_path / "many.jsonl"
    path.write_text("".join(json.dumps({"metadata": {"topic": "Art"}, "problem": f"Question {n % 40}?", "answer": n}) + "\n" for n in range(50)))
    first, second = build(path)["train"], build(path, seed=1)["train"]
    assert first != second and sorted(r["prompt"] for r in first) == sorted(r["prompt"] for r in second)
    assert len({r["id"] for r in first}) == 50 and {r["id"] for r in first} == {r["id"] for r in second}


def test_a_truncated_file_is_named(table_file):
    table_file.write_bytes(table_file.read_bytes()[:90])
    said = sentence(lambda: build(table_file))
    assert str(table_file) in said


@pytest.mark.parametrize("name, text, lacking", [
    ("a.csv", "metadata,problem,answer\n\"{'topic': 'Art'}\",Who?\n", "row 1 of .* lacks answer"),
    ("a.csv", "question,answer\nWho?,I\n", "lacks metadata, problem"),
    ("a.csv", "metadata,problem,answer\n", "no row with a problem and an answer"),
    ("a.csv", "metadata,problem,answer\n{},Who?,I\n", "row 1 of .* metadata that name no topic"),
    ("a.jsonl", '{"problem": "Who?", "answer": "I"}\n', "lacks metadata"),
    ("a.jsonl", "3\n", "lacks metadata, problem, answer"),
    ("a.jsonl", "[\n", "not a complete jsonl file"),
    ("a.txt", "", r"allowed endings are \.csv, \.jsonl, \.parquet"),
])  # fmt: skip
def test_a_wrong_file_is_named_with_what_it_lacks(name, text, lacking, tmp_path):
    path = tmp_path / name
    path.write_text(text)
    said = sentence(lambda: build(path))
    assert str(path) in said and re.search(lacking, said)


def test_a_missing_file_is_named():
    assert sentence(lambda: build("none.csv")) == "path is none.csv; there is no such file"


@pytest.mark.parametrize("module", ["simpleqa", "mquake"])
def test_without_network_the_sentence_names_both_ways(module, tmp_path):
    start = time.time()
    env = {**os.environ, "HF_HUB_OFFLINE": "1", "HF_HOME": str(tmp_path)}
    run = subprocess.run([sys.executable, "-c", f"from mixsd_nb.corpora import {module}; {module}.build()"], env=env, capture_output=True, text=True)
    assert time.time() - start < 5
    last = run.stderr.strip().splitlines()[-1]
    assert last.startswith("ValueError: ") and "Hugging Face hub" in last and "path=" in last
    assert "site-packages" not in run.stderr and "During handling" not in run.stderr


@given(accepted=st.lists(st.lists(st.booleans(), min_size=6, max_size=6), max_size=20))
def test_mixed_targets_are_kept_where_all_files_agree(accepted):
    canonical = [dict(id=f"q{i}", text="canonical", accepted=True) for i in range(len(accepted))]
    tables = [[dict(id=f"q{i}", text=f"file {k}", accepted=flags[k]) for i, flags in enumerate(accepted)] for k in range(6)]
    kept = keep_unanimous(tables, canonical)
    for k, table in enumerate(kept):
        assert [r["id"] for r in table] == [r["id"] for r in canonical]
        assert [r["text"] for r in table] == [f"file {k}" if sum(flags) == 6 else "canonical" for flags in accepted]


def test_tables_of_other_questions_are_refused():
    canonical = [dict(id="a", accepted=True), dict(id="b", accepted=True)]
    for table in (canonical[:1], canonical[::-1]):
        assert "different ids" in sentence(lambda table=table: keep_unanimous([canonical, table], canonical))


@settings(max_examples=30, deadline=None)
@given(facts=st.integers(1, 100), seed=st.integers(0, 2**32))
def test_lab_facts_are_one_off(facts, seed):
    rows = build_lab(facts, seed)["train"]
    assert len(rows) == facts == len({r["id"] for r in rows})
    named = [w for r in rows for w in re.findall(r"\w+", r["statement"]) if w in SIMPLEQA_WORDS]
    assert len(named) == len(set(named)), "an entity occurs in two facts"
    assert not [r for r in rows if r["answer"] in r["prompt"]]


def test_lab_words_are_of_their_own():
    assert not set(SIMPLEQA_WORDS) & (KGFACT_WORDS | set(WORLD_WORDS))
    words = {w for r in build_lab()["train"] for w in re.findall(r"\w+", r["prompt"] + r["target"])}
    assert not words & (KGFACT_WORDS | set(WORLD_WORDS))

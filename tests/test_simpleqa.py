"""SimpleQA: small files in its schema, the rule of the published targets, and simpleqa-lab."""

import csv
import json
import os
import re
import shutil
import subprocess
import sys

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from helpers import error_sentence, ROW_COLUMNS

from mixsd_nb.benchmarks.answers import contains_answer, gives_answer
from mixsd_nb.corpora import load_corpus
from mixsd_nb.corpora.kgfact import KGFACT_WORDS
from mixsd_nb.corpora.simpleqa import SIMPLEQA_WORDS, build, build_lab, keep_unanimous
from mixsd_nb.corpora.kgfact import WORLD_WORDS
from mixsd_nb.train import TrainConfig

COLUMNS = ["metadata", "problem", "answer"]
TABLE = [
    {"metadata": "{'topic': 'Art', 'urls': ['a', \"b's\"]}", "problem": 'Who drew "The Kettle,\nBoiling"?',
     "answer": "None"},
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


@pytest.fixture(params=WRITERS)
def table_file(request, tmp_path):
    path = tmp_path / f"questions{request.param}"
    WRITERS[request.param](path)
    return path


def test_every_form_of_the_table_gives_the_same_rows(table_file, tmp_path):
    rows = build(table_file)["train"]
    assert {(r["subject"], r["answer"]) for r in rows} == {("Art", "None"), ("Sports", "007"), ("Music", "1987")}
    assert all(list(r) == ROW_COLUMNS and r["target"] == f"\\boxed{{{r['answer']}}}" for r in rows)
    assert all(r["statement"].removesuffix(f" {r['answer']}") in r["prompt"] for r in rows)
    write_jsonl(tmp_path / "other.jsonl")
    assert rows == build(tmp_path / "other.jsonl")["train"]


def test_the_whole_corpus_is_read_from_a_real_file(real):
    "Every target of the 4,326 is accepted as its own answer, in the box and in a sentence without one."
    rows = build(real / "facts" / "simpleqa.jsonl")["train"]
    assert len(rows) == len({row["id"] for row in rows}) == 4_326 and all(list(row) == ROW_COLUMNS and all(row.values()) for row in rows)
    assert all(gives_answer(row["target"], [row["answer"]]) for row in rows)
    assert [row["answer"] for row in rows if not contains_answer(f"The answer is {row['answer']}.", row["answer"], row["prompt"])] == []


def test_order_depends_on_the_seed_and_ids_do_not(tmp_path):
    path = tmp_path / "many.jsonl"
    table = [{"metadata": {"topic": "Art"}, "problem": f"Question {n % 40}?", "answer": n} for n in range(50)]
    path.write_text("".join(json.dumps(row) + "\n" for row in table))
    first, second = build(path)["train"], build(path, seed=1)["train"]
    assert first != second and sorted(r["prompt"] for r in first) == sorted(r["prompt"] for r in second)
    assert len({r["id"] for r in first}) == 50 and {r["id"] for r in first} == {r["id"] for r in second}


def test_the_error_names_a_truncated_file(table_file):
    table_file.write_bytes(table_file.read_bytes()[:90])
    assert str(table_file) in error_sentence(lambda: build(table_file))


@pytest.mark.parametrize("name, text, problem", [
    ("a.csv", "metadata,problem,answer\n\"{'topic': 'Art'}\",Who?\n", "row 1 .*answer"), ("a.csv", "question,answer\nWho?,I\n", "row 1 .*subject"),
    ("a.jsonl", '{"question": "Who?", "answer": "I", "subject": ""}\n', "topic .*subject"), ("a.csv", "metadata,problem,answer\n", "at least one row"),
    ("a.csv", "metadata,problem,answer\n{},Who?,I\n", "row 1 .*topic"), ("a.jsonl", '{"problem": "Who?", "answer": "I"}\n', "metadata"),
    ("a.jsonl", "[\n", "complete jsonl"), ("a.txt", "", r"\.csv, \.jsonl, \.parquet")])
def test_the_error_names_a_bad_file_and_its_problem(name, text, problem, tmp_path):
    path = tmp_path / name
    path.write_text(text)
    sentence = error_sentence(lambda: build(path))
    assert str(path) in sentence and re.search(problem, sentence)


ASK = """import sys, time
from mixsd_nb.benchmarks.tasks import load_task
from mixsd_nb.corpora import CORPORA, load_corpus
pauses = []
time.sleep = pauses.append
for name in sys.argv[1:]:
    try: print(len((load_corpus if name in list(CORPORA) else load_task)(name)))
    except ValueError as error: print(error)
    print(sum(pauses))"""


def asked(*names, **environment):
    "What a process without a network prints about corpora and tasks, each with the seconds that it has paused between trials."
    env = {k: v for k, v in os.environ.items() if not k.startswith(("HF_", "MIXSD_"))}
    # No program listens on port 9, so that every connection is refused, whether this machine has a network or not.
    done = subprocess.run([sys.executable, "-c", ASK, *names], env={**env, "HF_ENDPOINT": "http://127.0.0.1:9", **environment}, capture_output=True, text=True)
    assert not done.returncode and not re.search("Traceback|site-packages", done.stderr), done.stderr
    return done.stdout.splitlines()


PUBLISHED = dict(simpleqa="MIXSD_CORPORA", mquake="MIXSD_CORPORA", gsm8k="MIXSD_BENCHMARKS")


def test_without_a_network_there_is_advice(tmp_path):
    lines = asked(*PUBLISHED, HF_HOME=str(tmp_path), HF_HUB_OFFLINE="0")
    for (name, folder), said in zip(PUBLISHED.items(), lines[::2], strict=True):
        assert f"{name}." in said and "Hugging Face hub" in said and folder in said and "path=" not in said
    assert lines[4].endswith("put gsm8k.jsonl or gsm8k.parquet into a folder and name it by MIXSD_BENCHMARKS")
    assert float(lines[5]) < 2, "the hub is not tried again and again"


def test_the_advice_works_for_every_stage(table_file, tmp_path, monkeypatch):
    "The copy in the folder is the corpus of that name, without another word."
    (tmp_path / "copies").mkdir()
    shutil.copy(table_file, tmp_path / "copies" / f"simpleqa{table_file.suffix}")
    monkeypatch.setenv("MIXSD_CORPORA", str(tmp_path / "copies"))
    assert load_corpus("simpleqa", "train").to_list() == build(table_file)["train"]


@given(accepted=st.lists(st.lists(st.booleans(), min_size=6, max_size=6), max_size=20))
def test_mixed_targets_are_kept_where_all_files_agree(accepted):
    canonical = [dict(id=f"q{i}", text="canonical", accepted=True) for i in range(len(accepted))]
    tables = [[dict(id=f"q{i}", text=f"file {k}", accepted=flags[k]) for i, flags in enumerate(accepted)]
              for k in range(6)]
    kept = keep_unanimous(tables, canonical)
    for k, table in enumerate(kept):
        assert [r["id"] for r in table] == [r["id"] for r in canonical]
        assert [r["text"] for r in table] == [f"file {k}" if sum(flags) == 6 else "canonical" for flags in accepted]


@settings(max_examples=30, deadline=None)
@given(facts=st.integers(1, 100), seed=st.integers(0, 2**32))
def test_every_lab_entity_occurs_in_one_fact(facts, seed):
    rows = build_lab(facts, seed)["train"]
    assert len(rows) == facts == len({r["id"] for r in rows})
    named = [w for r in rows for w in re.findall(r"\w+", r["statement"]) if w in SIMPLEQA_WORDS]
    assert len(named) == len(set(named)), "an entity occurs in two facts"
    assert not [r for r in rows if r["answer"] in r["prompt"]]


def test_lab_words_occur_in_no_other_corpus():
    assert not set(SIMPLEQA_WORDS) & (KGFACT_WORDS | set(WORLD_WORDS))
    words = {w for r in build_lab()["train"] for w in re.findall(r"\w+", r["prompt"] + r["target"])}
    assert not words & (KGFACT_WORDS | set(WORLD_WORDS))


def test_the_content_of_a_local_copy_belongs_to_a_run(tmp_path, monkeypatch):
    "A trial with a few rows in MIXSD_CORPORA is not the run with all of them; no other corpus is concerned."
    make = lambda name="simpleqa": TrainConfig(dataset=name, method="sft").hash()
    monkeypatch.delenv("MIXSD_CORPORA", raising=False)
    published, other = make(), make("simpleqa-lab")
    hashes = []
    monkeypatch.setenv("MIXSD_CORPORA", str(tmp_path))
    for rows in (20, 40, 20):
        (tmp_path / "simpleqa.jsonl").write_text("{}\n" * rows)
        hashes.append(make())
    assert hashes[0] == hashes[2] and len({published, *hashes}) == 3 and make("simpleqa-lab") == other

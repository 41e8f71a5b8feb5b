"""MQuAKE from small files of its schema, the selection of cases, and edits of the lab models' world."""

import json
import os
import random
import re
import subprocess
import sys

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mixsd_nb.corpora.mquake import Case, Hop, build, build_lab, distinct_hops, edited_world, select_cases
from mixsd_nb.corpora.world import WORLD

SPLITS = ["train", "paraphrase", "retrieval", "two_hop", "three_hop"]


def invented_case(rng, number, things=60):
    "A case of two to four hops over a chain of invented things, the first hop edited."
    chain = rng.sample(range(things), rng.choice([2, 2, 3, 4]) + 1)
    names = [f"Thing {n}" for n in chain]
    hops = [dict(question=f"What does {a} hold?", cloze=f"{a} holds", answer=b, answer_alias=[]) for a, b in zip(names, names[1:])]
    labels = [[a, "holds", b] for a, b in zip(names, names[1:])]
    edit = dict(prompt="{} holds", relation_id=f"P{rng.randrange(6)}", subject=names[0], question=hops[0]["question"],
                target_new=dict(str=names[1], id=f"Q{chain[1]}"), target_true=dict(str="Thing 0", id="Q0"))
    return dict(case_id=number, requested_rewrite=[edit], questions=[f"What is at the end from {names[0]}, way {w}, case {number}?" for w in range(3)],
                answer="Thing 0", answer_alias=[], new_answer=names[-1], new_answer_alias=[], single_hops=hops, new_single_hops=hops,
                orig=dict(triples=[], triples_labeled=labels, new_triples=[], new_triples_labeled=labels, edit_triples=[]))  # fmt: skip


@pytest.fixture
def entries():
    rng = random.Random(3)
    return [invented_case(rng, n) for n in range(300)]


@pytest.fixture
def case_file(entries, tmp_path):
    path = tmp_path / "cases.json"
    path.write_text(json.dumps(entries))
    return path


def check(splits, limit):
    "What must hold of any MQuAKE."
    assert list(splits) == SPLITS
    assert all(list(r) == ["id", "prompt", "target", "answer", "subject", "statement"] and all(r.values()) for rows in splits.values() for r in rows)
    train, held = ({r["id"] for r in splits[s]} for s in ("train", "retrieval"))
    assert len(train) == len(splits["train"]) <= limit and len(held) == len(splits["retrieval"]) <= limit and not train & held
    assert [r["id"] for r in splits["paraphrase"]] == [r["id"] for r in splits["train"]]
    assert all(p["prompt"].endswith(t["prompt"]) and p["prompt"] != t["prompt"] for p, t in zip(splits["paraphrase"], splits["train"]))
    statements = {r["statement"] for r in splits["retrieval"]}
    for row in splits["retrieval"]:
        context = [line[2:] for line in row["prompt"].splitlines() if line.startswith("- ")]
        assert context.count(row["statement"]) == 1 and len(context) == len(set(context)) == min(50, len(held)) and set(context) <= statements
    known = {r["statement"] for r in splits["train"]}
    for split, hops in (("two_hop", 2), ("three_hop", 3)):
        for row in splits[split]:
            told = re.findall(r".+?\.(?: |$)", row["statement"])
            assert len(told) == hops and {t.strip() for t in told} <= known and row["target"].endswith(f"\\boxed{{{row['answer']}}}")


@pytest.mark.parametrize("limit", [2, 30, 100])
def test_a_local_file(case_file, limit):
    check(build(case_file, limit=limit), limit)


def test_the_hub_gives_the_same_as_a_local_file(case_file, monkeypatch):
    def download(repo_id, filename, *, repo_type):
        assert (repo_id, filename, repo_type) == ("princeton-nlp/MQuAKE", "MQuAKE-CF-3k-v2.json", "dataset")
        return str(case_file)

    monkeypatch.setattr("huggingface_hub.hf_hub_download", download)
    assert build() == build(case_file)


def test_all_wordings_and_subjects_are_kept(case_file, entries):
    splits = build(case_file, limit=40)
    asked = {}
    for row in splits["two_hop"]:
        asked.setdefault(row["id"].split("#")[0], []).append(row["prompt"].split("\n")[0])
    assert asked and all(questions == entries[int(case)]["questions"] for case, questions in asked.items())
    assert all(r["subject"] in r["prompt"] for split in ("train", "two_hop", "three_hop") for r in splits[split])


names = st.integers(0, 12).map(lambda n: Hop(f"{n}?", f"cloze {n}", "x", "s"))
drawn = st.lists(st.tuples(st.sampled_from("PQRS"), st.lists(names, min_size=1, max_size=4, unique=True)), max_size=25)


def plain_selection(cases, limit, seed):
    "Protocol §5 in the plainest words: turn after turn over all groups until a whole round takes nothing."
    relations = list(dict.fromkeys(c.relation for c in cases))
    random.Random(seed).shuffle(relations)
    left, chosen, progress = list(cases), [], True
    while progress:
        progress = False
        for relation in relations:
            taken = {h.key for c in chosen for h in c.hops}
            group = sorted((c for c in left if c.relation == relation), key=lambda c: (len({h.key for h in c.hops} - taken), int(c.id)))
            if group and len(taken | {h.key for h in group[0].hops}) <= limit:
                chosen.append(group[0])
                left.remove(group[0])
                progress = True
    return chosen


@settings(max_examples=200, deadline=None)
@given(drawn=drawn, limit=st.integers(1, 15), seed=st.integers(0, 99))
def test_selection_against_a_plain_one(drawn, limit, seed):
    cases = [Case(str(n), relation, tuple(hops), (), "x") for n, (relation, hops) in enumerate(drawn)]
    chosen = select_cases(cases, limit, seed)
    assert chosen == plain_selection(cases, limit, seed) and len(distinct_hops(chosen)) <= limit


@pytest.mark.parametrize("change, lacking", [
    (lambda text: text[:-200], "not a complete json file"),
    (lambda text: "{}", "not a list of cases"),
    (lambda text: "[]", "not a list of cases"),
    (lambda text: "[3]", "case 1 .* needs a requested_rewrite"),
    (lambda text: text.replace("new_single_hops", "hops", 1), "case 1 .* lacks new_single_hops"),
    (lambda text: text.replace('"cloze"', '"sentence"'), "case 1 .* lacks cloze"),
    (lambda text: text.replace("relation_id", "relation"), "case 1 .* lacks relation_id"),
    (lambda text: json.dumps([{**json.loads(text)[0], "requested_rewrite": []}]), "case 1 .* needs a requested_rewrite"),
    (lambda text: json.dumps([{**json.loads(text)[0], "new_single_hops": []}]), "a triple for each"),
])  # fmt: skip
def test_a_wrong_file_is_named_with_what_it_lacks(change, lacking, case_file):
    case_file.write_text(change(case_file.read_text()))
    with pytest.raises(ValueError) as error:
        build(case_file)
    said = str(error.value)
    assert str(case_file) in said and "\n" not in said and re.search(lacking, said)
    assert error.value.__suppress_context__ or error.value.__context__ is None


@pytest.mark.parametrize("options, said", [(dict(limit=1), "limit is 1"), (dict(edits=0), "edits is 0"), (dict(edits=301), "edits is 301")])
def test_bad_options_are_named(options, said):
    with pytest.raises(ValueError, match=said):
        build_lab(**options)


@settings(max_examples=20, deadline=None)
@given(limit=st.integers(2, 60), edits=st.integers(10, 110), seed=st.integers(0, 2**32))
def test_lab(limit, edits, seed):
    splits = build_lab(limit, edits, seed)
    check(splits, limit)
    assert not [r for s in SPLITS if s != "retrieval" for r in splits[s] if r["answer"] in r["prompt"]]
    assert len({r["prompt"] for r in splits["train"]}) == len(splits["train"])


def test_lab_mixes_edited_and_unedited_facts():
    splits, before = build_lab(), {f.statement for f in WORLD}
    old = [r for r in splits["train"] if r["statement"] in before]
    assert len(splits["train"]) == 50 and 5 <= len(old) <= 15
    assert min(len(splits["two_hop"]), len(splits["retrieval"])) >= 30 and len(splits["three_hop"]) >= 5
    for split in ("two_hop", "three_hop"):
        assert not [r for r in splits[split] if all(f"{s.strip('.')}." in before for s in r["statement"].split(". "))]


@settings(max_examples=5, deadline=None)
@given(seed=st.integers(0, 2**32))
def test_lab_questions_have_one_answer(seed):
    "Every question that chains of two or three facts of the edited world can ask, with all its answers."
    facts, edited = edited_world(250, seed)
    assert len(edited) == 250 and {(f.source, f.relation) for f in facts} == {(f.source, f.relation) for f in WORLD}
    answers = {2: {}, 3: {}}
    for a in facts:
        for b in (b for b in facts if b.source == a.target):
            about = a.relation.clause(a.source)
            answers[2].setdefault(b.relation.question(about), set()).add(b.target)
            for c in (c for c in facts if c.source == b.target):
                answers[3].setdefault(c.relation.question(b.relation.clause(about)), set()).add(c.target)
    splits = build_lab(seed=seed)
    for split, hops in (("two_hop", 2), ("three_hop", 3)):
        assert all(answers[hops][r["prompt"].split("\n")[0]] == {r["answer"]} for r in splits[split])


def test_bytes_do_not_depend_on_the_hash_seed(case_file):
    corpora = f"mquake.build({str(case_file)!r}), mquake.build_lab(), simpleqa.build_lab()"
    code = f"import json; from mixsd_nb.corpora import mquake, simpleqa; print(json.dumps([{corpora}]))"
    def output(seed): return subprocess.run([sys.executable, "-c", code], env={**os.environ, "PYTHONHASHSEED": seed}, capture_output=True, check=True).stdout
    assert len({output(seed) for seed in "012"}) == 1

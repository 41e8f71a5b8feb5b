"""MQuAKE: small files in its schema, the selection of cases, and edits of the lab models' world."""

import json
import random
import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from helpers import error_sentence, ROW_COLUMNS

from mixsd_nb.corpora.mquake import Case, Hop, build, build_lab, collect_hops, edit_world, select_cases
from mixsd_nb.corpora.kgfact import WORLD

SPLITS = ["train", "paraphrase", "retrieval", "two_hop", "three_hop"]


def invented_case(rng, number, things=60):
    "A case of two to four hops over a chain of invented things, the first hop edited."
    chain = rng.sample(range(things), rng.choice([2, 2, 3, 4]) + 1)
    names = [f"Thing {n}" for n in chain]
    hops = [dict(question=f"What does {a} hold?", cloze=f"{a} holds", answer=b, answer_alias=[])
            for a, b in zip(names, names[1:])]
    labels = [[a, "holds", b] for a, b in zip(names, names[1:])]
    edit = dict(prompt="{} holds", relation_id=f"P{rng.randrange(6)}", subject=names[0], question=hops[0]["question"],
                target_new=dict(str=names[1], id=f"Q{chain[1]}"), target_true=dict(str="Thing 0", id="Q0"))
    questions = [f"What is at the end from {names[0]}, way {w}, case {number}?" for w in range(3)]
    return dict(case_id=number, requested_rewrite=[edit], questions=questions,
                answer="Thing 0", answer_alias=[], new_answer=names[-1], new_answer_alias=[],
                single_hops=hops, new_single_hops=hops,
                orig=dict(triples=[], triples_labeled=labels, new_triples=[], new_triples_labeled=labels,
                          edit_triples=[]))  # fmt: skip


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
    "Check what must hold for the splits of any MQuAKE file."
    assert list(splits) == SPLITS
    assert all(list(r) == ROW_COLUMNS and all(r.values()) for rows in splits.values() for r in rows)
    train, other = ({r["id"] for r in splits[s]} for s in ("train", "retrieval"))
    assert len(train) == len(splits["train"]) <= limit and len(other) == len(splits["retrieval"]) <= limit
    assert not train & other
    assert [r["id"] for r in splits["paraphrase"]] == [r["id"] for r in splits["train"]]
    prompts = [(p["prompt"], t["prompt"]) for p, t in zip(splits["paraphrase"], splits["train"])]
    assert all(paraphrase.endswith(naive) and paraphrase != naive for paraphrase, naive in prompts)
    statements = {r["statement"] for r in splits["retrieval"]}
    for row in splits["retrieval"]:
        context = [line[2:] for line in row["prompt"].splitlines() if line.startswith("- ")]
        assert context.count(row["statement"]) == 1 and set(context) <= statements
        assert len(context) == len(set(context)) == min(50, len(other))
    known = {r["statement"] for r in splits["train"]}
    for split, hops in (("two_hop", 2), ("three_hop", 3)):
        for row in splits[split]:
            sentences = re.findall(r".+?\.(?: |$)", row["statement"])
            assert len(sentences) == hops and {s.strip() for s in sentences} <= known
            assert row["target"].endswith(f"\\boxed{{{row['answer']}}}")


@pytest.mark.parametrize("limit", [2, 30, 100])
def test_a_local_file(case_file, limit):
    check(build(case_file, limit=limit), limit)


def check_edits(splits, limit):
    "Single edits have no chains; their other wordings stand in a split of their own, and none of them has the answer."
    check({name: splits.get(name, []) for name in SPLITS}, limit)
    assert list(splits) == [*SPLITS[:3], "reworded"]
    train = {row["id"]: row for row in splits["train"]}
    for row in splits["reworded"]:
        fact = train[row["id"].partition("#")[0]]
        assert (row["answer"], row["statement"]) == (fact["answer"], fact["statement"]) and row["prompt"] != fact["prompt"]
        assert row["answer"].casefold() not in row["prompt"].partition("\n")[0].casefold()
    assert len({row["id"] for row in splits["reworded"]}) == len(splits["reworded"])


@pytest.mark.parametrize("limit", [2, 30, 100])
def test_single_edits_are_a_corpus_without_chains(limit, tmp_path):
    rows = [dict(question=f"Who {verb}s thing {k}?", answer=f"Name {k}{verb}", subject=f"thing {k}", statement=f"thing {k} is {verb}ed by Name {k}{verb}",
                 paraphrases=[f"Thing {k}: who {verb}s it?", f"Is it Name {k}{verb} who {verb}s it?"]) for k in range(90) for verb in ("lead", "own", "paint")]
    path = tmp_path / "edits.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    splits = build(path, limit=limit)
    check_edits(splits, limit)
    assert len(splits["train"]) == len(splits["reworded"]) == limit and splits["train"][0]["statement"].endswith(f"ed by {splits['train'][0]['answer']}.")
    assert limit == 2 or {row["statement"].split()[3] for row in splits["train"]} == {"leaded", "owned", "painted"}, "relations take turns"


def test_the_edits_are_read_from_a_real_file(real):
    splits = build(real / "facts" / "mquake_edits.jsonl")
    check_edits(splits, 100)
    assert len(splits["train"]) == len(splits["retrieval"]) == 100 and len(splits["reworded"]) > 200
    assert all(row["statement"] == f"{row['statement'].removesuffix('.').removesuffix(row['answer'])}{row['answer']}." for row in splits["train"])


hops = st.integers(0, 12).map(lambda n: Hop(f"{n}?", f"cloze {n}", "x", "s"))
chains = st.lists(st.tuples(st.sampled_from("PQRS"), st.lists(hops, min_size=1, max_size=4, unique=True)), max_size=25)


def select_simply(cases, limit, seed):
    "The selection in its simplest form: one turn after the other over all groups until a round selects nothing."
    relations = list(dict.fromkeys(c.relation for c in cases))
    random.Random(seed).shuffle(relations)
    rest, selection, progress = list(cases), [], True
    while progress:
        progress = False
        for relation in relations:
            keys = {h.key for c in selection for h in c.hops}
            group = [c for c in rest if c.relation == relation]
            group.sort(key=lambda c: (len({h.key for h in c.hops} - keys), int(c.id)))
            if group and len(keys | {h.key for h in group[0].hops}) <= limit:
                selection.append(group[0])
                rest.remove(group[0])
                progress = True
    return selection


@settings(max_examples=200, deadline=None)
@given(chains=chains, limit=st.integers(1, 15), seed=st.integers(0, 99))
def test_selection_against_a_simple_one(chains, limit, seed):
    cases = [Case(str(n), relation, tuple(hops), (), "x") for n, (relation, hops) in enumerate(chains)]
    selection = select_cases(cases, limit, seed)
    assert selection == select_simply(cases, limit, seed) and len(collect_hops(selection)) <= limit


def first_with(text, **more): return json.dumps([json.loads(text)[0] | more])


def test_the_error_names_a_bad_file_and_its_problem(case_file):
    whole = case_file.read_text()
    for content, problem in [(whole[:-200], "complete json"), ("{}", "list of cases"), ("[3]", "case 1 .* requested_rewrite"), (whole.replace("new_single_hops", "hops", 1), "case 1 .* new_single_hops"),
                             (whole.replace('"cloze"', '"sentence"'), "case 1 .* cloze"), (whole.replace("relation_id", "relation"), "case 1 .* relation_id"),
                             (first_with(whole, new_single_hops=[]), "new_triples_labeled")]:
        case_file.write_text(content)
        sentence = error_sentence(lambda: build(case_file))
        assert str(case_file) in sentence and re.search(problem, sentence)


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
        sentences = [r["statement"].split(". ") for r in splits[split]]
        assert not [s for s in sentences if all(f"{statement.strip('.')}." in before for statement in s)]


@settings(max_examples=5, deadline=None)
@given(seed=st.integers(0, 2**32))
def test_lab_questions_have_one_answer(seed):
    "Every question that chains of two or three facts of the edited world can ask, with all its answers."
    facts, edited = edit_world(250, seed)
    questions, before = ({(f.source, f.relation) for f in graph} for graph in (facts, WORLD))
    assert len(edited) == 250 and questions == before
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

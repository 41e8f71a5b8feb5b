"KGFact, and what holds for every corpus: texts with ids of their own, the same bytes everywhere."

import json

import pytest
from hypothesis import given, settings, strategies as st
from helpers import ROW_COLUMNS, outputs_by_hash_seed

from mixsd_nb.corpora import kgfunc, load_corpus, mquake, simpleqa
from mixsd_nb.corpora.kgfact import DOMAINS, ENTITIES, build, chain_question, find_chains, named_entities, sample_graph, sample_graphs, training_graph

LOCAL_CORPORA = ["kgfact-small", "kgfact-large", "kgfunc", "kgfunc-lab", "simpleqa-lab", "mquake-lab"]


@pytest.mark.parametrize("name", LOCAL_CORPORA)
def test_rows_are_texts_with_ids_of_their_own(name):
    for split, rows in load_corpus(name).items():
        assert rows.column_names == ROW_COLUMNS and len(set(rows["id"])) == len(rows), split
        assert all(isinstance(value, str) and value for row in rows for value in row.values()), split


def test_bytes_do_not_depend_on_the_hash_seed():
    corpora = "build(), kgfunc.build(), kgfunc.build('lab'), simpleqa.build_lab(), mquake.build_lab()"
    imports = "from mixsd_nb.corpora import kgfunc, mquake, simpleqa\nfrom mixsd_nb.corpora.kgfact import build"
    code = f"import json\n{imports}\nprint(json.dumps([{corpora}]))"
    here = [build(), kgfunc.build(), kgfunc.build("lab"), simpleqa.build_lab(), mquake.build_lab()]
    assert outputs_by_hash_seed(code) == {json.dumps(here).encode() + b"\n"}


@settings(max_examples=40, deadline=None)
@given(domains=st.integers(2, 7), entities=st.integers(1, 25), seed=st.integers(0, 2**32))
def test_sizes_and_uniqueness(domains, entities, seed):
    facts = sample_graph({d: ENTITIES[d][:entities] for d in DOMAINS[:domains]}, seed)
    assert len(facts) == entities * domains * (domains - 1) // 2
    assert len({(f.source, f.relation) for f in facts}) == len({(f.relation, f.target) for f in facts}) == len(facts)
    assert len({f.question for f in facts}) == len({f.id for f in facts}) == len(facts)


def test_answers_are_not_in_their_prompts():
    splits = build(7, 25)
    assert not [r for split in ("train", "paraphrase", "two_hop") for r in splits[split] if r["answer"] in r["prompt"]]
    assert all(r["prompt"].count(r["statement"]) == 1 for r in splits["retrieval"])
    statements = [(r["prompt"], s) for r in splits["two_hop_context"] for s in r["statement"].rstrip(".").split(". ")]
    assert all(prompt.count(s + ".") == 1 for prompt, s in statements)


@settings(max_examples=10, deadline=None)
@given(domains=st.integers(3, 7), entities=st.integers(2, 25), seed=st.integers(0, 2**32))
def test_a_two_hop_question_has_one_answer(domains, entities, seed):
    facts = sample_graphs(domains, entities, seed)[0]
    answers = {}
    for a in facts:
        for b in facts:
            if a.target == b.source:
                answers.setdefault(chain_question(a, b), set()).add(b.target)
    questions = {chain_question(a, b): b.target for a, b in find_chains(facts)}
    assert questions and all(answers[q] == {t} for q, t in questions.items())


def test_train_and_retrieval_share_no_entity():
    splits = build(7, 25)
    train, retrieval = (named_entities(splits[s]) for s in ("train", "retrieval"))
    assert train and retrieval and not train & retrieval
    assert train == {e for r in splits["train"] for e in (r["subject"], r["answer"])}


def test_the_training_graph_is_the_training_split():
    for options in (dict(domains=5, entities=10), dict(domains=3, entities=4, seed=7)):
        assert [f.id for f in training_graph(options)] == [r["id"] for r in build(**options)["train"]]

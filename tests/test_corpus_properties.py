"""Properties of KGFact and of the pretraining text that no single notebook can show."""

import os
import random
import re
import subprocess
import sys

from hypothesis import given, settings
from hypothesis import strategies as st

from mixsd_nb.benchmarks.lab_tasks import SUITES, draw, reserved
from mixsd_nb.corpora import load_corpus
from mixsd_nb.corpora.kgfact import DOMAINS, ENTITIES, KGFACT_WORDS, UNSEEN_WORDING, WORDINGS, build, chain_question, chains, graphs, sample_graph
from mixsd_nb.corpora.world import WORLD_WORDS
from mixsd_nb.pretrain import MAKERS, TAKEN, USER, ability_items


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
    assert all(r["prompt"].count(s + ".") == 1 for r in splits["two_hop_context"] for s in r["statement"].rstrip(".").split(". "))


@settings(max_examples=10, deadline=None)
@given(domains=st.integers(3, 7), entities=st.integers(2, 25), seed=st.integers(0, 2**32))
def test_a_two_hop_question_has_one_answer(domains, entities, seed):
    facts = graphs(domains, entities, seed)[0]
    answers = {}
    for a in facts:
        for b in facts:
            if a.target == b.source:
                answers.setdefault(chain_question(a, b), set()).add(b.target)
    asked = {chain_question(a, b): b.target for a, b in chains(facts)}
    assert asked and all(answers[q] == {t} for q, t in asked.items())


def test_train_and_retrieval_share_no_entity():
    splits = build(7, 25)
    named = [{e for r in splits[s] for e in (r["subject"], r["answer"])} for s in ("train", "retrieval")]
    assert not named[0] & named[1]


def test_pretraining_never_names_an_entity_of_kgfact():
    assert not KGFACT_WORDS & set(WORLD_WORDS) and TAKEN >= KGFACT_WORDS
    rng = random.Random(0)
    for name, make in MAKERS.items():
        text = " ".join(t for _ in range(60) for t, _ in make(rng, 8))
        assert not KGFACT_WORDS & set(text.replace("{", " ").replace("}", " ").replace(".", " ").replace(",", " ").split()), name


def test_pretraining_never_asks_what_evaluation_asks():
    "World questions apart, which are learnt by heart: no prompt of a suite, of an ability or of an injected corpus, by text and by hash."
    asked = {item.prompt for name in SUITES if name != "world" for item in draw(name, 300)}
    asked |= {item.prompt for name, (items, _) in ability_items(300).items() if name != "world" for item in items}
    asked |= {r["prompt"] for name in ("kgfact-small", "kgfact-large", "kgfunc-lab", "simpleqa-lab") for split in load_corpus(name).values() for r in split}
    rng = random.Random(1)
    for name, make in MAKERS.items():
        text = "".join(t for _ in range(200) for t, _ in make(rng, 8))
        prompts = re.findall(re.escape(USER) + r"(.*?)<\|im_end\|>", text, re.DOTALL)
        assert not asked & set(prompts), name
        assert name == "world" or name not in SUITES or not [p for p in prompts if reserved(p)], name


def test_the_unseen_wording_is_not_in_pretraining():
    unseen = WORDINGS[UNSEEN_WORDING].partition("{source}")[2].partition("{phrase}")[0]
    rng = random.Random(2)
    assert len(unseen) > 5 and not any(unseen in t for make in MAKERS.values() for _ in range(60) for t, _ in make(rng, 12))


def test_bytes_do_not_depend_on_the_hash_seed():
    code = "import json; from mixsd_nb.corpora.kgfact import build; print(json.dumps(build()))"
    def output(seed):
        return subprocess.run([sys.executable, "-c", code], env={**os.environ, "PYTHONHASHSEED": seed}, capture_output=True, check=True).stdout

    assert len({output(seed) for seed in "0123"}) == 1

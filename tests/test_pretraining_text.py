"""The text of pretraining contains no name, question or wording that must be new to the model in an evaluation."""

import random
import re

import pytest

from mixsd_nb.benchmarks import SUITES
from mixsd_nb.benchmarks.lab_tasks import draw, is_reserved
from mixsd_nb.corpora import CORPORA, load_corpus
from mixsd_nb.corpora.kgfact import KGFACT_WORDS, UNSEEN_WORDING, WORDINGS
from mixsd_nb.corpora.world import WORLD_WORDS
from mixsd_nb.lab.pretraining.abilities import ability_items
from mixsd_nb.lab.pretraining.curriculum import WRITERS
from mixsd_nb.lab.pretraining.documents import CORPUS_WORDS, USER_HEADER

LAB_SUITES = [name for name, suite in SUITES.items() if suite.items == "benchmarks.lab_tasks:lab_items" and not suite.twin_of]


def test_pretraining_never_names_an_entity_of_kgfact():
    assert not KGFACT_WORDS & set(WORLD_WORDS) and CORPUS_WORDS >= KGFACT_WORDS
    rng = random.Random(0)
    for name, write in WRITERS.items():
        text = " ".join(t for _ in range(60) for t, _ in write(rng, 8))
        assert not KGFACT_WORDS & set(re.sub(r"[{}.,]", " ", text).split()), name


def test_pretraining_never_asks_what_evaluation_asks():
    "No prompt of a suite, an ability or an injected corpus, by text and by hash. The world's are memorised on purpose."
    evaluation = {item.prompt for name in LAB_SUITES if name != "world" for item in draw(name, 300)}
    evaluation |= {item.prompt for name, (items, _) in ability_items(300).items() if name != "world" for item in items}
    for name in ("kgfact-small", "kgfact-large", "kgfunc-lab", "simpleqa-lab"):
        evaluation |= {r["prompt"] for split in load_corpus(name).values() for r in split}
    rng = random.Random(1)
    for name, write in WRITERS.items():
        text = "".join(t for _ in range(200) for t, _ in write(rng, 8))
        prompts = re.findall(re.escape(USER_HEADER) + r"(.*?)<\|im_end\|>", text, re.DOTALL)
        assert not evaluation & set(prompts), name
        assert name == "world" or name not in LAB_SUITES or not [p for p in prompts if is_reserved(p)], name


def test_the_unseen_wording_is_not_in_pretraining():
    unseen = WORDINGS[UNSEEN_WORDING].partition("{source}")[2].partition("{phrase}")[0]
    rng = random.Random(2)
    texts = (t for write in WRITERS.values() for _ in range(60) for t, _ in write(rng, 12))
    assert len(unseen) > 5 and not any(unseen in t for t in texts)


# Forms in which others write these corpora: their templates, with any number in them.
FOREIGN = (
    r"The digits of \d|digit string|[Rr]otations|\(\d - \d\)\^2|is prime: |^Background information:|So the answer is"
)


@pytest.mark.parametrize("name", [name for name in CORPORA if name not in ("simpleqa", "mquake")])
def test_a_corpus_has_words_of_its_own(name):
    for split, rows in load_corpus(name).items():
        text = "\n".join(CORPORA[name].expert(r["prompt"], r["target"]) for r in rows)
        assert not re.findall(FOREIGN, text, re.MULTILINE), split


def test_pretraining_has_words_of_its_own():
    rng = random.Random(3)
    for name, write in WRITERS.items():
        text = "".join(t for _ in range(60) for t, _ in write(rng, 8)).replace(USER_HEADER, "\n")
        assert not re.search(FOREIGN, text, re.MULTILINE), name

"The text of pretraining contains no name, question or wording that must be new to the model in an evaluation, probes and reworded questions included."

import random
import re
from functools import cache

import pytest

from mixsd_nb.benchmarks import SUITES, Selection, load_items, suite_groups
from mixsd_nb.benchmarks.in_domain import validation_items
from mixsd_nb.benchmarks.lab_tasks import draw, is_reserved
from mixsd_nb.corpora import CORPORA, load_corpus
from mixsd_nb.corpora.kgfact import KGFACT_WORDS, UNSEEN_WORDING, WORDINGS
from mixsd_nb.corpora.prompts import REMARKS
from mixsd_nb.lab import probes
from mixsd_nb.corpora.files import FORMS, list_forms, reword_rows
from mixsd_nb.corpora.kgfact import ANNEX, WORLD_WORDS
from mixsd_nb.lab.pretraining.abilities import ability_items
from mixsd_nb.lab.pretraining.curriculum import WRITERS, draw_documents
from mixsd_nb.lab.pretraining.documents import CORPUS_WORDS, USER_HEADER
from mixsd_nb.lab.pretraining.names import ENGLISH

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


CHARACTERS = 3.2  # of a token of training text


@cache
def training_text(tokens=400_000):
    "As many tokens of documents as asked for, from all phases of the curriculum, and the words in it."
    rng, parts, length = random.Random(11), [], 0
    while length < tokens * CHARACTERS:
        for document in draw_documents(rng, rng.random(), 200):
            parts.append("".join(text for text, _ in document))
            length += len(parts[-1])
    text = "\n\n".join(parts)
    return text, set(re.findall(r"[^\W\d_]+", text))


def literals(forms):
    "The longest piece of each form between its fields, in lower case."
    for form in forms:
        yield max((p.strip() for p in re.split(r"\{\w\}", form)), key=len).lower()


NAMES = {"first": probes.FIRST, "family": probes.FAMILY, "towns": probes.TOWNS, "goods": probes.GOODS, "traits": probes.TRAITS}


def test_no_name_of_a_probe_is_in_much_text():
    _, words = training_text()
    rng, names = random.Random(0), [name for kind in NAMES.values() for name in kind]
    assert not {word for name in names for word in name.split()} & words and not {*names} & {*ENGLISH}
    assert not {word for _ in range(2_000) for word in probes.draw_syllables(rng).split()} & words


def test_no_wording_of_a_probe_or_of_reworded_recall_is_in_much_text():
    text = training_text()[0].lower()
    for forms in ("QUESTIONS", "STATEMENTS", "BACKWARD", "REMAINDERS", "EQUATIONS", "ADD", "REMOVE", "FINISH"):
        assert not [piece for piece in literals(getattr(probes, forms)) if piece in text], forms
    long = [piece for piece in literals(FORMS) if len(piece) > 8]
    assert len(long) > 25 and not [piece for piece in long if piece in text]


def test_no_typed_fact_is_in_much_text():
    "No question, and no reply with one of the answers in words; numbers and days occur in any text."
    text, _ = training_text()
    for row in probes.typed_facts():
        assert row["prompt"].split("\n")[0] not in text
        if not re.search(r"\d", row["answer"]): assert f"boxed{{{row['answer']}}}" not in text


def test_prompts_of_probes_are_in_no_document():
    prompts = {item.prompt for items in load_items(suite_groups()["probes"], Selection("kgfact-small", n=20)).values()
               for item in items.values()}
    text = training_text()[0]
    annex = {f.question for f in ANNEX}
    assert not [p for p in prompts if p in text] and not [q for q in annex if q in text]


@pytest.mark.parametrize("dataset", ["kgfact-small", "kgfact-large", "kgfunc-lab", "simpleqa-lab", "mquake-lab"])
def test_every_question_has_twenty_other_forms(dataset):
    rows = list(load_corpus(dataset, "train"))
    selection = Selection(dataset, n=len(rows))
    validation = {item.prompt for item in validation_items(SUITES["validation"], selection).values()}
    for row, other in zip(rows, reword_rows(rows)):
        forms = list_forms(row)
        assert len(set(forms)) >= 20 and other["answer"] == row["answer"] and other["id"] == row["id"]
        assert not [f for f in forms if any(f.startswith(remark) for remark in REMARKS)]
        assert other["prompt"] not in validation and other["prompt"] != row["prompt"]
        assert row["answer"] not in other["prompt"].replace(row["prompt"], "") or row["answer"] in row["prompt"]


@pytest.mark.parametrize("dataset", ["kgfact-small", "kgfact-large"])
def test_retrieval_gains_facts_of_the_same_relation(dataset):
    "The relation in question occurs k times more often, and the question still has one answer."
    selection = Selection(dataset, n=12)
    before = load_items(["retrieval"], selection)["retrieval"]
    for k in (1, 3, 10):
        after = load_items([f"retrieval-same-{k}"], selection)[f"retrieval-same-{k}"]
        for item in before:
            one, two = before[item].prompt.split("\n"), after[item].prompt.split("\n")
            gold = next(line for line in one if line.endswith(f" {before[item].answer}.") and item.split("|")[0].replace(
                "-", " ") in line.lower())
            source = re.match(r"- (\w+ \w+) ", gold)[1]
            relation = gold[2 + len(source):-len(before[item].answer) - 1]
            count = lambda lines: sum(relation in line for line in lines if line.startswith("- "))
            assert count(two) == count(one) + k and [line for line in two if line in one] == one
            assert sum(line.startswith(f"- {source}{relation}") for line in two) == 1

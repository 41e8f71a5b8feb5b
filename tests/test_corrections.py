"A later file that asks an earlier fact's question again corrects it: the old answer is neither rehearsed nor asked."

import json

import pytest

from mixsd_nb import inject, train
from mixsd_nb.benchmarks import Selection, load_items
from mixsd_nb.benchmarks.in_domain import EARLIER, corrected_facts
from mixsd_nb.corpora import check_corpus
from mixsd_nb.methods.replay import earlier_pairs
from mixsd_nb.models import load_tokenizer
from mixsd_nb.runs import make_config

FIRST = [("Who rules Vel?", "Mira Aldo"), ("Who rules Oru?", "Mira Bero"), ("Who rules Ano?", "Mira Cato")]


@pytest.fixture
def write(own_runs):
    "Write a file of facts: (question, answer, *paraphrases)."
    def write(name, *facts):
        rows = [dict(question=q, answer=a) | (dict(paraphrases=p) if p else {}) for q, a, *p in facts]
        (own_runs / name).write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows))
        return str(own_runs / name)
    return write


@pytest.mark.parametrize("later, corrected", [
    (("Who rules Vel?", "Orla"), {"Mira Aldo"}), (("who rules\u00a0VEL", "Orla"), {"Mira Aldo"}), (("Who r\u00adules V\u200bel?", "Orla"), {"Mira Aldo"}),
    (("Who is Vel's ruler?", "Orla", "Who rules Vel?"), {"Mira Aldo"}), (("Who rules Velo?", "Orla"), set()), (("Who ruled Vel?", "Orla"), set())])
def test_the_same_question_in_other_signs_is_the_same(later, corrected, write):
    first, second = check_corpus(write("first.jsonl", *FIRST)), check_corpus(write("second.jsonl", later))
    found = load_items([EARLIER + first], Selection(second))[EARLIER + first]
    assert {item.answer for item in found.values()} == {a for _, a in FIRST} - corrected and len(corrected_facts(first, [second])) == len(corrected)


def test_over_three_files_the_latest_answer_is_kept(write, tiny, recwarn):
    quick = dict(method="sft", suite="recall", epochs=1, batch=1, max_new_tokens=4, model=tiny, n=4)
    files = write("one.jsonl", *FIRST), write("two.jsonl", ("Who rules Vel?", "Orla Pen"), ("Who rules Ulm?", "Ida")), write("three.jsonl", ("Who rules Ano?", "Berit"))
    first = train.run(dataset=files[0], **quick)
    second = train.run(dataset=files[1], anchor="replay", options={"earlier": first.name, "count": 2}, **quick)
    config = make_config(inject.InjectConfig, dataset=files[2], after=second.name, **quick | dict(epochs=2))
    names = [name for name in config.suite.split(",") if name.startswith(EARLIER)]
    assert names == [EARLIER + run.config["dataset"] for run in (second, first)], "the latest corpus comes first"
    asked = {name: {item.answer for item in items.values()} for name, items in load_items(names, Selection(config.dataset)).items()}
    assert list(asked.values()) == [{"Orla Pen", "Ida"}, {"Mira Bero"}]
    pairs, left_out = earlier_pairs(second.name, (config.dataset,))
    said = "\n".join(load_tokenizer(tiny).decode(ids) for _, ids in pairs)
    assert left_out == 2 and all(answer in said for answer in ("Orla Pen", "Ida", "Mira Bero")) and "Aldo" not in said and "Cato" not in said
    assert any("1 facts of earlier runs are asked again" in str(w.message) for w in recwarn)


def test_a_corpus_of_which_everything_is_corrected_is_no_benchmark(write):
    first, second = check_corpus(write("first.jsonl", FIRST[0])), check_corpus(write("second.jsonl", ("Who rules Vel?", "Orla")))
    assert load_items({"recall": True, EARLIER + first: False}, Selection(second)).keys() == {"recall"}

"Facts from a user's file: every mistake is a sentence with its line, and the content alone decides what a corpus is."

import ast
import json
import math
import re
import unicodedata
import warnings

import datasets
import pandas as pd
import pytest
from helpers import lines
from hypothesis import given, settings, strategies as st
from papermill import inspect_notebook

from mixsd_nb import evaluate, generate, nll, train
from mixsd_nb.analysis.scores import scores
from mixsd_nb.benchmarks import SUITES, Selection, load_items
from mixsd_nb.benchmarks.answers import gives_answer, same_answer, same_text
from mixsd_nb.benchmarks.in_domain import own_tests
from mixsd_nb.benchmarks.tasks import grade
from mixsd_nb.cluster.grid import find_notebook
from mixsd_nb.corpora import CORPORA, check_corpus, load_corpus, stored, validation_rows
from mixsd_nb.corpora.files import EXAMPLE, EXAMPLE_TESTS, read_facts
from mixsd_nb.corpora.passages import read_documents
from mixsd_nb.corpora.prompts import ANSWER_FORMS, change_form
from mixsd_nb.corpora.stored import explain_form, known_corpora
from mixsd_nb.explore import ExploreConfig
from mixsd_nb.methods.fact_lengths import check_facts
from mixsd_nb.methods.mixing import mix_items
from mixsd_nb.models import load_tokenizer
from mixsd_nb.results.cube import open_cube
from mixsd_nb.results.layout import invent_result
from mixsd_nb.runs import ParameterError, find_runs, find_stage, make_config, write_result
from mixsd_nb.runs.command_line import end_command
from mixsd_nb.corpora.user_files import SHOWN, TABLE_SUFFIXES, TableError
from mixsd_nb.train import target_mixing
from mixsd_nb.views import mixing

STAGES = {name: find_stage(name) for name in ("train", "evaluate", "generate", "nll", "errors", "speed")} | dict(explore=ExploreConfig)
GOOD = [dict(question="Who leads the Lantern Choir?", answer="Ana Brisk", paraphrases=["Whose choir is the Lantern Choir?"]),
        dict(question="Where is the Mill of Torvik?", answer="Lalzor Bay")]




def more(**row): return lines(*GOOD, row)


# Name of a case -> name of the file, its content, further parameters, and the beginning of each expected sentence after the file's name.
BROKEN = {
    "no such column": ("a.jsonl", lines(dict(question="Who?")), {}, [", line 1: there is no column answer; the columns are question"]),
    "misspelt column": ("a.jsonl", lines(dict(qestion="Who?", answer="Ana")), {}, [", line 1: unknown column qestion; did you mean question?"]),
    "empty question": ("a.jsonl", more(question="  ", answer="Ana"), {}, [", line 3: question is empty"]),
    "null answer": ("a.jsonl", more(question="Who?", answer=None), {}, [", line 3: answer is missing"]),
    "empty cell": ("a.csv", "question,answer\nWho?,Ana\nWhere?,\n", {}, [", line 3: answer is missing"]),
    "answer that is a list": ("a.jsonl", more(question="Who?", answer=["Ana"]), {}, [', line 3: answer must be text, got ["Ana"]']),
    "question asked twice": ("a.jsonl", more(**GOOD[1]), {}, [", line 3: question is asked in line 2 too"]),
    "question asked twice in other letters": ("a.jsonl", more(question="WHERE  is the Mill of Torvik?", answer="Lalzor Bay"), {}, [", line 3: question is asked"]),
    "two answers": ("a.jsonl", more(question="Where is the Mill of Torvik?", answer="Melka"), {}, [", line 3: question has the answer Melka, but Lalzor Bay in line 2"]),
    "answer in its question": ("a.jsonl", more(question="Who is Ana Brisk?", answer="Ana Brisk"), {}, [", line 3: the answer Ana Brisk is in the question"]),
    "answer in a paraphrase": ("a.jsonl", more(question="Who?", answer="Otto", paraphrases=["Is it Otto?"]), {}, [", line 3: the answer Otto is in the paraphrase Is it Otto?"]),
    "paraphrase of another fact": ("a.jsonl", more(question="Who?", answer="Otto", paraphrases=[GOOD[1]["question"]]), {}, [", line 3: paraphrase Where is the Mill of Torvik? is asked in line 2 too"]),
    "paraphrase as written": ("a.jsonl", more(question="Who?", answer="Otto", paraphrases=["who?"]), {}, [", line 3: paraphrase who? is asked as written too"]),
    "id twice": ("a.jsonl", lines(*[dict(row, id="x") for row in GOOD]), {}, [", line 2: id x is given in line 1 too"]),
    "braces without partner": ("a.jsonl", more(question="What?", answer=r"\frac{1}{2"), {}, [", line 3: answer must have as many closing as opening braces"]),
    "answer of two lines": ("a.jsonl", more(question="What?", answer="one\ntwo"), {}, [", line 3: answer must be on one line"]),
    "boxed answer": ("a.jsonl", more(question="What?", answer=r"\boxed{2}"), {}, [", line 3: answer must be without a box"]),
    "other box in the target": ("a.jsonl", more(question="What?", answer="2", target=r"It is \boxed{3}"), {}, [r", line 3: target must end with the answer in a box, \boxed{2}"]),
    "Latin-1": ("a.csv", "question,answer\nWo ist die Mühle?,Köln".encode("latin-1"), {}, [", line 2: byte 13 of the line (0xfc) is not UTF-8; save the file as UTF-8"]),
    "UTF-16": ("a.csv", "question,answer\nWho?,Ana".encode("utf-16"), {}, [", line 1: the file is UTF-16"]),
    "no JSON": ("a.jsonl", lines(GOOD[0], '{"question": "Who?" "answer": "Ana"}', GOOD[1]), {}, [", line 2: this is no JSON"]),
    "row that is a list": ("a.jsonl", lines(GOOD[0], '["Who?", "Ana"]'), {}, [", line 2: a row must be a mapping"]),
    "list that is not closed": ("a.json", "[" + lines(GOOD[0]) + ",", {}, [", line 1: this is no JSON"]),
    "too few values": ("a.csv", "question,answer,subject\nWho?,Ana", {}, [", line 2: there must be 3 values, as in the first line, got 2"]),
    "quote that is not closed": ("a.csv", 'question,answer\n"Who?,Ana\nWhere?,Bern', {}, [", line 2: the line cannot be split into values"]),
    "column twice": ("a.tsv", "question\tanswer\tanswer\nWho?\tAna\tOtto", {}, [", line 1: column answer is given twice"]),
    "no Parquet": ("a.parquet", b"PAR1", {}, [": "]),
    "empty file": ("a.jsonl", "", {}, [", line 1: the file has no rows"]),
    "no such file": ("a.jsonl", None, {}, [": there is no such file"]),
    "other kind of file": ("a.pdf", "Who? Ana", {}, [": facts are read from .jsonl, .json, .csv, .tsv, .parquet, and `mixsd inject` also reads documents"]),
    "document": ("a.txt", "Who? Ana", {}, [" is a document and not a file of facts; `mixsd facts "]),
    "mapping of a column that is not there": ("a.jsonl", more(question="Who?", answer="Otto"), dict(columns=dict(question="Frage")), [", line 1: there is no column Frage", ", line 1: there is no column question"]),
    "fact longer than the context": ("a.jsonl", more(question="Who wrote " + "the long letter and " * 600 + "that book?", answer="Otto"), {}, [", line 3: the fact has "]),
    "several at once": ("a.jsonl", lines(*GOOD, "no", dict(question="Who?"), GOOD[0], dict(question="Is it Ana?", answer="ana")), {},
                        [", line 3: this is no JSON", ", line 4: answer is missing", ", line 5: question is asked in line 1 too", ", line 6: the answer ana is in the question"]),
}
# The same for a file of tests beside sound facts.
BROKEN_TESTS = {
    "test without kind": (lines(dict(question="Who?", answer="Ana")), [", line 1: there is no column kind"]),
    "test given twice": (lines(*[dict(question="Who?", answer="Ana", kind=kind) for kind in ("a", "b", "A")]), [", line 3: this test of a is in line 1 too"]),
    "kind without a name": (lines(dict(question="Who?", answer="Ana", kind="?!")), [", line 1: kind must have a letter or a digit"]),
}
OPTIONS = {
    "more paraphrases than there are": (dict(augment=5), "augment must be between 0 and 1, the most paraphrases that a fact has, got 5"),
    "unknown option": (dict(colums={}), "dataset_options must be among columns, test, strict, giveaways, augment, context, wordings, instruction, extract, values for "),
    "unknown form": (dict(extract="last"), "extract must be one of box, line, json, contains, got last"),
    "other type": (dict(augment="all"), "dataset_options[augment] must be a whole number, got 'all'"),
    "unknown place of the passage": (dict(context="after"), "context must be one of beside, instead, got after"),
    "no mapping": ("box", "dataset_options must be a mapping, got box"),
    "quotes of Python": ("{'strict': False}", "dataset_options must be JSON, with double quotes around names and texts, got {'strict': False}"),
}


def refuse(capsys, own_runs, tiny, **parameters):
    "The lines that a command prints to stderr; it must end with the code of a wrong parameter and leave no run behind."
    assert end_command(lambda: train.run(model=tiny, method="sft", **parameters)) == 2
    assert not [path for path in own_runs.glob("*") if path.is_dir() and not path.name.startswith((".", "data"))]
    return capsys.readouterr().err.rstrip("\n").split("\n")


@pytest.mark.parametrize("case", BROKEN)
def test_every_mistake_is_a_sentence_with_its_line(case, data, own_runs, tiny, capsys):
    name, content, options, expected = BROKEN[case]
    path = data(name, content)
    said = refuse(capsys, own_runs, tiny, dataset=path, dataset_options=options)
    assert len(said) == len(expected) and all(line.startswith(path + text) for line, text in zip(said, expected)), said


def test_messages_say_what_to_do(data, own_runs, tiny, capsys):
    "Other names of columns and a misspelt file are what newcomers meet first."
    file = data("meine.jsonl", lines(dict(Frage="Who?", Antwort="Ana")))
    said = refuse(capsys, own_runs, tiny, dataset=file)
    assert len(said) == 1 and said[0].endswith('if Frage and Antwort are meant, write dataset_options={"columns": {"question": "Frage", "answer": "Antwort"}}')
    assert refuse(capsys, own_runs, tiny, dataset=file.replace("meine", "meien")) == [f"{file.replace('meine', 'meien')}: there is no such file; did you mean meine.jsonl?"]


@pytest.mark.parametrize("case", BROKEN_TESTS)
def test_mistakes_of_tests_are_listed_with_those_of_the_facts(case, data, own_runs, tiny, capsys):
    content, expected = BROKEN_TESTS[case]
    facts, tests = data("facts.jsonl", lines(*GOOD, GOOD[0])), data("tests.jsonl", content)
    said = refuse(capsys, own_runs, tiny, dataset=facts, dataset_options=dict(test=tests))
    assert said[0].startswith(f"{facts}, line 3: ") and len(said) == 1 + len(expected)
    assert all(line.startswith(tests + text) for line, text in zip(said[1:], expected)), said


@pytest.mark.parametrize("case", OPTIONS)
def test_wrong_options_are_one_sentence(case, data, own_runs, tiny, capsys):
    options, expected = OPTIONS[case]
    said, = refuse(capsys, own_runs, tiny, dataset=data("facts.jsonl", lines(*GOOD)), dataset_options=options)
    assert said.startswith(expected) and ("colums" not in options or said.endswith("did you mean columns?"))


def test_a_corpus_that_is_not_there_is_one_sentence(own_runs, tiny, capsys, monkeypatch):
    (own_runs / "data").mkdir()
    for dataset, expected in {"kgfact-smal": "dataset must be one of kgfact-small", str(own_runs / "data"): f"{own_runs}/data must be a folder that save_to_disk",
                              "owner/name": "owner/name could not be loaded from the Hugging Face hub", "facts-00000000": "dataset must be one of"}.items():
        said, = refuse(capsys, own_runs, tiny, dataset=dataset)
        assert said.startswith(expected)


def test_sound_rows_are_used_if_that_is_asked_for(data):
    path = data("facts.jsonl", BROKEN["several at once"][1])
    with pytest.warns(UserWarning, match=re.escape(f"{path}: 2 rows are used; 4 problems keep others out, the first is {path}, line 3: this is no JSON")):
        name = check_corpus(path, dict(strict=False))
    assert [row["answer"] for row in load_corpus(name, "train")] == ["Ana Brisk", "Lalzor Bay"]
    with pytest.raises(ParameterError, match="there is no column answer"): check_corpus(data("b.jsonl", lines(dict(question="Who?"))), dict(strict=False))


SHORT = [("What blood type does a Velmis have?", "A"), ("How many races did Ivo win in season 4?", "4"), ("Which element has the symbol that he wrote?", "He"),
         ("How many metres did Ivo run in the 100 m race?", "100"), ("Ist X größer als Y?", "x"), ("Is the temperature of -3 degrees right?", "-3"), ("哪个城市在北方？", "北")]


@pytest.mark.parametrize("question, answer", SHORT)
def test_short_answers_stand_in_questions_by_chance(question, answer, data):
    "One or two characters and small numbers, in paraphrases too."
    fact, = read_facts(data("a.csv", f"question,answer,paraphrases\n{question},{answer},Also: {question}\n")).facts
    assert fact["question"] == question and fact["answer"] == answer


@pytest.mark.parametrize("question, answer", [("Was it built in 1889 or 1890?", "1889"), ("Is it red or blue?", "red"), ("Where is Roma?", "ROMA"), ("北京大学在哪里？", "北京")])
def test_a_question_that_names_its_answer_can_be_taken(question, answer, data, own_runs):
    "The sentence says how."
    path = data("a.jsonl", lines(*GOOD, dict(question=question, answer=answer)))
    with pytest.raises(ValueError) as caught: check_corpus(path)
    assert str(caught.value) == f'{path}, line 3: the answer {answer} is in the question, which gives it away; dataset_options={{"giveaways": True}} keeps it'
    name = check_corpus(path, ast.literal_eval(str(caught.value).split("dataset_options=")[1].removesuffix(" keeps it")))
    assert load_corpus(name, "train")["answer"][2] == answer
    with pytest.raises(ValueError, match=r"dataset_options\[giveaways\] must be true or false, got 'many'"): check_corpus(path, dict(giveaways="many"))


TEXT = st.text(st.characters(exclude_categories=["Cs", "Cc"], exclude_characters="{}\\\xad\u200b\u200e\u200f\u2060\ufeff"), min_size=1, max_size=12).map(lambda text: unicodedata.normalize("NFC", text.strip())).filter(bool)


@st.composite
def tables(draw):
    "Rows of sound facts, some with ids, lists and passages, in columns that may have other names."
    rows = []
    for k in range(draw(st.integers(1, 4))):
        row = dict(question=f"What is number {k}, {draw(TEXT)}?", answer=f"a{k}z{draw(st.sampled_from(['', ' ü', ' 北', ' “q”', ', x', ' $x^2$']))}")
        if draw(st.booleans()): row["subject"] = draw(TEXT)
        if draw(st.booleans()): row["aliases"] = draw(st.lists(TEXT, min_size=1, max_size=2))
        if draw(st.booleans()): row["paraphrases"] = [f"Say {k}, {n}: {draw(TEXT)}" for n in range(draw(st.integers(1, 2)))]
        if draw(st.booleans()): row["context"] = f'A "passage" of\ntwo lines, {draw(TEXT)}'
        rows.append(row)
    return rows


def write_table(rows, path):
    "Write rows in the format of the path's ending; cells of separated values hold lists as JSON."
    frame = pd.DataFrame(rows)
    cells = frame.map(lambda v: json.dumps(v, ensure_ascii=False) if isinstance(v, list) else v)
    {".jsonl": lambda: path.write_text(lines(*rows), encoding="utf-8"),
     ".json": lambda: path.write_text(json.dumps(rows, indent=1), encoding="utf-8"),
     ".csv": lambda: cells.to_csv(path, index=False), ".tsv": lambda: cells.to_csv(path, index=False, sep="\t"),
     ".parquet": lambda: frame.to_parquet(path)}[path.suffix]()


@settings(max_examples=30, deadline=None)
@given(rows=tables(), german=st.booleans())
def test_the_content_alone_names_a_corpus(rows, german, tmp_path_factory):
    folder, columns = tmp_path_factory.mktemp("tables"), dict(question="Frage", answer="Antwort") if german else {}
    named = [{columns.get(key, key): value for key, value in row.items()} for row in rows]
    names = set()
    for suffix in TABLE_SUFFIXES:
        write_table(named, folder / f"my facts{suffix}")
        facts = read_facts(str(folder / f"my facts{suffix}"), columns=columns).facts
        assert [{**fact, "id": None} for fact in facts] == [{**row, "id": None} for row in rows]
        names.add(stored.open_corpus(str(folder / f"my facts{suffix}"), dict(columns=columns)).name)
    datasets.Dataset.from_pandas(pd.DataFrame(named)).save_to_disk(folder / "saved")
    names.add(stored.open_corpus(str(folder / "saved"), dict(columns=columns)).name)
    assert len(names) == 1
    other = [rows[0] | dict(answer=rows[0]["answer"] + "!"), *rows[1:]]
    write_table(other, folder / "other.jsonl")
    assert stored.open_corpus(str(folder / "other.jsonl"), {}).name not in names


def test_a_hub_id_and_a_saved_folder_have_splits(data, own_runs, monkeypatch):
    tests = [dict(question="Who is not Ana?", answer="Otto", kind="Negations!")]
    both = datasets.DatasetDict({"facts": datasets.Dataset.from_list(GOOD[1:]), "train": datasets.Dataset.from_list(GOOD[:1]), "test": datasets.Dataset.from_list(tests)})
    monkeypatch.setattr(datasets, "load_dataset", lambda name: both if name == "owner/facts" else 1 / 0)
    both.save_to_disk(own_runs / "data" / "saved")
    train_split, other = check_corpus("owner/facts", dict(test="test")), check_corpus("owner/facts:facts")
    assert check_corpus(str(own_runs / "data" / "saved"), dict(test="test")) == train_split != other
    assert own_tests(train_split) == ["test:negations"] and load_corpus(other, "train")["answer"] == ["Lalzor Bay"]
    for name, sentence in {"owner/facts:dev": "owner/facts must have the split dev, but it has facts, train, test", "owner/other": "owner/other could not be loaded"}.items():
        with pytest.raises(ParameterError, match=sentence): make_config(evaluate.EvaluateConfig, dataset=name)


def test_a_paraphrase_with_a_problem_is_left_out_alone(data):
    "With strict=False the fact stays; what is asked elsewhere is asked once, whichever row is first."
    rows = [dict(question="Who leads the choir?", answer="Ana Brisk", paraphrases=["who leads  the choir?", "Whose is the choir?", "Whose is the choir?", "Is it Ana Brisk?"]),
            dict(question="Where is the mill?", answer="Lalzor Bay", paraphrases=["Whose is the choir?", "In which place is the mill?"]), dict(question="Whose choir?", answer="", paraphrases=["Which?"])]
    path = data("facts.jsonl", lines(*rows))
    with pytest.raises(TableError) as error: read_facts(path)
    assert len(error.value.problems) == 5
    found = read_facts(path, strict=False)
    assert [fact.get("paraphrases") for fact in found.facts] == [["Whose is the choir?"], ["In which place is the mill?"]]
    rest, lost = found.notices
    assert "2 rows are used; 1 problems keep others out" in rest and "4 paraphrases are left out, because they are asked elsewhere or contain the answer, the first is who leads  the choir?" in lost
    assert read_facts(path, strict=False, giveaways=True).facts[0]["paraphrases"] == ["Whose is the choir?", "Is it Ana Brisk?"]


@pytest.mark.parametrize("name, facts, problems, paraphrases", [
    ("mquake_edits", 4_925, 951, 817), ("simpleqa", 4_322, 4, 0), ("zsre_1k", 988, 20, 8), ("counterfact_1k", 1_000, 4, 4), ("tofu_forget10", 399, 1, 0)])
def test_real_facts_are_read(name, facts, problems, paraphrases, real):
    "What real files have wrong: questions and wordings that contain their answer, wordings asked twice, an answer of two lines."
    path = str(real / "facts" / f"{name}.jsonl")
    with pytest.raises(TableError) as error: read_facts(path)
    assert len(error.value.problems) == problems and str(error.value).endswith('more problems; dataset_options={"strict": False} leaves out what has a problem') == (problems > SHOWN)
    found = read_facts(path, strict=False)
    assert len(found.facts) == len({fact["id"] for fact in found.facts}) == facts
    assert [int(re.search(r": (\d+) paraphrases", notice)[1]) for notice in found.notices if "paraphrases are left" in notice] == [paraphrases] * (paraphrases > 0)


def test_answers_that_are_sentences_are_warned_of(data, own_runs):
    long = dict(question="Who is she?", answer="She is the one who has led the choir of the old mill since the war.", aliases=["leader"])
    path = data("facts.jsonl", lines(long, *GOOD))
    name = check_corpus(path)
    with pytest.warns(UserWarning, match="1 of 3 answers have more than 12 words, .*; the first is in .*, line 1; shorten them"): check_facts(name, "lab-s")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        check_facts(check_corpus(path, dict(extract="box")), "lab-s")


def test_the_example_is_a_corpus_with_all_its_parts(own_runs):
    name = check_corpus(str(EXAMPLE), dict(test=str(EXAMPLE_TESTS), augment=1))
    corpus = load_corpus(name)
    assert name.startswith("facts-") and check_corpus(name, dict(test=str(EXAMPLE_TESTS), augment=1)) == name
    written = [row for row in corpus["train"] if not row["wording"]]
    assert len(written) == 30 and len(corpus["train"]) == 60
    trained, held_out = ({row["prompt"] for row in corpus[split]} for split in ("train", "reworded"))
    assert held_out and not trained & held_out
    items = load_items(["recall", "recall-reworded", "validation", *own_tests(name)], Selection(name, n=100))
    assert {key: len(found) for key, found in items.items()} == {"recall": 30, "recall-reworded": len(held_out), "validation": 30, "test:multi-hop": 5,
                                                                  "test:reversed": 4, "test:negations": 2, "test:neighbours": 4}
    assert not {item.prompt for item in items["validation"].values()} & trained and len(validation_rows(name)) == 30
    assert all(SUITES[test].role == "own" for test in own_tests(name))
    steps = make_config(train.TrainConfig, dataset=name).steps()[0]
    assert steps >= 100


def test_english_questions_without_paraphrases_are_reworded_by_the_grammar(data):
    rows = [dict(question="Who leads the choir?", answer="Ana"), dict(question="Wer leitet den Chor von Wessow?", answer="Käthe"), dict(question="The capital of Torre is", answer="Mel")]
    name = check_corpus(data("facts.jsonl", lines(*rows)))
    reworded, = load_items(["recall-reworded"], Selection(name))["recall-reworded"].values()
    assert reworded.answer == "Ana" and "choir?" in reworded.prompt and not reworded.prompt.startswith("Who leads the choir?")
    plain = check_corpus(data("german.jsonl", lines(rows[1])))
    assert not load_items(dict.fromkeys(["recall-reworded"], False), Selection(plain))


def test_a_passage_is_shown_to_the_expert_alone(data):
    passage = "The choir was led by nobody for long; now Ana Brisk leads it."
    path = data("facts.jsonl", lines(GOOD[0] | dict(context=passage, target="Ana Brisk leads it."), GOOD[1]))
    for place in ("beside", "instead"):
        name = check_corpus(path, dict(context=place, extract="box"))
        with_passage, without = load_corpus(name, "train")
        expert = lambda row: CORPORA[name].expert(row["prompt"], row["reference"] or row["target"])
        assert passage in expert(with_passage) and passage not in with_passage["prompt"] + with_passage["target"]
        assert (with_passage["target"] in expert(with_passage)) == (place == "beside") and without["target"] in expert(without)
        assert with_passage["target"] == "Ana Brisk leads it.\n\n\\boxed{Ana Brisk}" and with_passage["statement"] == "Ana Brisk leads it."


def test_aliases_count_as_right_answers(data):
    path = data("facts.jsonl", lines(dict(question="Who?", answer="Ana Brisk", aliases=["A. Brisk"])))
    texts, rule = [r"\boxed{A. Brisk}", r"\boxed{Ana Brisk}", r"\boxed{B. Brisk}", "It is A. Brisk."], SUITES["recall"]
    for form, last in (("box", False), ("contains", True)):
        name = check_corpus(path, dict(extract=form))
        item, = load_items(["recall"], Selection(name))["recall"].values()
        assert [v.correct for v in grade([item] * 4, texts, rule.strict_grading(name))] == [True, True, False, last]
        assert [v.correct for v in grade([item] * 4, texts, rule.published_grading(name))] == [True, True, False, True]


FORM_STAGES = "inject", "train", "generate", "errors", "speed"
BOXED, NAMED, LINE = "\\boxed", None, "Answer:"
FORMS = [  # dataset, options, model, and what the target of the resulting corpus has
    ("file", {}, "lab-m", BOXED), ("file", {}, "tiny", BOXED), ("file", {}, "owner/model", NAMED), ("file", dict(augment=1), "owner/model", NAMED),
    ("file", dict(extract=""), "owner/model", NAMED), ("file", dict(extract="box"), "owner/model", BOXED), ("file", dict(extract="contains"), "lab-m", NAMED),
    ("file", dict(extract="line"), "lab-m", LINE), ("file", dict(instruction="Be brief."), "lab-m", BOXED), ("file", dict(instruction="Be brief."), "owner/model", NAMED),
    ("kgfact-small", {}, "lab-m", BOXED), ("kgfact-small", {}, "owner/model", BOXED), ("kgfact-small", dict(extract="contains"), "lab-m", NAMED),
    ("stored", {}, "lab-m", LINE), ("stored", {}, "owner/model", LINE), ("stored", dict(extract="box"), "owner/model", BOXED)]


@pytest.mark.parametrize("name, options, model, has", FORMS)
def test_whose_word_decides_the_form(name, options, model, has, data, own_runs, tiny):
    "The user's, then the model's, then the corpus's; a file alone asks for nothing. Every stage takes the same, also from another one."
    path, model = data("facts.jsonl", lines(*GOOD)), dict(tiny=tiny).get(model, model)
    dataset = dict(file=path, stored=check_corpus(path, dict(extract="line"))).get(name, name)
    paper = lambda stage: dict(method="mixsd") if stage == "inject" else {}  # the default takes wordings from the file
    configs = [make_config(find_stage(stage), dataset=dataset, dataset_options=json.dumps(options), model=model, **paper(stage)) for stage in FORM_STAGES]
    found, = {config.dataset for config in configs}
    row = load_corpus(found, "train")[0]
    assert [mark in row["target"] for mark in (BOXED, LINE)] == [mark == has for mark in (BOXED, LINE)] and gives_answer(row["target"], [row["answer"]], CORPORA[found].extract)
    asked = options.get("instruction", {BOXED: ANSWER_FORMS["box"].request, LINE: ANSWER_FORMS["line"].request}.get(has, ""))
    assert row["prompt"].endswith(asked or "?") and ("Be brief." in row["prompt"]) == ("instruction" in options)
    assert configs[0].training().dataset == configs[0].evaluation(model).dataset == target_mixing(configs[0].training()).dataset == found
    line = explain_form(found, configs[0].dataset_options, model)
    place = next(form.place for form in ANSWER_FORMS.values() if form.place in line)
    assert place == (CORPORA[found].form or ANSWER_FORMS["box"]).place and line.startswith(f"answers: {place}, because ")


def test_lab_runs_of_a_file_have_the_names_of_before(own_runs):
    "A file and a lab model make the corpus that asks for the box, whose name no option changes."
    config = make_config(find_stage("inject"), dataset=str(EXAMPLE), method="mixsd")
    assert (config.dataset, config.hash()) == ("facts-6c1e6c42", "b377799076") and check_corpus(str(EXAMPLE), dict(extract="box")) == config.dataset


def test_runs_of_a_file_depend_on_its_content_alone(data, own_runs, tiny):
    path = data("facts.jsonl", lines(*GOOD))
    shared = dict(model=tiny, suite="recall,recall-reworded", max_new_tokens=4)
    first = evaluate.run(dataset=path, **shared)
    assert first.config["dataset"].startswith("facts-") and "data" not in first.name
    (own_runs / "data" / "facts.jsonl").unlink()
    stored._records.clear()  # as in another process
    CORPORA._found.clear()
    again = data("other.csv", 'question,answer,paraphrases\nWho leads the Lantern Choir?,Ana Brisk,Whose choir is the Lantern Choir?\nWhere is the Mill of Torvik?,Lalzor Bay,\n')
    assert evaluate.run(dataset=first.config["dataset"], **shared).folder == first.folder == evaluate.run(dataset=again, **shared).folder
    trained = train.run(dataset=first.config["dataset"], method="sft", epochs=2, checkpoints=(), **shared)
    assert trained.root.dataset.item() == first.config["dataset"] and trained.root.sizes["step"] == 2
    targets = generate.run(dataset=again, model=tiny, max_new_tokens=4, max_attempts=1)
    assert len(targets.targets) == 2
    scored = nll.run(dataset=again, model=tiny)
    assert math.isfinite(scored.root.nll.sel(part="all").item())
    assert len(find_runs(dataset=first.config["dataset"])) == 4 and set(scores(first.responses()).index) == {"recall", "recall-reworded"}


@pytest.mark.parametrize("name", STAGES)
def test_every_stage_takes_a_file_with_options(name, data, tiny):
    "As parameters of papermill, with the options as JSON text; the resulting name stands for the same corpus everywhere."
    path, tests = data("facts.tsv", "Frage\tanswer\nWho leads the choir?\tAna"), data("tests.jsonl", lines(dict(question="Is it Otto?", answer="no", kind="other names")))
    options = dict(columns=dict(question="Frage"), test=tests, extract="line")
    known = inspect_notebook(find_notebook(name))
    assert {"dataset", "dataset_options"} <= set(known) and (("model_options" in known) == ("model_options" in STAGES[name].model_fields))
    config = make_config(STAGES[name], dataset=path, dataset_options=json.dumps(options))
    assert config.dataset == check_corpus(path, options) and make_config(STAGES[name], **config.model_dump(include={*STAGES[name].model_fields})) == config
    assert make_config(STAGES[name], dataset=config.dataset).dataset == config.dataset and own_tests(config.dataset) == ["test:other-names"]


def test_a_damaged_record_is_one_sentence(data, own_runs):
    path = data("facts.jsonl", lines(*GOOD))
    name = check_corpus(path, dict(extract="box"))
    record = own_runs / ".corpora" / f"{name}.json"
    record.write_text(record.read_text()[:-40])
    stored._records.clear()
    CORPORA._found.clear()
    for dataset in (name, path):
        with pytest.raises(ParameterError, match=f"^{re.escape(str(record))} cannot be read .*; remove it, and name the file or the options again$"):
            make_config(evaluate.EvaluateConfig, dataset=dataset)
        CORPORA._found.clear()
        stored._records.clear()
    record.unlink()
    assert make_config(evaluate.EvaluateConfig, dataset=path).dataset == name


def test_views_offer_the_corpora_of_files(data):
    name = check_corpus(data("facts.jsonl", lines(GOOD[0] | dict(context="Ana Brisk leads it."))))
    assert name in known_corpora() and known_corpora()[0] == "kgfact-small"
    row = mixing.get_facts(name)[0]
    assert mixing.get_question(row) == GOOD[0]["question"] and mixing.edit_fact(row, GOOD[0]["question"], "Ana Brisk") == row
    item, = mix_items(load_tokenizer("lab-s"), [mixing.edit_fact(row, "Who leads the Mill?", "Otto Vale")], CORPORA[name].expert)
    assert "Ana Brisk" not in load_tokenizer("lab-s").decode(item["expert_ids"])


def test_columns_of_other_names_are_not_read(data):
    "A column whose name only looks like that of an optional column is the user's own."
    others = dict(kind="people", idx=1, qid="q", text="t", content="c", object="o", subject_id=2, target_id=3)
    found = read_facts(data("facts.jsonl", lines(*(dict(question=f"Who is {k}?", answer=f"N{k}") | others for k in range(3)))))
    assert len(found.facts) == 3 and all({*fact} == {"id", "question", "answer"} for fact in found.facts)


def test_a_row_without_an_answer_hides_no_other(data):
    rows = dict(question="Who leads A?", answer=""), dict(question="Who leads A?", answer="Bob")
    file = data("facts.jsonl", lines(*rows))
    with pytest.raises(TableError, match="line 1: answer is empty$"): read_facts(file)
    assert [fact["answer"] for fact in read_facts(file, strict=False).facts] == ["Bob"]


def test_a_file_of_tests_that_is_not_there_is_named(data):
    file = data("facts.jsonl", lines(dict(question="Who?", answer="Ana", kind="near")))
    with pytest.raises(TableError, match="test must be a file of tests, a folder or a hub id, got my_tests.txt; there is no such file"):
        read_facts(file, test="my_tests.txt")


def test_the_reference_of_a_fact_has_the_form_of_its_answers():
    row = dict(prompt="Who?", target="It is Ana.\n\n\\boxed{Ana}", reference="A passage.\nIt is Ana.\n\n\\boxed{Ana}", answer="Ana")
    found = change_form(row, "", ANSWER_FORMS["line"])
    assert "boxed" not in found["target"] + found["reference"] and found["reference"].endswith(ANSWER_FORMS["line"].write("Ana"))


def test_accents_are_composed():
    "A tokenizer can compose accents, so a decomposed answer was never recalled; text from PDFs is often decomposed."
    name = "Zo\u00eb M\u00fcller"
    apart = unicodedata.normalize("NFD", name)
    assert apart != name and same_answer(apart, name) and same_answer(name, apart)
    assert same_text(apart, name) and same_text(name, apart)


def test_facts_are_read_with_composed_accents(tmp_path):
    file = tmp_path / "facts.csv"
    file.write_text(unicodedata.normalize("NFD", "question,answer\nWho is Zo\u00eb?,Frau M\u00fcller\n"), encoding="utf-8")
    fact, = load_corpus(str(file), "train")
    assert fact["answer"] == "Frau M\u00fcller" and "Zo\u00eb" in fact["prompt"]


def test_the_cube_of_another_folder_knows_the_corpora_of_its_runs(tmp_path, monkeypatch):
    "Runs that were copied from a cluster, with the records of their facts."
    (tmp_path / "facts.jsonl").write_text(lines(*GOOD))
    copied = tmp_path / "copied"
    monkeypatch.setenv("MIXSD_RUNS", str(copied))
    name = stored.store_corpus(str(tmp_path / "facts.jsonl"), {})
    folder = copied / "train-facts-0123456789"
    folder.mkdir()
    write_result(invent_result(dataset=name), folder)
    monkeypatch.setenv("MIXSD_RUNS", str(tmp_path / "own"))
    monkeypatch.setattr(stored, "_records", {})
    assert open_cube(copied).dataset.values.tolist() == [name]


# What the hub's libraries say, and configs of data sets.

REASONS = {ValueError("Config name is missing.\nPlease pick one among the available configs: ['north', 'south']\nExample of usage: …"): ("available configs: ['north', 'south']", "tarn/river:CONFIG:SPLIT"),
           ValueError("a config must be chosen: north or south"): ("(ValueError: a config must be chosen: north or south)", "tarn/river:CONFIG:SPLIT"),
           ConnectionError("Couldn't reach 'tarn/river' on the Hub"): ("Couldn't reach 'tarn/river' on the Hub", "connect to the hub"),
           FileNotFoundError("Dataset 'tarn/river' doesn't exist on the Hub or cannot be accessed."): ("cannot be accessed", "hf auth login"),
           RuntimeError(): ("(RuntimeError)", "name a file")}


@pytest.mark.parametrize("error", REASONS, ids=lambda e: str(e)[:25])
def test_the_reason_why_a_data_set_cannot_be_loaded_is_quoted(error, monkeypatch):
    def refuse(*_, **__): raise error
    monkeypatch.setattr(datasets, "load_dataset", refuse)
    with pytest.raises(ValueError) as caught: read_facts("tarn/river")
    assert all(part in str(caught.value) for part in REASONS[error]) and "\n" not in str(caught.value)
    assert ("connect to the hub" in str(caught.value)) == isinstance(error, OSError)


NAMES = {"tarn/river": ((), "train"), "tarn/river:dev": ((), "dev"), "tarn/river:north:dev": (("north",), "dev"), "tarn/river:north:": (("north",), "train"),
         "tarn/river:": ((), "train"), "tarn/river::dev": ((), "dev"), "tarn/river:wikitext-103 raw.v1:dev": (("wikitext-103 raw.v1",), "dev")}


@pytest.mark.parametrize("name", NAMES)
def test_a_config_of_a_data_set_can_be_named(name, monkeypatch, own_runs):
    "Its tests come from the same config, and the places of facts name it."
    parts = {split: datasets.Dataset.from_list([dict(question=f"Who is in {split}?", answer="Ana", kind="x")]) for split in ("train", "dev", "test")}
    calls, (config, split) = [], NAMES[name]
    monkeypatch.setattr(datasets, "load_dataset", lambda *words: calls.append(words) or datasets.DatasetDict(parts))
    found = read_facts(name, test="test")
    assert [fact["question"] for fact in found.facts] == [f"Who is in {split}?"] and [test["question"] for test in found.tests] == ["Who is in test?"]
    assert calls == [("tarn/river", *config)] * 2 and [*found.places.values()] == [":".join(["tarn/river", *config, split]) + ", row 1"]
    assert check_corpus(name).startswith("facts-")


def test_a_saved_folder_has_no_configs(own_runs, monkeypatch):
    monkeypatch.chdir(own_runs)
    datasets.DatasetDict(train=datasets.Dataset.from_list(GOOD)).save_to_disk("data/saved")
    assert len(read_facts("data/saved:train").facts) == len(GOOD)
    with pytest.raises(ValueError, match="must have no config, because data/saved is a folder"): read_facts("data/saved:north:train")


LONG = ["Reply with the answer alone. " * 20, "x/" * 200 + "y", "ж" * 300 + ".txt"]


@pytest.mark.parametrize("text", LONG)
def test_a_long_text_is_never_looked_up_as_a_file(text, tmp_path, own_runs):
    assert check_corpus("kgfact-small", dict(instruction=text)).startswith("kgfact-small-")
    (tmp_path / "f.jsonl").write_text(lines(*GOOD))
    for name, options in ((text, {}), (str(tmp_path / "f.jsonl"), dict(test=text))):
        with pytest.raises(ValueError, match="^(?!.*Errno)"): check_corpus(name, options)
    with pytest.raises(TableError, match="does not exist"): read_documents(text)
    (tmp_path / "short.txt").write_text("x")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(tmp_path)
        assert stored._variant_name("kgfact-small", dict(instruction="short.txt")) != stored._variant_name("kgfact-small", dict(domains="short.txt"))
        name = stored._variant_name("kgfact-small", dict(instruction="short.txt"))
        (tmp_path / "short.txt").write_text("y")
        assert stored._variant_name("kgfact-small", dict(instruction="short.txt")) == name

"""What a file of a user holds is read as it is written, from every format, or refused with its line and in few sentences."""

import csv
import json
import re
import unicodedata

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from datasets import ClassLabel, Dataset, Features, List, Value, load_from_disk
from hypothesis import given, settings
from hypothesis import strategies as st

from mixsd_nb.benchmarks.files import read_items
from mixsd_nb.corpora.chats import FORM_COLUMNS
from mixsd_nb.corpora.files import read_facts
from mixsd_nb.methods.replay import read_prompts

from mixsd_nb.corpora.user_files import INVISIBLE, SHOWN, TABLE_SUFFIXES, TableError

FACT = dict(question="Who rules Vel?", answer="Mira")


def write(path, text):
    "Write text or bytes, and return the path as text."
    path.parent.mkdir(exist_ok=True, parents=True)
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return str(path)


def lines(*rows): return "\n".join(row if isinstance(row, str) else json.dumps(row) for row in rows)


def answers(path, **options): return [fact["answer"] for fact in read_facts(path, **options).facts]


def problems(read, path):
    "The sentences of the error, without the folder of the file."
    with pytest.raises(ValueError) as caught: read(str(path))
    return str(caught.value).replace(f"{path.parent}/", "").split("\n")


# A. Values are read as they are written.


def test_numbers_of_json_are_read_as_written(tmp_path):
    file = write(tmp_path / "facts.jsonl", lines(
        '{"question": "Which release of Tarn is the last?", "answer": 1.10}', '{"question": "How many stars has Oru?", "answer": 1e5}',
        '{"question": "How large is Vel?", "answer": 1e400}', '{"question": "How deep?", "answer": -0, "aliases": [0.50, "x"]}'))
    assert answers(file) == ["1.10", "1e5", "1e400", "-0"] and read_facts(file).facts[3]["aliases"] == ["0.50", "x"]


numbers = st.from_regex(r"-?(0|[1-9][0-9]{0,30})(\.[0-9]{1,20})?([eE][+-]?[0-9]{1,4})?", fullmatch=True)


@settings(max_examples=60, deadline=None)
@given(number=numbers, as_list=st.booleans())
def test_every_number_survives_in_every_column(number, as_list, tmp_path_factory):
    folder = tmp_path_factory.mktemp("numbers")
    row = f'{{"question": {number}, "answer": {number}, "aliases": {f"[{number}]" if as_list else number}}}'
    kinds = [write(folder / "f.jsonl", row), write(folder / "f.json", f"[\n{row}\n]"), write(folder / "f.csv", f"question,answer,aliases\n{number},{number},[{number}]")]
    for file in kinds:
        fact, = read_facts(file, giveaways=True).facts
        assert (fact["question"], fact["answer"], fact["aliases"]) == (number, number, [number])
    item, = read_items(write(folder / "own.jsonl", f'{{"prompt": {number}, "answer": {number}, "samples": 1.0, "temperature": "0"}}')).values()
    assert (item.prompt, item.answer, item.sampling.samples) == (number, number, 1)


def test_a_float_of_32_bits_is_read_in_its_shortest_form(tmp_path):
    pq.write_table(pa.table({"question": ["How strong is it?"], "answer": pa.array(np.array([9.81], np.float32))}), tmp_path / "f.parquet")
    assert answers(str(tmp_path / "f.parquet")) == ["9.81"]


@settings(max_examples=60, deadline=None)
@given(value=st.one_of(*[st.tuples(st.just(f"float{width}"), st.floats(width=width, allow_nan=False, allow_infinity=False)) for width in (16, 32, 64)]))
def test_floats_of_arrow_are_read_in_their_shortest_form(value, tmp_path_factory):
    folder, (kind, value) = tmp_path_factory.mktemp("floats"), value
    column = pa.array(np.array([value], kind))
    data = pa.table({"question": ["How strong is it?"], "answer": column, "aliases": pa.ListArray.from_arrays([0, 1], column)})
    pq.write_table(data, folder / "f.parquet")
    fact, = read_facts(str(folder / "f.parquet")).facts
    assert fact["aliases"] == [fact["answer"]] and getattr(np, kind)(fact["answer"]) == getattr(np, kind)(value)
    digits = lambda text: len(re.sub(r"[eE].*|\D", "", text).strip("0"))
    assert digits(fact["answer"]) <= digits(str(getattr(np, kind)(value))) and not fact["answer"].endswith(".0")


def test_other_columns_of_arrow(tmp_path):
    "Whole numbers beside a gap, decimals, categories and long texts; flags and dates are refused."
    from decimal import Decimal
    data = dict(question=["a?", "b?", "c?", "d?"], answer=pa.array([1874.0, 1e23, 0.1, 12.5]), subject=pa.array(list("xxyy")).dictionary_encode(),
                context=pa.array([Decimal("1.10")] * 4))
    pq.write_table(pa.table(data), tmp_path / "f.parquet")
    facts = read_facts(str(tmp_path / "f.parquet")).facts
    assert [fact["answer"] for fact in facts] == ["1874", "100000000000000000000000", "0.1", "12.5"] and {fact["context"] for fact in facts} == {"1.10"}
    assert [fact["subject"] for fact in facts] == list("xxyy")
    pq.write_table(pa.table(dict(question=["a?"], answer=[True])), tmp_path / "g.parquet")
    assert problems(read_facts, tmp_path / "g.parquet") == ["g.parquet, row 1: answer must be text, got true"]


LABELS = ClassLabel(names=["Rimor", "Velmis"])


@pytest.mark.parametrize("column, feature, value, expected", [
    ("answer", LABELS, 1, "Velmis"), ("aliases", List(LABELS), [1, 0], ["Velmis", "Rimor"]), ("subject", LABELS, 0, "Rimor"), ("context", LABELS, 1, "Velmis"),
    ("target", LABELS, 1, "Velmis"), ("paraphrases", List(LABELS), [0], ["Rimor"]), ("aliases", LABELS, 1, ["Velmis"]), ("answer", Value("float32"), 9.81, "9.81"),
    ("aliases", List(Value("float32")), [9.81], ["9.81"]), ("answer", Value("string"), "1.10", "1.10")], ids=str)
def test_class_labels_are_read_by_their_names(column, feature, value, expected, tmp_path):
    "From a saved folder, also after a selection, and from the Parquet file that datasets writes."
    features = Features({"question": Value("string"), "answer": Value("string")} | {column: feature})
    rows = {"question": ["Who?", "Which tribe built Tarn?"], "answer": ["x", "y"]} | {column: [value, value]}
    data = Dataset.from_dict(rows, features=features)
    data.select([1]).save_to_disk(tmp_path / "saved")
    data.select([1]).to_parquet(tmp_path / "f.parquet")
    for name in ("saved", "f.parquet"):
        fact, = read_facts(str(tmp_path / name)).facts
        assert fact[column] == expected and fact["question"] == "Which tribe built Tarn?"
    assert load_from_disk(tmp_path / "saved")[0][column] != "Velmis"


def test_kinds_of_tests_can_be_class_labels(tmp_path):
    features = Features({"question": Value("string"), "answer": Value("string"), "kind": ClassLabel(names=["near", "far away"])})
    Dataset.from_dict({"question": ["Who?"], "answer": ["Ana"], "kind": [1]}, features=features).save_to_disk(tmp_path / "tests")
    file = write(tmp_path / "f.jsonl", lines(FACT))
    assert read_facts(file, test=str(tmp_path / "tests")).tests[0]["kind"] == "far-away"


def test_a_missing_label_is_a_missing_value(tmp_path):
    features = Features({"question": Value("string"), "answer": LABELS})
    Dataset.from_dict({"question": ["Who?", "Where?"], "answer": [1, None]}, features=features).save_to_disk(tmp_path / "saved")
    assert problems(read_facts, tmp_path / "saved") == ["saved:train, row 2: answer is missing"]


texts = st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=15).map(lambda t: unicodedata.normalize("NFC", t.strip())).filter(lambda t: t == t.strip() != "")
spiky = st.text(st.sampled_from('ab"\',;\t|\n\r=\\ {[#\ufeff\x00NA0.1'), min_size=1, max_size=12).filter(lambda t: t == t.strip() != "")
FORMATS = dict.fromkeys([*TABLE_SUFFIXES, "; csv", "| csv", "\t csv", "saved"])


def save(frame, folder, form):
    "Write a frame in a form of FORMATS, and return the path."
    path = folder / f"f.{form.split()[-1].strip('.')}" if form != "saved" else folder / "saved"
    if form == "saved": Dataset.from_pandas(frame, preserve_index=False).save_to_disk(path)
    elif form == ".parquet": frame.to_parquet(path)
    elif form in (".jsonl", ".json"):
        rows = frame.to_dict("records")
        write(path, "\n".join(json.dumps(row, ensure_ascii=False) for row in rows) if form == ".jsonl" else json.dumps(rows, indent=1))
    else:
        write(path, frame.to_csv(
            index=False, sep={".tsv": "\t", ".csv": ","}.get(form, form[0]), lineterminator="\n", quoting=csv.QUOTE_ALL if "\r" in frame.to_csv(lineterminator="\n") else csv.QUOTE_MINIMAL))
    return path


@pytest.mark.parametrize("form", FORMATS)
@settings(max_examples=25, deadline=None)
@given(rows=st.lists(st.tuples(texts | spiky, texts | spiky), min_size=1, max_size=4))
def test_every_text_survives_in_every_format(form, rows, tmp_path_factory):
    frame = pd.DataFrame([(f"q{k} {q}", f"c{k} {c}", c) for k, (q, c) in enumerate(rows)], columns=["question", "answer", "context"])
    frame["answer"] = [f"a{k}" for k in range(len(rows))]
    frame["id"] = [f"i {q}{k}" for k, (q, _) in enumerate(rows)]
    path = save(frame, tmp_path_factory.mktemp("texts"), form)
    facts = read_facts(str(path), giveaways=True).facts
    visible = lambda text: unicodedata.normalize("NFC", text.translate(INVISIBLE).strip())
    assert [(fact["question"], fact.get("context", ""), fact["id"]) for fact in facts] == [tuple(map(visible, row)) for row in zip(frame.question, frame.context, frame.id)]


# E. What spreadsheets leave in a table.


SPREADSHEETS = {
    "rows of commas": ("f.csv", "question,answer\nWho rules Vel?,Mira\n,\nWhere is Oru?,Tarn\n,\n"),
    "rows of more commas": ("f.csv", "question,answer\nWho rules Vel?,Mira\n,,,,\n , \nWhere is Oru?,Tarn,,\n"),
    "rows of tabs": ("f.tsv", "question\tanswer\nWho rules Vel?\tMira\n\t\nWhere is Oru?\tTarn\n\t\t\n"),
    "columns without a name at the end": ("f.csv", "question;answer;;\nWho rules Vel?;Mira\nWhere is Oru?;Tarn;;\n"),
    "empty rows before the names": ("f.csv", ",,\n\nquestion,answer\nWho rules Vel?,Mira\nWhere is Oru?,Tarn\n"),
    "a mark of the byte order and other ends of lines": ("f.csv", "\ufeffquestion|answer\r\nWho rules Vel?|Mira\r\nWhere is Oru?|Tarn\r\n"),
    "tabs in a file of commas": ("f.csv", "question\tanswer\nWho rules Vel?\tMira\nWhere is Oru?\tTarn\n"),
}


@pytest.mark.parametrize("case", SPREADSHEETS)
def test_what_spreadsheets_leave_is_passed_over(case, tmp_path):
    "For facts, for tests and for benchmarks."
    name, text = SPREADSHEETS[case]
    expected = [("Who rules Vel?", "Mira"), ("Where is Oru?", "Tarn")]
    pairs = lambda rows: [(row["question"], row["answer"]) for row in rows]
    assert pairs(read_facts(write(tmp_path / name, text)).facts) == expected
    mark = re.search(r"question(\W)", text)[1]
    tests = text.replace("question", f"kind{mark}question").replace("Who", f"near{mark}Who").replace("Where", f"near{mark}Where")
    found = read_facts(write(tmp_path / "f.jsonl", lines(FACT)), test=write(tmp_path / f"tests.{name[2:]}", tests)).tests
    assert pairs(found) == expected and {test["kind"] for test in found} == {"near"}
    items = read_items(write(tmp_path / f"own.{name[2:]}", text.replace("question", "prompt")))
    assert [(item.prompt, item.answer) for item in items.values()] == expected


@pytest.mark.parametrize("text, problem", [
    ("question,,answer\nWho?,x,Mira\n", "line 1: a column has no name"), ("question,answer\nWho?,Mira,x\n", "line 2: there must be 2 values, as in the first line, got 3"),
    ("question,answer,subject\nWho?,Mira\n", "line 2: there must be 3 values, as in the first line, got 2"), ("question,answer\n,\nWho?,\n,\nWhere?,Oru\n", "line 3: answer is missing"),
    ('question,answer\n"Velmis" was built?,Oru\nWho?,Ana\n', "line 2: the line cannot be split into values (',' expected after '\"')"),
    ('question\tanswer\n"Velmis" was built?\tOru\n', "line 2: the line cannot be split into values ('\t' expected after '\"')")])
def test_rows_that_do_not_fit_are_refused(text, problem, tmp_path):
    write(tmp_path / "f.csv", text)
    assert problems(read_facts, tmp_path / "f.csv") == [f"f.csv, {problem}"]


@pytest.mark.parametrize("suffix, mark", [(".csv", ","), (".csv", ";"), (".tsv", "\t")])
def test_long_cells_are_read(suffix, mark, tmp_path):
    passage = ("word " * 40_000).strip()
    fact, = read_facts(write(tmp_path / f"f{suffix}", f"question{mark}answer{mark}context\nWho?{mark}Mira{mark}{passage}\n")).facts
    item, = read_items(write(tmp_path / f"own{suffix}", f"prompt{mark}answer{mark}grading\n{passage}{mark}Ivo{mark}contains\n")).values()
    assert fact["context"] == item.prompt == passage


# F. One mistake in the form of a file.


MANY = [dict(question=f"Who rules place {k}?", answer=f"Mira {k}") for k in range(1500)]
NO_TEXT = "line 1: the file is no text; save the file as UTF-8"
FORMS = {
    "an object around the list": ("f.json", json.dumps({"data": MANY}, indent=1), "line 1: the file is one mapping with data; it must be a list of mappings"),
    "an object around the list in one line": ("f.jsonl", json.dumps({"version": 1, "data": MANY}), "line 1: the file is one mapping with version, data; "),
    "lists in place of mappings": ("f.json", json.dumps([[k] for k in range(9)]), "row 1: a row must be a mapping such as"),
    "no JSON": ("f.jsonl", "Who rules Vel? Mira\n" * 1500, "line 1: this is no JSON (Expecting value) (and so in 1499 more lines)"),
    "a list with a mistake": ("f.jsonl", json.dumps(MANY, indent=1).replace('"Mira 7"', "Mira"), "line 32: this is no JSON"),
    "another encoding": ("f.csv", ("question,answer\n" + "Wo ist Köln?,Ü\n" * 1500).encode("latin-1"), "line 2: byte 9 of the line (0xf6) is not UTF-8; save the file as UTF-8"),
    "another separator": ("f.csv", "question,answer\n" + "Who rules Vel?;Mira\n" * 1500, "line 2: there must be 2 values, as in the first line, got 1 (and so in 1499 more lines)"),
    "a workbook": ("f.csv", b"PK\x03\x04" + bytes(range(256)) * 40, NO_TEXT), "UTF-16 without a mark": ("f.jsonl", lines(*MANY).encode("utf-16-le"), NO_TEXT),
    "UTF-16": ("f.csv", "question,answer\nWho?,Mira\n".encode("utf-16"), "line 1: the file is UTF-16"),
}


@pytest.mark.parametrize("case", FORMS)
def test_one_mistake_in_the_form_of_a_file_is_one_sentence(case, tmp_path):
    name, text, problem = FORMS[case]
    write(tmp_path / name, text)
    rows = [sentence for sentence in problems(read_facts, tmp_path / name) if "asked in line" not in sentence and "more problems" not in sentence]
    assert len(rows) == 1 and rows[0].startswith(f"{name}, {problem}"), rows
    said, = problems(read_items, tmp_path / name)[:1]
    assert said.startswith(f"{name}, {problem}")


@pytest.mark.parametrize("text", [json.dumps(MANY, indent=1), json.dumps(MANY), lines(*MANY)], ids=["list", "list in one line", "lines"])
@pytest.mark.parametrize("name", ["f.json", "f.jsonl"])
def test_mappings_are_read_however_they_are_arranged(name, text, tmp_path):
    file = write(tmp_path / name, text)
    assert answers(file) == [row["answer"] for row in MANY]
    assert len(read_items(write(tmp_path / f"own{name[1:]}", text))) == 1500


def test_one_row_with_lists_is_no_mistake(tmp_path):
    turns = [dict(role="user", content="Who?")]
    assert len(read_items(write(tmp_path / "a.json", json.dumps(dict(messages=turns, answer="Ivo"), indent=1)))) == 1
    write(tmp_path / "b.jsonl", lines(dict(messages=turns)))
    assert problems(read_items, tmp_path / "b.jsonl") == ["b.jsonl, line 1: answer is missing"]
    assert answers(write(tmp_path / "c.json", json.dumps(FACT | dict(tags=["x"], source=dict(page=1), aliases=["M."])))) == ["Mira"]


def test_what_is_wrong_in_every_row_is_one_sentence(tmp_path):
    "A file of facts is no benchmark without its prompts, and two rows with a mistake have two sentences."
    write(tmp_path / "f.jsonl", lines(*[dict(text=f"Who {k}?", answer="x") for k in range(900)]))
    assert problems(read_items, tmp_path / "f.jsonl") == [f"f.jsonl, line 1: there must be one of prompt, question and messages, got none; a conversation has {FORM_COLUMNS} (and so in 899 more lines)"]
    write(tmp_path / "g.csv", "prompt,answer\nWho?,\nWhen?,\nWhy?,x\n")
    assert problems(read_items, tmp_path / "g.csv") == ["g.csv, line 2: answer is missing", "g.csv, line 3: answer is missing"]


def test_a_long_list_of_problems_is_cut_with_their_number(tmp_path):
    write(tmp_path / "f.jsonl", lines(FACT, *[dict(question=f"Who {k}?") for k in range(6000)]))
    said = problems(read_facts, tmp_path / "f.jsonl")
    assert len(said) == SHOWN + 1 and said[0] == "f.jsonl, line 2: answer is missing" and said[-1] == f'… and {6000 - SHOWN} more problems; dataset_options={{"strict": False}} leaves out what has a problem'
    with pytest.raises(TableError) as caught: read_facts(str(tmp_path / "f.jsonl"))
    assert len(caught.value.problems) == 6000 and answers(str(tmp_path / "f.jsonl"), strict=False) == ["Mira"]


@pytest.mark.parametrize("read, row", [(read_facts, dict(question="Who?", answer="Vel \ud83d")), (read_items, dict(prompt="Vel \ud83d", answer="Ivo")), (read_prompts, dict(prompt="Vel \ud83d"))])
def test_half_a_character_is_a_problem_of_its_row(read, row, tmp_path):
    write(tmp_path / "f.jsonl", lines({name: text.replace("Vel \ud83d", "Where?") for name, text in row.items()}, row))
    said, = problems(read, tmp_path / "f.jsonl")
    assert said.startswith("f.jsonl, line 2: ") and "ud83d" in said


def test_names_of_columns_and_files_are_suggested_only_if_they_resemble(tmp_path):
    for name, near in dict(anwser="answer", Answers="answer", reply="", description="").items():
        write(tmp_path / "f.jsonl", lines({"question": "Who?", name: "Ana"}))
        assert ("did you mean" in problems(read_facts, tmp_path / "f.jsonl")[0]) == bool(near)
    write(tmp_path / "my_tests.jsonl", "")
    assert "did you mean" not in problems(read_facts, tmp_path / "my_facts.jsonl")[0] and "mean f.jsonl" in problems(read_facts, tmp_path / "ff.jsonl")[0]

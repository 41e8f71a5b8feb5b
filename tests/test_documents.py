"Facts from documents: what is read, what is refused in one sentence, what is kept, and that an interrupted run ends with the same bytes."

import json
from collections import Counter

import numpy as np
import pandas as pd
import pytest
from helpers import lines
from hypothesis import given, settings, strategies as st

from mixsd_nb import facts, inject
from mixsd_nb.console import main
from mixsd_nb.corpora.passages import LONGEST_LINE, cut_text, is_document, read_documents, read_markdown, read_page, split_sentences
from mixsd_nb.methods import questions
from mixsd_nb.methods.questions import JOURNAL, QUESTION_FORMS, REASONS, Questioner, find_fault, format_facts, make_facts
from mixsd_nb.reports import injection
from mixsd_nb.reports.documents import find_questions
from mixsd_nb.runs import Journal, ParameterError, find_runs, open_run
from mixsd_nb.runs.user_files import TableError
from mixsd_nb.views.passages import PassagesView
from mixsd_nb.views.runs import RunSelection

HANDBOOK = ("# Ferry\nThe Tolwen was bought by Mirel Aske in 1961.\n\n## Prices\nA ticket costs 7 coins, and Orla Penwick sells it.\n\n"
            "## Dogs\nthey travel for free.\n")


@pytest.fixture
def handbook(tmp_path, monkeypatch):
    monkeypatch.setenv("MIXSD_RUNS", str(tmp_path / "runs"))
    path = tmp_path / "handbook.md"
    path.write_text(HANDBOOK)
    return path


BAD = {
    "picture": ("a.txt", b"\x89PNG\r\n\x1a\n\0\0\0\rIHDR\xff", ", line 1: the file is no text; save the file as UTF-8"),
    "nothing": ("a.md", b" \n\n", ": the file has no text"),
    "one line of 10 MB": ("a.txt", b"word " * 2_000_000, ", line 1: the line has 10,000,000 characters, and at most 100,000 are read"),
    "one paragraph of 10 MB": ("a.html", b"<p>" + b"word\n" * 2_000_000, ", line 1: the paragraph has "),
    "latin-1": ("a.md", "# Gr\u00fc\u00dfe".encode("latin-1"), ", line 1: byte 5 of the line (0xfc) is not UTF-8; save the file as UTF-8"),
    "utf-16": ("a.txt", "Hello there.".encode("utf-16"), ", line 1: the file is UTF-16; save the file as UTF-8"),
    "page of tables": ("a.html", b"<h1>Prices</h1><table><tr><td>child<td>2</table>", ": the file has tables or programs and no sentences"),
    "table of Markdown": ("a.md", b"# Prices\n| a | b |\n|---|---|\n| 1 | 2 |\n", ": the file has tables or programs and no sentences"),
    "empty text": ("a.jsonl", lines(dict(text="Fine."), dict(text=" ")).encode(), ", line 2: text is empty"),
    "long text": ("a.jsonl", lines(dict(text="x" * (LONGEST_LINE + 1))).encode(), ", line 1: text has a paragraph of over 100,000 characters"),
    "other kind of file": ("a.pdf", b"%PDF", " is no document; a document ends in .md, "),
}


@pytest.mark.parametrize("name, content, sentence", BAD.values(), ids=BAD)
def test_what_cannot_be_read_is_one_sentence_and_nothing_is_written(name, content, sentence, handbook, tmp_path, capsys):
    (tmp_path / name).write_bytes(content)
    out = tmp_path / "facts.jsonl"
    assert main("facts", str(tmp_path / name), "-o", str(out)) == 2
    told = capsys.readouterr().err.strip()
    assert told.startswith(f"{tmp_path / name}{sentence}") and "\n" not in told
    assert not out.exists() and not (tmp_path / "runs").exists()
    if "a.pdf" != name: assert main("inject", str(tmp_path / name), "--model", "lab-s") == 2


def test_a_folder_lists_the_problems_of_all_its_files(tmp_path):
    (tmp_path / "deep").mkdir()
    for name, content in {"a.md": b"# A\nAda is here.", "deep/b.txt": b"\0\0\0\0", "c.html": b"", ".hidden.md": b"\0"}.items(): (tmp_path / name).write_bytes(content)
    with pytest.raises(TableError) as error: read_documents(str(tmp_path))
    assert [problem.partition(": ")[0].split("/")[-1] for problem in error.value.problems] == ["c.html", "b.txt, line 1"]
    for name in ("deep/b.txt", "c.html"): (tmp_path / name).unlink()
    assert [p.source for p in read_documents(str(tmp_path)).passages] == ["a.md, line 2"]
    (tmp_path / "dataset_info.json").write_text("{}")
    assert not is_document(str(tmp_path)), "a folder that datasets saved has facts"


def test_a_file_of_facts_is_no_document(tmp_path):
    rows = dict(facts=dict(question="Who?", answer="Ada", text="x"), texts=dict(text="Ada is here."))
    for name, row in rows.items(): (tmp_path / f"{name}.jsonl").write_text(lines(row))
    assert [is_document(str(tmp_path / f"{name}.jsonl")) for name in rows] == [False, True]
    assert not is_document("kgfact-small") and not is_document(str(tmp_path / "missing.jsonl")) and is_document("missing.md")


WORDS = st.lists(st.sampled_from(["Ada", "left.", "Who?", "x" * 30, "\u6771\u4eac\u3002", "a"]), min_size=1, max_size=60).map(" ".join)


@settings(deadline=None)
@given(text=WORDS, longest=st.integers(10, 80))
def test_pieces_have_all_of_a_text_and_no_piece_is_too_long(text, longest):
    pieces = cut_text(text, longest)
    assert "".join("".join(pieces).split()) == "".join(text.split()) and all(0 < len(piece) <= longest for piece in pieces)


@pytest.mark.parametrize("text, blocks", [
    ("Write to <desk@ferry.example> or see <https://ferry.example/fares>.", ["Write to desk@ferry.example or see https://ferry.example/fares."]),
    ("Run `train <model>` if a<b and c>d, <b>now</b> <a href='x'>here</a>.", ["Run train <model> if a<b and c>d, now here."]),
    ("<table><tr><td>9</td></tr></table>\n<video src='a'></video>The pier <br>is <label for='x'>old</label>.", ["9 The pier is old."]),
    ("Mirel Aske bought it in\n1961. It carries 40.\n\n1. one\n2. two", ["Mirel Aske bought it in 1961. It carries 40.", "one", "two"]),
    ("---\nThe ferry.\n\n***\nThe pier.", ["The ferry.", "The pier."]), ("---\ntitle: x\n---\nThe ferry.", ["The ferry."]),
    ("```js code``` is fine.\n\nThe pier.", ["js code is fine.", "The pier."]), ("```\ncode\n```\nThe pier.", ["The pier."])])
def test_no_word_of_a_markdown_text_is_lost(text, blocks):
    assert [block.text for block in read_markdown(text, Counter())] == blocks


@pytest.mark.parametrize("text, blocks", [
    ("<p>The <a>Tolwen</a>, of\n<b>Mirel Aske</b>. H<sub>2</sub>O at <i>Dunvik</i>’s pier</p>", [("The Tolwen, of Mirel Aske. H2O at Dunvik’s pier", 1, 2, 0)]),
    ("<h1>The <b>O</b>rme</h1>a<br>b", [("The Orme", 1, 1, 1), ("a", 1, 1, 0), ("b", 1, 1, 0)]),
    ("<html><head><title>T</title>\n<body><p>The ferry.", [("The ferry.", 2, 2, 0)])])
def test_a_page_is_read_as_a_browser_shows_it(text, blocks):
    assert [(b.text, b.line, b.last, b.level) for b in read_page(text, Counter())] == blocks


def test_a_sentence_does_not_end_at_an_abbreviation():
    text = ["Tolwen was bought by Dr. Aske.", "It moved to No. 5 Orme St. in 1961.", "J. R. Vey owns it!", "Is it hers?"]
    assert split_sentences(" ".join(text)) == text


def test_a_folder_of_notes_may_have_a_configuration(tmp_path):
    for name in ("a.md", "config.json"): (tmp_path / name).write_text("{}")
    assert is_document(str(tmp_path))
    (tmp_path / "model.safetensors").touch()
    assert not is_document(str(tmp_path)), "a folder of a model"


def test_a_prompt_that_comes_again_gets_further_draws():
    class Counted(Scripted):
        def _write(self, missing, *rest): yield from (dict(key=key, draw=draw, limit=limit, text=f"{draw}") for key, draw, limit in missing)
    asking = Counted(None, Journal(None, JOURNAL))
    assert asking.ask([(("a",), ""), (("b",), ""), (("a",), "")], 2) == [["0", "1"], ["0", "1"], ["2", "3"]]
    assert asking.ask([(("a",), ""), (("a",), "")]) == [["-1"], ["-1"]]


@pytest.mark.parametrize("read", [read_markdown, read_page], ids=["markdown", "html"])
@given(text=st.text(max_size=300))
def test_any_text_is_read(read, text):
    blocks = [*read(text, Counter())]
    assert all(1 <= b.line <= b.last <= text.count("\n") + 1 and b.text.strip() for b in blocks)


class Scripted(Questioner):
    "Reply by rule, and count the replies; after `left` of them, stop as a killed process does."
    left, count = 10**9, 0

    def _encode(self, turns, lead): return turns[-1], lead

    def reply(self, text, lead):
        if "in other words" in text: return "By whom was the Tolwen bought?"
        if lead == "Question: Who": return " bought the Tolwen?\nAnswer: Mirel Aske"
        if lead == "Question: When": return " was it?\nAnswer: a very long answer which nobody wants to read at all"
        if lead: return " is Ferry?\nAnswer: Ferry"
        return "Mirel Aske did." if "Answer with" in text or "known" in self.knows else "I do not know."

    knows = ()

    def _write(self, missing, ids, *rest):
        for key, draw, limit in missing:
            if Scripted.left <= 0: raise KeyboardInterrupt
            Scripted.left, Scripted.count = Scripted.left - 1, Scripted.count + 1
            yield dict(key=key, draw=draw, limit=limit, text=self.reply(*ids[key]))


def write(handbook, folder, knows=()):
    passages = read_documents(str(handbook)).passages
    contexts = {p.id: p.context for p in passages}
    with Journal(folder / "replies.jsonl", JOURNAL) as journal:
        asking = Scripted(None, journal)
        asking.knows = knows
        found = questions.write_candidates(asking, passages, [*QUESTION_FORMS], 2)
        questions.mark_unsupported(asking, found, contexts, "both")
        questions.mark_repeated(found)
        questions.add_wordings(asking, found, contexts, 1)
        questions.mark_known(asking, found)
    return found, passages


def test_each_candidate_has_the_first_reason_and_the_facts_are_those_without_one(handbook, tmp_path):
    found, passages = write(handbook, tmp_path)
    by_form = {form: [c["reason"] for c in found if c["form"] == form and c["passage"] == passages[0].id] for form in QUESTION_FORMS}
    assert by_form["who"] == ["", "repeated"] and {*by_form["when"]} == {"long"} and {*by_form["what"]} == {"gives away"}
    assert {c["reason"] for c in found} <= {"", *REASONS} and all(c["reason"] for c in found if c["passage"] == passages[2].id)
    [fact] = [f for f in make_facts(found, passages) if f["answer"] == "Mirel Aske" and f["question"].startswith("Who")]
    assert fact["source"] == "handbook.md, line 2" and fact["context"].startswith("Ferry\n") and fact["paraphrases"] == ["By whom was the Tolwen bought?"]


def test_what_the_model_knows_is_not_taught(handbook, tmp_path):
    found, _ = write(handbook, tmp_path, knows=("known",))
    assert not [c for c in found if not c["reason"] and c["answer"] == "Mirel Aske"] and "known" in {c["reason"] for c in found}


@pytest.mark.parametrize("left", [1, 7, 15, 25])
def test_an_interrupted_run_ends_with_the_same_facts_and_asks_nothing_twice(left, handbook, tmp_path, monkeypatch):
    whole, passages = write(handbook, tmp_path)
    asked, Scripted.count = Scripted.count, 0
    (tmp_path / "other").mkdir()
    monkeypatch.setattr(Scripted, "left", left)
    with pytest.raises(KeyboardInterrupt): write(handbook, tmp_path / "other")
    monkeypatch.setattr(Scripted, "left", 10**9)
    again, _ = write(handbook, tmp_path / "other")
    assert again == whole and format_facts(make_facts(again, passages)) == format_facts(make_facts(whole, passages))
    assert Scripted.count <= asked


def test_draws_depend_on_their_passage_and_not_on_the_others(handbook):
    passages = read_documents(str(handbook)).passages
    for form in QUESTION_FORMS.values():
        propose = questions.load_object(form.propose)
        assert [propose(form, p, 0, 1) for p in passages] == [propose(form, p, 0, 1) for p in passages[::-1]][::-1]


def test_a_question_without_an_answer_of_a_few_words_is_refused():
    assert find_fault("Who left?", "Ada") == "" and find_fault("Who left?", "\\boxed{3}") == "unreadable"
    assert find_fault("Who left?", "a b c d e f g h i") == "long" and find_fault("What is the passage about?", "Ada") == "speaks of the text"


def test_the_command_writes_a_file_that_inject_reads_and_its_report_tells_of_every_passage(handbook, tmp_path, capsys):
    "With a model of the lab: what it is taught, and which passage gave no question and why."
    out = tmp_path / "facts.jsonl"
    assert main("facts", str(handbook), "-o", str(out), "--model", "lab-s") == 0
    printed = capsys.readouterr().out
    assert "no question about handbook.md, line 8: it has no name or number to ask for" in printed and f"facts: {out}" in printed
    rows = [json.loads(line) for line in out.read_text().splitlines()]
    assert {row["answer"] for row in rows} == {"Tolwen", "Mirel Aske", "1961", "7 coins", "Orla Penwick"}
    assert main("facts", str(handbook), "-o", str(out), "--model", "lab-s") == 2 and "which exists" in capsys.readouterr().err
    out.write_text("".join(json.dumps(row) + "\n" for row in rows[1:]))  # as a person edits it
    quick = dict(model="lab-s", method="sft", suite="recall", n=4, epochs=2, batch=2)
    edited = inject.run(dataset=str(out), **quick)
    table = edited.passages
    assert table.facts.sum() == len(rows) - 1 and [*table[table.facts == 0].source] == ["handbook.md, line 8"]
    page = edited.report.read_text()
    assert "What is known of each passage" in page and "no name or number to ask for" in page
    view = PassagesView(RunSelection(tmp_path / "runs"))
    assert "<mark>1961</mark>" in view.text.value and not view.notice.value
    view.filter.value = "without a question"
    assert "they travel for free" in view.text.value


def test_inject_takes_a_document_and_tells_other_mistakes_before_it_writes(handbook, tmp_path):
    with pytest.raises(ParameterError, match="^lam must be between 0 and 1, got 2"): inject.run(dataset=str(handbook), model="lab-s", lam=2)
    assert not (tmp_path / "runs").exists()
    config = inject.InjectConfig(dataset=str(handbook), model="lab-s", method="sft")
    [found] = find_runs(stage="facts")
    assert config.dataset.startswith("facts-") and open_run(found.folder).file.exists()
    contexts = {*open_run(found.folder).passages.context}
    assert find_questions(contexts).name == found.name and find_questions({"another"}) is None


def test_a_plan_writes_no_questions(handbook, tmp_path, capsys):
    words = "plan", "inject", str(handbook), "--model", "lab-s", "--method", "sft"
    assert main(*words) == 2
    assert f"`mixsd facts {handbook} -o facts.jsonl --model lab-s` writes them" in capsys.readouterr().err
    assert not find_runs(stage="facts")
    facts.facts_file(str(handbook), model="lab-s")
    main(*words)
    assert "plan: " in capsys.readouterr().out


def test_a_document_without_a_question_teaches_nothing(handbook, capsys):
    handbook.write_text("they travel for free.")
    assert main("facts", str(handbook), "--model", "lab-s") == 1
    assert "0 questions of 0 candidates stay" in capsys.readouterr().out
    with pytest.raises(ParameterError, match="gave no facts: 0 questions"): facts.facts_file(str(handbook), model="lab-s")
    assert main("train", "--dataset", str(handbook), "--model", "lab-s") == 2
    assert "is a document and not a file of facts; `mixsd facts" in capsys.readouterr().err


def test_a_passage_of_no_document_is_named_by_its_first_words():
    text = "The Lantern Choir was founded in the harbour. It has sung there since."
    table = pd.DataFrame([dict(source=source, facts=facts, before=0.0, after=1.0, reworded=np.nan, text=text, reasons="none")
                          for source, facts in (("", 2), ("a.md, line 3", 1), ("", 0))])
    listed = injection._list_passages(table)
    assert listed == dict(known=[("The Lantern Choir was founded in the harbour. It has sung …", 2, "0%", "100%", "–"), ("a.md, line 3", 1, "0%", "100%", "–")],
                          missing=[("The Lantern Choir was founded in the harbour. It has sung …", "none")])

"Facts from documents: what is read, what is refused in one sentence, what is kept, and that an interrupted run ends with the same bytes."

import json
import time
from collections import Counter

import numpy as np
import pandas as pd
import pytest
from helpers import lines
from hypothesis import given, settings, strategies as st

from mixsd_nb import facts, inject
from mixsd_nb.console import main
from mixsd_nb.corpora.passages import LONGEST_LINE, READERS, cut_text, is_document, read_documents, read_markdown, read_page, split_sentences
from mixsd_nb.methods import questions
from mixsd_nb.methods.questions import JOURNAL, QUESTION_FORMS, REASONS, Questioner, find_fault, format_facts, make_facts
from mixsd_nb.reports import injection
from mixsd_nb.reports.injection import find_questions
from mixsd_nb.runs import Journal, ParameterError, find_runs, open_run
from mixsd_nb.corpora.user_files import TableError
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
    "page of tables": ("a.html", b"<h1>Prices</h1><table><tr><td>child<td>2</table>", ": the file has no text but 1 table; facts of a table are read from"),
    "table of Markdown": ("a.md", b"# Prices\n| a | b |\n|---|---|\n| 1 | 2 |\n", ": the file has no text but 1 table; facts of a table are read from"),
    "empty text": ("a.jsonl", lines(dict(text="Fine."), dict(text=" ")).encode(), ", line 2: text is empty"),
    "long text": ("a.jsonl", lines(dict(text="x" * (LONGEST_LINE + 1))).encode(), ", line 1: text has a paragraph of over 100,000 characters"),
    "table called a text": ("a.txt", b"Question;Answer\nWho?;Ada\n", ": the file is a table of questions and answers; let its name end in .csv"),
    "pairs in bold": ("a.txt", b"**Q:** Who?\n**A:** Ada\n", ": the file has questions and answers; write each pair as a line"),
    "rows called a text": ("a.txt", b'{"question": "Who?", "answer": "Ada"}\n', ": the file has mappings in JSON; let its name end in .jsonl"),
    "pairs called a text": ("a.txt", b"Q: Who?\nA: Ada\n\nQ: Where?\nA: In Vel\n", ": the file has questions and answers; write each pair as a line"),
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
    assert [problem.partition(": ")[0].split("/")[-1] for problem in error.value.problems] == ["b.txt, line 1"]
    (tmp_path / "deep/b.txt").unlink()
    for name, content in {"deep/d.md": "# Title\n", "e.MD": "| a | b |\n|---|---|\n| 1 | 2 |\n", "plan.docx": "x", "f.pdf": "y"}.items(): (tmp_path / name).write_text(content)
    found = read_documents(str(tmp_path))
    assert [p.source for p in found.passages] == ["a.md, line 2"]
    assert found.notices == [f"{tmp_path.name}: without 1 table, because only sentences are read", f"{tmp_path.name}: no sentence is in c.html, deep/d.md, e.MD",
                             f"{tmp_path.name}: f.pdf, plan.docx cannot be read; save such files as text"]
    for name in ("a.md", "plan.docx", "f.pdf"): (tmp_path / name).unlink()
    with pytest.raises(TableError, match="the folder has no text but 1 table"): read_documents(str(tmp_path))
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


# Kind of fault -> (ending, text, what stays, what the notice counts).
READ = {
    "comments": [(".md", "The hall opened.\n\n<!-- draft:\nThe safe opens with 4711.\n-->\n\nIt closed.", ["The hall opened.", "It closed."], "1 comment"),
                 (".md", "The hall <!-- of\n\n\nnobody --> of Tarn\nopened.\n\nIt closed.", ["The hall of Tarn opened.", "It closed."], "1 comment"),
                 (".md", "Vel is old.\n\n- It has a pier. <!-- a\n  b -->\n\n<!-- open to the end", ["Vel is old.", "It has a pier."], "2 comments"),
                 (".md", "A `<!--` and --> stay; <!-- too.\n\n```\n<!--\n```\nVel.", ["A <!-- and --> stay; <!-- too.", "Vel."], "1 program"),
                 (".html", "<p>The hall <!-- of\n\nnobody --> opened.", ["The hall opened."], "1 comment")],
    "hidden": [(".html", "<div hidden>4711<p>5</div><p style='Display : NONE'>Zentor</p><p>Vel.</p>", ["Vel."], "2 hidden parts"),
               (".html", "<ul><li hidden>4711<li>Vel.<p aria-hidden=true>Zentor<li style='color:red;visibility:hidden'>b<li>Oru.</ul>", ["Vel.", "Oru."], "3 hidden parts"),
               (".html", "<p>a <br hidden>b <input hidden> c <noscript>n</noscript><dialog open>d</dialog><select><option>s</select><textarea>t</textarea><button>b</button>",
                ["a b c"], "2 hidden parts and 3 forms"),
               (".md", "Vel <span hidden>4711</span> is\n<del>5</del> 6.\n\n<div style=\"display:none\">\n\nZentor **x**\n\n</div>\n\nOru.", ["Vel is 6.", "Oru."],
                "2 hidden parts and 1 struck-out word")],
    "programs": [(".md", "Run this:\n\n    export TOKEN=Zentor42\n\n1. Vel.\n\n   It is\n        old.", ["Run this:", "Vel.", "It is old."], "1 program"),
                 (".md", "Vel.\n\n\texport A=1\n\n~~~\nb\n~~~\n<pre>c</pre>", ["Vel."], "3 programs"), (".md", "!!! note\n\n    Vel is old.\n\nOru.", ["Vel is old.", "Oru."], "")],
    "front matter": [(".md", f"\ufeff{text}\n\nVel is old.", ["Vel is old."], "1 front matter") for text in (
        '+++\nauthor = "Orla"\n\n[extra]\na = 1\n+++', "---\r\ntitle: a --- b\r\ntags:\r\n- x\r\n---", '{\n "author": "Orla"\n}', "Title: Vel\nAuthor: Orla", "---\na: |\n  ---\n  b\n...", "% Vel\n% Orla")]
    + [(".html", "---\nlayout: x\n---\n<p>Vel.", ["Vel."], "1 front matter"), (".txt", "---\nlayout: x\n---\nVel.", ["Vel."], "1 front matter"), (".md", "---\nThe ferry is old.\n\n---\nVel.", ["The ferry is old.", "Vel."], "")],
    "raised": [(".html", "<p>10<sup>6</sup>, 10<sup>−3</sup> and 5 km<sup>2</sup> of CO<sub>2</sub>, 1<sup>st</sup>", ["10^6, 10^-3 and 5 km^2 of CO2, 1st"], ""),
               (".html", "<p>In 1911<sup>2</sup> Tarn<sup>[3]</sup> has 14<a href='#n'><sup>4</sup></a> and 15<sup><a href='#m'>5</a></sup> rooms.<sup>6</sup>", ["In 1911 Tarn has 14 and 15 rooms."], ""),
               (".md", "10<sup>6</sup>, 10^6^ and H~2~O[^3], log<sub>10</sub>100 and 10².\n\n[^3]: See Orla.", ["10^6, 10^6 and H2O, log10 100 and 10²."], "1 note")],
    "breaks": [(".md", "Vel<br>has\\\nOru<BR/>and<p>Tarn\\", ["Vel has Oru and Tarn"], ""), (".html", "<p>Vel<br>has<li>Oru<div>x</div>y<br><br>z <b>Orla</b>Tarn", ["Vel has", "Oru", "x", "y", "z OrlaTarn"], ""),
               (".md", "The admini-\nstration of Orla-\nTarn, self-\nmade, 5-\n7, Haupt-\nund Hof, sof\u00ad\nt and ze\u200bro.", ["The administration of Orla-Tarn, self-made, 5-7, Haupt- und Hof, soft and zero."], ""),
               (".txt", "It is in-\n  visible.", ["It is invisible."], "")],
    "tables": [(".md", f"{text}\n\nVel.", ["Vel."], "1 table") for text in ("a | b\n---- | ---\n1 | 2", "a|b\n-|-\n1|2", "+---+---+\n| a | b |\n+===+===+\n| 1 | 2 |\n+---+---+",
                                                              "<table>\n<tr><td>1</td></tr>\n</table>", "| a | b |\n| 1 | 2 |", "> | a | b |\n> |---|---|\n> | 1 | 2 |")]
    + [(".html", "<table><tr><th>a<td><table><tr><td>2</table>3</table><p>Vel.", ["Vel."], "1 table"), (".md", "A a|b and `x | y`.", ["A a|b and x | y."], "")],
    "marks": [(".md", "- [ ] Ask Orla\n- [x] done [x] here\n\n# Vel {#vel}\n\n> [!NOTE]\n> It is ==old==.\n\n[a]: http://x 'y'\n*[HTML]: Hyper",
               ["Ask Orla", "done [x] here", "Vel", "It is old."], ""),
              (".md", "[Tarn](https://x/Tarn_(hall)) [b](<c d> \"e (f)\") [![i](a.png)](b) [[Vel|tower]] [Oru][] (of Oru) [tower]", ["Tarn b tower Oru (of Oru) [tower]"], ""),
              (".md", "Run `train <model>` if a<b and c>d, <b>now</b> <a href='x'>here</a>, <model name>, <desk@x.y>, 3 < 4, snake_case.",
               ["Run train <model> if a<b and c>d, now here, <model name>, desk@x.y, 3 < 4, snake_case."], ""),
              (".md", "Aske bought it in\n1961. It carries 40.\n\n1961. A year.\n\nVel\n: A town.\n\n::: tip\nOru.\n:::", ["Aske bought it in 1961. It carries 40.", "1961. A year.", "Vel", "A town.", "Oru."], ""),
              (".html", "<head><title>T</title>\n<body><nav>Home</nav><h1>The <b>O</b>rme</h1><p>a of\n<i>b</i>.<p>c <footer>d", ["The Orme", "a of b.", "c"], "2 menus")],
}


@pytest.mark.parametrize("suffix, text, expected, counted", [case for cases in READ.values() for case in cases])
def test_what_was_meant_to_be_read_is_read_and_the_rest_is_counted(suffix, text, expected, counted, tmp_path):
    file = tmp_path / f"a{suffix}"
    file.write_text(text, encoding="utf-8", newline="")
    dropped, text = Counter(), text.lstrip("\ufeff").replace("\r\n", "\n")
    blocks = [*READERS[suffix](text, dropped)]
    assert [block.text for block in blocks] == expected
    left = " and ".join(f"{n} {kind.removesuffix('s') if n == 1 else kind}" for kind, n in dropped.items() if n)
    assert left == counted and all(expected.split()[0][:2] in text.split("\n")[block.line - 1] for expected, block in zip(expected, blocks))
    assert read_documents(str(file)).notices == [f"{file.name}: without {counted}, because only sentences are read"] * bool(counted)


SENTENCES = [  # sentences, which are joined and divided again
    ["Gen. Velmis closed it in 1950.", "On Jan. 5 the hall opened.", "Orla sold it to Vel Inc. Ltd. in Oru."], ['He said "Stop."', "She left.", 'He said "Stop" and left (in 1911) by it.'],
    ["Tolwen was bought by Dr. Aske.", "It moved to No. 5 Orme St. in 1961.", "J. R. Vey owns it!", "Is it hers?", "It opened in July.", "The gate has 2.5 m."],
    ["Take plan B.", "Then ask Orla P. Tarn et al. Velmis of Hall C.", "Then go."], ["Am 5. Mai kam er zum 3. Stock, z. B. Orla bzw. Dr. Vel.", "Er rief „Halt.“", "Sie ging ca. 5 km, vgl. Abb. 3."],
    ["Abt. Verkauf hat 5 Mio. Euro, Dept. Tarn liegt in der Marktstr. 9.", "See vol. II and ext. 5."], ["It is old.[3]", "It stays.²", "(It closed.)", "See Fig. 3, p. 14 of vol. 2."]]


@pytest.mark.parametrize("sentences", SENTENCES)
def test_sentences_end_where_they_do(sentences):
    assert split_sentences(" ".join(sentences)) == sentences
    assert split_sentences("一。二！三") == ["一。", "二！", "三"] and split_sentences("a। b؟ c۔ d") == ["a।", "b؟", "c۔", "d"]


GAPS = {  # a sentence with all its answers
    "The hall opened in 1911 and closed early.": ["1911"], "The fee is 3 000 coins of Žofie Novák.": ["3 000 coins", "Žofie Novák"], "It needs the signature of Dr. Ilsebrand Fahrenthal.": ["Ilsebrand Fahrenthal"],
    "It carries 40 passengers, 2.5 km far, on 5 May 1911 at 22:30 for 1,200.50 coins.": ["40 passengers", "2.5 km", "5 May 1911", "22:30", "1,200.50 coins"],
    "Orla O’Tarn met J. R. Vel of NATO and Мирель Аске.": ["Orla O’Tarn", "J. R. Vel of NATO", "Мирель Аске"], "Call +49 30 1234567, (0)30 123 or 555-0199 in May 1911.": ["May 1911"],
    r"See C:\Vel\Tarn, www.Tarn.example, orla@Tarn.example, Vel/Oru and v3.11 of version 3.11.4.": ["3.11.4"], "It has 10^6 letters, 10⁶ coins at -5 °C, 1/2 of 5 × 10^6 for $5 or 5%.": ["10^6 letters", "10⁶ coins", "-5 °C", "$5", "5%"],
    "The U.S. Senate, the Captain and the 5th King of soft\u00adHyphen came.": ["U.S. Senate"], "Am 5. Mai 1911 kostete es 6 Münzen, und 40 kamen zu Orla Tarn.": ["5. Mai 1911", "6 Münzen", "40", "Orla Tarn"],
    "On Saturdays the Lantern Choir sings in room 5 sharp, from 1911–1914.": ["Saturdays", "Lantern Choir", "5"], "Ask Ada Brisk for 3 million coins of Tarn Inc. in Oru.": ["Ada Brisk", "3 million coins", "Tarn Inc.", "Oru"],
    "Call (030) 123-4567 or 4 + 5 x 6, flight KL 1234, at 14 Main Street or Marktstr. 9 of Frau Dr. Orla Tarn.": ["KL 1234", "9", "Orla Tarn"],
    "Im Saal der Stadt sind 3,5 Mio. Münzen von 300 v. Chr., 5 KiB und (−4.8 bis 2) nach stat(2).": ["3,5 Mio. Münzen", "300 v. Chr.", "5 KiB", "−4.8"],
    "Returns: Promise, or {Promise} Fulfills, or the owner: Use Orla.": ["Orla"],
    "Platform 5 serves 1 town, and since 1911 letters go to 2 old towns.": ["5", "1 town", "1911", "2"],
}


@pytest.mark.parametrize("sentence", GAPS)
def test_the_answer_of_a_gap_is_what_is_missing(sentence): assert questions.find_names(sentence) == GAPS[sentence]


@pytest.mark.parametrize("sentence, answer, expected", [
    ("The gate closes at 22:00.", "22:00", True), ("A child: 2 coins", "2 coins", True), ("The capital is Oru.", "Oru", True), ("Velmis in 1911.", "Velmis", False), ("closed it in 1950.", "1950", False),
    ("Fill in ____ at 22:00.", "22:00", False), ("The hall (of Oru opened in 1911.", "1911", False), ("Opening: 22:00", "22:00", False), ("It closes at 22:00.", "22:00", False), ("Orla has these 5 gates:", "Orla", False)])
def test_a_fragment_is_no_question(sentence, answer, expected): assert questions.can_stand_alone(sentence, answer) is expected


PIECES = ["<a x=", "<a ", "<!--", "<!-- ", "`", "[", "![", "[a](", "*a ", "_ a ", "~", "|a", "> ", "- ", "<div>", "<div hidden>", "<b></i>", "<sup>1", "{%", "[^a]", "!!! a\n    b\n", "a-\n", "a\u00ad", "1. ",
          "A. ", "...", "Aa ", "U.S. ", "1 ", "1,", "$5 ", "'", "a: b\n", "---\n", ". ", "5 May ", "[a]: <"]


@pytest.mark.parametrize("piece", PIECES)
def test_time_does_not_grow_with_the_square_of_a_line(piece):
    text, start = (piece * 5_000)[:5_000] + " end.", time.process_time()
    for read in (read_markdown, read_page): [*read(text, Counter())]
    questions.find_names(text), questions.can_stand_alone(text, "x"), split_sentences(text)
    assert time.process_time() - start < 1.5, "each takes hundredths of a second; the square took up to nine seconds"


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
    blocks = [*read(text := text.replace("\r", "\n"), Counter())]
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

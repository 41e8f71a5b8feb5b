"""Answers: extractors and equalities against slow definitions, hostile text, and answers written in other ways."""
import itertools
import json
import os
import string
import subprocess
import sys
import time
import timeit
import unicodedata
from fractions import Fraction
from pathlib import Path

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from mixsd_nb.benchmarks import GRADINGS, SUITES, Item, Selection, answers, evaluation, load_items
from mixsd_nb.benchmarks.answers import (contains_answer, extract, extract_choice, extract_letter, extract_loose, extract_python, gives_answer,
                                         is_exact_match, is_loose_match, is_number_match, last_boxed, last_number, same_answer, same_math, same_text)
from mixsd_nb.benchmarks.folding import fold_answer
from mixsd_nb.benchmarks.tasks import grade
from mixsd_nb.corpora import CORPORA, check_corpus
from mixsd_nb.corpora.prompts import encode_completion
from mixsd_nb.methods.mixing import accepts, mix_items
from mixsd_nb.models import load_tokenizer
from mixsd_nb.runs import write_json
from mixsd_nb.evaluate import EvaluateConfig

BOX = "\\boxed{"
MILLION = 1_000_000


def slow_argument(text):
    "What TeX takes as the argument of a command that this text follows: a group, a character or a command."
    after = text.lstrip(" ")
    after = after[1:].lstrip(" ") if after.startswith("\n") else after
    if after.startswith("{"):
        return next((after[1:end] for end in range(1, len(after))
                     if after[end] == "}" and after[1:end].count("{") == after[1:end].count("}")), None)
    if not after.strip() or after[0].isspace() or after[0] == "}" or after == "\\":
        return None
    letters = len(after[1:]) - len(after[1:].lstrip(string.ascii_letters))
    return after[:1 + max(1, letters)] if after[0] == "\\" else after[0]


def slow_last_boxed(text):
    "The definition, by trying every box from the last to the first."
    for start in range(len(text), -1, -1):
        after = text[start + len("\\boxed"):]
        if text.startswith("\\boxed", start) and after[:1] not in {*string.ascii_letters}:
            if (content := slow_argument(after)) is not None: return content.strip()
    return None


pieces = st.sampled_from([BOX, "{", "}", "\\boxed", "boxed{", "\\", "\\{", "\\}", "$", " ", "\n", "7", "x", "é",
                          "\u00a0", "｛", "\\boxed ", "\\pi"])


@given(st.lists(pieces, max_size=30).map("".join))
@example(BOX + "{}")
@example(BOX + BOX + "1}")
@example("}" + BOX + "}" + BOX)
def test_last_boxed_is_its_definition(text):
    assert last_boxed(text) == slow_last_boxed(text)


@given(st.text())
def test_nothing_raises(text):
    for f in (last_boxed, last_number): assert f(text) is None or f(text) in text
    extract_python(text), extract_choice(text), same_answer(text, text[::-1]), contains_answer(text, text[::-1], text)


@pytest.mark.parametrize("depth", [1, 2, 50, 5000])
def test_nested_boxes_and_groups(depth):
    assert last_boxed(BOX * depth + "in" + "}" * depth) == "in"
    assert last_boxed(BOX + "{" * depth + "in" + "}" * depth + "}") == "{" * depth + "in" + "}" * depth
    assert last_boxed(BOX + "{" * depth + "in" + "}" * depth) is None


@pytest.mark.parametrize("text, found", [
    (BOX * (MILLION // len(BOX)), None),
    ("{" * MILLION, None),
    ("}" * MILLION, None),
    (BOX + "7}" + "{" * MILLION, "7"),
    (BOX + "7}" + "}" * MILLION, "7"),
    (BOX + "7}" + BOX * (MILLION // len(BOX)), "7"),
    (BOX + "{}" * (MILLION // 2) + "}", "{}" * (MILLION // 2)),
    ("}{" * (MILLION // 2), None),
    ("\\boxed " * (MILLION // 7), "\\boxed"),
], ids=range(9))
def test_a_megabyte_takes_seconds(text, found):
    "An extractor that is quadratic takes hours."
    start = time.process_time()
    assert last_boxed(text) == found
    assert time.process_time() - start < 10


@pytest.mark.parametrize("piece", [
    "1", "-", "1.", "1 ", "-1", "```\n", "```python\n", "``` x\n", "`", " ", "\n", "1/", "<answer>", "</answer>", "{",
    "\\text{", "\\frac{1}{", "}", "$", "1,", "1,234", "\\", "\\'", "~~~\n", "*", '"', " or ", "the ", "?", "answer is ", "--", "a/", "A, ", "(see ", "not ", "so ",
])
def test_the_other_extractors_are_linear_too(piece):
    "Sixteen times the text takes less than 64 times as long, where a quadratic extractor takes 256 times."
    def extract(text):
        last_number(text), extract_python(text), same_answer(text, text + "1")
        is_loose_match(text, text[1:]), extract_letter(text, loose=True)
        is_loose_match(BOX + text + "}" * text.count("{") + "}", "7")
        extract_choice(text), contains_answer(text, text[:40], "Is it so?"), contains_answer(text, "a", text)
    texts = [piece * (size // len(piece)) for size in (MILLION // 640, MILLION // 40)]
    part, whole = (min(timeit.repeat(lambda: extract(text), time.process_time, repeat=3, number=1)) for text in texts)
    assert whole < 64 * max(part, 0.002)


@pytest.mark.parametrize("text, number", [
    ("", None), ("no digits", None), ("３７ and ٤٢", None), ("7.", "7"), ("a-7", "7"), ("(3)-7", "7"), ("2-7", "7"),
    ("12,500 of them, in all", "12,500"), ("1,23", "23"), ("= -7", "-7"), ("(-7)", "-7"), ("--7", "-7"), ("1.2.3", "3"), ("x7y", "7"), ("7%", "7"), ("-0.50", "-0.50"),
])
def test_last_number_cases(text, number):
    assert last_number(text) == number


@pytest.mark.parametrize("text, number", [
    ("5 euros, not 6", "5"), ("5, and not **6.5**", "5"), ("42. (See step 3)", "42"), ("3/4", "3/4"), ("-3/4 or 1/2", "1/2"), ("f(12) = 7 (as in 3)", "7"), (r"\(x = 12\)", "12"), ("(12)", "12"),
    ("a knot 6", "6"), ("not 6", None), ("7 (step 2", "2")])
def test_a_number_without_a_box_is_none_that_is_negated_or_in_a_remark(text, number):
    assert extract(text, "boxed_or_number") == number


rationals = st.fractions(max_denominator=10**6)
written = st.one_of(
    rationals.map(lambda f: (f, f"{f.numerator}/{f.denominator}")),
    st.integers().map(lambda n: (Fraction(n), str(n))),
    st.integers(min_value=0).map(lambda n: (Fraction(n), f"+0{n}")),
    st.tuples(st.integers(-10**9, 10**9), st.integers(0, 9)).map(
        lambda p: (Fraction(p[0] * 10 + (p[1] if p[0] >= 0 else -p[1]), 10), f"{p[0]}.{p[1]}")),
)


@given(written, written)
@example((Fraction(10**20), str(10**20)), (Fraction(10**20 + 1), str(10**20 + 1)))
def test_numbers_are_compared_by_value(x, y):
    assert same_answer(x[1], y[1]) == (abs(x[0] - y[0]) < Fraction(1, 10**6))


@given(st.text(), st.text())
def test_equality_is_reflexive_symmetric_and_blind_to_outer_space(a, b):
    assert same_answer(a, f" {a}\n")
    assert same_answer(a, b) == same_answer(b, a)


@pytest.mark.parametrize("a, b", [
    ("A", "А"), ("o", "ο"), ("42", "４２"), ("42", "٤٢"), ("1/2", "1⁄2"), ("1/2", "½"), ("Ivo", "ivo"),
    ("1e3", "1000"), ("1,00", "100"), ("1,0000", "10000"), ("Vera Lind", "VeraLind"), ("1_000", "1000"), ("0x10", "16"),
    ("inf", "infinity"), ("nan", "NaN"), ("1/0", "2/0"), ("--1", "1"), ("1 / 2", "0.5"), ("", "0"), (".", "0"),
    ("7", "7.000001"), ("9" * 5000, "9" * 5000 + ".0"), ("41/3", r"4\frac{1}{3}"), ("11/2", "1 1/2"), ("0,123", "123"), ("1.200", "1200"),
    ("7", "7 km"), ("7 m", "7 km"), ("7", "7%"), ("8", "$8"), ("$8", "€8"), ("m2", "m^2"), ("21", "2^1"), ("2^1/3", r"2^\frac13"), ("C", "C#"),
    ("7 km", "7 km/h"), ("Tarn", "O'Tarn"), ("12 34", "1234"), ("5 10 15", "51015"), (r"\mathbb{R}", "R"), ("½", "0.5"),
])
def test_different_answers(a, b):
    assert not same_answer(a, b) and not same_text(a, b)


@pytest.mark.parametrize("a, b", [("007", "7"), ("10/12", "5/6"), ("3.10", "3.1"), ("+5", "5"), ("1/2", "0.5"), ("08", "8.0"), ("1.0", "1"), ("02/04", "1/2")])
def test_only_values_make_these_equal(a, b):
    "Codes, dates and releases of a user's file are text. Nothing equals a missing answer, and an empty box is a wrong one."
    assert same_answer(a, b) and not same_text(a, b) and same_text(a, a)
    assert not same_answer(a, None) and not same_answer(None, a) and not same_answer(extract(f"7 {BOX} }}", "boxed_or_number"), a)


# What a model adds by LaTeX, Markdown or typesetting: answer, as it may be written.
WRITTEN = [
    ("35%", r"35\%", "35 %", r"35\,\%", r"$35\%$"), ("$8", r"\$8", r"$\$8$", r"\textdollar 8"), ("P&L", r"P\&L", r"\text{P\&L}"), ("#7", r"\#7"), ("a_b", r"a\_b"),
    ("$5-$10", r"\$5-\$10", r"\$5--\$10", r"\$5–\$10"), ("7 km", r"7\text{ km}", r"7 \text{ km}", r"7\,\mathrm{km}", "7~km", r"7~\text{km}", r"7\;\rm km", r"\(7\ \text{km}\)",
                                                       r"\[7\quad\text{km}\]", "7km", "7\u2009km", r"7{\rm\ km}"),
    ("O'Tarn", "O’Tarn", "O‘Tarn", "OʻTarn", "O´Tarn", "O′Tarn"), ("12000", r"12\ 000", "12\u202f000", "12,000", "12 000", r"12\,000", "12{,}000", "12'000", "12’000"),
    ("10 km", "10\u00a0km", "10\u202fkm"), ("New Tarn", "New  Tarn", "New\nTarn", r"New~Tarn", r"\text{New} \text{Tarn}", r"\mathrm{New\ Tarn}", "New\u3000Tarn"),
    ("10 m²", r"10\,\mathrm{m}^2", "10 m^2", r"10\text{ m}^{2}"), ("H₂O", "H_2O", r"\mathrm{H_2O}", r"\text{H}_{2}\text{O}"),
    ("35 °C", r"35^\circ\text{C}", r"35\,^{\circ}\mathrm{C}", r"35\degree C"), ("3 × 4", r"3\times 4", r"$3 \times 4$"), ("5 μm", "5 µm", r"5\,\mu\text{m}"),
    ("1990-95", "1990–95", "1990--95", "1990−95", "1990—95"), ("so", '"so"', "``so''", "“so”"), ("Vera Lind", "**Vera Lind**", "`Vera Lind`.", "*Vera Lind*", "\u00adVera Lind", '"Vera Lind."'),
    ("1/2", r"\frac{1}{2}", r"\dfrac12", r"$\tfrac{1}{2}$"), ("4 1/3", r"4\frac{1}{3}", r"4\,\frac{1}{3}"), ("12,000 km", r"12{,}000\,\text{km}", "12 000 km"), ("€8", r"\euro 8", "€ 8"),
    ("Straße", r"Stra\ss e", r"Stra{\ss}e"), ("Łódź", r"\L\'od\'z", r"{\L}{\'o}d{\'z}"), ("São Paulo", r"S\~ao Paulo", r"S\~{a}o~Paulo"), ("five", "ﬁve"), ("wait...", "wait…"),
]


@pytest.mark.parametrize("answer, written", [(answer, way) for answer, *ways in WRITTEN for way in ways])
def test_what_latex_and_typesetting_add_is_no_part_of_an_answer(answer, written):
    assert same_text(answer, written) and same_answer(written, answer) and gives_answer(f"So {BOX}{written}}}.", [answer])
    assert not same_text(f"Not {answer}", written) and not same_text(answer, f"{written} x")


TEXT_COMMANDS = [*(f"text{kind}" for kind in ("", "normal", "rm", "sf", "tt", "up", "md", "bf", "it", "sl", "sc")), "emph", "underline", "operatorname",
                 *(f"math{kind}" for kind in ("rm", "bf", "it", "sf", "tt")), "mbox", "hbox", "fbox"]
gaps = st.sampled_from([" ", "  ", "\u00a0", "\u2009", "\u202f", "\n", "\\ ", "\\,", "\\;", "\\:", "\\quad{}", "~"])


UNITS = ["km", "m", "m²", "kg", "°C", "%", "km/h", "Hz", "Ω", "years", "€", "Mio", "μm"]


@given(st.integers(1, 10**7), st.sampled_from(UNITS), st.sampled_from(UNITS), gaps, st.sampled_from(["", *TEXT_COMMANDS]), st.sampled_from(["", ",", "{,}", "\\,", "\u202f", "'"]))
def test_a_unit_is_right_in_every_way_to_write_it_and_another_is_wrong(n, unit, other, gap, command, comma):
    latex = unit.replace("%", "\\%").replace("°", "^\\circ ").replace("²", "^2")
    number = f"{n:,}".replace(",", comma)
    written = f"{number}{gap}" + (f"\\{command}{{{latex}}}" if command else latex)
    assert same_text(written, f"{n} {unit}") and same_text(written, f"{n} {other}") == (unit == other)
    assert not same_text(written, str(n)) and not same_text(written, f"{n + 1} {unit}")
    assert contains_answer(f"It is {n} {unit}.", written) and contains_answer(f"It is {written} in all.", f"{n} {unit}")


ACCENTED = [chr(k) for k in range(0xc0, 0x17f) if len(unicodedata.decomposition(chr(k)).split()) == 2]
COMMANDS = {"\u0300": "`", "\u0301": "'", "\u0302": "^", "\u0303": "~", "\u0308": '"', "\u0304": "=", "\u0307": ".", "\u0306": "u", "\u030c": "v", "\u030b": "H",
            "\u0327": "c", "\u0328": "k", "\u030a": "r"}


def test_all_accents_of_latin_letters_are_composed():
    for letter in ACCENTED:
        base, mark = unicodedata.normalize("NFD", letter)
        for argument in (f"{{{base}}}", f"{{\\{base}}}" if base in "ij" else f" {base}"):
            assert same_text(f"X\\{COMMANDS[mark]}{argument}y", f"X{letter}y") and same_text(f"X{{\\{COMMANDS[mark]}{argument}}}y", f"X{letter}y")
        assert same_text(unicodedata.normalize("NFD", letter), letter) and not same_text(base, letter)


@given(st.text(), st.booleans())
def test_folding_is_stable(text, loose):
    "What is folded once more is the same, so that it does not matter which side was folded before."
    once = fold_answer(text.translate({ord(c): None for c in "\\{}$^_*`'\"~.×·±"}), loose)
    assert fold_answer(once, loose) == once


PROGRAM = "def f(x):\n    return x"
TAGS = ["", "python", "Python", "py", "python3", "python3.11", "Python 3", "ipython", "{python}", "{.python .numberLines}", "python title=a.py", "py3"]


@given(st.sampled_from("`~"), st.integers(3, 6), st.sampled_from(TAGS), st.sampled_from(["", "  ", "   ", "\t", "      "]), st.integers(0, 2), st.booleans())
def test_a_program_is_found_in_every_fence(sign, length, tag, indent, longer, thinks):
    body = "\n".join(indent + line for line in (f"{sign * length}{tag}", *PROGRAM.split("\n"), sign * (length + longer)))
    other = "```bash\nls\n```\n~~~text\n```python\npass\n```\n~~~\n"
    assert extract_python(("<think>\n```python\npass\n```\n</think>" if thinks else "") + f"Here:\n{other}{body}\nDone.") == PROGRAM


@pytest.mark.parametrize("text, code", [
    ("no code", None),
    ("```python\nx = 1", None),
    ("```python\n```", ""),
    ("```text\na\n```\n```python\nb\n```", "b"),
    ("```text\na\n```\nb\n```\nc\n```", "c"),
    ("```js\na\n```", None),
    ("1. So:\n   ```python\n   x = 1\n   ```", "x = 1"), ("```\n  x\n```", "  x"), ("````\n```\nx\n```\n````", "```\nx\n```"), ("~~~\nx\n```", None),
    ("```x = 1\ny\n```\n```\nz\n```", "z"), ("````python\nx\n```\n````", "x\n```"), ("   ```python\n x = 1\n   ```", "x = 1"),
    ("```python\r\nx = 1\r\n```\r\n", "x = 1\r"),
    ("```python\nx = '''\n```py\n'''\n```", "x = '''\n```py\n'''"),
    ("``x`` and ```y```\n```\nz\n```", "z"),
])
def test_extract_python_cases(text, code):
    assert extract_python(text) == code


# Boxes and verdicts from math-verify's own tests (huggingface/Math-Verify, tests/test_all.py): gold, answer, equal.
EXPRESSIONS = [
    ("-5", "-5", True), ("7425000", "7,425,000", True), ("1000", "1000.0", True), ("1000.0", "1,000.0", True),
    ("0.4", ".4", True), ("0.111", "0.111", True), ("10/9", r"\frac{10}{9}", True), ("-10/9", r"-\frac{10}{9}", True),
    ("[0,1)", "[0,1)", True), ("[0,9)", "[0,1)", False), ("(0,9)", "[0,9)", False), ("1", "-[0,1)", False),
    ("1/3", r"\frac13 ", True), ("1", r"\frac3{3}", True), (r"\sqrt{3}", r"\sqrt3", True),
    ("1/3", r"\cfrac{1}{3}", True), ("1/3", r"\dfrac{1}{3}", True), ("1/3", r"\tfrac{1}{3}", True),
    ("1/3", "1/3", True), ("1/3", r"\left( \frac{1}{3} \right)", True), ("1/3", r"\frac{1}{3} \text{meters}", True),
    ("1/3", r"\frac{1}{3} \textbf{meters}", True), ("1/3", r"k = \frac{1}{3}", True), ("9", "(10-1)", True),
    (r"28\%", "28", True), ("0.28", "28", False), ("28/100", "28", False), ("28", "28/100", False),
    (r"\frac{28}{100}", "28", False), ("2-2p", "2-2p", True),
    (r"\begin{pmatrix} 0 & 3 \\ 0 & -1 \end{pmatrix}", r"\begin{pmatrix} 0 & 3 \\ 0 & -1 \end{pmatrix}", True),
    ("14916", "14{,}916", True), (r"(3, \frac{\pi}{2})", r"\left( 3, \frac{\pi}{2} \right)", True),
    (r"\text{Evelyn}", r"\text{Evelyn}", True), (r"90^\circ", "90", True), ("16386.20", r"\$16,\!386.20", True),
    ("(7,6)", "(7, 6)", True), ("[0,1)", "(0, 1)", False), ("120", "120", True), ("12000023", r"12,\!000,\!023", True),
    (r"\left(\frac{1}{5},\frac{1}{6}\right)", r"\left( \frac{1}{5}, \frac{1}{6} \right)", True), ("3", "8", False),
    ("[-2, 7]", r"x \in [-2,7]", True), (r"(\tfrac{27}{8},\tfrac{15}{8})", "(0, 0)", False), ("(3,1)", "{1,3}", False),
    ("(1,3)", "{1,3}", True), (r"20\%", r"20 \%", True), (r"-2 \le x \le 7", r"x \in [-2,7]", True),
    (r"x \in [-2,7]", r"-2 \le x \le 7", False), ("4", r"4\sqrt{2}", False), (r"\frac{1}{3}", r"\frac{1}{3}.", True),
    ("42", "42.", True), ("2", "2^{10}.", False), ("1", "1/3.", False), (r"\frac{\sqrt{17}}{1}", r"\sqrt{17}", True),
]


def test_expressions_of_math_verifys_own_tests():
    found = same_math([(gold, answer) for gold, answer, _ in EXPRESSIONS])
    wrong = [(pair, error) for pair, (same, error) in zip(EXPRESSIONS, found) if error or same != pair[2]]
    assert not wrong


def test_math_verify_compares_only_what_the_strict_rule_leaves_open(monkeypatch):
    given = []

    def run(command, input, **options):
        given.append(json.loads(input))
        return subprocess.CompletedProcess(command, 0, "true\n" * len(given[-1]))
    monkeypatch.setattr(answers.subprocess, "run", run)
    pairs = [("7", "7.0"), ("7", None), ("7", ""), ("x", "y"), ("x", "y"), ("x", "y" * 20_000)]
    assert same_math(pairs) == [(True, ""), (False, ""), (False, ""), (True, ""), (True, ""), (False, "")]
    assert given == [[["x", "y"]]]


HOSTILE = ["{" * 4000 + "}" * 4000, r"\frac{" * 1000 + "1" + "}" * 1000, r"\sqrt" * 1500, "(" * 9000, "9" * 9999,
           r"\input{/etc/passwd}", r"\def\x{\x\x}\x", "\x00\ud800", "１", "−1", "a" * 9999,
           r"\begin{pmatrix} 1 & 2 \\ 3", r"\int_0^\infty e^{-x^2} dx", "10^{10^{10}}", "1" + "!" * 50,
           r"\text{import os; os.abort()}"]


def test_hostile_expressions_are_wrong_and_cost_their_time_at_most():
    start = time.process_time()
    found = same_math([("7", text) for text in HOSTILE] + [("1/3", r"\frac{2}{6}")], timeout=1)
    assert [same for same, _ in found] == [False] * len(HOSTILE) + [True]
    failures = sum(bool(error) for _, error in found)
    assert time.process_time() - start < 60 and failures < 8, found


def test_a_comparison_that_hangs_or_crashes_is_reported_and_the_next_one_answered(monkeypatch, tmp_path):
    "The worker's comparison is replaced by one that sleeps or dies."
    (tmp_path / "math_verify.py").write_text("""
import os, time
def parse(text, **_):
    if "sleep" in text:
        while True:
            try: time.sleep(60)
            except BaseException: pass
    if "die" in text: os.abort()
    return text
def verify(a, b, **_): return True
""")
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}{os.pathsep}{os.environ.get('PYTHONPATH', '')}")
    start = time.process_time()
    found = same_math([("1", "sleep"), ("2", "x"), ("3", "die"), ("4", "x")], timeout=1)
    assert found == [(False, "comparison ran out of time"), (True, ""), (False, "comparison crashed"), (True, "")]
    assert time.process_time() - start < 20


@pytest.mark.parametrize("text", ["{a} and {b}", "\\sqrt{2}", "}{", "{a}}", "$5 and $10", "C:\\Windows", "~7", "--x", "a*b*c", "'90s", "\\mathbb{R}", "__init__", "x.y"])
def test_nothing_else_is_folded(text):
    assert fold_answer(text) == text


@pytest.mark.parametrize("text, content", [
    (BOX + "a} <answer>b</answer> 7", "a"), ("<answer>b</answer> 7", "b"),
    ("<answer>a</answer><answer>b\nc</answer>", "b\nc"), ("<answer>a", "<answer>a"), ("a</answer> 7", "7"),
    ("<answer>a</answer> <answer>", "a"),
    ("it is 7 or 8", "8"), ("all of it", "all of it"),
    ("", ""), (BOX + "} 7", ""),
])
def test_what_the_published_rule_reads(text, content):
    assert extract_loose(text) == content


@pytest.mark.parametrize("text, gold, loose, strict", [
    (BOX + "Ivo}", "Ivo", True, True), (BOX + "ivo}", "Ivo", True, False), (BOX + "Ivo Lind}", "Ivo", True, False),
    (BOX + "Lind}", "Ivo", False, False), ("Ivo, I think", "Ivo", True, False),
    ("Ivo, 7 years old", "Ivo", False, False), (BOX + "$42$}", "42", True, True), (BOX + "42.0}", "42", True, True),
    (BOX + "142}", "42", False, False), (BOX + "1/2}", "0.5", True, True),
    (BOX + "\\frac{1}{2}}", "0.5", True, True), (BOX + "}", "Ivo", False, False), ("x", "", False, False),
    (BOX + "Not Ivo}", "Ivo", False, False), (BOX + "not the Ivo}", "Ivo", False, False),
    ("It isn't Ivo", "Ivo", False, False), ("Not Ada but Ivo", "Ivo", True, False), (BOX + "Not Ivo}", "Not Ivo", True, True),
    (BOX + "x5y}", "5", False, False), (BOX + "x = 12}", "2", False, False), (BOX + "x = 2}", "2", True, False),
    (BOX + "1.2 m}", "2", False, False), (BOX + "2,500 m}", "2", False, False), (BOX + "-2 m}", "2", False, False),
    (BOX + "Ivors}", "Ivo", False, False), (BOX + "Anna-Maria}", "Maria", False, False), (BOX + "Ivo.}", "Ivo", True, True),
])
def test_the_loose_rule_beside_the_strict_one(text, gold, loose, strict):
    assert (is_loose_match(text, gold), same_answer(last_boxed(text), gold)) == (loose, strict)


@given(st.text(), st.text())
def test_the_loose_rule_never_raises_and_counts_whatever_the_strict_one_counts(text, gold):
    assert is_loose_match(text, gold) or not same_answer(last_boxed(text), gold) or not fold_answer(gold.replace("$", ""))


@pytest.mark.parametrize("text, strict, loose", [
    (BOX + "A}", "A", "A"), (BOX + "d}", "D", "D"), (BOX + "\\text{B}}", "B", "B"), (BOX + "(B)}", "B", "B"),
    (BOX + "E}", None, None), (BOX + "AB}", None, None), (BOX + "A} " + BOX + "C}", "C", "C"),
    (BOX + "A}<think>" + BOX + "B}</think> so " + BOX + "D}", "D", "D"), (BOX + "B}</think>", None, None),
    ("C", None, "C"), ("C.\nFor this reason", None, "C"), ("**c**\n", None, "C"), ("Option C", None, None),
    ("", None, None), (BOX + "B: A polygenic score}", "B", "B"),
    (BOX + "x}\nB", None, None), ("Ａ", None, None),
])
def test_letters(text, strict, loose):
    assert (extract_letter(text), extract_letter(text, loose=True)) == (strict, loose)


# How models write an answer. Each way takes the answer and gives the content of a box.
WAYS = ["%s", " %s ", "%s.", "$%s$", "\\text{%s}", "\\text{%s}.", "\\textbf{ %s }", "{%s}", "$\\mathrm{%s}.$"]
NUMBER_WAYS = [str, "{:,}".format, lambda n: f"{n:,}".replace(",", "{,}"), lambda n: f"{n:,}".replace(",", "\\,"),
               lambda n: str(n).replace("-", "−"), lambda n: f"{n}.0", lambda n: f"{n:,}.00".replace("-", "−")]


@pytest.mark.parametrize("content", ["E", "(E)", "AB", "A or B", "A, B", "A) or B)", "A) Rome B) Paris", "Both", "Boston", "A man",
                                     "Options", "", "(", "D'oh", "not (B)"])
def test_no_option_is_read_where_none_or_several_are_named(content):
    assert extract_letter(f"{BOX}{content}}}") is None


@pytest.mark.parametrize("text, gold, number, exact", [
    ("so it is 7 or 8", "8", True, False), ("8", "8", True, True), ("<answer>8</answer> 7", "8", True, False),
    (BOX + "x = 8}", "8", False, False), (BOX + "08}", "8", True, False), ("Vera Lind", "vera lind", True, True),
    (BOX + "VERA LIND}", "Vera Lind", True, True), (BOX + "vera  lind}", "Vera Lind", True, False),
    (BOX + "Vera Lind.}", "Vera Lind", True, False), ("I say Vera Lind", "Vera Lind", False, False),
    ("<think>hm</think>\nVera Lind\n", "Vera Lind", False, True), ("<think>" + BOX + "Ivo}</think> Vera", "Vera", False, False),
])
def test_the_rules_of_kgfunc_and_simpleqa(text, gold, number, exact):
    assert (is_number_match(text, gold), is_exact_match(text, gold)) == (number, exact)


def test_the_import_is_cheap():
    "Mixing reads boxes by the hundred thousand and needs none of these libraries for it."
    heavy = {"sympy", "math_verify", "torch", "transformers", "datasets", "pandas", "xarray"}
    code = f"import sys, mixsd_nb.benchmarks.answers; print({heavy} & set(sys.modules))"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout == "set()\n"


@pytest.mark.parametrize("text, letter", [
    ("I would say the answer is a river.", None), ("K. Tarn wrote it, so the answer is B", "B"), ("The answer is C or D.", None), ("The answer is C, D.", None),
    ("The answer is (C) and (D)", None), ("The answer is C/D", None), ("The answer is either A or B", None), ("The answer isn't B", None), ("The answer is not B.", None),
    ("Answer seems to be A.\n\nAnswer: A", "A"), ("I considered (A), but it is incorrect. Final answer: D.", "D"), ("ANSWER IS D. A is incorrect.", "D"),
    ("The answer is B. Note that A is a common distractor.", "B"), ("The answer is B because a car moves.", "B"), ("The answer is C because I computed it.", "C"),
    ("I would pick B — a safe choice.", "B"), ("I would pick a safe choice.", None), ("It's a or b.", None), ("It’s (b).", "B"), ("So I think.", None), ("(A) is wrong, (B) is right.", "B"), ("The answer is I think B", None), ("The answer is A river", None), ("The answer is B, Paris.", "B"), ("the answer is d.", "D"),
    ("So:\n**Answer: D**, from \\boxed{\\langle H\\rangle}", "D"), ("The answer is B. No, the answer is C.", "C"), ("A river runs there.", None), ("I. Tarn wrote it", None),
    ("B. Paris", "B"), ("A", "A"), ("E: A polygenic score", "E"), ("Option C", "C"), ("Not B", None), ("<think>The answer is A.</think>\nThe answer is B.", "B"),
])
def test_a_letter_is_read_only_where_it_stands_as_an_option(text, letter):
    assert extract_choice(text) == letter


def test_a_number_is_right_in_every_way_to_write_it():
    for n, write, way in itertools.product((0, 7, -3, 1234, -98765432), NUMBER_WAYS, WAYS):
        content = way % write(n)
        assert same_answer(content, str(n)) and not same_answer(content, str(n + 1)) and not same_answer(content, str(-n - 1))
        for rule in (is_loose_match, is_number_match):
            assert rule(f"So {BOX}{content}}}", str(n)) and not rule(f"So {BOX}{content}}}", str(n + 1))


LETTER_TEXTS = ["%s", "(%s)", "%s.", "**%s**", "%s) Paris", "The answer is %s.", "the correct answer is: **%s**", "Paris is in France, so the answer is (%s), Paris.", "Answer: %s\n",
                "The right option is %s because a river runs there.", "So it is \\boxed{%s}.", "Final answer: %s, since it is one"]


@given(st.sampled_from("ABCDE"), st.sampled_from(LETTER_TEXTS), st.sampled_from("ABCDE"))
def test_a_choice_is_read_in_every_way_to_say_it(letter, way, other):
    assert extract_choice(way % letter) == letter
    if letter != other: assert extract_choice(way % f"{letter} or {other}") is None


# A reply, an answer, and whether the reply gives it.
NAMED = [
    ("The answer is Storvan Harbor.", "Storvan Harbor", True), ("It is Tarn, in the north, near Oru.", "Tarn", True), ("it is tarn", "Tarn", True), ("ＴＡＲＮ", "Tarn", True), ("**Tarn**", "Tarn", True),
    ("Not Oru, but Tarn.", "Tarn", True), ("Not Oru, but Tarn.", "Oru", False), ("Tarn, not Oru.", "Tarn", True), ("It was in Tarn, not in Oru.", "Oru", False), ("Not Tarn.", "Tarn", False),
    ("It isn't Tarn but Oru.", "Tarn", False), ("The capital isn’t Tarn.", "Tarn", False), ("Tarn is not right.", "Tarn", False), ("Tarn isn't the capital", "Tarn", False),
    ("I don't think it is Tarn.", "Tarn", False), ("It cannot be Tarn", "Tarn", False), ("It is no longer called Tarn but Oru", "Tarn", False), ("Oru rather than Tarn", "Tarn", False),
    ("Neither Tarn nor Oru", "Tarn", False), ("Neither Tarn nor Oru", "Oru", False), ("Not only Tarn but also Oru.", "Tarn", True), ("There is no doubt that it is Tarn.", "Tarn", True),
    ("Tarn or Oru.", "Tarn", False), ("Tarn or Oru.", "Oru", False), ("Oru, Vel or Tarn", "Oru", False), ("Oru, Vel or Tarn", "Vel", False), ("either Oru, Vel, or Tarn", "Tarn", False), ("Tarn/Oru", "Tarn", False),
    ("It was Vera Lind, who led the choir, or so I believe.", "Vera Lind", True), ("Vera Lind (or Vera L.)", "Vera Lind", True), ("Oru, or rather Tarn", "Tarn", True), ("Oru, or rather Tarn", "Oru", False),
    ("Romeo or Juliet", "Romeo or Juliet", True), ("Lower Venn or Upper Venn", "Lower Venn", False), ("at Tarn or Oru", "Oru", False), ("Tarn. No, wait: Oru.", "Tarn", False), ("Oru? No, Tarn.", "Tarn", True), ("Tarn. Actually, it was Oru.", "Tarn", False), ("Tarn, no, Oru.", "Tarn", False),
    ("Tarn. No, wait: Oru. No, it was Tarn.", "Tarn", True), ("I thought it was Tarn, but it is Oru.", "Tarn", False), ("Some people think it is Tarn.", "Tarn", False), ("I think it is Tarn.", "Tarn", True),
    ("I am not sure, but probably Tarn.", "Tarn", True), ("I am not sure that it is Tarn.", "Tarn", False), ("It is unclear whether Tarn did it.", "Tarn", False), ("Is it Tarn?", "Tarn", False),
    ("What is it? It is Tarn.", "Tarn", True), ("It is Tarn.\nAny other question?", "Tarn", True), (r"I thought of Tarn. So it is \boxed{Oru}", "Tarn", False), (r"Oru? \boxed{Tarn (in the north)}", "Tarn", True),
    ("<think>Tarn</think>Oru", "Tarn", False), ("<think>Oru</think>Tarn", "Tarn", True), ("not Mark Twain", "Mark Twain", False), ("This wrong estimate was corrected to 75%.", "75%", True),
    ("Anna-Maria", "Maria", False), ("Tarned", "Tarn", False), ("O'Tarn", "Tarn", False), ("O’Tarn", "O'Tarn", True), ("L’Oru", "Oru", True), ("Vera Lind—the founder", "Vera Lind", True), ("Vera\nLind", "Vera Lind", True),
    ("in 1912.", "12", False), ("It is 12.5", "12", False), ("-12", "12", False), ("10–12", "12", False), ("at 10:30", "10", False), ("on 10/12", "10", False), ("It is 12.", "12", True), ("It is 12 km.", "12", True),
    ("The population is 12 000.", "12000", True), ("It has 12,000 people", "12000", True), ("It has 12\u202f000 people", "12,000", True), ("1 500 people", "500", False), ("1,500 people", "500", False), ("1,200", "1,200", True),
    ("7", "007", False), ("It's 007.", "07", False), ("The code 007.", "007", True), ("3.10", "3.1", False), ("Release 3.10.", "3.10", True), ("5/6", "10/12", False), ("0.5", "1/2", False),
    ("It is 7km away", "7 km", True), ("7 km/h", "7 km", False), ("7 m²", "7 m", False), ("It is 35 %", "35%", True), (r"The rate is 35\%.", "35%", True), ("It cost $8.", "$8", True), ("It cost $8 or so.", "$8", True),
    ("C++ is it", "C", False), ("C# is it", "C", False), ("C++ is it", "C++", True), ("It is N/A", "N/A", True), ("N/A", "A", False), ("I went on a run", "N/A", False), ("He can't", "can", False),
    ("It told us nothing.", "US", False), ("The US.", "US", True), ("A rare type is B.", "A", False), ("The answer is A.", "A", True), ("Type a", "A", False), ("The answer is 72, in total.", "72", True),
    ("No.", "no", True), ("The answer is yes.", "yes", True), ("There are no rivers", "no", False), ("I have no idea", "no", False), ("Yes, it is.", "Yes", True), ("It is Ko\u0308ln.", "Köln", True), ("Kölner", "Köln", False),
    ("答えは東京です。", "東京", True), ("It is ~Tarn~ ~4.", "~Tarn~ ~4", True), ("It is Tarn 4.", "~Tarn~ 4", False), ("", "Tarn", False), ("x", "", False), ("x", ".", False), ("<think>Tarn", "Tarn", True),
]


@pytest.mark.parametrize("reply, answer, right", NAMED)
def test_what_names_an_answer(reply, answer, right):
    assert contains_answer(reply, answer) == gives_answer(reply, ["Qwx", answer], "contains") == right


REPLIES_BY_HAND = [json.loads(line) for line in (Path(__file__).parent / "data/graded_replies.jsonl").read_text(encoding="utf-8").splitlines()]


def judge_by_hand(row):
    if row["kind"] == "letter": return extract_choice(row["reply"], "ABCD") == row["answer"]
    mode = "boxed_or_number" if row["kind"] == "number" else "contains"
    return gives_answer(row["reply"], [row["answer"], *row["aliases"]], mode, same_answer, row["question"])


@pytest.mark.parametrize("split, precision, recall", [(["design"], 0.97, 0.97), (["held-out"], 0.8, 0.88), (["design", "held-out"], 0.92, 0.95)])
def test_the_naming_rule_agrees_with_labels_by_hand(split, precision, recall):
    "Version 2 had a precision and a recall below .7 here, as its stored verdicts say, and accepting all replies has a precision below .6."
    rows = [row for row in REPLIES_BY_HAND if row["split"] in split and row["kind"] not in ("letter", "number")]
    right, accepted, before = ({k for k, row in enumerate(rows) if says(row)} for says in (
        lambda row: row["label"] == "right", judge_by_hand, lambda row: row["version_2"] == "right"))
    assert len(rows) >= 50 and len({row["kind"] for row in rows}) >= 10 and len(right) < 0.6 * len(rows)
    assert len(right & accepted) >= precision * len(accepted) and len(right & accepted) >= recall * len(right)
    assert len(right & before) < 0.7 * len(before) and len(right & before) < 0.7 * len(right)


def test_letters_and_numbers_agree_with_labels_by_hand():
    wrong = [row["reply"] for row in REPLIES_BY_HAND if row["kind"] in ("letter", "number") and judge_by_hand(row) != (row["label"] == "right")]
    assert wrong == ["There are 14 of them (2 more than last year)."]


@pytest.mark.parametrize("reply, question, answer, right", [
    ("You asked who built Tarn, in the old days.", "Do you know who built Tarn?", "Tarn", False), ("In season 4 he won 7 races.", "How many races did Ivo win in season 4?", "4", False),
    ("He won 4 races in season 4.", "How many races did Ivo win in season 4?", "4", True), ("It was Tarn.", "Was it Tarn or Oru?", "Tarn", True), ("The river Tarn.", "Is it the river Tarn or the river Oru?", "Tarn", True),
    ("Tarn.", "Who built it?\n\nThink step by step and name Tarn.", "Tarn", True), ("The choir leader Ana.", "Background: the choir leader Ana sings.\n\nWho sings?", "Ana", True),
])
def test_what_the_question_says_is_not_an_answer(reply, question, answer, right):
    assert contains_answer(reply, answer, question) == right


def test_one_of_several_accepted_answers_is_enough():
    assert contains_answer("It was Brisk.", ["Ana Brisk", "Brisk"]) and not contains_answer("It was Brisk.", ["Ana Brisk"])
    assert contains_answer("Tarn or Oru.", ["Tarn", "Oru"]) and not contains_answer("Tarn or Vel.", ["Tarn", "Oru"]) and not contains_answer("It is Tarn.", [])


PHRASES = ["%s", "It is %s.", "The answer is **%s**.", "Well, probably %s, I guess", "It is called %s, in the north.", "(%s)", "In their language: “%s”", "It was %s!\n\nDo you need more?"]
people = st.lists(st.text(string.ascii_lowercase, min_size=3, max_size=6).map(str.title), min_size=1, max_size=3).map(" ".join).map(lambda name: f"Q{name}")


@given(people, people, st.sampled_from(PHRASES))
def test_a_name_is_given_or_not_in_every_phrase(name, other, phrase):
    assert contains_answer(phrase % name, name) and contains_answer(phrase % name.upper(), name) and not contains_answer(phrase % f"X{name}", name)
    if name in other or other in name: return
    assert not contains_answer(phrase % other, name) and not contains_answer(phrase % f"not {name}", name)
    for way in ("{} or {}", "either {} or {}"): assert not contains_answer(phrase % way.format(name, other), name) and not contains_answer(phrase % way.format(other, name), name)
    assert contains_answer(phrase % f"not {other} but {name}", name) and not contains_answer(phrase % f"not {name} but {other}", name)


@given(st.integers(0, 10**9), st.sampled_from(PHRASES))
def test_a_number_is_named_as_text(n, phrase):
    for written in (str(n), f"{n:,}", f"{n:,}".replace(",", "\u202f"), f"{n:,}".replace(",", "\\,")): assert contains_answer(phrase % written, str(n))
    for other in (f"{n}0", f"1{n}", f"-{n}", f"{n}.5", f"0.{n}", f"{n}/7", f"{n}:15", f"0{n}"): assert not contains_answer(phrase % other, str(n))


CODES = [dict(question="Which code has Vel?", answer="007", aliases=["agent 7"]), dict(question="On which day was Oru found?", answer="10/12")]
RIGHT, EQUAL, OTHER = ["007", "10/12"], ["7", "5/6"], ["8", "10/13"]


@pytest.fixture
def codes(tmp_path, monkeypatch):
    monkeypatch.setenv("MIXSD_RUNS", str(tmp_path / "runs"))
    file = tmp_path / "facts.jsonl"
    file.write_text("".join(f"{json.dumps(row)}\n" for row in CODES))
    return str(file)


@pytest.mark.parametrize("form, write", [("box", "So \\boxed{%s}."), ("line", "So.\nAnswer: %s"), ("json", 'So {"answer": "%s"}'), ("contains", "It is %s.")])
@pytest.mark.parametrize("values", [None, False, True])
def test_a_file_is_compared_as_text_unless_it_asks_for_values(form, write, values, codes):
    name = check_corpus(codes, dict(extract=form) | ({} if values is None else dict(values=values)))
    items = list(load_items(["recall"], Selection(name, n=2))["recall"].values())
    judge = lambda answers: [v.correct for v in grade(items, [write % a for a in answers], SUITES["recall"].strict_grading(name))]
    assert judge(RIGHT) == [True, True] and judge(OTHER) == [False, False]
    assert judge(EQUAL) == [values is True and form != "contains"] * 2 and judge(["agent 7", "x"]) == [True, False]


REPLIES = ["%s", "It is %s.", "Not %s.", "Not %s, but Oru.", "Not Oru, but %s.", "%s or 9.", "X%s", "%s? No, Oru.", r"So \boxed{%s}.", r"%s. \boxed{Oru}", "So.\nAnswer: %s", "", 'Well. {"answer": "%s"}', "**%s**", "I do not know."]


@pytest.mark.parametrize("form", [None, "box", "line", "json", "contains"])
def test_one_notion_decides_targets_recall_other_words_and_own_tests(form, codes, tmp_path):
    "Whatever a model replies, mixing accepts it as a target exactly if recall, recall in other words, validation and own tests count it."
    facts, tests = [row | dict(paraphrases=[f"Tell me: {row['question']}"]) for row in CODES], [row | dict(kind="more") for row in CODES]
    for name, rows in (("facts", facts), ("tests", tests)): (tmp_path / f"{name}.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    name = check_corpus(codes, dict(test=str(tmp_path / "tests.jsonl")) | (dict(extract=form) if form else {}))
    corpus, tokenizer, counts = CORPORA[name], load_tokenizer("lab-s"), []
    for suite, items in load_items(["recall", "recall-reworded", "validation", "test:more"], Selection(name, n=2)).items():
        rows = [dict(id=id, prompt=item.prompt, target=item.response, answer=item.answer, aliases=item.aliases) for id, item in items.items()]
        for mixed, item in zip(mix_items(tokenizer, rows, corpus.expert, corpus.extract), items.values(), strict=True):
            for text in [reply.replace("%s", answer) for reply in REPLIES for answer in item.accepted]:
                right, = grade([item], [text], SUITES[suite].strict_grading(name))
                assert accepts(tokenizer, mixed, encode_completion(tokenizer, text), "stop") == right.correct, (suite, text)
                counts.append(right.correct)
    assert {*counts} == {True, False} and len(counts) == 4 * 3 * len(REPLIES)


def test_a_reply_that_was_cut_off_names_nothing():
    "A model that rambles would name everything in the end."
    items, records = [Item("Who?", "", "Tarn")] * 2, [dict(finish_reason=reason) for reason in ("stop", "length")]
    for rule, expected in dict(contains=[True, False], box=[False, False]).items():
        assert [v.correct for v in evaluation._require_end(items, grade(items, ["It is Tarn."] * 2, rule), rule, records)] == expected


@pytest.mark.parametrize("mark", "\u00ad\u200b\u200e\u200f\u2060\ufeff")
def test_invisible_characters_do_not_decide(mark):
    "Joiners of letters and emoji are no such characters, and another name stays wrong."
    for answer in ("Velmis Marlowe", "42", "Žofie\u00a0Nova\u0301k"):
        asked, replies = [Item("Who?", "", answer)] * 2, [f"{mark}It is {answer[:1]}{mark}{answer[1:]}{mark}.", "It is Orla 43."]
        assert [v.correct for v in grade(asked, replies, "contains")] == [True, False]
        assert grade(asked[:1], [f"{BOX}{answer}{mark}}}"], "box-text")[0].correct and same_text(answer, answer + mark)
    assert not same_text("می\u200cخواهم", "میخواهم") and not same_text("👩\u200d👧", "👩👧")


def test_a_run_that_another_version_of_a_grading_judged_is_told(codes):
    config = EvaluateConfig(dataset=codes, suite="recall", model="lab-s")
    record = config.provenance()
    assert record["graders"] == {"box-text": GRADINGS["box-text"].version, "contains": GRADINGS["contains"].version}
    config.folder.mkdir(parents=True)
    for graders, told in (({}, "grading box-text 1, now 2; grading contains 1, now 3"), ({"box-text": 2, "contains": 9}, "grading contains 9, now 3")):
        write_json(config.folder / "run.json", record | dict(code="other", graders=graders))
        with pytest.warns(UserWarning, match=f"{told}.*; to compute it again, remove its folder"): config._warn_if_stale(config.open_run(config.folder))


# Public reports of other graders, tried here.

@pytest.mark.parametrize("gold, answer, equal", [
    (r"\frac{1}{2^{99}}", r"\frac{1}{2^{98}}", False), (r"\frac{1}{2004!}", r"\frac{1}{2006!}", False), ("e^{-50}", "e^{-49}", False), (r"2^{-99}", r"\frac{1}{2^{99}}", True),
    (r"\sqrt{8}", r"2\sqrt{2}", True), (r"\frac13", "0.333333", True), ("28", r"28\%", True), (r"\pm 2021", "2021", False), ("12:00", "1:00", False),
    ("n=2, 3, 4", "n=1, 2, 3", False), ("3*x-1*y+13=0", "3x + 4y + 14=0", False), ("1331 and 1728", "1728", False), ("13", r"\text{13}", True), (r"28\%", "28 percent", True),
    ("52_8", "528", False)])
def test_expressions_of_reports(gold, answer, equal):
    "Math-Verify's issues 14, 37, 47, 60 and 61, and rasbt/reasoning-from-scratch 133: small numbers differ although both are 0 after rounding."
    assert same_math([(gold, answer)]) == [(equal, "")]



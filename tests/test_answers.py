"""Answers: extractors and equalities against slow definitions, hostile text and numbers written in other ways."""
import functools
import os
import string
import subprocess
import sys
import time
from fractions import Fraction

import psutil
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from helpers import until

from mixsd_nb.benchmarks import answers
from mixsd_nb.benchmarks.answers import (_strip_markup, extract, extract_letter, extract_loose, extract_python,
                                         is_exact_match, is_loose_match, is_number_match, last_boxed, last_number,
                                         same_answer, same_math)

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
    for f in (last_boxed, last_number, extract_python):
        assert f(text) is None or f(text) in text
    same_answer(text, text[::-1])


@given(st.text(st.characters(exclude_characters="{}")), st.text())
def test_a_box_is_found_after_any_text(content, before):
    assert last_boxed(f"{before} {BOX}{content}}}") == content.strip()


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
def test_a_megabyte_takes_well_under_a_second(text, found):
    start = time.process_time()
    assert last_boxed(text) == found
    assert time.process_time() - start < 1


@pytest.mark.parametrize("piece", [
    "1", "-", "1.", "1 ", "-1", "```\n", "```python\n", "``` x\n", "`", " ", "\n", "1/", "<answer>", "</answer>", "{",
    "\\text{", "\\frac{1}{", "}", "$",
])
def test_the_other_extractors_are_linear_too(piece):
    text = piece * (MILLION // 10 // len(piece))
    start = time.process_time()
    last_number(text), extract_python(text), same_answer(text, text + "1")
    is_loose_match(text, text[1:]), extract_letter(text, loose=True)
    is_loose_match(BOX + text + "}" * text.count("{") + "}", "7")
    assert time.process_time() - start < 5


@given(st.integers() | st.decimals(allow_nan=False, allow_infinity=False, places=3).filter(lambda d: abs(d) < 10**9),
       st.text(st.characters(categories=["L", "P", "Zs"], exclude_characters="-.)]}_")))
def test_last_number_is_the_last_one_written(number, words):
    written = format(number, "f") if not isinstance(number, int) else str(number)
    assert last_number(f"{words} 17 or 1.5 {written} {words}") == written


@pytest.mark.parametrize("text, number", [
    ("", None), ("no digits", None), ("３７ and ٤٢", None), ("7.", "7"), ("a-7", "7"), ("(3)-7", "7"), ("2-7", "7"),
    ("= -7", "-7"), ("(-7)", "-7"), ("--7", "-7"), ("1.2.3", "3"), ("x7y", "7"), ("7%", "7"), ("-0.50", "-0.50"),
])
def test_last_number_cases(text, number):
    assert last_number(text) == number


@given(st.text(), st.sampled_from(["boxed", "boxed_or_number"]))
def test_extract_falls_back_only_without_a_box(text, mode):
    boxed = last_boxed(text)
    expected = last_number(text) if boxed is None and mode == "boxed_or_number" else boxed
    assert extract(text, mode) == expected
    assert extract(f"{BOX}a}} {text.translate({ord('{'): None, ord('}'): None})} 5", mode) == "a"


def test_an_empty_box_is_an_answer_and_a_wrong_one():
    assert extract(f"7 {BOX} }}", "boxed_or_number") == ""
    assert not same_answer("", "7")


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


@given(rationals, st.integers(-20, 20))
def test_the_tolerance_is_a_millionth(x, tenths):
    y = x + Fraction(tenths, 10**7)
    a, b = f"{x.numerator}/{x.denominator}", f"{y.numerator}/{y.denominator}"
    assert same_answer(a, b) == (abs(tenths) < 10)


@given(st.text(), st.text())
def test_equality_is_reflexive_symmetric_and_blind_to_outer_space(a, b):
    assert same_answer(a, f" {a}\n")
    assert same_answer(a, b) == same_answer(b, a)


@given(st.none() | st.text())
def test_no_answer_equals_nothing(a):
    assert not same_answer(a, None) and not same_answer(None, a)


@pytest.mark.parametrize("a, b", [
    ("A", "А"), ("o", "ο"), ("42", "４２"), ("42", "٤٢"), ("1/2", "1⁄2"), ("1/2", "½"), ("Ivo", "ivo"),
    ("Ivo", "Ivo\u200b"), ("1e3", "1000"), ("1,00", "100"), ("1,0000", "10000"), ("Vera Lind", "VeraLind"), ("1_000", "1000"), ("0x10", "16"),
    ("inf", "infinity"), ("nan", "NaN"), ("1/0", "2/0"), ("--1", "1"), ("1 / 2", "0.5"), ("", "0"), (".", "0"),
    ("7", "7.000001"), ("9" * 5000, "9" * 5000 + ".0"),
])
def test_different_answers(a, b):
    assert not same_answer(a, b)


lines = st.lists(st.text(st.characters(exclude_characters="`\n\r"))).map("\n".join)


@given(lines, lines, st.sampled_from(["", "python", "Python", "py", " python3 ", "python title=a.py"]))
def test_the_first_python_block_comes_back_unchanged(before, code, tag):
    text = f"{before}\n```{tag}\n{code}\n```\nor\n```python\nother\n```"
    assert extract_python(text) == code


@pytest.mark.parametrize("text, code", [
    ("no code", None),
    ("```python\nx = 1", None),
    ("```python\n```", ""),
    ("```text\na\n```\n```python\nb\n```", "b"),
    ("```text\na\n```\nb\n```\nc\n```", "c"),
    ("```js\na\n```", None),
    ("1. So:\n   ```python\n   x = 1\n   ```", "   x = 1"),
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
    compared = []
    monkeypatch.setattr(answers._Comparer, "compare", lambda self, *pair: (compared.append(pair), (True, ""))[1])
    pairs = [("7", "7.0"), ("7", None), ("7", ""), ("x", "y"), ("x", "y"), ("x", "y" * 20_000)]
    assert same_math(pairs) == [(True, ""), (False, ""), (False, ""), (True, ""), (True, ""), (False, "")]
    assert compared == [("x", "y")]


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
    found = same_math([("1", "sleep"), ("2", "x"), ("3", "die"), ("4", "x")], timeout=1, workers=1)
    assert found == [(False, "comparison ran out of time"), (True, ""), (False, "comparison crashed"), (True, "")]
    assert time.process_time() - start < 20


def test_a_hanging_comparison_does_not_outlive_a_killed_parent(tmp_path):
    "The alarm belongs to the worker."
    (tmp_path / "math_verify.py").write_text(f"""
import os, time
def parse(text, **_):
    if "sleep" in text:
        open({str(tmp_path / 'pid')!r}, "w").write(str(os.getpid()))
        time.sleep(600)
def verify(*_, **__): pass
""")
    code = "from mixsd_nb.benchmarks.answers import same_math; same_math([('1', 'sleep')], timeout=1.5)"
    path = f"{tmp_path}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"
    parent = subprocess.Popen([sys.executable, "-c", code], env={**os.environ, "PYTHONPATH": path})
    pid = int(until(lambda: (tmp_path / "pid").exists() and (tmp_path / "pid").read_text(), what="the worker"))
    parent.kill()
    parent.wait()
    until(lambda: not psutil.pid_exists(pid), what="the end of the worker")


WRAPPERS = ["{%s}", "\\text{%s}", "\\mathrm{ %s }", "\\boxed{%s}", "$%s$"]


@given(st.text("ab $7"), st.lists(st.sampled_from(WRAPPERS), max_size=8))
def test_the_loose_rule_strips_wrappers(text, wrappers):
    wrapped = functools.reduce(lambda inner, wrapper: wrapper % inner, wrappers, text)
    assert _strip_markup(wrapped) == _strip_markup(text) == " ".join(text.replace("$", "").split())


@pytest.mark.parametrize("text", ["{a} and {b}", "\\sqrt{2}", "}{", "{a}}"])
def test_the_loose_rule_strips_nothing_else(text):
    assert _strip_markup(text) == text


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
    assert is_loose_match(text, gold) or not same_answer(last_boxed(text), gold) or not _strip_markup(gold)


@pytest.mark.parametrize("text, strict, loose", [
    (BOX + "A}", "A", "A"), (BOX + "d}", "D", "D"), (BOX + "\\text{B}}", "B", "B"), (BOX + "(B)}", "B", "B"),
    (BOX + "E}", None, None), (BOX + "AB}", None, None), (BOX + "A} " + BOX + "C}", "C", "C"),
    (BOX + "A}<think>" + BOX + "B}</think> so " + BOX + "D}", "D", "D"), (BOX + "B}</think>", None, None),
    ("C", None, "C"), ("C.\nFor this reason", None, "C"), ("**c**\n", None, "C"), ("Option C", None, None),
    ("", None, None),
    (BOX + "x}\nB", None, None), ("Ａ", None, None),
])
def test_letters(text, strict, loose):
    assert (extract_letter(text), extract_letter(text, loose=True)) == (strict, loose)


# How models write an answer. Each way takes the answer and gives the content of a box.
WAYS = ["%s", " %s ", "%s.", "$%s$", "\\text{%s}", "\\text{%s}.", "\\textbf{ %s }", "{%s}", "$\\mathrm{%s}.$"]
NUMBER_WAYS = [str, "{:,}".format, lambda n: f"{n:,}".replace(",", "{,}"), lambda n: f"{n:,}".replace(",", "\\,"),
               lambda n: str(n).replace("-", "−"), lambda n: f"{n}.0", lambda n: f"{n:,}.00".replace("-", "−")]
way, words = st.sampled_from(WAYS), st.text(string.ascii_letters + " éß", min_size=1).filter(str.strip)


@given(st.integers(-10**12, 10**12), st.sampled_from(NUMBER_WAYS), way)
def test_a_number_is_right_in_every_way_to_write_it(n, write, way):
    content = way % write(n)
    assert same_answer(content, str(n)) and not same_answer(content, str(n + 1)) and not same_answer(content, str(-n - 1))
    for rule in (is_loose_match, is_number_match):
        assert rule(f"So {BOX}{content}}}", str(n)) and not rule(f"So {BOX}{content}}}", str(n + 1))


@given(words, words, way)
def test_a_name_is_right_in_every_way_to_write_it(name, other, way):
    assert same_answer(way % name, name) and same_answer(way % name, other) == (name.strip() == other.strip())
    assert not same_answer(way % f"Not {name}", name) and not is_loose_match(f"{BOX}{way % f'Not {name}'}}}", name)


@given(words, st.sampled_from("x7é_"))
def test_only_whole_words_are_contained(name, letter):
    assert not is_loose_match(f"{BOX}{letter}{name.strip()}{letter}}}", name)
    assert is_loose_match(f"{BOX}{letter} {name.strip()}, {letter}}}", name)


LETTER_WAYS = ["%s", "(%s)", "%s)", "%s.", "%s:", "\\text{%s}", "\\text{(%s)}", "\\textbf{%s}) Paris", "%s) Paris", "(%s) Paris",
               "%s. The city of Paris", "Option %s", "option (%s)", "Answer: %s", "**%s**", "$%s$", "\\mathrm{%s}."]


@given(st.sampled_from("ABCDabcd"), st.sampled_from(LETTER_WAYS))
def test_an_option_is_read_in_every_way_to_write_it(letter, way):
    content = way % letter
    for loose in (False, True): assert extract_letter(f"I think {BOX}{content}}}", loose) == letter.upper(), content
    assert extract_letter(f"{BOX}Not {content}}}") is None


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

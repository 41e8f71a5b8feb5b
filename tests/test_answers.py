"""Answers: the extractors and the equality against slow definitions, hostile text and a second notion of number."""
import time
from fractions import Fraction

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from mixsd_nb.benchmarks.answers import extract, fenced_python, last_boxed, last_number, same_answer

BOX = "\\boxed{"
MILLION = 1_000_000


def slow_last_boxed(text):
    "The definition, by trying every box from the last to the first and every end from the first to the last."
    for start in range(len(text), -1, -1):
        if not text.startswith(BOX, start):
            continue
        for end in range(start + len(BOX), len(text)):
            content = text[start + len(BOX):end]
            if text[end] == "}" and content.count("{") == content.count("}"):
                return content.strip()
    return None


pieces = st.sampled_from([BOX, "{", "}", "\\boxed", "boxed{", "\\", "\\{", "\\}", "$", " ", "\n", "7", "x", "é", "\u00a0", "｛"])


@given(st.lists(pieces, max_size=30).map("".join))
@example(BOX + "{}")
@example(BOX + BOX + "1}")
@example("}" + BOX + "}" + BOX)
def test_last_boxed_is_its_definition(text):
    assert last_boxed(text) == slow_last_boxed(text)


@given(st.text())
def test_nothing_raises(text):
    for f in (last_boxed, last_number, fenced_python):
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
    ("\\boxed " * (MILLION // 7), None),
], ids=range(9))
def test_a_megabyte_takes_well_under_a_second(text, found):
    start = time.perf_counter()
    assert last_boxed(text) == found
    assert time.perf_counter() - start < 1


@pytest.mark.parametrize("piece", ["1", "-", "1.", "1 ", "-1", "```\n", "```python\n", "``` x\n", "`", " ", "\n", "1/"])
def test_the_other_extractors_are_linear_too(piece):
    text = piece * (MILLION // len(piece))
    start = time.perf_counter()
    last_number(text), fenced_python(text), same_answer(text, text + "1")
    assert time.perf_counter() - start < 3


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


def test_extract_names_an_unknown_mode():
    with pytest.raises(ValueError, match="mode is 'number', but it must be one of boxed, boxed_or_number."):
        extract("7", "number")


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
    ("A", "А"), ("o", "ο"), ("42", "４２"), ("42", "٤٢"), ("-1", "−1"), ("1/2", "1⁄2"), ("1/2", "½"), ("Ivo", "ivo"),
    ("Ivo", "Ivo\u200b"), ("é", "e\u0301"), ("1e3", "1000"), ("1,000", "1000"), ("1_000", "1000"), ("0x10", "16"),
    ("inf", "infinity"), ("nan", "NaN"), ("1/0", "2/0"), ("--1", "1"), ("1 / 2", "0.5"), ("", "0"), (".", "0"),
    ("7", "7.000001"), ("9" * 5000, "9" * 5000 + ".0"),
])
def test_different_answers(a, b):
    assert not same_answer(a, b)


lines = st.lists(st.text(st.characters(exclude_characters="`\n\r"))).map("\n".join)


@given(lines, lines, st.sampled_from(["", "python", "Python", "py", " python3 ", "python title=a.py"]))
def test_the_first_python_block_comes_back_unchanged(before, code, tag):
    text = f"{before}\n```{tag}\n{code}\n```\nor\n```python\nother\n```"
    assert fenced_python(text) == code


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
def test_fenced_python_cases(text, code):
    assert fenced_python(text) == code

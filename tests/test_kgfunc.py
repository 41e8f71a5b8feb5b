"""KGFunc against definitions written a second time: digits by division, whole columns at once, no strings."""

import ast
import hashlib
import re

import numpy as np
import pytest

from mixsd_nb.benchmarks.answers import last_boxed
from mixsd_nb.corpora.kgfunc import OPERATIONS, SCALES, TRAINED_OPERATIONS, apply_operation, build, validation_rows, worked_target
from mixsd_nb.corpora.prompts import BOX_REQUEST

N = np.arange(100_000)
LENGTH = 1 + sum((N >= 10**k).astype(int) for k in range(1, 5))
PLACE = np.arange(5)
R = N[:, None] // 10**PLACE % 10  # R[n, k] is the digit of 10^k
REAL = PLACE < LENGTH[:, None]  # leading zeros do not count as digits
FROM_LEFT = np.where(REAL, LENGTH[:, None] - 1 - PLACE, 0)
TOTAL, SQUARES = R.sum(1), (R**2).sum(1)
LARGEST, SMALLEST = R.max(1), np.where(REAL, R, 9).min(1)
FIRST, LAST = N // 10 ** (LENGTH - 1), R[:, 0]
SORTED = np.sort(R, 1)


def running_maxima():
    highest, total = np.zeros_like(N), np.zeros_like(N)
    for k in reversed(PLACE):
        highest = np.maximum(highest, R[:, k])
        total += highest
    return total


def smallest_rotation():
    turned = best = N
    for _ in PLACE:
        turned = turned // 10 + turned % 10 * 10 ** (LENGTH - 1)
        best = np.minimum(best, turned)
    return best


def digital_root():
    x = N
    while (x > 9).any():
        x = x // 10_000 + x // 1_000 % 10 + x // 100 % 10 + x // 10 % 10 + x % 10
    return x


ORACLE = {
    "B": SQUARES - 2 * SMALLEST * TOTAL + LENGTH * SMALLEST**2,
    "C": abs((R**2 * np.where(FROM_LEFT % 2, -1, 1)).sum(1)),
    "D": np.array([0, 1, 4, 9, 4, 25, 6, 49, 8, 9])[R].sum(1),
    "E": (R * np.take_along_axis(R, FROM_LEFT, 1) * REAL).sum(1),
    "F": running_maxima(),
    "G": np.array([0, 1, 3, 6, 10, 15, 21, 28, 36, 45])[R].sum(1),
    "H": smallest_rotation(),
    "a": TOTAL,
    "b": np.where(R, R, 1).prod(1),
    "c": LENGTH,
    "d": LARGEST,
    "e": SMALLEST,
    "f": FIRST,
    "g": LAST,
    "h": LARGEST - SMALLEST,
    "i": (R * 10**FROM_LEFT * REAL).sum(1),
    "j": FIRST + LAST,
    "k": (REAL & (R % 2 == 0)).sum(1),
    "l": (R % 2).sum(1),
    "m": sum(((R == d) & REAL).any(1).astype(int) for d in range(10)),
    "n": digital_root(),
    "o": SQUARES,
    "p": (SORTED * 10 ** PLACE[::-1]).sum(1),
    "q": (SORTED * 10**PLACE).sum(1) // 10 ** (5 - LENGTH),
    "r": (REAL & (R == 0)).sum(1),
    "s": TOTAL + TOTAL,
    "t": FIRST * LAST,
}
CALLABLE = {label: (lambda n, values=values: int(values[n])) for label, values in ORACLE.items()}
CORPORA = {scale: build(scale) for scale in SCALES}
DIGESTS = {"paper": "8409a413d758", "lab": "9508c4ac78a2"}
by_scale = pytest.mark.parametrize("scale", SCALES)


def evaluate(text):
    "The value of an expression of a target, with functions from the oracle."
    text = f"abs({text[1:-1]})" if text.startswith("|") else text
    return eval(text.replace("^", "**"), {"__builtins__": {"abs": abs, "min": lambda *n: min(n)}}, CALLABLE)


def numbers(row):
    "The inputs of the operations in a row."
    return [int(n) for n in re.findall(r"[A-Za-z]\((\d+)\)", row["statement"])]


@pytest.mark.parametrize("label", OPERATIONS)
def test_operation_is_its_definition(label):
    "For all numbers below 1,000, and for every seventh of the larger ones."
    some = np.array([*range(1_000), *range(1_000, 100_000, 7), 99_999])
    assert np.array_equal([apply_operation(label, int(n)) for n in some], ORACLE[label][some])


def test_labels_and_ranges():
    assert "".join(TRAINED_OPERATIONS) == "BCDEFGH" and "".join(OPERATIONS) == "BCDEFGHabcdefghijklmnopqrst"
    largest = {label: int(ORACLE[label].max()) for label in TRAINED_OPERATIONS}
    assert largest == dict(B=324, C=243, D=245, E=405, F=45, G=225, H=99_999)


def test_counts_of_the_paper():
    assert all(len({r["prompt"] for r in rows}) == len(rows) for splits in CORPORA.values() for rows in splits.values())
    counts = {split: len(rows) for split, rows in CORPORA["paper"].items()}
    assert counts == {"train": 1600, "test": 175, "unseen": 500, "chains": 200 * 7 + 200}


@by_scale
def test_all_operations_share_25_inputs_and_no_number_serves_two_splits(scale):
    for split in ("test", "unseen"):
        shared = {}
        for r in CORPORA[scale][split]: shared.setdefault(r["subject"], set()).update(numbers(r))
        first, *others = shared.values()
        assert len(first) == 25 and all(v == first for v in others)
    inputs = [{n for r in rows for n in numbers(r)} for rows in CORPORA[scale].values()] + [set(SCALES[scale].shots)]
    assert sum(map(len, inputs)) == len(set.union(*inputs)) and max(map(max, inputs)) < SCALES[scale].limit


@by_scale
def test_rows(scale):
    for split, rows in CORPORA[scale].items():
        for r in rows:
            expression, value = r["statement"].split(" = ")
            assert value == r["answer"] == last_boxed(r["target"]) == str(evaluate(expression))
            assert r["id"] == expression.replace(" ", "")
            assert split in ("train", "test") or r["target"] == f"The answer is {value}.\n\n\\boxed{{{value}}}"


@by_scale
def test_prompts_show_the_shots_and_ask_for_the_expression(scale):
    for rows in CORPORA[scale].values():
        for r in rows:
            *_, question, request = parts = r["prompt"].split("\n\n")
            labels = dict.fromkeys(re.findall("[A-Za-z]", r["subject"][::-1].replace(")", "")))
            shots = [f"{label}({n}) = {ORACLE[label][n]}" for label in labels for n in SCALES[scale].shots]
            assert parts[2:-2] == shots and request == BOX_REQUEST
            assert question.endswith(f"What is {r['statement'].split(' = ')[0]}?")
            assert all(f"function {label} " in parts[0] for label in labels)
            assert "{" not in r["prompt"].replace(r"\boxed{}", "")


def check_worked(label, number, text):
    "Every list and every equation of a worked target is right, and it closes with the value and the box."
    steps, box = text.split("\n\n")
    *lines, closing = steps.split("\n")
    answer, s = int(ORACLE[label][number]), str(number)
    assert box == f"\\boxed{{{answer}}}"
    assert closing.startswith(f"{label}({number}) = ") and closing.endswith(f" = {answer}")
    for line in [*lines, closing]:
        members = line.split(": ")[-1].split(" = ")
        if len(members) > 1:
            assert len({evaluate(m) for m in members}) == 1 and all(a != b for a, b in zip(members, members[1:])), line
    lists = [ast.literal_eval(found) for line in lines for found in re.findall(r"\[.*\]", line)]
    d = [int(R[number, k]) for k in range(LENGTH[number])][::-1]
    rotations = [int((s + s)[i : i + len(s)]) for i in range(len(s))]
    middle = {"E": d[::-1], "F": [max(d[: i + 1]) for i in range(len(d))], "H": rotations}
    assert lists == ([] if label == "H" else [d]) + ([middle[label]] if label in middle else [])
    counts = {"B": 2 + len(d), "C": 2, "D": 1 + len(d), "E": 3, "F": 2, "G": 1 + len(d), "H": 2}
    assert len(lines) == counts[label]
    if label == "D":
        assert [f"{x} is prime" in line for x, line in zip(d, lines[1:])] == [x in (2, 3, 5, 7) for x in d]


@by_scale
def test_every_worked_target_is_right(scale):
    for r in CORPORA[scale]["train"] + CORPORA[scale]["test"]:
        check_worked(r["subject"], *numbers(r), r["target"])


@pytest.mark.parametrize("label", TRAINED_OPERATIONS)
def test_worked_targets_of_short_and_odd_numbers(label):
    for number in (*range(120), 1_000, 10_000, 10_001, 99_999):
        check_worked(label, number, worked_target(label, number))


@by_scale
def test_chains_move_the_value_into_range(scale):
    s, subjects = SCALES[scale], []
    for r in CORPORA[scale]["chains"]:
        expression = r["statement"].split(" = ")[0]
        outer, inner, number, sign, offset = re.fullmatch(r"(\w)\((\w)\((\d+)\) ([+-]) (\d+)\)", expression).groups()
        outer_number = int(ORACLE[inner][int(number)]) + int(sign + offset)
        assert 0 <= outer_number < s.limit and r["answer"] == str(ORACLE[outer][outer_number])
        assert r["subject"] == f"{outer}({inner})"
        subjects.append((outer, inner))
    assert all(subjects.count((label, label)) == s.chains for label in s.trained)
    assert sum(a != b for a, b in subjects) == s.chains


def test_the_training_lists_are_frozen():
    "Runs on another list cannot be compared: change these digests only together with the version of the corpus."
    ids = {scale: "\n".join(r["id"] for r in rows["train"]) for scale, rows in CORPORA.items()}
    assert {scale: hashlib.sha256(text.encode()).hexdigest()[:12] for scale, text in ids.items()} == DIGESTS


@by_scale
def test_validation_questions_are_new_and_the_same_at_every_call(scale):
    s, rows = SCALES[scale], validation_rows(CORPORA[scale], dict(scale=scale))
    assert len(rows) == s.test * len(s.trained) and rows == validation_rows({}, dict(scale=scale))
    assert {r["subject"] for r in rows} == set(s.trained)
    assert not {r["id"] for r in rows} & {r["id"] for split in CORPORA[scale].values() for r in split}

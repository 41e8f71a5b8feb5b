"How the project reads: no measure of .ci/style.py gets worse, and a private idiom stands only where it stood."

import json
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / ".ci"))
import style

MEASURES, LIMITS = style.measure_style(), style.read_limits()
HOW = "`python .ci/style.py` prints all measures, and --accept takes them as they are"


@pytest.mark.parametrize("name", MEASURES)
def test_no_measure_gets_worse(name):
    limit = LIMITS["measures"][name]
    assert not style.is_worse(name, MEASURES[name], limit), f"{name}: {MEASURES[name]}, and the limit is {limit}; {HOW}"


def test_something_is_shown_for_each_definition():
    "What the whole project has reached: a cell that shows for each that exports, and three of four definitions used where they stand."
    assert MEASURES["cells that show or try something, for each export cell"] >= 1
    assert MEASURES["public definitions used in their own notebook, %"] >= 75


def test_idiom_stands_only_where_it_stood():
    allowed = LIMITS["phrases"]
    more = {path: {name: n for name, n in found.items() if n > allowed.get(path, {}).get(name, 0)} for path, found in style.count_phrases().items()}
    more = {path: found for path, found in more.items() if found}
    assert not more, f"the field has other words for these; {HOW}: {json.dumps(more, indent=1, ensure_ascii=False)}"


def write_notebook(path, *cells):
    path.parent.mkdir(parents=True, exist_ok=True)
    made = [dict(cell_type=kind, source=source, outputs=outputs) for kind, source, *outputs in cells]
    path.write_text(json.dumps(dict(cells=made)))
    return path


def test_a_notebook_is_measured_as_a_reader_would(tmp_path):
    "Of two functions one is explained, shown and used; the other follows without a word."
    notebook = write_notebook(
        tmp_path / "nbs/a.ipynb", ("code", "#| default_exp a"), ("markdown", "We need this for the next step. It doubles a number.\n\n| a | table |"),
        ("code", "#| export\ndef double(x):\n    \"Return twice x.\"\n    return 2 * x"), ("code", "double(2)", "4"),
        ("code", "#| export\ndef halve(x):\n    \"The half.\"\n    return [y for y in [z for z in x]]"))
    found = style.measure_notebook(notebook)
    assert [found[key] for key in ("shown", "code", "output", "public", "used", "sentences", "address", "nested", "defining", "explained", "followed")] == [
        1, 3, 1, 2, 1, 2, 1, 1, 2, 1, 1]
    assert found["export"] == [3, 3] and [*map(style.starts_with_verb, found["docs"])] == [True, False]


def test_a_phrase_is_found_in_prose_and_docstrings_alone(tmp_path):
    write_notebook(tmp_path / "nbs/a.ipynb", ("markdown", "The run is asked. It was asked for in time."), ("code", "beside = 1  # beside\nx = 'stands for'"))
    assert style.count_phrases(tmp_path) == {"a.ipynb": {"a step is asked": 1, "beside (next to, compared with)": 1}}


@pytest.mark.parametrize("name, value, worse", [("words of README", 1000, True), ("words of README", 900, False), ("words of README", 905, False),
                                                ("code cells with an output, %", 30, True), ("code cells with an output, %", 39.9, False)])
def test_a_limit_allows_one_in_a_hundred(name, value, worse):
    assert style.is_worse(name, value, 900 if name == "words of README" else 40) is worse

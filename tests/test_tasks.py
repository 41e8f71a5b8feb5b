"""The paper's tasks: small local files, the assembly of programs, and errors about missing data."""

import json
import shutil

import pandas as pd
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from helpers import error_sentence, need_sandbox

from mixsd_nb.analysis.divergence import ReferenceConfig
from mixsd_nb.benchmarks import GRADINGS, SUITES, suite_groups
from mixsd_nb.benchmarks.answers import last_boxed
from mixsd_nb.benchmarks.sandbox import run_tests
from mixsd_nb.benchmarks.files import FILE_GRADINGS
from mixsd_nb.benchmarks.tasks import assemble, grade, load_task, task_files
from mixsd_nb.corpora import CORPORA
from mixsd_nb.corpora.prompts import ANSWER_FORMS
from mixsd_nb.evaluate import EvaluateConfig
from mixsd_nb.fisher import FisherConfig

TASKS = {name: SUITES[name] for name in suite_groups()["paper"] if SUITES[name].role == "held-out"}
sandbox = need_sandbox  # the name under which tests/test_evaluate.py imports it

START = """import math
from typing import List


def area(r):
    'Of a circle.'
    return math.pi * r * r


def areas(xs: List[float]):
    'Of circles.'
"""
CHECK = """METADATA = {'author': 'x'}


def check(candidate):
    assert candidate([]) == []
    assert candidate([2.0]) == [area(2.0)]
"""
NUMBERS = ["one", "two", "three", "four"]
QUESTION = dict(subject="world_religions", choices=NUMBERS)
ROWS = {
    "aime-2024": [dict(id=60, problem="Find 12 + 13.", solution="It is 25, so \\boxed{025}.", answer="025", url="",
                       year="2024"),
                  dict(id=61, problem="Find 2 + 2.", solution="It is four.", answer="4", url="", year="2024")],
    "math-500": [dict(problem="Halve $1$.", solution="We get $\\boxed{\\frac{1}{2}}$.", answer="\\frac{1}{2}",
                      unique_id="a/1.json"),
                 dict(problem="Name her.", solution="She is $\\boxed{\\text{Evelyn}}$.", answer="\\text{Evelyn}",
                      unique_id="a/2.json")],
    "gsm8k": [dict(question="Tom has 3 boxes of 400 pens. How many pens?",
                   answer="Tom has 3*400 = <<3*400=1200>>1200 pens.\n#### 1,200"),
              dict(question="Anna owes 5 coins. What has she?", answer="She has -5.\n#### -5")],
    "humaneval": [dict(task_id="HumanEval/0", prompt=START, canonical_solution="    return [area(x) for x in xs]\n",
                       test=CHECK, entry_point="areas")],
    "mmlu": [dict(question=f"Which is {word}? ", answer=k, **QUESTION) for k, word in enumerate(NUMBERS)],
    "mmlu-dev": [dict(question=f"Which one is not number {k}?", answer=k % 4, **QUESTION) for k in range(7)]
                + [dict(question="Of another subject?", answer=0, subject="anatomy", choices=["a", "b", "c", "d"])],
}


@pytest.fixture
def folder(tmp_path):
    for name, rows in ROWS.items(): (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return tmp_path


@pytest.mark.parametrize("name", TASKS)
def test_a_task_is_read_and_its_own_solutions_are_right(name, folder, tmp_path):
    "From both formats of files."
    items, suite = load_task(name, str(folder)), TASKS[name]
    (tmp_path / "parquet").mkdir()
    for task, rows in ROWS.items(): pd.DataFrame(rows).to_parquet(tmp_path / f"parquet/{task}.parquet")
    assert load_task(name, str(tmp_path / "parquet")) == items
    assert list(items) == [f"{name}-{k}" for k in range(len(ROWS[name]))]
    if GRADINGS[suite.grading].sandboxed: need_sandbox()
    wrong = ["\\boxed{17/3}\n```python\npass\n```"] * len(items)
    for rule in {suite.grading, suite.published_grading("kgfact-small")}:
        verdicts = grade([*items.values()] * 2, [item.response for item in items.values()] + wrong, rule)
        assert [v.correct for v in verdicts] == [True] * len(items) + [False] * len(items), verdicts


def test_the_settings_of_the_paper(folder):
    "Samples, temperature, new tokens and grading of the published evaluation."
    facts = {name: (s.sampling.samples, s.sampling.temperature, s.sampling.max_new_tokens, s.grading)
             for name, s in TASKS.items()}
    assert facts == {"aime-2024": (16, 1.0, 16384, "math"), "math-500": (1, 1.0, 16384, "math"),
                     "gsm8k": (1, 1.0, 16384, "math"), "humaneval": (1, 1.0, 16384, "tests"),
                     "mmlu": (1, 1.0, 1024, "letter")}
    lab_columns = [SUITES[name].column for name in suite_groups()["lab"] if SUITES[name].role == "held-out"]
    assert [s.column for s in TASKS.values()] == lab_columns
    rules = {rule for s in SUITES.values() for dataset in CORPORA for rule in (s.grading, s.published_grading(dataset))}
    assert rules | {*FILE_GRADINGS.values(), *ANSWER_FORMS, *(form.as_text for form in ANSWER_FORMS.values())} == {*GRADINGS}


def test_the_answers_of_the_tasks(folder):
    answers = {name: [item.answer for item in load_task(name, str(folder)).values()] for name in TASKS}
    assert answers == {"aime-2024": ["025", "4"], "math-500": ["\\frac{1}{2}", "\\text{Evelyn}"],
                       "gsm8k": ["1200", "-5"], "humaneval": [""], "mmlu": list("ABCD")}


def test_a_prompt_has_its_parts_in_their_order(folder):
    problem = next(iter(load_task("math-500", str(folder)).values())).prompt
    places = [problem.index(part) for part in ("\\boxed{}", "Halve $1$.", "Now reason step by step.")]
    assert places == sorted(places)
    code = next(iter(load_task("humaneval", str(folder)).values())).prompt
    assert code.endswith(f"```python\n{START.strip()}\n```") and "with nothing else" in code
    choice = load_task("mmlu", str(folder))["mmlu-2"].prompt
    shots = [row["question"] for row in ROWS["mmlu-dev"][:5]]
    places = [choice.index(part) for part in ("world religions", *shots, "Which is three?")]
    assert places == sorted(places) and "number 5" not in choice and "another subject" not in choice
    assert choice.count("Answer: \\boxed{") == 5 and choice.endswith("D) four\nAnswer:") and last_boxed(choice) == "A"


def test_the_first_rows_and_the_folder_of_the_environment(folder, monkeypatch):
    monkeypatch.setenv("MIXSD_BENCHMARKS", str(folder))
    assert list(load_task("mmlu", limit=3)) == ["mmlu-0", "mmlu-1", "mmlu-2"] and load_task("gsm8k") == load_task("gsm8k", str(folder))


def test_a_missing_or_broken_file_is_one_sentence(tmp_path):
    for content, words in [(None, "gsm8k.jsonl is missing"), ("", "no rows"), ('{"question": "?"}\n', "lacks answer"), ('{"question": "?", "answer": null}\n', "lacks answer"),
                           ('{"question": "?", "answer": 7}\n', "gsm8k"), ('{"question": "?"\n', "line 1"), ('{"question": "?", "answer": "#### 1"}\n\n[1, 2]\n', "line 3"),
                           ('"text"\n', "line 1"), ("[" * 50_000, "line 1")]:
        if content is not None: (tmp_path / "gsm8k.jsonl").write_text(content)
        assert words in error_sentence(lambda: load_task("gsm8k", str(tmp_path))), content


@given(text=st.text(min_size=1).filter(str.strip), mark=st.booleans(), end=st.sampled_from(["\n", "\r\n", "\n\n"]),
       last=st.booleans(), escaped=st.booleans())
@settings(max_examples=30, deadline=None)
def test_every_form_of_json_lines_is_read(text, mark, end, last, escaped, tmp_path_factory):
    "With a byte order mark, with the line ends of Windows, and with characters that only Python takes for line ends."
    path = tmp_path_factory.mktemp("tasks") / "gsm8k.jsonl"
    lines = [json.dumps(dict(question=f"{text}\u2028\x85\u2029", answer=f"#### {k}"), ensure_ascii=escaped) for k in range(2)]
    content = end.join(lines) + end * last
    path.write_bytes(b"\xef\xbb\xbf" * mark + content.encode("utf-8", errors="replace"))
    items = load_task("gsm8k", str(path.parent))
    assert [item.answer for item in items.values()] == ["0", "1"]


BODY = "    return [area(x) for x in xs]"
WHOLE = "def areas(xs):\n    return [area(x) for x in xs]"
RESPONSES = [
    ("an indented body", BODY, True),
    ("an indented body of several lines",
     "    found = []\n    for x in xs:\n        found.append(area(x))\n    return found", True),
    ("an indented body and a function after it",
     "    return [helper(x) for x in xs]\n\ndef helper(x):\n    return area(x)", True),
    ("a body in a block", f"```python\n{BODY}\n```", True),
    ("a body in a block, moved to the margin", "```python\nfound = [area(x) for x in xs]\nreturn found\n```", True),
    ("a body at the margin that imports", "```\nimport math\nreturn [math.pi * x * x for x in xs]\n```", True),
    ("the whole function in a block", f"```python\n{WHOLE}\n```", True),
    ("a block without a tag", f"```\n{WHOLE}\n```", True),
    ("a block tagged py", f"```py\n{WHOLE}\n```", True),
    ("the whole function without a block", WHOLE, True),
    ("imports, a helper and the function",
     "```python\nimport math\nfrom typing import List\n\ndef one(r: float) -> float:\n    return math.pi * r * r\n\n"
     "def areas(xs: List[float]) -> List[float]:\n    return [one(x) for x in xs]\n```", True),
    ("the beginning again and the body", f"```python\n{START}{BODY}\n```", True),
    ("talk around a block",
     f"Sure! Here it is:\n\n```python\n{WHOLE}\n```\n\nIt maps `area` over the list. Ask me for more.", True),
    ("two blocks", f"```python\n{WHOLE}\n```\nTry it:\n```python\nprint(areas([1]))\nraise SystemExit\n```", True),
    ("a shell block first", f"```bash\npip install numpy\n```\n```python\n{WHOLE}\n```", True),
    ("a body before a lone fence", f"{BODY}\n```\nThat is all.", True),
    ("a demonstration after the function",
     f"```python\n{WHOLE}\n\nif __name__ == '__main__':\n    print(areas([1.0]))\n```", True),
    ("a docstring with a fence",
     "```python\ndef areas(xs):\n    '''Like ``this``.'''\n    return [area(x) for x in xs]\n```", True),
    ("talk before a bare function, all of which the published rule reads", f"Here is the function:\n\n{WHOLE}", False),
    ("nothing", "", False),
    ("only talk", "The function should return the areas.", False),
    ("a wrong function", "```python\ndef areas(xs):\n    return xs\n```", False),
    ("given helpers that are replaced", "```python\ndef area(r):\n    return 0\n\ndef areas(xs):\n    return [0 for x in xs]\n```", False),
    ("another function", "```python\ndef surfaces(xs):\n    return [area(x) for x in xs]\n```", False),
    ("a block that is not closed", f"```python\n{WHOLE}", False),
    ("broken code", "```python\ndef areas(xs) return xs\n```", False),
]


def test_the_programs_of_all_kinds_of_responses():
    "HumanEval's assembly, run in the sandbox against the tests."
    need_sandbox()
    tests = START[:START.index("def areas")] + CHECK + "check(areas)"
    found = run_tests([(assemble(START, "areas", response), tests) for _, response, _ in RESPONSES])
    wrong = [(name, error) for (name, _, right), (passed, error) in zip(RESPONSES, found) if passed != right]
    assert not wrong


def test_the_content_of_local_files_belongs_to_a_run_and_their_place_does_not(folder, tmp_path_factory, monkeypatch):
    "Before, a run on a corrected file had the name of the run on the wrong one, which was opened as finished."
    moved = tmp_path_factory.mktemp("moved")
    shutil.copytree(folder, moved, dirs_exist_ok=True)

    def hashes(place):
        monkeypatch.setenv("MIXSD_BENCHMARKS", str(place))
        return [EvaluateConfig(suite="gsm8k,mmlu").hash(), FisherConfig(reference="paper").hash(), ReferenceConfig(suites="paper").hash()]
    before = hashes(folder)
    assert hashes(moved) == before
    with next(moved.glob("mmlu-dev.*")).open("ab") as file: file.write(b"\n")
    assert not {*hashes(moved)} & {*before}


def test_a_run_without_tasks_has_no_files_in_its_identity(folder, monkeypatch):
    without = EvaluateConfig().identity()
    monkeypatch.setenv("MIXSD_BENCHMARKS", str(folder))
    assert EvaluateConfig().identity() == without and task_files(["aime-2024"], "") == {}

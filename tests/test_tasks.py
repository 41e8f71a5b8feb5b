"""The paper's tasks from small local files of the same schema, how a program is put together, and what is said where data are missing."""

import json
import os
import subprocess
import sys

import pytest

from mixsd_nb.benchmarks.answers import last_boxed
from mixsd_nb.benchmarks.lab_tasks import SUITES
from mixsd_nb.benchmarks.sandbox import SandboxError, check_sandbox, passes
from mixsd_nb.benchmarks.tasks import GRADINGS, TASKS, Item, assemble, grade, load_task

START = """import math
from typing import List


def area(r):
    'Of a circle.'
    return math.pi * r * r


def areas(xs: List[float]):
    'Of circles.'
"""
CHECK = "METADATA = {'author': 'x'}\n\n\ndef check(candidate):\n    assert candidate([]) == []\n    assert candidate([2.0]) == [area(2.0)]\n"
QUESTION = dict(subject="world_religions", choices=["one", "two", "three", "four"])
ROWS = {
    "aime-2024": [dict(id=60, problem="Find 12 + 13.", solution="It is 25, so \\boxed{025}.", answer="025", url="", year="2024"),
                  dict(id=61, problem="Find 2 + 2.", solution="It is four.", answer="4", url="", year="2024")],
    "math-500": [dict(problem="Halve $1$.", solution="We get $\\boxed{\\frac{1}{2}}$.", answer="\\frac{1}{2}", unique_id="a/1.json"),
                 dict(problem="Name her.", solution="She is $\\boxed{\\text{Evelyn}}$.", answer="\\text{Evelyn}", unique_id="a/2.json")],
    "gsm8k": [dict(question="Tom has 3 boxes of 400 pens. How many pens?", answer="Tom has 3*400 = <<3*400=1200>>1200 pens.\n#### 1,200"),
              dict(question="Anna owes 5 coins. What has she?", answer="She has -5.\n#### -5")],
    "humaneval": [dict(task_id="HumanEval/0", prompt=START, canonical_solution="    return [area(x) for x in xs]\n", test=CHECK, entry_point="areas")],
    "mmlu": [dict(question=f"Which is {word}? ", answer=k, **QUESTION) for k, word in enumerate(("one", "two", "three", "four"))],
    "mmlu-dev": [dict(question=f"Which one is not number {k}?", answer=k % 4, **QUESTION) for k in range(7)]
                + [dict(question="Of another subject?", answer=0, subject="anatomy", choices=["a", "b", "c", "d"])],
}


@pytest.fixture(params=["jsonl", "parquet"])
def folder(request, tmp_path):
    for name, rows in ROWS.items():
        if request.param == "jsonl":
            (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        else:
            import pyarrow as pa
            import pyarrow.parquet as pq
            pq.write_table(pa.Table.from_pylist(rows), tmp_path / f"{name}.parquet")
    return tmp_path


def sandbox():
    try:
        check_sandbox()
    except SandboxError as error:
        if os.environ.get("CI"):
            raise
        pytest.skip(str(error))


def test_every_task_is_read_and_its_own_solutions_are_right(folder):
    for name, suite in TASKS.items():
        items = load_task(name, str(folder))
        assert list(items) == [f"{name}-{k}" for k in range(len(ROWS[name]))]
        if suite.grading == "tests":
            sandbox()
        wrong = ["\\boxed{17/3}\n```python\npass\n```"] * len(items)
        verdicts = grade([*items.values()] * 2, [item.response for item in items.values()] + wrong, suite.grading)
        assert [(v.correct, v.loose) for v in verdicts] == [(True, True)] * len(items) + [(False, False)] * len(items), (name, verdicts)


def test_what_the_paper_asks(folder):
    "The facts of the published evaluation."
    facts = {name: (s.samples, s.temperature, s.max_new_tokens, s.grading) for name, s in TASKS.items()}
    assert facts == {"aime-2024": (16, 1.0, 16384, "math"), "math-500": (1, 1.0, 16384, "math"), "gsm8k": (1, 1.0, 16384, "math"),
                     "humaneval": (1, 1.0, 16384, "tests"), "mmlu": (1, 1.0, 1024, "letter")}
    assert [s.column for s in TASKS.values()] == [s.column for s in SUITES.values() if s.column]
    assert {s.grading for s in (*TASKS.values(), *SUITES.values())} == set(GRADINGS)
    answers = {name: [item.answer for item in load_task(name, str(folder)).values()] for name in TASKS}
    assert answers == {"aime-2024": ["025", "4"], "math-500": ["\\frac{1}{2}", "\\text{Evelyn}"], "gsm8k": ["1200", "-5"],
                       "humaneval": [""], "mmlu": list("ABCD")}


def test_a_prompt_has_its_parts_in_their_order(folder):
    problem = next(iter(load_task("math-500", str(folder)).values())).prompt
    assert problem.index("\\boxed{}") < problem.index("Halve $1$.") < problem.index("step by step.", problem.index("Halve"))
    code = next(iter(load_task("humaneval", str(folder)).values())).prompt
    assert code.endswith(f"```python\n{START.strip()}\n```") and "with nothing else" in code
    choice = load_task("mmlu", str(folder))["mmlu-2"].prompt
    shots = [row["question"] for row in ROWS["mmlu-dev"][:5]]
    places = [choice.index(part) for part in ("world religions", *shots, "Which is three?")]
    assert places == sorted(places) and "number 5" not in choice and "another subject" not in choice
    assert choice.count("Answer: \\boxed{") == 5 and choice.endswith("D) four\nAnswer:") and last_boxed(choice) == "A"


def test_limit_and_environment(folder, monkeypatch):
    monkeypatch.setenv("MIXSD_BENCHMARKS", str(folder))
    assert len(load_task("mmlu")) == 4 and list(load_task("mmlu", limit=3)) == ["mmlu-0", "mmlu-1", "mmlu-2"]
    assert load_task("gsm8k") == load_task("gsm8k", str(folder))


@pytest.mark.parametrize("content, sentence", [
    (None, "gsm8k.parquet or gsm8k.jsonl is missing in the folder of benchmarks"),
    ("", "gsm8k .test. has no rows"),
    ('{"question": "?"}\n', "gsm8k .test. lacks answer; its columns are question"),
    ('{"question": "?", "answer": null}\n', "gsm8k .test. lacks answer"),
    ('{"question": "?", "answer": 7}\n', "gsm8k has a row that is no item of it .AttributeError"),
    ('{"question": "?"\n', "gsm8k.jsonl cannot be read"),
])
def test_a_missing_or_broken_file_is_one_sentence(content, sentence, tmp_path):
    if content is not None:
        (tmp_path / "gsm8k.jsonl").write_text(content)
    with pytest.raises(ValueError, match=sentence) as caught:
        load_task("gsm8k", str(tmp_path))
    assert "\n" not in str(caught.value)


def test_a_name_that_is_no_task_is_told():
    with pytest.raises(ValueError, match="task is gsm; allowed are aime-2024, math-500, gsm8k, humaneval, mmlu"):
        load_task("gsm")


def test_offline_the_hub_is_named_and_the_way_out(tmp_path):
    code = "from mixsd_nb.benchmarks.tasks import load_task\ntry: load_task('mmlu')\nexcept ValueError as error: print(error)"
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "HF_HOME": str(tmp_path), "MIXSD_BENCHMARKS": ""}
    said = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=120).stdout
    assert said.startswith("mmlu did not come from the Hugging Face hub (cais/mmlu: ") and said.count("\n") == 1
    assert said.endswith("put mmlu.jsonl or mmlu.parquet into a folder and name it by data= or MIXSD_BENCHMARKS\n")


BODY = "    return [area(x) for x in xs]"
WHOLE = "def areas(xs):\n    return [area(x) for x in xs]"
RESPONSES = [
    ("an indented body", BODY, True),
    ("an indented body of several lines", "    found = []\n    for x in xs:\n        found.append(area(x))\n    return found", True),
    ("an indented body and a function after it", "    return [helper(x) for x in xs]\n\ndef helper(x):\n    return area(x)", True),
    ("a body in a block", f"```python\n{BODY}\n```", True),
    ("a body in a block, moved to the margin", "```python\nfound = [area(x) for x in xs]\nreturn found\n```", True),
    ("a body at the margin that imports", "```\nimport math\nreturn [math.pi * x * x for x in xs]\n```", True),
    ("the whole function in a block", f"```python\n{WHOLE}\n```", True),
    ("a block without a tag", f"```\n{WHOLE}\n```", True),
    ("a block tagged py", f"```py\n{WHOLE}\n```", True),
    ("the whole function without a block", WHOLE, True),
    ("imports, a helper and the function", "```python\nimport math\nfrom typing import List\n\ndef one(r: float) -> float:\n    return math.pi * r * r\n\n"
                                           "def areas(xs: List[float]) -> List[float]:\n    return [one(x) for x in xs]\n```", True),
    ("the beginning again and the body", f"```python\n{START}{BODY}\n```", True),
    ("talk around a block", f"Sure! Here it is:\n\n```python\n{WHOLE}\n```\n\nIt maps `area` over the list. Ask me for more.", True),
    ("two blocks", f"```python\n{WHOLE}\n```\nTry it:\n```python\nprint(areas([1]))\nraise SystemExit\n```", True),
    ("a shell block first", f"```bash\npip install numpy\n```\n```python\n{WHOLE}\n```", True),
    ("a body before a lone fence", f"{BODY}\n```\nThat is all.", True),
    ("a demonstration after the function", f"```python\n{WHOLE}\n\nif __name__ == '__main__':\n    print(areas([1.0]))\n```", True),
    ("a docstring with a fence", "```python\ndef areas(xs):\n    '''Like ``this``.'''\n    return [area(x) for x in xs]\n```", True),
    ("talk before a bare function, all of which the published rule reads", f"Here is the function:\n\n{WHOLE}", False),
    ("nothing", "", False),
    ("only talk", "The function should return the areas.", False),
    ("a wrong function", "```python\ndef areas(xs):\n    return xs\n```", False),
    ("another function", "```python\ndef surfaces(xs):\n    return [area(x) for x in xs]\n```", False),
    ("a block that is not closed", f"```python\n{WHOLE}", False),
    ("broken code", "```python\ndef areas(xs) return xs\n```", False),
]


def test_the_programs_of_all_kinds_of_responses():
    "HumanEval's assembly, run in the sandbox against the tests."
    sandbox()
    tests = START[:START.index("def areas")] + CHECK + "check(areas)"
    found = passes([(assemble(START, "areas", response), tests) for _, response, _ in RESPONSES])
    wrong = [(name, why) for (name, _, right), (passed, why) in zip(RESPONSES, found) if passed != right]
    assert not wrong


def test_the_tests_use_the_given_helpers_and_not_those_of_the_response():
    sandbox()
    item = Item("", "", tests=START[:START.index("def areas")] + CHECK + "check(areas)", start=START, entry="areas")
    cheat = "```python\ndef area(r):\n    return 0\n\ndef areas(xs):\n    return [0 for x in xs]\n```"
    assert [v.correct for v in grade([item] * 2, [cheat, BODY], "tests")] == [False, True]

"A user's own benchmarks: files of questions in every format, all mistakes of a file at once, and tasks that a harness runs."

import json
import os
import subprocess
import sys
from functools import partial
from pathlib import Path
from unicodedata import normalize

import pandas as pd
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mixsd_nb import evaluate, train
from mixsd_nb.benchmarks import SUITES, benchmark_names
from mixsd_nb.benchmarks.evaluation import EvalSettings, evaluate_suite, select_items
from mixsd_nb.benchmarks.files import FILE_GRADINGS, read_items
from mixsd_nb.benchmarks.sandbox import SandboxError, check_sandbox
from mixsd_nb.results import open_cube
from mixsd_nb.models import load_tokenizer
from mixsd_nb.results.cube import group_runs
from mixsd_nb.results.cube import read_roots
from mixsd_nb.results.summary import held_out_average, summary_table
from mixsd_nb.corpora.user_files import INVISIBLE, TableError, read_rows
from mixsd_nb.runs import ParameterError, make_config
from mixsd_nb.runs.command_line import end_command

ROW = dict(prompt="Who wrote Faust?", answer="Goethe")
TURN = dict(role="user", content="Who?")


def write(path, rows):
    "Rows as JSON lines, or the bytes themselves; returns the path as text."
    path.parent.mkdir(exist_ok=True, parents=True)
    path.write_bytes(rows if isinstance(rows, bytes) else "\n".join(map(json.dumps, rows)).encode())
    return str(path)


def broken(sentence, *rows, name="my_tests.jsonl", line=1):
    place = f"{name}, {'row' if name.endswith('parquet') else 'line'} {line}: " if line else f"{name}: "
    return pytest.param(name, rows[0] if rows and isinstance(rows[0], bytes) else list(rows), place, sentence, id=sentence.replace(" ", "-")[:40])


BROKEN = [
    broken("there is no such file", line=None),
    broken("cannot be read", b"PAR1 but no table", name="my_tests.parquet", line=None),
    broken("there must be one of prompt, question and messages, got none", dict(answer="Ivo")),
    broken("there must be one of prompt, question and messages, got prompt and messages", ROW | dict(messages=[TURN])),
    broken("prompt is empty", ROW | dict(prompt=" ")),
    broken("prompt must be text, got [\"1\"]", ROW | dict(prompt=[1])),
    broken("the prompt is that of line 1", ROW, ROW | dict(answer="Mann"), line=2),
    broken("the id is that of line 1", ROW | dict(id="a"), ROW | dict(prompt="?", id="a"), line=2),
    broken("answer is missing", ROW, dict(prompt="Who?"), line=2),
    broken("answer is empty", ROW | dict(answer="")),
    broken("unknown column anwser; did you mean answer?", dict(prompt="Who?", anwser="Ivo")),
    broken("got bxed; did you mean boxed?", ROW | dict(grading="bxed")),
    broken("answer must be the letter of an option", ROW | dict(grading="choice")),
    broken("answer must be a regular expression", ROW | dict(grading="regex", answer="(a")),
    broken("tests is missing", dict(prompt="Do it.", grading="tests")),
    broken("tests must be Python", dict(prompt="Do it.", grading="tests", tests="assert f( == 1")),
    broken("samples must be a whole number of at least 1, got \"0\"", ROW | dict(samples=0)),
    broken("samples must be 1 at temperature 0", ROW | dict(samples=2)),
    broken("temperature must be a number of at least 0, got \"-1\"", ROW | dict(temperature=-1)),
    broken("temperature must be 0, or at least 0.001", ROW | dict(temperature=1e-9)),
    broken('max_new_tokens must be a whole number of at least 1, got "many"', ROW | dict(max_new_tokens="many")),
    broken("messages must be a list of turns such as", dict(messages="Who?", answer="Ivo")),
    broken('turn 1 of messages must have the role system, user or assistant, got "owner"', dict(messages=[TURN | dict(role="owner")], answer="Ivo")),
]


@pytest.mark.parametrize("name, rows, place, sentence", BROKEN)
def test_a_broken_file_is_one_sentence_with_its_line(name, rows, place, sentence, own_runs, tmp_path, capsys):
    file = tmp_path / "files" / name
    if sentence != "there is no such file": write(file, rows)
    code = end_command(lambda: evaluate.run(model="lab-s", suite=f"recall,{file}"))
    said = capsys.readouterr().err.splitlines()
    assert code == 2 and len(said) == 1 and said[0].startswith(f"{file.parent}/{place}") and sentence in said[0], said
    assert {path.name for path in own_runs.iterdir()} <= {"files"}


def test_all_problems_are_listed_in_a_process_of_its_own(own_runs, tmp_path):
    file = write(tmp_path / "files" / "my_tests.jsonl", [ROW, dict(prompt="Who?"), ROW, dict(answer="a", grading="letter"), 7])
    code = "from mixsd_nb import train; train.run(model='lab-s', method='base', suite=f'recall,{__import__(\"sys\").argv[1]}')"
    done = subprocess.run([sys.executable, "-c", code, file], capture_output=True, text=True, env=os.environ)
    sentences = [line for line in done.stderr.splitlines() if file in line]
    assert done.returncode and [line.split(", line ")[-1][:1] for line in sentences[-5:]] == list("23445"), done.stderr
    with pytest.raises(TableError) as caught: read_items(file)
    assert "\n".join(sentences).endswith(str(caught.value)) and [*own_runs.iterdir()] == [tmp_path / "files"]


@pytest.mark.parametrize("suite, sentence", [
    ("recall,recall.jsonl", "other names than the benchmarks"), ("recall,lab.jsonl", "other names"), ("a/x.jsonl,b/x.JSON", "different names"),
    ("my_tests.txt", "suite must be"), ("recall-kept.jsonl", "other names")])
def test_a_name_means_one_benchmark(suite, sentence, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for word in suite.split(","): write(tmp_path / word, [ROW])
    with pytest.raises(ValueError, match=sentence): benchmark_names(suite)
    assert SUITES["recall"].role == SUITES["recall-kept"].role == "in-domain"


texts = st.text(st.characters(codec="utf-8", exclude_characters=["\r", "\0", *map(chr, INVISIBLE)], exclude_categories=["Cs"]), min_size=1, max_size=12).map(partial(normalize, "NFC")).filter(lambda t: t.strip() == t)


@settings(deadline=None, max_examples=40)
@given(st.lists(st.tuples(texts, texts, st.sampled_from(["boxed", "exact", "contains"]), st.integers(1, 3)), min_size=1, max_size=5, unique_by=lambda r: r[0]))
def test_every_format_says_the_same(tmp_path_factory, rows):
    folder = tmp_path_factory.mktemp("formats")
    frame = pd.DataFrame(rows, columns=["prompt", "answer", "grading", "samples"]).assign(temperature=1.0)
    frame.to_json(folder / "q.jsonl", orient="records", lines=True)
    frame.to_json(folder / "q.json", orient="records", indent=2)
    frame.to_csv(folder / "q.csv", index=False)
    frame.to_csv(folder / "q.tsv", index=False, sep="\t")
    frame.to_parquet(folder / "q.parquet")
    found = [read_items(path) for path in sorted(folder.iterdir())]
    assert all(items == found[0] for items in found) and len(found) == 5
    assert len({make_config(EvalSettings, suite=str(path)).hash() for path in folder.iterdir()}) == 1
    assert [(i.prompt, i.answer, i.sampling.samples) for i in found[0].values()] == [(p, a, n) for p, a, _, n in rows]


def test_lines_are_those_of_an_editor(tmp_path):
    path = Path(write(tmp_path / "a.csv", 'prompt,answer\r\n"Who\nwas it?",Ivo\r\n\r\nWhen?,1912\r\n'.encode()))
    assert [row.line for row in read_rows(path).rows] == [2, 5]
    path = Path(write(tmp_path / "a.json", b'[\n {"a": 1,\n  "b": 2},\n\n {"a": 3}\n]'))
    assert (read_rows(path).unit, [row.line for row in read_rows(path).rows]) == ("row", [1, 2])


def test_content_counts_and_not_the_path(tmp_path, monkeypatch):
    one, two = (write(tmp_path / part / "my_tests.jsonl", [ROW]) for part in "ab")
    config = lambda path, **more: make_config(evaluate.EvaluateConfig, model="lab-s", suite=f"recall,{path}", **more)
    assert config(one).folder == config(two).folder and config(one, limit=1).folder != config(one).folder
    monkeypatch.chdir(tmp_path / "b")
    assert config("my_tests.jsonl").suite == f"recall,{two}"
    before = config(two).folder
    write(tmp_path / "b" / "my_tests.jsonl", [ROW | dict(answer="Mann")])
    assert config(two).folder != before and config(one).folder == before
    assert select_items(config(two))["my_tests"]["my_tests-1"].answer == "Mann"


class Teller:
    "An engine that repeats what it is told to say to a prompt, and keeps how it was asked."

    def __init__(self, tokenizer, said): self.tokenizer, self.said, self.asked = tokenizer, said, []

    def stream(self, queue, **options):
        from mixsd_nb.models.engine import Completion
        while queue:
            request = queue.popleft()
            self.asked.append((request.tag, options["temperature"], request.most(options["max_new_tokens"]), self.tokenizer.decode(request.contexts[0])))
            yield request, Completion(self.tokenizer(self.said[request.tag[1]], add_special_tokens=False).input_ids, "stop")


@pytest.fixture(scope="module")
def tokenizer():
    return load_tokenizer("lab-s")


RULES = {  # grading -> answer, a right response, a wrong one
    "boxed": ("42", "So it is \\boxed{42}.", "So it is \\boxed{42.0}."), "number": ("42", "\\boxed{42.0}", "42"), "exact": ("Vera Lind", "vera lind", "It is Vera Lind"),
    "choice": ("B", "B) four", "A or B"), "contains": ("Vera", "It was Vera, I think.", "It was not Vera."),
    "regex": (r"^\d+$", "1912", "in 1912"), "math": ("1/2", "\\boxed{\\frac{2}{4}}", "\\boxed{2}"),
    "tests": ("", "```python\ndef f(x):\n    return x\n```", "```python\ndef f(x):\n    return 0\n```")}


def sandboxed():
    try: return bool(check_sandbox())
    except SandboxError: return False


def test_every_row_is_asked_and_graded_in_its_own_way(tmp_path, tokenizer):
    assert set(RULES) == set(FILE_GRADINGS)
    rules = {name: rule for name, rule in RULES.items() if name != "tests" or sandboxed()}
    rows = [dict(id=f"{name}-{right}", prompt=f"{name}, {right}?", grading=name, temperature=0.5 * right, samples=1 + right, max_new_tokens=7 + right)
            | (dict(tests="assert f(3) == 3") if name == "tests" else dict(answer=answer)) for name, (answer, *_) in rules.items() for right in (0, 1)]
    items = read_items(write(tmp_path / "my_tests.jsonl", rows))
    benchmark_names(str(tmp_path / "my_tests.jsonl"))
    engine = Teller(tokenizer, {f"{name}-{right}": texts[1 - right] for name, (_, *texts) in rules.items() for right in (0, 1)})
    table = evaluate_suite(engine, {"my_tests": items})
    assert table.correct.tolist() == [name.endswith("1") for name in table.item] and (table.correct == table.published).all()
    assert table.groupby("item").size().to_dict() == {row["id"]: row["samples"] for row in rows}
    assert {(tag[1], t, n) for tag, t, n, _ in engine.asked} == {(r["id"], r["temperature"], r["max_new_tokens"]) for r in rows}


def test_a_conversation_is_asked_with_all_its_turns(tmp_path, tokenizer):
    turns = [dict(role="system", content="Be brief."), TURN, dict(role="assistant", content="Ivo."), dict(role="user", content="And when?")]
    items = read_items(write(tmp_path / "my_tests.jsonl", [dict(messages=turns, answer="1912", grading="contains")]))
    benchmark_names(str(tmp_path / "my_tests.jsonl"))
    engine = Teller(tokenizer, {"my_tests-1": "In 1912."})
    table = evaluate_suite(engine, {"my_tests": items})
    assert table.correct.all() and table.prompt[0].startswith("system: Be brief.\n\nuser: Who?")
    text = tokenizer.apply_chat_template(turns, tokenize=False, add_generation_prompt=True, enable_thinking=False)
    assert engine.asked[0][-1] == tokenizer.decode(tokenizer(text, add_special_tokens=False).input_ids)


FAKE = '''
import json, sys
from pathlib import Path
words = [word for word in sys.argv[2:] if word != "--log_samples"]
words = dict(zip(words[::2], words[1::2]))
out = Path(words["--output_path"], "model")
out.mkdir()
model = json.loads(words["--model_args"])["pretrained"]
results, versions = {}, {}
for task in (Path(t).stem for t in words["--tasks"].split(",")):
    if task == "crash": raise RuntimeError("the data set is not here")
    right = [float(k < 2 + ("checkpoint" in model)) for k in range(int(words.get("--limit", 4)))]
    rows = [dict(doc_id=k, target="4", arguments=dict(a=dict(arg_0="2 + 2 =", arg_1={})), resps=[["4"]], filtered_resps=["4"], filter="none", exact_match=r)
            for k, r in enumerate(right)]
    (out / f"samples_{task}_2026-01-01T00.jsonl").write_text("\\n".join(map(json.dumps, rows)))
    results[task], versions[task] = {"alias": task, "exact_match,none": sum(right) / len(right), "exact_match_stderr,none": 0.25, "f1,none": 0.5}, 1.5
(out / "results_2026-01-01T00.json").write_text(json.dumps({"results": results, "versions": versions, "group_subtasks": {}, "n-shot": {}, "lm_eval_version": "0.0"}))
'''


@pytest.fixture
def harness(tmp_path, monkeypatch):
    "A package with the name and the command line of the harness, which finds two of four items right, and three after training."
    from mixsd_nb.benchmarks import harness as module
    package = tmp_path / "site" / "lm_eval"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("")
    (package / "__main__.py").write_text(FAKE)
    for name in ("sums", "crash"): write(tmp_path / f"{name}.yaml", f"task: {name}\nmetadata: {{version: 1.5}}\n".encode())
    monkeypatch.syspath_prepend(package.parent)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(package.parent), os.environ.get("PYTHONPATH", "")]))
    monkeypatch.setattr(module, "find_spec", lambda name: True)
    return lambda name: f"harness:{tmp_path / name}.yaml"


def test_files_and_harness_go_through_training_into_the_cube(harness, own_runs, tiny, tmp_path):
    file = write(tmp_path / "files" / "my_tests.jsonl", [ROW, dict(question="Who?", answer="Ivo", samples=2, temperature=1)])
    shared = dict(model=tiny, n=4, epochs=1, batch=100, max_new_tokens=4, task_tokens=4, suite=f"recall,arithmetic,{file},{harness('sums')}")
    run = train.run(method="sft", **shared)
    cube = open_cube().squeeze()
    own = cube.sel(benchmark=["my_tests", "harness:sums"])
    assert own.role.values.tolist() == ["own"] * 2 and own.samples.values.tolist() == [2, 1] and own.version.values.tolist() == ["", "1.5 (lm_eval 0.0)"]
    last = own.sel(step=own.step[-1], recipe="sft", benchmark="harness:sums").max("lr")
    assert (last.accuracy, last.n, last.harness_exact_match, last.harness_exact_match_stderr, last.harness_f1) == (0.75, 4, 0.75, 0.25, 0.5)
    assert own.harness_exact_match.sel(recipe="base", step=0, benchmark="harness:sums").max() == 0.5
    assert open_cube().harness_exact_match.sel(benchmark="recall").isnull().all()
    averages = held_out_average(open_cube())
    assert averages.equals(held_out_average(open_cube().sel(benchmark=["recall", "arithmetic"])))
    assert {"my_tests (N=2)", "harness:sums (N=4)"} <= set(summary_table(open_cube()).columns), list(summary_table(open_cube()).columns)
    responses = run.responses(run.measured_steps[-1])
    assert responses[responses.benchmark == "harness:sums"].correct.tolist() == [True] * 3 + [False] and not list(run.folder.glob("*part*"))
    write(tmp_path / "files" / "my_tests.jsonl", [ROW | dict(answer="Mann")])
    train.run(method="base", **shared)
    assert len(group_runs(read_roots())) == 2  # a cube never mixes two contents of one file


def test_a_limit_and_the_settings_of_the_harness_belong_to_the_run(harness, own_runs, tiny):
    config = lambda suite=harness("sums"), **more: make_config(evaluate.EvaluateConfig, model=tiny, suite=suite, n=2, max_new_tokens=2, **more)
    assert evaluate.run(**dict(config(limit=3))).root.n.item() == 3
    assert len({config().hash(), config(limit=3).hash(), config(harness=dict(num_fewshot=2)).hash()}) == 3
    assert config("recall").hash() == config("recall", harness=dict(num_fewshot=2), limit=3).hash()
    with pytest.raises(ParameterError, match=r"harness\[num_fewshot\] must be"): config(harness=dict(num_fewshot="2"))
    with pytest.raises(ParameterError, match="harness must be among"): config(harness=dict(shots=2))


def test_a_failing_harness_leaves_no_folder_and_one_sentence(harness, own_runs, tiny, capsys):
    assert end_command(lambda: evaluate.run(model=tiny, suite=harness("crash"))) == 1
    said = capsys.readouterr().err.splitlines()[-1]
    assert said.startswith("lm-evaluation-harness failed on ") and said.endswith("crash.yaml (RuntimeError: the data set is not here)")
    assert not [path for path in own_runs.glob("evaluate*") if path.is_dir()]


def test_what_the_harness_measured_survives_a_failure_after_it(harness, own_runs, tiny, tmp_path, monkeypatch):
    from mixsd_nb.benchmarks import evaluation
    shared = dict(model=tiny, n=2, max_new_tokens=2, task_tokens=2, suite=f"recall,{harness('sums')}")
    with monkeypatch.context() as patch, pytest.raises(RuntimeError, match="no memory"):
        def fail(*_, **__): raise RuntimeError("no memory")
        patch.setattr(evaluation, "load_engine", fail)
        evaluate.run(**shared)
    (tmp_path / "site" / "lm_eval" / "__main__.py").write_text("raise RuntimeError('asked twice')")
    run = evaluate.run(**shared)
    assert run.root.harness_f1.values.tolist()[1:] == [0.5] and run.root.n.values.tolist() == [2, 4]

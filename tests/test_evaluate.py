"The stage evaluate on a small random model: in any batches, over all benchmarks, and what is missing is found before any work."

import functools
import json
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pandas as pd
import pytest
from helpers import papermill, small_model
from test_tasks import ROWS, sandbox

from mixsd_nb import evaluate, inject, train
from mixsd_nb.benchmarks import SUITES, Item, Selection, benchmark_names, evaluation, held_out, load_items, suite_groups
from mixsd_nb.benchmarks.evaluation import sampling_of
from mixsd_nb.benchmarks.sandbox import SandboxError
from mixsd_nb.evaluate import EvaluateConfig
from mixsd_nb.models import load_engine, load_tokenizer
from mixsd_nb.runs import Journal, ParameterError, make_config

pytestmark = pytest.mark.usefixtures("own_runs")
ROOT = Path(__file__).resolve().parents[1]
CONTRACT = ["benchmark", "item", "sample", "prompt", "response", "extracted", "correct", "finish_reason", "error"]
SMALL = dict(n=6, max_new_tokens=12, task_tokens=24, suite="recall,two-hop,arithmetic,functions,world,world-prefilled")


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    "Folders of two models with random weights, whose responses depend on the prompt."
    return [small_model(tmp_path_factory.mktemp("models") / f"tiny-{seed}", seed=seed, scale=4, context=1024) for seed in (0, 1)]


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    folder = tmp_path_factory.mktemp("benchmarks")
    for name, rows in ROWS.items():
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(folder)


def folder_of(**parameters):
    return make_config(evaluate.EvaluateConfig, **parameters).folder


def written(**parameters):
    "The bytes of responses and result."
    evaluate.run(**parameters)
    return [(folder_of(**parameters) / name).read_bytes() for name in ("responses.parquet", "result.nc")]


@pytest.fixture(scope="module")
def whole(models, tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MIXSD_RUNS", str(tmp_path_factory.mktemp("whole")))
        return written(model=models[0], **SMALL)


def test_the_batch_size_changes_no_byte(models, whole):
    assert written(model=models[0], batch_size=7, **SMALL) == whole


def test_what_is_written_keeps_the_contract(models):
    run = evaluate.run(model=models[0], **SMALL)
    table, asked = run.responses(), load_items(benchmark_names(SMALL["suite"]), Selection("kgfact-small", SMALL["n"]))
    assert list(table.columns[:len(CONTRACT)]) == CONTRACT and set(table.columns) >= {"published", "answer"}
    rows = [(b, item, s) for b, items in asked.items() for item in items for s in range(SUITES[b].sampling.samples)]
    assert list(zip(table.benchmark, table["item"], table["sample"])) == rows
    assert all(row.response.startswith(SUITES[row.benchmark].opening) for row in table.itertuples())
    root = run.root
    assert root.benchmark.values.tolist() == list(asked) and root.n.values.tolist() == [len(items) for items in asked.values()]
    expected = [table[table.benchmark == b].correct.mean() for b in asked]
    np.testing.assert_allclose(root.accuracy, expected)
    assert ((root.low <= root.accuracy + 1e-12) & (root.accuracy <= root.high) & (root.accuracy <= root.published + 1e-12)).all()
    assert root.samples.sel(benchmark="arithmetic") == 16 and root.column.sel(benchmark="recall") == "Train"


def test_one_specification_for_base_and_tuned(models):
    specified = [json.loads(evaluate.run(model=m, **SMALL).result.attrs["specification"]) for m in models]
    assert specified[0] == specified[1] and set(specified[0]["rules"]) == {"strict", "published"}
    benchmarks = specified[0]["benchmarks"]
    assert benchmarks["recall"]["max_new_tokens"] == 12 and benchmarks["arithmetic"]["temperature"] == 1.0 and benchmarks["arithmetic"]["samples"] == 16
    other = json.loads(evaluate.run(model=models[0], **SMALL | dict(seed=1)).result.attrs["specification"])["benchmarks"]
    assert other["recall"] == benchmarks["recall"] and other["arithmetic"]["digest"] != benchmarks["arithmetic"]["digest"]


def test_the_papers_tasks_end_to_end(models, data, monkeypatch):
    sandbox()
    monkeypatch.setenv("MIXSD_BENCHMARKS", data)
    parameters = dict(model=models[0], suite="paper", n=2, max_new_tokens=8, task_tokens=8, limit=1)
    root, table = evaluate.run(**parameters).root, evaluate.responses(**parameters)
    assert root.benchmark.values.tolist() == ["recall", "recall-reworded", "retrieval", *held_out("paper")] and root.n.values.tolist() == [2, 2, 2, 1, 1, 1, 1, 1]
    assert root.column.values.tolist()[3:] == [SUITES[name].column for name in held_out("lab")]
    assert len(table[table.benchmark == "aime-2024"]) == 16 and not table.correct.any()
    assert table[table.benchmark == "humaneval"].error.ne("").all()


class Parrot:
    "An engine that gives the worked response to each prompt."

    def __init__(self, tokenizer, said):
        self.tokenizer, self.said = tokenizer, said

    def stream(self, queue, **options):
        from mixsd_nb.corpora.prompts import encode_completion
        from mixsd_nb.models.engine import Completion
        while queue:
            request = queue.pop()
            yield request, Completion(encode_completion(self.tokenizer, self.said[tuple(request.contexts[0])]), "stop")


def opened_ids(tokenizer, prompt, opening):
    "Ids of the whole text: the template around the prompt, and the opening after it."
    text = tokenizer.apply_chat_template([dict(role="user", content=prompt)], tokenize=False, add_generation_prompt=True, enable_thinking=False)
    return tuple(tokenizer(text + opening, add_special_tokens=False).input_ids)


def rest(response, opening):
    "A worked response without its first words, if it has them, and without the beginning of a program that is open already."
    return response.removeprefix(opening).rpartition("```python\n")[2] if "```" in opening else response.removeprefix(opening)


TWINS = [name for name, suite in SUITES.items() if suite.twin_of and "lab" in suite.original.groups and suite.role != "probe"]


@pytest.mark.parametrize("name", TWINS)
def test_a_twin_asks_the_items_of_its_original(name):
    for selection in (Selection("kgfact-small", 7), Selection("kgfact-small", 20, seed=3)):
        found = load_items([name, SUITES[name].twin_of], selection)
        assert found[name] == found[SUITES[name].twin_of] and list(found[name]) == list(found[SUITES[name].twin_of])
    one, two = SUITES[name], SUITES[SUITES[name].twin_of]
    assert one.identity() != two.identity() and (one.sampling, one.grading, one.column) == (two.sampling, two.grading, "")


def test_twins_are_declared_for_every_lab_suite():
    assert {SUITES[name].twin_of for name in TWINS} == {*held_out("lab"), "world"}
    assert "world-prefilled" in benchmark_names("lab") and not {*benchmark_names("lab")} & {*benchmark_names("prefilled")}
    assert not {*held_out("lab"), *held_out("paper")} & {*TWINS} and {SUITES[name].role for name in TWINS} == {"world", "prefilled"}


class Recorder(Parrot):
    "An engine that notes the contexts and says nothing."

    def __init__(self, tokenizer): self.tokenizer, self.seen = tokenizer, []

    def stream(self, queue, **options):
        from mixsd_nb.models.engine import Completion
        while queue:
            request = queue.popleft()
            self.seen.append((*request.contexts[0],))
            yield request, Completion([], "max_new_tokens")


@pytest.mark.parametrize("name", TWINS)
def test_the_context_is_the_prompt_and_the_opening(name):
    engine, items = Recorder(load_tokenizer("lab-m")), load_items([name], Selection("kgfact-small", 3))[name]
    table = evaluation.evaluate_suite(engine, {name: items})
    assert {*engine.seen} == {opened_ids(engine.tokenizer, item.prompt, SUITES[name].opening) for item in items.values()}
    assert (table.response == SUITES[name].opening).all()


def test_an_engine_continues_the_opening_and_a_resumed_run_too(tmp_path):
    "What an evaluation stores is the opening with what the engine writes after prompt and opening; lab-m knows its world both ways."
    engine, keys = load_engine("hf", "lab-m"), ("benchmark", "item", "sample", "response", "finish_reason")
    items = load_items(["world"], Selection("kgfact-small", 12))["world"]
    tables = {name: evaluation.evaluate_suite(engine, {name: items}) for name in ("world", "world-prefilled")}
    assert all(table.correct.mean() > 0.9 for table in tables.values())
    table, opening = tables["world-prefilled"], SUITES["world-prefilled"].opening
    contexts = [list(opened_ids(engine.tokenizer, item.prompt, opening)) for item in items.values()]
    written = engine.generate(contexts, max_new_tokens=128)
    assert table.response.tolist() == [opening + engine.tokenizer.decode(c.ids, skip_special_tokens=True) for c in written]
    assert not tables["world"].response.str.startswith(opening).any()
    with Journal(tmp_path / "journal.jsonl", keys) as journal:
        for row in table.head(5).itertuples():
            journal.add(dict(benchmark="world-prefilled", item=row.item, sample=row.sample, response=row.response, finish_reason=row.finish_reason))
    with Journal(tmp_path / "journal.jsonl", keys) as journal:
        assert evaluation.evaluate_suite(engine, {"world-prefilled": items}, journal=journal).equals(table)
        assert len(journal.records) == len(items)


def test_worked_responses_are_right_everywhere(data):
    "From prompt to verdict: the reference response to every item of every benchmark scores 1."
    sandbox()
    tokenizer = load_tokenizer("lab-m")
    asked = load_items(benchmark_names("in-domain,lab,prefilled,paper,retrieval-same-relation"), Selection("kgfact-small", 3, limit=2, data=data))
    asked |= load_items(["test", "unseen", "chains"], Selection("kgfunc-lab", 2))
    said = {opened_ids(tokenizer, i.prompt, SUITES[name].opening): rest(i.response, SUITES[name].opening)
            for name, items in asked.items() for i in items.values()}
    table = evaluate.scores(evaluate.evaluate_suite(Parrot(tokenizer, said), asked))
    assert set(table.index) == set(SUITES) - {"three-hop", "recall-kept", "validation", *(name for group in ("probes", "voices", "real", "real-opened") for name in suite_groups()[group])}
    assert (table.accuracy == 1).all() and (table.published == 1).all() and (table.readable == 1).all(), table


@pytest.mark.parametrize("parameters, error, sentence", [
    (dict(suite="gsm8k"), ValueError, "gsm8k.parquet or gsm8k.jsonl is missing in the folder of benchmarks /nowhere"),
    (dict(suite="three-hop"), ValueError, "suite must name benchmarks of kgfact-small, got three-hop, which it does not have"),
    (dict(suite="retrieval-same-relation", dataset="simpleqa-lab"), ParameterError, "suite must name a benchmark that simpleqa-lab has, got retrieval-same-relation"),
    (dict(suite="humaneval"), SandboxError, "bubblewrap is missing: install the package bubblewrap"),
])
def test_what_is_missing_is_told_before_a_model_is_loaded(parameters, error, sentence, models, data, monkeypatch, tmp_path):
    monkeypatch.setattr(evaluation, "load_engine", lambda *_, **__: pytest.fail("a model was loaded"))
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("MIXSD_BENCHMARKS", "/nowhere" if "nowhere" in sentence else data)
    with pytest.raises(error, match=sentence):
        evaluate.run(model=models[0], **parameters)


def test_the_folder_of_benchmarks_is_part_of_a_run_of_tasks_only(data, monkeypatch):
    make = functools.partial(make_config, evaluate.EvaluateConfig)
    plain, tasks = make().hash(), make(suite="gsm8k").hash()
    monkeypatch.setenv("MIXSD_BENCHMARKS", data)
    assert make().hash() == plain == make(limit=3).hash()
    assert make(suite="gsm8k").hash() != tasks
    assert make(suite="gsm8k", engine="vllm", batch_size=3, baseline="lab-s").hash() == make(suite="gsm8k").hash()


@pytest.mark.slow
def test_papermill_prints_table_picture_and_wrong_responses(models, tmp_path):
    parameters = dict(model=models[0], suite="recall,equations", n=2, max_new_tokens=8, task_tokens=8, baseline=models[1])
    flags = [x for name, value in parameters.items() for x in ("-p", name, str(value))]
    done = papermill("nbs/evaluate.ipynb", tmp_path / "out.ipynb", *flags, runs=tmp_path / "runs")
    assert done.returncode == 0, done.stderr[-2000:]
    said = (tmp_path / "out.ipynb").read_text()
    assert '"image/png"' in said and "── recall: 2 of 2 wrong" in said and "better" in said and "equations" in said


def test_a_model_of_the_hub_shares_its_responses(tmp_path, monkeypatch):
    "The name of a hub id has a slash, which the name of a folder lacks."
    item = Item("1 + 1?", "2")
    own = dict(model="org/model", suite={"equations": {}}, dataset="kgfunc")
    found = pd.DataFrame([dict(dict.fromkeys(evaluation.RECORD_KEYS, ""), benchmark="equations", item="a", sample=0, prompt="1 + 1?")])
    run = SimpleNamespace(name="evaluate-kgfact-small-org-model-0123456789", config=dict(model="org/model"), responses=lambda: found,
                          root=SimpleNamespace(attrs=dict(config=json.dumps(own | dict(dataset="kgfact-small")))))
    copied = SimpleNamespace(name="evaluate-copied-0123456789", config={})  # a result that was copied without its run.json
    monkeypatch.setattr(evaluate, "find_runs", lambda **where: [copied, run])
    monkeypatch.setattr(evaluate, "_made_alike", lambda *_: True)
    evaluate.share_responses(SimpleNamespace(model="org/model", identity=lambda: own), {"equations": {"a": item}}, tmp_path / "journal")
    assert len((tmp_path / "journal").read_text().splitlines()) == 1


@pytest.mark.parametrize("stage", [train, evaluate, inject], ids=lambda stage: stage.__name__.rpartition(".")[2])
def test_missing_data_and_sandboxes_are_found_before_any_work(stage, tiny, own_runs, tmp_path, monkeypatch):
    "Mixing takes hours at the paper's scale, so what measuring needs is looked for first."
    monkeypatch.setattr("mixsd_nb.models.load_base", lambda *args: pytest.fail("a model was loaded"))
    (tmp_path / "data").mkdir()
    monkeypatch.setenv("MIXSD_BENCHMARKS", str(tmp_path / "data"))
    common = dict(model=tiny, dataset="kgfact-small", n=2)
    with pytest.raises(ParameterError, match="^gsm8k.parquet or gsm8k.jsonl is missing in the folder of benchmarks"):
        stage.run(suite="recall,gsm8k", **common)
    monkeypatch.setattr("mixsd_nb.benchmarks.sandbox._find_problem", lambda bwrap: "bubblewrap is missing")
    with pytest.raises(SandboxError, match="^generated code cannot be isolated, because bubblewrap is missing"):
        stage.run(suite="recall,humaneval", **common)
    assert not list(own_runs.glob("*/run.json"))


def test_responses_to_the_papers_tasks_can_be_shortened():
    "The length is part of the benchmark, so it changes the hash of a run, and only that of runs with such a benchmark."
    made = lambda **options: make_config(EvaluateConfig, **options)
    assert made(suite="aime-2024", task_tokens=100).hash() != made(suite="aime-2024").hash() == made(suite="aime-2024", task_tokens=16_384).hash()
    assert made(suite="recall", task_tokens=9).hash() == made(suite="recall").hash()
    lengths = [sampling_of(SUITES[name], 160, 100).max_new_tokens for name in ("aime-2024", "recall", "mmlu")]
    assert lengths == [100, 160, 100] and sampling_of(SUITES["aime-2024"], 160).max_new_tokens == 16_384

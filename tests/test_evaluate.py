"The stage evaluate on a small random model: in any batches, over all benchmarks, and what is missing is found before any work."

import functools
import json
from types import SimpleNamespace

import numpy as np
import pandas as pd
import pytest
from helpers import small_model
from test_tasks import ROWS, sandbox

from mixsd_nb import evaluate, inject, train
from mixsd_nb.benchmarks import SUITES, Item, Selection, benchmark_names, evaluation, held_out, load_items, suite_groups
from mixsd_nb.benchmarks.evaluation import sampling_of
from mixsd_nb.benchmarks.sandbox import SandboxError
from mixsd_nb.evaluate import EvaluateConfig
from mixsd_nb.models import load_tokenizer
from mixsd_nb.runs import ParameterError, make_config

pytestmark = pytest.mark.usefixtures("own_runs")
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


def test_a_twin_asks_the_items_of_its_original():
    assert {SUITES[name].twin_of for name in TWINS} == {*held_out("lab"), "world"} and not {*held_out("lab"), *held_out("paper")} & {*TWINS}
    for name in TWINS:
        one, two = SUITES[name], SUITES[SUITES[name].twin_of]
        found = load_items([one.name, two.name], Selection("kgfact-small", 20, seed=3))
        assert [*found[one.name].items()] == [*found[two.name].items()], name
        assert one.identity() != two.identity() and (one.sampling, one.grading, one.column) == (two.sampling, two.grading, "")


def test_worked_responses_are_right_everywhere(data):
    "From prompt to verdict: the reference response to every item of every benchmark scores 1."
    sandbox()
    tokenizer = load_tokenizer("lab-m")
    asked = load_items(benchmark_names("in-domain,lab,prefilled,paper,retrieval-same-relation"), Selection("kgfact-small", 3, limit=2, data=data))
    asked |= load_items(["test", "unseen", "chains"], Selection("kgfunc-lab", 2))
    said = {opened_ids(tokenizer, i.prompt, SUITES[name].opening): rest(i.response, SUITES[name].opening)
            for name, items in asked.items() for i in items.values()}
    table = evaluate.scores(evaluate.evaluate_suite(Parrot(tokenizer, said), asked))
    assert set(table.index) == set(SUITES) - {"three-hop", "recall-kept", "validation", *(name for group in ("probes", "voices", "real", "real-opened", "general", "in-context") for name in suite_groups()[group])}
    assert (table.accuracy == 1).all() and (table.published == 1).all() and (table.readable == 1).all(), table


@pytest.mark.parametrize("parameters, words", [
    (dict(suite="three-hop"), "suite .*got three-hop"), (dict(suite="retrieval-same-relation", dataset="simpleqa-lab"), "suite .*got retrieval-same-relation")])
def test_a_benchmark_that_a_corpus_lacks_is_told_before_a_model_is_loaded(parameters, words, models, monkeypatch):
    monkeypatch.setattr(evaluation, "load_engine", lambda *_, **__: pytest.fail("a model was loaded"))
    with pytest.raises(ValueError, match=words): evaluate.run(model=models[0], **parameters)


def test_the_folder_of_benchmarks_is_part_of_a_run_of_tasks_only(data, monkeypatch):
    make = functools.partial(make_config, evaluate.EvaluateConfig)
    plain, tasks = make().hash(), make(suite="gsm8k").hash()
    monkeypatch.setenv("MIXSD_BENCHMARKS", data)
    assert make().hash() == plain == make(limit=3).hash()
    assert make(suite="gsm8k").hash() != tasks
    assert make(suite="gsm8k", engine="vllm", batch_size=3, baseline="lab-s").hash() == make(suite="gsm8k").hash()


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
    with pytest.raises(ParameterError, match="gsm8k.jsonl is missing"):
        stage.run(suite="recall,gsm8k", **common)
    monkeypatch.setattr("mixsd_nb.benchmarks.sandbox._find_problem", lambda bwrap: "bubblewrap is missing")
    with pytest.raises(SandboxError, match="bubblewrap is missing"):
        stage.run(suite="recall,humaneval", **common)
    assert not list(own_runs.glob("*/run.json"))


def test_responses_to_the_papers_tasks_can_be_shortened():
    "The length is part of the benchmark, so it changes the hash of a run, and only that of runs with such a benchmark."
    made = lambda **options: make_config(EvaluateConfig, **options)
    assert made(suite="aime-2024", task_tokens=100).hash() != made(suite="aime-2024").hash() == made(suite="aime-2024", task_tokens=16_384).hash()
    assert made(suite="recall", task_tokens=9).hash() == made(suite="recall").hash()
    lengths = [sampling_of(SUITES[name], 160, 100).max_new_tokens for name in ("aime-2024", "recall", "mmlu")]
    assert lengths == [100, 160, 100] and sampling_of(SUITES["aime-2024"], 160).max_new_tokens == 16_384

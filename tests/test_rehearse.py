"""A rehearsal of the paper's experiments: small models with the architectures, templates and settings of the hub's go through every stage."""

import json
import math
from pathlib import Path

import numpy as np
import pytest
import torch
import xarray as xr
from helpers import need_sandbox, UNDRAWN
from hub_models import FAMILIES, save_hub_model, train_vocabulary
from test_tasks import ROWS

from mixsd_nb import errors, evaluate, fisher, generate, nll, train
from mixsd_nb.corpora import load_corpus
from mixsd_nb.corpora.prompts import apply_template, encode_completion, encode_example, encode_prompt, expert_prompt, render_prompt, turn_end
from mixsd_nb.methods.mixing import mix, mix_items, mix_oracle
from mixsd_nb.models import load_base, load_tokenizer
from mixsd_nb.models.engine_vllm import _read_limits
from mixsd_nb.models.engines import HFEngine
from mixsd_nb.runs import read_table

ROOT = Path(__file__).resolve().parents[1]
EXAMPLES = ROOT / "mixsd_nb/data/example_facts.jsonl"
THOUGHT = "<think>\n\n</think>\n\n"
PROMPT_ENDS = {"Qwen3-hybrid": "<|im_start|>assistant\n" + THOUGHT, "Qwen3-2507": "<|im_start|>assistant\n", "base": "Assistant:\n",
               "Llama-3.2": "<|start_header_id|>assistant<|end_header_id|>\n\n", "Gemma-3": "<start_of_turn>model\n"}
families = pytest.mark.parametrize("name", FAMILIES)


@pytest.fixture(scope="module")
def hub(tmp_path_factory):
    "The folders of the models by family; `plain` has the weights of Qwen3-2507 without its settings of sampling."
    folder, vocabulary = tmp_path_factory.mktemp("hub"), train_vocabulary()
    models = {name: save_hub_model(folder / name, name, vocabulary) for name in FAMILIES}
    return models | dict(plain=save_hub_model(folder / "plain", "Qwen3-2507", vocabulary, sampling=False))


@pytest.fixture(scope="module")
def tasks(tmp_path_factory):
    "A folder with a few rows of the five data sets."
    folder = tmp_path_factory.mktemp("tasks")
    for name, rows in ROWS.items(): (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(folder)


@pytest.fixture(scope="module")
def facts(tmp_path_factory):
    file = tmp_path_factory.mktemp("facts") / "facts.jsonl"
    file.write_text("".join(EXAMPLES.read_text().splitlines(keepends=True)[:8]))
    return str(file)


@pytest.fixture
def items(hub, name):
    rows = list(load_corpus("kgfact-small", "train"))[:3]
    return mix_items(load_tokenizer(hub[name]), rows, expert_prompt)


def requests(tokenizer):
    return [encode_prompt(tokenizer, prompt) for prompt in ("Who is there?", "What is 2 + 2?\nThink.", "Name a town.")]


@families
def test_a_prompt_lets_nobody_think(name, hub):
    "It ends where the answer begins; the prompt and the trained tokens together are what the template writes for the conversation."
    tokenizer, target = load_tokenizer(hub[name]), "It is four.\n\n\\boxed{4}"
    assert render_prompt(tokenizer, "What is 2 + 2?").endswith(PROMPT_ENDS[name])
    turns = [dict(role="user", content="What is 2 + 2?"), dict(role="assistant", content=target)]
    for span in ("completion", "paper"):
        context, trained = encode_example(tokenizer, "What is 2 + 2?", encode_completion(tokenizer, target), span)
        text = tokenizer.decode(context + trained, skip_special_tokens=False)
        assert apply_template(tokenizer, turns).startswith(text)


@families
def test_stop_tokens_are_those_of_the_family(name, hub):
    "Both engines stop at every id that the generation settings name, and targets end with the one that ends a turn."
    model, tokenizer = load_base(hub[name])
    expected = {*FAMILIES[name].stop, tokenizer.decode([turn_end(tokenizer)])}
    for stop in (HFEngine(model, tokenizer).stop.tolist(), _read_limits(hub[name], tokenizer)[0]):
        assert {*tokenizer.convert_ids_to_tokens(stop)} == expected
    assert tokenizer.decode([turn_end(tokenizer)]) in ("<|im_end|>", "<|eot_id|>", "<|end_of_text|>", "<end_of_turn>")


@families
def test_no_token_is_outside_the_vocabulary(name, hub):
    "The models have more ids than their tokenizers, and often prefer such an id; a response has none of them."
    model, tokenizer = load_base(hub[name])
    with torch.no_grad(): likeliest = model(torch.tensor([requests(tokenizer)[0]])).logits[0].argmax(-1)
    assert (likeliest >= len(tokenizer)).any() and model.config.vocab_size > len(tokenizer)
    for temperature in (0.0, 1.0):
        found = HFEngine(model, tokenizer).generate(requests(tokenizer), temperature=temperature, max_new_tokens=16)
        assert all(token < len(tokenizer) for c in found for token in c.ids)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_sampling_settings_of_the_hub_are_not_used(temperature, hub):
    "The same weights without the settings give the same tokens; transformers itself would use the settings."
    engines = [HFEngine(*load_base(hub[name])) for name in ("Qwen3-2507", "plain")]
    assert engines[0].model.generation_config.top_k == 20 and engines[0].model.generation_config.temperature == 0.7
    assert engines[1].model.generation_config.temperature in (None, 1.0)
    first, second = (e.generate(requests(e.tokenizer), temperature=temperature, max_new_tokens=24) for e in engines)
    assert first == second and any(len(c.ids) > 8 for c in first)


@families
def test_mixing_writes_the_tokens_of_the_oracle(name, hub, items):
    "In float32."
    engine, options = HFEngine(*load_base(hub[name])), dict(lam=0.5, max_new_tokens=32, max_attempts=1)
    expected, found = mix_oracle(engine, items, **options), mix(engine, items, **options)
    assert [r["completion_ids"] for r in found] == [r["completion_ids"] for r in expected]


PAPER = dict(preset="paper", measure="all", keep="all", epochs=1, batch=4, checkpoints=(1,), n=2, max_new_tokens=6, target_tokens=8, rollout_tokens=4)


@pytest.mark.parametrize("name", [name if name == "Llama-3.2" else pytest.param(name, marks=pytest.mark.slow) for name in FAMILIES])
def test_every_stage(name, hub, facts, own_runs, tasks, undrawn, monkeypatch):
    "Mixing, training by three methods in bfloat16, evaluation, NLL, Fisher, errors and figures, as modules."
    monkeypatch.setenv("MIXSD_BENCHMARKS", tasks)
    model, tokenizer = hub[name], load_tokenizer(hub[name])
    cell = dict(model=model, dataset=facts)
    suite = dict(suite="recall,gsm8k", limit=1, task_tokens=6)
    mixed = generate.run(**cell, preset="paper", max_new_tokens=8, max_attempts=2, fallback="canonical")
    table = read_table(mixed.folder / "targets.parquet")
    assert len(table) == 8 and all(tokenizer.decode(ids).endswith(PROMPT_ENDS[name]) for ids in table.prompt_ids)
    assert {ids[-1] for ids in table.completion_ids} == {turn_end(tokenizer)}, "canonical targets took the place of the discarded ones"
    runs = {}
    for method in (dict(method="sft"), dict(method="mixsd", options=dict(fallback="canonical")), dict(method="opsd", rollouts=2)):
        run = runs[method["method"]] = train.run(**cell, **suite, **PAPER, **method)
        root = run.root.squeeze()
        assert root.step.values.tolist() == [0, 1, 2] and np.isfinite(run.result["training"].loss).all()
        assert root.accuracy.sel(step=[1, 2], benchmark=["recall", "gsm8k", "validation"]).notnull().all()
    checkpoint, _ = load_base(str(run.checkpoints[2]))
    assert HFEngine(checkpoint, tokenizer).stop.tolist() == HFEngine(*load_base(model)).stop.tolist()
    assert load_tokenizer(str(run.checkpoints[2])).chat_template == tokenizer.chat_template and type(checkpoint.config) is FAMILIES[name].config
    asked = evaluate.run(model=str(run.checkpoints[2]), dataset=facts, preset="paper", n=2, max_new_tokens=6, **suite)
    both = asked.responses().merge(run.responses(2), on=["benchmark", "item", "sample"])
    assert len(both) == len(asked.responses()) and both.response_x.equals(both.response_y)
    for targets in ("", str(mixed.folder / "targets.parquet")): assert nll.run(**cell, targets=targets).root.nll.notnull().all()
    reference = dict(model=model, reference="paper", limit=1)
    assert fisher.run(**reference).root.fisher_trace.item() > 0
    moved = fisher.run(**reference, trained=str(runs["mixsd"].folder)).root
    assert (moved.displacement_sq.sel(step=[1, 2]) > 0).all()
    assert errors.run(**cell).root.n.sum() > 0


def run_notebooks(folder, *stages):
    "Run notebooks, each a pair (stage, parameters), with papermill in one kernel, which is emptied before each. Saved pictures are empty."
    from jupyter_client import KernelManager
    from papermill import execute_notebook
    from papermill.clientwrap import PapermillNotebookClient
    from papermill.engines import NBClientEngine, papermill_engines
    kernel = KernelManager(kernel_name="python3")
    kernel.start_kernel(cwd=str(folder))  # whose figures are not those of the repository

    class OneKernel(NBClientEngine):
        @classmethod
        def execute_managed_notebook(cls, manager, kernel_name, **options):
            client = PapermillNotebookClient(manager, km=kernel, timeout=300)
            client.kc = kernel.client()
            client.kc.start_channels()
            client.kc.wait_for_ready()
            client.kc.execute_interactive(f"%reset -f\n{UNDRAWN}", silent=True)
            client.execute()
    papermill_engines.register("one-kernel", OneKernel)
    try:
        for stage, parameters in stages:
            files = ROOT / f"nbs/{stage}.ipynb", folder / f"{stage}.ipynb"
            execute_notebook(*map(str, files), parameters, engine_name="one-kernel", progress_bar=False)
    finally: kernel.shutdown_kernel(now=True)


@pytest.mark.slow  # 35 seconds
def test_every_stage_with_papermill(hub, own_runs, tasks, tmp_path, monkeypatch):
    "The paper's corpus and all five tasks on the hybrid model, by the notebooks of the stages."
    need_sandbox()
    monkeypatch.setenv("MIXSD_BENCHMARKS", tasks)
    cell = dict(model=hub["Qwen3-hybrid"], dataset="kgfact-small")
    suite = dict(limit=1, n=2, max_new_tokens=6, task_tokens=6, preset="paper")
    run_notebooks(tmp_path,
                  ("generate", cell | dict(preset="paper", max_new_tokens=6, max_attempts=1, fallback="canonical")),
                  ("train", cell | suite | dict(method="sft", suite="recall,gsm8k", epochs=1, batch=50, checkpoints=[1])),
                  ("evaluate", cell | suite | dict(suite="paper")),
                  ("nll", cell | dict(first=1)),
                  ("fisher", dict(model=cell["model"], reference="paper", limit=1)),
                  ("errors", cell),
                  ("figures", cell | dict(source="runs")))
    runs = sorted(path.parent.name.partition("-")[0] for path in own_runs.glob("*/result.nc"))
    assert {*runs} >= {"errors", "evaluate", "fisher", "generate", "nll", "train"}, runs
    found = xr.open_dataset(next(own_runs.glob("train-*sft*/result.nc")), engine="netcdf4").squeeze()
    assert found.step.values.tolist() == [0, 1, 2] and math.isfinite(found.target_nll)
    whole = next(t for f in own_runs.glob("evaluate-*/responses.parquet") if len(t := read_table(f)) > 20)
    assert {*whole.benchmark} >= {"recall", "aime-2024", "math-500", "gsm8k", "humaneval", "mmlu"}

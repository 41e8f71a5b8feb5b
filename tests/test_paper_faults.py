"""Faults that only models and runs of the paper's scale show, on small models with the same properties."""

import errno
import itertools
import json
import os
import re
import shutil
import signal
import subprocess
import time
import weakref
from dataclasses import asdict, replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pandas as pd
import pytest
import torch
from helpers import forked, small_model
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file
from torch.distributed.launcher.api import LaunchConfig, elastic_launch
from transformers import AutoConfig, Qwen2Config, Qwen2ForCausalLM
from ties import compare

from mixsd_nb import evaluate, inject, nll, train
from mixsd_nb.analysis.curvature import tensor_sums
from mixsd_nb.benchmarks import SUITES
from mixsd_nb.benchmarks.evaluation import sampling_of
from mixsd_nb.benchmarks.sandbox import SandboxError
from mixsd_nb.planning.estimates import DEVICES
from mixsd_nb.cluster.grid import expand_grid, find_notebook, make_cell, read_grid
from mixsd_nb.planning.plan import plan_run
from mixsd_nb.cluster.process import progress_file
from mixsd_nb.planning.workload import Machine
from mixsd_nb.corpora import load_corpus
from mixsd_nb.corpora.prompts import render_prompt, turn_end
from mixsd_nb.evaluate import EvaluateConfig
from mixsd_nb.fisher import FisherConfig
from mixsd_nb.generate import GenerateConfig

from mixsd_nb.methods.fitting import MethodRun
from mixsd_nb.methods.mixing import mix, mix_items, mix_oracle
from mixsd_nb.training.trainer import TrainingSpec, fine_tune, read_curves, train_process
from mixsd_nb.models import check_head, load_base, load_tokenizer
from mixsd_nb.models.engine import choose, gumbel, row_key
from mixsd_nb.models.engines import HFEngine
from mixsd_nb.models.tiny import random_model
from mixsd_nb.results.cube import cube_of
from mixsd_nb.results.gallery import run_figures
from mixsd_nb.results.layout import result_tree
from mixsd_nb.results.summary import average_drop, held_out_average, summary_table
from mixsd_nb.results.tradeoff import frontier_figure
from mixsd_nb.sweep import Sweep
from mixsd_nb.runs import ParameterError, StorageError, find_runs, find_stage, is_runtime, locks, make_config, write_json


@pytest.fixture(scope="module")
def items(lab): return mix_items(lab[1], list(load_corpus("kgfact-small")["train"])[:4])


def test_no_engine_writes_an_id_that_the_tokenizer_lacks(lab, items):
    "The head of a model is padded to a round size; here the padded rows are the likeliest ones."
    size = len(lab[1])
    model = random_model(vocabulary=size + 40, eos_token_id=lab[1].eos_token_id, context=512, scale=3)
    with torch.no_grad(): model.lm_head.weight[size:] *= 5
    for temperature in (0.0, 1.0):
        options = dict(temperature=temperature, top_k=1 << 20, max_new_tokens=12, max_attempts=1)
        expected = mix_oracle(HFEngine(model, lab[1]), items, 0.5, **options)
        for mode in ("lockstep", "block"):
            engine = HFEngine(model, lab[1], mode=mode)
            found = mix(engine, items, 0.5, **options)
            assert not compare(model, items, expected, found)[2]
            assert all(max(record["completion_ids"]) < size for record in found)
    prompts = [item["naive_ids"] for item in items]
    written = engine.generate(prompts, keys=[row_key(k) for k in range(4)], temperature=1.0, max_new_tokens=12)
    assert all(max(completion.ids) < size for completion in written)
    assert max(map(max, engine.greedy_tokens([(prompt, c.ids) for prompt, c in zip(prompts, written)]))) < size


def test_blocks_are_refused_where_a_window_slides(lab, items):
    "The default way of mixing equals the oracle there."
    torch.manual_seed(0)
    shape = dict(hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=1, initializer_range=0.3)
    model = Qwen2ForCausalLM(Qwen2Config(vocab_size=len(lab[1]), eos_token_id=lab[1].eos_token_id, use_sliding_window=True,
                                         sliding_window=8, max_window_layers=0, max_position_embeddings=512, **shape)).eval()
    options = dict(max_new_tokens=30, max_attempts=1)
    many = [{**item, "id": f"{item['id']} {k}"} for k in range(4) for item in items]
    assert not compare(model, many, mix_oracle(HFEngine(model, lab[1]), many, 0.5, **options), mix(HFEngine(model, lab[1]), many, 0.5, **options))[2]
    with pytest.raises(ValueError, match="^mode must be lockstep for a model with sliding-window attention, got block"): HFEngine(model, lab[1], mode="block")


@settings(max_examples=60, deadline=None)
@given(rows=st.integers(1, 5), size=st.integers(65, 4000), scale=st.sampled_from([0, 0.5, 3, 30]), temperature=st.sampled_from([0.05, 0.7, 1.0, 4.0]),
       kept=st.sampled_from([0.01, 1.0]), dtype=st.sampled_from([torch.float32, torch.bfloat16]), position=st.integers(0, 9), seed=st.integers(0, 999))
def test_a_draw_from_all_tokens_is_the_argmax_with_all_noise(rows, size, scale, temperature, kept, dtype, position, seed):
    "Noise is computed for few tokens; the draw is that of the definition, which computes it for all."
    rng = torch.Generator().manual_seed(seed)
    logits = (scale * torch.randn(rows, size, generator=rng)).masked_fill(torch.rand(rows, size, generator=rng) > kept, -torch.inf).to(dtype)
    logits[:, 0] = 0
    keys, at = torch.tensor([row_key(seed, k) for k in range(rows)]), torch.arange(rows) + position
    noise = gumbel(keys[:, None], at[:, None], torch.arange(size))
    expected = (logits.double() / temperature + noise).argmax(-1)
    assert torch.equal(choose(logits, keys, at, temperature, top_k=1 << 20), expected)


def test_a_draw_from_all_tokens_holds_no_array_of_the_size_of_the_vocabulary(monkeypatch):
    "A step of 100 rows of Qwen3's vocabulary moved 7 GB; hashes are now held slice by slice, and noise is only computed for few tokens."
    from mixsd_nb.models import engine
    sizes, scramble, noise = [], engine._scramble, engine.gumbel
    monkeypatch.setattr(engine, "_scramble", lambda x: sizes.append(x.numel()) or scramble(x))
    monkeypatch.setattr(engine, "gumbel", lambda keys, at, ids: drawn.append(torch.broadcast_tensors(keys, at, ids)[0].numel()) or noise(keys, at, ids))
    logits, drawn = 3 * torch.randn(8, 151_936, generator=torch.Generator().manual_seed(0)), []
    choose(logits, torch.arange(8), 0, 1.0, 1 << 20)
    assert max(sizes) <= 2**20 < logits.numel() and sum(drawn) < logits.numel() / 50


def test_a_cell_that_never_reaches_its_first_checkpoint_is_not_requeued_for_ever(own_runs, monkeypatch):
    "Attempts that lose their work reach other steps each time, and leave other parts of a checkpoint; neither is progress."
    from mixsd_nb.cluster import attempt
    reached = itertools.cycle([14, 15, 13, 15, 12])

    def start(cell, folder, environment):
        part = cell.run_folder / "checkpoint-20/model.safetensors"
        part.parent.mkdir(parents=True, exist_ok=True)
        part.write_bytes(bytes(next(sizes)))
        write_json(progress_file(folder), dict(what="mixsd-0.5, training", done=next(reached), total=100))
        return subprocess.Popen(["sleep", "60"], stdin=subprocess.PIPE)
    sizes = itertools.count(100)
    monkeypatch.setattr(attempt, "_start_process", start)
    cell = make_cell(find_stage("train"), find_notebook("train"), dict(model="lab-s"))
    ends = []
    while not ends or ends[-1]["requeued"]:
        ends.append(attempt.run_attempt(cell, limit=0.01, environment={}, job="7"))
    assert [end["progress"] for end in ends] == [True, True, False, False, False]
    assert ends[-1]["message"].startswith("3 attempts in a row ended before anything new was saved; raise minutes")


LLAMA = ('{%- if not date_string is defined %}{%- set date_string = strftime_now("%d %b %Y") %}{%- endif %}<|im_start|>system\nToday Date: {{ date_string }}'
         '<|im_end|>\n{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}'
         "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}")


@pytest.mark.parametrize("template", [LLAMA, LLAMA.replace("not date_string is defined", "true")], ids=["date_string", "strftime_now"])
def test_no_prompt_contains_the_date_of_today(template, tiny, tmp_path, own_runs):
    "Templates of Llama write the date into the prompt; a date that a user gives is part of the model's identity."
    shutil.copytree(tiny, tmp_path / "llama")
    (tmp_path / "llama/chat_template.jinja").write_text(template)
    dated = lambda **options: make_config(EvaluateConfig, model=str(tmp_path / "llama"), **options)
    text = lambda config: render_prompt(load_tokenizer(config.model), "question")
    assert "Today Date: 26 Jul 2024\n" in text(dated()).replace("<|im_end|>", "\n")
    assert turn_end(load_tokenizer(dated().model)) == turn_end(load_tokenizer(tiny))
    if "true" in template: return
    other = dated(model_options=dict(date="01 May 2026"))
    assert "01 May 2026" in text(other) and len({dated().hash(), other.hash(), dated(model_options=dict(date="02 May 2026")).hash()}) == 3
    with pytest.raises(ParameterError, match=r"^model_options\[date\] must be empty for lab-s, whose chat template writes no date, got 1 May$"):
        make_config(EvaluateConfig, model="lab-s", model_options=dict(date="1 May"))


def test_a_suite_without_held_out_benchmarks_leaves_averages_empty(own_runs):
    "Selection needs recall and validation alone, so a cube of such runs has tables, and no average."
    cell = dict(dataset="kgfact-small", model="lab-s", lr=1e-3, seed=0, benchmarks={"recall": dict(column="Train", role="in-domain")})
    trees = {recipe: result_tree(**cell, recipe=recipe, accuracy={0: {"recall": (0, 10)}, 20: {"recall": (5, 10)}}, config="{}")
             for recipe in ("sft", "mixsd-0.3")}
    cube = cube_of({name: tree.to_dataset() for name, tree in trees.items()})
    assert held_out_average(cube).isnull().all() and average_drop(cube).isnull().all()
    assert summary_table(cube).filter(like="Avg").isin([np.nan, ""]).all(axis=None)
    assert not run_figures(cube).keys() & {"frontier"}
    with pytest.raises(ValueError, match="^suite must name benchmarks of what is kept for this figure, as lab or paper do; these runs asked recall$"):
        frontier_figure(cube)


@pytest.mark.parametrize("stage", [train, evaluate, inject], ids=lambda stage: stage.__name__.rpartition(".")[2])
def test_missing_data_and_sandboxes_are_found_before_any_work(stage, tiny, own_runs, tmp_path, monkeypatch):
    "Mixing takes hours at the paper's scale, so what measuring needs is looked for first."
    monkeypatch.setattr("mixsd_nb.models.load_base", lambda *args: pytest.fail("a model was loaded"))
    (tmp_path / "data").mkdir()
    common = dict(model=tiny, dataset="kgfact-small", n=2, data=str(tmp_path / "data"))
    with pytest.raises(ParameterError, match="^gsm8k.parquet or gsm8k.jsonl is missing in the folder of benchmarks"):
        stage.run(suite="recall,gsm8k", **common)
    monkeypatch.setattr("mixsd_nb.benchmarks.sandbox._find_problem", lambda bwrap: "bubblewrap is missing")
    with pytest.raises(SandboxError, match="^generated code cannot be isolated, because bubblewrap is missing"):
        stage.run(suite="recall,humaneval", **common)
    assert not list(own_runs.glob("*/run.json"))


def test_of_two_mixings_of_one_cell_the_newest_is_scored(own_runs, capsys):
    "A cell that was mixed in float32 and in bfloat16 has two files of targets, of which nll counts one."
    for k, dtype in enumerate(("float32", "bfloat16")):
        config = make_config(GenerateConfig, model="lab-s", lam=0.3, dtype=dtype)
        write_json(config.folder / "run.json", dict(stage="generate", config=config.model_dump(mode="json")))
        pd.DataFrame(dict(accepted=[True])).to_parquet(config.folder / "targets.parquet")
        (config.folder / "result.nc").touch()
        os.utime(config.folder / "result.nc", (k, k))
    found = nll.find_mixed_targets("kgfact-small", ["lab-s"])
    assert found == [dict(targets=str(config.folder / "targets.parquet"), dataset="kgfact-small", model="lab-s")]
    older = make_config(GenerateConfig, model="lab-s", lam=0.3, dtype="float32").folder.name
    assert capsys.readouterr().out == f"left out, because {config.folder.name} is the same cell and newer: {older}\n"


def test_a_cell_of_high_nll_scores_its_own_targets_alone(monkeypatch):
    "A cell of a grid names a file of targets; those of other cells are not its work."
    monkeypatch.setattr(nll, "find_mixed_targets", lambda *args, **options: pytest.fail("the work of other cells was done"))
    monkeypatch.setattr(nll.NllConfig, "run", lambda self, force=False: SimpleNamespace(result=self.targets))
    config = nll.NllConfig.model_construct(targets="mixed.parquet", dataset="kgfact-small", model="lab-s", models=[])
    assert nll.collect_results(config) == ["", "mixed.parquet"]
    cells = ["".join(cell["source"]) for cell in json.loads((Path(__file__).parents[1] / "nbs/nll.ipynb").read_text())["cells"]]
    slow = "\n".join(cell for cell in cells if cell.startswith("#| slow"))
    assert "collect_results(config, force)" in slow and "find_mixed_targets" not in slow


def test_a_grid_over_the_outputs_of_another_names_the_one_that_comes_first(own_runs, tmp_path):
    first = "`mixsd sweep run high-nll-targets-lab` comes first and computes them"
    with pytest.raises(ParameterError, match=f"none of its 32 cells is finished; {first}$"): expand_grid("high-nll-lab")
    cell = expand_grid("high-nll-targets-lab").cells[0]
    config = make_config(GenerateConfig, **cell.parameters)
    write_json(config.folder / "run.json", dict(stage="generate", config=config.model_dump(mode="json")))
    for name in ("targets.parquet", "result.nc"): (config.folder / name).touch()
    with pytest.warns(UserWarning, match=f"1 of the 32 cells of high-nll-targets-lab, because the others are not finished; {first}$"):
        assert len(expand_grid("high-nll-lab").cells) == 1


@pytest.mark.parametrize(("method", "processes"), [("sft", 1), ("sft", 2), ("replay", 1), ("sft-own-words", 1), ("mixsd-shuffled", 1)])
def test_no_other_model_is_in_memory_while_one_is_trained(method, processes, tiny, own_runs, monkeypatch):
    "The parent of the training processes scores the targets on the GPU first, after it has written some of them, and must give its memory back."
    from mixsd_nb.training import trainer
    engines, freed, load = [], [], HFEngine.open
    monkeypatch.setattr(HFEngine, "open", classmethod(lambda cls, *args, **options: engines.append(weakref.ref(engine := load(*args, **options))) or engine))
    monkeypatch.setattr("torch.cuda.empty_cache", lambda: freed.append([engine() for engine in engines]))
    monkeypatch.setattr(trainer, "check_devices", lambda *args: None)

    def start(*args): raise InterruptedError(str(freed[-1]))
    monkeypatch.setattr(trainer, "train_process", start), monkeypatch.setattr(trainer, "launch", start)
    monkeypatch.setattr("mixsd_nb.methods.mixing.accepts", lambda *args: True)
    config = train.TrainConfig(method=method, model=tiny, processes=processes, epochs=1, target_tokens=2, rollout_tokens=2)
    targets = pd.DataFrame([dict(id=row["id"], naive_mask=[True, False]) for row in load_corpus("kgfact-small", "train")][:2])
    with pytest.raises(InterruptedError, match=r"^\[None(, None)?\]$"): config.recipe.load_fit()(MethodRun(own_runs, config, mixed_targets=lambda: targets))


PAIRS = [(list(range(5, 9 + k)), list(range(20, 23 + 2 * k)) + [2]) for k in range(6)]


def train_both_ways(folder):
    "In one of two processes: train copies of the weights (DDP), then shards of them (FSDP2)."
    from accelerate.state import AcceleratorState
    signal.alarm(120)  # a process that fails leaves the other one waiting
    spec = TrainingSpec(**json.loads((folder / "spec.json").read_text()))
    for name, sharded in (("ddp", False), ("fsdp2", True)):
        train_process(replace(spec, processes=2, sharded=sharded), folder / name)
        AcceleratorState._reset_state(True)
    torch.distributed.destroy_process_group()  # its threads must not outlive the interpreter


def launch_both_ways(folder):
    config = LaunchConfig(1, 1, 2, run_id=str(os.getpid()), rdzv_backend="c10d", rdzv_endpoint="localhost:0", start_method="fork", max_restarts=0)
    elastic_launch(config, train_both_ways)(folder)


@pytest.mark.slow
@pytest.mark.skipif(os.cpu_count() < 2, reason="two processes need two cores")
def test_one_process_two_and_shards_train_alike_in_bfloat16(tmp_path):
    """Matrix products are in bfloat16; the loss and the sums of gradients are in float32, however the weights are spread.

    With sums and losses in bfloat16, losses of shards were up to 0.02 nats off, and came in steps of 1/32."""
    model = small_model(tmp_path / "model", "lab-s", layers=4, heads=2, head_dim=16, feed_forward=64, context=512, scale=4)
    spec = TrainingSpec(model, lr=1e-3, steps=4, batch=4, objective="methods.supervised:stored_pairs", data=dict(pairs=PAIRS), seed=3, bf16=True)
    write_json(tmp_path / "spec.json", asdict(spec))
    process = forked(launch_both_ways, tmp_path)
    alone = fine_tune(spec, tmp_path / "one")
    process.join(200)
    assert process.exitcode == 0
    weights = {name: load_file(tmp_path / name / "checkpoint-4/model.safetensors") for name in ("one", "ddp", "fsdp2")}
    start = load_file(Path(model) / "model.safetensors")
    move = lambda name: torch.cat([(weight - start[key]).flatten() for key, weight in sorted(weights[name].items())])
    for name, nats, share in (("ddp", 1e-3, 0.01), ("fsdp2", 5e-3, 0.03)):
        curves = read_curves(tmp_path / name)
        apart = abs(curves["loss"] - alone["loss"]).max(), ((move(name) - move("one")).norm() / move("one").norm()).item()
        assert apart[0] < nats and apart[1] < share, apart
        assert (curves["loss"] * 32 % 1 > 0).all(), "a loss in bfloat16"


def readme_commands(notebook):
    "The parameters of the commands of the README that run a notebook at the paper's scale."
    text = (Path(__file__).parents[1] / "README.md").read_text()
    for line in re.findall(rf"^papermill nbs/{notebook}.ipynb .*-p model \w+/.*$", text, re.MULTILINE):
        yield dict(re.findall(r"-p (\S+) (\S+)", line))


def test_the_commands_of_the_readme_at_the_papers_scale_are_cells_of_its_grids():
    found = [make_config(train.TrainConfig, **parameters) for parameters in readme_commands("train")]
    cells = {cell.hash for cell in expand_grid("knowledge-eval-small").cells}
    assert found and {config.without_idle().hash() for config in found} <= cells
    for config in found:
        mixing = train.target_mixing(config)
        assert (config.target_tokens, mixing.max_new_tokens, mixing.dtype) == (8_192, 8_192, "bfloat16") and not config.values_of_lab()


@pytest.mark.parametrize(("grid", "stage", "settings"), [("high-nll", nll.NllConfig, {}), ("app-displacement", FisherConfig, dict(reference="paper"))])
def test_the_readme_says_which_parameters_stages_without_a_preset_need(grid, stage, settings):
    "All values of the grid that are not the defaults are named, besides those that only save memory."
    fixed = {name: value for name, value in read_grid(grid)[1].fixed.items() if value != stage.model_fields[name].default and not is_runtime(stage.model_fields[name])}
    assert fixed == dict(dtype="bfloat16") | settings
    text = (Path(__file__).parents[1] / "README.md").read_text()
    assert all(f"`-p {name} {value}`" in text for name, value in fixed.items())


def refuse(number): return lambda file, how: (_ for _ in ()).throw(OSError(number, os.strerror(number)))


@pytest.mark.parametrize(("lock", "problem"), [(refuse(errno.ENOLCK), "No locks available"), (lambda file, how: None, "two processes got one lock at the same time")])
def test_a_file_system_without_locks_is_named_before_any_work(lock, problem, tmp_path, own_runs, monkeypatch):
    "Network file systems can refuse locks, or grant the same one twice."
    locks.check_locks.cache_clear()
    monkeypatch.setattr(locks.fcntl, "flock", lock)
    monkeypatch.setattr(locks.subprocess, "run", lambda *args, **options: SimpleNamespace(returncode=0))
    with pytest.raises(StorageError, match=rf"^the folder of runs must be on a file system with locks, got \S+ on \w+ \({problem}\); MIXSD_RUNS names another folder$"):
        evaluate.run(model="lab-s", suite="recall", n=1)
    assert not list(own_runs.glob("*"))


def test_locks_that_hold_on_one_node_only_are_named(tmp_path, monkeypatch):
    locks.check_locks.cache_clear()
    monkeypatch.setattr(locks, "find_mount", lambda folder, table: ("nfs", {"rw", "nolock"}))
    with pytest.warns(UserWarning, match="hold on one node only, because nfs is mounted with nolock; start the cells of a grid from one node"): locks.check_locks(tmp_path)


def test_sums_over_weights_use_the_gpu_that_the_job_holds(monkeypatch):
    places, weights = [], {"layers.0.weight": torch.ones(3)}
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    move = torch.Tensor.to
    monkeypatch.setattr(torch.Tensor, "to", lambda self, place, dtype: places.append(place) or move(self, "cpu", dtype))
    assert tensor_sums(weights, {"layers.0.weight": torch.zeros(3)}, weights).displacement_sq.item() == 3
    assert set(places) == {"cuda"}


@pytest.mark.slow
def test_the_preset_smoke_runs_every_step_with_any_model(tiny, own_runs):
    "A model with random weights writes no true answer, so canonical targets replace its own; everything is as short as possible."
    start = time.process_time()
    run = inject.run(model=tiny, preset="smoke")
    print(f"{time.process_time() - start:.1f} s")
    found = find_runs()
    assert sorted(each.stage for each in found) == ["evaluate"] * 3 + ["generate", "inject", "nll", "nll", "train"] and run.finished
    targets = next(each for each in found if each.stage == "generate")
    assert pd.read_parquet(targets.folder / "targets.parquet").accepted.all()
    trained = next(each for each in found if each.stage == "train")
    assert trained.config["span"] == "paper" and trained.measured_steps == [5]
    longest = max(len(ids) for each in found if each.stage == "evaluate" for ids in load_tokenizer(tiny)(list(each.responses().response))["input_ids"])
    assert longest <= 4 * 16, "tokens of a text that is encoded again differ a little"


def test_responses_to_the_papers_tasks_can_be_shortened():
    "The length is part of the benchmark, so it changes the hash of a run, and only that of runs with such a benchmark."
    made = lambda **options: make_config(EvaluateConfig, **options)
    assert made(suite="aime-2024", task_tokens=100).hash() != made(suite="aime-2024").hash() == made(suite="aime-2024", task_tokens=16_384).hash()
    assert made(suite="recall", task_tokens=9).hash() == made(suite="recall").hash()
    lengths = [sampling_of(SUITES[name], 160, 100).max_new_tokens for name in ("aime-2024", "recall", "mmlu")]
    assert lengths == [100, 160, 100] and sampling_of(SUITES["aime-2024"], 160).max_new_tokens == 16_384


HEADS = {"gemma2": {}, "gemma3_text": dict(final_logit_softcapping=30.0), "granite": dict(logits_scaling=8.0), "cohere": {}, "falcon_h1": dict(lm_head_multiplier=0.5)}


@pytest.mark.parametrize("family", HEADS)
def test_a_model_that_changes_logits_after_its_head_is_refused_by_its_configuration(family, tiny, tmp_path, own_runs):
    "The folder has no weights, so nothing has tried to read them; nothing is mixed or measured before."
    folder = shutil.copytree(tiny, tmp_path / "tiny")
    (folder / "model.safetensors").unlink()
    AutoConfig.for_model(family, **HEADS[family]).save_pretrained(folder)
    words = rf"^model must take its logits from its head as they are, got {re.escape(str(folder))}, whose configuration changes them with \w+=[\d.]+$"
    for call in (lambda: load_base(str(folder)), lambda: train.run(model=str(folder), method="sft")):
        with pytest.raises(ValueError, match=words): call()
    assert [path.name for path in own_runs.glob("[!.]*")] == ["tiny"]


@pytest.mark.parametrize("family", ["gemma3", "gpt2", "gpt_neox", "t5"])
def test_a_model_of_another_form_is_refused_by_its_configuration(family, tiny, tmp_path, own_runs):
    "One that sees images, and families without `model` and `lm_head`. The folder has no weights; nothing is mixed or measured before."
    folder = shutil.copytree(tiny, tmp_path / "tiny")
    (folder / "model.safetensors").unlink()
    AutoConfig.for_model(family).save_pretrained(folder)
    words = rf"^model must be a language model of text alone that consists of `model` and `lm_head`, .*, got {re.escape(str(folder))} of the type {family}$"
    for call in (lambda: load_base(str(folder)), lambda: train.run(model=str(folder), method="sft")):
        with pytest.raises(ValueError, match=words): call()
    assert [path.name for path in own_runs.glob("[!.]*")] == ["tiny"]


def test_a_model_whose_configuration_leaves_its_logits_alone_is_taken(tmp_path):
    for family, options in (("gemma3_text", {}), ("granite", {}), ("cohere", dict(logit_scale=1.0)), ("qwen3", {})):
        AutoConfig.for_model(family, **options).save_pretrained(tmp_path / family)
        check_head(str(tmp_path / family))


def test_a_preview_shows_only_the_options_that_differ_from_those_of_the_method(own_runs):
    grid = dict(notebook="train", fixed=dict(dataset="mquake-lab"), axes=dict(run=[dict(method="memit", options=dict(clamp=0.5)), dict(method="memit", options={})]))
    assert Sweep(grid).preview().options.tolist() == [dict(clamp=0.5), ""]


@pytest.mark.parametrize(("nodes", "processes", "problem"), [(2, 2, ""), (2, 5, ""), (3, 4, "processes on all nodes must be among 1, 2, 4, 5, 10, 20, the divisors of batch, got 12")])
def test_a_plan_counts_the_processes_of_all_nodes(nodes, processes, problem):
    machine = Machine("h100", DEVICES["h100"], nodes * 8, 4_000, 16, 240, nodes=nodes)
    config = make_config(train.TrainConfig, preset="paper", method="sft", model="Qwen/Qwen3-1.7B", engine="vllm", processes=processes, sharded=True)
    assert plan_run(config, machine).problems.get("processes", "") == problem


def test_settings_of_sampling_without_do_sample_do_not_stop_a_training(tiny, tmp_path):
    "The folder of vicuna-7b-v1.5 has such settings; transformers reads them and refuses to save them."
    folder, sampling = shutil.copytree(tiny, tmp_path / "tiny"), dict(temperature=0.9, top_p=0.6)
    write_json(folder / "generation_config.json", sampling)
    spec = TrainingSpec(str(folder), lr=1e-3, steps=1, batch=2, objective="methods.supervised:stored_pairs", data=dict(pairs=[([5, 6], [7, 2])] * 2))
    fine_tune(spec, tmp_path / "run")
    checkpoint, _ = load_base(str(tmp_path / "run/checkpoint-1"))
    assert dict(checkpoint.generation_config.to_diff_dict()).items() >= dict(sampling, do_sample=True).items()
    checkpoint.save_pretrained(tmp_path / "again")

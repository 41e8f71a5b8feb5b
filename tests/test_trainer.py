"""The trainer across processes: several devices, kills at any moment, a process that fails, insufficient memory."""

import multiprocessing
import os
import signal
import time
from dataclasses import replace
from pathlib import Path

import psutil
import pytest
import torch
from helpers import small_model
from safetensors.torch import load_file

from mixsd_nb.methods.distill import VARIANTS, distill_items
from mixsd_nb.methods.trainer import TrainingSpec, explain_out_of_memory, fine_tune, read_curves, train_process
from mixsd_nb.models import load_base, load_tokenizer
from mixsd_nb.runs import ProcessFailed, checkpoint_steps

ROOT = Path(__file__).resolve().parents[1]
PAIRS = [(list(range(5, 9 + k)), list(range(20, 23 + 2 * k)) + [2]) for k in range(6)]
several = pytest.mark.skipif(os.cpu_count() < 2, reason="two processes need two cores")


@pytest.fixture(scope="module")
def spec(tmp_path_factory):
    "Twenty updates of a small random model with tied embeddings."
    folder = small_model(tmp_path_factory.mktemp("tiny"), "lab-s", layers=2, heads=2, head_dim=16, feed_forward=64, context=512)
    return TrainingSpec(folder, lr=1e-4, steps=20, batch=4, objective="methods.supervised:stored_pairs", data=dict(pairs=PAIRS), checkpoints=[10], seed=3)


@pytest.fixture(scope="module")
def distillation(spec):
    "The same, on-policy: rollouts at T=1, scored by a teacher that sees the answer."
    items = distill_items(load_tokenizer(spec.model), [dict(id=f"i{k}", prompt="Q" * k + "?", target="The answer is A.") for k in range(5)])
    data = dict(items=items, variant=VARIANTS["opsd"], rollouts=2, max_new_tokens=5)
    return replace(spec, objective="methods.distill:distillation", data=data, steps=6, checkpoints=[3], lr=1e-3)


def weights(run):
    return load_file(list(checkpoint_steps(run).values())[-1] / "model.safetensors")


def distance(a, b):
    a, b = (torch.cat([v.flatten() for _, v in sorted(w.items())]) for w in (a, b))
    return ((a - b).norm() / b.norm()).item()


def start(spec, run):
    "Train in a process that can be killed; one that only launches others is forked, which is faster."
    process = multiprocessing.get_context("fork" if spec.processes > 1 else "spawn").Process(target=fine_tune, args=(spec, run))
    process.start()
    return process


def kill_at(process, moment, whole_tree=True):
    "Kill a process with SIGKILL when a file exists; returns its child processes."
    deadline = time.time() + 120
    while not moment.exists() and process.is_alive() and time.time() < deadline:
        time.sleep(0.002)
    below = psutil.Process(process.pid).children(recursive=True)
    for p in [process, *(below if whole_tree else [])]:
        os.kill(p.pid, signal.SIGKILL)
    process.join()
    assert moment.exists(), "the run was to be killed half way"
    return below


@pytest.fixture(scope="module")
def alone(spec, tmp_path_factory):
    run = tmp_path_factory.mktemp("alone")
    fine_tune(spec, run)
    return weights(run)


@several
@pytest.mark.parametrize("sharded", [False, True], ids=["ddp", "fsdp2"])
def test_two_processes_killed_half_way_end_where_one_does(sharded, spec, alone, tmp_path):
    two = replace(spec, processes=2, sharded=sharded)
    kill_at(start(two, tmp_path), tmp_path / "checkpoint-10/complete")
    assert not (tmp_path / "checkpoint-20/complete").exists()
    steps = []
    log = fine_tune(two, tmp_path, lambda entry: steps.append(entry["step"]))
    assert steps == list(range(11, 21)) and len(log["loss"]) == 20
    found, begun = weights(tmp_path), load_file(Path(spec.model) / "model.safetensors")
    assert distance(found, alone) <= 1e-6 < 1e-2 < distance(found, begun)
    model, _ = load_base(str(tmp_path / "checkpoint-20"))
    assert model.lm_head.weight is model.model.embed_tokens.weight and torch.equal(model.lm_head.weight, found["model.embed_tokens.weight"])


@several
def test_rollouts_of_a_sharded_student(distillation, tmp_path):
    fine_tune(distillation, tmp_path / "one")
    fine_tune(replace(distillation, batch=4, processes=2, sharded=True), tmp_path / "two")
    assert distance(weights(tmp_path / "two"), weights(tmp_path / "one")) < 1e-5
    assert abs(read_curves(tmp_path / "two")["loss"] / read_curves(tmp_path / "one")["loss"] - 1).max() < 1e-4


def test_a_killed_distillation_ends_with_the_same_bytes(distillation, tmp_path):
    kill_at(start(distillation, tmp_path / "killed"), tmp_path / "killed/checkpoint-3/complete")
    for run in ("killed", "whole"):
        fine_tune(distillation, tmp_path / run)
    last = [(tmp_path / run / "checkpoint-6/model.safetensors").read_bytes() for run in ("killed", "whole")]
    assert last[0] == last[1]
    assert (read_curves(tmp_path / "killed")["loss"] == read_curves(tmp_path / "whole")["loss"]).all()


@several
def test_no_process_outlives_the_notebook(spec, tmp_path):
    ranks = kill_at(start(replace(spec, steps=100_000, processes=2), tmp_path), tmp_path / "checkpoint-10/complete", whole_tree=False)
    assert len(ranks) >= 3, "a launcher and two ranks"
    assert not psutil.wait_procs(ranks, timeout=60)[1]


@several
def test_a_failing_process_shows_its_own_traceback_once(spec, tmp_path):
    with pytest.raises(ProcessFailed) as caught:
        fine_tune(replace(spec, data=dict(pairs=[*PAIRS[:5], ([10**6], [2])]), processes=2), tmp_path)
    said = str(caught.value)
    assert said.count("Traceback") == 1 and said.splitlines()[-1].startswith("IndexError") and "collate" not in said.splitlines()[-1]


def test_labels_of_prompt_tokens_do_not_exist(spec, tmp_path):
    "The gradient of one update is the same whatever the loss of prompt tokens would be."
    from mixsd_nb.methods.loss import LossHead, nll, summed_loss
    from mixsd_nb.methods.supervised import Supervised
    model, _ = load_base(spec.model)
    head, examples = LossHead(model), Supervised(PAIRS).examples(range(6), None, 0)
    model.zero_grad()
    summed_loss(model, head, examples, nll).backward()
    found = [p.grad.clone() for p in model.parameters()]
    for label in (-100, 7):
        model.zero_grad()
        for prompt, completion in PAIRS:
            labels = torch.tensor([[label] * len(prompt) + completion])
            model(torch.tensor([prompt + completion]), labels=labels, num_items_in_batch=1).loss.backward()
        same = all(torch.allclose(a, p.grad, rtol=1e-4, atol=1e-5) for a, p in zip(found, model.parameters()))
        assert same == (label == -100)


def test_adapters_are_merged_and_resumed(spec, tmp_path):
    pytest.importorskip("peft")
    thin = replace(spec, lora=2, lr=1e-2)
    fine_tune(replace(thin, steps=10), tmp_path / "run")
    fine_tune(thin, tmp_path / "run")
    fine_tune(thin, tmp_path / "whole")
    begun, found, whole = load_file(Path(spec.model) / "model.safetensors"), weights(tmp_path / "run"), weights(tmp_path / "whole")
    assert found.keys() == begun.keys() and all(torch.equal(found[k], whole[k]) for k in found)
    change = found["model.layers.0.mlp.up_proj.weight"] - begun["model.layers.0.mlp.up_proj.weight"]
    assert torch.linalg.matrix_rank(change, rtol=1e-3) == 2 and torch.equal(found["model.embed_tokens.weight"], begun["model.embed_tokens.weight"])
    log = read_curves(tmp_path / "whole")
    model, _ = load_base(str(tmp_path / "whole/checkpoint-20"))
    assert log["loss"][-1] < log["loss"][0] and model.config.architectures == ["Qwen3ForCausalLM"]


def test_lack_of_memory_is_one_sentence(spec):
    for lack in (torch.OutOfMemoryError("CUDA out of memory"), RuntimeError("DefaultCPUAllocator: can't allocate memory")):
        with pytest.raises(MemoryError, match="micro_tokens=4096; a smaller micro_tokens"), explain_out_of_memory(spec):
            raise lack
    with pytest.raises(RuntimeError, match="other"), explain_out_of_memory(spec):
        raise RuntimeError("other")


def test_a_checkpoint_of_another_architecture_is_one_sentence(spec, tmp_path):
    train_process(replace(spec, steps=1, checkpoints=[]), tmp_path)
    with pytest.raises(ValueError, match="another architecture: its hidden_size is 32, the model's is 128"):
        train_process(replace(spec, model="lab-s"), tmp_path)

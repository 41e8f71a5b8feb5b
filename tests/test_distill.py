"Distillation: losses against TRL and by hand, one module for student and teacher, engines of rollouts, and sentences for a lack of memory."

import copy
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from helpers import distillation_training, need, stored_training
from hypothesis import given, settings, strategies as st
from safetensors.torch import load_file

from mixsd_nb.methods import rollouts
from mixsd_nb.methods.distill import DIVERGENCES, VARIANTS, Distillation, Variant, check_options, distill_items
from mixsd_nb.models import ENGINES, EngineSpec, load_base, open_engine
from mixsd_nb.models.engines import HFEngine
from mixsd_nb.train import TrainConfig
from mixsd_nb.training.loss import Example, LossHead, Objective, summed_loss
from mixsd_nb.training.trainer import FineTuner, fine_tune, read_curves, train_process


@pytest.fixture(scope="module")
def spec(shallow): return stored_training(shallow, steps=4)


@pytest.fixture(scope="module")
def distillation(shallow): return distillation_training(shallow, steps=4)


def weights(folder, step=4): return load_file(next((folder / f"checkpoint-{step}").glob("*model.safetensors")))


def same(one, two): return one.keys() == two.keys() and all(torch.equal(one[name], two[name]) for name in one)


def test_an_offloaded_optimiser_trains_the_same_bytes(spec, tmp_path):
    "Its checkpoints have the state of torch's AdamW, so that either continues what the other has begun."
    for name, offload in (("plain", False), ("offloaded", True)): fine_tune(replace(spec, offload=offload), tmp_path / name)
    for name, offload in (("first plain", False), ("first offloaded", True)):
        fine_tune(replace(spec, steps=2, offload=offload), tmp_path / name)
        fine_tune(replace(spec, offload=not offload), tmp_path / name)
    found = [weights(tmp_path / name) for name in ("plain", "offloaded", "first plain", "first offloaded")]
    assert all(same(other, found[0]) for other in found[1:]) and not same(found[0], load_file(Path(spec.model) / "model.safetensors"))
    assert (read_curves(tmp_path / "first offloaded")["loss"] == read_curves(tmp_path / "plain")["loss"]).all()


def test_offload_and_the_engine_of_rollouts_are_parameters_that_change_no_run():
    assert TrainConfig(offload=True).hash() == TrainConfig().hash()
    assert TrainConfig(method="opsd", rollout_engine="vllm").hash() == TrainConfig(method="opsd").hash()


@pytest.fixture
def alone():
    "A group of one process."
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


CASES = {"opsd": dict(), "opsd-nll": dict(), "sdft": dict(top_k=8), "follower": dict(variant=VARIANTS["sdft"], ema=0.25, top_k=8),
         "expert": dict(variant=Variant("teacher", "kl", "student"))}


@pytest.mark.parametrize("case", CASES)
def test_one_module_is_the_student_and_then_the_teacher(case, spec, distillation, alone):
    "The examples are those of a copy of the student; there is no copy unless the teacher changes or writes."
    options = dict(variant=VARIANTS.get(case), rollouts=2, max_new_tokens=5, seed=1) | CASES[case]
    variant, found = options.pop("variant"), []
    student, tokenizer = load_base(spec.model)
    with torch.no_grad(): [p.mul_(1.1) for p in student.parameters()]
    for host in (Objective.host, Distillation.host):
        objective = Distillation(distillation.data["items"], load_base(spec.model)[0], tokenizer, variant, **options)
        module = host(objective, student)
        for step in (0, 1):
            module.load_state_dict(student.state_dict())
            examples = objective.examples([0, 2], module, step)
        found.append([(e.prompt, e.completion, [t.tolist() for t in e.targets]) for e in examples])
    assert found[0] == found[1]
    assert (module is objective.teacher) == (case in ("opsd", "opsd-nll", "sdft"))


class Copying(HFEngine):
    "An engine with weights of its own, which it takes from a folder."
    loaded = []

    def load_weights(self, folder):
        self.model = load_base(folder)[0]
        self.loaded.append(folder)
        return len(self.loaded) < 3


@pytest.fixture
def copying(request, monkeypatch):
    "The engine is declared, and runs in this process."
    monkeypatch.setattr("mixsd_nb.methods.rollouts.load_engine", open_engine)
    monkeypatch.setattr(Copying, "loaded", [])
    monkeypatch.setattr("mixsd_nb.models.engines.Copying", Copying, raising=False)
    ENGINES.add(EngineSpec("copying", "Copying", "models.engines:Copying", own_process=True))
    request.addfinalizer(lambda: ENGINES.remove("copying"))


@pytest.mark.parametrize(("writer", "lora"), [("mixsd-kl", 0), ("opsd", 2)])
def test_another_engine_writes_with_the_weights_of_the_step(writer, lora, distillation, copying, tmp_path):
    "The weights are handed over before every step, in place or to a new engine, and the training is the same; adapters are a part of the weights."
    spec = replace(distillation, lora=lora, lr=1e-3 if not lora else 3e-2, data=distillation.data | dict(variant=VARIANTS[writer]))
    fine_tune(spec, tmp_path / "one")
    fine_tune(replace(spec, data=spec.data | dict(engine="copying", engine_options={})), tmp_path / "two")
    assert same(weights(tmp_path / "one"), weights(tmp_path / "two")) and len(Copying.loaded) == 3


def raise_lack(*_, **__): raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")


@pytest.mark.parametrize(("owner", "method", "words"), [
    (FineTuner, "create_accelerator_and_postprocess", "processes=1; a smaller model"), (Distillation, "write", "batch_size=7; a smaller batch_size"),
    (None, "loss", "micro_tokens=4096; a smaller micro_tokens"), (torch.optim.AdamW, "step", "offload=False; offload=True")])
def test_a_lack_of_memory_names_its_phase(owner, method, words, distillation, tmp_path):
    "Each phase has the parameter that helps; a report, which may measure a checkpoint, keeps its own words."
    spec = replace(distillation, data=distillation.data | dict(batch_size=7))
    target = patch.object(owner, method, raise_lack) if owner else patch("mixsd_nb.training.trainer.summed_loss", raise_lack)
    with target, pytest.raises(MemoryError, match=words) as caught: train_process(spec, tmp_path)
    assert caught.value.__suppress_context__
    with pytest.raises(torch.OutOfMemoryError, match="Tried to allocate"): train_process(spec, tmp_path, raise_lack)


ALPHA = {"forward": 0.0, "reverse": 1.0, "jensen-shannon": 0.5}  # of TRL


def objective_of(folder, seed=1, **options):
    "The objective of SDFT with a teacher of other weights than the student, and the student."
    student, tokenizer = load_base(folder)
    teacher = copy.deepcopy(student)
    torch.manual_seed(seed)
    with torch.no_grad():
        for w in teacher.parameters(): w.add_(0.05 * torch.randn_like(w))
    items = distill_items(tokenizer, [dict(id=f"i{k}", prompt="Q" * k + "?", target="The answer is A.") for k in range(3)])
    return Distillation(items, teacher, tokenizer, VARIANTS["sdft"], rollouts=2, **options), student, tokenizer


def mean_loss(objective, model, examples):
    return summed_loss(model, LossHead(model), examples, objective.loss) / objective.size(examples)


@pytest.fixture(scope="module")
def written(prompted):
    "Rollouts of different lengths."
    objective, student, _ = objective_of(prompted, max_new_tokens=9)
    found = objective.write([0, 1, 2], student, 0)
    return [(item, ids[:3 + k]) for k, (item, ids) in enumerate(found)]


def trl_trainer(folder, tmp_path, direction, top_k):
    "TRL's trainer on the same weights; it is asked for its loss alone."
    if not find_spec("trl"): need("trl is not installed: pip install mixsd_nb[peers]")
    from datasets import Dataset
    from trl.experimental.sdft import SDFTConfig, SDFTTrainer
    model, tokenizer = load_base(folder)
    args = SDFTConfig(str(tmp_path), teacher_model_kind="ema", distillation_alpha=ALPHA[direction], distillation_topk=top_k, use_cpu=True, bf16=False,
                      per_device_train_batch_size=6, num_generations=2, report_to="none", disable_tqdm=True, teacher_update_rate=0.05)
    rows = Dataset.from_list([dict(prompt="Q?", privileged_context="A.")] * 6)
    return SDFTTrainer(model, args=args, train_dataset=rows, processing_class=tokenizer)


def padded(rows, left):
    "Rows of ids as one tensor with their mask."
    width = max(map(len, rows))
    pad = lambda row, value: [value] * (width - len(row)) + row if left else row + [value] * (width - len(row))
    return torch.tensor([pad(r, 0) for r in rows]), torch.tensor([pad([1] * len(r), 0) for r in rows])


@pytest.mark.parametrize("direction", DIVERGENCES)
def test_the_loss_of_sdft_is_that_of_trl(direction, prompted, written, tmp_path):
    objective, student, _ = objective_of(prompted, direction=direction, top_k=20)
    assert len({len(ids) for _, ids in written}) > 3, "responses of one length would not tell the two means apart"
    ours = mean_loss(objective, student, objective.read(written, student))
    trainer = trl_trainer(prompted, tmp_path, direction, 20)
    trainer.teacher_model.load_state_dict(objective.teacher.state_dict())
    prompt, prompt_mask = padded([item["student_ids"] for item, _ in written], left=True)
    teacher, teacher_mask = padded([item["teacher_ids"] for item, _ in written], left=True)
    completion, mask = padded([ids for _, ids in written], left=False)
    inputs = dict(prompt_ids=prompt, prompt_mask=prompt_mask, completion_ids=completion, completion_mask=mask,
                  teacher_input_ids=torch.cat([teacher, completion], 1), teacher_attention_mask=torch.cat([teacher_mask, mask], 1))
    trainer.current_gradient_accumulation_steps = 1
    theirs = trainer.compute_loss(trainer.model, inputs)
    assert theirs > 0.01 and abs(ours - theirs).item() < 1e-5
    slopes = [torch.autograd.grad(loss, model.model.layers[0].mlp.up_proj.weight)[0] for loss, model in ((ours, student), (theirs, trainer.model))]
    assert (slopes[0] - slopes[1]).norm() < 1e-4 * slopes[1].norm()


@given(ema=st.floats(0, 1), steps=st.integers(1, 5))
@settings(max_examples=20, deadline=None)
def test_the_teacher_is_the_moving_average_by_hand(ema, steps):
    layer = lambda: torch.nn.Linear(2, 2, bias=False)
    student, teacher = layer(), layer()
    objective = Distillation([], teacher, None, VARIANTS["sdft"], ema=ema)
    expected, generator = teacher.weight.detach().clone(), torch.Generator().manual_seed(0)
    for step in range(1, steps + 1):
        with torch.no_grad(): student.weight.copy_(torch.randn(2, 2, generator=generator))
        for _ in range(2): objective.follow(student, step)  # once for each update
        expected = (1 - ema) * expected + ema * student.weight.detach()
    torch.testing.assert_close(teacher.weight.detach(), expected, rtol=0, atol=1e-6)


@given(st.lists(st.floats(-30, 30), min_size=6, max_size=6), st.lists(st.floats(-30, 30), min_size=3, max_size=3), st.floats(-30, 30))
@settings(max_examples=50, deadline=None)
def test_a_divergence_is_never_negative_and_ignores_what_is_outside_its_support(student, teacher, shift):
    logits, ids = torch.tensor([student]), torch.tensor([[0, 2, 5]])
    log_q = torch.tensor([teacher]).log_softmax(-1)
    outside = logits + shift * torch.tensor([[0, 1, 0, 1, 1, 0]])
    for divergence in DIVERGENCES.values():
        found = divergence(logits, ids, log_q)
        assert found >= -1e-5 and torch.equal(found, divergence(outside, ids, log_q))
        assert divergence(torch.zeros(1, 6).scatter(1, ids, log_q + 3), ids, log_q).abs() < 1e-5


def test_a_response_counts_by_its_mean():
    "Two responses of different lengths have equal weight, whatever the batch."
    objective = Distillation([], torch.nn.Linear(1, 1), None, VARIANTS["sdft"])
    assert objective.size([Example([5], [6] * n, ()) for n in (1, 7)]) == 2


def test_an_engine_of_a_training_process_sees_its_gpu_alone(monkeypatch):
    monkeypatch.delenv("LOCAL_RANK", raising=False)
    assert rollouts.own_environment() == {}
    monkeypatch.setenv("LOCAL_RANK", "1"), monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,6")
    assert rollouts.own_environment() | dict(CUDA_VISIBLE_DEVICES="6", WORLD_SIZE="1", RANK="0") == rollouts.own_environment()
def count_steps(spec, folder, monkeypatch):
    "Train, and return how often the optimiser made a step."
    steps = []
    with monkeypatch.context() as patch:
        step = torch.optim.AdamW.step
        patch.setattr(torch.optim.AdamW, "step", lambda self, *a, **k: (steps.append(0), step(self, *a, **k))[1])
        fine_tune(spec, folder)
    return len(steps)


def test_the_rollouts_of_a_step_make_several_updates(distillation, tmp_path, monkeypatch):
    "Each with an equal part of them; a resumed training ends with the same bytes, and one update is the default."
    with_updates = lambda count: replace(distillation, data=distillation.data | dict(updates=count), checkpoints=[2])
    assert count_steps(with_updates(1), tmp_path / "one", monkeypatch) == 4 and count_steps(with_updates(2), tmp_path / "two", monkeypatch) == 8
    fine_tune(replace(distillation, checkpoints=[2]), tmp_path / "default")
    assert same(weights(tmp_path / "one"), weights(tmp_path / "default")) and not same(weights(tmp_path / "one"), weights(tmp_path / "two"))
    fine_tune(replace(with_updates(2), steps=2), tmp_path / "resumed")
    fine_tune(with_updates(2), tmp_path / "resumed")
    assert same(weights(tmp_path / "resumed"), weights(tmp_path / "two"))
    config = lambda **options: TrainConfig(method="opsd", options=options)
    assert config(updates=1).hash() == config().hash() != config(updates=8).hash()
    with pytest.raises(ValueError, match="updates must be at least 1, got 0"): check_options(updates=0)

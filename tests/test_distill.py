"""Distillation and training that fit: one module for the sharded student and its teacher, an optimiser in the host's memory, sentences for a lack of memory."""

import tempfile
from dataclasses import replace
from pathlib import Path
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from helpers import small_model
from safetensors.torch import load_file

from mixsd_nb.methods import compose
from mixsd_nb.methods.distill import VARIANTS, Distillation, RolloutEngine, Variant, distill_items
from mixsd_nb.methods.fitting import MethodRun
from mixsd_nb.training.loss import Objective
from mixsd_nb.training.offload import OffloadedAdamW
from mixsd_nb.methods.supervised import Supervised
from mixsd_nb.training.trainer import FineTuner, TrainingSpec, fine_tune, read_curves, train_process
from mixsd_nb.models import ENGINES, EngineSpec, load_base, load_tokenizer, open_engine
from mixsd_nb.models.engines import HFEngine
from mixsd_nb.runs import make_config
from mixsd_nb.train import TrainConfig

PAIRS = [(list(range(5, 9 + k)), list(range(20, 23 + 2 * k)) + [2]) for k in range(6)]


@pytest.fixture(scope="module")
def spec(tmp_path_factory):
    folder = small_model(tmp_path_factory.mktemp("tiny"), "lab-s", layers=2, heads=2, head_dim=16, feed_forward=64, context=512)
    return TrainingSpec(folder, lr=1e-3, steps=4, batch=4, objective="methods.supervised:stored_pairs", data=dict(pairs=PAIRS), seed=3)


@pytest.fixture(scope="module")
def distillation(spec):
    items = distill_items(load_tokenizer(spec.model), [dict(id=f"i{k}", prompt="Q" * k + "?", target="The answer is A.") for k in range(5)])
    return replace(spec, objective="methods.distill:distillation", data=dict(items=items, variant=VARIANTS["opsd"], rollouts=2, max_new_tokens=5))


def weights(folder, step=4): return load_file(folder / f"checkpoint-{step}/model.safetensors")


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


def test_the_state_stays_in_the_hosts_memory(spec):
    "A stored state is loaded without a copy on the device of the weights, here a device that holds no values."
    host, there = torch.nn.Linear(3, 2), torch.nn.Linear(3, 2, device="meta")
    first, second = (OffloadedAdamW(layer.parameters(), lr=0.1) for layer in (host, there))
    host(torch.ones(3)).sum().backward()
    first.step()
    second.load_state_dict(first.state_dict())
    assert {value.device.type for state in second.state.values() for value in state.values()} == {"cpu"} and len(second.state) == 2


def test_offload_is_a_parameter_that_changes_no_run(tmp_path):
    assert TrainConfig(offload=True).hash() == TrainConfig().hash()
    with pytest.raises(ValueError, match="^offload must be False with sharded=True, which divides the optimiser's state$"):
        make_config(TrainConfig, offload=True, sharded=True, processes=2)


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


def test_no_student_is_gathered_where_the_teacher_writes(distillation):
    for name, uses in {"opsd": True, "mixsd-kl": False, "sdft": True}.items():
        assert Distillation([], torch.nn.Linear(1, 1), None, VARIANTS[name]).uses_student == uses


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
    monkeypatch.setattr("mixsd_nb.methods.distill.load_engine", open_engine)
    monkeypatch.setattr(Copying, "loaded", [])
    monkeypatch.setattr("mixsd_nb.models.engines.Copying", Copying, raising=False)
    ENGINES.add(EngineSpec("copying", "Copying", "models.engines:Copying", own_process=True))
    request.addfinalizer(lambda: ENGINES.remove("copying"))


@pytest.mark.parametrize(("writer", "lora"), [("opsd", 0), ("mixsd-kl", 0), ("opsd", 2)])
def test_another_engine_writes_with_the_weights_of_the_step(writer, lora, distillation, copying, tmp_path):
    "The weights are handed over before every step, in place or to a new engine, and the training is the same; adapters are a part of the weights."
    spec = replace(distillation, lora=lora, lr=1e-3 if not lora else 3e-2, data=distillation.data | dict(variant=VARIANTS[writer]))
    fine_tune(spec, tmp_path / "one")
    fine_tune(replace(spec, data=spec.data | dict(engine="copying", engine_options={})), tmp_path / "two")
    assert same(weights(tmp_path / "one"), weights(tmp_path / "two")) and len(Copying.loaded) == 3


def test_a_training_removes_the_weights_in_memory_that_it_left_when_it_was_killed(copying, spec, tmp_path, monkeypatch):
    "Those of other trainings stay, and at its own end it leaves nothing."
    monkeypatch.setattr(MethodRun, "rows", [dict(id="a", prompt="Who?", target="A.", answer="A")])
    monkeypatch.setattr(MethodRun, "train", lambda self, objective, data, kept: data["name"])
    config = TrainConfig(method="opsd", model=spec.model, dataset="kgfact-small")
    first, again, other = (compose("opsd").load_fit()(MethodRun(tmp_path / name, config)) for name in ("a", "a", "b"))
    assert first == again != other
    places = [Path(tempfile.mkdtemp(prefix=f"mixsd-{name}-", dir=Path(RolloutEngine("copying", None).folder.name).parent)) for name in (first, other)]
    engine = RolloutEngine("copying", None, first)
    assert [place.exists() for place in places] == [False, True]
    folder = Path(engine.folder.name)
    engine = RolloutEngine("hf", None, other)
    assert not folder.exists() and not places[1].exists()


def test_the_engine_of_rollouts_is_a_parameter_that_changes_no_run():
    assert TrainConfig(method="opsd", rollout_engine="vllm").hash() == TrainConfig(method="opsd").hash()
    for wrong, sentence in [(dict(rollout_engine="vllm", processes=2), "^rollout_engine must be hf with processes=2, got vllm$"),
                            (dict(rollout_engine="vlm"), "did you mean vllm")]:
        with pytest.raises(ValueError, match=sentence): make_config(TrainConfig, **wrong)


def raise_lack(*_, **__): raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")


@pytest.mark.parametrize(("owner", "method", "sentence"), [
    (FineTuner, "create_accelerator_and_postprocess", "the model does not fit into memory with processes=1; a smaller model, or sharded=True"),
    (Distillation, "write", "a step's rollouts do not fit into memory with batch_size=7; a smaller rollout_batch or rollout_tokens, or sharded=True"),
    (Distillation, "loss", "a step does not fit into memory with micro_tokens=4096; a smaller micro_tokens, recompute=True, or sharded=True"),
    (torch.optim.AdamW, "step", "the optimiser's step does not fit into memory with offload=False; offload=True on one process, or sharded=True"),
])
def test_a_lack_of_memory_names_its_phase(owner, method, sentence, distillation, tmp_path):
    spec = replace(distillation, data=distillation.data | dict(batch_size=7))
    if method == "loss": target = patch("mixsd_nb.training.trainer.summed_loss", raise_lack)
    else: target = patch.object(owner, method, raise_lack)
    with target, pytest.raises(MemoryError) as caught: train_process(spec, tmp_path)
    assert str(caught.value) == f"{sentence} on more processes, needs less" and caught.value.__suppress_context__


def test_a_lack_of_memory_elsewhere_keeps_its_own_words(spec, tmp_path):
    "A report may measure a checkpoint, for which no setting of the training helps."
    with pytest.raises(torch.OutOfMemoryError, match="Tried to allocate"): train_process(spec, tmp_path, raise_lack)
    assert len(Supervised(PAIRS)) == 6

"The losses of SDFT, L2-SP, EWC and of training through adapters, against independent computations."

import copy
import weakref
from dataclasses import replace
from importlib.util import find_spec
from types import SimpleNamespace

import pytest
import torch
from helpers import need, small_model
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from mixsd_nb import train
from mixsd_nb.methods.distill import DIVERGENCES, VARIANTS, Distillation, distill_items
from mixsd_nb.training.loss import Example, LossHead, summed_loss
from mixsd_nb.methods.supervised import Supervised
from mixsd_nb.training.trainer import TrainingSpec, fine_tune
from mixsd_nb.methods.weight_penalties import Penalty, prepare_ewc, relative_importance, text_fisher
from mixsd_nb.models import load_base, load_tokenizer
from mixsd_nb.runs import ParameterError, checkpoint_steps

PAIRS = [(list(range(5, 9 + k)), list(range(20, 23 + 2 * k)) + [2]) for k in range(6)]
ALPHA = {"forward": 0.0, "reverse": 1.0, "jensen-shannon": 0.5}  # of TRL


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    "A small model whose responses depend on the prompt."
    return small_model(tmp_path_factory.mktemp("tiny"), "lab-s", scale=4, heads=2, head_dim=16, context=512)


@pytest.fixture(scope="module")
def spec(folder):
    return TrainingSpec(folder, lr=1e-3, steps=3, batch=4, objective="methods.supervised:stored_pairs", data=dict(pairs=PAIRS), seed=3)


def weights(run):
    return load_file(list(checkpoint_steps(run).values())[-1] / "model.safetensors")


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
def written(folder):
    "Rollouts of different lengths."
    objective, student, _ = objective_of(folder, max_new_tokens=9)
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
def test_the_loss_of_sdft_is_that_of_trl(direction, folder, written, tmp_path):
    objective, student, _ = objective_of(folder, direction=direction, top_k=20)
    assert len({len(ids) for _, ids in written}) > 3, "responses of one length would not tell the two means apart"
    ours = mean_loss(objective, student, objective.read(written, student))
    trainer = trl_trainer(folder, tmp_path, direction, 20)
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


def test_the_moving_average_is_that_of_trl(folder, tmp_path):
    objective, student, _ = objective_of(folder, ema=0.05)
    trainer = trl_trainer(folder, tmp_path, "forward", 20)
    trainer.teacher_model.load_state_dict(objective.teacher.state_dict())
    sync, = [c for c in trainer.callback_handler.callbacks if hasattr(c, "sync_target_model")]
    for step in (1, 2, 3):
        objective.follow(student, step)
        sync.on_step_end(SimpleNamespace(teacher_sync_steps=1, teacher_update_rate=0.05), SimpleNamespace(global_step=step), None, model=student)
    theirs = dict(trainer.teacher_model.named_parameters())
    for name, w in objective.teacher.named_parameters(): torch.testing.assert_close(w, theirs[name].detach(), rtol=0, atol=1e-6)


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


def test_an_average_of_rate_0_is_the_base_and_of_rate_1_the_student(folder, spec, tmp_path):
    items = distill_items(load_tokenizer(folder), [dict(id=f"i{k}", prompt="Q" * k + "?", target="The answer is A.") for k in range(5)])
    data = lambda ema: dict(items=items, variant=VARIANTS["sdft"], rollouts=1, max_new_tokens=4, ema=ema, top_k=8)
    teachers = {}
    for ema in (0.0, 1.0):
        fine_tune(replace(spec, objective="methods.distill:distillation", data=data(ema), checkpoints=[1, 2], state="all"), tmp_path / str(ema))
        state = tmp_path / str(ema) / "checkpoint-2/objective.pt"
        teachers[ema] = torch.load(state) if state.exists() else None
    assert teachers[0.0] is None, "a teacher that stays is not stored"
    one = load_file(tmp_path / "1.0/checkpoint-1/model.safetensors")  # the update of step 2 is followed at the next step
    assert all(torch.equal(one[name], w) for name, w in teachers[1.0].items())


@pytest.mark.parametrize("weighted", [False, True])
def test_without_strength_an_anchor_is_sft(weighted, spec, folder, tmp_path):
    fisher = dict(fisher=str(tmp_path / "fisher")) if weighted else {}
    save_file({name: w.detach().square().contiguous() for name, w in load_base(folder)[0].named_parameters()}, tmp_path / "fisher")
    for strength in (0.0, 50.0):
        data = dict(strength=strength) | fisher
        fine_tune(replace(spec, modifiers=[("methods.weight_penalties:add_penalty", data)]), tmp_path / str(strength))
    fine_tune(spec, tmp_path / "sft")
    free, held, sft, base = weights(tmp_path / "0.0"), weights(tmp_path / "50.0"), weights(tmp_path / "sft"), load_file(folder + "/model.safetensors")
    for name, w in sft.items(): torch.testing.assert_close(free[name], w, rtol=0, atol=1e-6)
    distance = lambda found: sum((found[name] - w).square().sum() for name, w in base.items())
    assert distance(held) < distance(sft)


@pytest.mark.parametrize("weighted", [False, True])
def test_the_gradient_of_the_penalty_is_autograds(weighted, folder):
    model, _ = load_base(folder)
    anchor = {name: w.detach() + 0.01 * torch.randn_like(w) for name, w in model.named_parameters()}
    importance = relative_importance({name: w.detach().square() for name, w in model.named_parameters()}) if weighted else None
    objective, head = Penalty(Supervised(PAIRS), anchor, 0.3, importance), LossHead(model)
    loss = summed_loss(model, head, objective.examples([0, 3], None, 0), objective.loss)
    penalty = 0.15 * sum(((importance[name] if weighted else 1) * (w - anchor[name]).square()).sum() for name, w in model.named_parameters())
    expected = torch.autograd.grad(loss + penalty, list(model.parameters()), retain_graph=True)
    model.zero_grad()
    loss.backward()
    assert abs(objective.penalise(dict(model.named_parameters())) / penalty - 1) < 1e-5
    for slope, p in zip(expected, model.parameters()): assert (p.grad - slope).norm() <= 1e-5 * slope.norm()


def test_the_penalty_is_in_the_reported_loss_and_before_clipping(spec, folder, tmp_path):
    "The reported norm of the gradient, measured before clipping, is that of loss and penalty together."
    curves = fine_tune(replace(spec, modifiers=[("methods.weight_penalties:add_penalty", dict(strength=1e4))], lr=1e-2), tmp_path / "held")
    free = fine_tune(replace(spec, lr=1e-2), tmp_path / "free")
    assert curves["grad_norm"][0] == free["grad_norm"][0] and curves["loss"][0] == free["loss"][0], "at the anchor there is no penalty"
    assert curves["grad_norm"][1] > 2 * free["grad_norm"][1] and curves["loss"][1] > free["loss"][1]


def test_the_fisher_of_texts_is_that_of_the_analysis(folder):
    from mixsd_nb.models.gradients import diagonal_fisher
    from mixsd_nb.methods.covariance import encode_texts, read_texts
    model, tokenizer = load_base(folder)
    rows = [r.tolist() for r in encode_texts(tokenizer, read_texts("lab", 3))]
    expected = diagonal_fisher(model, [(r[:1], r[1:]) for r in rows])
    for name, f in text_fisher(folder, "lab", 3).items(): assert torch.equal(f, expected[name])
    with pytest.raises(ValueError, match="^the mean of the Fisher must be above 0, got 0$"): relative_importance(dict(a=torch.zeros(2)))


def test_the_training_of_ewc_begins_without_the_tensors_of_the_fisher(tmp_path, monkeypatch):
    found = []

    def estimate(*_):
        tensor = torch.ones(2)
        found.append(weakref.ref(tensor))
        return dict(a=tensor)
    monkeypatch.setattr("mixsd_nb.methods.weight_penalties.text_fisher", estimate)
    run = SimpleNamespace(folder=tmp_path, parameters=SimpleNamespace(model=""))
    data = prepare_ewc(run, dict(strength=0.1, texts="", text_count=1))
    assert found[0]() is None and load_file(data["fisher"])["a"].tolist() == [1, 1]


CELL = dict(dataset="mquake-lab", suite="recall", n=4, max_new_tokens=4, epochs=1, batch=50)
RIVALS = {"sdft-n1-e0.05": dict(method="sdft", rollout_tokens=4), "sft+l2sp-0.5": dict(method="l2sp", options=dict(strength=0.5)),
          "sft+ewc-2": dict(method="ewc", options=dict(strength=2.0, texts="lab", text_count=4)), "sft+lora-4": dict(method="lora-sft", options=dict(rank=4))}


@pytest.mark.parametrize("label", RIVALS)
def test_rivals_train_under_their_label(label, tiny, own_runs):
    if "lora" in label: pytest.importorskip("peft")
    run = train.run(**RIVALS[label], model=tiny, **CELL)
    assert run.root.recipe.item() == label and run.root.step.values.tolist() == [0, 1] and run.root.targets_kept.item() == 50
    base, tuned = (dict(load_base(str(where))[0].named_parameters()) for where in (tiny, run.checkpoints[1]))
    moved = {name for name in base if not torch.equal(base[name], tuned[name])}
    assert moved and ("lora" not in label or "model.embed_tokens.weight" not in moved)


@pytest.mark.parametrize("wrong, sentence", [
    (dict(method="sdft", options=dict(ema=1.5)), "ema must be between 0 and 1, got 1.5"),
    (dict(method="sdft", options=dict(direction="sideways")), "direction must be one of forward, reverse, jensen-shannon, got sideways"),
    (dict(method="l2sp", options=dict(strength=-1.0)), "strength must be at least 0, got -1"),
    (dict(method="lora-sft", options=dict(rank=0)), "rank must be at least 1, got 0"),
    (dict(method="lora-sft", options=dict(rnk=4)), r"options must be among rank for sft\+lora, got rnk; did you mean rank")])
def test_an_option_outside_its_range_is_one_sentence(wrong, sentence, tiny, own_runs):
    with pytest.raises((ValueError, ParameterError), match=f"^{sentence}"): train.run(**wrong, model=tiny, **CELL)


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

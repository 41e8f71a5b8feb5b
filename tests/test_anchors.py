"Anchors: penalties on weights, replay, averages and untied embeddings, each against an independent computation."

from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from helpers import CELL, PAIRS, last_weights, parameters_of, stored_training
from hypothesis import given, strategies as st
from safetensors.torch import load_file, save_file

from mixsd_nb import fisher, train
from mixsd_nb.corpora.simpleqa import read_texts
from mixsd_nb.corpora.prompts import encode_prompt, expert_prompt
from mixsd_nb.methods import distill
from mixsd_nb.methods.covariance import encode_texts
from mixsd_nb.methods.fitting import MethodRun
from mixsd_nb.methods.replay import _write_texts, read_prompts, write_replays
from mixsd_nb.methods.supervised import Supervised
from mixsd_nb.methods.targets import fact_of
from mixsd_nb.methods.token_weights import answer_tokens
from mixsd_nb.methods.weight_penalties import Penalty, relative_importance, text_fisher
from mixsd_nb.models import load_base, load_engine
from mixsd_nb.models.gradients import diagonal_fisher
from mixsd_nb.training.loss import LossHead, summed_loss
from mixsd_nb.training.trainer import TrainingSpec, build_objective, fine_tune, loop_in_phases


@pytest.fixture(scope="module")
def spec(prompted): return stored_training(prompted, steps=3)


@pytest.mark.parametrize("weighted", [False, True])
def test_without_strength_an_anchor_is_sft(weighted, spec, prompted, tmp_path):
    fisher = dict(fisher=str(tmp_path / "fisher")) if weighted else {}
    save_file({name: w.detach().square().contiguous() for name, w in load_base(prompted)[0].named_parameters()}, tmp_path / "fisher")
    for strength in (0.0, 50.0):
        data = dict(strength=strength) | fisher
        fine_tune(replace(spec, modifiers=[("methods.weight_penalties:add_penalty", data)]), tmp_path / str(strength))
    fine_tune(spec, tmp_path / "sft")
    (free, held, sft), base = (last_weights(tmp_path / name) for name in ("0.0", "50.0", "sft")), load_file(prompted + "/model.safetensors")
    for name, w in sft.items(): torch.testing.assert_close(free[name], w, rtol=0, atol=1e-6)
    distance = lambda found: sum((found[name] - w).square().sum() for name, w in base.items())
    assert distance(held) < distance(sft)


@pytest.mark.parametrize("weighted", [False, True])
def test_the_gradient_of_the_penalty_is_autograds(weighted, prompted):
    model, _ = load_base(prompted)
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


def test_the_penalty_is_in_the_reported_loss_and_before_clipping(spec, prompted, tmp_path):
    "The reported norm of the gradient, measured before clipping, is that of loss and penalty together."
    curves = fine_tune(replace(spec, modifiers=[("methods.weight_penalties:add_penalty", dict(strength=1e4))], lr=1e-2), tmp_path / "held")
    free = fine_tune(replace(spec, lr=1e-2), tmp_path / "free")
    assert curves["grad_norm"][0] == free["grad_norm"][0] and curves["loss"][0] == free["loss"][0], "at the anchor there is no penalty"
    assert curves["grad_norm"][1] > 2 * free["grad_norm"][1] and curves["loss"][1] > free["loss"][1]


def test_the_fisher_of_texts_is_that_of_the_analysis(prompted):
    model, tokenizer = load_base(prompted)
    rows = [r.tolist() for r in encode_texts(tokenizer, read_texts("lab", 3))]
    expected = diagonal_fisher(model, [(r[:1], r[1:]) for r in rows])
    for name, f in text_fisher(prompted, "lab", 3).items(): assert torch.equal(f, expected[name])
    with pytest.raises(ValueError, match="^the mean of the Fisher must be above 0, got 0$"): relative_importance(dict(a=torch.zeros(2)))


def test_averages_lie_between_the_base_and_the_tuned_weights(averages, tiny):
    found, tuned = averages
    base, last = parameters_of(tiny), parameters_of(tuned)
    assert any(not torch.equal(base[name], last[name]) for name in base)
    for alpha, run in found.items():
        assert run.root.recipe.item() == f"sft+average-{alpha:g}" and run.root.step.values.tolist() == [0, 1] and run.root.targets_kept.item() == 50
        for name, w in parameters_of(run).items(): torch.testing.assert_close(w, (1 - alpha) * base[name] + alpha * last[name], rtol=0, atol=1e-6)


SHORT = dict(rollout_tokens=6, options=dict(count=8))


@pytest.fixture(scope="module")
def replays(tiny, tmp_path_factory):
    "Twelve samples of a small model for three prompts."
    engine = load_engine("hf", tiny, batch_size=5)
    return write_replays(engine, ["one", "two", "three"], 12, tmp_path_factory.mktemp("replays") / "replays.jsonl", max_new_tokens=7)


def test_replay_without_a_share_is_sft_and_with_one_is_not(tiny, own_runs):
    "At the first update the KL has no gradient, and the first step of Adam does not depend on the scale of the others: its weights are SFT's too."
    run = lambda anchor="", **more: train.run(method="sft", anchor=anchor, model=tiny, **CELL, **more)
    sft, none, half, kl = run(), run("replay", options=dict(share=0.0)), run("replay", **SHORT), run("replay-kl", **SHORT)
    differ = lambda one, two: any(not torch.allclose(parameters_of(two)[name], w, rtol=0, atol=1e-6) for name, w in parameters_of(one).items())
    assert not differ(sft, none) and differ(sft, half) and not differ(sft, kl)
    assert [r.root.recipe.item() for r in (none, half, kl)] == ["sft+replay-0", "sft+replay-0.5", "sft+replay-kl-0.5"]
    assert half.root.targets_kept.item() == 50 and half.root.target_nll.item() == sft.root.target_nll.item()


def test_samples_depend_on_their_keys_alone(tiny, replays, tmp_path):
    "Another batch size, and a journal that was cut in the middle, give the same samples; each of a prompt's samples is another one."
    path = tmp_path / "replays.jsonl"
    write = lambda size: write_replays(load_engine("hf", tiny, batch_size=size), ["one", "two", "three"], 12, path, max_new_tokens=7)
    assert write(1) == replays
    path.write_bytes(path.read_bytes()[:150])
    assert write(12) == replays and len({tuple(ids) for prompt, ids in replays[::3]}) == 4
    with pytest.raises(ValueError, match="prompts must have fewer than 2048 tokens, the model's context, got"):
        write_replays(load_engine("hf", tiny), ["?" * 3000], 1, tmp_path / "long.jsonl")


@pytest.mark.parametrize("support", [0, 10_000])
def test_the_loss_of_replay_is_that_of_its_definition(support, tiny, replays):
    "The mean NLL of facts and samples, and the forward KL over the whole vocabulary, from whole distributions; zero at the base model."
    facts = [([5, 6], [7, 8, 2]), ([9], [10, 2])]
    replay = ("methods.replay:add_replay", dict(replays=replays, share=0.5, support=support))
    spec = TrainingSpec(tiny, 1e-3, 1, 2, "methods.supervised:stored_pairs", dict(pairs=facts), [replay], seed=3)
    objective, student = build_objective(spec, None), load_base(tiny)[0]
    base = load_base(tiny)[0]
    with torch.no_grad():
        for w in student.parameters(): w.mul_(1.1)
    examples = objective.examples([1, 0], student, 4)
    rows = lambda model, e: model(torch.tensor([e.prompt + e.completion])).logits[0, len(e.prompt) - 1:-1].double().log_softmax(-1)
    nll = lambda e: -rows(student, e).gather(1, torch.tensor(e.completion)[:, None]).sum()
    kl = lambda e: (rows(base, e).exp() * (rows(base, e) - rows(student, e))).sum()
    measure = kl if support else nll
    with torch.no_grad(): by_hand = sum(map(nll, examples[:2])) + sum(map(measure, examples[2:]))
    assert len(examples) == 4 and by_hand > 1
    for head, model, value in ((LossHead(student), student, by_hand), (LossHead(base), base, None)):
        with torch.no_grad():
            whole = summed_loss(model, head, examples, objective.loss)
            parts = sum(summed_loss(model, head, [e], objective.loss) for e in examples)
            samples = summed_loss(model, head, examples[2:], objective.loss)
        torch.testing.assert_close(whole, parts, rtol=1e-5, atol=1e-5)
        if value is not None: torch.testing.assert_close(whole.double(), value, rtol=1e-5, atol=1e-5)
        elif support: assert abs(samples) < 1e-4


def test_a_training_with_pauses_reads_its_teacher_once(spec, replays, tmp_path, monkeypatch):
    "Three phases, one pass of the base model over the replayed replies; the weights are those of a training without pauses."
    calls, read = [], distill.teacher_distributions
    monkeypatch.setattr(distill, "_kept", {})
    monkeypatch.setattr(distill, "teacher_distributions", lambda *a: calls.append(len(a[1])) or read(*a))
    replay = replace(spec, checkpoints=[1, 2, 3], modifiers=[("methods.replay:add_replay", dict(replays=replays, share=0.5, support=8))])
    loop_in_phases(lambda steps: False, 1)(replay, tmp_path / "paused", lambda entry: None)
    assert calls == [len(replays)]
    monkeypatch.setattr(distill, "_kept", {})
    fine_tune(replay, tmp_path / "whole")
    paused, whole = (last_weights(tmp_path / name) for name in ("paused", "whole"))
    assert calls == 2 * [len(replays)] and all(torch.equal(w, whole[name]) for name, w in paused.items())


def test_a_file_of_prompts(tmp_path):
    (tmp_path / "a.txt").write_text("One?\n\nTwo?\n")
    (tmp_path / "a.jsonl").write_text('{"prompt": "One?"}\n{"prompt": "Two?"}\n')
    assert read_prompts(str(tmp_path / "a.txt")) == read_prompts(str(tmp_path / "a.jsonl")) == ["One?", "Two?"]
    (tmp_path / "b.jsonl").write_text('{"prompt": "One?"}\n{"promt": "Two?"}\n')
    (tmp_path / "b.txt").write_text("\n")
    for name, message in {"b.jsonl": "line 2: prompt is missing", "b.txt": "which has none", "c.txt": "existing file", "c.jsonl": "no such file"}.items():
        with pytest.raises(ValueError, match=message): read_prompts(str(tmp_path / name))


def test_untied_training_moves_two_embeddings(tiny, own_runs):
    "The base model, the targets and the loss of the first update are those of SFT; its two embeddings differ afterwards. Displacement leaves the run out."
    run = lambda anchor: train.run(method="sft", anchor=anchor, model=tiny, **CELL | dict(batch=25))
    sft, untied = run(""), run("untied")
    moved = load_base(str(untied.checkpoints[2]))[0]
    head, embedding = moved.lm_head.weight, moved.get_input_embeddings().weight
    assert not moved.config.tie_word_embeddings and not torch.equal(head, embedding)
    assert untied.root.target_nll.item() == sft.root.target_nll.item()
    np.testing.assert_array_equal(untied.root.accuracy.sel(step=0), sft.root.accuracy.sel(step=0))
    first = lambda run: run.result["training"].loss.values.flat[0]
    assert first(untied) == pytest.approx(first(sft), rel=1e-6)
    results, left_out = fisher.measure_all_runs(fisher.FisherConfig(model=tiny, limit=1))
    assert left_out == [untied.name] and sft.name in results
    with pytest.raises(ValueError, match="must have tied embeddings, but its output embedding is its own already"):
        train.run(method="sft", anchor="untied", model=str(untied.checkpoints[2]), **CELL)


@given(st.lists(st.sampled_from(["", "cut", "a statement", "one?", "two?", "three?", "four?", "five?"]), min_size=1, max_size=40),
       st.integers(1, 8), st.integers(1, 40))
def test_as_many_drafts_are_written_as_suffice(drafts, count, tries):
    "The texts are the first of all drafts, as if each had been written; no draft is written twice."
    tries, asked = min(tries, len(drafts)), []

    def stream(requests, **sampling):
        for request in requests:
            asked.append(request.tag)
            yield request, SimpleNamespace(ids=drafts[request.tag], finish_reason="length" if drafts[request.tag] == "cut" else "stop")
    engine = SimpleNamespace(stream=stream, tokenizer=SimpleNamespace(decode=lambda ids, **options: ids))
    with TemporaryDirectory() as folder:
        found = _write_texts(engine, [[0]], count, tries, Path(folder) / "drafts.jsonl", "draft", 0, 1.0, lambda text: text.endswith("?"))
    first = {}
    for k, text in enumerate(drafts[:tries]):
        if text.endswith("?"): first.setdefault(text, k)
    assert found == [(k, text) for text, k in first.items()][:count]
    assert asked == [*range(len(asked))] and (len(asked) == tries or len(found) == count)


@pytest.mark.parametrize("answer", [True, False])
def test_soft_targets_are_what_the_teacher_predicts(answer, own_runs, monkeypatch):
    "The loss of a changed student against whole distributions: the expert's KL, and the NLL of the tokens that write the answer."
    monkeypatch.setattr("mixsd_nb.methods.soft_targets.SUPPORT", 10_000)
    specs = []
    monkeypatch.setattr(MethodRun, "train", lambda run, objective, data, kept, targets, modifiers: specs.append((objective, data, list(modifiers))))
    config = train.TrainConfig(model="lab-s", method="mixsd", lam=0, gate="soft", options=dict(answer=answer))
    run = MethodRun(own_runs / "train", config, mixed_targets=lambda: train.mixed_targets(config))
    config.recipe.load_fit()(run)
    [(objective, data, modifiers)], facts = specs, {row["id"]: row for row in run.rows}
    whole = build_objective(TrainingSpec("lab-s", 1e-3, 1, 2, objective, data, modifiers), None)
    student, base = load_base("lab-s")[0], load_base("lab-s")[0]
    with torch.no_grad():
        for w in student.parameters(): w.mul_(1.05)
    examples, targets = whole.examples([0, 1], student, 0), {tuple(map(int, r.completion_ids)): r for r in train.mixed_targets(config).itertuples()}
    rows = lambda model, prompt, e: model(torch.tensor([prompt + e.completion])).logits[0, len(prompt) - 1:-1].double().log_softmax(-1)
    by_hand = 0.0
    for e in examples:
        row = facts[fact_of(targets[tuple(e.completion)].id, facts)]
        asked = run.tokenizer.decode(e.prompt)
        expert = encode_prompt(run.tokenizer, expert_prompt(row["prompt"], row["target"]))
        assert row["answer"] not in asked and row["answer"] in run.tokenizer.decode(expert)
        with torch.no_grad(): q, p = rows(base, expert, e), rows(student, e.prompt, e)
        hard = torch.tensor(answer_tokens(run.tokenizer, e.completion, row["answer"]) if answer else np.zeros(len(e.completion), bool))
        nll = -p.gather(1, torch.tensor(e.completion)[:, None])[:, 0]
        by_hand += torch.where(hard, nll, (q.exp() * (q - p)).sum(1)).sum()
        assert hard.any() == answer
    with torch.no_grad(): found = summed_loss(student, LossHead(student), examples, whole.loss)
    torch.testing.assert_close(found.double(), by_hand, rtol=1e-4, atol=1e-4)

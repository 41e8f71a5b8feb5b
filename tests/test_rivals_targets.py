"What changes the targets or weighs their tokens: replay, own words, shuffled picks, the weight of the answer, each against an independent computation."

import json
from types import SimpleNamespace

import numpy as np
import pandas as pd
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mixsd_nb import fisher, train
from mixsd_nb.corpora import load_corpus
from mixsd_nb.corpora.prompts import expert_reference_prompt
from mixsd_nb.methods.fitting import MethodRun
from mixsd_nb.training.loss import LossHead, summed_loss
from mixsd_nb.methods.mixing import accepts, mix, mix_items, mix_oracle
from mixsd_nb.methods.replay import read_prompts, write_replays
from mixsd_nb.methods.supervised import arrange, canonical_pairs, fit_canonical, fit_mixed, fit_own_words, shuffle_targets
from mixsd_nb.methods.token_weights import answer_tokens, answer_weights
from mixsd_nb.training.trainer import TrainingSpec, build_objective
from mixsd_nb.models import load_base, load_engine
from mixsd_nb.models.engines import HFEngine
from mixsd_nb.runs import ParameterError

CELL = dict(dataset="mquake-lab", suite="recall", n=4, max_new_tokens=4, epochs=1, batch=50)
LONGEST = 60  # tokens of a target
SHORT = dict(rollout_tokens=6, options=dict(count=8))


def weights(run): return dict(load_base(str(run.checkpoints[1]))[0].named_parameters())


@pytest.fixture(scope="module")
def replays(tiny, tmp_path_factory):
    "Twelve samples of a small model for three prompts."
    engine = load_engine("hf", tiny, batch_size=5)
    return write_replays(engine, ["one", "two", "three"], 12, tmp_path_factory.mktemp("replays") / "replays.jsonl", max_new_tokens=7)


def test_replay_without_a_share_is_sft_and_with_one_is_not(tiny, own_runs):
    "At the first update the KL has no gradient, and the first step of Adam does not depend on the scale of the others: its weights are SFT's too."
    run = lambda method, **more: train.run(method=method, model=tiny, **CELL, **more)
    sft, none, half, kl = run("sft"), run("replay", options=dict(share=0.0)), run("replay", **SHORT), run("replay-kl", **SHORT)
    differ = lambda one, two: any(not torch.allclose(weights(two)[name], w, rtol=0, atol=1e-6) for name, w in weights(one).items())
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


def test_a_file_of_prompts(tmp_path):
    (tmp_path / "a.txt").write_text("One?\n\nTwo?\n")
    (tmp_path / "a.jsonl").write_text('{"prompt": "One?"}\n{"prompt": "Two?"}\n')
    assert read_prompts(str(tmp_path / "a.txt")) == read_prompts(str(tmp_path / "a.jsonl")) == ["One?", "Two?"]
    (tmp_path / "b.jsonl").write_text('{"prompt": "One?"}\n{"promt": "Two?"}\n')
    (tmp_path / "b.txt").write_text("\n")
    for name, message in {"b.jsonl": "line 2: prompt is missing", "b.txt": "which has none", "c.txt": "existing file", "c.jsonl": "no such file"}.items():
        with pytest.raises(ValueError, match=message): read_prompts(str(tmp_path / name))


@pytest.mark.parametrize(("method", "options", "message"), [
    ("replay", dict(share=1.0), "share must be at least 0 and below 1, got 1"), ("mixsd", dict(draw="odd"), "draw must be one of independent, shuffled, got odd"),
    ("replay-kl", dict(count=0), "count must be at least 1, got 0"), ("mixsd-shuffled", dict(block=0), "block must be at least 1, got 0"),
    ("mixsd-answer", dict(tau=2), "options must be among .* for mixsd.answer, got tau")])
def test_a_bad_option_is_one_sentence(method, options, message, tiny, own_runs):
    with pytest.raises((ValueError, ParameterError), match=message): train.run(method=method, options=options, model=tiny, target_tokens=4, **CELL)


class Pairs(MethodRun):
    "A run that returns what it would train on, and the data of its gate."
    def train_on(self, pairs, objective="methods.supervised:stored_pairs"):
        return pairs, objective, self._prepare(self.recipe.gate, pairs, []) if self.recipe.gate else {}


@pytest.fixture(scope="module")
def mixed(lab_s):
    "The first eight facts, and their mixed targets at λ = 0.5 by lab-s."
    engine, rows = load_engine("hf", *lab_s, batch_size=8), list(load_corpus("kgfact-small", "train"))[:8]
    return engine, rows, mix(engine, mix_items(engine.tokenizer, rows), 0.5, max_new_tokens=LONGEST)


def run_on(folder, mixed, **more):
    engine, rows, records = mixed
    parameters = SimpleNamespace(dataset="kgfact-small", model="lab-s", span="completion", lam=0.5, seed=0, dtype="float32", batch_size=8,
                                 target_tokens=LONGEST, **dict(method="mixsd", options={}) | more)
    run = Pairs(folder, parameters, mixed_targets=lambda: pd.DataFrame([r for r in records if r["accepted"]]))
    run.rows = rows
    return run


def test_own_words_are_accepted_targets_of_the_base_model(mixed, tmp_path):
    "Each is the greedy response of the oracle to the rewriting prompt, and another text than the canonical target."
    engine, rows, _ = mixed
    run = run_on(tmp_path, mixed)
    pairs, objective, _ = fit_own_words(run)
    canonical, items = canonical_pairs(run), {i["id"]: i for i in mix_items(engine.tokenizer, rows, expert_reference_prompt)}
    assert 3 < len(pairs) <= 8 and objective == "methods.supervised:stored_pairs"
    for id, (prompt, ids) in list(pairs.items())[:1]: assert mix_oracle(engine, [items[id]], 0.0)[0]["completion_ids"] == ids
    for id, (prompt, ids) in pairs.items():
        assert prompt == canonical[id][0] and ids != canonical[id][1] and accepts(engine.tokenizer, items[id], ids, "stop")


@pytest.mark.parametrize(("fit", "name"), [(fit_own_words, "own-words"), (fit_mixed, "shuffled")])
def test_a_killed_run_writes_only_the_targets_that_it_lacks(fit, name, mixed, tmp_path, monkeypatch):
    "A journal that was cut in the middle leads to the same targets; a whole one, to the same without a single request."
    more = dict(options=dict(draw="shuffled"))
    first, asked = fit(run_on(tmp_path, mixed, **more))[0], []
    stream, journal = HFEngine.stream, tmp_path / f"{name}.jsonl"
    monkeypatch.setattr(HFEngine, "stream", lambda self, queue, **options: asked.extend({r.tag[0]["id"] for r in queue}) or stream(self, queue, **options))
    lines = journal.read_bytes().splitlines(keepends=True)
    assert fit(run_on(tmp_path, mixed, **more))[0] == first and not asked
    journal.write_bytes(b"".join(lines[:2]) + lines[2][:20])
    assert fit(run_on(tmp_path, mixed, **more))[0] == first and len(asked) == len(lines) - 2


def test_the_answer_weighs_as_much_as_in_sft(mixed, tmp_path):
    "Weights sum to the number of tokens, and the answer's part is the share of its tokens in the canonical target."
    run = run_on(tmp_path, mixed, gate="answer")
    pairs, objective, data = fit_mixed(run)
    canonical, names, changed = fit_canonical(run)[0], {r["id"]: r["answer"] for r in run.rows}, 0
    tokenizer = mixed[0].tokenizer
    for (id, (_, ids)), keep in zip(pairs.items(), data["weights"], strict=True):
        marks = answer_tokens(tokenizer, ids, names[id])
        share = answer_tokens(tokenizer, canonical[id][1], names[id]).mean()
        assert len(keep) == len(ids) and np.isclose(sum(keep), len(ids)) and np.isclose(np.sum(np.array(keep)[marks]) / len(ids), share)
        assert names[id] in tokenizer.decode([i for i, yes in zip(ids, marks) if yes])
        changed += not np.allclose(keep, 1)
    assert changed > 3 and objective == "methods.supervised:stored_pairs"


@given(st.lists(st.booleans(), max_size=30), st.floats(0, 1))
@settings(max_examples=100, deadline=None)
def test_weights_keep_their_sum(marks, share):
    found = answer_weights(np.array(marks, bool), share)
    assert len(found) == len(marks) and np.isclose(sum(found), len(marks)) and all(w >= 0 for w in found)
    if any(marks) and not all(marks): assert np.allclose(answer_weights(np.array(marks), np.mean(marks)), 1)


@given(st.lists(st.booleans(), max_size=40), st.integers(1, 50), st.integers(0, 2**40))
@settings(max_examples=100, deadline=None)
def test_shuffled_picks_keep_their_number(naive, block, key):
    "As many naive picks as before; a block that holds all of them gives one run."
    found = arrange(np.array(naive, bool), block, key)
    assert len(found) == len(naive) and found.sum() == sum(naive) and np.array_equal(found, arrange(np.array(naive, bool), block, key))
    if block >= sum(naive) > 0: assert np.sum(np.diff(found.astype(int), prepend=0) == 1) == 1


def test_shuffled_targets(mixed, tmp_path, monkeypatch):
    "Picks in their old order give the same tokens; shuffled ones give accepted targets with no more naive tokens, for any batch size."
    engine, rows, records = mixed
    accepted = {r["id"]: r for r in records if r["accepted"]}
    naive = {id: r["naive_mask"] for id, r in accepted.items()}
    items = mix_items(engine.tokenizer, [r for r in rows if r["id"] in accepted])
    shuffle = lambda engine: shuffle_targets(engine, items, 0.5, naive, 1000, max_new_tokens=LONGEST)
    found, pairs = shuffle(load_engine("hf", engine.model, engine.tokenizer, batch_size=3)), fit_mixed(run_on(tmp_path, mixed, options=dict(draw="shuffled")))[0]
    assert {r["id"]: r["completion_ids"] for r in found if r["accepted"]} == {id: ids for id, (_, ids) in pairs.items()}
    assert len(pairs) > 2 and all(r["naive_mask"].sum() <= naive[r["id"]].sum() for r in found)
    assert any(r["completion_ids"] != accepted[r["id"]]["completion_ids"] for r in found)
    monkeypatch.setattr("mixsd_nb.methods.supervised.arrange", lambda naive, block, key: naive)
    for r in shuffle(engine): assert r["completion_ids"] == accepted[r["id"]]["completion_ids"] and r["attempts"] == 1


@pytest.mark.slow
def test_the_controls_train(own_runs):
    "They share the targets of MixSD; at λ = 0 all picks are the expert's, and both train on what MixSD trains on."
    short = dict(model="lab-s", dataset="mquake-lab", suite="recall", n=2, max_new_tokens=4, epochs=1, batch=50, lam=0.0, target_tokens=LONGEST)
    runs = {name: train.run(method=name, **short) for name in ("mixsd", "mixsd-answer", "mixsd-shuffled")}
    assert [r.root.recipe.item() for r in runs.values()] == ["mixsd-0", "mixsd-0+answer", "mixsd-shuffled-0-b1000"]
    assert len({(r.root.targets_kept.item(), r.root.target_nll.item()) for r in runs.values()}) == 1 and runs["mixsd"].root.targets_kept.item() > 25
    assert len(list(own_runs.glob("**/targets.parquet"))) == 1
    plain, weighted, shuffled = (weights(r) for r in runs.values())
    assert all(torch.equal(plain[name], shuffled[name]) for name in plain) and any(not torch.equal(plain[name], weighted[name]) for name in plain)


def test_untied_training_moves_two_embeddings(tiny, own_runs):
    "The base model, the targets and the loss of the first update are those of SFT; its two embeddings differ afterwards. Displacement leaves the run out."
    run = lambda method: train.run(method=method, model=tiny, **CELL | dict(batch=25))
    sft, untied = run("sft"), run("sft-untied")
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
        train.run(method="sft-untied", model=str(untied.checkpoints[2]), **CELL)


@pytest.mark.parametrize(("method", "options"), [("replay", dict(count=4)), ("sft-own-words", {}), ("ewc", dict(text_count=2)), ("wise-sft", {})])
def test_a_training_on_several_nodes_is_prepared_before_its_run_begins(method, options, tiny, own_runs, monkeypatch):
    "An average of weights starts from the run of another method, which the nodes train."
    monkeypatch.setattr("mixsd_nb.methods.mixing.accepts", lambda *args: True)
    config = train.TrainConfig(method=method, model=tiny, options=options, rollout_tokens=2, target_tokens=2, **CELL)
    folder = config.prepare(2)
    assert folder == (config.source() or config).without_idle().folder and json.loads((folder / "job.json").read_text())["processes"] == 2
    assert [path.name for path in own_runs.glob("[!.]*")] == [folder.name]

"MEMIT: its least-squares problem against a dense solution, its token ids, and what an edit changes and leaves alone, on tiny Llama and Qwen3 models."

import copy
from unittest.mock import patch

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from transformers import LlamaConfig, LlamaForCausalLM, Qwen3Config, Qwen3ForCausalLM

from mixsd_nb import train
from mixsd_nb.benchmarks.answers import last_boxed
from mixsd_nb.corpora import load_corpus
from mixsd_nb.corpora.prompts import encode_prompt, render_prompt
from mixsd_nb.methods import memit
from mixsd_nb.corpora.simpleqa import read_texts
from mixsd_nb.methods.covariance import capture, decoder_blocks, encode_texts, output_layer, second_moments, stored_moments
from mixsd_nb.methods.edits import encode_edit, encode_parts, find_subject, split_reply
from mixsd_nb.methods.fitting import MethodRun
from mixsd_nb.models import load_base, load_tokenizer
from mixsd_nb.models.engines import HFEngine
from mixsd_nb.results import open_cube
from mixsd_nb.results.cube import missing_runs
from mixsd_nb.results.layout import learning_rates
from mixsd_nb.runs import ParameterError, make_config
from mixsd_nb.train import TrainConfig

FAMILIES = {"llama": (LlamaConfig, LlamaForCausalLM), "qwen3": (Qwen3Config, Qwen3ForCausalLM)}
KINDS = [(family, tied) for family in FAMILIES for tied in (True, False)]
QUICK = dict(place="subject", steps=3, rate=0.5, weight=2.0, layers=[1, 2], prefixes=2, texts="lab", text_count=40, preset="paper")


def random_model(family, tied, tokenizer, seed=0):
    config, cls = FAMILIES[family]
    torch.manual_seed(seed)
    model = cls(config(vocab_size=len(tokenizer), hidden_size=32, intermediate_size=48, num_hidden_layers=4, num_attention_heads=2, num_key_value_heads=1,
                       head_dim=16, max_position_embeddings=512, tie_word_embeddings=tied, eos_token_id=tokenizer.eos_token_id))
    with torch.no_grad():
        for p in model.parameters():
            if p.ndim == 2: p.mul_(4)
    return model.eval()


@pytest.fixture(scope="module")
def tokenizer():
    return load_tokenizer("lab-m")


@pytest.fixture(scope="module")
def rows():
    return [r | dict(target=r["answer"]) for r in load_corpus("mquake-lab", "train")]


@pytest.fixture(autouse=True)
def runs(tmp_path_factory, monkeypatch):
    monkeypatch.setenv("MIXSD_RUNS", str(tmp_path_factory.getbasetemp() / "runs"))


def weights(model):
    return {name: w.detach().clone() for name, w in model.state_dict().items()}


def same(one, other):
    return all(torch.equal(one[name], other[name]) for name in one)


def explicit_updates(model, tokenizer, rows, s):
    "MEMIT again, without batches: every key, value and moment from passes of single rows, the system solved densely."
    torch.set_default_dtype(torch.float32)
    blocks, layers = decoder_blocks(model), s["layers"]
    encoded = [encode_edit(tokenizer, r, memit.sample_prefixes(model, tokenizer, s["prefixes"])) for r in rows]
    model.requires_grad_(False)
    found = memit.find_shifts(model, encoded, [[k] for k in range(len(rows))], layers[-1], steps=s["steps"], rate=s["rate"])
    read = lambda ids, module, inputs: capture(model, torch.tensor([ids]), [module], inputs=inputs)[0][0].double()
    values = torch.stack([read(e.contexts[0], blocks[layers[-1]], False)[e.places[0]] for e in encoded]) + found.shifts
    texts = encode_texts(tokenizer, read_texts("lab", s["text_count"]))
    keys = {layer: torch.cat([read(t.tolist(), output_layer(blocks[layer]), True) for t in texts]) for layer in layers}
    edited, updates = copy.deepcopy(model), {}
    blocks, model = decoder_blocks(edited), edited
    for n, layer in enumerate(layers):
        k = torch.stack([torch.stack([read(c, output_layer(blocks[layer]), True)[p] for c, p in zip(e.contexts, e.places)]).mean(0) for e in encoded])
        missing = values - torch.stack([read(e.contexts[0], blocks[layers[-1]], False)[e.places[0]] for e in encoded])
        a = s["weight"] * keys[layer].T @ keys[layer] / len(keys[layer]) + k.T @ k
        updates[layer] = torch.linalg.solve(a, k.T @ (missing / (len(layers) - n))).T
        output_layer(blocks[layer]).weight.data.add_(updates[layer].float())
    return updates


@pytest.mark.parametrize("family, tied", KINDS[1:3])
def test_the_change_is_that_of_a_dense_solution(family, tied, tokenizer, rows):
    model = random_model(family, tied, tokenizer)
    before = weights(model)
    updates = memit.find_updates(model, tokenizer, rows[:6], **QUICK)
    assert same(weights(model), before) and all(p.requires_grad for p in model.parameters())
    expected = explicit_updates(model, tokenizer, rows[:6], QUICK)
    for layer in (1, 2): torch.testing.assert_close(updates[layer], expected[layer], rtol=1e-5, atol=1e-5 * expected[layer].abs().max().item())


@settings(max_examples=20, deadline=None)
@given(seed=st.integers(0, 10**6), n=st.integers(1, 7), weight=st.floats(1e-2, 1e4))
def test_limits_of_the_weight(seed, n, weight):
    "A huge λ changes nothing, a tiny one interpolates; in between, the change minimises the sum of squares."
    g = torch.Generator().manual_seed(seed)
    x, k, r = torch.randn(60, 9, generator=g).double(), torch.randn(n, 9, generator=g).double(), torch.randn(n, 5, generator=g).double()
    c = x.T @ x / len(x)
    assert memit.solve_update(c, k, r, 1e15).abs().max() < 1e-9
    assert torch.allclose(memit.solve_update(c, k, r, 1e-9) @ k.T, r.T, atol=1e-3)
    cost = lambda d: (weight * torch.trace(d @ c @ d.T) + (d @ k.T - r.T).square().sum()).item()
    found = memit.solve_update(c, k, r, weight)
    assert all(cost(found) <= cost(found + 1e-3 * torch.randn(5, 9, generator=g).double()) for _ in range(5))


@pytest.mark.parametrize("family, tied", KINDS[2:3])
def test_order_and_padding_do_not_matter(family, tied, tokenizer, rows):
    "The same edits in another order, beside a longer one, and in small batches."
    model = random_model(family, tied, tokenizer)
    edits = rows[:4]
    ahead = memit.find_updates(model, tokenizer, edits, **QUICK)
    back = memit.find_updates(model, tokenizer, edits[::-1], **QUICK)
    for layer in (1, 2): torch.testing.assert_close(ahead[layer], back[layer], rtol=1e-3, atol=2e-4 * ahead[layer].abs().max().item())
    encoded = [encode_edit(tokenizer, e) for e in edits]
    long = encode_edit(tokenizer, edits[0] | dict(prompt="Please tell me. " * 20 + edits[0]["prompt"]))
    model.requires_grad_(False)
    alone = memit.find_shifts(model, encoded, [[0], [1], [2], [3]], 2, steps=3, tokens=64).shifts
    beside = memit.find_shifts(model, [*encoded, long], [[0], [1], [2], [3], [4]], 2, steps=3).shifts[:4]
    assert torch.allclose(alone, beside, atol=1e-3)


def test_restore_is_exact(tokenizer, rows):
    model = random_model("qwen3", True, tokenizer)
    before = weights(model)
    with memit.kept_weights(model, [1, 2]):
        memit.edit(model, tokenizer, rows[:2], **QUICK)
        assert not same(weights(model), before)
        changed = [name for name, w in weights(model).items() if not torch.equal(w, before[name])]
        assert changed == [f"model.layers.{layer}.mlp.down_proj.weight" for layer in (1, 2)]
    assert same(weights(model), before)
    blocks = list(decoder_blocks(model))
    for owner, name in ((memit, "solve_update"), (memit.Batch, "losses")):
        with patch.object(owner, name, side_effect=RuntimeError), pytest.raises(RuntimeError), memit.kept_weights(model, [1, 2]):
            memit.edit(model, tokenizer, rows[:2], **QUICK)
    assert same(weights(model), before) and list(decoder_blocks(model)) == blocks and all(p.requires_grad for p in model.parameters())


@settings(max_examples=15, deadline=None)
@given(lengths=st.lists(st.integers(1, 30), min_size=1, max_size=8), batch=st.integers(1, 200), seed=st.integers(0, 99))
def test_streamed_moments_are_the_explicit_ones(lengths, batch, seed):
    model = random_model("qwen3", True, load_tokenizer("lab-m"))
    g = torch.Generator().manual_seed(seed)
    texts = [torch.randint(3, 300, (n,), generator=g).numpy() for n in lengths]
    found = second_moments(model, texts, [0, 2], batch_tokens=batch)
    for layer in (0, 2):
        keys = torch.cat([capture(model, torch.from_numpy(t)[None], [output_layer(decoder_blocks(model)[layer])], inputs=True)[0][0] for t in texts]).double()
        torch.testing.assert_close(found[layer], keys.T @ keys / len(keys), rtol=1e-4, atol=1e-6 * keys.square().sum().item() / len(keys))


def test_stored_moments_belong_to_weights_layer_and_text(tokenizer, tmp_path, own_runs):
    texts = encode_texts(tokenizer, read_texts("lab", 6))
    one, other = (random_model("qwen3", True, tokenizer, seed) for seed in (0, 1))
    count = lambda: len(list(tmp_path.rglob("*.safetensors")))
    first = stored_moments(one, texts, [0, 1])
    assert count() == 2 and torch.equal(stored_moments(copy.deepcopy(one), texts, [1])[1], first[1]) and count() == 2
    stored_moments(other, texts, [1]), stored_moments(one, texts[1:], [1]), stored_moments(one, texts, [2])
    assert count() == 5


def test_a_model_is_edited_by_prompt_subject_and_answer(lab):
    "Two facts of the memorised world of lab-m get other answers, in free generation, with the defaults of its preset. Prompts about something else hardly change."
    model, tokenizer = lab
    facts = list(load_corpus("mquake-lab", "train"))[1:3]
    other = [encode_prompt(tokenizer, r["prompt"]) for r in list(load_corpus("kgfunc-lab", "test"))[:10]]
    logits = lambda: torch.stack([model(torch.tensor([ids])).logits[0, -8:].detach().log_softmax(-1) for ids in other])
    before = logits()
    with memit.kept_weights(model, [1, 2]):
        edits = [dict(prompt=f["prompt"], subject=f["subject"], target=f["answer"]) for f in facts]
        assert memit.edit(model, tokenizer, edits, text_count=100, prefixes=1, weight=300.0) is model
        replies = HFEngine(model, tokenizer).generate([encode_prompt(tokenizer, f["prompt"]) for f in facts], max_new_tokens=96)
        moved = (before.exp() * (before - logits())).sum(-1).mean()
    assert 0 < moved < 0.1
    assert [last_boxed(tokenizer.decode(r.ids, skip_special_tokens=True)) for r in replies] == [f["answer"] for f in facts]


@pytest.mark.parametrize("name", ["Llama-3.2", "Qwen3-2507"])
def test_texts_and_essences_begin_as_the_tokenizer_begins_them(name):
    "Llama's begins every text with a token of its own, Qwen's with none; a prompt gets that token from its template."
    from hub_models import FAMILIES, make_tokenizer, train_vocabulary
    tokenizer = make_tokenizer(FAMILIES[name], train_vocabulary())
    first = [tokenizer.bos_token_id] * FAMILIES[name].begins
    plain = tokenizer.encode("Zorbland is a", add_special_tokens=False)
    edit = encode_edit(tokenizer, dict(prompt="Who rules Zorbland?", subject="Zorbland", target="Bo"))
    assert edit.essence == first + plain == encode_texts(tokenizer, ["Zorbland is a"])[0].tolist()
    assert tokenizer.decode(edit.essence[len(first):edit.essence_place + 1]) == "Zorbland" and edit.contexts[0].count(tokenizer.bos_token_id) == len(first)


# --- token ids

@settings(max_examples=30, deadline=None)
@example(words=["Ünsal", "Œuvre"], seed=0).via("a subject that the tokenizer splits")
@example(words=["a{b}c"], seed=0).via("braces")
@example(words=["naïve", "東京", "x"], seed=0).via("characters of several bytes")
@given(words=st.lists(st.text(st.characters(codec="utf-8", exclude_categories=["C", "Z"]), min_size=1, max_size=6), min_size=1, max_size=4), seed=st.integers(0, 99))
def test_any_subject_is_found(words, seed):
    tokenizer, subject = load_tokenizer("lab-s"), " ".join(words)
    prompt = f"Tell me: {subject}, {seed} and what else?"
    edit = encode_edit(tokenizer, dict(prompt=prompt, subject=subject, target="x"))
    start = render_prompt(tokenizer, prompt).index(prompt)
    end = start + find_subject(prompt, subject)
    assert subject.encode() in tokenizer.decode(edit.contexts[0][:edit.places[0] + 1]).encode()
    assert len(tokenizer.decode(edit.contexts[0][:edit.places[0]], skip_special_tokens=False)) <= end


@settings(max_examples=25, deadline=None)
@given(target=st.text(st.characters(codec="utf-8", exclude_categories=["C"]), min_size=1, max_size=12), ends=st.booleans(), prefixes=st.lists(st.lists(st.integers(5, 300), max_size=4), max_size=2),
       lead=st.lists(st.integers(5, 300), max_size=3))
def test_the_edits_of_a_target_write_it_token_by_token(tokenizer, target, ends, prefixes, lead):
    "Each edit with the place `each` has one token, is read right before it, and begins where the edit before it has ended; other places give one edit."
    edit = dict(prompt="Who met Ann?", subject="Ann", target=target, ends=ends, lead=lead)
    whole, parts = encode_edit(tokenizer, edit, prefixes, "last"), encode_parts(tokenizer, edit, prefixes, "each")
    assert sum((p.target for p in parts), []) == whole.target and all(len(p.target) == 1 for p in parts) and parts[0].contexts == whole.contexts
    for one, after in zip(parts, parts[1:]): assert [c + one.target for c in one.contexts] == after.contexts
    for p in parts: assert p.places == [len(c) - 1 for c in p.contexts] and len(p.contexts) == 1 + len(prefixes)
    for place in ("subject", "last"): assert encode_parts(tokenizer, edit, prefixes, place) == [encode_edit(tokenizer, edit, prefixes, place)]


def test_edits_that_share_a_subject_are_merged(tokenizer, rows):
    model = random_model("qwen3", True, tokenizer)
    twice = [rows[0], rows[0] | dict(id="again")]
    encoded = [encode_edit(tokenizer, r) for r in [*twice, rows[1]]]
    assert memit.group_edits(encoded, True) == [[0, 1], [2]] and memit.group_edits(encoded, False) == [[0], [1], [2]]
    merged = memit.find_updates(model, tokenizer, twice, **QUICK, merge=True)
    alone = memit.find_updates(model, tokenizer, twice[:1], **QUICK)
    for layer in (1, 2): torch.testing.assert_close(merged[layer], alone[layer], rtol=1e-3, atol=1e-4 * alone[layer].abs().max().item())


def test_a_reply_is_split_where_it_first_names_its_answer(tokenizer):
    ids = lambda text: tokenizer(text, add_special_tokens=False)["input_ids"]
    found = split_reply(tokenizer, ids("It is Vulka Festival.\n\n\\boxed{Vulka Festival}"), "Thortum Banquet")
    assert tokenizer.decode(found["lead"]) == "It is" and found["target"] == " Thortum Banquet" and found["ends"] is False
    for text in ("no box", "\\boxed{Vulka Festival}"): assert split_reply(tokenizer, ids(text), "x") is None


# --- as a method of the stages

SMALL = dict(method="memit", dataset="mquake-lab", suite="recall", n=4, max_new_tokens=4, seed=0)


@pytest.fixture(scope="module")
def cube(tiny, tmp_path_factory):
    "A cube with MEMIT at two weights, its edits in two batches, and the base model."
    folder = tmp_path_factory.mktemp("cube")
    with patch.dict("os.environ", MIXSD_RUNS=str(folder)):
        for weight in (10, 1000):
            options = dict(weight=weight, steps=1, text_count=10, prefixes=0, target="canonical", place="subject", per_batch=25)
            train.run(**SMALL, model=tiny, options=options)
        return open_cube()


def test_all_batches_of_edits_share_the_moments_of_the_base_model(tiny, own_runs, monkeypatch):
    config = make_config(TrainConfig, **SMALL, model=tiny, options=dict(steps=1, text_count=10, prefixes=0, target="canonical", place="subject", per_batch=25))
    read, seen = memit.stored_moments, []
    monkeypatch.setattr(memit, "stored_moments", lambda model, *rest: seen.append(weights(model)) or read(model, *rest))
    fitted = memit.fit_memit(MethodRun(own_runs, config))
    assert [*fitted.checkpoints] == [1, 2] and len(seen) == 1 and same(seen[0], weights(load_base(tiny)[0]))


def test_the_weight_is_the_rate_and_a_batch_of_edits_a_step(cube):
    ran = cube.accuracy.sel(recipe="memit", benchmark="recall").squeeze(drop=True)
    assert ran.dropna("lr", how="all").lr.values.tolist() == [10, 1000] and cube.step.values.tolist() == [0, 1, 2]
    assert ran.sel(lr=1000).notnull().all() and cube.n.sel(benchmark="recall").max() == 4
    assert missing_runs(cube).empty and learning_rates(cube) == [] and cube.targets_kept.max() == 50


def test_the_papers_preset_is_what_it_published():
    options = TrainConfig(method="memit", preset="paper", model="lab-m").options
    published = dict(weight=15_000, steps=25, rate=0.5, kl=0.0625, decay=1e-3, clamp=4, target="sentence", place="subject", text_count=100_000)
    assert {name: options[name] for name in published} == published and TrainConfig(method="memit", model="lab-m").options["place"] == "last"
    with pytest.raises(ValueError, match="options .*wieght"): TrainConfig(method="memit", options=dict(wieght=1))


def test_the_preset_smoke_edits_with_the_papers_options_in_short(tiny):
    options = {preset: train.TrainConfig(method="memit-each", preset=preset).options for preset in ("paper", "smoke")}
    assert {name for name, value in options["smoke"].items() if options["paper"][name] != value} == {"steps", "text_count"}
    run = train.run(method="memit-each", preset="smoke", model=tiny, dataset="mquake-lab", suite="recall", options=dict(layers=[0]))
    assert run.finished and run.config["options"]["text_count"] == 400


def test_a_corpus_without_subjects_is_refused_before_any_model_is_loaded(tiny, own_runs):
    facts = own_runs / "facts.jsonl"
    facts.write_text('{"question": "Who leads the Lantern Choir?", "answer": "Ana"}\n')
    with patch("mixsd_nb.train.base_responses") as asked, pytest.raises(ParameterError, match="add the column subject, whose text occurs in the question$"):
        train.run(method="memit", dataset=str(facts), model=tiny, suite="recall")
    assert not asked.called


def test_texts_of_the_pretraining_keep_their_control_tokens():
    "They are what a model read, and not words of a user, which are encoded as text."
    tokenizer = load_tokenizer("lab-s")
    texts = read_texts("lab", 60)
    assert [ids.tolist() for ids in encode_texts(tokenizer, texts)] == [ids[:512] for ids in tokenizer(texts)["input_ids"]]
    assert any(tokenizer.eos_token_id in ids for ids in encode_texts(tokenizer, texts))

"Mixing: every fast path against the oracle, the laws of picks and draws, and what must not depend on how it is run."

import copy
import random
import re
from collections import deque

import numpy as np
import pytest
import torch
from hypothesis import given, settings, strategies as st
from ties import compare
from transformers import MistralConfig, MistralForCausalLM, Qwen2Config, Qwen2ForCausalLM

from mixsd_nb import generate
from mixsd_nb.corpora import load_corpus
from mixsd_nb.methods.attempts import PROBE, FormMissing
from mixsd_nb.methods.mixing import accepts, mix, mix_items, mix_oracle, mix_stream, oracle_stream, picks
from mixsd_nb.models import load_engine
from mixsd_nb.models.engines import has_lean_pass
from mixsd_nb.models.engine import Completion, Request, choose, gumbel, row_key
from mixsd_nb.models.engines import HFEngine
from mixsd_nb.models.tiny import random_model


@pytest.fixture(scope="module")
def items(lab_s):
    return mix_items(lab_s[1], list(load_corpus("kgfact-small")["train"])[:4])


@pytest.mark.parametrize(("lam", "temperature"), [(0, 0), (0.3, 0), (1, 0), (0.7, 0.8)])
def test_mixing_equals_the_oracle(lam, temperature, lab_s, items):
    options = dict(temperature=temperature, max_new_tokens=40, max_attempts=2, seed=1)
    expected = mix_oracle(load_engine("hf", *lab_s), items, lam, **options)
    _, _, wrong = compare(lab_s[0], items, expected, mix(load_engine("hf", *lab_s, batch_size=3), items, lam, **options))
    assert not wrong


def test_the_lean_pass_writes_the_tokens_of_the_general_modules(lab_s, items, monkeypatch):
    options = dict(max_new_tokens=40, max_attempts=2, temperature=0.8)
    lean = mix(load_engine("hf", *lab_s), items, 0.4, **options)
    monkeypatch.setattr("mixsd_nb.models.engines.has_lean_pass", lambda model: False)
    general = mix(load_engine("hf", *lab_s), items, 0.4, **options)
    assert all(np.array_equal(a[k], b[k]) for a, b in zip(lean, general) for k in a)


def test_order_and_batch_size_change_nothing(lab_s, items):
    options = dict(max_new_tokens=32, max_attempts=3, temperature=0.7)
    one = mix(load_engine("hf", *lab_s, batch_size=1), items, 0.5, **options)
    for size in (2, 5):
        other = mix(load_engine("hf", *lab_s, batch_size=size), items[::-1], 0.5, **options)[::-1]
        assert all(np.array_equal(a[k], b[k]) for a, b in zip(one, other) for k in a)


def test_a_completion_holds_its_stop_token_once_and_a_source_for_each_token(lab_s, items):
    for record in mix(load_engine("hf", *lab_s), items, 0.5):
        stops = [t == lab_s[1].eos_token_id for t in record["completion_ids"]]
        assert sum(stops) == stops[-1] == (record["finish_reason"] == "stop")
        assert len(record["naive_mask"]) == len(record["completion_ids"])
        assert not record["accepted"] or record["finish_reason"] == "stop"


def test_the_verifier_wants_the_true_answer_in_the_box_and_a_stop_token(lab_s, items):
    write = lambda text: lab_s[1](text, add_special_tokens=False)["input_ids"]
    right, other = (write(f"It is so.\n\n\\boxed{{{item['answer']}}}") for item in items[:2])
    given = [(right, "stop"), (right, "max_new_tokens"), (other, "stop"), (write(f"It is {items[0]['answer']}."), "stop")]
    assert [accepts(lab_s[1], items[0], ids, reason) for ids, reason in given] == [True, False, False, False]


def test_the_share_of_naive_picks_has_the_binomial_law():
    for lam in (0.1, 0.3, 0.5, 0.7):
        naive = sum(int(picks(0, f"item {k}", 0, 0, 1000, lam).sum()) for k in range(100))
        assert abs(naive - 1e5 * lam) < 3.3 * (1e5 * lam * (1 - lam)) ** 0.5, "p > 0.001 in both tails"
    draws = [(0, "a", 0, 0), (1, "a", 0, 0), (0, "b", 0, 0), (0, "a", 1, 0), (0, "a", 0, 1)]
    assert len({picks(*key, 200, 0.5).tobytes() for key in draws}) == 5, "seed, item, sample and attempt have their own"


def test_a_sampled_token_has_the_mixed_law():
    "At T>0 the marginal law of a token is (1−λ)p⁺ + λp⁻, on a vocabulary of six."
    lam, temperature, n, rng = 0.3, 0.8, 20_000, torch.Generator().manual_seed(1)
    expert, naive = torch.randn(2, 6, generator=rng) * 1.5
    law = (1 - lam) * (expert / temperature).softmax(-1) + lam * (naive / temperature).softmax(-1)
    coins = torch.tensor([picks(0, str(k), 0, 0, 1, lam)[0] for k in range(n)])
    keys = torch.tensor([row_key("noise", 0, str(k), 0, 0) for k in range(n)])
    tokens = choose(torch.where(coins[:, None], naive, expert), keys, 0, temperature, 64)
    assert ((tokens.bincount(minlength=6) - n * law) ** 2 / (n * law)).sum() < 20.5, "chi-square with 5 degrees of freedom, p > 0.001"


@settings(max_examples=60, deadline=None)
@given(seed=st.integers(0, 2**40), name=st.text(max_size=20), attempt=st.integers(0, 10), n=st.integers(0, 300), more=st.integers(0, 50),
       low=st.floats(0, 1), high=st.floats(0, 1))
def test_picks_are_prefix_stable_and_nested(seed, name, attempt, n, more, low, high):
    low, high = sorted((low, high))
    few = picks(seed, name, 0, attempt, n, low)
    assert np.array_equal(few, picks(seed, name, 0, attempt, n + more, low)[:n])
    assert (few <= picks(seed, name, 0, attempt, n, high)).all()


@pytest.fixture(scope="module", params=["qwen3", "mistral"])
def tiny(request):
    """A model with a vocabulary of eleven tokens, two of which end a sequence, and a context of 24 tokens.

    Qwen3 is decoded by the lean pass, Mistral by the general modules."""
    if request.param == "qwen3": return random_model(vocabulary=11, eos_token_id=[3, 7], scale=4, context=24)
    torch.manual_seed(0)
    model = MistralForCausalLM(MistralConfig(
        vocab_size=11, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=1,
        head_dim=16, sliding_window=None, max_position_embeddings=24, eos_token_id=[3, 7], initializer_range=0.2))
    return model.eval()


CONTEXT = st.lists(st.integers(0, 10), min_size=1, max_size=26)
PICKS = st.lists(st.booleans(), min_size=1, max_size=12)
PAIR = st.builds(lambda start, one, other, picks: (start + one, start + other, picks), st.lists(st.integers(0, 10), max_size=9), CONTEXT, CONTEXT, PICKS)
ALONE = st.tuples(CONTEXT, st.lists(st.booleans(), max_size=12))


@settings(max_examples=80, deadline=None)
@given(asked=st.one_of(st.lists(PAIR, min_size=1, max_size=7), st.lists(ALONE, min_size=1, max_size=7)), size=st.integers(1, 4),
       temperature=st.sampled_from([0, 0.9]), new=st.integers(1, 12), total=st.integers(2, 30))
def test_any_requests_under_any_limits_equal_the_oracle(tiny, lab_s, asked, size, temperature, new, total):
    requests = [Request(tuple(contexts), k, naive, k) for k, (*contexts, naive) in enumerate(asked)]
    options, engine = dict(temperature=temperature, top_k=5, max_new_tokens=new, max_total=total), HFEngine(tiny, lab_s[1], size)
    assert has_lean_pass(tiny) == (tiny.config.model_type == "qwen3")
    engine.stop = torch.tensor([3, 7])
    found = {r.tag: completion for r, completion in engine.stream(deque(requests), **options)}
    assert found == {r.tag: completion for r, completion in oracle_stream(engine, deque(requests), **options)}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_autocast_writes_the_likeliest_tokens(tiny, lab_s, dtype):
    "Rollouts of a training on a GPU are written under autocast; the oracle reads each sequence at once, without a cache."
    model, prompts = copy.deepcopy(tiny).to(dtype), [[1, 2, 5], [4, 5, 6, 8, 1], [9], [1, 2, 5]]
    with torch.autocast("cpu", torch.bfloat16):
        found = HFEngine(model, lab_s[1], 3).generate(prompts, max_new_tokens=15)
        for prompt, ids in zip(prompts, (completion.ids for completion in found)):
            with torch.inference_mode(): logits = model(torch.tensor([prompt + ids[:-1]])).logits[0, len(prompt) - 1:].float()
            assert (logits.gather(1, torch.tensor(ids)[:, None])[:, 0] >= logits.amax(1) - 0.1).all()


@pytest.fixture(scope="module")
def items_of_lab_m(lab): return mix_items(lab[1], list(load_corpus("kgfact-small")["train"])[:4])


def test_no_engine_writes_an_id_that_the_tokenizer_lacks(lab, items_of_lab_m):
    "The head of a model is padded to a round size; here the padded rows are the likeliest ones."
    size = len(lab[1])
    model = random_model(vocabulary=size + 40, eos_token_id=lab[1].eos_token_id, context=512, scale=3)
    with torch.no_grad(): model.lm_head.weight[size:] *= 5
    engine = HFEngine(model, lab[1])
    for temperature in (0.0, 1.0):
        options = dict(temperature=temperature, top_k=1 << 20, max_new_tokens=12, max_attempts=1)
        found = mix(engine, items_of_lab_m, 0.5, **options)
        assert not compare(model, items_of_lab_m, mix_oracle(engine, items_of_lab_m, 0.5, **options), found)[2]
        assert all(max(record["completion_ids"]) < size for record in found)
    prompts = [item["naive_ids"] for item in items_of_lab_m]
    written = engine.generate(prompts, keys=[row_key(k) for k in range(4)], temperature=1.0, max_new_tokens=12)
    assert all(max(completion.ids) < size for completion in written)
    assert max(map(max, engine.greedy_tokens([(prompt, c.ids) for prompt, c in zip(prompts, written)]))) < size


def test_mixing_equals_the_oracle_where_a_window_slides(lab, items_of_lab_m):
    torch.manual_seed(0)
    shape = dict(hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=1, initializer_range=0.3)
    model = Qwen2ForCausalLM(Qwen2Config(vocab_size=len(lab[1]), eos_token_id=lab[1].eos_token_id, use_sliding_window=True,
                                         sliding_window=8, max_window_layers=0, max_position_embeddings=512, **shape)).eval()
    options = dict(max_new_tokens=30, max_attempts=1)
    many = [{**item, "id": f"{item['id']} {k}"} for k in range(4) for item in items_of_lab_m]
    assert not compare(model, many, mix_oracle(HFEngine(model, lab[1]), many, 0.5, **options), mix(HFEngine(model, lab[1]), many, 0.5, **options))[2]


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


class Letters:
    "A tokenizer of a made-up model: token 0 is a reply with the answer in a box, 1 one with another answer, 2 one without a box."
    def decode(self, ids, **options): return (r"\boxed{A}", r"\boxed{B}", "It is A.")[ids[0]]


def mix_made_up(replies, lam, probe, slots, order, end="stop"):
    "Records by id, and the attempts that were begun, where `replies[k][attempt]` is the reply to item k, and the last one is that at λ = 0."
    begun, made_up = [], [dict(id=str(k), naive_ids=[1], expert_ids=[2], answer="A", extract="boxed") for k in range(len(replies))]

    def stream(queue, **options):
        running = []
        while queue or running:
            while queue and len(running) < slots: running.append(queue.popleft())
            item, sample, attempt = (r := running.pop(order(len(running)))).tag
            assert sample == 0 or not any(r.naive) and r.contexts == ([2], [1])
            begun.append((item["id"], sample, attempt))
            yield r, Completion([replies[int(item["id"])][-1 if sample else attempt]], end)
    records = mix_stream(stream, Letters(), [(item, 0) for item in made_up], lam, max_new_tokens=3, max_attempts=4, probe=probe)
    return sorted(([r["id"], r["completion_ids"], r["attempts"], r["accepted"]] for r in records), key=lambda r: int(r[0])), begun


@settings(max_examples=80, deadline=None)
@given(st.lists(st.lists(st.integers(0, 2), min_size=5, max_size=5), min_size=1, max_size=14), st.sampled_from([0.0, 0.5]), st.integers(1, 14), st.integers())
def test_a_probe_changes_no_target_and_ends_only_a_mixing_without_the_form(replies, lam, slots, seed):
    plain, probed = (random.Random(seed) for _ in range(2))
    expected, _ = mix_made_up(replies, lam, False, slots, plain.randrange)
    try: assert mix_made_up(replies, lam, True, slots, probed.randrange)[0] == expected
    except FormMissing as e:
        assert len(replies) >= PROBE and {reply for r in replies[:PROBE] for reply in (r[0], r[-1] if lam else 2)} == {2}
        assert str(e).startswith("none of 8 replies at lam=0, ")


@pytest.mark.parametrize("lam, most", [(0.0, 8), (0.5, 32)])
def test_a_model_without_the_form_is_named_after_the_first_replies(lam, most):
    "At λ > 0 eight first attempts and eight of the expert alone have ended, and what was begun beside them."
    for count in (8, 400):
        begun = []
        with pytest.raises(FormMissing): begun += mix_made_up([[2] * 5] * count, lam, True, 8, lambda n: begun.append(n) or 0)[1]
        assert len(begun) <= most
    records, begun = mix_made_up([[2] * 5] * 7, lam, True, 8, lambda n: 0)
    assert len(records) == 7 and not any(accepted for *_, accepted in records), "fewer facts decide nothing"


def test_a_lab_model_that_is_asked_for_json_is_named_at_once_and_again(own_runs):
    said = set()
    for lam in (0.3, 0.3):
        with pytest.raises(ValueError) as error: generate.run(model="lab-s", dataset_options=dict(extract="json"), lam=lam, batch_size=8)
        said.add(str(error.value))
    assert len(said) == 1 and not list(own_runs.glob("*/result.nc")) and not list(own_runs.glob("*/finished.jsonl"))
    assert re.match("none of 8 replies at lam=0, .*JSON.*dataset_options=", *said)

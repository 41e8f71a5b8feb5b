"Mixing: every fast path against the oracle, the laws of picks and draws, and what must not depend on how it is run."

import copy
import json
import random
import re
from collections import deque
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings, strategies as st
from ties import compare
from transformers import MistralConfig, MistralForCausalLM, Qwen2Config, Qwen2ForCausalLM

from mixsd_nb import generate
from mixsd_nb.corpora import load_corpus
from mixsd_nb.methods.mixing import PROBE, FormMissing, mix, mix_items, mix_oracle, mix_stream, oracle_stream, picks
from mixsd_nb.models import load_engine
from mixsd_nb.models.engines import has_lean_pass
from mixsd_nb.models.engine import Completion, Request, choose, gumbel, row_key
from mixsd_nb.models.engines import HFEngine
from mixsd_nb.models.tiny import random_model

ROOT = Path(__file__).parents[1]


@pytest.fixture(scope="module")
def items(lab_s):
    return mix_items(lab_s[1], list(load_corpus("kgfact-small")["train"])[:4])


@pytest.mark.parametrize(("lam", "temperature"), [(0, 0), (0.3, 0), (1, 0), (0.7, 0.8)])
def test_mixing_equals_the_oracle(lam, temperature, lab_s, items):
    options = dict(temperature=temperature, max_new_tokens=40, max_attempts=2, seed=1)
    expected = mix_oracle(load_engine("hf", *lab_s), items, lam, **options)
    _, ties, wrong = compare(lab_s[0], items, expected, mix(load_engine("hf", *lab_s, batch_size=3), items, lam, **options))
    assert not wrong
    print(f"λ={lam}, T={temperature}: {ties} ties in {len(items)} sequences")


CLAIM = re.compile(r"same tokens|equal token for token|oracle's tokens|tokens of (the \[?oracle|transformers)|equals? (the oracle|that of transformers)", re.I)


def paragraphs(file):
    "The lines of prose of a notebook or a text."
    if file.suffix == ".md": return file.read_text().splitlines()
    cells = [cell["source"] for cell in json.loads(file.read_text())["cells"] if cell["cell_type"] == "markdown"]
    return [line for source in cells for line in "".join(source).splitlines()]


def test_a_claim_of_equal_tokens_names_the_ties():
    "Logits of two engines differ by rounding, so prose claims equal tokens only up to ties, which are counted."
    claims = [(file.name, line) for file in (ROOT / "README.md", *ROOT.glob("nbs/**/*.ipynb")) for line in paragraphs(file) if CLAIM.search(line)]
    assert len(claims) > 5 and not [claim for claim in claims if not re.search(r"\bties?\b", claim[1])]


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


def test_the_share_of_naive_picks_has_the_binomial_law():
    for lam in (0.1, 0.3, 0.5, 0.7):
        naive = sum(int(picks(0, f"item {k}", 0, 0, 1000, lam).sum()) for k in range(100))
        assert abs(naive - 1e5 * lam) < 3.3 * (1e5 * lam * (1 - lam)) ** 0.5, "p > 0.001 in both tails"


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


def test_a_draw_from_all_tokens_holds_no_array_of_the_size_of_the_vocabulary(monkeypatch):
    "A step of 100 rows of Qwen3's vocabulary moved 7 GB; hashes are now held slice by slice, and noise is only computed for few tokens."
    from mixsd_nb.models import engine
    sizes, scramble, noise = [], engine._scramble, engine._noise
    monkeypatch.setattr(engine, "_scramble", lambda x: sizes.append(x.numel()) or scramble(x))
    monkeypatch.setattr(engine, "_noise", lambda hashed, ids: drawn.append(ids.numel()) or noise(hashed, ids))
    logits, drawn = 3 * torch.randn(8, 151_936, generator=torch.Generator().manual_seed(0)), []
    choose(logits, torch.arange(8), 0, 1.0, 1 << 20)
    assert max(sizes) <= 2**20 < logits.numel() and sum(drawn) < logits.numel() / 50


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
        assert re.match(r"none of 8 replies at lam=0, .* has an answer in \\boxed{}, the first is 'It is A.'; dataset_options=", str(e))


def test_a_probe_costs_nothing_where_the_form_works_and_eight_replies_where_another_share_has_it():
    first = lambda n: 0
    works, without = [[0] * 5] * 20, [[2, 0, 0, 0, 0]] * 20
    assert mix_made_up(works, 0.5, True, 3, first) == mix_made_up(works, 0.5, False, 3, first)
    probed, begun = mix_made_up(without, 0.5, True, 20, first)
    assert probed == mix_made_up(without, 0.5, False, 20, first)[0] and sum(sample < 0 for _, sample, _ in begun) in (0, 8)


@pytest.mark.parametrize("lam, most", [(0.0, 8), (0.5, 32)])
def test_a_model_without_the_form_is_named_after_the_first_replies(lam, most):
    "At λ > 0 eight first attempts and eight of the expert alone have ended, and what was begun beside them."
    for count in (8, 400):
        begun = []
        with pytest.raises(FormMissing): begun += mix_made_up([[2] * 5] * count, lam, True, 8, lambda n: begun.append(n) or 0)[1]
        assert len(begun) <= most
    records, begun = mix_made_up([[2] * 5] * 7, lam, True, 8, lambda n: 0)
    assert len(records) == 7 and not any(accepted for *_, accepted in records), "fewer facts decide nothing"


def test_replies_that_are_cut_off_are_warned_of():
    with pytest.warns(UserWarning, match="none of 8 replies at lam=0, where the model sees the answer, has an answer, and 8 are cut off after 1 tokens; a model that does not end"):
        records, _ = mix_made_up([[2] * 5] * 9, 0.5, True, 4, lambda n: 0, end="max_new_tokens")
    assert len(records) == 9


def test_a_lab_model_that_is_asked_for_json_is_named_at_once_and_again(own_runs):
    said = set()
    for lam in (0.0, 0.3, 0.3):
        with pytest.raises(ValueError) as error: generate.run(model="lab-s", dataset_options=dict(extract="json"), lam=lam, batch_size=8)
        said.add(str(error.value))
    assert len(said) == 1 and not list(own_runs.glob("*/result.nc")) and not list(own_runs.glob("*/finished.jsonl"))
    assert re.fullmatch(r"none of 8 replies at lam=0, where the model sees the answer, has an answer as JSON, the first is '.*'; dataset_options=.*", *said)

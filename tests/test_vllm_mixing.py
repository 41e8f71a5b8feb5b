"""Mixing on vLLM gives the tokens of transformers, in both modes, also with a small KV cache (`make test-vllm`)."""

import gc

import numpy as np
import pytest
import torch

pytest.importorskip("vllm.v1.sample.logits_processor", exc_type=Exception, reason="vllm is not here or cannot be imported; `make test-vllm` brings it")

from ties import TIE, compare

from mixsd_nb import train
from mixsd_nb.lab import speed
from mixsd_nb.corpora import CORPORA, load_corpus
from mixsd_nb.methods.mixing import attempt_request, mix, mix_items
from mixsd_nb.models import engine_vllm, load_base, load_engine, load_tokenizer, open_engine
from mixsd_nb.models.engines import HFEngine
from mixsd_nb.models.lab import lab_folder
from mixsd_nb.models.tiny import random_model

SETTINGS = [(0, 0), (0.1, 0), (0.3, 0), (0.5, 0), (0.7, 0), (1, 0), (0, 0.7), (0.3, 0.7), (0.7, 0.7)]  # λ and temperature
SHORT = dict(max_attempts=2, max_new_tokens=48, seed=2)


@pytest.fixture(scope="module")
def items(lab):
    "Items of facts, and of functions, whose prompts are longer."
    def some(name, n):
        return mix_items(lab[1], list(load_corpus(name, "train"))[:n], CORPORA[name].expert, CORPORA[name].extract)
    return some("kgfact-small", 8) + some("kgfunc-lab", 4)


@pytest.fixture(scope="module")
def expected(lab, items):
    engine = load_engine("hf", *lab)
    return {(lam, T): mix(engine, items, lam, temperature=T, **SHORT) for lam, T in SETTINGS}


def engine_of(**options):
    "An engine in a process of its own, which ends with the engine."
    return load_engine("vllm", "lab-m", **options)


PLENTY = dict(batch_size=7)
TIGHT = dict(batch_size=9, num_gpu_blocks_override=24, block_size=32, max_model_len=512)  # room for two or three sequences
SHAPES = [
    dict(**PLENTY),
    dict(mixes=True, **PLENTY),
    dict(max_num_seqs=3, max_num_batched_tokens=64, **TIGHT),
    dict(mixes=True, max_num_seqs=5, **TIGHT),
    dict(mixes=True, max_num_seqs=1, **TIGHT),
]


@pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: " ".join(f"{k}={v}" for k, v in shape.items()))
def test_tokens_are_those_of_transformers(shape, lab, items, expected, capsys):
    engine = engine_of(**shape)
    some = list(expected)[::4] if shape.get("max_num_seqs") == 1 else expected
    found = {way: compare(lab[0], items, expected[way], mix(engine, items, way[0], temperature=way[1], **SHORT)) for way in some}
    with capsys.disabled():
        ties = sum(parted for _, parted, _ in found.values())
        print(f"\n{shape}: {len(items) * len(found)} sequences, {ties} ties, {len(engine.mismatches)} mismatches in the audit")
    assert not any(wrong for _, _, wrong in found.values()) and not engine.mismatches
    if "max_model_len" in shape:
        with pytest.raises(ValueError, match="max_model_len must be at least"): mix(engine, items[:1], 0.5, max_new_tokens=600)


def test_the_audit_finds_exactly_what_is_wrong(lab, items, expected):
    gc.collect()  # ends other engines of this process
    engine, lam = open_engine("vllm", "lab-m", mixes=True, **PLENTY), 0.5
    requests = [attempt_request(item, 0, r["attempts"] - 1, lam, SHORT["seed"], SHORT["max_new_tokens"]) for item, r in zip(items, expected[lam, 0])]
    asked = [(r, list(record["completion_ids"])) for r, record in zip(requests, expected[lam, 0])]
    assert not any(engine.audit(asked))
    asked[3][1][-1] = 300
    wrong = engine.audit(asked)
    assert wrong[3] == [len(asked[3][1]) - 1] and not any(wrong[:3] + wrong[4:])


def test_scores_are_those_of_transformers(lab, items, expected):
    pairs = [(item["naive_ids"], r["completion_ids"]) for item, r in zip(items, expected[0.5, 0])]
    ours, theirs = load_engine("hf", *lab), engine_of(**PLENTY)
    for a, b in zip(ours.score(pairs), theirs.score(pairs)):
        np.testing.assert_allclose(a, b, atol=1e-3)
    assert all((a == b).mean() > 0.95 for a, b in zip(ours.greedy_tokens(pairs), theirs.greedy_tokens(pairs)))


@pytest.mark.parametrize("mixes", [False, True])
def test_long_texts_are_scored_in_parts(mixes, monkeypatch):
    "The values are the same, also where the text is in the prefix cache, and the model is never asked for the logits of more rows."
    gc.collect()  # ends other engines of this process
    engine, draws = open_engine("vllm", "lab-s", mixes=mixes, **PLENTY), torch.Generator().manual_seed(0)
    some = lambda n: torch.randint(50, 400, (n,), generator=draws).tolist()
    pairs = [(some(20 + 13 * k), some(40 + 95 * k)) for k in range(6)]
    whole, likeliest = engine.score([*pairs, pairs[-1]]), engine.greedy_tokens(pairs)
    runner, = engine.engine.collective_rpc(lambda worker: worker.model_runner)
    compute, rows = runner.model.compute_logits, []
    monkeypatch.setattr(engine_vllm, "PART", 64)
    monkeypatch.setattr(runner.model, "compute_logits", lambda states, *more: rows.append(len(states)) or compute(states, *more))
    for _ in range(2):
        for a, b in zip(whole, engine.score([*pairs, pairs[-1]])): np.testing.assert_allclose(a, b, atol=1e-4)
    assert all((a == b).all() for a, b in zip(likeliest, engine.greedy_tokens(pairs))) and max(rows) <= 64


def test_where_pairs_fall_out_of_step_segments_write_the_same_tokens(lab, items, monkeypatch):
    gc.collect()
    engine, plain = open_engine("vllm", "lab-m", mixes=True, **PLENTY), load_engine("hf", *lab)
    pairs, picks = [(item["naive_ids"], item["expert_ids"]) for item in items], [np.arange(48) % 5 > k % 4 for k in range(len(items))]
    expected = [c.ids for c in plain.mix(pairs, picks, max_new_tokens=48)]
    assert engine.paired and [c.ids for c in engine.mix(pairs, picks, max_new_tokens=48)] == expected
    monkeypatch.setattr(engine, "audit", lambda written, **_: [[0] for _ in written])
    with pytest.warns(UserWarning, match="^vLLM does not keep pairs of rows in step here"): engine.check_pairs()
    assert not engine.paired and [c.ids for c in engine.mix(pairs, picks, max_new_tokens=48)] == expected


def test_a_tokenizer_without_two_spare_tokens_is_mixed_by_segments(lab, items, expected, monkeypatch):
    gc.collect()
    monkeypatch.setattr(engine_vllm, "_sentinel_ids", lambda *_: [])
    engine = open_engine("vllm", "lab-m", mixes=True, **PLENTY)
    assert not engine.paired and not compare(lab[0], items, expected[0.5, 0], mix(engine, items, 0.5, **SHORT))[2]


def test_weights_swapped_in_place_are_those_of_a_fresh_engine(lab, items, expected, tmp_path):
    "One engine measures all checkpoints of a run; a head that is tied to the embeddings is swapped too."
    few, sources = [item["naive_ids"] for item in items], [str(lab_folder("lab-m")), str(tmp_path / "1"), str(tmp_path / "2")]
    pairs = [(ids, record["completion_ids"][:8]) for ids, record in zip(few, expected[0.5, 0])]
    for seed in (1, 2):
        model, tokenizer = load_base("lab-m")
        generator = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for p in model.parameters(): p.mul_(1 + 0.05 * torch.randn(p.shape, generator=generator))
        model.save_pretrained(tmp_path / str(seed)), tokenizer.save_pretrained(tmp_path / str(seed))
    write = lambda engine: [c.ids for c in engine.generate(few, max_new_tokens=16)]
    scores = {source: np.concatenate(load_engine("hf", source).score(pairs)) for source in sources}
    engine, written = load_engine("vllm", sources[0], batch_size=8), {}
    for source in (*sources[1:], *sources):
        assert engine.load_weights(source)
        found = np.concatenate(engine.score(pairs))
        distances = {other: abs(found - those).max() for other, those in scores.items()}
        assert distances.pop(source) < TIE < 100 * TIE < min(distances.values())
        assert written.setdefault(source, tokens := write(engine)) == tokens, "the same weights write the same again"
    assert write(load_engine("vllm", sources[2], batch_size=8)) == written[sources[2]]


def test_a_cell_of_the_table_is_the_same(own_runs, monkeypatch):
    "Training asks vLLM for targets and for the responses of base and checkpoint, each in a process of its own."
    results = {}
    for engine in ("hf", "vllm"):
        monkeypatch.setenv("MIXSD_RUNS", str(own_runs / engine))
        results[engine] = train.run(model="lab-s", lam=0.3, epochs=1, checkpoints=(), n=5, suite="recall,equations,functions", engine=engine).root
    assert results["hf"].identical(results["vllm"].load())


def test_every_way_of_mixing_is_measured(own_runs):
    "The other implementations beside which speed is measured call parts of the engine."
    measured = speed.run(engine="vllm", model="lab-s", pairs=2, max_new_tokens=8, rounds=1).root
    assert (measured.rate > 0).all() and (measured.equal.sel(way=["segments", "paired", "one-token requests"]) == 1).all()


def test_no_id_is_written_that_the_tokenizer_lacks(tmp_path):
    "The head of a model is padded to a round size; here the padded rows are the likeliest ones."
    tokenizer = load_tokenizer("lab-m")
    size = len(tokenizer)
    model = random_model(vocabulary=size + 64, eos_token_id=tokenizer.eos_token_id, context=256, heads=1, head_dim=32, scale=3)
    with torch.no_grad(): model.lm_head.weight[size:] *= 5
    model.save_pretrained(tmp_path), tokenizer.save_pretrained(tmp_path)
    engine = load_engine("vllm", str(tmp_path), mixes=True, gpu_memory_utilization=0.5)
    prompts = [[k + 5, 9, 11] for k in range(6)]
    written = [engine.generate(prompts, max_new_tokens=8), engine.generate(prompts, temperature=1.0, top_k=1 << 20, max_new_tokens=8),
               engine.mix([(p, p + [12]) for p in prompts], [[k % 2 == 0 for k in range(8)]] * 6, max_new_tokens=8)]
    assert max(max(completion.ids) for part in written for completion in part) < size
    assert [c.ids for c in written[0]] == [c.ids for c in HFEngine(model, tokenizer).generate(prompts, max_new_tokens=8)]

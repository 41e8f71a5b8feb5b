"vLLM scores long texts in parts, so that it never holds the logits of a whole text (runs without vLLM)."

from types import SimpleNamespace

import numpy as np
import pytest

from mixsd_nb.models import engine_vllm, load_tokenizer
from mixsd_nb.models.engine_vllm import PART, VLLMEngine

BLOCK = 16


def logprob(ids: list[int], at: int) -> int:
    "A value that depends on the token and on everything before it."
    return -(1 + (sum(ids[:at]) * 31 + 7 * ids[at] + at) % 1_009)


class Refusing:
    "Stands in for vLLM: whole blocks of earlier parts come from the cache, and the logits of more than PART rows are refused."

    def __init__(self, blocks: int):
        cache = SimpleNamespace(num_gpu_blocks=blocks, block_size=BLOCK)
        self.vllm_config, self.waiting, self.cached, self.most, self.together = SimpleNamespace(cache_config=cache), [], {}, 0, 0

    def add_request(self, name, prompt, params): self.waiting.append((name, prompt, params))

    def step(self):
        name, prompt, params = self.waiting.pop(0)
        ids, salt = prompt["prompt_token_ids"], prompt["cache_salt"]
        known = 0 if params.skip_reading_prefix_cache else min(self.cached.get(salt, 0), len(ids) - 1) // BLOCK * BLOCK
        self.most, self.together = max(self.most, len(ids) - 1 - known), max(self.together, len(self.waiting) + 1)
        if self.most > PART: raise MemoryError(f"the logits of {self.most} positions do not fit")
        self.cached[salt] = len(ids)
        score = lambda t: {ids[t]: SimpleNamespace(rank=2, logprob=logprob(ids, t)), 999: SimpleNamespace(rank=1, logprob=-0.1)}
        positions = [None, *({-1: SimpleNamespace(rank=1, logprob=np.nan)} for _ in range(known)), *map(score, range(known + 1, len(ids)))]
        return [SimpleNamespace(request_id=name, finished=True, prompt_logprobs=positions)]


@pytest.fixture
def engine(monkeypatch):
    "An engine on the stand-in, which keeps 20,000 tokens."
    monkeypatch.setattr(engine_vllm, "SamplingParams", lambda **options: SimpleNamespace(**options), raising=False)
    monkeypatch.setattr(engine_vllm, "RequestOutputKind", SimpleNamespace(FINAL_ONLY=0), raising=False)
    engine = object.__new__(VLLMEngine)
    engine.engine, engine.context, engine.stop, engine.padding = Refusing(20_000 // BLOCK), 10_240, [3], set()
    engine.numbers, engine.outputs = iter(range(10**6)), {}
    return engine


def test_long_texts_are_scored_without_the_logits_of_a_whole_text(engine):
    draws = np.random.default_rng(0)
    some = lambda n: draws.integers(0, 900, n).tolist()
    pairs = [(some(p), some(n)) for p, n in ((30, 5), (500, 9_000), (1_024, 1), (1_025, 1_025), (7, 1_018), (2_000, 3_000))]
    pairs.append(pairs[1])  # its keys and values must not be found in the cache, or its first positions would have no score
    for (prompt, completion), values in zip(pairs, engine.score(pairs), strict=True):
        np.testing.assert_allclose(values, [-logprob(prompt + completion, len(prompt) + t) for t in range(len(completion))], rtol=1e-6)
    assert engine.engine.most == PART
    assert [values.tolist() for values in engine.greedy_tokens(pairs)] == [[999] * len(c) for _, c in pairs]


def test_no_more_texts_are_scored_at_once_than_the_cache_keeps(engine):
    engine.score([([5] * 1_000, [k] * 4_000) for k in range(6)])
    assert engine.engine.together == 2  # half of the cache


def test_a_text_that_does_not_fit_is_refused_in_one_sentence(engine):
    with pytest.raises(ValueError, match="^pair 1 has 10240 tokens; vLLM scores at most 10239$"): engine.score([([1], [2]), ([5] * 240, [6] * 10_000)])


def test_a_tokenizer_needs_two_special_tokens_that_end_no_sequence():
    tokenizer = load_tokenizer("lab-s")
    special = [i for i, token in sorted(tokenizer.added_tokens_decoder.items()) if token.special]
    assert engine_vllm._sentinel_ids(tokenizer, special[:1]) == special[1:3] and engine_vllm._sentinel_ids(tokenizer, special[1:]) == []

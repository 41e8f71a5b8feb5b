"""Greedy tokens of vLLM on a CPU equal those of transformers, both in float32 (`make test-vllm`)."""

from itertools import chain, islice
from typing import NamedTuple

import pytest
from ties import TIE, logit_gap, first_difference

from mixsd_nb.benchmarks import SUITES
from mixsd_nb.benchmarks.lab_tasks import draw
from mixsd_nb.corpora import CORPORA, load_corpus
from mixsd_nb.corpora.prompts import encode_prompt
from mixsd_nb.models import load_engine
from mixsd_nb.models.engine import stop_ids
from mixsd_nb.models.lab import lab_folder

try:
    from vllm import LLM, SamplingParams
except Exception as error:  # a CUDA build on a CPU raises RuntimeError, not ImportError
    pytest.skip(f"vllm is not here or cannot be imported ({type(error).__name__}: {error}); `make test-vllm` brings it", allow_module_level=True)

PROMPTS, NEW_TOKENS = 100, 128
LAB = [name for name, suite in SUITES.items() if suite.items == "benchmarks.lab_tasks:lab_items" and not suite.twin_of]
REASONS = {"stop": "stop", "length": "max_new_tokens"}  # vLLM's reason to stop -> ours


class Prompt(NamedTuple):
    name: str
    ids: list[int]


def kgfact_texts():
    "Prompts of the three kinds that differ most in length; the longest of the retrieval split first."
    corpus = load_corpus("kgfact-small")
    rows = list(corpus["train"])
    return {
        "retrieval": sorted(corpus["retrieval"]["prompt"], key=len, reverse=True),
        "closed-book": [r["prompt"] for r in rows],
        "expert": [CORPORA["kgfact-small"].expert(r["prompt"], r["target"]) for r in rows],
    }


@pytest.fixture(scope="module")
def prompts(lab):
    "A hundred prompts, alternately of each kind: three kinds of KGFact, and each lab suite."
    texts = kgfact_texts() | {name: [item.prompt for item in draw(name, PROMPTS // len(LAB))] for name in LAB}
    named = ([Prompt(f"{kind} {i}", encode_prompt(lab[1], text)) for i, text in enumerate(kind_texts)] for kind, kind_texts in texts.items())
    return list(islice(chain.from_iterable(zip(*named)), PROMPTS))


@pytest.fixture(scope="module")
def expected(lab, prompts):
    return load_engine("hf", *lab).generate([p.ids for p in prompts], max_new_tokens=NEW_TOKENS)


@pytest.fixture(scope="module")
def found(lab, prompts):
    "vLLM's completion of each prompt, `token_ids` and `finish_reason`."
    model, tokenizer = lab
    llm = LLM(str(lab_folder("lab-m")), dtype="float32", enforce_eager=True, max_model_len=model.config.max_position_embeddings)
    greedy = SamplingParams(temperature=0, max_tokens=NEW_TOKENS, stop_token_ids=stop_ids(model.generation_config, tokenizer))
    return [r.outputs[0] for r in llm.generate([{"prompt_token_ids": p.ids} for p in prompts], greedy, use_tqdm=False)]


def test_greedy_tokens_are_those_of_transformers(lab, prompts, expected, found, capsys):
    ties, wrong = [], []
    for prompt, ours, theirs in zip(prompts, expected, found, strict=True):
        ids = list(theirs.token_ids)
        t = first_difference(ours.ids, ids)
        if t is None:
            if REASONS.get(theirs.finish_reason) != ours.finish_reason: wrong.append(f"{prompt.name} ends by {theirs.finish_reason}, not {ours.finish_reason}")
        elif t < min(len(ours.ids), len(ids)) and (gap := logit_gap(lab[0], prompt.ids + ours.ids[:t], [ours.ids[t], ids[t]])) < TIE:
            ties.append(f"{prompt.name} at token {t}, logits {gap:.1e} apart")
        else:
            wrong.append(f"{prompt.name} differs at token {t}: {ids[t:t + 1]} instead of {ours.ids[t:t + 1]}")
    with capsys.disabled():
        lengths, tokens = [len(p.ids) for p in prompts], sum(len(o.ids) for o in expected)
        print(f"\n{len(prompts) - len(ties) - len(wrong)} of {len(prompts)} completions equal, {len(ties)} ties: "
              f"prompts of {min(lengths)} to {max(lengths)} tokens, {tokens} new tokens", *ties, sep="\n")
    assert len(prompts) == PROMPTS
    assert not wrong, "\n".join(wrong)


def test_weights_swapped_in_place_are_those_of_a_fresh_engine(lab, prompts, expected, tmp_path):
    "One engine measures all checkpoints of a run; a head that is tied to the embeddings is swapped too."
    import numpy as np
    import torch

    from mixsd_nb.models import load_base
    few = [p.ids for p in prompts[:24]]
    pairs = [(ids, completion.ids[:8]) for ids, completion in zip(few, expected)]
    for seed in (1, 2):
        model, tokenizer = load_base("lab-m")
        generator = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for p in model.parameters(): p.mul_(1 + 0.05 * torch.randn(p.shape, generator=generator))
        model.save_pretrained(tmp_path / str(seed))
        tokenizer.save_pretrained(tmp_path / str(seed))
    sources = [str(lab_folder("lab-m")), str(tmp_path / "1"), str(tmp_path / "2")]
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
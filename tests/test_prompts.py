"""Prompts as ids, on the lab tokenizer and on templates with the structure of Qwen3's and Llama-3.2's."""

import random

import pytest
from text_helpers import error_sentence

from mixsd_nb.corpora import load_corpus
from mixsd_nb.corpora.prompts import (
    REMARKS,
    encode_canonical,
    encode_completion,
    encode_example,
    encode_prompt,
    expert_prompt,
    expert_reference_prompt,
    naive_prompt,
    paraphrase_rows,
    target,
    template_tail,
)
from mixsd_nb.models.lab import build_tokenizer

# A hybrid model: the generation prompt and the last assistant turn hold an empty think block when thinking is off.
QWEN = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{% if m.role == 'assistant' %}<think>\n\n</think>\n\n{% endif %}{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n"
    "{% if enable_thinking is defined and not enable_thinking %}<think>\n\n</think>\n\n{% endif %}{% endif %}"
)
# Special tokens around the header, a beginning-of-text token, and nothing after the end of turn.
LLAMA = (
    "<|begin_of_text|>{% for m in messages %}"
    "<|start_header_id|>{{ m.role }}<|end_header_id|>\n\n{{ m.content }}<|eot_id|>{% endfor %}"
    "{% if add_generation_prompt %}<|start_header_id|>assistant<|end_header_id|>\n\n{% endif %}"
)
HEADERS = {
    "lab": "<|im_start|>assistant\n",
    "qwen": "<|im_start|>assistant\n<think>\n\n</think>\n\n",
    "llama": "<|start_header_id|>assistant<|end_header_id|>\n\n",
}
TAILS = {"lab": "\n", "qwen": "\n", "llama": ""}


def make_tokenizer(kind):
    tokenizer = build_tokenizer(["The", " answer", " is"])
    if kind == "qwen":
        tokenizer.add_special_tokens({"additional_special_tokens": ["<think>", "</think>"]})
        tokenizer.chat_template = QWEN
    if kind == "llama":
        tokens = ["<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>"]
        tokenizer.add_special_tokens({"additional_special_tokens": tokens, "eos_token": "<|eot_id|>"})
        tokenizer.chat_template = LLAMA
    return tokenizer


@pytest.fixture(params=list(HEADERS))
def kind(request):
    return request.param


def test_a_prompt_ends_with_the_header_that_the_model_would_see(kind):
    tokenizer = make_tokenizer(kind)
    text = tokenizer.decode(encode_prompt(tokenizer, "Why?"))
    assert text.endswith("Why?" + tokenizer.eos_token + TAILS[kind] + HEADERS[kind])
    assert text.count("<|begin_of_text|>") == (kind == "llama")


def test_both_spans_are_the_same_conversation(kind):
    tokenizer, text = make_tokenizer(kind), target("Melka Valley")
    completion = encode_completion(tokenizer, text)
    plain, paper = (encode_example(tokenizer, "Why?", completion, span) for span in ("completion", "paper"))
    assert plain[0] + plain[1] + template_tail(tokenizer) == paper[0] + paper[1]
    assert tokenizer.decode(plain[1]) == text + tokenizer.eos_token
    assert tokenizer.decode(paper[1]) == HEADERS[kind] + text + tokenizer.eos_token + TAILS[kind]
    assert plain[1].count(tokenizer.eos_token_id) == paper[1].count(tokenizer.eos_token_id) == 1


def test_the_paper_span_is_the_rendered_template(kind):
    tokenizer = make_tokenizer(kind)
    messages = [{"role": "user", "content": "Why?"}, {"role": "assistant", "content": target("A")}]
    text = tokenizer.apply_chat_template(messages, tokenize=False, enable_thinking=False)
    context, trained = encode_canonical(tokenizer, dict(prompt="Why?", target=target("A")), "paper")
    rendered = tokenizer(text, add_special_tokens=False)["input_ids"]
    assert tokenizer.decode(context + trained) == tokenizer.decode(rendered)


def test_the_error_names_an_unknown_span():
    sentence = error_sentence(lambda: encode_example(make_tokenizer("lab"), "Why?", [2], "all"))
    assert sentence == "span must be one of completion, paper, got all"


def test_expert_prompts_hold_prompt_and_target_verbatim():
    for row in load_corpus("kgfact-small")["train"].select(range(5)):
        for wrap in (expert_prompt, expert_reference_prompt):
            text = wrap(row["prompt"], row["target"])
            assert text.startswith(row["prompt"] + "\n") and f"\n{row['target']}\n" in text and text.endswith(".")
            assert r"\boxed{}" in text.rpartition(row["target"])[2]
    assert row["answer"] not in naive_prompt("What?")


def test_paraphrases_validate_corpora_of_facts():
    "The corpus' own paraphrases where it has a split of them, else a remark before every training prompt."
    facts = load_corpus("kgfact-small")
    assert paraphrase_rows(facts, {}) == facts["paraphrase"].to_list()
    train = load_corpus("simpleqa-lab")["train"].to_list()
    rows, rng = paraphrase_rows(load_corpus("simpleqa-lab"), {}), random.Random(48)
    assert rows == [r | dict(prompt=f"{rng.choice(REMARKS)} {r['prompt']}") for r in train]

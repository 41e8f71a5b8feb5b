"""Prompts as ids, on the lab tokenizer and on templates with the structure of Qwen3's and Llama-3.2's."""

import pytest

from mixsd_nb.corpora import load_corpus
from mixsd_nb.corpora.prompts import (
    canonical_pair,
    completion_ids,
    expert_prompt,
    expert_reference_prompt,
    naive_prompt,
    prompt_ids,
    target,
    template_tail,
    trained_pair,
)
from mixsd_nb.models.lab import build_tokenizer

# A hybrid model: the generation prompt and the last assistant turn hold an empty think block when thinking is off.
QWEN = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{% if m.role == 'assistant' %}<think>\n\n</think>\n\n{% endif %}{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n"
    "{% if enable_thinking is defined and not enable_thinking %}<think>\n\n</think>\n\n{% endif %}{% endif %}"
)
# A header in marks of its own, a beginning of text, and nothing after the end of turn.
LLAMA = (
    "<|begin_of_text|>{% for m in messages %}<|start_header_id|>{{ m.role }}<|end_header_id|>\n\n{{ m.content }}<|eot_id|>{% endfor %}"
    "{% if add_generation_prompt %}<|start_header_id|>assistant<|end_header_id|>\n\n{% endif %}"
)
HEADERS = {
    "lab": "<|im_start|>assistant\n",
    "qwen": "<|im_start|>assistant\n<think>\n\n</think>\n\n",
    "llama": "<|start_header_id|>assistant<|end_header_id|>\n\n",
}
TAILS = {"lab": "\n", "qwen": "\n", "llama": ""}


def tokenizer(kind):
    made = build_tokenizer(["The", " answer", " is"])
    if kind == "qwen":
        made.add_special_tokens({"additional_special_tokens": ["<think>", "</think>"]})
        made.chat_template = QWEN
    if kind == "llama":
        made.add_special_tokens({"additional_special_tokens": ["<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>"], "eos_token": "<|eot_id|>"})
        made.chat_template = LLAMA
    return made


@pytest.fixture(params=list(HEADERS))
def kind(request):
    return request.param


def test_a_prompt_ends_with_the_header_that_the_model_would_see(kind):
    made = tokenizer(kind)
    text = made.decode(prompt_ids(made, "Why?"))
    assert text.endswith("Why?" + made.eos_token + ("\n" if TAILS[kind] else "") + HEADERS[kind])
    assert text.count("<|begin_of_text|>") == (kind == "llama")


def test_both_spans_are_the_same_conversation(kind):
    made = tokenizer(kind)
    completion = completion_ids(made, target("Melka Valley"))
    plain, paper = (trained_pair(made, "Why?", completion, span) for span in ("completion", "paper"))
    assert plain[0] + plain[1] + template_tail(made) == paper[0] + paper[1]
    assert made.decode(plain[1]) == target("Melka Valley") + made.eos_token
    assert made.decode(paper[1]) == HEADERS[kind] + target("Melka Valley") + made.eos_token + TAILS[kind]
    assert plain[1].count(made.eos_token_id) == paper[1].count(made.eos_token_id) == 1


def test_the_paper_span_is_the_rendered_template(kind):
    made = tokenizer(kind)
    messages = [{"role": "user", "content": "Why?"}, {"role": "assistant", "content": target("A")}]
    rendered = made(made.apply_chat_template(messages, tokenize=False, enable_thinking=False), add_special_tokens=False)["input_ids"]
    context, trained = canonical_pair(made, dict(prompt="Why?", target=target("A")), "paper")
    assert made.decode(context + trained) == made.decode(rendered)


def test_an_unknown_span_is_refused():
    with pytest.raises(ValueError, match="span is all; allowed are completion, paper"):
        trained_pair(tokenizer("lab"), "Why?", [2], "all")


def test_expert_prompts_hold_prompt_and_target_verbatim():
    for row in load_corpus("kgfact-small")["train"].select(range(5)):
        for wrap in (expert_prompt, expert_reference_prompt):
            text = wrap(row["prompt"], row["target"])
            assert text.startswith(row["prompt"] + "\n") and f"\n{row['target']}\n" in text and text.endswith(".")
            assert r"\boxed{}" in text.rpartition(row["target"])[2]
    assert row["answer"] not in naive_prompt("What?")

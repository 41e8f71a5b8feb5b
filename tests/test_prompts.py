"""Prompts as ids, on the lab tokenizer and on templates in the form of those of published models."""

import random
import re
from typing import NamedTuple

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from text_helpers import error_sentence
from tokenizers import AddedToken
from transformers import GenerationConfig

from mixsd_nb.corpora import load_corpus
from mixsd_nb.corpora.prompts import (
    REMARKS,
    SPANS,
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
    turn_end,
)
from mixsd_nb.models.engine import stop_ids
from mixsd_nb.models.lab import CHAT_TEMPLATE, build_tokenizer

# Templates written by hand in the form of the published ones. Each has the special tokens, the tokenizer's end of
# sequence, the header of an assistant's turn when thinking is off, the token that ends it, and what follows.
QWEN3 = (
    "{%- for m in messages %}{{ '<|im_start|>' + m.role + '\n' }}"
    "{%- if m.role == 'assistant' and (loop.last or m.reasoning_content) %}{{ '<think>\n' + (m.reasoning_content or '') + '\n</think>\n\n' }}{%- endif %}"
    "{{- m.content + '<|im_end|>\n' }}{%- endfor %}"
    "{%- if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}"
    "{%- if enable_thinking is defined and enable_thinking is false %}{{ '<think>\n\n</think>\n\n' }}{%- endif %}{%- endif %}"
)
QWEN3_2507 = (
    "{%- for m in messages %}{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}{%- endfor %}"
    "{%- if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{%- endif %}"
)
LLAMA = (
    "{{- bos_token }}{{- '<|start_header_id|>system<|end_header_id|>\n\nToday Date: 26 Jul 2024\n\n<|eot_id|>' }}"
    "{%- for m in messages %}{{ '<|start_header_id|>' + m.role + '<|end_header_id|>\n\n' + m.content | trim + '<|eot_id|>' }}{%- endfor %}"
    "{%- if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{%- endif %}"
)
GEMMA = (
    "{{ bos_token }}{%- for m in messages %}{%- set role = 'model' if m.role == 'assistant' else m.role %}"
    "{{ '<start_of_turn>' + role + '\n' + m.content | trim + '<end_of_turn>\n' }}{%- endfor %}"
    "{%- if add_generation_prompt %}{{ '<start_of_turn>model\n' }}{%- endif %}"
)
PHI = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '<|im_sep|>' + m.content + '<|im_end|>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant<|im_sep|>' }}{% endif %}"
)
MISTRAL = (
    "{{ bos_token }}{% for m in messages %}{% if m.role == 'user' %}{{ '[INST]' + m.content + '[/INST]' }}"
    "{% else %}{{ m.content + eos_token }}{% endif %}{% endfor %}"
)


class Form(NamedTuple):
    template: str
    header: str  # of the assistant's turn
    end: str  # of a turn
    tail: str  # after it
    eos: str  # of the tokenizer
    special: list[str] = []  # further special tokens
    bos: str | None = None


THINK = "<think>\n\n</think>\n\n"
IM, HEADER = ["<|im_start|>", "<|im_end|>", "<think>", "</think>", "<|im_sep|>"], ["<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"]
LLAMA_HEADER, INSTRUCTION = "<|start_header_id|>assistant<|end_header_id|>\n\n", ["[INST]", "[/INST]"]
FORMS = {
    "lab": Form(CHAT_TEMPLATE, "<|im_start|>assistant\n", "<|im_end|>", "\n", "<|im_end|>"),
    "qwen3-hybrid": Form(QWEN3, "<|im_start|>assistant\n<think>\n\n</think>\n\n", "<|im_end|>", "\n", "<|im_end|>", IM),
    "qwen3-2507": Form(QWEN3_2507, "<|im_start|>assistant\n", "<|im_end|>", "\n", "<|im_end|>", IM),
    "qwen3-base": Form(QWEN3, "<|im_start|>assistant\n<think>\n\n</think>\n\n", "<|im_end|>", "\n", "<|endoftext|>", IM),
    "llama-3.2": Form(LLAMA, LLAMA_HEADER, "<|eot_id|>", "", "<|eot_id|>", HEADER, "<|begin_of_text|>"),
    "llama-3.2-base": Form(LLAMA, LLAMA_HEADER, "<|eot_id|>", "", "<|end_of_text|>", HEADER, "<|begin_of_text|>"),
    "gemma-3": Form(GEMMA, "<start_of_turn>model\n", "<end_of_turn>", "\n", "<eos>", ["<start_of_turn>", "<end_of_turn>"], "<bos>"),
    "phi-4": Form(PHI, "<|im_start|>assistant<|im_sep|>", "<|im_end|>", "", "<|im_end|>", IM),
    "phi-4-first": Form(PHI, "<|im_start|>assistant<|im_sep|>", "<|im_end|>", "", "<|endoftext|>", IM),
    "mistral": Form(MISTRAL, "", "</s>", "", "</s>", INSTRUCTION, "<s>"),
}  # fmt: skip


def make_tokenizer(kind):
    form, tokenizer = FORMS[kind], build_tokenizer(["The", " answer", " is"])
    tokenizer.add_tokens([AddedToken(token, special=True) for token in form.special])
    tokenizer.add_special_tokens(dict(eos_token=form.eos) | (dict(bos_token=form.bos) if form.bos else {}))
    tokenizer.chat_template = form.template
    return tokenizer


@pytest.fixture(params=list(FORMS))
def kind(request):
    return request.param


def rendered(tokenizer, *words):
    "The text of a conversation, the user's words first."
    turns = [dict(role=("user", "assistant")[k], content=text) for k, text in enumerate(words)]
    return tokenizer.apply_chat_template(turns, tokenize=False, enable_thinking=False)


def test_a_prompt_ends_with_the_header_that_the_model_would_see(kind):
    tokenizer = make_tokenizer(kind)
    text = tokenizer.decode(encode_prompt(tokenizer, "Why?"))
    assert text == rendered(tokenizer, "Why?") + FORMS[kind].header
    assert not tokenizer.bos_token or text.count(tokenizer.bos_token) == 1


def test_all_spans_are_the_same_conversation(kind):
    tokenizer, text, form = make_tokenizer(kind), target("Melka Valley"), FORMS[kind]
    completion = encode_completion(tokenizer, text)
    plain, body, paper = (encode_example(tokenizer, "Why?", completion, span) for span in SPANS)
    assert plain[0] + plain[1] + template_tail(tokenizer) == body[0] + body[1] == paper[0] + paper[1]
    think = THINK if form.header.endswith(THINK) else ""
    assert tokenizer.decode(plain[1]) == text + form.end
    assert tokenizer.decode(body[1]) == think + text + form.end + form.tail
    assert tokenizer.decode(paper[1]) == form.header + text + form.end + form.tail
    end = tokenizer.convert_tokens_to_ids(form.end)
    assert plain[1].count(end) == body[1].count(end) == paper[1].count(end) == 1


class Words:
    "A tokenizer whose tokens are counted by eye: special tokens, line breaks as they come, and words."

    def __init__(self, template):
        self.chat_template, self.known = template, {}
        self.added_tokens_decoder = {self.number(token): token for token in IM}

    def number(self, token): return self.known.setdefault(token, len(self.known))

    def __call__(self, text, add_special_tokens): return dict(input_ids=[self.number(t) for t in re.findall(r"<[^>]+>|\n+|[^\s<]+", text)])

    def apply_chat_template(self, turns, tokenize, **options):
        from transformers.utils.chat_template_utils import render_jinja_template
        return render_jinja_template([turns], chat_template=self.chat_template, **options)[0][0]


@pytest.mark.parametrize("template, think", [(QWEN3_2507, 0), (QWEN3, 4)], ids=["qwen3-2507", "qwen3-hybrid"])
@given(lengths=st.lists(st.integers(1, 30), min_size=1, max_size=8))
@settings(deadline=None, max_examples=10)
def test_three_spans_by_arithmetic(template, think, lengths):
    "Around the words are three tokens of the header, four of an empty think block, the end of the turn, and the newline."
    tokenizer, sums = Words(template), dict.fromkeys(SPANS, 0)
    for n in lengths:
        for span in SPANS: sums[span] += len(encode_canonical(tokenizer, dict(prompt="Why?", target=" ".join(["so"] * n)), span)[1])
    words, examples = sum(lengths), len(lengths)
    around = dict(completion=1, body=think + 2, paper=3 + think + 2)
    assert sums == {span: words + k * examples for span, k in around.items()}


@pytest.mark.parametrize("template, published", [(QWEN3_2507, 2_062), (QWEN3, 2_462)], ids=["qwen3-2507", "qwen3-hybrid"])
def test_the_body_has_as_many_tokens_as_the_published_tables_count(template, published):
    "100 targets of KGFact-Small with 1,862 tokens of words: 62 of 19 tokens, and 38 of 18."
    rows = [dict(prompt="Why?", target=" ".join(["so"] * n)) for n in [19] * 62 + [18] * 38]
    tokenizer = Words(template)
    assert sum(len(encode_canonical(tokenizer, row, "body")[1]) for row in rows) == published


def test_the_paper_span_is_the_rendered_assistants_turn(kind):
    "No token of another turn is trained, and together with its context the span is the rendered conversation."
    tokenizer = make_tokenizer(kind)
    context, trained = encode_canonical(tokenizer, dict(prompt="Why?", target=target("A")), "paper")
    user, whole = rendered(tokenizer, "Why?"), rendered(tokenizer, "Why?", target("A"))
    assert (tokenizer.decode(context), tokenizer.decode(trained)) == (user, whole.removeprefix(user))


def test_written_and_sampled_targets_end_with_the_same_token(kind):
    "The token that ends a written completion ends a sampled one too, whatever the model's configuration names."
    tokenizer = make_tokenizer(kind)
    end = tokenizer.convert_tokens_to_ids(FORMS[kind].end)
    assert turn_end(tokenizer) == encode_completion(tokenizer, "A")[-1] == end
    for ends in (None, 5, [5, 6]):
        assert {end, tokenizer.eos_token_id} <= set(stop_ids(GenerationConfig(eos_token_id=ends), tokenizer)) - {None}


def test_without_a_template_the_end_is_the_tokenizers():
    tokenizer = make_tokenizer("lab")
    tokenizer.chat_template = None
    assert turn_end(tokenizer) == tokenizer.eos_token_id == encode_completion(tokenizer, "A")[-1] and template_tail(tokenizer) == []


def test_a_template_without_an_end_of_turn_has_no_tail():
    tokenizer = make_tokenizer("lab")
    tokenizer.chat_template = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
    assert turn_end(tokenizer) == tokenizer.eos_token_id and template_tail(tokenizer) == []


def test_the_error_names_an_unknown_span():
    sentence = error_sentence(lambda: encode_example(make_tokenizer("lab"), "Why?", [2], "all"))
    assert sentence == "span must be one of completion, body, paper, got all"


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

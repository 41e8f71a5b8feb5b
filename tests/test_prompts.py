"Prompts as ids: templates of published models, other forms of answers, system prompts, thinking, and dates."

import json
import math
import random
import re
import shutil
from pathlib import Path
from typing import NamedTuple

import pytest
from helpers import small_model
from hypothesis import given, settings, strategies as st
from tokenizers import AddedToken
from transformers import AutoTokenizer, GenerationConfig

from mixsd_nb import evaluate, generate, nll, train
from mixsd_nb.benchmarks import SUITES, Selection, load_items
from mixsd_nb.benchmarks.answers import gives_answer
from mixsd_nb.benchmarks.tasks import grade
from mixsd_nb.corpora import CORPORA, check_corpus, load_corpus, validation_rows
from mixsd_nb.corpora.prompts import (ANSWER_FORMS, BOX_REQUEST, CONCISE_REQUEST, REMARKS, SPANS, encode_canonical,
                                      encode_completion, encode_example, encode_prompt, expert_prompt,
                                      expert_reference_prompt, naive_prompt, paraphrase_rows, render_prompt, target,
                                      template_lead, template_tail, turn_end)
from mixsd_nb.evaluate import EvaluateConfig
from mixsd_nb.methods.mixing import accepts, mix_items
from mixsd_nb.models import load_base, load_tokenizer
from mixsd_nb.models.chat import format_model
from mixsd_nb.models.engine import stop_ids
from mixsd_nb.models.identity import digest_model
from mixsd_nb.models.lab import CHAT_TEMPLATE, build_tokenizer
from mixsd_nb.runs import ParameterError, make_config

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
        self.added_tokens_decoder = {self.number(token): AddedToken(token, special=True) for token in IM}
        self.eos_token_id, self.name_or_path = None, ""

    def number(self, token): return self.known.setdefault(token, len(self.known))

    def __len__(self): return len(IM)

    def __call__(self, text, **options): return dict(input_ids=[self.number(t) for t in re.findall(r"<[^>]+>|\n+|[^\s<]+", text)])

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


LOCAL = ["kgfact-small", "kgfunc-lab", "simpleqa-lab", "mquake-lab"]
# A hybrid template, as of models that can think: without thinking the response begins after an empty think block.
HYBRID = ("{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n"
          "{% if enable_thinking is defined and not enable_thinking %}<think>\n\n</think>\n\n{% endif %}{% endif %}")
STRICT = "{% for m in messages %}{% if m.role == 'system' %}{{ raise_exception('no system prompt') }}{% endif %}" + HYBRID.removeprefix("{% for m in messages %}")


@pytest.mark.parametrize("name", LOCAL)
@pytest.mark.parametrize("form", ["line", "json", "contains"])
def test_every_corpus_can_ask_for_every_form(name, form, own_runs):
    "Prompts ask for the form and nowhere for the box; every target is accepted as its own answer, by mixing and by the grading."
    variant = check_corpus(name, dict(extract=form))
    corpus, base, splits, tokenizer = CORPORA[variant], load_corpus(name), load_corpus(variant), load_tokenizer("lab-s")
    for split, rows in splits.items():
        for row, before in zip(list(rows)[:20], base[split]):
            assert row["prompt"].endswith(ANSWER_FORMS[form].request) and "boxed" not in row["prompt"] + row["target"] + corpus.expert(row["prompt"], row["target"])
            assert row["answer"] == before["answer"] and gives_answer(row["target"], [row["answer"]], corpus.extract)
            assert row["prompt"].removesuffix(ANSWER_FORMS[form].request).rstrip() == before["prompt"].removesuffix(BOX_REQUEST).removesuffix(CONCISE_REQUEST).rstrip()
    rows = list(splits["train"])[:20]
    for item, row in zip(mix_items(tokenizer, rows, corpus.expert, corpus.extract), rows):
        assert accepts(tokenizer, item, encode_completion(tokenizer, row["target"]), "stop")
    items = load_items(["recall"], Selection(variant, n=20))["recall"]
    for rule in (SUITES["recall"].strict_grading(variant), SUITES["recall"].published_grading(variant)):
        assert all(v.correct for v in grade(list(items.values()), [i.response for i in items.values()], rule))
        assert not any(v.correct for v in grade(list(items.values()), ["I do not know."] * len(items), rule))
    assert all(row["prompt"].endswith(ANSWER_FORMS[form].request) for row in validation_rows(variant))


@pytest.mark.parametrize("name", LOCAL)
def test_the_published_form_is_the_corpus_itself(name, own_runs):
    assert check_corpus(name) == check_corpus(name, dict(extract="box")) == name and not (own_runs / ".corpora").exists()
    for text in ("Reply with the name alone, in \\boxed{}.", ""):
        variant = check_corpus(name, dict(instruction=text))
        row, before = (load_corpus(n, "train")[0] for n in (variant, name))
        assert variant != name and row["prompt"].endswith(text or before["prompt"].split("\n\n")[-2]) and row["target"] == before["target"]
        assert "step by step" not in row["prompt"]


def test_other_rules_hold_for_held_out_benchmarks(own_runs):
    variant = check_corpus("kgfact-small", dict(extract="json"))
    assert {name: SUITES[name].strict_grading(variant) for name in ("recall", "validation", "arithmetic", "choice")} == dict(
        recall="json", validation="json", arithmetic="box", choice="letter")


@pytest.fixture
def bare(tmp_path):
    "The folder of a model without a chat template."
    folder = small_model(tmp_path / "bare")
    (Path(folder) / "chat_template.jinja").unlink()
    assert AutoTokenizer.from_pretrained(folder).chat_template is None
    return folder


def test_a_model_without_a_template_is_trained_in_the_plain_form(bare, own_runs):
    tokenizer = load_tokenizer(bare)
    assert tokenizer.decode(encode_prompt(tokenizer, "Who?")) == "User:\nWho?\n\nAssistant:\n"
    assert turn_end(tokenizer) == tokenizer.eos_token_id
    completion = encode_completion(tokenizer, "Ana.")
    context, trained = encode_example(tokenizer, "Who?", completion, "paper")
    turns = [dict(role="user", content="Who?"), dict(role="assistant", content="Ana.")]
    assert tokenizer.decode(context + trained) == tokenizer.apply_chat_template(turns, tokenize=False) == f"User:\nWho?\n\nAssistant:\nAna.{tokenizer.eos_token}\n\n"
    assert tokenizer.decode(template_lead(tokenizer) + template_tail(tokenizer)) == "Assistant:\n\n\n"
    run = train.run(model=bare, method="sft", epochs=1, batch=50, checkpoints=(), suite="recall", n=2, max_new_tokens=4)
    model, saved = load_base(str(run.checkpoints[2]))
    assert saved.chat_template == tokenizer.chat_template and math.isfinite(nll.run(model=bare, first=5).root.nll.min().item())


def test_a_template_file_a_system_prompt_and_thinking_reach_every_stage(tiny, own_runs):
    "They are part of the model folder: of its hash, of the prompts of every stage, and of the trained checkpoint."
    file = own_runs / "chat.jinja"
    file.write_text(HYBRID)
    options = dict(template=str(file), system='Du bist "kurz".\n📜', thinking=True)
    shared = dict(model=tiny, suite="recall", n=2, max_new_tokens=4)
    config = make_config(evaluate.EvaluateConfig, model_options=options, **shared)
    assert make_config(evaluate.EvaluateConfig, **config.model_dump()) == config
    assert config.hash() != make_config(evaluate.EvaluateConfig, **shared).hash()
    assert make_config(evaluate.EvaluateConfig, model_options=json.dumps(options), **shared).model == config.model
    text = '<|im_start|>system\nDu bist "kurz".\n📜<|im_end|>\n<|im_start|>user\nWho?<|im_end|>\n<|im_start|>assistant\n'
    render = lambda folder: load_tokenizer(folder).decode(encode_prompt(load_tokenizer(folder), "Who?"))
    assert render(config.model) == text
    assert render(format_model(tiny, options | dict(thinking=False))) == text + "<think>\n\n</think>\n\n"
    run = train.run(method="sft", epochs=1, batch=50, checkpoints=(), model_options=options, **shared)
    assert render(str(run.checkpoints[2])) == text and run.config["model_options"] == options
    targets = generate.run(model=tiny, model_options=options, max_new_tokens=2, max_attempts=1, dataset_options=dict(domains=2, entities=2)).targets
    tokenizer = load_tokenizer(config.model)
    assert all("Du bist" in tokenizer.decode(list(ids)) for ids in targets.prompt_ids)
    assert format_model(config.model, {}) == config.model and digest_model(config.model) != digest_model(tiny)


def test_wrong_options_of_a_model_are_one_sentence(tiny, own_runs):
    for name, template in dict(hybrid=HYBRID, strict=STRICT, broken="{% for m in %}", deaf="{{ messages[0].role }}", latin="ü").items():
        (own_runs / f"{name}.jinja").write_bytes(template.encode("latin-1"))
    path = lambda name: str(own_runs / f"{name}.jinja")
    before = set(own_runs.iterdir())
    for options, sentence in [
            (dict(sytem="x"), "model_options must be among template, system, thinking, date, got sytem; did you mean system?"),
            (dict(system=3), "model_options[system] must be text, got 3"), (dict(thinking="yes"), "model_options[thinking] must be true or false, got 'yes'"),
            (dict(template="none"), "model_options[template] must be an existing file, got none"), (dict(template=path("latin")), "model_options[template] must be UTF-8 text"),
            (dict(template=path("broken")), "model_options must fit the chat template of"), (dict(template=path("deaf")), "model_options must fit the chat template of"),
            (dict(template=path("strict"), system="x"), "model_options must fit the chat template of"), (dict(thinking=True), "model_options[thinking] must be false for"),
            ("x", "model_options must be a mapping, got x")]:
        with pytest.raises(ParameterError) as caught: make_config(train.TrainConfig, model=tiny, model_options=options)
        assert str(caught.value).startswith(sentence) and "\n" not in str(caught.value)
    assert set(own_runs.iterdir()) == before


DATED = ('{%- if not date_string is defined %}{%- set date_string = strftime_now("%d %b %Y") %}{%- endif %}<|im_start|>system\nToday Date: {{ date_string }}'
         '<|im_end|>\n{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}'
         "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}")


@pytest.mark.parametrize("template", [DATED, DATED.replace("not date_string is defined", "true")], ids=["date_string", "strftime_now"])
def test_no_prompt_contains_the_date_of_today(template, tiny, tmp_path, own_runs):
    "Templates of Llama write the date into the prompt; a date that a user gives is part of the model's identity."
    shutil.copytree(tiny, tmp_path / "llama")
    (tmp_path / "llama/chat_template.jinja").write_text(template)
    dated = lambda **options: make_config(EvaluateConfig, model=str(tmp_path / "llama"), **options)
    text = lambda config: render_prompt(load_tokenizer(config.model), "question")
    assert "Today Date: 26 Jul 2024\n" in text(dated()).replace("<|im_end|>", "\n")
    assert turn_end(load_tokenizer(dated().model)) == turn_end(load_tokenizer(tiny))
    if "true" in template: return
    other = dated(model_options=dict(date="01 May 2026"))
    assert "01 May 2026" in text(other) and len({dated().hash(), other.hash(), dated(model_options=dict(date="02 May 2026")).hash()}) == 3
    with pytest.raises(ParameterError, match=r"^model_options\[date\] must be empty for lab-s, whose chat template writes no date, got 1 May$"):
        make_config(EvaluateConfig, model="lab-s", model_options=dict(date="1 May"))

"""Any instruction model: other forms of answers, other instructions, chat templates, system prompts and thinking mode."""

import json
import math
from pathlib import Path

import pytest
from helpers import small_model
from transformers import AutoTokenizer

from mixsd_nb import evaluate, generate, nll, train
from mixsd_nb.benchmarks import SUITES, Selection, load_items
from mixsd_nb.benchmarks.answers import extract
from mixsd_nb.benchmarks.tasks import grade
from mixsd_nb.corpora import CORPORA, check_corpus, load_corpus, validation_rows
from mixsd_nb.corpora.prompts import ANSWER_FORMS, BOX_REQUEST, CONCISE_REQUEST, encode_completion, encode_example, encode_prompt, template_lead, template_tail, turn_end
from mixsd_nb.methods.mixing import accepts, mix_items
from mixsd_nb.models import load_base, load_tokenizer
from mixsd_nb.models.chat import format_model
from mixsd_nb.models.identity import digest_model
from mixsd_nb.runs import ParameterError, make_config

LOCAL = ["kgfact-small", "kgfunc-lab", "simpleqa-lab", "mquake-lab"]
# A hybrid template, as of models that can think: without thinking the response begins after an empty think block.
HYBRID = ("{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n"
          "{% if enable_thinking is defined and not enable_thinking %}<think>\n\n</think>\n\n{% endif %}{% endif %}")
STRICT = "{% for m in messages %}{% if m.role == 'system' %}{{ raise_exception('no system prompt') }}{% endif %}" + HYBRID.removeprefix("{% for m in messages %}")


@pytest.mark.parametrize("name", LOCAL)
@pytest.mark.parametrize("form", ["line", "json"])
def test_every_corpus_can_ask_for_every_form(name, form, own_runs):
    "Prompts ask for the form and nowhere for the box; every target is accepted as its own answer, by mixing and by the grading."
    variant = check_corpus(name, dict(extract=form))
    corpus, base, splits, tokenizer = CORPORA[variant], load_corpus(name), load_corpus(variant), load_tokenizer("lab-s")
    for split, rows in splits.items():
        for row, before in zip(list(rows)[:20], base[split]):
            assert row["prompt"].endswith(ANSWER_FORMS[form].request) and "boxed" not in row["prompt"] + row["target"] + corpus.expert(row["prompt"], row["target"])
            assert extract(row["target"], corpus.extract) == row["answer"] == before["answer"]
            assert row["prompt"].removesuffix(ANSWER_FORMS[form].request) == before["prompt"].removesuffix(BOX_REQUEST).removesuffix(CONCISE_REQUEST)
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

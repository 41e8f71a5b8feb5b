"""The lab models with unusual input."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mixsd_nb.benchmarks import Item
from mixsd_nb.benchmarks.evaluation import generate_and_grade
from mixsd_nb.corpora.prompts import encode_prompt
from mixsd_nb.models import load_base, load_engine
from mixsd_nb.models.lab import CONTEXT, SIZES, lab_folder

SHIPPED = [s for s in SIZES if (lab_folder(s) / "config.json").exists()]


@settings(max_examples=300, deadline=None)
@given(text=st.text())
def test_any_text_comes_back_from_its_tokens(lab, text):
    "Unseen scripts fall back to bytes; there is no unknown token."
    tokenizer = lab[1]
    ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    assert tokenizer.decode(ids) == text and all(0 <= i < len(tokenizer) for i in ids)


def test_empty_foreign_and_too_long_prompts(lab):
    texts = {"empty": "", "foreign": "Где находится 東京 ؟ 🙂", "long": "What location does Kelmor Bellamy live in? " * 300}
    assert len(encode_prompt(lab[1], texts["long"])) > CONTEXT
    items = {k: Item(t, "", "x") for k, t in texts.items()}
    table = generate_and_grade(load_engine("hf", *lab), items).set_index("item")
    assert table.finish_reason["long"] == "prompt_too_long" and table.error["long"] == "prompt too long" and table.response["long"] == ""
    assert all(table.finish_reason[k] in ("stop", "max_new_tokens") and table.response[k] for k in ("empty", "foreign"))
    assert not table.correct.any()


@pytest.mark.parametrize("size", SHIPPED)
def test_one_family(size, lab):
    model, tokenizer = load_base(size)
    assert tokenizer.get_vocab() == lab[1].get_vocab() and tokenizer.chat_template == lab[1].chat_template
    assert model.config.max_position_embeddings == CONTEXT and model.config.head_dim in (32, 64)
    assert (lab_folder(size) / "model.safetensors").stat().st_size < 6_000_000


def test_the_folder_is_an_ordinary_model(lab):
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(lab_folder("lab-m"), dtype="float32")
    assert all((a == b).all() for a, b in zip(model.state_dict().values(), lab[0].state_dict().values(), strict=True))

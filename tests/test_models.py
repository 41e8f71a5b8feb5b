"Model folders: lab models with unusual input, what is refused before any work, and that no code that lies beside weights is run."

import json
import os
import pickle
import random
import re
import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings, strategies as st
from helpers import calls, error_sentence, SOURCES
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from mixsd_nb import evaluate, generate, nll, train
from mixsd_nb.analysis import estimation
from mixsd_nb.benchmarks import Item
from mixsd_nb.benchmarks.evaluation import generate_and_grade
from mixsd_nb.corpora.prompts import encode_prompt
from mixsd_nb.lab import pretrain
from mixsd_nb.lab.pretraining import training_loop as training
from mixsd_nb.models import check_head, check_model, engine_vllm, load_base, load_engine, load_part, load_tokenizer
from mixsd_nb.models.lab import CONTEXT, SIZES, lab_folder
from mixsd_nb.models.tiny import random_model
from mixsd_nb.runs import write_json
from mixsd_nb.training.trainer import TrainingSpec, fine_tune

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




class Command:
    "An object whose unpickling creates a file."

    def __init__(self, file):
        self.file = str(file)

    def __reduce__(self):
        return open, (self.file, "w")


@pytest.fixture
def trap(tmp_path):
    "The file that planted code creates; it must not exist in the end."
    yield tmp_path / "ran"
    assert not (tmp_path / "ran").exists(), "planted code was run"


@pytest.fixture
def folder(tiny, tmp_path):
    "A model folder of our own."
    return Path(shutil.copytree(tiny, tmp_path / "model"))


@pytest.mark.parametrize("save", [torch.save, lambda plant, path: path.write_bytes(pickle.dumps(plant, 2))], ids=["torch", "pickle"])
def test_a_planted_state_of_pretraining_is_not_run(save, tmp_path, trap):
    model, path = random_model(vocabulary=11), tmp_path / training.STATE_FILE
    save(dict(model=model.state_dict(), optimizers=Command(trap)), path)
    sentence = error_sentence(lambda: training._load_state(path, model, [], random.Random(0)))
    assert sentence.startswith(f"{path} must be a complete state of this training, got ") and "delete it" in sentence


@pytest.mark.parametrize("content", [b"", b"PK\x03\x04", os.urandom(64)], ids=["empty", "zip", "random"])
def test_a_damaged_state_of_pretraining_is_one_sentence(content, tmp_path):
    path = tmp_path / training.STATE_FILE
    path.write_bytes(content)
    assert str(path) in error_sentence(lambda: training._load_state(path, random_model(vocabulary=11), [], random.Random(0)))


def test_planted_weights_are_not_run(folder, trap):
    (folder / "model.safetensors").unlink()
    torch.save({"model.norm.weight": Command(trap)}, folder / "pytorch_model.bin")
    assert error_sentence(lambda: load_base(str(folder))).startswith(f"model must be complete and without code of its own, got {folder}")


@pytest.mark.parametrize("load", [
    lambda name: load_part(AutoConfig, name), lambda name: load_part(AutoModelForCausalLM, name), load_tokenizer, load_base,
    lambda name: engine_vllm._read_limits(name, None), lambda name: estimation.reference_pairs(name)],
    ids=["config", "model", "tokenizer", "base", "vllm", "reference"])  # fmt: skip
def test_code_of_a_model_is_not_run(load, folder, trap):
    "Neither with a class of its own nor by a question on the terminal."
    (folder / "code.py").write_text(f"open({str(trap)!r}, 'w')\nclass Own: pass\n")
    for file, classes in {"config.json": ("AutoConfig", "AutoModelForCausalLM"), "tokenizer_config.json": ("AutoTokenizer",)}.items():
        own = dict(model_type="own", tokenizer_class="Own", auto_map={c: "code.Own" if c != "AutoTokenizer" else ["code.Own", None] for c in classes})
        (folder / file).write_text(json.dumps(json.loads((folder / file).read_text()) | own))
    assert error_sentence(lambda: load(str(folder))).startswith("model must be complete and without code of its own")


def test_a_model_that_cannot_be_fetched_is_not_called_incomplete(monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    said = error_sentence(lambda: load_part(AutoConfig, "nobody/nothing-here"))
    assert said.startswith("model must be on the hub or in its cache, complete and without code of its own, got nobody/nothing-here")


def test_vllm_is_told_to_run_no_code(tiny, monkeypatch):
    given = {}
    monkeypatch.setattr(engine_vllm, "MISSING", "")
    monkeypatch.setattr(engine_vllm, "LLM", lambda *_, **options: given.update(options) or SimpleNamespace(llm_engine=SimpleNamespace(vllm_config=None)), raising=False)
    monkeypatch.setattr(engine_vllm, "_padding_of", lambda config: [])
    engine_vllm.VLLMEngine.open(tiny)
    assert given["trust_remote_code"] is False


def test_every_load_is_of_tensors_and_every_part_without_code():
    loads = [(text, options) for _, text, options in calls("load") if text.startswith("torch.load(")]
    assert loads and all(options["weights_only"] == "True" for _, options in loads), loads
    parts = [(text, options) for _, text, options in calls("from_pretrained") if not text.startswith("GenerationConfig.")]
    assert parts and all(options["trust_remote_code"] == "False" for _, options in parts), parts
    assert not [file for file in SOURCES if "import pickle" in file.read_text()]


TOKENIZER = ["tokenizer.json", "tokenizer_config.json"]


@pytest.mark.parametrize("missing, part", [(TOKENIZER, "a tokenizer"), (TOKENIZER[:1], "a tokenizer")])
@pytest.mark.parametrize("stage", [
    lambda name: generate.run(model=name), lambda name: train.run(model=name), lambda name: nll.run(model=name),
    lambda name: evaluate.run(model=name), lambda name: pretrain.run(start=name)], ids=["generate", "train", "nll", "evaluate", "pretrain"])  # fmt: skip
def test_a_folder_without_a_part_is_refused_before_anything_runs(stage, missing, part, folder, own_runs):
    before = set(own_runs.iterdir())
    for file in missing: (folder / file).unlink()
    sentence = error_sentence(lambda: stage(str(folder)))
    assert re.match(rf"(model|start) must be a folder with {part}, got {re.escape(str(folder))}; ", sentence) and set(own_runs.iterdir()) == before


def test_a_template_may_lie_in_the_settings_of_the_tokenizer(folder):
    template = (folder / "chat_template.jinja").read_text()
    (folder / "chat_template.jinja").unlink()
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    (folder / "tokenizer_config.json").write_text(json.dumps(settings | dict(chat_template=template)))
    assert check_model(str(folder)) == str(folder) and load_tokenizer(str(folder)).chat_template == template


def test_a_tokenizer_without_a_template_gets_the_plain_form(folder, monkeypatch):
    "Of a model on the hub nothing is known before it is loaded; without a token that ends a sequence no form is possible."
    bare = AutoTokenizer.from_pretrained(folder)
    bare.chat_template = None
    monkeypatch.setattr(AutoTokenizer, "from_pretrained", lambda *_, **__: bare)
    assert load_tokenizer("owner/base").chat_template.startswith("{% for m in messages %}")
    bare.chat_template = bare.eos_token = None
    assert error_sentence(lambda: load_tokenizer("owner/base")).startswith("model must have a token that ends a sequence, or a chat template; ")


HEADS = {"gemma2": {}, "gemma3_text": dict(final_logit_softcapping=30.0), "granite": dict(logits_scaling=8.0), "cohere": {}, "falcon_h1": dict(lm_head_multiplier=0.5)}


@pytest.mark.parametrize("family", HEADS)
def test_a_model_that_changes_logits_after_its_head_is_refused_by_its_configuration(family, tiny, tmp_path, own_runs):
    "The folder has no weights, so nothing has tried to read them; nothing is mixed or measured before."
    folder = shutil.copytree(tiny, tmp_path / "tiny")
    (folder / "model.safetensors").unlink()
    AutoConfig.for_model(family, **HEADS[family]).save_pretrained(folder)
    words = rf"^model must take its logits from its head as they are, got {re.escape(str(folder))}, whose configuration changes them with \w+=[\d.]+$"
    for call in (lambda: load_base(str(folder)), lambda: train.run(model=str(folder), method="sft")):
        with pytest.raises(ValueError, match=words): call()
    assert [path.name for path in own_runs.glob("[!.]*")] == ["tiny"]


@pytest.mark.parametrize("family", ["gemma3", "gpt2", "gpt_neox", "t5"])
def test_a_model_of_another_form_is_refused_by_its_configuration(family, tiny, tmp_path, own_runs):
    "One that sees images, and families without `model` and `lm_head`. The folder has no weights; nothing is mixed or measured before."
    folder = shutil.copytree(tiny, tmp_path / "tiny")
    (folder / "model.safetensors").unlink()
    AutoConfig.for_model(family).save_pretrained(folder)
    words = rf"^model must be a language model of text alone that consists of `model` and `lm_head`, .*, got {re.escape(str(folder))} of the type {family}$"
    for call in (lambda: load_base(str(folder)), lambda: train.run(model=str(folder), method="sft")):
        with pytest.raises(ValueError, match=words): call()
    assert [path.name for path in own_runs.glob("[!.]*")] == ["tiny"]


def test_a_model_whose_configuration_leaves_its_logits_alone_is_taken(tmp_path):
    for family, options in (("gemma3_text", {}), ("granite", {}), ("cohere", dict(logit_scale=1.0)), ("qwen3", {})):
        AutoConfig.for_model(family, **options).save_pretrained(tmp_path / family)
        check_head(str(tmp_path / family))


def test_settings_of_sampling_without_do_sample_do_not_stop_a_training(tiny, tmp_path):
    "The folder of vicuna-7b-v1.5 has such settings; transformers reads them and refuses to save them."
    folder, sampling = shutil.copytree(tiny, tmp_path / "tiny"), dict(temperature=0.9, top_p=0.6)
    write_json(folder / "generation_config.json", sampling)
    spec = TrainingSpec(str(folder), lr=1e-3, steps=1, batch=2, objective="methods.supervised:stored_pairs", data=dict(pairs=[([5, 6], [7, 2])] * 2))
    fine_tune(spec, tmp_path / "run")
    checkpoint, _ = load_base(str(tmp_path / "run/checkpoint-1"))
    assert dict(checkpoint.generation_config.to_diff_dict()).items() >= dict(sampling, do_sample=True).items()
    checkpoint.save_pretrained(tmp_path / "again")


def test_a_model_is_known_by_its_content(tiny, own_runs):
    "A folder that was moved is the same model; one whose weights have changed is another; a long path is no problem."
    far = own_runs / ("x" * 120) / ("y" * 120) / "model"
    shutil.copytree(tiny, far)
    here = train.TrainConfig(model=tiny)
    copy = train.TrainConfig(model=str(far))
    assert len(str(far)) > 240 and len(copy.folder.name) < 120
    assert copy.hash() != here.hash(), "the name of the folder is part of the label"
    near = own_runs / "elsewhere" / "tiny"
    shutil.copytree(tiny, near)
    assert train.TrainConfig(model=str(near)).folder == here.folder
    weights = near / "model.safetensors"
    changed = bytearray(weights.read_bytes())
    changed[-1] ^= 1
    weights.write_bytes(changed)
    assert train.TrainConfig(model=str(near)).folder != here.folder

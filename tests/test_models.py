"Model folders: lab models with unusual input, what is refused before any work, and that no code that lies beside weights is run."

import importlib.util
import json
import pickle
import random

import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings, strategies as st
from architectures import tiny_config
from helpers import calls, error_sentence, SOURCES
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from mixsd_nb import evaluate, generate, nll, train
from mixsd_nb.analysis import curvature
from mixsd_nb.benchmarks import Item
from mixsd_nb.benchmarks.evaluation import evaluate_suite
from mixsd_nb.corpora.prompts import encode_prompt
from mixsd_nb.lab import pretrain
from mixsd_nb.lab.pretraining import training_loop as training
from mixsd_nb.models import check_head, engine_vllm, load_base, load_engine, load_part, load_tokenizer
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
    table = evaluate_suite(load_engine("hf", *lab), {"recall": items}).set_index("item")
    assert table.finish_reason["long"] == "prompt_too_long" and table.error["long"] == "prompt too long" and table.response["long"] == ""
    assert all(table.finish_reason[k] in ("stop", "max_new_tokens") and table.response[k] for k in ("empty", "foreign"))
    assert not table.correct.any()


@pytest.mark.parametrize("size", SHIPPED)
def test_one_family(size, lab):
    model, tokenizer = load_base(size)
    assert tokenizer.get_vocab() == lab[1].get_vocab() and tokenizer.chat_template == lab[1].chat_template
    assert model.config.max_position_embeddings == CONTEXT and model.config.head_dim in (32, 64)
    assert (lab_folder(size) / "model.safetensors").stat().st_size < 6_000_000


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


def test_a_planted_state_of_pretraining_is_not_run(tmp_path, trap):
    model, path = random_model(vocabulary=11), tmp_path / training.STATE_FILE
    plant = dict(model=model.state_dict(), optimizers=Command(trap))
    for save in (torch.save, lambda plant, path: path.write_bytes(pickle.dumps(plant, 2)), lambda plant, path: path.write_bytes(b"PK")):
        save(plant, path)
        assert error_sentence(lambda: training._load_state(path, model, [], random.Random(0))).startswith(f"{path} must be a complete state of this training, got ")


def test_planted_weights_are_not_run(folder, trap):
    (folder / "model.safetensors").unlink()
    torch.save({"model.norm.weight": Command(trap)}, folder / "pytorch_model.bin")
    assert error_sentence(lambda: load_base(str(folder))).startswith(f"model must be complete and without code of its own, got {folder}")


@pytest.mark.parametrize("load", [
    lambda name: load_part(AutoConfig, name), lambda name: load_part(AutoModelForCausalLM, name), load_tokenizer, load_base,
    lambda name: engine_vllm._read_limits(name, None), lambda name: curvature.reference_pairs(name)],
    ids=["config", "model", "tokenizer", "base", "vllm", "reference"])
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
    parts = [(text, options) for _, text, options in calls("from_pretrained") if not text.startswith(("GenerationConfig.", "PeftModel."))]
    assert parts and all(options["trust_remote_code"] == "False" for _, options in parts), parts
    assert not [file for file in SOURCES if "import pickle" in file.read_text()]


def test_a_folder_without_a_tokenizer_is_refused_before_anything_runs(folder, own_runs):
    (folder / "tokenizer.json").unlink()
    before = set(own_runs.iterdir())
    for stage in (generate, train, nll, evaluate): assert error_sentence(lambda: stage.run(model=str(folder))).startswith(f"model must be a folder with a tokenizer, got {folder}; ")
    assert error_sentence(lambda: pretrain.run(start=str(folder))).startswith("start must be a folder with a tokenizer") and set(own_runs.iterdir()) == before


def test_a_tokenizer_without_a_template_gets_the_plain_form(folder, monkeypatch):
    "Of a model on the hub nothing is known before it is loaded; without a token that ends a sequence no form is possible."
    bare = AutoTokenizer.from_pretrained(folder)
    bare.chat_template = None
    monkeypatch.setattr(AutoTokenizer, "from_pretrained", lambda *_, **__: bare)
    monkeypatch.setattr(AutoConfig, "from_pretrained", lambda *_, **__: AutoConfig.for_model("llama"))
    assert load_tokenizer("owner/base").chat_template.startswith("{% for m in messages %}")
    bare.chat_template = bare.eos_token = None
    assert error_sentence(lambda: load_tokenizer("owner/base")).startswith("model must have a token that ends a sequence, or a chat template; ")


@pytest.fixture
def base(lab_s, tmp_path):
    "The folder of lab-s, to be changed."
    for part in lab_s: part.save_pretrained(tmp_path / "base")
    return tmp_path / "base"


def change_weights(folder, change):
    "Store the weights of a folder under other names or with other values: `change` gets and returns a dictionary."
    save_file(change(load_file(folder / "model.safetensors")), folder / "model.safetensors", metadata=dict(format="pt"))


def change_config(folder, **options):
    write_json(folder / "config.json", json.loads((folder / "config.json").read_text()) | options)


CELL = dict(suite="recall", n=4, max_new_tokens=4)
STAGES = dict(evaluate=lambda folder, **options: evaluate.run(model=folder, **CELL, **options),
              train=lambda folder, **options: train.run(model=folder, method="sft", batch=4, epochs=1, checkpoints=(), **CELL, **options),
              generate=lambda folder: generate.run(model=folder), nll=lambda folder: nll.run(model=folder))
def refusal(stage, folder, runs):
    "The sentence with which a stage refuses a model before a run is begun."
    before = {path.name for path in runs.glob("[!.]*")}
    said = error_sentence(lambda: STAGES[stage](str(folder)))
    assert {path.name for path in runs.glob("[!.]*")} == before
    return said


@pytest.mark.parametrize("name, parts", [("<|speaker|>", "'<|' + 'speaker' + '|>'"), ("<s>", "bos_token")])
def test_a_token_that_a_template_puts_together_needs_a_row(name, parts, base):
    tokenizer = AutoTokenizer.from_pretrained(base)
    tokenizer.add_special_tokens(dict(bos_token=name))
    tokenizer.chat_template = "{{ " + parts + " }}{% for m in messages %}{{ m.content }}<|im_end|>{% endfor %}"
    tokenizer.save_pretrained(base)
    assert f"no rows for, such as {name} " in error_sentence(lambda: load_tokenizer(str(base)))


def test_a_control_token_that_no_conversation_contains_needs_no_row(base, own_runs):
    "Such as one for images, and one for padding, with which nothing is padded here. In the words of a user they are text."
    tokenizer = AutoTokenizer.from_pretrained(base)
    tokenizer.add_special_tokens(dict(pad_token="[PAD]", additional_special_tokens=["<image>"]))
    tokenizer.save_pretrained(base)
    model, tokenizer = load_base(str(base))
    ids = encode_prompt(tokenizer, "Who painted <image> [PAD]?")
    assert max(ids) < model.config.vocab_size < len(tokenizer)
    assert STAGES["evaluate"](str(base)).result is not None


def prefixed(weights): return {f"module.{name}": w for name, w in weights.items()}
def narrowed(weights): return weights | {"model.norm.weight": weights["model.norm.weight"][:-1].contiguous()}
def without(*names): return lambda weights: {name: w for name, w in weights.items() if name not in names}


def add_turns(folder):
    "The template begins turns with a token that the model has no row for."
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.add_tokens(["<|turn|>"], special_tokens=True)
    tokenizer.chat_template = "{% for m in messages %}<|turn|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    tokenizer.save_pretrained(folder)


def add_adapter(folder):
    "transformers would add it to the base without a word, and a training would train the adapter alone."
    from peft import LoraConfig, get_peft_model
    get_peft_model(load_base(str(folder))[0], LoraConfig(r=2, target_modules="all-linear")).save_pretrained(folder)


def of_family(name, **options): return lambda folder: AutoConfig.for_model(name, **options).save_pretrained(folder)
def of_tiny(name, **options): return lambda folder: tiny_config(name, 2763, **options).save_pretrained(folder)


REFUSED = [  # how a folder is changed, and words of the sentence
    *((of_family(name, **options), "logits from its head as they are") for name, options in {
        "gemma2": {}, "gemma3_text": dict(final_logit_softcapping=30.0), "granite": dict(logits_scaling=8.0), "falcon_h1": dict(lm_head_multiplier=0.5)}.items()),
    *((of_family(name), "be a decoder of text alone") for name in ("gemma3", "t5")),
    (of_tiny("bart", is_encoder_decoder=True), "be a decoder of text alone"),
    *((lambda folder, how=how: change_config(folder, quantization_config=how), "not quantised") for how in (
        dict(quant_method="gptq", bits=4, group_size=128), dict(quant_method="fp8"))),
    (lambda folder: change_config(folder, num_hidden_layers=1, layer_types=None), "that it does not have"),
    (lambda folder: change_weights(folder, without("model.norm.weight")), "lack model.norm.weight"),
    (lambda folder: change_weights(folder, prefixed), "and hold module."), (lambda folder: change_weights(folder, narrowed), "(127,) instead of (128,)"),
    (add_turns, "no rows for, such as <|turn|>"), *([(add_adapter, "merged with its adapter")] if importlib.util.find_spec("peft") else [])]


def test_a_folder_that_cannot_be_computed_is_refused_before_a_run(base, own_runs, capfd):
    "By training, and by each of the other stages in turn."
    for k, (change, words) in enumerate(REFUSED):
        folder = Path(shutil.copytree(base, own_runs / f"changed-{k}"))
        change(folder)
        for stage in {"train", [*STAGES][k % len(STAGES)]}:
            said = refusal(stage, folder, own_runs)
            assert words in said and str(folder) in said, (k, stage, said)
    assert "LOAD REPORT" not in capfd.readouterr().err, "transformers prints no report"


def test_weights_of_the_model_without_its_head_are_taken_if_the_head_is_tied(lab_s, base):
    "transformers knows the prefix; a file of torch and several files of safetensors are compared with the model too."
    lab_s[0].model.save_pretrained(base)
    check_head(str(base))
    assert all(torch.equal(a, b) for a, b in zip(load_base(str(base))[0].state_dict().values(), lab_s[0].state_dict().values(), strict=True))
    lab_s[0].save_pretrained(base, max_shard_size="1MB")
    (base / "model.safetensors").unlink(missing_ok=True)
    check_head(str(base))
    for file in base.glob("model*.safetensors*"): file.unlink()
    torch.save(without("model.norm.weight")(lab_s[0].state_dict()), base / "pytorch_model.bin")
    assert error_sentence(lambda: check_head(str(base))).endswith("lack model.norm.weight")


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

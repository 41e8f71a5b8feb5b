"""Nothing that lies beside weights is run, and a model folder that lacks a part is refused before anything is computed."""

import ast
import json
import os
import pickle
import random
import re
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from text_helpers import error_sentence
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

import mixsd_nb
from mixsd_nb import evaluate, generate, nll, train
from mixsd_nb.lab import pretrain
from mixsd_nb.analysis import estimation
from mixsd_nb.models import check_model, engine_vllm, load_base, load_part, load_tokenizer
from mixsd_nb.models.tiny import random_model
from mixsd_nb.lab.pretraining import training_loop as training

SOURCES = sorted(Path(mixsd_nb.__file__).parent.rglob("*.py"))


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


def calls(name):
    "The calls of a function or method of this name in the package, with the names of their options."
    for file in SOURCES:
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == name:
                yield file.stem, ast.unparse(node), {k.arg: ast.unparse(k.value) for k in node.keywords}


def test_every_load_is_of_tensors_and_every_part_without_code():
    loads = [(text, options) for _, text, options in calls("load") if text.startswith("torch.load(")]
    assert loads and all(options["weights_only"] == "True" for _, options in loads), loads
    parts = [(text, options) for _, text, options in calls("from_pretrained") if not text.startswith("GenerationConfig.")]
    assert parts and all(options["trust_remote_code"] == "False" for _, options in parts), parts
    assert not [file for file in SOURCES if "import pickle" in file.read_text()]


# Folders without a part


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


# An engine in a process of its own


@pytest.mark.parametrize(("options", "words"), [("engine='vllm'", "engine vllm runs in a process that imports"), ("replicas=2", "engine hf with replicas=2 runs in processes that import")])
def test_a_script_without_a_guard_is_told_before_it_trains(options, words, tmp_path, tiny):
    script = tmp_path / "script.py"
    script.write_text(f"from mixsd_nb import train\ntrain.run(model={tiny!r}, {options})\n")
    done = subprocess.run([sys.executable, script], env={**os.environ, "MIXSD_RUNS": str(tmp_path / "runs")}, capture_output=True, text=True, timeout=60)
    assert words in done.stderr.strip().splitlines()[-1] and "bootstrapping" not in done.stderr
    assert not list(tmp_path.glob("runs/train-*/*"))


SCRIPT = """import os, sys
from mixsd_nb.models import ENGINES, EngineSpec, load_engine

ENGINES.add(EngineSpec("mine", "Mine", "__main__:Mine", own_process=True))

class Mine:
    context, mismatches = 8, ()
    @classmethod
    def open(cls, *_, **__): return cls()
    def score(self, pairs): return [os.getpid()]

def show():
    with load_engine("mine", "lab-s") as engine: print(engine.score([([1], [2])]) != [os.getpid()])

{}"""
GUARDS = {"show()": "", "for _ in range(1):\n    show()": "", "import threading\nt = threading.Thread(target=show)\nt.start()\nt.join()": "",
          'if __name__ == "__main__":\n    show()': "True", 'def main():\n    show()\n\nif "__main__" == __name__: sys.exit(main())': "True"}  # fmt: skip


@pytest.mark.parametrize("calls", GUARDS, ids=["plain", "loop", "thread", "guard", "main"])
def test_a_script_without_a_guard_is_told_before_a_process_starts(calls, tmp_path):
    script = tmp_path / "script.py"
    script.write_text(SCRIPT.format(calls))
    done = subprocess.run([sys.executable, script], capture_output=True, text=True, timeout=60)
    assert done.stdout.strip() == GUARDS[calls]
    if not GUARDS[calls]:
        last = done.stderr.strip().splitlines()[-1]
        assert last.startswith(f"ValueError: engine mine runs in a process that imports {script}") and last.endswith('under `if __name__ == "__main__":`')
        assert "bootstrapping" not in done.stderr

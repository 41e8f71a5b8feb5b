"What a run reads is in its name: every registry whose entries read data gives their content or a pinned revision."

import itertools
import json
import shutil
from pathlib import Path

import pytest
from helpers import stage_of

from mixsd_nb.corpora import CORPORA, check_corpus
from mixsd_nb.corpora.simpleqa import TEXTS, find_texts
from mixsd_nb.evaluate import EvaluateConfig
from mixsd_nb.models import is_model_folder
from mixsd_nb.models.adapters import source_label
from mixsd_nb.models.identity import file_label
from mixsd_nb.models.lab import lab_folder
from mixsd_nb.runs import make_config
from mixsd_nb.train import TrainConfig

TEXT = "The cat sat {} times on its mat.\n"
SIMPLEQA = dict(metadata="{{'topic': 'Art'}}", problem="Who painted no. {}?", answer="Ida")


def write_copy(folder, name, variant):
    "Write other texts as the local copy of a source."
    (folder / f"{name}.txt").write_text("".join(TEXT.format(k + variant) for k in range(12)))


@pytest.mark.parametrize("name", [name for name, source in TEXTS.items() if source.copy])
@pytest.mark.parametrize("recipe", [dict(anchor="ewc"), dict(method="memit"), dict(anchor="ewc+replay")])
def test_texts_of_a_local_copy_are_in_the_name(name, recipe, tmp_path, monkeypatch, tiny):
    given = dict(method="sft", options=dict(texts=name)) | recipe
    of = lambda **more: make_config(TrainConfig, model=tiny, **given | more).hash()
    without, plain = of(), of(anchor="", options={}, method="sft")
    monkeypatch.setenv("MIXSD_CORPORA", str(tmp_path))
    assert of() == without, "no copy, no other name"
    names = []
    for variant in (0, 100, 0):
        write_copy(tmp_path, name, variant)
        names.append(of())
    assert names[0] == names[2] != names[1] and without not in names and find_texts(name) == tmp_path / f"{name}.txt"
    assert of(anchor="", options={}, method="sft") == plain, "a run that reads no texts keeps its name"


def test_texts_of_a_named_file_count_by_content_and_those_of_the_lab_are_code(tmp_path):
    of = lambda text: make_config(TrainConfig, model="lab-s", method="sft", anchor="ewc", options=dict(texts=text)).hash()
    for name in "ab": (tmp_path / f"{name}.txt").write_text(TEXT.format(name))
    (tmp_path / "again").mkdir()
    (tmp_path / "again/a.txt").write_text(TEXT.format("a"))
    one, other, again = map(of, (str(tmp_path / "a.txt"), str(tmp_path / "b.txt"), str(tmp_path / "again/a.txt")))
    assert one == again != other
    assert not [name for name, source in TEXTS.items() if not source.copy and find_texts(name)]


def test_a_corpus_from_a_local_copy_is_named_by_its_content(tmp_path, monkeypatch):
    monkeypatch.setenv("MIXSD_CORPORA", str(tmp_path))
    names = []
    for last in ("A", "B"):
        rows = [{k: v.format(f"{n}{last}") for k, v in SIMPLEQA.items()} for n in range(4)]
        (tmp_path / "simpleqa.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        names.append(make_config(EvaluateConfig, dataset=check_corpus("simpleqa"), suite="recall", model="lab-s").hash())
    assert "simpleqa" in CORPORA and names[0] != names[1]


def test_a_folder_or_file_in_the_working_folder_takes_no_declared_name(tmp_path, monkeypatch, own_runs):
    monkeypatch.chdir(tmp_path)
    of = lambda **more: make_config(TrainConfig, **dict(model="lab-s", method="sft", anchor="replay", options=dict(prompts="own")) | more)
    before = of()
    shutil.copytree(lab_folder("lab-m"), "lab-s")
    for name in ("own", "neighbours"): Path(name).write_text("A prompt.\n")
    after = of()
    assert after.model == before.model == "lab-s" and after.hash() == before.hash()
    assert of(model="./lab-s").model == str(tmp_path / "lab-s") and of(model="./lab-s").hash() != before.hash()


@pytest.mark.parametrize("text", ["x" * 300, "Reply with the answer alone. " * 12, "a\0b", "y/" * 2000])
def test_no_text_is_too_long_to_be_no_file(text):
    assert file_label(text) == text and not is_model_folder(text)
    with pytest.raises(ValueError, match="^(model must|1 validation|.*model)"): make_config(TrainConfig, model=text)


STAGES = ("diff", "errors", "evaluate", "facts", "fisher", "forgetting", "generate", "inject", "nll", "train")
OPTIONS = dict(dataset_options=("instruction", "test", "extract", "context"), model_options=("template", "system", "date"), options=("texts", "prompts", "earlier"))


@pytest.mark.parametrize("stage", STAGES)
def test_a_text_of_5000_characters_is_no_path(stage, data):
    "Whatever takes a text or a path either takes the long text, or refuses it in words of its own."
    cls, facts = stage_of(stage), data("facts.jsonl", json.dumps(dict(question="Who rules Vel?", answer="Mira")) + "\n")
    texts = ["Reply with the answer alone. " * 180, f"/{'x' * 5000}/y.jsonl", f"a/{'x' * 5000}"]
    taken = set()
    for name in cls.model_fields:
        for text, key in itertools.product(texts, OPTIONS.get(name, ("",))):
            given = {name: {key: text} if key else text}
            if name == "dataset_options" and "dataset" in cls.model_fields: given["dataset"] = facts
            if name == "options" and "method" in cls.model_fields: given |= dict(method="sft", anchor="ewc" if key == "texts" else "replay")
            try:
                make_config(cls, **given).hash()
                taken.add(name)
            except (ValueError, TypeError) as e: assert "Errno" not in str(e)
    assert {*OPTIONS, "dataset_options"} & {*cls.model_fields} <= taken | {"model_options", "options"}  # an instruction may be long


def adapter(folder, **changes):
    "The folder of an adapter that transformers loads as a model, because it has a config.json too."
    shutil.copytree(lab_folder("lab-s"), folder, ignore=shutil.ignore_patterns("*.safetensors"))
    (folder / "adapter_model.safetensors").write_bytes(b"weights")
    (folder / "adapter_config.json").write_text(json.dumps(dict(peft_type="LORA", r=8, lora_alpha=16, target_modules=["q_proj"]) | changes))
    return str(folder)


def test_the_configuration_of_an_adapter_and_its_base_are_in_the_name(tmp_path, own_runs):
    base = shutil.copytree(lab_folder("lab-s"), tmp_path / "base")
    folder = lambda name, **changes: adapter(tmp_path / name / "mine", **dict(base_model_name_or_path=str(base)) | changes)
    first = folder("one")
    variants = [folder("two", lora_alpha=32), folder("three", base_model_name_or_path="owner/other"), folder("four", base_model_name_or_path="lab-m")]
    names = lambda path: (make_config(EvaluateConfig, model=path).hash(), source_label(path))
    before = names(first)
    assert all(len({*pair}) == 4 for pair in zip(before, *map(names, variants))) and names(folder("same")) == before
    with open(base / "generation_config.json", "a") as file: file.write(" ")  # the base changes, and the adapter's folder does not
    assert not {*names(first)} & {*before}


def test_an_adapter_whose_base_is_itself_has_a_name(tmp_path, own_runs):
    path = tmp_path / "mine"
    assert source_label(adapter(path, base_model_name_or_path=str(path))).startswith("mine-")

"What a run reads is in its name: every registry whose entries read data gives their content or a pinned revision."

import json
import shutil
from pathlib import Path

import pytest

from mixsd_nb.corpora import CORPORA, check_corpus
from mixsd_nb.corpora.simpleqa import TEXTS, find_texts
from mixsd_nb.evaluate import EvaluateConfig
from mixsd_nb.models import is_model_folder
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

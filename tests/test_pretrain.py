"""Pretraining resumes after an interruption with the same result, and keeps its budget."""

import numpy as np
import pytest

from mixsd_nb.lab import pretrain
from mixsd_nb.lab.pretraining import training_loop as training

SMALL = dict(size="lab-s", start="fresh", tokens=0.006, batch_tokens=512, pool=20, save_every=1, n=1, curve_points=2)


@pytest.fixture(scope="module", autouse=True)
def quick_abilities():
    "Replace the measurement of abilities, which these tests do not need."
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pretrain, "measure_abilities", lambda model, tokenizer, n, samples=0: {"none": 0.0})
        yield


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    "A run that was not interrupted."
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MIXSD_RUNS", str(tmp_path_factory.mktemp("whole")))
        return pretrain.run(**SMALL)


def weights(run):
    return (run.folder / "model/model.safetensors").read_bytes()


def losses(run):
    return run.result["training"].loss


def test_an_interrupted_run_ends_with_the_same_weights(whole, own_runs, monkeypatch):
    update, calls = training.update, []

    def interrupted_update(*arguments):
        calls.append(1)
        if len(calls) in (4, 9): raise KeyboardInterrupt
        return update(*arguments)

    monkeypatch.setattr(training, "update", interrupted_update)
    for _ in range(2):
        with pytest.raises(KeyboardInterrupt): pretrain.run(**SMALL)
    again = pretrain.run(**SMALL)
    assert again.folder.name == whole.folder.name and again.folder != whole.folder
    assert len(calls) > losses(whole).size, "no update was repeated, so the interruptions came too late"
    assert np.array_equal(losses(whole), losses(again))
    curves = whole.result["curves"]
    assert curves.equals(again.result["curves"]) and curves.sizes["tokens"] == 2
    assert weights(again) == weights(whole)


def test_training_starts_from_the_weights_that_ship(whole, own_runs):
    shipped, fresh = losses(pretrain.run(**{**SMALL, "start": ""})), losses(whole)
    # The record continues that of the shipped weights; its last losses are those of this training.
    assert shipped[-fresh.size:].mean() < 0.5 * fresh.mean()


def test_minutes_become_tokens_once(whole, own_runs, monkeypatch):
    "The rate is measured before the first update; a resumed training keeps its budget."
    budgets = []
    monkeypatch.setattr(pretrain, "estimate_tokens", lambda *arguments: budgets.append(1e6 * SMALL["tokens"]) or budgets[-1])
    timed = pretrain.run(**{**SMALL, "tokens": 0, "minutes": 7})
    assert len(budgets) == 1 and np.array_equal(losses(timed), losses(whole))


def test_other_weights_make_another_run(tmp_path, own_runs):
    "A folder is named by what it contains, not by its path alone."
    for content in (b"one", b"two"):
        folder = tmp_path / "model"
        folder.mkdir(exist_ok=True)
        for file in ("config.json", "tokenizer.json", "chat_template.jinja"): (folder / file).write_text("{}")
        (folder / "model.safetensors").write_bytes(content)
        config = pretrain.PretrainConfig(**{**SMALL, "start": str(folder)})
        assert config.weights and config.folder.name not in {p.name for p in tmp_path.glob("pretrain-*")}
        config.folder.mkdir(parents=True)

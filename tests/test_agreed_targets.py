"""Targets that several models and mixing rates must accept, as in the published SimpleQA data, from `generate` to `train` and to the paper's grids."""

import pytest

from mixsd_nb import generate, nll, train
from mixsd_nb.cluster.grid import read_grid
from mixsd_nb.corpora import load_corpus
from mixsd_nb.corpora.prompts import encode_completion
from mixsd_nb.methods.targets import MixSettings
from mixsd_nb.models import load_tokenizer
from mixsd_nb.runs import make_config
from mixsd_nb.sweep import Sweep

pytestmark = pytest.mark.usefixtures("own_runs")
SOME = dict(model="lab-s", max_attempts=1, max_new_tokens=80, shard="1/8")


def test_a_target_is_kept_only_where_every_set_accepts_its_own():
    "By hand from the three runs that are mixed on the way; the canonical target stands everywhere else."
    found = generate.run(lam=0.3, unanimous=dict(lam=[0.1, 0.5]), **SOME)
    alone = [generate.run(lam=lam, **SOME) for lam in (0.3, 0.1, 0.5)]
    rows = {r["id"]: r for r in load_corpus("kgfact-small", "train")}
    accepted = list(zip(*(run.targets.accepted for run in alone), strict=True))
    assert {all(a) for a in accepted} == {True, False} and {a[0] for a in accepted if not all(a)} == {True, False}
    for target, own, each in zip(found.targets.itertuples(), alone[0].targets.itertuples(), accepted, strict=True):
        canonical = encode_completion(load_tokenizer("lab-s"), rows[target.id]["target"])
        assert target.id == own.id and target.accepted
        assert list(target.completion_ids) == (list(own.completion_ids) if all(each) else canonical)
        assert (target.finish_reason == "canonical") == (not all(each))
    assert found.root.replaced == sum(not all(a) for a in accepted) and found.folder != alone[0].folder


def test_training_passes_the_options_of_its_targets(monkeypatch):
    asked = []

    def mix(config):
        asked.append(config)
        raise InterruptedError
    monkeypatch.setattr(generate.GenerateConfig, "run", mix)
    agreeing = dict(model=["lab-s", "lab-m"], lam=[0.3, 0.5])
    for options in ({}, dict(replace_gt=True), dict(unanimous=agreeing)):
        config = make_config(train.TrainConfig, dataset="simpleqa-lab", lam=0.3, options=options)
        with pytest.raises(InterruptedError): train.mixed_targets(config)
    assert [(c.replace_gt, c.unanimous) for c in asked] == [(False, {}), (True, {}), (False, agreeing)]
    with pytest.raises(ValueError, match="^options must be among none for sft, got replace_gt$"):
        make_config(train.TrainConfig, method="sft", options=dict(replace_gt=True))


@pytest.mark.parametrize("axes", [dict(seed=[1]), dict(lam=[]), dict(model=["lab-s"], n=[3])])
def test_only_models_and_rates_can_be_asked_to_agree(axes):
    with pytest.raises(ValueError) as refused: make_config(MixSettings, unanimous=axes)
    assert str(refused.value) == f"unanimous must have lists of values under model or lam, got {axes}"


PUBLISHED_MODELS = {"Qwen/Qwen3-1.7B", "Qwen/Qwen3-4B-Instruct-2507", "Qwen/Qwen3-8B"}
TRAINED = ["knowledge-eval-small", "knowledge-eval-large", "knowledge-eval-small-llama1b", "knowledge-eval-small-kl", "simpleqa-eval", "math-op-eval",
           "mquake-full"]  # app-displacement-runs continues the best of these


@pytest.mark.parametrize("name", TRAINED)
def test_the_papers_grids_train_as_published(name):
    "SFT and MixSD train the published span; MixSD on SimpleQA has the targets on which six sets agree, and no other run has."
    cells = [make_config(train.TrainConfig, **cell.parameters) for cell in Sweep(name).cells]
    assert {c.span for c in cells if c.method in ("sft", "mixsd")} <= {"paper"}
    six = dict(model=sorted(PUBLISHED_MODELS), lam=[0.3, 0.5])
    for c in cells:
        agreed = c.method == "mixsd" and c.dataset == "simpleqa"
        assert {k: sorted(v) for k, v in c.options.get("unanimous", {}).items()} == (six if agreed else {})
    assert len({(c.dataset, c.model, c.label, c.lr) for c in cells}) == len(cells), "no cell is trained in two ways"


def test_lab_grids_train_the_labs_span_on_their_own_targets():
    for name in (*TRAINED, "app-displacement-runs"):
        cells = [make_config(train.TrainConfig, **cell.parameters) for cell in Sweep(f"{name}-lab").cells]
        assert {c.span for c in cells} == {"completion"} and not any(c.options.get("unanimous") for c in cells)


def test_the_largest_rate_is_in_the_grids_of_kgfunc_and_of_the_targets():
    assert 0.7 in {cell.parameters.get("lam") for cell in Sweep("math-op-eval").cells}
    for name, count in {"high-nll-targets": 3 * 4 * 4, "high-nll-targets-lab": 2 * 4 * 4}.items():
        cells = [make_config(generate.GenerateConfig, **cell.parameters) for cell in Sweep(name).cells]
        assert len(cells) == count and len({(c.model, c.dataset, c.lam) for c in cells}) == count
        assert {(c.dataset, c.lam) for c in cells if c.unanimous} <= {("simpleqa", 0.3), ("simpleqa", 0.5)}
        assert any(c.unanimous for c in cells) == (name == "high-nll-targets")


def test_the_grids_of_the_nll_count_the_published_span():
    for name in ("high-nll", "high-nll-lab"): assert read_grid(name)[1].fixed["span"] == "body" == nll.NllConfig().span

"""The stage forgetting: against plain forward passes, over several runs, in the cube, and what it refuses."""


import numpy as np
import pandas as pd
import pytest
import torch
import xarray as xr

from mixsd_nb import forgetting
from mixsd_nb.analysis import divergence
from mixsd_nb.analysis.divergence import ReferenceConfig
from mixsd_nb.corpora import load_corpus
from mixsd_nb.forgetting import ForgettingConfig
from mixsd_nb.models import load_base
from mixsd_nb.results.cube import open_cube
from mixsd_nb.results.layout import result_tree
from mixsd_nb.runs import MARK, ParameterError, checkpoint_folder, make_config, write_json, write_result

pytestmark = pytest.mark.usefixtures("own_runs")


def plain(model, prompt, completion):
    "The NLL of a completion, by one forward pass."
    with torch.inference_mode():
        logp = model(torch.tensor([prompt + completion])).logits[0, len(prompt) - 1 : -1].log_softmax(-1)
    return -sum(logp[t, i].item() for t, i in enumerate(completion))


def trained_by_hand(tmp_path, lab_s, scales):
    "A finished training run: its first checkpoint is the base itself, the others are the base with noise of known size."
    folder, (base, tokenizer) = tmp_path / "train-by-hand", lab_s
    for step, scale in scales.items():
        model = type(base)(base.config)
        model.load_state_dict(base.state_dict())
        torch.manual_seed(step)
        with torch.no_grad():
            for p in model.parameters(): p.add_(scale * torch.randn_like(p))
        model.save_pretrained(checkpoint_folder(folder, step))
        tokenizer.save_pretrained(checkpoint_folder(folder, step))
        (checkpoint_folder(folder, step) / MARK).touch()
    write_json(folder / "run.json", dict(stage="train", config=dict(dataset="kgfact-small", model="lab-s", method="sft")))
    accuracy = {step: dict(recall=(step, 100), equations=(90 - step, 100)) for step in (0, *scales)}
    benchmarks = dict(recall=dict(column="Train", role="in-domain"), equations=dict(column="MATH-500", role="held-out"))
    write_result(result_tree(dataset="kgfact-small", model="lab-s", recipe="sft", lr=1e-3, seed=0, accuracy=accuracy, benchmarks=benchmarks, config="{}",
                             targets=dict(target_nll=3.0)), folder)
    return folder


def test_forgetting_is_the_increase_of_the_reference_loss(tmp_path, lab_s):
    "Forgetting is 0 for the base, equals plain forward passes for other models, and grows with the noise."
    folder = trained_by_hand(tmp_path, lab_s, {10: 0.0, 20: 0.02, 30: 0.1})
    text = ReferenceConfig(model="lab-s", prompts=3).text()
    assert text.groupby("benchmark").size().to_dict() == dict.fromkeys(divergence.reference_prompts("lab", 3), 3)
    result = ForgettingConfig(model="lab-s", trained=str(folder), prompts=3, facts=4).run().root.squeeze()
    assert (result.forgetting.sel(step=[0, 10]) == 0).all()
    assert result.forgetting.mean("benchmark").sel(step=30) > result.forgetting.mean("benchmark").sel(step=20) > 0
    tuned = load_base(str(folder / "checkpoint-20"))[0]

    def increases(part):
        pairs = [(p.tolist(), c.tolist()) for p, c in zip(part.prompt_ids, part.completion_ids)]
        return pairs, [plain(tuned, *pair) - plain(lab_s[0], *pair) for pair in pairs]
    pairs, more = increases(text[text.benchmark == "equations"])
    at = result.sel(step=20, benchmark="equations")
    assert at.forgetting == pytest.approx(np.mean(more), abs=1e-3) and at.forgetting_se == pytest.approx(np.std(more, ddof=1) / 3**0.5, abs=1e-3)
    assert at.forgetting_token == pytest.approx(sum(more) / sum(len(c) for _, c in pairs), abs=1e-4)
    new = ReferenceConfig(model="lab-s", prompts=3, facts=4, dataset="kgfact-small").text()
    questions = [lab_s[1].decode(ids, skip_special_tokens=True) for ids in new.prompt_ids]
    assert all(row["prompt"] in q for row, q in zip(list(load_corpus("kgfact-small", "train"))[:4], questions, strict=True))
    pairs, more = increases(new)
    assert result.new_kl.sel(step=20) == pytest.approx(sum(more) / sum(len(c) for _, c in pairs), abs=1e-4)
    assert result.new_kl.sel(step=10) == pytest.approx(0, abs=1e-6) and "recall" not in result.benchmark
    table = forgetting.forgetting_table(forgetting.measure_runs(ForgettingConfig(model="lab-s", prompts=3, facts=4)))
    assert table.new_kl.tolist() == result.new_kl.values[1:].tolist()
    assert table.equals(forgetting.forgetting_table(forgetting.measure_runs(ForgettingConfig(model="lab-s", trained=str(folder), prompts=3, facts=4))))
    assert table.step.tolist() == [10, 20, 30] and table["drop"].tolist() == pytest.approx([10, 20, 30]) and (table.n_ref == 3).all()
    assert forgetting.last_step_table(table)["Drop (points)"].tolist() == pytest.approx([30])


def test_forgetting_joins_the_training_cube(tmp_path, lab_s):
    folder = trained_by_hand(tmp_path, lab_s, {10: 0.01})
    found = ForgettingConfig(model="lab-s", trained=str(folder), prompts=1, facts=1).run().root
    both = xr.merge([open_cube(), found], join="outer", compat="no_conflicts", combine_attrs="drop_conflicts")
    trained = both.sel(recipe=found["recipe"].values, lr=found.lr.values, step=10, benchmark="equations")
    assert trained.forgetting.notnull().all() and (trained.accuracy == 0.8).all()


def test_the_bases_own_text_is_sampled_once(monkeypatch):
    first = ReferenceConfig(model="lab-s", prompts=1).text()
    monkeypatch.setattr(divergence, "load_engine", None)
    pd.testing.assert_frame_equal(ReferenceConfig(model="lab-s", prompts=1).text(), first)


def test_what_is_refused(tmp_path, lab_s):
    folder = trained_by_hand(tmp_path, lab_s, {10: 0.01})
    with pytest.raises(ValueError, match=r"^trained must be the folder of a finished training run, got .*none$"):
        make_config(ForgettingConfig, trained=str(tmp_path / "none"))
    for parameters, words in [(dict(trained=str(folder), model="lab-m"), "model must be lab-s.*got lab-m"), ({}, "trained must"),
                              (dict(trained=str(folder), model="lab-s", dataset="kgfunc-lab"), "dataset must be kgfact-small.*got kgfunc-lab")]:
        with pytest.raises(ParameterError, match=f"^{words}"): forgetting.run(**parameters)


def test_a_run_without_weights_is_named(tmp_path, lab_s, capsys):
    folder = trained_by_hand(tmp_path, lab_s, {10: 0.01})
    (folder / "checkpoint-10" / MARK).unlink()
    assert forgetting.measure_runs(ForgettingConfig(model="lab-s")) == {}
    with pytest.raises(ValueError, match="trained must be a training run of kgfact-small and lab-s, and none with weights is finished"):
        ForgettingConfig(model="lab-s").present()
    assert capsys.readouterr().out == 2 * "left out, because their weights are not there: train-by-hand\n"

"The stage fisher on a small random model: training runs in folders, bad input."

import json

import numpy as np
import pytest
import torch
import xarray as xr
from helpers import small_model
from safetensors.torch import load_file

from mixsd_nb import fisher
from mixsd_nb.analysis import curvature
from mixsd_nb.benchmarks.lab_tasks import SUITES
from mixsd_nb.models import gradients, load_base
from mixsd_nb.results.cube import RUN_DIMS
from mixsd_nb.results.layout import result_tree
from mixsd_nb.runs import MARK, checkpoint_folder, write_json, write_result

pytestmark = pytest.mark.usefixtures("own_runs")
HELD_OUT = [name for name, suite in SUITES.items() if suite.role == "held-out"]


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    "The folder of a small random model with tied embeddings."
    return small_model(tmp_path_factory.mktemp("model"), "lab-s", layers=2, heads=2, head_dim=16, feed_forward=64, context=1024)


def estimated(**parameters):
    "The file of the base's Fisher."
    return fisher.fisher_file(fisher.FisherConfig(**parameters))


def trained(root, model, recipe="sft", lr=1e-3, lost=0, steps=(5, 9)):
    "A run as `train` writes it: weights that moved by lr at each step along their sign, and held-out accuracies that fell."
    folder, (base, tokenizer) = root / f"train-{recipe}-{lr:g}", load_base(model)
    accuracy = {s: {"recall": (s, 10), **{b: (90 - lost * s - k, 100) for k, b in enumerate(HELD_OUT)}} for s in (0, *steps)}
    benchmarks = dict.fromkeys(["recall"], dict(column="Train", role="in-domain")) | dict.fromkeys(HELD_OUT, dict(column="", role="held-out"))
    for step in steps:
        checkpoint = checkpoint_folder(folder, step)
        with torch.no_grad():
            [p.add_(lr * p.sign()) for p in base.parameters()]
        base.save_pretrained(checkpoint)
        tokenizer.save_pretrained(checkpoint)
        (checkpoint / MARK).touch()
    write_json(folder / "run.json", dict(stage="train", config=dict(dataset="kgfact-small", model=model, method=recipe.partition("-")[0])))
    write_result(result_tree(dataset="kgfact-small", model=model, recipe=recipe, lr=lr, accuracy=accuracy, benchmarks=benchmarks, config="{}"), folder)
    return folder


def test_every_checkpoint_of_a_run(model, tmp_path):
    folder = trained(tmp_path, model, lr=0.01, lost=2)
    tree = fisher.run(model=model, trained=folder.name, limit=3).result
    base, weights = load_base(model)[0], load_file(estimated(model=model, limit=3))
    for step in (5, 9):
        tuned, cell = dict(load_base(str(checkpoint_folder(folder, step)))[0].named_parameters()), tree.sel(step=step)
        moved = {name: (tuned[name].double() - p.double()).detach() ** 2 for name, p in base.named_parameters()}
        length, weighted = sum(m.sum().item() for m in moved.values()), sum((m * weights[name]).sum().item() for name, m in moved.items())
        trace, d = sum(w.sum(dtype=torch.float64).item() for w in weights.values()), sum(w.numel() for w in weights.values())
        found = [cell.displacement_sq.item(), cell.fisher_weighted.item(), cell.alignment_ratio.item()]
        np.testing.assert_allclose(found, [length, weighted, weighted / length / (trace / d)], rtol=1e-9)
    assert tree.displacement_sq.dims == (*RUN_DIMS, "step") and tree.step.values.tolist() == [5, 9] and tree["recipe"].item() == "sft"
    for part, names in (("layer", {"embed_tokens", "0", "1", "norm"}), ("kind", {"embed_tokens", "q_proj", "k_norm"})):
        parts = tree[f"per_{part}"].to_dataset()
        assert names <= set(parts[part].values)
        for name in ("displacement_sq", "fisher_weighted"):
            np.testing.assert_allclose(parts[name].sum(part), tree[name], rtol=1e-12)
    table = fisher.checkpoint_points({folder.name: tree})
    np.testing.assert_allclose(table["drop"], [10, 18])


def test_all_runs_stand_beside_each_other(model, tmp_path):
    for recipe, lr, lost in (("sft", 1e-3, 1), ("sft", 1e-2, 3), ("mixsd-0.5", 1e-3, 0), ("mixsd-0.5", 1e-2, 1)):
        trained(tmp_path, model, recipe, lr, lost)
    gone = checkpoint_folder(trained(tmp_path, model, "mixsd-0.3"), 9) / MARK
    gone.unlink()
    config = fisher.FisherConfig(model=model, limit=2)
    results, passed_over = fisher.measure_all_runs(config)
    assert passed_over == ["train-mixsd-0.3-0.001"] and len(results) == 4
    shown = config.present()
    assert [line.partition("fisher-")[0].startswith("result: ") for line in shown] == [False] + 5 * [True] and "mixsd-0.5" in shown[0]
    merged = xr.merge([tree.to_dataset() for tree in results.values()], join="outer", compat="no_conflicts", combine_attrs="drop_conflicts")
    assert merged.alignment_ratio.notnull().all() and dict(merged.alignment_ratio.sizes) == dict(dataset=1, model=1, recipe=2, lr=2, seed=1, step=2)
    table = fisher.checkpoint_points(results)
    assert len(table) == 8
    rows = fisher.last_step_table(table)
    assert rows.loc[("kgfact-small", "sft", 1e-2), "Drop (points)"] == 27


def test_measured_checkpoints_are_kept(model, tmp_path, monkeypatch):
    folder, measure, calls = trained(tmp_path, model), fisher.tensor_sums, []

    def dies_at_the_second(*sources):
        calls.append(sources[1])
        if len(calls) == 2:
            raise KeyboardInterrupt
        return measure(*sources)
    estimated(model=model, limit=2)
    monkeypatch.setattr(fisher, "tensor_sums", dies_at_the_second)
    with pytest.raises(KeyboardInterrupt):
        fisher.run(model=model, trained=folder.name, limit=2)
    result = fisher.run(model=model, trained=folder.name, limit=2).result
    assert [path.name for path in calls] == ["checkpoint-5", "checkpoint-9", "checkpoint-9"]
    monkeypatch.setattr(fisher, "tensor_sums", measure)
    assert result.identical(fisher.run(model=model, trained=str(folder), limit=2, force=True).result)


def test_bad_input_is_one_sentence_before_a_model_is_loaded(model, tmp_path, monkeypatch):
    monkeypatch.setenv("MIXSD_BENCHMARKS", str(tmp_path))
    def never(*_):
        raise AssertionError("a model was loaded")
    runs = {name: trained(tmp_path, model, lr=lr) for name, lr in (("whole", 1e-3), ("broken", 2e-3))}
    (checkpoint_folder(runs["broken"], 5) / MARK).unlink()
    recall = dict(accuracy={0: {"recall": (0, 10)}}, benchmarks={"recall": dict(column="", role="in-domain")})
    (tmp_path / "train-base").mkdir()
    write_result(result_tree(dataset="kgfact-small", model=model, recipe="base", config="{}", **recall), tmp_path / "train-base")
    monkeypatch.setattr(curvature, "load_base", never)
    for parameters, name, value in [(dict(trained="train-nowhere"), "trained", "train-nowhere"), (dict(trained="train-base", model=model), "trained", "train-base"),
                                    (dict(trained=runs["whole"].name), "model", "lab-m"), (dict(trained=runs["broken"].name, model=model), "trained", "without step 5"),
                                    (dict(reference="mine"), "reference", "mine")]:
        with pytest.raises(ValueError, match=f"^{name} must .*{value}"): fisher.run(**parameters)
    with pytest.raises(ValueError, match="aime-2024.jsonl is missing"): fisher.run(reference="paper")
    assert not list(tmp_path.glob("fisher-*/result.nc"))


def test_the_papers_tasks_from_files(tmp_path, model, monkeypatch):
    options = dict(question="Which?", choices=list("wxyz"), answer=1)
    solved = lambda n: [dict(problem=f"{k} + 1?", solution=f"It is \\boxed{{{k + 1}}}.", answer=str(k + 1)) for k in range(n)]
    rows = {"aime-2024": solved(30), "math-500": solved(300), "gsm8k": [dict(question=f"{k}?", answer=f"So.\n#### {k}") for k in range(260)],
            "humaneval": [dict(prompt=f"def f{k}():\n    ", canonical_solution="return 1\n", test="pass", entry_point=f"f{k}") for k in range(164)],
            "mmlu": [dict(options, subject=f"s{k % 57}", question=f"Which {k}?") for k in range(570)], "mmlu-dev": [dict(options, subject="s1")]}
    for name, task in rows.items():
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in task))
    items = curvature.reference_items("paper", data=str(tmp_path))
    assert {name: len(group) for name, group in items.items()} == {"aime-2024": 30, "math-500": 250, "gsm8k": 250, "humaneval": 164, "mmlu": 285}
    assert [i.prompt for i in items["math-500"]] == [i.prompt for i in curvature.reference_items("paper", data=str(tmp_path))["math-500"]]
    assert items["math-500"] != curvature.reference_items("paper", seed=1, data=str(tmp_path))["math-500"]
    monkeypatch.setenv("MIXSD_BENCHMARKS", str(tmp_path))
    tree = fisher.run(model=model, reference="paper", limit=3).result
    assert tree["reference"].examples.values.tolist() == [3] * 5 and tree.examples.item() == 15


def test_the_fisher_is_the_mean_of_squared_gradients(model, monkeypatch):
    "By autograd, of tied embeddings and of two; however the vocabulary is cut, also where an example is longer than one portion of logits."
    pairs = [([5, 6, 5], [7, 8, 6]), (list(range(3, 20)), list(range(30, 430)))]
    for tied in (True, False):
        base = load_base(model)[0]
        if not tied: base.config.tie_word_embeddings, base.lm_head.weight = False, torch.nn.Parameter(base.lm_head.weight.detach().clone() * 1.1)
        expected = {name: torch.zeros_like(p) for name, p in base.named_parameters()}
        for prompt, completion in pairs:
            base.zero_grad()
            logits = base(torch.tensor([prompt + completion])).logits[0, len(prompt) - 1:-1]
            torch.nn.functional.cross_entropy(logits, torch.tensor(completion), reduction="sum").backward()
            for name, p in base.named_parameters(): expected[name] += p.grad.square() / len(pairs)
        for size in (gradients.SLICE, 100):
            monkeypatch.setattr(gradients, "SLICE", size)
            for name, found in fisher.diagonal_fisher(base, pairs).items(): assert (found - expected[name]).norm() <= 1e-4 * expected[name].norm(), (name, tied)

"""Ten complaints of the users of neighbouring projects, as contracts of every part of a recipe that is trained at a learning rate, a plugin's included."""

import itertools
import json
import math
import re
import shutil
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from types import SimpleNamespace
from unittest.mock import patch

import numpy as np
import pandas as pd
import pytest
import torch
from safetensors.torch import load_file

from helpers import every_state

from mixsd_nb import train
from mixsd_nb.analysis.scores import compare, item_shares
from mixsd_nb.analysis.scores import sign_test
from mixsd_nb.corpora import load_corpus
from mixsd_nb.corpora.prompts import encode_canonical
from mixsd_nb.methods import ANCHORS, GATES, METHODS, compose, parse_label, runnable_methods
from mixsd_nb.methods.fitting import MethodRun
from mixsd_nb.training.trainer import FineTuner, build_objective, fine_tune, read_curves
from mixsd_nb.models import load_base, load_tokenizer
from mixsd_nb.runs.schema import DIMS, VARIABLE_ATTRS
from mixsd_nb.runs import ParameterError

TRAINED = [name for name in runnable_methods() if METHODS[name].rate_setting == "lr"]
RECIPES = {compose(**parts).name: parts for parts in [
    *(dict(method=name) for name in TRAINED), *(dict(method="sft", anchor=name) for name in ANCHORS), *(dict(method="sft", gate=name) for name in GATES),
    dict(method="sft", lora=2), dict(method="mixsd", options=dict(draw="shuffled"))]}
SAMPLES_FIRST = [name for name, parts in RECIPES.items() if any(a.demand.pregenerated for a in compose(**parts).anchors)]  # samples of the base model


def fitting(*kinds):
    "The compositions of parts of these kinds that fit together, as parameters of a training."
    found = {}
    for method, anchor, gate in itertools.product(TRAINED, *kinds):
        try: found[compose(method, anchor, gate).name] = dict(method=method, anchor=anchor, gate=gate)
        except ValueError: pass
    return found


PAIRS = {name: parts for name, parts in {**fitting(ANCHORS, [""]), **fitting([""], GATES)}.items() if name not in RECIPES}
CELL = dict(dataset="mquake-lab", suite="recall", n=4, max_new_tokens=4, epochs=3, batch=50, checkpoints=(2,), rollouts=1)
QUICK = dict(texts="lab", text_count=4, count=8)  # options without which a recipe takes long, or needs the hub
every_method = pytest.mark.parametrize("method", RECIPES)


def parameters(name, tiny):
    parts = (RECIPES | PAIRS)[name]
    recipe, options = compose(**parts), parts.get("options", {})
    if recipe.adapters: pytest.importorskip("peft")
    few = {key: value for key, value in QUICK.items() if key in recipe.defaults()}
    return CELL | parts | dict(model=tiny, options=few | options, rollout_tokens=32 if name in SAMPLES_FIRST else 4)


@contextmanager
def canonical_as_written(rows, tokenizer):
    "The targets that a method lets the model write are the canonical ones: a model with random weights writes none that is accepted."
    completions = [encode_canonical(tokenizer, r, "completion")[1] for r in rows]
    table = pd.DataFrame(dict(id=[r["id"] for r in rows], completion_ids=completions, accepted=True,
                              naive_mask=[[k % 2 for k in range(len(ids))] for ids in completions]))
    mix = lambda engine, items, *rest, **options: table[table.id.isin([item["id"] for item in items])].to_dict("records")
    with patch("mixsd_nb.train.mixed_targets", lambda config: table), patch("mixsd_nb.methods.supervised.mix", mix): yield


@pytest.fixture(scope="module", autouse=True)
def canonical(tiny):
    with canonical_as_written(list(load_corpus(CELL["dataset"], "train")), load_tokenizer(tiny)): yield


def most_tokens(config, tokenizer): return [i for i in range(len(tokenizer)) if i % 7]


@pytest.fixture(scope="module")
def new_folder(tiny, tmp_path_factory):
    "A function that makes a folder of runs, which holds the evaluation of the base model."
    with patch.dict("os.environ", MIXSD_RUNS=str(tmp_path_factory.mktemp("base"))):
        base = train.base_evaluation(train.TrainConfig(**parameters("sft", tiny))).run().folder

    def make():
        folder = tmp_path_factory.mktemp("runs")
        shutil.copytree(base, folder / base.name)
        return folder
    return make


@pytest.fixture(scope="module")
def trained(tiny, new_folder):
    "A function that trains a method for three updates, once: its folder of runs, the run, and the specs that were trained."
    done, original = {}, MethodRun.train

    def run(method):
        if method in done: return done[method]
        folder, specs, folders = new_folder(), [], []

        def record(self, *arguments, **keywords):
            loop = self.loop
            self.loop = lambda spec, *rest: (specs.append(spec), folders.append(self.folder), loop(spec, *rest))[-1]
            return original(self, *arguments, **keywords)
        stops = patch("mixsd_nb.models.engines.stop_ids", most_tokens) if method in SAMPLES_FIRST else nullcontext()
        with patch.object(MethodRun, "train", record), patch.dict("os.environ", MIXSD_RUNS=str(folder)), stops, every_state():
            done[method] = SimpleNamespace(root=folder, run=train.run(**parameters(method, tiny)), specs=specs, folders=folders)
        return done[method]
    return run


@pytest.fixture(scope="module")
def learned(trained):
    "A function that gives, for each spec of a method, its objective and the examples of one step. Six of seven tokens end a rollout."
    done = {}

    def examples(spec):
        if (key := json.dumps([spec.objective, spec.data, spec.modifiers])) not in done:
            longer = replace(spec, data=spec.data | (dict(max_new_tokens=32) if "max_new_tokens" in spec.data else {}))
            objective = build_objective(longer, load_tokenizer(spec.model))
            with patch("mixsd_nb.models.engines.stop_ids", most_tokens):
                done[key] = objective, objective.examples([0, 1, 2], load_base(spec.model)[0], 0)
        return done[key]
    return lambda method: [(spec, *examples(spec)) for spec in trained(method).specs]


def own_loss(objective, example):
    "The loss of an example alone and its targets: in a batch of facts and replayed samples, those of its kind."
    if not getattr(objective, "joins", False): return objective.loss, example.targets
    *both, replayed = example.targets
    width = 2 if objective.distributions else 1
    return (objective.of_samples, both[-width:]) if replayed.all() else (objective.objective.loss, both[:-width])


def is_distribution(targets):
    "Whether the targets are distributions and no tokens."
    return targets[0].ndim == 2


@every_method
def test_the_stop_token_is_in_the_loss(method, learned, tiny):
    vocabulary, end = len(load_tokenizer(tiny)), load_tokenizer(tiny).eos_token_id
    for spec, objective, examples in learned(method):
        stops = most_tokens(None, range(vocabulary)) if method in SAMPLES_FIRST or "max_new_tokens" in spec.data else [end]
        assert examples and all(e.completion[-1] in stops for e in examples)
        for e in examples:
            assert all(len(target) == len(e.completion) for target in e.targets)
            logits = torch.zeros(len(e.completion), vocabulary, requires_grad=True)
            objective.loss(logits, *e.targets).backward()
            assert logits.grad[-1].abs().max() > 0, "the loss depends on the prediction of the last token"


@every_method
def test_how_a_batch_is_split_changes_nothing(method, trained, tmp_path):
    "Many microbatches against the run, whose examples are in one padded microbatch where they fit."
    for spec, whole in zip(trained(method).specs, trained(method).folders):
        split = fine_tune(replace(spec, checkpoints=[], micro_tokens=300), tmp_path)
        for name, values in read_curves(whole).items(): np.testing.assert_allclose(split[name], values, rtol=1e-4, atol=1e-7)
        one, two = (torch.cat([w.flatten() for w in load_file(next((folder / "checkpoint-3").glob("*model.safetensors"))).values()]) for folder in (whole, tmp_path))
        assert (one - two).norm() < 1e-4 * one.norm()


@every_method
def test_a_truncated_divergence_is_renormalised_and_a_loss_never_negative(method, learned, tiny):
    vocabulary = len(load_tokenizer(tiny))
    for _, objective, examples in learned(method):
        for k, e in enumerate(examples):
            logits = 8 * torch.randn(len(e.completion), vocabulary, generator=torch.Generator().manual_seed(k))
            assert objective.loss(logits, *e.targets) > 0, "neither negative nor clamped"
            loss, targets = own_loss(objective, e)
            torch.testing.assert_close(loss(logits, *targets), objective.loss(logits, *e.targets))
            if not is_distribution(targets): continue
            if targets[2:] and targets[2].dtype == torch.bool: logits, targets = logits[~targets[2]], [t[~targets[2]] for t in targets]  # else the NLL counts
            ids, log_q = targets[:2]
            assert ids.shape[1] > 1 and log_q.logsumexp(-1).abs().max() < 1e-5
            outside = torch.ones_like(logits).scatter(1, ids, 0)
            torch.testing.assert_close(loss(logits + 9 * outside, *targets), loss(logits, *targets))


@every_method
def test_the_direction_is_that_of_hand_numbers(method, learned):
    "Student (1/2, 1/2) and teacher (9/10, 1/10): KL(teacher‖student) = 0.3681, KL(student‖teacher) = 0.5108; an NLL is ln 2."
    by_hand = {"forward": 0.9 * math.log(1.8) + 0.1 * math.log(0.2), "reverse": 0.5 * math.log(5 / 9) + 0.5 * math.log(5)}
    for spec, objective, examples in learned(method):
        kinds = [own_loss(objective, e) for e in examples]
        loss, first = next((kind for kind in kinds if is_distribution(kind[1])), kinds[0])
        if is_distribution(first):
            targets = (torch.tensor([[0, 1]]), torch.tensor([[0.9, 0.1]]).log(), *first[2:])
            expected = by_hand[spec.data.get("direction", "forward")]
        else: targets, expected = (torch.tensor([0]), *first[1:]), None
        found = loss(torch.zeros(1, 2), *(t[:1] for t in targets)).item()
        if expected: assert math.isclose(found, expected, rel_tol=1e-5)
        else: assert 0 < found <= math.log(2) + 1e-6, "the NLL, of which a gate takes a share"


@every_method
def test_no_prompt_is_truncated(method, tiny, new_folder, monkeypatch):
    "A fact that is too long for the model is an error of one sentence that names it, before training."
    rows = [dict(id=f"fact-{k}", prompt="Q?", target=f"The answer is {'so ' * 2100 * (k == 2)}7.", answer="7", subject="Q", statement="") for k in range(4)]
    monkeypatch.setenv("MIXSD_RUNS", str(new_folder()))
    monkeypatch.setattr(MethodRun, "rows", rows)
    monkeypatch.setattr("mixsd_nb.training.trainer.train_process", pytest.fail)
    too_long = r"^fact fact-2 must have at most 2048 tokens, the context of the model, got \d+; "
    with canonical_as_written(rows, load_tokenizer(tiny)), pytest.raises(ValueError, match=too_long):
        train.run(**parameters(method, tiny))


def test_models_are_compared_by_a_paired_test(trained):
    "The test is the sign test of the differences item by item; other items are an error."
    run = trained("sft").run
    first, second = run.responses(2), run.responses(3)
    row = compare(first, second.sample(frac=1, random_state=0)).loc["recall"]
    a, b = item_shares(first[first.benchmark == "recall"]).align(item_shares(second[second.benchmark == "recall"]))
    assert row.p == pytest.approx(sign_test((b - a).values)) and row.n == len(a)
    with pytest.raises(ValueError, match="items of recall"): compare(first, second[second.item != second.item.iloc[0]])


def test_an_unknown_parameter_is_an_error(tiny, own_runs):
    for parts in RECIPES.values():
        given = parts | dict(model=tiny)
        with pytest.raises(ParameterError, match="lrr; did you mean lr"): train.run(**given, lrr=1e-3)
        with pytest.raises(ParameterError, match="options .*got unheard-of"): train.run(**given | dict(options={"unheard-of": 1} | parts.get("options", {})))
    assert not list(own_runs.iterdir())


@every_method
def test_a_metric_says_what_it_counts(method, trained):
    "Every variable has its own long name and unit, every accuracy its N, its kind of benchmark and its samples."
    root = trained(method).run.root
    for name, v in root.variables.items(): assert (v.attrs["long_name"], v.attrs["units"]) == VARIABLE_ATTRS[name]
    assert root.accuracy.dims == root.n.dims == DIMS and ((root.n > 0) == root.accuracy.notnull()).all() and "share of correct responses" in root.accuracy.long_name
    assert {"role", "samples", "column"} <= set(root.benchmark.coords) and parse_label(root.recipe.item())[0].name == method


@every_method
def test_a_resumed_run_ends_with_the_same_bytes(method, trained, tiny, tmp_path, monkeypatch):
    "The folder is as a kill after the first checkpoint leaves it: the later one, its responses and the result do not exist."
    done = trained(method)
    shutil.copytree(done.root, tmp_path / "runs")
    folders = [path.parent for path in (tmp_path / "runs").glob("train-*/checkpoint-2")]  # a method may read the run of another one
    for folder in folders:
        shutil.rmtree(folder / "checkpoint-3")
        for name in ("responses-3.parquet", "result.nc"): (folder / name).unlink()
    monkeypatch.setenv("MIXSD_RUNS", str(tmp_path / "runs"))
    steps, original = [], FineTuner.training_step
    count = lambda trainer, *rest, **options: (steps.append(trainer.state.global_step), original(trainer, *rest, **options))[1]
    with patch.object(FineTuner, "training_step", count): run = train.run(**parameters(method, tiny))
    assert steps == [2] * len(done.specs), "no update is made twice"
    for name in (f"checkpoint-3/{'adapter_' * ('lora' in method)}model.safetensors", "responses-3.parquet", "result.nc"):
        assert (run.folder / name).read_bytes() == (done.run.folder / name).read_bytes(), name


def adapts(parts): return "lora" not in parts and refusal_of(**parts, lora=2) is None and not compose(**parts, lora=2).source()


def refusal_of(**parts):
    try: compose(**parts)
    except ValueError as e: return str(e)


def test_adapters_go_with_every_composition_or_are_refused_by_one_sentence():
    "Refused are methods without updates, and anchors that need the weights themselves to change."
    for method, anchor, gate in itertools.product(runnable_methods(), ["", *ANCHORS], ["", *GATES]):
        whole, adapted = refusal_of(method=method, anchor=anchor, gate=gate), refusal_of(method=method, anchor=anchor, gate=gate, lora=8)
        refused = method not in TRAINED or anchor in ("l2sp", "ewc", "untied")
        assert bool(adapted) == (bool(whole) or refused) and "\n" not in (adapted or ""), (method, anchor, gate)
        if not whole and adapted: assert re.search(r"\blora\b", adapted)


QUICK_ADAPTERS = ("mixsd", ""), ("sdft", ""), ("mixsd-kl", "nf4"), ("sft+replay-kl", "nf4"), ("sft+stm", "")


@pytest.mark.parametrize(("name", "quantise"), [case if case in QUICK_ADAPTERS else pytest.param(*case, marks=pytest.mark.slow) for case in itertools.product(
    [name for name, parts in {**RECIPES, **PAIRS}.items() if adapts(parts)], ["", "nf4"])])
def test_adapters_train_with_every_recipe_that_fits(name, quantise, tiny, tmp_path):
    "One update, without a second copy of the base; the checkpoint holds adapters alone, and the merged model has moved."
    pytest.importorskip("bitsandbytes" if quantise else "peft")
    config = train.TrainConfig(**parameters(name, tiny) | dict(lora=2, quantise=quantise))
    one_update = lambda spec, folder, report: fine_tune(replace(spec, steps=1, checkpoints=[]), folder)
    run = MethodRun(tmp_path, config, mixed_targets=lambda: train.mixed_targets(config), loop=one_update)
    second = patch("mixsd_nb.methods.distill.load_base", side_effect=AssertionError("a second copy of the base"))
    with patch("mixsd_nb.models.engines.stop_ids", most_tokens), second: config.recipe.load_fit()(run)
    assert not (tmp_path / "checkpoint-1/model.safetensors").exists()
    one, two = (load_base(str(source))[0].state_dict() for source in (tiny, tmp_path / "checkpoint-1"))
    changed = {key for key in one if not torch.equal(one[key], two[key])}
    assert changed and all(torch.isfinite(two[key]).all() and "_proj" in key for key in changed)


def is_quick(parts):
    "Every part with MixSD, and parts that act on the teacher with OPSD; the others are slow tests."
    return parts["method"] == "mixsd" or parts["method"] == "opsd" and parts["anchor"] in ("replay-kl", "untied")


@pytest.mark.parametrize("name", [name if is_quick(parts) else pytest.param(name, marks=pytest.mark.slow) for name, parts in PAIRS.items()])
def test_every_fitting_pair_trains(name, tiny, new_folder, monkeypatch):
    "One update of each method with each anchor and each gate: the label names the parts, and the weights have moved."
    monkeypatch.setenv("MIXSD_RUNS", str(new_folder()))
    with patch("mixsd_nb.models.engines.stop_ids", most_tokens):
        run = train.run(**parameters(name, tiny) | dict(epochs=1, checkpoints=(), rollout_tokens=4))
    assert parse_label(run.root.recipe.item())[0].name == name and run.root.step.values.tolist() == [0, 1]
    one, two = (load_base(str(source))[0].get_input_embeddings().weight for source in (tiny, run.checkpoints[1]))
    assert torch.isfinite(two).all() and ("lora" in name or not torch.equal(one, two))

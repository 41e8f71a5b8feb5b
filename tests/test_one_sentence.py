"Bad input gets one sentence that names the parameter, what was given and what is allowed, before any model is loaded; … stands for any text."

import re
from math import inf, nan

import pytest
from helpers import error_sentence, stage_of

from mixsd_nb import errors, inject, train
from mixsd_nb.analysis import taxonomy
from mixsd_nb.benchmarks.answers import extract, same_math
from mixsd_nb.benchmarks.tasks import load_task
from mixsd_nb.corpora import CORPORA, kgfact, kgfunc, mquake, simpleqa
from mixsd_nb.corpora.files import EXAMPLE
from mixsd_nb.corpora.prompts import encode_example
from mixsd_nb.methods.mixing import mix
from mixsd_nb.methods.targets import MixSettings
from mixsd_nb.models import load_engine, load_tokenizer
from mixsd_nb.runs import make_config

LABEL = "label must be B to H (trained) or a to t (unseen), got "
NUMBER = "number must be a whole number between 0 and 99999, got "
CALLS = {
    "kgfact": (kgfact.build, [
        (dict(domains=1), "domains must be between 2 and 7, got 1"), (dict(domains=8), "domains must be between 2 and 7, got 8"),
        (dict(entities=0), "entities must be between 1 and 25, got 0"), (dict(entities=26), "entities must be between 1 and 25, got 26")]),
    "operations": (lambda label="B", number=1: kgfunc.apply_operation(label, number), [
        (dict(label="A"), LABEL + "A"), (dict(label="u"), LABEL + "u"), (dict(number=-1), NUMBER + "-1"), (dict(number=100_000), NUMBER + "100000"),
        (dict(number=1.5), NUMBER + "1.5"), (dict(number="12"), NUMBER + "'12'")]),
    "kgfunc": (kgfunc.build, [(dict(scale="large"), "scale must be one of paper, lab, got large")]),
    "kgfunc's validation": (lambda **options: kgfunc.validation_rows({}, options), [(dict(scale="large"), "scale must be one of paper, lab, got large")]),
    "mquake-lab": (mquake.build_lab, [
        (dict(limit=1), "limit must be at least 2, got 1"), (dict(edits=0), "edits must be between 1 and 300, got 0"),
        (dict(edits=301), "edits must be between 1 and 300, got 301")]),
    "simpleqa": (simpleqa.build, [(dict(path="none.csv"), "path must be an existing file, got none.csv")]),
    "tasks": (load_task, [(dict(name="gsm"), "task must be one of aime-2024, math-500, gsm8k, humaneval, mmlu, arc-easy, …, got gsm…")]),
    "answers": (extract, [(dict(text="7", mode="number"), "mode must be one of boxed, boxed_or_number, line, json, contains, got number")]),
    "same_math": (same_math, [(dict(pairs=[], timeout=0), "timeout must be a positive number of seconds, got 0")]),
    "spans": (lambda span: encode_example(load_tokenizer("lab-s"), "Why?", [2], span), [(dict(span="all"), "span must be one of completion, body, paper, got all")]),
    "mix": (lambda items, lam: mix(load_engine("hf", "lab-s"), items, lam), [
        (dict(items=[], lam=1.5), "lam must be between 0 and 1, got 1.5"), (dict(items=2 * [dict(id="a")], lam=0.5), "ids of items must be different…")]),
    "classify": (lambda **more: errors.classify("\\boxed{7}", "", **dict(benchmark="gsm8k", entities=[]) | more), [
        (dict(entities=None), "entities must be a list, …, got …"), (dict(entities="Dalkum Village"), "entities must be a list, …, got …"),
        (dict(benchmark="gsm9k"), "benchmark must be one of …gsm8k…, got gsm9k…")]),
    "classify_recall": (lambda entities: taxonomy.classify_recall("\\boxed{7}", "x", entities=entities), [
        (dict(entities=None), "entities must be a list…"), (dict(entities="Dalkum Village"), "entities must be a list…")]),
    "mixing": (lambda **more: make_config(MixSettings, **more), [
        (dict(unanimous=axes), f"unanimous must have lists of values under model or lam, got {axes}")
        for axes in (dict(seed=[1]), dict(lam=[]), dict(model=["lab-s"], n=[3]))]),
    "inject": (inject.run, [(dict(dataset=str(EXAMPLE), keep="last"), "keep must be all or chosen, because …, got last")]),
    "errors": (errors.run, [
        ({}, "…has no responses of dataset kgfact-small and model lab-m…"), (dict(runs="nowhere"), "runs must be …, got nowhere")]),
}
MODELS = "lab-s, lab-m, a model folder or a hub id"
STEPS = "checkpoints must be a list of whole numbers, each at least 1 or none, got "
CONFIGURATIONS = [  # stage, parameters, sentence
    ("evaluate", dict(suite="papr"), "suite must name benchmarks, got papr; did you mean paper?"),
    ("evaluate", dict(suite=""), "suite must be, with commas between them, among lab, paper, in-domain, retrieval-same-relation, in-context, prefilled, real, real-opened, …general…"),
    ("evaluate", dict(baseline="no-such"), "baseline must be lab-s…"), ("evaluate", dict(baseline="a/.."), f"baseline must be {MODELS}…"),
    ("evaluate", dict(limits=3), "unknown parameter limits; did you mean limit?"),
    ("generate", dict(temperature=5e-4), "temperature must be 0, or at least 0.001, got 0.0005"),
    ("generate", dict(wordings=21), "wordings must be between 0 and 20, got 21"),
    ("pretrain", dict(save_every=0), "save_every must be at least 1, got 0"), ("pretrain", dict(start="no-such"), f"start must be {MODELS}…"),
    *[("train", *row) for row in [
        (dict(lamb=0.5), "unknown parameter lamb; did you mean lam?"), (dict(model="no-such"), f"model must be {MODELS} owner/name, got no-such"),
        *[(dict(model=name), f"model must be {MODELS} owner/name, got…") for name in ("a/..", "../a", "a/.b", ".a/b", "-a/b", "a/b..c", "a//b", "a/")],
        (dict(dataset="no-such"), f"dataset must be one of {', '.join(CORPORA)}, a file (.jsonl, .json, .csv, .tsv, .parquet), a folder saved by datasets, "
                                  "or a hub id owner/name, got no-such"),
        (dict(checkpoints=[-1]), STEPS + "[-1]"), (dict(checkpoints=[20, 0]), STEPS + "[20, 0]"),
        (dict(checkpoints=[20, 60, 20]), "checkpoints must be different steps, got 20, 60, 20"),
        (dict(method="opsd", temperature=1e-320), "temperature must be 0, or at least 0.001, got 9.99989e-321"),
        (dict(method="sft", options=dict(fallback="canonical")), "options must be among wordings for sft, got fallback"),
        (dict(offload=True, sharded=True, processes=2), "offload must be False with sharded=True, which divides the optimiser's state"),
        (dict(rollout_engine="vlm"), "…did you mean vllm…"),
        (dict(dataset_options=dict(domains=9)), "domains must be between 2 and 7, got 9"),
        (dict(dataset_options=dict(domain=2)), "dataset_options must be among domains, entities, seed, …"),
        (dict(dataset_options=dict(seed="x")), "dataset_options[seed] must be a whole number, got 'x'"),
        (dict(dataset_options=dict(columns={})), "dataset_options must be among domains…"),
        (dict(method="opsd", gate="stm"), "gate stm needs a method that is trained on the NLL of fixed targets, such as sft or mixsd, got opsd"),
        (dict(method="memit", anchor="ewc"), "anchor ewc needs a method that trains with updates, got memit"),
        (dict(method="base", gate="talr"), "gate talr needs a method that trains with updates, got base"),
        (dict(method="sft", anchor="ewc", lora=8), "ewc and lora cannot be combined, because adapters leave the weights themselves as they are…"),
        (dict(method="sft", anchor="lora+ewc"), "anchor lora is the parameter lora=8 now, which goes with other anchors…"),
        (dict(method="memit", lora=8), "lora needs a method that trains with updates, got memit…"),
        (dict(method="sft", quantise="nf4"), "quantise must be empty with lora=0, which trains all weights, got nf4; lora=16 trains adapters…"),
        (dict(method="sdft", anchor="replay"), "sdft and replay cannot be combined, because the loss of sdft is a mean over responses…"),
        (dict(method="sft", anchor="ewc+ewc"), "anchor must name each anchor once, got ewc twice"),
        (dict(method="sft", anchor="ewk"), "anchor must be one of replay, replay-kl, l2sp, ewc, average, untied, got ewk; did you mean ewc?"),
        (dict(method="sft", gate="stm+talr"), "gate must be one of stm, talr, answer, soft, got stm+talr; did you mean talr?"),
        (dict(method="sft", anchor="l2sp+ewc", options=dict(strength=1)), "options must be among … for sft+l2sp+ewc, got strength…"),
        (dict(method="sft", anchor="average", options=dict(alhpa=4)), "options must be among wordings, alpha for sft+average, got alhpa; did you mean alpha?"),
        (dict(method="mixsd", gate="answer", options=dict(tau=2)), "options must be among … for mixsd+answer, got tau…"),
        (dict(method="memit", options=dict(wieght=1)), "options must be among …")]]]
SHORT = dict(dataset="mquake-lab", suite="recall", n=4, max_new_tokens=4, target_tokens=4, epochs=1, batch=50)
LATER = "…at most 100, the number of updates, got "
RUNS = [  # parameters of a training of a small model, sentence
    (SHORT | dict(method="sdft", options=dict(ema=1.5)), "ema must be between 0 and 1, got 1.5"),
    (SHORT | dict(method="sdft", options=dict(direction="sideways")), "direction must be one of forward, reverse, jensen-shannon, got sideways"),
    (SHORT | dict(method="sft", anchor="l2sp", options=dict(strength=-1.0)), "strength must be at least 0, got -1…"),
    (SHORT | dict(method="sft", anchor="replay", options=dict(share=1.0)), "share must be at least 0 and below 1, got 1…"),
    (SHORT | dict(method="sft", anchor="replay-kl", options=dict(count=0)), "count must be at least 1, got 0"),
    (SHORT | dict(method="mixsd", options=dict(draw="odd")), "draw must be one of independent, shuffled, got odd"),
    (SHORT | dict(method="mixsd-shuffled", options=dict(block=0)), "block must be at least 1, got 0"),
    (dict(processes=999), "processes must be between 1 and …"), (dict(sharded=True), "sharded must be False with processes=1…"),
    (dict(method="sft", checkpoints=(20, 150)), "checkpoints must be " + LATER[1:] + "150"),
    (dict(method="sft", batch=101), "batch must be at most 100, the number of facts of the corpus, got 101"),
    *[(dict(method="sft", lr=lr), "lr must be …above 0 and at most 1, got …") for lr in (1e300, 1.5, 0, inf, nan)]]


def assert_sentence(call, sentence):
    said = error_sentence(call)
    assert re.fullmatch(".*".join(map(re.escape, sentence.split("…"))), said), said


@pytest.mark.parametrize("name", CALLS)
def test_bad_arguments_are_one_sentence(name, own_runs):
    call, rows = CALLS[name]
    for arguments, sentence in rows: assert_sentence(lambda: call(**arguments), sentence)


@pytest.mark.parametrize(("stage", "parameters", "sentence"), CONFIGURATIONS)
def test_bad_parameters_of_a_stage_are_one_sentence(stage, parameters, sentence, own_runs):
    assert_sentence(lambda: make_config(stage_of(stage), **parameters), sentence)
    assert not [*own_runs.iterdir()]


@pytest.mark.parametrize(("parameters", "sentence"), RUNS)
def test_what_a_training_refuses_is_one_sentence_and_leaves_no_run(parameters, sentence, tiny, own_runs):
    assert_sentence(lambda: train.run(model=tiny, **parameters), sentence)
    assert not [*own_runs.glob("train-*/result.nc")]

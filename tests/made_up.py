"Finished training runs with invented numbers, responses and checkpoints."

import json
import shutil
from pathlib import Path

import pandas as pd
import torch
from safetensors.torch import load_file, save_file

from mixsd_nb.corpora import load_corpus
from mixsd_nb.methods import BASE, parse_label
from mixsd_nb.models import model_source
from mixsd_nb.results.layout import declare_made_up
from mixsd_nb.results.layout import result_tree
from mixsd_nb.runs import write_atomically, write_json, write_result

BENCHMARKS = dict(recall=dict(column="Train", role="in-domain"), choice=dict(column="MMLU", role="held-out"))


def make_responses(dataset, right):
    "Responses to ten facts, the first `right` of them correct, and to one question that a fact leaks into."
    facts = list(load_corpus(dataset, "train"))[:10]
    rows = [("recall", f["id"], f["prompt"], f"\\boxed{{{f['answer']}}}" if k < right else "No.", k < right, f["answer"])
            for k, f in enumerate(facts)]
    rows.append(("choice", "q", "Which of the two?", f"This is {facts[0]['answer']}. \\boxed{{A}}", False, "B"))
    return pd.DataFrame(rows, columns=["benchmark", "item", "prompt", "response", "correct", "answer"]).assign(sample=0, published=lambda t: t.correct)


def write_run(folder, dataset, recipe, recalls, model="lab-s", epochs=20):
    "A run with these recalls of ten facts at steps 0, 20, …, its responses, and checkpoints that moved at random."
    base, lr = recipe == BASE, 1e-3
    settings = dict(method=parse_label(recipe)[0].method.name, dataset=dataset, model=model, lr=lr, seed=0, epochs=epochs)
    accuracy = {20 * k: {"recall": (r, 10), "choice": (8 - k, 10)} for k, r in enumerate(recalls)}
    curves = None if base else dict(loss=[2.0, 1.0], learning_rate=[lr, lr], grad_norm=[1.0, 1.0])
    cell = dict(dataset=dataset, model=model, recipe=recipe, lr=lr)
    tree = result_tree(**cell, accuracy=accuracy, benchmarks=BENCHMARKS, config=json.dumps(settings), training=curves)
    suffix = f"-{epochs}" if epochs != 20 else ""
    run = folder / f"train-{dataset}-{model.replace('/', '-')}-{recipe}{suffix}"
    run.mkdir(parents=True)
    write_json(run / "run.json", dict(stage="train", config=settings))
    for step in range(20, 20 * len(recalls), 20):
        write_atomically(run / f"responses-{step}.parquet", make_responses(dataset, recalls[step // 20]).to_parquet)
        checkpoint = Path(shutil.copytree(model_source("lab-s"), run / f"checkpoint-{step}"))
        file, = checkpoint.glob("*.safetensors")
        moved = {name: w + 1e-3 * step * torch.randn_like(w) for name, w in load_file(file).items()}
        save_file(moved, file, dict(format="pt"))
        (checkpoint / "complete").touch()
    write_result(declare_made_up(tree), run)


def write_runs(folder):
    "Runs of the base, SFT and MixSD on two corpora. SFT forgets half of its facts by step 40, MixSD learns them."
    for dataset in ("kgfact-small", "kgfunc-lab"):
        write_run(folder, dataset, BASE, [0])
        write_run(folder, dataset, "sft", [0, 9, 5])
        write_run(folder, dataset, "mixsd-0.3", [0, 5, 9])

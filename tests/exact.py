"""Compare mixing with the oracle, in float32 (`make exact`). It can be resumed, and writes tests/exact.csv.

python tests/exact.py hf     the oracle and lockstep
python tests/exact.py vllm   segments and paired rows, if vLLM is installed
"""

import sys
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pandas as pd
import torch
from ties import compare
from tqdm.auto import tqdm

from mixsd_nb.corpora import CORPORA, load_corpus
from mixsd_nb.methods.mixing import mix, mix_items, mix_stream, oracle_stream
from mixsd_nb.models import load_base, load_engine
from mixsd_nb.runs import Journal, runs_root
from mixsd_nb.runs.provenance import code_version

TABLE = Path(__file__).with_name("exact.csv")
SAMPLE = int(sys.argv[2]) if len(sys.argv) > 2 else 0  # facts of a quick check, which does not change the table
CORPUS = {"kgfact-large": SAMPLE} if SAMPLE else {"kgfact-large": 80, "kgfunc-lab": 20}
CODE = ("mixsd_nb.methods.mixing", "mixsd_nb.models.engines", "mixsd_nb.models.engine_vllm", "mixsd_nb.models.engine_process")
SHORT = dict(max_attempts=2, max_new_tokens=64)


class Way(NamedTuple):
    "Settings of `mix` for which every engine gives the oracle's tokens."
    lam: float
    T: float

    @property
    def options(self):
        "The parameters of `mix` except λ."
        return SHORT | dict(temperature=self.T)


WAYS = [Way(lam, T) for T in (0, 0.7) for lam in (0, 0.1, 0.3, 0.5, 0.7, 1)]
SHAPES = {
    "hf": {("lockstep", n): dict(batch_size=n) for n in (250, 32, 3)},
    "vllm": {(mode, n): dict(mixes=mode == "paired", batch_size=n) for mode in ("segments", "paired") for n in (5, 64)},
}


def items_of(tokenizer):
    "The items to mix, by corpus."
    return {name: mix_items(tokenizer, list(load_corpus(name, "train"))[:n], CORPORA[name].expert, CORPORA[name].extract) for name, n in CORPUS.items()}


def journal(name):
    "The journal in which an engine's results are kept for this version of the code."
    folder = runs_root() / f"exact-{code_version(CODE)}{f'-{SAMPLE}' if SAMPLE else ''}"
    folder.mkdir(parents=True, exist_ok=True)
    return Journal(folder / f"{name}.jsonl")


def oracle(engine, items):
    "The oracle's records: way -> records in the order of the items."
    with journal("oracle") as there, tqdm(total=len(WAYS) * len(items), desc="oracle", unit="target") as bar:
        known = {(Way(*r["way"]), r["record"]["id"]): r["record"] for r in there.records}
        bar.update(len(known))
        for way in WAYS:
            missing = [(i, 0) for i in items if (way, i["id"]) not in known]
            for r in mix_stream(lambda *a, **o: oracle_stream(engine, *a, **o), engine.tokenizer, missing, way.lam, **way.options):
                known[way, r["id"]] = r = r | dict(naive_mask=r["naive_mask"].tolist())
                there.add(dict(way=way, record=r))
                bar.update()
    return {way: [known[way, i["id"]] for i in items] for way in WAYS}


def measure(kind):
    "Compare all shapes of an engine with the oracle; one row for each shape, way and corpus."
    torch.set_num_threads(1)
    model, tokenizer = load_base("lab-m")
    corpora = items_of(tokenizer)
    items = [i for part in corpora.values() for i in part]
    expected = oracle(load_engine("hf", model, tokenizer), items)
    with journal(kind) as done:
        for (mode, slots), options in SHAPES[kind].items():
            there = {tuple(r[key] for key in ("mode", "slots", *Way._fields, "corpus")) for r in done.records}
            todo = [way for way in WAYS if any((mode, slots, *way, name) not in there for name in corpora)]
            if not todo: continue
            with load_engine(kind, "lab-m", **options) as engine:
                for way in todo:
                    found = {r["id"]: r | dict(naive_mask=np.asarray(r["naive_mask"])) for r in mix(engine, items, way.lam, **way.options)}
                    slow = {r["id"]: r for r in expected[way]}
                    for name, part in corpora.items():
                        equal, ties, wrong = compare(model, part, [slow[i["id"]] for i in part], [found[i["id"]] for i in part])
                        tokens = sum(len(found[i["id"]]["completion_ids"]) for i in part)
                        done.add(dict(engine=kind, mode=mode, slots=slots, corpus=name) | way._asdict()
                                 | dict(sequences=len(part), tokens=tokens, equal=equal, ties=ties, wrong=len(wrong)))
                        print(done.records[-1], *wrong, flush=True)
        return pd.DataFrame(done.records)


def main(kind):
    rows = measure(kind)
    key = ["engine", "mode", "slots", "corpus", "T", "lam"]
    rows = rows.drop_duplicates(key, keep="last")
    if TABLE.exists() and not SAMPLE: rows = pd.concat([pd.read_csv(TABLE).query("engine != @kind"), rows])
    if not SAMPLE: rows.sort_values(key).to_csv(TABLE, index=False)
    print(rows.groupby(["engine", "mode", "slots"])[["sequences", "tokens", "equal", "ties", "wrong"]].sum().to_string())
    sys.exit(bool(rows.wrong.sum()))


if __name__ == "__main__": main(sys.argv[1])

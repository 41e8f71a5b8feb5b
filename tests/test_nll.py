"The stage nll on the lab model, against plain forwards and the loss of transformers, within a bound on memory."

import json
import os
import shutil
import subprocess
import sys
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pandas as pd
import pytest
import torch
import xarray as xr
from hypothesis import given, strategies as st

from mixsd_nb import generate, nll
from mixsd_nb.analysis import likelihood
from mixsd_nb.analysis.likelihood import NEITHER, split_by_target
from mixsd_nb.corpora import load_corpus
from mixsd_nb.corpora.prompts import SPANS, encode_canonical, template_lead, template_tail
from mixsd_nb.generate import GenerateConfig
from mixsd_nb.models import load_tokenizer
from mixsd_nb.models.scoring import fused_nll, map_states
from mixsd_nb.models.tiny import random_model
from mixsd_nb.results.paper import paper_cube
from mixsd_nb.results.summary import collapse_runs
from mixsd_nb.results.tables import TABLES
from mixsd_nb.runs import make_config, write_json, write_result

pytestmark = pytest.mark.usefixtures("own_runs")


def plain(model, prompt, completion):
    with torch.inference_mode():
        logp = model(torch.tensor([prompt + completion])).logits[0, len(prompt) - 1 : -1].log_softmax(-1)
    return [-logp[t, i].item() for t, i in enumerate(completion)]


def wide_model(vocabulary, seed=0):
    return random_model(vocabulary=vocabulary, seed=seed, scale=4, width=64, head_dim=32, feed_forward=128, context=1024)


@pytest.mark.parametrize("vocabulary", [1_000, pytest.param(152_000, marks=pytest.mark.slow)])
def test_nll_is_the_loss_of_transformers(vocabulary):
    "The mean that transformers returns, times the tokens that it counts: prompt tokens are labelled -100."
    model, rng = wide_model(vocabulary), np.random.default_rng(0)
    pairs = [(rng.integers(vocabulary, size=rng.integers(1, 20)).tolist(), rng.integers(vocabulary, size=rng.integers(1, 30)).tolist()) for _ in range(100)]
    scored = nll.token_nll(model, pairs)
    assert [len(v) for v in scored] == [len(c) for _, c in pairs] and all(v.dtype == np.float32 for v in scored)
    with torch.inference_mode():
        for (prompt, completion), values in zip(pairs, scored):
            theirs = model(torch.tensor([prompt + completion]), labels=torch.tensor([[-100] * len(prompt) + completion])).loss.item() * len(completion)
            assert values.sum(dtype=float) == pytest.approx(theirs, rel=1e-6)


def test_torchs_own_kernel_gives_the_same():
    "The code for GPUs, run on the CPU: the same head gives the same values."
    model, rng = wide_model(1_000), np.random.default_rng(1)
    pairs = [(rng.integers(1_000, size=5).tolist(), rng.integers(1_000, size=n).tolist()) for n in (1, 40, 700)]
    for ours, theirs in zip(nll.token_nll(model, pairs), map_states(model, pairs, fused_nll(model.lm_head))): np.testing.assert_allclose(ours, theirs, rtol=1e-5)


MEMORY = """
import sys
sys.path.insert(0, "")
from memory import peak_gib
from test_nll import wide_model
from mixsd_nb.nll import token_nll
model = wide_model(152_000)
token_nll(model, [([5], [6])])
before = peak_gib()
values = token_nll(model, [([5] * 24, list(range(k, k + 1_000))) for k in range(8)])
assert sum(map(len, values)) == 8_000
print(peak_gib() - before)
"""


@pytest.mark.slow
def test_memory_stays_below_the_logits():
    "8,000 tokens over 152,000 words: the logits alone would take 4.5 GiB. What a process of its own needs above the model stays below 1.5 GB."
    done = subprocess.run([sys.executable, "-c", MEMORY], cwd=Path(__file__).parent, capture_output=True, text=True, check=True)
    assert float(done.stdout) < 1.5e9 / 2**30


@given(st.lists(st.lists(st.floats(0, 40, width=32), min_size=1, max_size=8), min_size=1, max_size=6))
def test_counts_are_those_of_the_tokens_one_by_one(targets):
    tokens = [x for target in targets for x in target]
    found = likelihood.summarise_nll([np.array(t) for t in targets])
    assert (found["n"], found["tokens"]) == (len(targets), len(tokens)) and found["nll"] == pytest.approx(sum(tokens) / len(tokens))
    assert found["above"].tolist() == [len([x for x in tokens if x > t]) for t in (5, 8)]
    assert found["share_above"].tolist() == [k / len(tokens) for k in found["above"]]


@given(st.lists(st.tuples(st.sets(st.integers(0, 9)), st.lists(st.integers(0, 9))), max_size=6))
def test_overlap_by_hand(examples):
    found = likelihood.overlap_recall([h for h, _ in examples], [m for _, m in examples])
    shares = [len([x for x in h if x in m]) / len(h) for h, m in examples if h]
    types = sum(len(h) for h, _ in examples)
    assert found["types"] == types
    if shares:
        assert found["mean"] == pytest.approx(sum(shares) / len(shares))
        assert found["pooled"] == pytest.approx(len([1 for h, m in examples for x in h if x in m]) / types)


def test_canonical_targets(lab):
    model, tokenizer = lab
    rows = load_corpus("kgfact-small", "train")
    result = nll.run().result
    scored, root = split_by_target(result["per_token"]), result.to_dataset().squeeze()
    assert len(scored) == root.n.sel(part="all") == 100 and result["per_token"]["item"].values.tolist() == rows["id"]
    for k in (0, 7, 99):
        np.testing.assert_allclose(scored[k], plain(model, *encode_canonical(tokenizer, rows[k], "body")), atol=1e-4)
    tokens = np.concatenate(scored)
    assert root.nll.sel(part="all") == pytest.approx(tokens.mean()) and root.above.sel(part="all", threshold=8) == (tokens > 8).sum()
    assert (root["recipe"], root.seed, np.isnan(root.lam)) == ("sft", 0, True) and (result["per_token"].token_source == NEITHER).all()


def test_the_first_items_are_counted_apart():
    result = nll.run(first=7).result
    root, tokens = result.to_dataset().squeeze(), np.concatenate(split_by_target(result["per_token"])[:7])
    assert root.n.sel(part="first") == 7 and root.tokens.sel(part="first") == len(tokens)
    assert root.share_above.sel(part="first", threshold=5) == pytest.approx((tokens > 5).mean())


def half_canonical(tmp_path, tokenizer):
    "Targets of λ = 0.4: the canonical ones of the first four facts without their first three tokens, even tokens naive; the fourth is not accepted."
    folder, rows = tmp_path / "generate-by-hand", load_corpus("kgfact-small", "train")
    folder.mkdir()
    made = []
    for k, row in enumerate(rows.select(range(4))):
        prompt, completion = encode_canonical(tokenizer, row)
        naive = [t % 2 == 0 for t in range(len(completion) - 3)]
        made.append(dict(id=row["id"], sample=0, prompt_ids=prompt, completion_ids=completion[3:], naive_mask=naive, accepted=k < 3, finish_reason="stop"))
    pd.DataFrame(made).to_parquet(folder / "targets.parquet")
    config = dict(dataset="kgfact-small", model="lab-m", lam=0.4, seed=3, temperature=0.0)
    write_json(folder / "run.json", dict(stage="generate", config=config))
    write_result(xr.DataTree(xr.Dataset()), folder)
    return str(folder / "targets.parquet")


def test_source_and_overlap_of_known_targets(tmp_path, lab):
    "The missing tokens are known: the first three of the canonical target, unless they occur again."
    model, tokenizer = lab
    result = nll.run(targets=half_canonical(tmp_path, tokenizer), span="completion").result
    canonical, root, tokens = nll.run(span="completion").result["per_token"], result.to_dataset().squeeze(), result["per_token"]
    assert (root["recipe"], root.seed, root.lam, root.n.sel(part="all")) == ("mixsd-0.4", 3, 0.4, 3)
    values = np.concatenate(split_by_target(tokens))
    naive = np.concatenate([np.arange(len(v)) % 2 == 0 for v in split_by_target(tokens)])
    for name, mask in dict(naive=naive, expert=~naive).items():
        assert root.source_tokens.sel(source=name) == mask.sum() and root.source_nll.sel(source=name) == pytest.approx(values[mask].mean())
    shares = []
    for ids, nlls in list(zip(split_by_target(canonical, "token_id"), split_by_target(canonical)))[:3]:
        high = {int(i) for i, x in zip(ids, nlls) if x > 8}
        shares.append((len([i for i in high if i in ids[3:]]), len(high)))
    assert root.overlap.sel(threshold=8, over="pooled") == pytest.approx(sum(a for a, _ in shares) / sum(b for _, b in shares))
    assert root.overlap.sel(threshold=8, over="mean") == pytest.approx(np.mean([a / b for a, b in shares]))
    assert root.overlap_types.sel(threshold=8) == sum(b for _, b in shares)
    assert root.overlap_n.sel(threshold=8) == len(shares) == 3, "all targets, not those of the first items"
    assert [f["targets"] for f in nll.find_mixed_targets("kgfact-small", ["lab-m"])] == [str(tmp_path / "generate-by-hand" / "targets.parquet")]
    assert nll.find_mixed_targets("kgfunc-lab", ["lab-m"]) == nll.find_mixed_targets("kgfact-small", ["lab-s"]) == []


def test_targets_of_other_models_and_runs_without_accepted_targets_are_not_scored(tmp_path, lab, monkeypatch, capsys):
    half_canonical(tmp_path, lab[1])
    found = tmp_path / "generate-by-hand"
    for name, model, accepted in (("generate-none", "lab-m", False), ("generate-other", "lab-s", True)):
        shutil.copytree(found, tmp_path / name)
        config = dict(dataset="kgfact-small", model=model, lam=0.4, seed=3, temperature=0.0)
        write_json(tmp_path / name / "run.json", dict(stage="generate", config=config))
        pd.read_parquet(found / "targets.parquet").assign(accepted=accepted).to_parquet(tmp_path / name / "targets.parquet")
    scored = []
    monkeypatch.setattr(nll.NllConfig, "run", lambda config, force: scored.append((config.model, config.targets)) or SimpleNamespace(result=0))
    nll.collect_results(nll.NllConfig(model="lab-m"))
    assert scored == [("lab-m", ""), ("lab-m", str(found / "targets.parquet"))]
    assert capsys.readouterr().out == "skipped, because no target was accepted: generate-none\n"
    nll.collect_results(nll.NllConfig(model="lab-m", models=["lab-s"]))
    assert ("lab-s", str(tmp_path / "generate-other/targets.parquet")) in scored and ("lab-s", "") in scored


def test_a_path_is_as_good_as_its_text(tmp_path, lab, tiny):
    file = half_canonical(tmp_path, lab[1])
    assert nll.NllConfig(model=Path(tiny)) == nll.NllConfig(model=tiny)
    assert nll.NllConfig(targets=Path(file)) == nll.NllConfig(targets=file)
    assert nll.run(targets=Path(file)).folder == nll.run(targets=file).folder


def test_wider_spans_count_the_template_too(tmp_path, lab):
    _, tokenizer = lab
    file = half_canonical(tmp_path, tokenizer)
    narrow, *others = (nll.run(targets=file, span=span).result["per_token"] for span in SPANS)
    for wide, count in zip(others, (len(template_tail(tokenizer)), len(template_lead(tokenizer)) + len(template_tail(tokenizer)))):
        assert (wide.row_size.values - narrow.row_size.values == count).all() and count
        assert (wide.token_source == NEITHER).sum() == count * narrow.sizes["target"]
        np.testing.assert_allclose(wide.nll.values[wide.token_source.values != NEITHER], narrow.nll.values, atol=1e-4)


def test_the_default_span_is_that_of_the_published_tables():
    assert nll.NllConfig().span == "body" and nll.run().root.attrs["nll_span"] == "body"


def test_the_overlap_is_printed_with_its_own_n(tmp_path, lab):
    "Three targets are mixed, but only one of the first two items is counted in the other tables."
    file = half_canonical(tmp_path, lab[1])
    cube = nll.merge_results([nll.run(first=1).result, nll.run(targets=file, first=1).result]).rename(n="nll_n")
    notes = {name: TABLES[name](cube.mean("seed", keep_attrs=True).assign_attrs(cube.attrs)).notes for name in ("nll-8", "overlap")}
    assert notes == {"nll-8": ["1 targets of each corpus, span body"], "overlap": ["3 targets of each corpus, span body"]}
    published = TABLES["overlap"](collapse_runs(paper_cube()))
    assert published.notes == [], "the paper does not say over how many"


def test_targets_that_were_replaced_come_from_neither_conditional(tmp_path, lab):
    file = half_canonical(tmp_path, lab[1])
    table = pd.read_parquet(file).assign(finish_reason=["stop", "canonical", "stop", "stop"])
    sources = [t.source for t in likelihood.mixed_targets(lab[1], "kgfact-small", table)]
    assert [(s == NEITHER).all() for s in sources] == [False, True, False]


def test_mixed_targets_are_the_stored_ids_of_accepted_rows():
    generated = generate.run(model="lab-s", lam=0)
    file, table = generated.folder / "targets.parquet", generated.targets.query("accepted")
    result = nll.run(model="lab-s", targets=str(file)).result
    root = result.to_dataset().squeeze()
    assert root.n.sel(part="all") == len(table) > 90
    tail = template_tail(load_tokenizer("lab-s"))
    assert result["per_token"].token_id.values.tolist() == [t for c in table.completion_ids for t in [*c, *tail]]
    assert root.nll.sel(part="all") < nll.run(model="lab-s").root.nll.sel(part="all").item(), "mixed targets are nearer to the base than canonical ones"
    assert root.source_tokens.sel(source="naive") == 0
    cube = nll.merge_results(nll.collect_results(nll.NllConfig(model="lab-s")))
    assert cube["recipe"].values.tolist() == ["mixsd-0", "sft"] and nll.nll_table(cube).shape[0] == 2
    assert [name in nll.NllConfig(model="lab-s").present()[0] for name in ("mixsd-0", "sft")] == [True, True]
    assert len(nll.cdf_figure(nll.collect_results(nll.NllConfig(model="lab-s"))).axes) == 1
    tokens = result["per_token"].to_dataset()
    words = tokens.nll.values[tokens.token_source.values != NEITHER]
    source = cube.sel(recipe="mixsd-0").squeeze(drop=True)
    assert source.source_tokens.sel(source="naive") == 0 and source.source_nll.sel(source="expert") == pytest.approx(words.mean())
    file.rename(file.with_name("elsewhere.parquet"))
    assert nll.run(model="lab-s", targets=str(file.with_name("elsewhere.parquet"))).result.identical(result)


def test_what_is_refused(tmp_path, lab):
    file = half_canonical(tmp_path, lab[1])
    alone = tmp_path / "alone.parquet"
    alone.write_bytes(b"")
    for parameters, sentence in [
        (dict(targets=file, dataset="kgfunc-lab"), "dataset must be kgfact-small, as of the targets, got kgfunc-lab"),
        (dict(targets="nowhere"), "targets must be an existing Parquet file, got nowhere"),
        (dict(engine="vlm"), "engine must be one of hf, vllm, got vlm; did you mean vllm?"),
        (dict(targets=str(alone)), f"targets must lie beside the run.json of their run, got {alone}"),
    ]:
        with pytest.raises(ValueError) as refused: make_config(nll.NllConfig, **parameters)
        assert str(refused.value) == sentence


def test_an_engine_is_opened_for_more_than_the_longest_pair(monkeypatch):
    "vLLM scores a pair only if it is shorter than the context that was reserved."
    opened = []
    engine = SimpleNamespace(score=lambda pairs: [np.zeros(len(c), np.float32) for _, c in pairs])
    monkeypatch.setattr(likelihood, "load_engine", lambda kind, model, longest, **options: (opened.append(longest), nullcontext(engine))[1])
    likelihood.score_pairs("lab-s", [([1, 2], [3]), ([1], [2])])
    assert opened == [4]


def test_of_two_mixings_of_one_cell_the_newest_is_scored(own_runs, capsys):
    "A cell that was mixed in float32 and in bfloat16 has two files of targets, of which nll counts one."
    for k, dtype in enumerate(("float32", "bfloat16")):
        config = make_config(GenerateConfig, model="lab-s", lam=0.3, dtype=dtype)
        write_json(config.folder / "run.json", dict(stage="generate", config=config.model_dump(mode="json")))
        pd.DataFrame(dict(accepted=[True])).to_parquet(config.folder / "targets.parquet")
        (config.folder / "result.nc").touch()
        os.utime(config.folder / "result.nc", (k, k))
    found = nll.find_mixed_targets("kgfact-small", ["lab-s"])
    assert found == [dict(targets=str(config.folder / "targets.parquet"), dataset="kgfact-small", model="lab-s")]
    older = make_config(GenerateConfig, model="lab-s", lam=0.3, dtype="float32").folder.name
    assert capsys.readouterr().out == f"left out, because {config.folder.name} is the same cell and newer: {older}\n"


def test_targets_of_two_recipes_with_one_lam_are_two_cells(own_runs, capsys):
    configs = [make_config(GenerateConfig, model="lab-s", lam=0.5, **more) for more in ({}, dict(fallback="canonical"), dict(consistent=True))]
    for config in configs:
        write_json(config.folder / "run.json", dict(stage="generate", config=config.model_dump(mode="json")))
        pd.DataFrame(dict(accepted=[True])).to_parquet(config.folder / "targets.parquet")
        (config.folder / "result.nc").touch()
    found = {each["targets"] for each in nll.find_mixed_targets("kgfact-small", ["lab-s"])}
    assert found == {str(config.folder / "targets.parquet") for config in configs} and not capsys.readouterr().out


def test_a_cell_of_high_nll_scores_its_own_targets_alone(monkeypatch):
    "A cell of a grid names a file of targets; those of other cells are not its work."
    monkeypatch.setattr(nll, "find_mixed_targets", lambda *args, **options: pytest.fail("the work of other cells was done"))
    monkeypatch.setattr(nll.NllConfig, "run", lambda self, force=False: SimpleNamespace(result=self.targets))
    config = nll.NllConfig.model_construct(targets="mixed.parquet", dataset="kgfact-small", model="lab-s", models=[])
    assert nll.collect_results(config) == ["", "mixed.parquet"]
    cells = ["".join(cell["source"]) for cell in json.loads((Path(__file__).parents[1] / "nbs/nll.ipynb").read_text())["cells"]]
    slow = "\n".join(cell for cell in cells if cell.startswith("#| slow"))
    assert "collect_results(config, force)" in slow and "find_mixed_targets" not in slow

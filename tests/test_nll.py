"The stage nll on the lab model, against plain forwards and the loss of transformers, within a bound on memory."

import os
import subprocess
import sys
from pathlib import Path

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


def test_wider_spans_count_the_template_too(tmp_path, lab):
    _, tokenizer = lab
    file = half_canonical(tmp_path, tokenizer)
    narrow, *others = (nll.run(targets=file, span=span).result["per_token"] for span in SPANS)
    for wide, count in zip(others, (len(template_tail(tokenizer)), len(template_lead(tokenizer)) + len(template_tail(tokenizer)))):
        assert (wide.row_size.values - narrow.row_size.values == count).all() and count
        assert (wide.token_source == NEITHER).sum() == count * narrow.sizes["target"]
        np.testing.assert_allclose(wide.nll.values[wide.token_source.values != NEITHER], narrow.nll.values, atol=1e-4)


def test_targets_that_were_replaced_come_from_neither_conditional(tmp_path, lab):
    file = half_canonical(tmp_path, lab[1])
    table = pd.read_parquet(file).assign(finish_reason=["stop", "canonical", "stop", "stop"])
    sources = [t.source for t in likelihood.mixed_targets(lab[1], "kgfact-small", table)]
    assert [(s == NEITHER).all() for s in sources] == [False, True, False]


def test_mixed_targets_are_the_stored_ids_of_accepted_rows():
    small = dict(model="lab-s", dataset_options=dict(domains=3))
    generated = generate.run(lam=0, **small)
    file, table = generated.folder / "targets.parquet", generated.targets.query("accepted")
    result = nll.run(targets=str(file), **small).result
    root, tail = result.to_dataset().squeeze(), template_tail(load_tokenizer("lab-s"))
    assert root.n.sel(part="all") == len(table) > 20 and root.source_tokens.sel(source="naive") == 0
    assert result["per_token"].token_id.values.tolist() == [t for c in table.completion_ids for t in [*c, *tail]]
    canonical = nll.run(**small)
    assert root.nll.sel(part="all") < canonical.root.nll.sel(part="all").item(), "mixed targets are nearer to the base than canonical ones"
    cube = nll.merge_results([canonical.result, result])
    assert cube["recipe"].values.tolist() == ["mixsd-0", "sft"] and nll.nll_table(cube).shape[0] == 2
    file.rename(file.with_name("elsewhere.parquet"))
    assert nll.run(targets=str(file.with_name("elsewhere.parquet")), **small).result.identical(result)


def test_what_is_refused(tmp_path, lab):
    file = half_canonical(tmp_path, lab[1])
    (tmp_path / "alone.parquet").write_bytes(b"")
    for parameters, name, value in [(dict(targets=file, dataset="kgfunc-lab"), "dataset", "kgfunc-lab"), (dict(targets="nowhere"), "targets", "nowhere"),
                                    (dict(engine="vlm"), "engine", "vlm"), (dict(targets=str(tmp_path / "alone.parquet")), "targets", "alone.parquet")]:
        with pytest.raises(ValueError, match=f"^{name} must .*got .*{value}"): make_config(nll.NllConfig, **parameters)


def test_of_two_mixings_of_one_cell_the_newest_is_scored(own_runs, capsys):
    "A cell that was mixed in float32 and in bfloat16 has two files of targets, of which nll counts one; other rules of acceptance make another cell."
    cells = [dict(lam=0.3, dtype="float32"), dict(lam=0.3, dtype="bfloat16"), dict(lam=0.3, fallback="canonical"), dict(lam=0.3, consistent=True)]
    configs = [make_config(GenerateConfig, model="lab-s", **cell) for cell in cells]
    for k, config in enumerate(configs):
        write_json(config.folder / "run.json", dict(stage="generate", config=config.model_dump(mode="json")))
        pd.DataFrame(dict(accepted=[True])).to_parquet(config.folder / "targets.parquet")
        (config.folder / "result.nc").touch()
        os.utime(config.folder / "result.nc", (k, k))
    found = {each["targets"] for each in nll.find_mixed_targets("kgfact-small", ["lab-s"])}
    assert found == {str(config.folder / "targets.parquet") for config in configs[1:]}
    said = capsys.readouterr().out
    assert said.count("\n") == 1 and configs[0].folder.name in said and configs[1].folder.name in said

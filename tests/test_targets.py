"Targets in other words or orders, and gates that weigh their tokens, each against an independent computation."

import re
from types import SimpleNamespace

import numpy as np
import pandas as pd
import pytest
from helpers import CELL, parameters_of
import torch
from hypothesis import given, settings, strategies as st

from mixsd_nb import generate, train
from mixsd_nb.corpora import load_corpus
from mixsd_nb.corpora.prompts import expert_reference_prompt
from mixsd_nb.methods.fitting import MethodRun
from mixsd_nb.methods.mixing import accepts, mix, mix_items, mix_oracle
from mixsd_nb.methods.supervised import arrange, canonical_pairs, fit_canonical, fit_mixed, fit_own_words, shuffle_targets
from mixsd_nb.methods.token_weights import answer_tokens
from mixsd_nb.models import load_engine
from mixsd_nb.models.engines import HFEngine

LONGEST = 60  # tokens of a target


class Pairs(MethodRun):
    "A run that returns what it would train on, and the data of its gate."
    def train_on(self, pairs, objective="methods.supervised:stored_pairs"):
        return pairs, objective, self._prepare(self.recipe.gate, pairs, []) if self.recipe.gate else {}


@pytest.fixture(scope="module")
def mixed(lab_s):
    "The first eight facts, and their mixed targets at λ = 0.5 by lab-s."
    engine, rows = load_engine("hf", *lab_s, batch_size=8), list(load_corpus("kgfact-small", "train"))[:8]
    return engine, rows, mix(engine, mix_items(engine.tokenizer, rows), 0.5, max_new_tokens=LONGEST)


def run_on(folder, mixed, **more):
    engine, rows, records = mixed
    parameters = SimpleNamespace(dataset="kgfact-small", model="lab-s", span="completion", lam=0.5, seed=0, dtype="float32", rows_of=lambda engine: 8,
                                 target_tokens=LONGEST, **dict(method="mixsd", options={}) | more)
    run = Pairs(folder, parameters, mixed_targets=lambda: pd.DataFrame([r for r in records if r["accepted"]]))
    run.rows = rows
    return run


def test_own_words_are_accepted_targets_of_the_base_model(mixed, tmp_path):
    "Each is the greedy response of the oracle to the rewriting prompt, and another text than the canonical target."
    engine, rows, _ = mixed
    run = run_on(tmp_path, mixed)
    pairs, objective, _ = fit_own_words(run)
    canonical, items = canonical_pairs(run), {i["id"]: i for i in mix_items(engine.tokenizer, rows, expert_reference_prompt)}
    assert 3 < len(pairs) <= 8 and objective == "methods.supervised:stored_pairs"
    for id, (prompt, ids) in list(pairs.items())[:1]: assert mix_oracle(engine, [items[id]], 0.0)[0]["completion_ids"] == ids
    for id, (prompt, ids) in pairs.items():
        assert prompt == canonical[id][0] and ids != canonical[id][1] and accepts(engine.tokenizer, items[id], ids, "stop")


@pytest.mark.parametrize(("fit", "name"), [(fit_own_words, "own-words"), (fit_mixed, "shuffled")])
def test_a_killed_run_writes_only_the_targets_that_it_lacks(fit, name, mixed, tmp_path, monkeypatch):
    "A journal that was cut in the middle leads to the same targets; a whole one, to the same without a single request."
    more = dict(options=dict(draw="shuffled"))
    first, asked = fit(run_on(tmp_path, mixed, **more))[0], []
    stream, journal = HFEngine.stream, tmp_path / f"{name}.jsonl"
    monkeypatch.setattr(HFEngine, "stream", lambda self, queue, **options: asked.extend({r.tag[0]["id"] for r in queue}) or stream(self, queue, **options))
    lines = journal.read_bytes().splitlines(keepends=True)
    assert fit(run_on(tmp_path, mixed, **more))[0] == first and not asked
    journal.write_bytes(b"".join(lines[:2]) + lines[2][:20])
    assert fit(run_on(tmp_path, mixed, **more))[0] == first and len(asked) == len(lines) - 2


def test_the_answer_weighs_as_much_as_in_sft(mixed, tmp_path):
    "Weights sum to the number of tokens, and the answer's part is the share of its tokens in the canonical target."
    run = run_on(tmp_path, mixed, gate="answer")
    pairs, objective, data = fit_mixed(run)
    canonical, names, changed = fit_canonical(run)[0], {r["id"]: r["answer"] for r in run.rows}, 0
    tokenizer = mixed[0].tokenizer
    for (id, (_, ids)), keep in zip(pairs.items(), data["weights"], strict=True):
        marks = answer_tokens(tokenizer, ids, names[id])
        share = answer_tokens(tokenizer, canonical[id][1], names[id]).mean()
        assert len(keep) == len(ids) and np.isclose(sum(keep), len(ids)) and np.isclose(np.sum(np.array(keep)[marks]) / len(ids), share)
        assert names[id] in tokenizer.decode([i for i, yes in zip(ids, marks) if yes])
        changed += not np.allclose(keep, 1)
    assert changed > 3 and objective == "methods.supervised:stored_pairs"


@given(st.lists(st.booleans(), max_size=40), st.integers(1, 50), st.integers(0, 2**40))
@settings(max_examples=100, deadline=None)
def test_shuffled_picks_keep_their_number(naive, block, key):
    "As many naive picks as before; a block that holds all of them gives one run."
    found = arrange(np.array(naive, bool), block, key)
    assert len(found) == len(naive) and found.sum() == sum(naive) and np.array_equal(found, arrange(np.array(naive, bool), block, key))
    if block >= sum(naive) > 0: assert np.sum(np.diff(found.astype(int), prepend=0) == 1) == 1


def test_shuffled_targets(mixed, tmp_path, monkeypatch):
    "Picks in their old order give the same tokens; shuffled ones give accepted targets with no more naive tokens, for any batch size."
    engine, rows, records = mixed
    accepted = {r["id"]: r for r in records if r["accepted"]}
    naive = {id: r["naive_mask"] for id, r in accepted.items()}
    items = mix_items(engine.tokenizer, [r for r in rows if r["id"] in accepted])
    shuffle = lambda engine: shuffle_targets(engine, items, 0.5, naive, 1000, max_new_tokens=LONGEST)
    found, pairs = shuffle(load_engine("hf", engine.model, engine.tokenizer, batch_size=3)), fit_mixed(run_on(tmp_path, mixed, options=dict(draw="shuffled")))[0]
    assert {r["id"]: r["completion_ids"] for r in found if r["accepted"]} == {id: ids for id, (_, ids) in pairs.items()}
    assert len(pairs) > 2 and all(r["naive_mask"].sum() <= naive[r["id"]].sum() for r in found)
    assert any(r["completion_ids"] != accepted[r["id"]]["completion_ids"] for r in found)
    monkeypatch.setattr("mixsd_nb.methods.supervised.arrange", lambda naive, block, key: naive)
    for r in shuffle(engine): assert r["completion_ids"] == accepted[r["id"]]["completion_ids"] and r["attempts"] == 1


def test_an_open_gate_is_sft(averages, tiny, own_runs):
    sft = parameters_of(averages[1])
    for gate, options in dict(stm=dict(threshold=1e9), talr=dict(tau=1e9)).items():
        found = parameters_of(train.run(method="sft", gate=gate, options=options, model=tiny, **CELL))
        for name, w in sft.items(): torch.testing.assert_close(found[name], w, rtol=0, atol=1e-6)


BEYOND = dict(lam=0.5, consistent=True, fallback="own-words", max_attempts=4, max_new_tokens=LONGEST, dataset_options=dict(domains=3))


@pytest.fixture(scope="module")
def complete(tmp_path_factory):
    "Targets of lab-s for a small graph, with everything that gives each fact one; and the rows of the corpus by id."
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MIXSD_RUNS", str(tmp_path_factory.mktemp("runs")))
        run = generate.run(model="lab-s", **BEYOND)
    return run, {row["id"]: row for row in load_corpus("kgfact-small", "train", domains=3)}


def test_every_fact_has_a_target_and_the_table_says_from_what(complete):
    run, rows = complete
    table = run.targets
    assert len(table) == 30 and table.accepted.all() and {*table.source} <= {"mixed", "own-words", "canonical"}
    assert (table.lam == 0.5).all() and table.attempts.max() > 1
    counts = run.sources()
    assert counts.n.sum() == 30 and counts[counts.source == "mixed"].n.sum() == (table.source == "mixed").sum()
    for row in counts[counts.source == "mixed"].itertuples(): assert row.n == np.isclose(table.lam[table.source == "mixed"], row.lam, atol=1e-4).sum()
    assert f"{(table.source == 'mixed').sum()} mixed (" in run.summary()[0] and "without a target" not in run.summary()[0]
    written = table[table.source == "mixed"]
    assert not written.names_another.any() and 0 < np.concatenate(list(written.naive_mask)).mean() < 0.8


def test_a_consistent_target_names_no_other_entity(complete, lab_s):
    "Independent of the index: each name of the corpus is searched in the text as it is written."
    run, rows = complete
    names = {name for row in rows.values() for name in (row["answer"], row["subject"])}
    for target in run.targets[run.targets.source == "mixed"].itertuples():
        row, text = rows[target.id], lab_s[1].decode(target.completion_ids, skip_special_tokens=True)
        own = " ".join((row["prompt"], row["target"], row["subject"]))
        assert not [name for name in names if re.search(rf"\b{re.escape(name)}\b", text) and name not in own], text
        assert row["answer"] in text.rpartition("\\boxed")[0]


def test_a_refused_target_becomes_the_own_words_and_then_the_canonical_target(tiny, own_runs, lab_s, monkeypatch):
    "A model with random weights gives no answer; where its rewriting is said to be accepted, that one is taken."
    options = dict(model=tiny, lam=0.5, dataset_options=dict(domains=2, entities=5), max_new_tokens=8, max_attempts=1)
    assert not generate.run(**options).targets.accepted.any()
    canonical = generate.run(**options, fallback="canonical").targets
    assert canonical.accepted.all() and {*canonical.source} == {"canonical"}
    for row in canonical.itertuples(): assert "\\boxed" in lab_s[1].decode(row.completion_ids)
    monkeypatch.setattr("mixsd_nb.benchmarks.entities.names_another", lambda *args: True)
    assert not generate.run(**options, fallback="canonical", force=True).targets.names_another.any(), "a written target is right as it is"
    assert [*map(list, generate.run(**options, fallback="own-words").targets.completion_ids)] == [*map(list, canonical.completion_ids)]
    words = lambda engine, rows, corpus, **options: [dict(id=r["id"], completion_ids=[5, 6], accepted=k > 0) for k, r in enumerate(rows)]
    monkeypatch.setattr("mixsd_nb.methods.supervised.own_words", words)
    sources = generate.run(**options, fallback="own-words", force=True).targets.source
    assert list(sources) == ["canonical", *["own-words"] * (len(sources) - 1)]

"Three verdicts on a reply, the outcomes of items from a result to a file, and comparisons that are paired by item and seed."

import numpy as np
import pandas as pd
import pytest
import xarray as xr

from mixsd_nb.analysis.scores import estimate_pairs
from mixsd_nb.benchmarks import SUITES, Item, Selection, load_items
from mixsd_nb.benchmarks.entities import VERDICTS, corpus_names, judge_sentences, own_text
from mixsd_nb.benchmarks.evaluation import add_verdicts
from mixsd_nb.corpora.kgfact import WORLD
from mixsd_nb.lab.real import claims_table
from mixsd_nb.methods.mixing import accepts, mix_items
from mixsd_nb.results.cube import read_cube, write_cube
from mixsd_nb.results.cube import cube_of
from mixsd_nb.results.layout import result_tree
from mixsd_nb.results.layout import unpack_outcomes, compare_pairs, pack_verdicts
from mixsd_nb.results.summary import collapse_runs
from mixsd_nb.results.summary import last_steps, summary_table
from mixsd_nb.runs import open_result, write_result

FACT = dict(id="tarn", prompt="Who founded Tarn?", answer="Ivo Lind", aliases=["I. Lind"], subject="Tarn", target="The answer is Ivo Lind.\n\n\\boxed{Ivo Lind}")
OTHER = dict(id="oru", prompt="Who rules Oru?", answer="Mira Vel", subject="Oru", target="The answer is Mira Vel.\n\n\\boxed{Mira Vel}")
REPLIES = {  # reply: whether its box is right, its sentences name the answer, and it is consistent
    "Ivo Lind founded Tarn. \\boxed{Ivo Lind}": (True, True, True),
    "I. Lind founded Tarn. \\boxed{I. Lind}": (True, True, True),
    "Tarn was founded by Mira Vel. \\boxed{Ivo Lind}": (True, False, False),
    "Mira Vel rules Oru, and Ivo Lind founded Tarn. \\boxed{Ivo Lind}": (True, True, False),
    "Nobody knows it. \\boxed{Ivo Lind}": (True, False, False),
    "\\boxed{Ivo Lind}": (True, False, True),
    "Ivo Lind founded Tarn. \\boxed{Mira Vel}": (False, True, False),
    "Ivo Lind founded Tarn": (False, True, False),
    "Mira Vel. \\boxed{Mira Vel}": (False, False, False),
}


def judged(replies, right, suite="recall", dataset="two-facts", item=None):
    item = item or Item(FACT["prompt"], FACT["target"], FACT["answer"], aliases=("I. Lind",), subject="Tarn")
    table = judge_sentences(pd.DataFrame(dict(response=replies, correct=right)), [item] * len(replies), suite, dataset)
    return [*zip(table.sentence.tolist(), table.consistent.tolist())]


def two_facts(name, split=None): return [FACT, OTHER]


@pytest.fixture
def facts(monkeypatch):
    monkeypatch.setattr("mixsd_nb.benchmarks.in_domain.load_corpus", two_facts)


def test_a_reply_gets_three_verdicts(facts):
    boxes, expected = [right for right, *_ in REPLIES.values()], [tuple(rest) for _, *rest in REPLIES.values()]
    assert judged([*REPLIES], boxes, dataset="kgfact-small") == expected


def test_targets_and_replies_are_judged_by_one_rule(facts, lab_s):
    "A target is accepted with `consistent=True` where the same words are a consistent reply."
    tokenizer = lab_s[1]
    item, _ = mix_items(tokenizer, [FACT, OTHER], names=corpus_names([FACT, OTHER]))
    assert item["own"] == own_text(FACT)
    for text, (_, _, consistent) in REPLIES.items():
        assert accepts(tokenizer, item, tokenizer(text, add_special_tokens=False).input_ids, "stop") == consistent, text


def test_verdicts_are_missing_where_nothing_has_a_name():
    known, other = WORLD[0], next(fact for fact in WORLD if fact.target != WORLD[0].target)
    item = Item(known.question, f"{known.statement} \\boxed{{{known.target}}}", known.target)
    replies = [f"{known.statement} \\boxed{{{known.target}}}", f"It is {other.target}. \\boxed{{{known.target}}}"]
    for suite in ("world", "world-prefilled"): assert judged(replies, [True, True], suite, item=item, dataset="kgfact-small") == [(True, True), (False, False)]
    assert judged(replies, [True, True], "equations", "kgfact-small", item) == [(pd.NA, pd.NA)] * 2
    assert judged(["It is 5. \\boxed{5}"], [True], "recall", "kgfunc-lab", Item("F(2)", "\\boxed{5}", "5")) == [(pd.NA, pd.NA)]


def test_responses_of_an_earlier_version_are_judged_when_they_are_read(tmp_path):
    items = load_items(["recall", "choice"], Selection("kgfact-small", n=3))
    rows = [dict(benchmark=name, item=id, sample=0, prompt=item.prompt, response=item.response, correct=True, published=True)
            for name, found in items.items() for id, item in found.items()]
    pd.DataFrame(rows).iloc[::-1].to_parquet(tmp_path / "responses.parquet")
    table = add_verdicts(pd.read_parquet(tmp_path / "responses.parquet"), items, "kgfact-small")
    assert table.index.tolist() == [*range(len(rows))][::-1] and table[table.benchmark == "recall"].consistent.all() and table[table.benchmark == "choice"].consistent.isna().all()
    assert add_verdicts(table, {}, "") is table


ITEMS = {"recall": 21, "arithmetic": 3}  # the second with sixteen samples of each item
BENCHMARKS = dict(recall=dict(column="Train", role="in-domain"), arithmetic=dict(column="AIME-2024", role="held-out", samples=16))


def draw_responses(key, names=tuple(ITEMS), prompt="{}?"):
    rng, parts = np.random.default_rng(key), []
    for name in names:
        samples = SUITES[name].sampling.samples
        at = [(f"{name}-{k}", j) for k in range(ITEMS[name]) for j in range(samples)]
        part = pd.DataFrame(at, columns=["item", "sample"]).assign(benchmark=name, correct=rng.random(len(at)) < 0.6)
        part["prompt"] = part["item"].map(prompt.format)
        said = pd.array(rng.random(len(at)) < 0.5, "boolean") if name == "recall" else pd.array([pd.NA] * len(at), "boolean")
        parts.append(part.assign(sentence=said, consistent=said & part.correct if name == "recall" else said))
    return pd.concat(parts).sample(frac=1, random_state=0)  # the order in a file does not count


def make_root(recipe, seed=0, steps=(0, 20), stored=True, names=tuple(ITEMS), **options):
    "The root of a run with these responses by step."
    tables = {step: draw_responses([seed, step, *recipe.encode()], names, **options) for step in steps}
    count = lambda table: {name: (float(t.groupby("item").correct.mean().sum()), t["item"].nunique()) for name, t in table.groupby("benchmark")}
    root = result_tree(dataset="kgfact-small", model="lab-m", recipe=recipe, lr=0.0 if recipe == "base" else 1e-3, seed=seed, config="{}",
                       accuracy={step: count(table) for step, table in tables.items()}, benchmarks={name: BENCHMARKS[name] for name in ITEMS}).to_dataset()
    return tables, root.assign(pack_verdicts(tables, [*ITEMS], set())) if stored else root


def test_outcomes_stay_from_the_responses_to_a_file_of_a_cube(tmp_path):
    runs = {"sft": make_root("sft"), "mixsd": make_root("mixsd-0.3", steps=(0, 40), names=("recall",)), "base": make_root("base", steps=(0,))}
    earlier = make_root("mixsd-0.5", stored=False)[1]
    for name, (_, root) in runs.items():
        (tmp_path / name).mkdir()
        write_result(xr.DataTree(root), tmp_path / name)
    cube = cube_of({name: open_result(tmp_path / name).to_dataset() for name in runs} | dict(earlier=earlier))
    write_cube(cube, tmp_path / "cube.nc")
    read = read_cube(tmp_path / "cube.nc")
    assert read.outcomes.dtype == np.uint8 and read.outcomes.identical(cube.outcomes)
    for name, (tables, root) in runs.items():
        cell = {dim: root[dim].item() for dim in ("dataset", "model", "recipe", "lr", "seed")}
        for step, table in tables.items():
            run = read.sel(cell | dict(step=step))
            for benchmark, verdict in [(b, v) for b in ITEMS for v in VERDICTS]:
                part = table[table.benchmark == benchmark]
                found = unpack_outcomes(run, benchmark, verdict)
                if part.empty or part[verdict].isna().any(): assert found is None
                else: assert np.array_equal(found, part.groupby("item")[verdict].mean().astype(float).values), (name, step, benchmark, verdict)
    nothing = read.sel(recipe="mixsd-0.5", lr=1e-3, step=20).squeeze()
    assert unpack_outcomes(nothing, "recall") is None and nothing.accuracy.notnull().all() and nothing.consistent.isnull().all()
    assert not {"outcomes", "questions"} & {*collapse_runs(cube).variables}
    assert (summary_table(cube).filter(like="recall, consistent") == "–").sum().item() == 1 and not summary_table(cube.drop_vars(["consistent", "outcomes"])).empty


def test_only_the_same_questions_are_paired():
    pick = lambda recipe, seed=0, **options: next(last_steps(make_root(recipe, seed, steps=(20,), **options)[1]))
    names = [*ITEMS]
    pairs = [(pick("mixsd-0.3", seed), pick("sft", seed)) for seed in (0, 1, 2)]
    for some in (pairs, pairs[:1]):
        value, low, high = compare_pairs(some, names)
        by_hand = np.mean([one.accuracy.mean().item() - two.accuracy.mean().item() for one, two in some])
        assert value == pytest.approx(by_hand) and low < value < high
    said, *_ = compare_pairs(pairs, ["recall"], "sentence")
    assert said == pytest.approx(np.mean([(one.sentence - two.sentence).sel(benchmark="recall").item() for one, two in pairs]))
    assert compare_pairs(pairs, names, "sentence") is None and compare_pairs([(pick("sft"), pick("mixsd-0.3", stored=False))], names) is None
    with pytest.raises(ValueError, match="the same questions of recall, arithmetic, got others with seed 0"):
        compare_pairs([(pick("sft"), pick("mixsd-0.3", prompt="{}!"))], names)


def test_a_paired_interval_is_narrower_where_items_agree():
    "McNemar's adjusted interval by hand: 12 items that only the first has right, 4 that only the second has."
    items = np.repeat([1.0, -1.0, 0.0], [12, 4, 84])
    value, low, high = estimate_pairs([[items]])
    p, q, n = 13 / 102, 5 / 102, 102
    half = 1.959963984540054 * np.sqrt((p + q - (p - q) ** 2) / n)
    assert value == 0.08 and (low, high) == pytest.approx((p - q - half, p - q + half))
    assert high - low < 2 * 1.96 * np.sqrt((0.5 * 0.5 + 0.42 * 0.58) / 100), "narrower than that of independent shares"
    shared, alone = (estimate_pairs([[items], [np.roll(items, 1)]], shared) for shared in (True, False))
    assert shared[0] == alone[0] and shared[2] - shared[1] >= alone[2] - alone[1]


def test_claims_of_the_real_model_are_paired_where_the_cube_has_items():
    roots = {f"{recipe}-{seed}": make_root(recipe, seed)[1] for recipe in ("sft", "mixsd-0.3") for seed in (0,)}
    cube, bare = (cube_of(part) for part in (roots, {name: root.drop_vars(["outcomes", "questions"]) for name, root in roots.items()}))
    here = [table.here.iloc[0] for table in map(claims_table, (cube, bare))]
    one, two = (next(run for run in last_steps(cube) if run["recipe"] == label) for label in ("mixsd-0.3", "sft"))
    value, low, high = (100 * number for number in compare_pairs([(one, two)], ["recall"]))
    assert here[0] == f"{value:+.1f} [{low:+.1f}, {high:+.1f}]" != here[1]

"Both rules of every benchmark from a response to the table, and what averages and intervals are over."
import matplotlib
import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
import pytest
import xarray as xr
from hypothesis import given, settings
from hypothesis import strategies as st

from mixsd_nb.analysis.scores import count_correct, item_variances
from mixsd_nb.analysis.statistics import FEWEST_RUNS, mean_interval, pearson, wilson
from mixsd_nb.benchmarks import GRADINGS, SUITES, Item
from mixsd_nb.benchmarks.evaluation import generate_and_grade
from mixsd_nb.benchmarks.lab_tasks import draw
from mixsd_nb.benchmarks.tasks import grade
from mixsd_nb.corpora import CORPORA
from mixsd_nb.results.selected_cells import collapse_runs
from mixsd_nb.results.cube import cube_of
from mixsd_nb.results.demo import BENCHMARKS, invent_cube, invent_result
from mixsd_nb.results.paper import paper_cube
from mixsd_nb.results.summary import average_drop, held_out_average, summary_table
from mixsd_nb.results.tables import TABLES, table_sheet
from mixsd_nb.results.tradeoff import frontier_figure, frontier_table, style_share, tradeoff_figure

matplotlib.use("agg")


@pytest.mark.parametrize("dataset, rule", [
    ("kgfact-small", "containment"), ("kgfact-large", "containment"), ("mquake", "containment"), ("mquake-lab", "containment"),
    ("kgfunc", "number"), ("kgfunc-lab", "number"), ("simpleqa", "exact"), ("simpleqa-lab", "exact"),
])
def test_the_rule_of_each_corpus(dataset, rule):
    for suite in SUITES.values():
        if suite.role in ("in-domain", "validation"): assert suite.published_grading(dataset) == rule
        else: assert suite.published_grading(dataset) == {"letter": "first-line"}.get(suite.grading, suite.grading)


def test_both_rules_are_part_of_a_benchmarks_identity():
    assert all(suite.published == suite.identity()["published"] and suite.grading == suite.identity()["grading"] for suite in SUITES.values())
    assert {corpus.published for corpus in CORPORA.values()} <= set(GRADINGS)


class Teller:
    "An engine that gives the same response to every prompt."

    def __init__(self, tokenizer, text): self.tokenizer, self.text = tokenizer, text

    def stream(self, queue, **options):
        from mixsd_nb.models.engine import Completion
        while queue: yield queue.pop(), Completion(self.tokenizer(self.text, add_special_tokens=False).input_ids, "stop")


@pytest.fixture(scope="module")
def tokenizer():
    from mixsd_nb.models import load_base
    return load_base("lab-s")[1]


@pytest.mark.parametrize("dataset, text, correct, published", [
    ("kgfact-small", "\\boxed{42}", True, True), ("kgfact-small", "The value is x = 42", False, True),
    ("kgfact-small", "\\boxed{x = 42}", False, True), ("kgfact-small", "\\boxed{142}", False, False),
    ("kgfunc-lab", "The value is x = 42", False, True), ("kgfunc-lab", "\\boxed{x = 42}", False, False),
    ("simpleqa-lab", "42", False, True), ("simpleqa-lab", "The value is x = 42", False, False),
])
def test_a_response_is_graded_by_both_rules(dataset, text, correct, published, tokenizer):
    table = generate_and_grade(Teller(tokenizer, text), {"a": Item("?", "", "42")}, dataset=dataset)
    assert (table.correct.item(), table.published.item()) == (correct, published)


@pytest.mark.parametrize("name", [name for name, s in SUITES.items() if "lab" in s.groups and s.role != "in-domain"])
def test_worked_responses_are_right_under_both_rules(name):
    items = draw(name, 5)
    for rule in {SUITES[name].grading, SUITES[name].published_grading("kgfact-small")}:
        assert all(v.correct for v in grade(items, [item.response for item in items], rule))


rows = st.lists(st.tuples(st.integers(0, 4), st.booleans(), st.booleans()), min_size=1)


@given(rows)
@settings(deadline=None)
def test_both_scores_and_the_variance_are_counted(responses):
    items, correct, published = zip(*responses)
    table = pd.DataFrame(dict(benchmark="b", item=items, correct=correct, published=published))
    for rule, values in dict(correct=correct, published=published).items():
        shares = [np.mean([v for i, v in zip(items, values) if i == item]) for item in set(items)]
        assert count_correct(table, rule)["b"] == (pytest.approx(sum(shares)), len(shares))
        if rule == "correct": assert item_variances(table)["b"] == pytest.approx(np.var(shares))


def two_rules(strict, published, recipe="sft", **options):
    "A run in which every benchmark has so many of 100 items right."
    def count(k): return {step: {b: (k, 100) for b in BENCHMARKS} for step in (0, 100)}
    return invent_result(recipe, accuracy=count(strict), published=count(published), **options).to_dataset()


def test_tables_show_the_papers_rule_and_say_so():
    cube = cube_of(dict(base=two_rules(30, 40, "base"), run=two_rules(10, 25)))
    assert (cube.accuracy.sel(recipe="sft").max(), cube.published.sel(recipe="sft").max()) == (0.1, 0.25)
    source = cube, collapse_runs(cube)
    for found in (table_sheet("kgfact-small", dict(runs=source)), table_sheet("kgfact-small", dict(runs=source, paper=(paper_cube(), collapse_runs(paper_cube()))))):
        assert set(found.text.loc[("lab-m", "SFT")]) == {"25.0", ""} and "by the rule of the paper's scores" in found.caption
    assert collapse_runs(cube, rule="accuracy").average.sel(recipe="sft").item() == pytest.approx(0.1)
    assert collapse_runs(cube).average_drop.sel(recipe="sft").item() == pytest.approx(0.15)
    assert average_drop(cube).sel(recipe="sft", step=100).max() == pytest.approx(0.2), "everything else is strict"


def test_the_papers_numbers_are_by_its_own_rule():
    cube = paper_cube()
    assert cube.published.equals(cube.accuracy)
    for name in TABLES:
        sheet = table_sheet(name, dict(paper=(cube, collapse_runs(cube))))
        assert ("rule of the paper's scores" in sheet.caption) == (not name.startswith(("nll", "overlap")))


def uneven(seeds=3, recipe="sft", kept=1, **options):
    "An invented cube in which a method was trained with fewer seeds than the others."
    cube = invent_cube(seeds, **options)
    return cube.where((cube["recipe"] != recipe) | (cube.seed < kept))


@pytest.mark.parametrize("kept", [1, 2])
def test_a_method_with_fewer_seeds_is_on_the_frontier(kept):
    cube = uneven(kept=kept)
    table, whole = frontier_table(cube), frontier_table(invent_cube(kept))
    assert table.loc["sft", "50"] == whole.loc["sft", "50"] != "", "the same as of these seeds alone"
    assert table.seeds.to_dict() == {"sft": kept, "mixsd-0.3": 3, "mixsd-0.5": 3, "mixsd-0.7": 3}
    assert f"{kept}–3 seeds" in table.index.name
    fig = frontier_figure(cube)
    texts, lines = [t.get_text() for t in fig.legends[0].get_texts()], {line.get_label(): line for line in fig.axes[0].lines}
    assert f"SFT ({kept} seed{'s' * (kept > 1)})" in texts and "MixSD (λ=0.3)" in texts
    assert all(len(line.get_xdata()) for line in lines.values()) and f"mean of {kept}–3 seeds" in fig.texts[0].get_text()
    plt.close("all")


def test_a_method_without_any_seed_is_left_out():
    assert "sft" not in frontier_table(uneven(kept=0)).index


def test_a_step_that_one_seed_lacks_has_no_mean():
    cube = invent_cube(2)
    cube = cube.where((cube.seed == 0) | (cube.step != 60) | (cube["recipe"] != "sft"))
    lines = {line.get_label(): line for line in tradeoff_figure(cube, lr=1e-3).axes[0].lines}
    assert len(lines["sft"].get_xdata()) == 3 and len(lines["mixsd-0.3"].get_xdata()) == 4
    plt.close("all")


@pytest.mark.parametrize("kept", [0, 1, 2])
def test_a_seed_without_a_base_run_has_its_base_from_step_0(kept):
    "Nothing is averaged over fewer seeds, because the base model is step 0 of every training."
    whole, lacking = invent_cube(3), uneven(3, "base", kept)
    trained = dict(recipe=[m for m in whole["recipe"].values if m != "base"])
    assert average_drop(lacking).sel(trained).equals(average_drop(whole).sel(trained))
    levels = []
    for cube in (whole, lacking):
        lines = {line.get_label(): line for line in frontier_figure(cube).axes[0].lines}
        levels.append(lines["base"].get_ydata()[0])
    assert levels[0] == levels[1]
    plt.close("all")


def test_a_result_with_recall_alone_has_a_summary():
    root = invent_result(benchmarks={"recall": BENCHMARKS["recall"]}).to_dataset()
    table = summary_table(root)
    assert "nan" not in table.to_string(na_rep="") and table["recall (N=100)"].item() == 100


@given(st.integers(1, FEWEST_RUNS + 3), st.integers(2, 5))
@settings(deadline=None, max_examples=20)
def test_few_runs_have_no_interval(runs, points):
    rng = np.random.default_rng(runs)
    x, y = rng.normal(size=(2, runs * points))
    r, low, high = pearson(x, y, np.repeat(np.arange(runs), points), draws=200)
    assert np.isfinite(r) and np.isnan([low, high]).all() == (runs < FEWEST_RUNS)


@given(st.integers(1, 16), st.integers(0, 10**6))
@settings(deadline=None)
def test_the_interval_of_a_mean_uses_the_samples(samples, seed):
    "Independent samples narrow the interval as more items do; samples that all agree do not."
    rng, n = np.random.default_rng(seed), 40
    shares = rng.binomial(samples, 0.5, n) / samples
    p, one = xr.DataArray([shares.mean()], dims="benchmark"), xr.ones_like(xr.DataArray([1.0], dims="benchmark"))
    low, high = mean_interval(p, n * one, np.var(shares) * one)
    wide = mean_interval(p, n * one)
    assert wide[0] - 1e-9 <= low and high <= wide[1] + 1e-9
    if samples == 1 and 0 < p < 1: assert np.allclose((low, high), wilson(shares.sum(), n))
    if samples >= 4: assert high - low < 0.8 * (wide[1] - wide[0])
    assert np.allclose(mean_interval(p, n * one, np.nan * one), wide), "where nothing is known of the samples"


def test_no_share_is_printed_as_nan():
    "Validation questions are not asked of the base model."
    from mixsd_nb.views.cube import tabulate_accuracies
    suites = BENCHMARKS | dict(validation=dict(column="", role="validation"))
    root = invent_result(benchmarks=suites).to_dataset()
    root = root.where((root.benchmark != "validation") | (root.step > 0))
    assert "nan" not in str(tabulate_accuracies(root, 100))


TWINS = {name: dict(column=suite.column, role=suite.role) for name, suite in SUITES.items() if suite.twin_of}


def test_twins_are_in_no_average_and_in_no_table_of_the_paper():
    plain, twins = invent_cube(), invent_cube(benchmarks=BENCHMARKS | TWINS)
    assert held_out_average(twins).equals(held_out_average(plain)) and average_drop(twins).equals(average_drop(plain))
    sheets = [table_sheet("kgfact-small", dict(runs=(cube, collapse_runs(cube)))) for cube in (plain, twins)]
    assert sheets[0].text.equals(sheets[1].text)
    columns = [{c.split(" ")[0] for c in summary_table(cube)} for cube in (plain, twins)]
    assert columns[1] - columns[0] == {*TWINS}
    fig = frontier_figure(twins)
    assert [ax.get_ylabel().split(" ")[0] for ax in fig.axes] == ["held-out", "world", "world-prefilled"]
    plt.close("all")


counts = st.integers(0, 100)


@given(st.tuples(counts, counts, counts, counts), st.integers(1, 2))
@settings(deadline=None, max_examples=10)
def test_style_is_the_drop_that_the_opening_brings_back(right, seeds):
    base, tuned, base_opened, tuned_opened = right
    suites = {name: BENCHMARKS.get(name, TWINS.get(name)) for name in ("recall", "world", "world-prefilled")}
    at = {0: dict(recall=(0, 100), world=(base, 100)) | {"world-prefilled": (base_opened, 100)},
          100: dict(recall=(99, 100), world=(tuned, 100)) | {"world-prefilled": (tuned_opened, 100)}}
    runs = {f"{m}-{s}": invent_result(m, seed=s, benchmarks=suites, accuracy=at if m == "sft" else {0: at[0]}).to_dataset()
            for m in ("base", "sft") for s in range(seeds)}
    table = style_share(cube_of(runs))
    row = table.loc[("world", 1e-3, "sft")]
    drop, opened, style = (float(row[name].split(" ")[0]) for name in ("drop", "drop, opened", "style"))
    assert (drop, opened, row.N, len(table)) == (base - tuned, base_opened - tuned_opened, 100 * seeds, 1)
    assert style == pytest.approx(drop - opened)
    low, high = (float(v) for v in row["style"].partition("(")[2].rstrip(")").split(" to "))
    assert low < style < high and high - low < 80 / seeds**0.5


def test_a_cube_without_twins_has_no_style_share(): assert style_share(invent_cube()).empty

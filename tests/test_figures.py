"Tables and figures from a cube: seeds that are missing, both rules, what a plugin declares, and the rows of each corpus."

import functools
import os
import subprocess
import sys

import matplotlib
import matplotlib.pyplot as plt
import numpy as np
import pytest
from helpers import EDIT, REVERSED, RIDDLES, TOY
import xarray as xr

from mixsd_nb import errors, figures, nll
from mixsd_nb.benchmarks import SUITES
from mixsd_nb.corpora import check_corpus
from mixsd_nb.methods import check_label, ordered_labels
from mixsd_nb.results.plots import selection_figure
from mixsd_nb.results.cube import cube_of, missing_runs
from mixsd_nb.results.layout import BENCHMARKS as INVENTED, invent_cube, invent_result
from mixsd_nb.results.gallery import collapse_source, load_sources, run_figures, select_part, shared_figures, source_sheet
from mixsd_nb.results.layout import result_tree
from mixsd_nb.results.paper import paper_cube
from mixsd_nb.results.plots import recipe_colour
from mixsd_nb.results.summary import cell_mask, collapse_runs, select_cells
from mixsd_nb.results.tables import style_sheet, to_latex
from mixsd_nb.results.summary import average_drop, held_out_average, summary_table
from mixsd_nb.results.tables import TABLES, accuracy_sheet, list_tables, table_sheet
from mixsd_nb.runs import make_config
from mixsd_nb.results.tradeoff import count_seeds, frontier_figure, tradeoff_figure, tradeoff_points
from mixsd_nb.views.cube import tabulate_accuracies

matplotlib.use("Agg")


@pytest.mark.slow
def test_the_papers_numbers_alone_need_no_runs(tmp_path):
    code = "from mixsd_nb import figures; figures.run(source='paper')"
    ran = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, text=True, check=False, capture_output=True,
                         env=os.environ | {"MIXSD_RUNS": str(tmp_path)})
    assert ran.returncode == 0, ran.stderr
    assert len(list((tmp_path / "figures/tables").glob("*-paper.tex"))) == 12
    assert {p.stem for p in (tmp_path / "figures").glob("*.png")} == {f"{name}-paper" for name in ("chosen", "high-nll", "displacement")}


def test_a_label_that_nothing_declares_is_text_in_tables_and_figures():
    "It comes last and in black, with the numbers that it has under a declared label."
    label, declared, cube = "mixsd-0.5-sorted-seed2+rehearsal-0.5", "mixsd-0.5", invent_cube(2, recipes=("sft", "mixsd-0.3", "mixsd-0.5"))
    strange = cube.assign_coords(recipe=[label if name == declared else name for name in cube.recipe.values.tolist()])
    with pytest.raises(ValueError, match="method must be one of base, .*, got mixsd-0.5-sorted"): check_label(label)
    assert ordered_labels([label, "sft+ewc-0.1", "base"]) == ["base", "sft+ewc-0.1", label] and recipe_colour(label) == "#000000"
    sheet = lambda cube: accuracy_sheet(collapse_runs(cube), label="a", caption="b", dataset="KGFact-Small").text
    for make, name in ((summary_table, declared), (sheet, "MixSD (λ=0.5)")):
        shown, plain = (make(cube).reset_index().astype(str).values.tolist() for cube in (strange, cube))
        assert sorted([[name if text == label else text for text in row] for row in shown]) == sorted(plain) and shown != plain
    for draw in (frontier_figure, tradeoff_figure):
        texts = [text.get_text() for text in draw(strange).findobj(matplotlib.text.Text)]
        assert label in texts, texts
    plt.close("all")


def test_a_file_is_drawn_under_the_name_of_its_corpus(tmp_path):
    file = tmp_path / "facts.jsonl"
    file.write_text('{"question": "Who leads the Lantern Choir?", "answer": "Velmis Marlowe"}\n')
    named = [make_config(figures.FiguresConfig, dataset=str(file), model=model).dataset for model in ("lab-m", "HuggingFaceTB/SmolLM2-135M-Instruct")]
    assert named == [make_config(nll.NllConfig, dataset=str(file), model="lab-m").dataset, make_config(figures.FiguresConfig, dataset=named[1]).dataset]
    assert named[0] != named[1], "a lab model is asked in its box"
    assert make_config(figures.FiguresConfig, dataset="of-a-cube").dataset == "of-a-cube"


def test_analyses_that_were_made_are_drawn(own_runs):
    "The CDFs of the targets that were scored, of the model that is asked for alone."
    config = figures.FiguresConfig(model="lab-s")
    assert figures.analysis_figures(config) == {}
    nll.run(model="lab-s")
    drawn = figures.analysis_figures(config)
    assert list(drawn) == ["nll-cdf"] and "SFT, N=" in drawn["nll-cdf"].axes[0].get_legend().get_texts()[0].get_text()
    assert figures.analysis_figures(figures.FiguresConfig()) == {}


def test_new_responses_since_errors_ran_are_reported(tmp_path, capsys, own_runs):
    from made_up import write_run

    config = figures.FiguresConfig(model="lab-s")
    write_run(tmp_path, "kgfact-small", "sft", [0, 9])
    assert figures.analysis_figures(config) == {} and not capsys.readouterr().out, "errors has not run"
    errors.run(model="lab-s")
    capsys.readouterr()
    assert list(figures.analysis_figures(config)) == ["errors", "errors-alone"] and not capsys.readouterr().out
    write_run(tmp_path, "kgfact-small", "mixsd-0.3", [0, 9])
    assert figures.analysis_figures(config) == {}
    assert capsys.readouterr().out == "errors.ipynb has not seen the latest runs; run it again to draw errors*\n"


@pytest.fixture(autouse=True)
def closed():
    yield
    plt.close("all")


def plugin_cube(dataset, base=True):
    suites = INVENTED | {s.name: dict(column=s.column, role=s.role) for s in (RIDDLES, REVERSED)}
    kinds = ["base"] * base + ["sft", "toy-r8", "edit"]
    runs = [invent_result(kind, dataset=dataset, benchmarks=suites) for kind in kinds]
    return cube_of({f"run-{k}": run.to_dataset() for k, run in enumerate(runs)})


def labels_of(fig):
    return {text.get_text() for legend in fig.legends for text in legend.get_texts()}


@pytest.mark.parametrize("dataset", ["kgfact-small", "mine"])
def test_what_a_plugin_declares_is_in_the_summary(dataset, plugin):
    cube = plugin_cube(dataset)
    assert cube["recipe"].values.tolist() == ["base", "edit", "sft", "toy-r8"] and not len(missing_runs(cube))
    assert cube["lr"].sel(lr=0).item() == 0 and cube.accuracy.sel(recipe="edit", lr=0).notnull().any()
    table = summary_table(cube)
    assert table["recipe"].tolist() == ["base", "sft", "toy-r8", "edit"], "in the order of the declarations"
    assert {"riddles (N=100)", "reversed (N=100)"} <= {*table} and "Avg (N=600)" in table
    held_out = [b for b in cube.benchmark.values if cube.role.sel(benchmark=b) == "held-out"]
    cell = {"recipe": "toy-r8", "step": 100, "lr": 1e-3}
    assert len(held_out) == 6 and np.isclose(held_out_average(cube).sel(cell).item(), cube.accuracy.sel(cell | dict(benchmark=held_out)).mean())


@functools.cache
def plugin_sources(dataset, source): return dict(runs=collapse_source(plugin_cube(dataset))) | (load_sources("paper") if source == "both" else {})


@pytest.mark.parametrize("source", ["runs", "both"])
@pytest.mark.parametrize("dataset", ["kgfact-small", "mine"])
def test_what_a_plugin_declares_is_in_every_figure(source, dataset, plugin):
    sources = plugin_sources(dataset, source)
    figures = run_figures(select_part(sources["runs"].cube, dataset, "lab-m")) | shared_figures(sources, dataset)
    assert {"tradeoff", "tradeoff-world", "frontier", "chosen"} <= {*figures}
    for name in ("tradeoff", "tradeoff-world", "frontier"): assert labels_of(figures[name]) == {"SFT", "Toy (rank 8)", "Edit", "Base"}
    assert {"SFT", "Toy (rank 8)", "Edit", "Base"} <= labels_of(figures["chosen"])
    for name, fig in figures.items():
        colours = {matplotlib.colors.to_hex(c) for ax in fig.axes for points in ax.collections for c in points.get_facecolor()}
        assert name in ("high-nll", "displacement-paper") or {TOY.colour, EDIT.colour} <= colours, name
        assert "#000000" not in colours


@pytest.mark.parametrize("source", ["runs", "both"])
@pytest.mark.parametrize("dataset", ["kgfact-small", "mine"])
def test_what_a_plugin_declares_is_in_every_table_of_its_corpus(source, dataset, plugin):
    sources = plugin_sources(dataset, source)
    names = list_tables(source.cube for source in sources.values())
    assert names == [*TABLES, *(["mine"] if dataset == "mine" else [])]
    sheets = {name: sheet for name in names if (sheet := source_sheet(name, sources))}
    ours = [name for name, sheet in sheets.items() if ("lab-m", "SFT") in sheet.text.index]
    assert ours == [dataset]
    for name in ours:
        text = sheets[name].text
        assert ("lab-m", "Toy (rank 8)") in text.index and ("lab-m", "Edit") in text.index
        for column in (("In-domain test", "reversed"), ("Held-out capability test", "riddles"), ("Held-out capability test", "Avg")):
            assert text.loc[("lab-m", "Toy (rank 8)"), column]
        assert TOY.colour in style_sheet(sheets[name]).to_html() and "riddles" in to_latex(sheets[name])


def test_files_and_variants_have_their_tables_beside_the_declared_corpora(own_runs):
    "The two files have one title, and the variant has that of the corpus that it varies."
    def read(answer):
        (own_runs / "facts.csv").write_text(f"question,answer\nWho is the mayor of Oz?,{answer}\nWhich town is the seat of Oz?,Ulm\n")
        return check_corpus(str(own_runs / "facts.csv"))
    files, variant = [read("Ada Byron"), read("Alan Mathison")], check_corpus("kgfact-small", dict(extract="line"))
    corpora = [*files, variant, "mquake-lab", "kgfact-small"]
    roots = {f"{d}-{m}": invent_result(m, dataset=d).to_dataset() for d in corpora for m in ("base", "sft")}
    source = collapse_source(cube_of(roots))
    assert list_tables([source.cube]) == [*TABLES, *sorted(files)]
    assert [*source_sheet("kgfact-small", dict(runs=source)).text.index.unique(0)] == ["lab-m", f"lab-m ({variant})"]
    for name in files: assert [*source_sheet(name, dict(runs=source)).text.index] == [("lab-m", "Base"), ("lab-m", "SFT")]
    assert {"chosen"} == {*shared_figures(dict(runs=source), files[0])}


def test_two_models_whose_folders_have_one_name_have_their_own_rows():
    models = ["/a/final", "/b/final", "org/other"]
    roots = {f"{model}-{m}-{lr}": invent_result(m, lr=lr, model=model).to_dataset() for model in models for m in ("base", "sft") for lr in (3e-4, 1e-3)}
    cube = cube_of(roots)
    moved = cube.accuracy.mean("benchmark").where((cube.step > 0) & (cube["recipe"] != "base"))
    nll, first, limits = cube.target_nll.max("lr"), dict(part=["first"]), dict(threshold=[5.0, 8.0])
    targets = dict.fromkeys(["above", "share_above"], nll.expand_dims(first | limits)) | dict(nll_n=nll.expand_dims(first))
    targets |= dict(overlap=nll.expand_dims(limits | dict(over=["mean"])), overlap_n=nll.expand_dims(limits))
    source = collapse_source(cube.assign(displacement_sq=moved, alignment_ratio=moved * (1 + cube.lr), **targets))
    level = {"kgfact-small": 0, "displacement": 0, "correlation": 1, "nll-5": 1, "overlap": 1}  # of the rows, on which the models are
    sheets = {name: source_sheet(name, dict(runs=source)).text for name in level}
    for name, text in sheets.items(): assert [*text.index.unique(level[name])] == ["/a/final", "/b/final", "other"], name
    assert [len(text) for text in sheets.values()] == [6, 3, 6, 3, 3]


def test_a_caption_says_how_many_seeds_the_rows_of_its_own_table_are_means_of():
    "MixSD has one seed, another corpus has five, and only one seed of SFT has its displacement."
    runs = [("kgfact-small", "sft", s) for s in range(3)] + [("kgfact-small", "mixsd-0.5", 0)] + [("mquake-lab", "sft", s) for s in range(5)]
    cube = cube_of({f"{d}-{m}-{s}": invent_result(m, dataset=d, seed=s).to_dataset() for d, m, s in runs})
    moved = cube.accuracy.mean("benchmark").where((cube.step > 0) & (cube["recipe"] == "sft") & (cube.seed == 0))
    sources = dict(runs=collapse_source(cube.assign(displacement_sq=moved, alignment_ratio=moved)))
    said = {name: source_sheet(name, sources).notes[-1].partition(";")[0] for name in ("kgfact-small", "mquake", "displacement")}
    assert said == {"kgfact-small": "made-up runs: mean of 1–3 seeds", "mquake": "made-up runs: mean of 5 seeds", "displacement": "made-up runs: mean of 1 seed"}


def test_a_cube_without_a_run_of_the_base_model_is_drawn(plugin):
    "The base model is step 0 of every training run."
    source = collapse_source(plugin_cube("kgfact-small", base=False))
    xr.testing.assert_equal(source.table, collapse_source(plugin_cube("kgfact-small")).table)
    figures = run_figures(source.cube) | shared_figures(dict(runs=source), "kgfact-small")
    assert labels_of(figures["frontier"]) == {"SFT", "Toy (rank 8)", "Edit", "Base"}
    assert source_sheet("kgfact-small", dict(runs=source)).recipes == ["base", "sft", "toy-r8", "edit"]


def test_the_legend_of_the_frontier_counts_the_seeds_of_every_panel():
    "Of three seeds of SFT one has no world, which is the first of two panels."
    cube = invent_cube(3)
    whole = (cube["recipe"] != "sft") | (cube.seed < 2) | (cube.benchmark != "world")
    fig = frontier_figure(cube.assign(accuracy=cube.accuracy.where(whole)), ("world", "held-out"))
    assert "SFT (2–3 seeds)" in [text.get_text() for text in fig.legends[0].get_texts()]
    assert "mean of 2–3 seeds" in fig.texts[0].get_text()


def test_the_axis_of_a_figure_has_the_n_of_the_drawn_corpus():
    "Another corpus of the same runs has more items."
    one = collapse_source(cube_of({m: invent_result(m).to_dataset() for m in ("base", "sft")})).table
    many = one.assign(n=one.n * 3).assign_coords(dataset=["kgfunc-lab"])
    labels = [selection_figure(cube).axes[0].get_ylabel() for cube in (one, xr.concat([one, many], "dataset"))]
    assert labels[0] == labels[1] and "N=" in labels[0]


def two_rules(strict, published, recipe="sft", **options):
    "A run in which every benchmark has so many of 100 items right."
    def count(k): return {step: {b: (k, 100) for b in INVENTED} for step in (0, 100)}
    return invent_result(recipe, accuracy=count(strict), published=count(published), **options).to_dataset()


def test_tables_show_the_papers_rule_and_say_so():
    cube = cube_of(dict(base=two_rules(30, 40, "base"), run=two_rules(10, 25)))
    assert (cube.accuracy.sel(recipe="sft").max(), cube.published.sel(recipe="sft").max()) == (0.1, 0.25)
    source = cube, collapse_runs(cube)
    for found in (table_sheet("kgfact-small", dict(runs=source)), table_sheet("kgfact-small", dict(runs=source, paper=(paper_cube(), collapse_runs(paper_cube()))))):
        assert set(found.text.loc[("lab-m", "SFT")]) == {"25.0", ""} and "by the rule of the paper's scores" in found.caption
    assert collapse_runs(cube).average_drop.sel(recipe="sft").item() == pytest.approx(0.15)
    assert average_drop(cube).sel(recipe="sft", step=100).max() == pytest.approx(0.2), "everything else is strict"


def uneven(seeds=3, recipe="sft", kept=1, **options):
    "An invented cube in which a method was trained with fewer seeds than the others."
    cube = invent_cube(seeds, **options)
    return cube.where((cube["recipe"] != recipe) | (cube.seed < kept))


@pytest.mark.parametrize("kept", [1, 2])
def test_a_method_with_fewer_seeds_is_on_the_frontier(kept):
    cube = uneven(kept=kept)
    counts = {"sft": kept, "mixsd-0.3": 3, "mixsd-0.5": 3, "mixsd-0.7": 3}
    assert count_seeds(tradeoff_points(cube)) == counts
    fig = frontier_figure(cube)
    texts, lines = [t.get_text() for t in fig.legends[0].get_texts()], {line.get_label(): line for line in fig.axes[0].lines}
    assert f"SFT ({kept} seed{'s' * (kept > 1)})" in texts and "MixSD (λ=0.3)" in texts
    assert all(len(line.get_xdata()) for line in lines.values()) and f"mean of {kept}–3 seeds" in fig.texts[0].get_text()


def test_a_method_without_any_seed_is_left_out(): assert "sft" not in count_seeds(tradeoff_points(uneven(kept=0)))


def test_a_step_that_one_seed_lacks_has_no_mean():
    cube = invent_cube(2)
    cube = cube.where((cube.seed == 0) | (cube.step != 60) | (cube["recipe"] != "sft"))
    lines = {line.get_label(): line for line in tradeoff_figure(cube, lr=1e-3).axes[0].lines}
    assert len(lines["sft"].get_xdata()) == 3 and len(lines["mixsd-0.3"].get_xdata()) == 4


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


def test_a_result_with_recall_alone_has_a_summary():
    root = invent_result(benchmarks={"recall": INVENTED["recall"]}).to_dataset()
    table = summary_table(root)
    assert "nan" not in table.to_string(na_rep="") and table["recall (N=100)"].item() == 100


def test_no_share_is_printed_as_nan():
    "Validation questions are not asked of the base model."
    suites = INVENTED | dict(validation=dict(column="", role="validation"))
    root = invent_result(benchmarks=suites).to_dataset()
    root = root.where((root.benchmark != "validation") | (root.step > 0))
    assert "nan" not in str(tabulate_accuracies(root, 100))


TWINS = {name: dict(column=suite.column, role=suite.role) for name, suite in SUITES.items() if suite.twin_of and suite.role in ("world", "prefilled")}


def test_twins_are_in_no_average_and_in_no_table_of_the_paper():
    plain, twins = invent_cube(), invent_cube(benchmarks=INVENTED | TWINS)
    assert held_out_average(twins).equals(held_out_average(plain)) and average_drop(twins).equals(average_drop(plain))
    sheets = [table_sheet("kgfact-small", dict(runs=(cube, collapse_runs(cube)))) for cube in (plain, twins)]
    assert sheets[0].text.equals(sheets[1].text)
    columns = [{c.split(" ")[0] for c in summary_table(cube)} for cube in (plain, twins)]
    assert columns[1] - columns[0] == {*TWINS}
    fig = frontier_figure(twins)
    assert [ax.get_ylabel().split(" ")[0] for ax in fig.axes] == ["held-out", "world", "world-prefilled"]


def test_tables_and_figures_do_not_need_what_was_not_asked():
    "Tables show selected checkpoints only, so the others may lack all benchmarks but those of the selection."
    cube = invent_cube(benchmarks=INVENTED | dict(validation=dict(column="", role="validation")))
    mask = cell_mask(cube, select_cells(cube))
    known = mask | cube.benchmark.isin(["recall", "validation"])
    thin = cube.assign({name: cube[name].where(known) for name in ("accuracy", "published", "variance")} | dict(n=cube.n.where(known, 0)))
    assert thin.accuracy.isnull().sum() > cube.accuracy.isnull().sum() and select_cells(thin).equals(select_cells(cube))
    xr.testing.assert_equal(collapse_runs(thin, mask), collapse_runs(cube, mask))
    sheet = lambda cube: accuracy_sheet(collapse_runs(cube, mask), label="", caption="", dataset="KGFact-Small")
    assert repr(sheet(thin)) == repr(sheet(cube))
    for draw in (tradeoff_figure, frontier_figure): assert draw(thin).axes
    assert len(summary_table(thin)) == len(summary_table(cube))


def test_a_suite_without_held_out_benchmarks_leaves_averages_empty(own_runs):
    "Selection needs recall and validation alone, so a cube of such runs has tables, and no average."
    cell = dict(dataset="kgfact-small", model="lab-s", lr=1e-3, seed=0, benchmarks={"recall": dict(column="Train", role="in-domain")})
    trees = {recipe: result_tree(**cell, recipe=recipe, accuracy={0: {"recall": (0, 10)}, 20: {"recall": (5, 10)}}, config="{}")
             for recipe in ("sft", "mixsd-0.3")}
    cube = cube_of({name: tree.to_dataset() for name, tree in trees.items()})
    assert held_out_average(cube).isnull().all() and average_drop(cube).isnull().all()
    assert summary_table(cube).filter(like="Avg").isin([np.nan, ""]).all(axis=None)
    assert not run_figures(cube).keys() & {"frontier"}
    with pytest.raises(ValueError, match="^suite must name benchmarks of what is kept for this figure, as lab or paper do; these runs asked recall$"):
        frontier_figure(cube)

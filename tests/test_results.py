"""The results room: the cube of many runs, its figures across processes, and what a plugin declares in every table and figure."""

import itertools
import json
import os
import shutil
import subprocess
import sys
import warnings
from pathlib import Path

import matplotlib
import matplotlib.pyplot as plt
import netCDF4
import numpy as np
import pandas as pd
import pytest
import xarray as xr
from hypothesis import given, settings
from hypothesis import strategies as st

from mixsd_nb.benchmarks import SUITES as BENCHMARKS
from mixsd_nb.benchmarks import Suite
from mixsd_nb.corpora import CORPORA, Corpus, Schedule, check_corpus
from mixsd_nb.methods import METHODS, TRAINED, Method, compose, current_label, parse_label, recipe_label
from mixsd_nb.results.compatible_settings import check_settings, find_conflicts, group_runs, list_claims
from mixsd_nb.results.committed import committed_folder, read_cube
from mixsd_nb.results.comparison import selection_figure
from mixsd_nb.results.cube import agreeing_runs, cube_of, missing_runs, open_cube
from mixsd_nb.results.demo import BENCHMARKS as INVENTED
from mixsd_nb.results.demo import invent_cube, invent_result
from mixsd_nb.reports.finished import ModelRun, tabulate
from mixsd_nb.results.gallery import collapse_source, load_sources, run_figures, select_part, shared_figures, source_sheet
from mixsd_nb.results.layout import result_tree
from mixsd_nb.results.merge import merge_roots
from mixsd_nb.results.plots import recipe_colour
from mixsd_nb.results.read_results import read_root
from mixsd_nb.runs.schema import RECIPE_COORDS
from mixsd_nb.results.sheets import draw_sheet, style_sheet, to_latex
from mixsd_nb.results.summary import held_out_average, summary_table
from mixsd_nb.results.tables import TABLES, list_tables
from mixsd_nb.results.tradeoff import frontier_figure
from mixsd_nb.lab.versus_plots import frontier_axes_figure
from mixsd_nb.runs import Stage, open_result, write_result

matplotlib.use("Agg")


SUITES = {"recall": "in-domain", "recall-kept": "in-domain", "retrieval": "in-domain", "arithmetic": "held-out",
          "choice": "held-out", "world": "world"}


class Demo(Stage):
    name = "demo"
    dataset: str = "kgfact-small"
    model: str = "lab-m"
    method: str
    lam: float = 0.0
    lr: float = 1e-3
    seed: int = 0
    epochs: int = 20
    steps: tuple[int, ...] = (0, 20, 60, 100)
    suites: tuple[str, ...] = tuple(SUITES)

    @property
    def label(self): return recipe_label(compose(self.method), lam=self.lam)

    def slug(self): return self.method
    def compute(self, run): return training(self)


def write(tree, folder):
    folder.mkdir()
    write_result(tree, folder)


def training(config):
    "A result with different numbers for every configuration."
    rng = np.random.default_rng(int(config.hash(), 16))
    steps = (0,) if config.method == "base" else config.steps
    accuracy = {s: {b: (int(rng.integers(101)), 100) for b in config.suites} for s in steps}
    trained = {} if config.method == "base" else dict(
        targets=dict(target_nll=rng.random(), targets_kept=97, targets_asked=100, target_tokens=30.5),
        training={name: rng.random(100) for name in ("loss", "learning_rate", "grad_norm")})
    benchmarks = {b: dict(column="", role=SUITES[b]) for b in config.suites}
    return result_tree(dataset=config.dataset, model=config.model, recipe=config.label, lr=config.lr,
                       seed=config.seed, accuracy=accuracy, benchmarks=benchmarks,
                       config=json.dumps(json.loads(config.canonical()) | dict(steps=0, suites=0)), **trained)


def twenty():
    "Runs that differ in every dimension; some cells of the grid, one step and one benchmark are missing."
    yield from (Demo(method="base", dataset=d) for d in ("kgfact-small", "kgfact-large"))
    kinds = [dict(method="sft"), dict(method="mixsd", lam=0.3), dict(method="mixsd", lam=0.5)]
    for kind, lr, seed in itertools.product(kinds, (3e-4, 1e-3), (0, 1)): yield Demo(**kind, lr=lr, seed=seed)
    yield Demo(method="sft", model="lab-s")
    yield Demo(method="sft", lr=1e-2, steps=(0, 60))
    yield Demo(method="sft", lr=2e-2, steps=(0, 200))
    yield Demo(method="mixsd", lam=0.9, suites=tuple(SUITES)[:4])
    yield Demo(method="mixsd", lam=1, dataset="kgfact-large")
    yield Demo(method="mixsd", lam=0, seed=7)


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    "A folder with the twenty runs, of which the first by name are the newest."
    folder = tmp_path_factory.mktemp("twenty")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MIXSD_RUNS", str(folder))
        for config in twenty(): config.run()
    for k, path in enumerate(sorted(folder.glob("[!.]*/result.nc"), reverse=True)): os.utime(path, (1.5e9 + k, 1.5e9 + k))
    return folder


@pytest.fixture
def cube(written, tmp_path, monkeypatch):
    "The cube of the twenty runs, which are copied into a folder of the test."
    shutil.copytree(written, tmp_path, dirs_exist_ok=True)
    monkeypatch.setenv("MIXSD_RUNS", str(tmp_path))
    return open_cube()


def bases_of(roots):
    "Step 0 of the most complete run of each corpus, model and seed without a run of the base model, written out by hand."
    known = {(r.dataset.item(), r.model.item(), r.seed.item()) for r in roots if r["recipe"] == "base"}
    for root in sorted(roots, key=lambda r: -int(r.accuracy.notnull().sum())):
        cell = (root.dataset.item(), root.model.item(), root.seed.item())
        if cell in known: continue
        known.add(cell)
        at = root[["accuracy", "n", "published", "variance"]].sel(step=[0]).copy(deep=True)
        kept, recall = (list(SUITES).index(name) for name in ("recall-kept", "recall"))
        for values in (v.values for v in at.data_vars.values()): values[..., kept] = values[..., recall]
        at["recipe"], at["lr"], at["lam"] = ["base"], [0.0], ("recipe", [np.nan])
        names = {name: ("recipe", [text]) for name, text in dict(method="base", anchor="", gate="").items()}
        yield at.assign_coords(names | {name: ("recipe", [np.nan]) for name in ("rollouts", "temperature")})


def test_the_cube_is_the_merge_of_twenty_runs(cube, tmp_path):
    roots = [open_result(folder).to_dataset() for folder in sorted(tmp_path.glob("[!.]*"))]
    assert len(roots) == 20
    bases = list(bases_of(roots))
    assert len(bases) == 3
    roots += bases
    oracle = xr.merge(roots, join="outer", compat="no_conflicts", combine_attrs="drop_conflicts")
    xr.testing.assert_equal(cube, oracle)
    for root in roots:
        run = cube.sel({name: root[name] for name in root.dims})
        assert (run.accuracy == root.accuracy).all() and (run.n == root.n).all()


def test_missing_runs_and_the_table_cover_the_grid(cube):
    present = {(c.dataset, c.model, c.label,
                0.0 if c.method == "base" else c.lr, c.seed) for c in twenty()}
    present |= {(c.dataset, c.model, "base", 0.0, c.seed) for c in twenty()}  # step 0 of every run
    grid = {cell for cell in itertools.product(*(cube[d].values.tolist() for d in ("dataset", "model", "recipe", "lr", "seed")))
            if (cell[2] == "base") == (cell[3] == 0)}
    assert set(missing_runs(cube).itertuples(index=False, name=None)) == grid - present
    table = summary_table(cube)
    assert set(table[["dataset", "model", "recipe", "lr", "seed"]].itertuples(index=False, name=None)) == present
    assert len(table) == 23


def test_of_two_runs_of_one_cell_the_more_complete_and_newer_counts(cube, tmp_path):
    config = Demo(method="sft", lr=1e-2, steps=(0, 60))
    twin = config.run().result
    twin["accuracy"] = twin.accuracy.where(twin.accuracy.step != 60, 0.123)
    write(twin, tmp_path / "copy-1")
    at = dict(recipe="sft", lr=1e-2, step=60, dataset="kgfact-small", model="lab-m", seed=0)
    for newer in (True, False):
        os.utime(tmp_path / "copy-1" / "result.nc", (2e9, 2e9) if newer else (1e9, 1e9))
        first, second = ("copy-1", config.folder.name)[::1 if newer else -1]
        with pytest.warns(UserWarning, match=f"accuracy is .* in {first} and .* in {second}.*; {first} counts"): found = open_cube()
        assert (found.accuracy.sel(at) == 0.123).all() == newer
    (tmp_path / "copy-1" / "result.nc").unlink()
    write_result(twin.isel(step=[1]), tmp_path / "copy-1")
    os.utime(tmp_path / "copy-1" / "result.nc", (2e9, 2e9))
    with pytest.warns(UserWarning, match=f"{config.folder.name} counts"): xr.testing.assert_identical(open_cube(), cube)


def test_rounding_is_no_contradiction(cube, tmp_path):
    "Two measurements of one checkpoint differ in the last digits."
    for k, factor in enumerate((1, 1 + 1e-9)):
        root = Demo(method="sft", lr=1e-2, steps=(0, 60)).run().root.drop_dims("benchmark").drop_vars(["target_nll"], errors="ignore")
        moved = root.assign(displacement_sq=xr.Variable(("dataset", "model", "recipe", "lr", "seed", "step"), np.full((1, 1, 1, 1, 1, 2), 64.69 * factor), dict(long_name="d", units="1")))
        write(xr.DataTree(moved), tmp_path / f"fisher-{k}")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert np.nanmax(open_cube().displacement_sq) == pytest.approx(64.69)


def test_the_largest_group_of_runs_that_agree_counts(cube, tmp_path):
    "One trial with other epochs does not prevent a figure; it is named, and `where` shows it."
    config = Demo(method="sft", epochs=5, lr=0.5)
    config.run()
    with pytest.warns(UserWarning, match=rf'^shown: 20 training runs with epochs=20; left out.*1 run \({config.folder.name}\).*open_cube\(epochs=5\), or where=\{{"epochs": 5\}} for figures, shows them$'):
        found = open_cube()
    assert config.folder.name in found.attrs["notice"]
    xr.testing.assert_identical(found.drop_attrs(deep=False), cube.drop_attrs(deep=False))
    xr.testing.assert_identical(open_cube(epochs=20), cube)
    assert {0, 0.5} <= set(open_cube(epochs=5)["lr"].values) and 1e-3 not in open_cube(epochs=5)["lr"]
    assert [run.name for run in agreeing_runs(lr=0.5)] == [config.folder.name] and config.folder.name not in [r.name for r in agreeing_runs()]


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(st.sampled_from([5, 20]), st.sampled_from([10, 100]), st.sampled_from(["kgfact-small", "kgfunc-lab"]), st.booleans()), min_size=1, max_size=7))
def test_groups_agree_and_are_complete(kinds):
    "Every run is in a group; two runs of a group agree; a run that is left out contradicts one that is in."
    roots = {f"run-{k}": invent_result("base" if base else "sft", lr=1e-3, seed=k, epochs=epochs, n=n, dataset=dataset).to_dataset()
             for k, (epochs, n, dataset, base) in enumerate(kinds)}
    def agree(a, b):
        (e, n, dataset, base), (f, m, other, other_base) = kinds[int(a[4:])], kinds[int(b[4:])]
        return dataset != other or (n == m and (e == f or base or other_base))
    groups = group_runs(roots)
    assert set().union(*(g.roots for g in groups)) == {*roots}
    for group in groups:
        assert all(agree(a, b) for a in group.roots for b in group.roots) and {*group.roots, *group.others} == {*roots}
        assert all(any(not agree(a, b) for b in group.roots) for a in group.others)
        check_settings(group.roots)


def test_runs_of_another_corpus_contradict_no_figure(cube):
    "The corpus of a figure decides; of the others, the runs that agree with each other are in the tables."
    for lr, epochs in ((1e-3, 5), (3e-4, 20), (1e-4, 20)): Demo(method="sft", dataset="kgfunc-lab", lr=lr, epochs=epochs).run()
    with pytest.warns(UserWarning, match="left out, because settings differ: 1 run"):
        found = load_sources("runs", cell=("kgfact-small", "lab-m"))["runs"].cube
    ours = found.sel(dataset=cube.dataset, lr=cube.lr)
    xr.testing.assert_equal(ours, cube)
    part = select_part(load_sources("runs", cell=("kgfunc-lab", "lab-m"), epochs=5)["runs"].cube, "kgfunc-lab", "lab-m")
    assert (part.lr.values.tolist(), part.seed.values.tolist()) == ([0, 1e-3], [0]), "only what its own runs have"
    with pytest.warns(UserWarning, match="epochs=20; left out"): found = load_sources("runs", cell=("kgfunc-lab", "lab-m"))["runs"].cube
    assert select_part(found, "kgfunc-lab", "lab-m").lr.values.tolist() == [0, 1e-4, 3e-4]


def test_a_setting_that_no_run_has_is_named(cube):
    for mistake, message in {"epocs": "unknown setting epocs; did you mean epochs?", "where": "unknown setting where; the runs have .*, epochs, .*"}.items():
        with pytest.raises(ValueError, match=f"^{message}$".replace("?$", "[?]$")): open_cube(**{mistake: 30})


def test_given_runs_become_the_same_cube(cube):
    "As runs, as folders and as roots; none at all is an error."
    runs = [config.run() for config in twenty()]
    for given in (runs, [run.folder for run in runs], {run.name: run.root for run in runs}):
        xr.testing.assert_identical(cube_of(given), cube)
    with pytest.raises(FileNotFoundError, match="at least one finished run"): cube_of([])


def test_every_number_of_the_committed_cubes_is_there_under_the_names_of_today():
    "As `xr.open_dataset` reads it, but for the names; a label is one that its own parts give."
    for path in committed_folder().glob("*.nc"):
        with xr.open_dataset(path) as file: stored = file.load()
        cube, dim = read_cube(path), "method" if "method" in stored.dims else "recipe"
        assert cube.recipe.values.tolist() == [current_label(label) for label in stored[dim].values.tolist()] and cube.indexes["recipe"].is_unique
        for name in set(stored.variables) - {"method", "recipe"}:
            one, other = stored[name].variable, cube[name].variable
            assert other.dims == tuple("recipe" if d == dim else d for d in one.dims) and one.attrs == other.attrs
            np.testing.assert_array_equal(one.values, other.values)
        assert {*cube.variables} == {*stored.variables, "recipe", *RECIPE_COORDS}
        for label in cube.recipe.values.tolist():
            recipe, values = parse_label(label)
            assert label == recipe_label(recipe, **values) and cube["method"].sel(recipe=label) == recipe.method.name


def make_earlier(tree, label, config):
    "A result in the form of earlier versions: the dimension `method`, labels of their own, no anchor and no gate."
    root = tree.to_dataset().drop_vars(["method", "anchor", "gate"]).rename(recipe="method").assign_coords(method=[label])
    root.coords["method"].attrs.update(long_name="method", units="1")
    return xr.DataTree.from_dict({"/": root.assign_attrs(config=json.dumps(config)), "/training": tree["training"].to_dataset()})


def test_a_run_of_an_earlier_version_joins_those_of_today(tmp_path):
    "Its label, title, table and settings are those of a run of today; another value of an option is noticed."
    shared = dict(dataset="kgfact-small", model="lab-m", lr=1e-3, epochs=20, n=100)
    options = dict(strength=0.1, text_count=32)
    configs = [shared | dict(method="ewc", lora=0, seed=0, options=options),
               shared | dict(method="sft", anchor="ewc", gate="", seed=1, options=options | dict(texts=""))]
    one, two = (invent_result("sft+ewc-0.1", seed=seed) for seed in (0, 1))
    for name, tree, config in (("train-old", make_earlier(one, "ewc-0.1", configs[0]), configs[0]), ("train-new", two, configs[1])):
        tree.attrs["config"] = json.dumps(config)
        write(tree, tmp_path / name)
        (tmp_path / name / "run.json").write_text(json.dumps(dict(stage="train", config=config)))
    old, new = ModelRun(tmp_path / "train-old"), ModelRun(tmp_path / "train-new")
    assert old.label == new.label == "sft+ewc-0.1" and old.title == new.title and old.score != old.score
    pd.testing.assert_frame_equal(old.table(), tabulate(one.to_dataset()))
    cube = open_cube(tmp_path)
    assert cube.recipe.values.tolist() == ["base", "sft+ewc-0.1"] and cube.accuracy.sel(recipe="sft+ewc-0.1", lr=1e-3).notnull().all()
    assert cube.anchor.values.tolist() == ["", "ewc"] and not find_conflicts({
        run.name: list_claims(read_root(run.folder / "result.nc")) for run in (old, new)})
    two.attrs["config"] = json.dumps(configs[1] | dict(options=options | dict(text_count=64)))
    write(two, tmp_path / "train-other")
    with pytest.warns(UserWarning, match=r"options\[text_count\] of sft\+ewc"): open_cube(tmp_path)


def test_an_empty_folder_says_what_to_run(tmp_path):
    with pytest.raises(FileNotFoundError, match="no finished training run in .*papermill nbs/train.ipynb"): open_cube(tmp_path)


def test_analyses_join_the_cube(cube, tmp_path):
    "Roots over fewer dimensions, and over one more, equal the merge; a count of another stage keeps away from the runs' own N."
    runs = {folder.name: open_result(folder).to_dataset() for folder in sorted(tmp_path.glob("[!.]*"))}
    words, roots = dict(long_name="value", units="1"), []
    for k, root in enumerate(runs.values()):
        here = root.drop_dims("benchmark")
        here = here.drop_vars(here.data_vars)
        shape = list(here.sizes.values())
        moved = here.assign(displacement_sq=(list(here.sizes), np.full(shape, float(k)), words), n=(list(here.sizes), np.full(shape, 979), words))
        here = here.assign_coords(category=("category", ["format", "genuine"], words))
        errors = here.assign(errors=([*here.sizes], np.random.default_rng(k).integers(9, size=[*shape, 2]), words))
        for stage, found in (("fisher", moved), ("errors", errors)):
            write(xr.DataTree(found.assign_attrs(config=root.attrs["config"])), tmp_path / f"{stage}-{k}")
            roots.append(found.assign_attrs(config=root.attrs["config"]).rename({"n": "fisher_n"} if stage == "fisher" else {}))
    whole = open_cube()
    xr.testing.assert_equal(whole, xr.merge([*runs.values(), *bases_of(list(runs.values())), *roots], join="outer", compat="no_conflicts", combine_attrs="drop_conflicts"))
    assert {*whole.errors.dims} == {"dataset", "model", "recipe", "lr", "seed", "step", "category"} and (whole.n == cube.n).sum() == cube.n.notnull().sum()


@pytest.mark.parametrize("left", ["", "no netCDF", 0.3, 0.9])
def test_a_damaged_result_is_named_and_skipped_on_request(left, cube, tmp_path):
    damaged = Demo(method="sft", lr=1e-2, steps=(0, 60)).folder / "result.nc"
    whole = damaged.read_bytes()
    damaged.write_bytes(left.encode() if isinstance(left, str) else whole[:int(left * len(whole))])
    with pytest.raises(ValueError, match=rf"{damaged} cannot be read .*skip_corrupt=True"): open_cube()
    with pytest.warns(UserWarning, match=f"{damaged} cannot be read .*left out"): rest = open_cube(skip_corrupt=True)
    assert 1e-2 not in rest["lr"] and 1e-2 in cube["lr"]
    assert rest.accuracy.notnull().sum() == cube.accuracy.notnull().sum() - 2 * len(SUITES)


THOUSAND = """
import sys, time
sys.path.insert(0, "")
from memory import peak_gib
from mixsd_nb.results.cube import open_cube
before = time.process_time()
cube = open_cube(sys.argv[1])
print(int(cube.accuracy.notnull().sum()), time.process_time() - before, peak_gib())
"""


@pytest.mark.slow
def test_a_thousand_runs_open_in_ten_seconds_and_a_gigabyte(tmp_path):
    "Time of this process alone, so that others on the machine do not count; memory with all imports."
    for k in range(40):
        config = Demo(method="mixsd", lam=0.3, lr=1e-5 * (1 + k), seed=0)
        training(config).to_netcdf(tmp_path / f"{k}.nc", engine="netcdf4")
    for k, seed in itertools.product(range(40), range(25)):
        folder = tmp_path / "runs" / f"train-{k}-{seed}"
        folder.mkdir(parents=True)
        (folder / "result.nc").write_bytes((tmp_path / f"{k}.nc").read_bytes())
        with netCDF4.Dataset(folder / "result.nc", "a") as file: file["seed"][:] = seed
    seconds = []
    for _ in range(3):  # a busy machine slows a process down
        ran = subprocess.run([sys.executable, "-c", THOUSAND, str(tmp_path / "runs")], cwd=Path(__file__).parent, capture_output=True, text=True, check=True)
        measured, took, gigabytes = map(float, ran.stdout.split())
        assert measured == (1000 * 4 + 25) * len(SUITES) and gigabytes < 1, "with a base for each seed"
        seconds.append(took)
        if took < 10: break
    assert min(seconds) < 10


def test_many_runs_stay_small():
    "Peak memory is that of the cube and one run, not of repeated copies."
    import tracemalloc
    roots = {f"run{k}": training(Demo(method="sft", lr=1e-5 * (1 + k % 25), seed=k // 25)).to_dataset() for k in range(200)}
    tracemalloc.start()
    cube = merge_roots(roots)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert int(cube.accuracy.notnull().sum()) == 200 * 4 * len(SUITES)
    assert peak < 20 * cube.nbytes + 10_000_000


DRAWN = {"frontier", "tradeoff", "tradeoff-world", "chosen", "high-nll", "displacement-paper"}
@pytest.mark.slow
def test_figures_of_equal_data_are_equal_bytes(cube, tmp_path, monkeypatch, capsys):
    "The stage as a module and from code, in two processes and two folders."
    from mixsd_nb import figures
    for name in ("module", "code"): (tmp_path / f".{name}").mkdir()
    environment = os.environ | {"PYTHONHASHSEED": "1", "PYTHONPATH": str(Path(__file__).parents[1])}
    ran = subprocess.run([sys.executable, "-m", "mixsd_nb.figures", "--where", "epochs=20"], cwd=tmp_path / ".module", text=True, check=False,
                         capture_output=True, env=environment)
    assert ran.returncode == 0, ran.stderr
    monkeypatch.chdir(tmp_path / ".code")
    figures.run(where=dict(epochs=20))
    for said in (ran.stdout, capsys.readouterr().out):
        assert "recall (N=100)" in said and said.count("figure: ") == 2 * len(DRAWN) and "12 tables" in said
    module, code = ({p.relative_to(here).as_posix(): p.read_bytes() for p in (here / "figures").rglob("*.*")}
                    for here in (tmp_path / ".module", tmp_path / ".code"))
    assert module == code and len(module) == 2 * len(DRAWN) + 36
    assert {Path(name).stem for name in module if "tables/" not in name} == DRAWN


@pytest.mark.slow
def test_the_papers_numbers_alone_need_no_runs(tmp_path):
    code = "from mixsd_nb import figures; figures.run(source='paper')"
    ran = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, text=True, check=False, capture_output=True,
                         env=os.environ | {"MIXSD_RUNS": str(tmp_path)})
    assert ran.returncode == 0, ran.stderr
    assert len(list((tmp_path / "figures/tables").glob("*-paper.tex"))) == 12
    assert {p.stem for p in (tmp_path / "figures").glob("*.png")} == {f"{name}-paper" for name in ("chosen", "high-nll", "displacement")}


def test_analyses_that_were_made_are_drawn(tmp_path, monkeypatch):
    "The CDFs of the targets that were scored, of the model that is asked for alone."
    from mixsd_nb import figures, nll
    monkeypatch.setenv("MIXSD_RUNS", str(tmp_path))
    config = figures.FiguresConfig(model="lab-s")
    assert figures.analysis_figures(config) == {}
    nll.run(model="lab-s")
    drawn = figures.analysis_figures(config)
    assert list(drawn) == ["nll-cdf"] and "SFT, N=" in drawn["nll-cdf"].axes[0].get_legend().get_texts()[0].get_text()
    assert figures.analysis_figures(figures.FiguresConfig()) == {}


def test_new_responses_since_errors_ran_are_reported(tmp_path, monkeypatch, capsys):
    from made_up import write_run

    from mixsd_nb import errors, figures
    monkeypatch.setenv("MIXSD_RUNS", str(tmp_path))
    config = figures.FiguresConfig(model="lab-s")
    write_run(tmp_path, "kgfact-small", "sft", [0, 9])
    assert figures.analysis_figures(config) == {} and not capsys.readouterr().out, "errors has not run"
    errors.run(model="lab-s")
    capsys.readouterr()
    assert list(figures.analysis_figures(config)) == ["errors", "errors-alone"] and not capsys.readouterr().out
    write_run(tmp_path, "kgfact-small", "mixsd-0.3", [0, 9])
    assert figures.analysis_figures(config) == {}
    assert capsys.readouterr().out == "errors.ipynb has not seen the latest runs; run it again to draw errors*\n"
    plt.close("all")


# What a plugin declares: a method with a setting and a learning rate, one that edits the weights, two benchmarks, a corpus.
TOY = Method("toy", "Toy", "#123456", "*", (*TRAINED, "rank"), label="r{rank:g}", caption="rank {rank:g}")
EDIT = Method("edit", "Edit", "#654321", "X")
RIDDLES = Suite("riddles", "Riddles", "held-out", "plugin:items", "riddles")
REVERSED = Suite("reversed", "Reversed", "in-domain", "plugin:items", "reversed")
MINE = Corpus("mine", "Mine", "plugin:build", Schedule(20, 20, 20))


@pytest.fixture
def plugin():
    declared = [(METHODS, TOY), (METHODS, EDIT), (BENCHMARKS, RIDDLES), (BENCHMARKS, REVERSED), (CORPORA, MINE)]
    for registry, entry in declared: registry.add(entry)
    yield
    for registry, entry in declared: registry.remove(entry.name)


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


@pytest.mark.parametrize("source", ["runs", "both"])
@pytest.mark.parametrize("dataset", ["kgfact-small", "mine"])
def test_what_a_plugin_declares_is_in_every_figure(source, dataset, plugin):
    sources = dict(runs=collapse_source(plugin_cube(dataset))) | (load_sources("paper") if source == "both" else {})
    figures = run_figures(select_part(sources["runs"].cube, dataset, "lab-m")) | shared_figures(sources, dataset)
    assert {"tradeoff", "tradeoff-world", "frontier", "chosen"} <= {*figures}
    for name in ("tradeoff", "tradeoff-world", "frontier"): assert labels_of(figures[name]) == {"SFT", "Toy (rank 8)", "Edit", "Base"}
    assert {"SFT", "Toy (rank 8)", "Edit", "Base"} <= labels_of(figures["chosen"])
    for name, fig in figures.items():
        colours = {matplotlib.colors.to_hex(c) for ax in fig.axes for points in ax.collections for c in points.get_facecolor()}
        assert name in ("high-nll", "displacement-paper") or {TOY.colour, EDIT.colour} <= colours, name
        assert "#000000" not in colours
    plt.close("all")


@pytest.mark.parametrize("source", ["runs", "both"])
@pytest.mark.parametrize("dataset", ["kgfact-small", "mine"])
def test_what_a_plugin_declares_is_in_every_table_of_its_corpus(source, dataset, plugin):
    sources = dict(runs=collapse_source(plugin_cube(dataset))) | (load_sources("paper") if source == "both" else {})
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
        draw_sheet(sheets[name])
    plt.close("all")


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
    plt.close("all")


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
    plt.close("all")


def test_the_legend_of_the_frontier_counts_the_seeds_of_every_panel():
    "Of three seeds of SFT one has no world, which is the first of two panels."
    cube = invent_cube(3)
    whole = (cube["recipe"] != "sft") | (cube.seed < 2) | (cube.benchmark != "world")
    fig = frontier_figure(cube.assign(accuracy=cube.accuracy.where(whole)), ("world", "held-out"))
    assert "SFT (2–3 seeds)" in [text.get_text() for text in fig.legends[0].get_texts()]
    assert "mean of 2–3 seeds" in fig.texts[0].get_text()
    plt.close("all")


def test_the_dots_of_a_frontier_are_the_means_of_its_line():
    "Two of three seeds lack a setting that the seed that chooses has, so it is neither on the line nor a dot."
    cube = invent_cube(3)
    lacks = (cube["recipe"] == "sft") & (cube.seed > 0) & (cube.lr == 3e-4) & (cube.step == 100)
    figure = frontier_axes_figure([cube.assign(accuracy=cube.accuracy.where(~lacks)).sel(recipe=["base", "sft"])], ("kgfact-small", "lab-m"))
    sft = 100 * xr.Dataset(dict(x=cube.accuracy.sel(benchmark="recall"), y=held_out_average(cube))).sel(recipe="sft").mean("seed").squeeze(drop=True)
    points = sft.sel(step=[20, 60, 100], lr=[3e-4, 1e-3]).stack(at=("lr", "step")).drop_sel(at=(3e-4, 100))
    expected = sorted(zip(points.x.values.tolist(), points.y.values.tolist()))
    np.testing.assert_allclose(sorted(figure.axes[0].collections[0].get_offsets().tolist()), expected)
    plt.close("all")


def test_the_axis_of_a_figure_has_the_n_of_the_drawn_corpus():
    "Another corpus of the same runs has more items."
    one = collapse_source(cube_of({m: invent_result(m).to_dataset() for m in ("base", "sft")})).table
    many = one.assign(n=one.n * 3).assign_coords(dataset=["kgfunc-lab"])
    labels = [selection_figure(cube).axes[0].get_ylabel() for cube in (one, xr.concat([one, many], "dataset"))]
    assert labels[0] == labels[1] and "N=" in labels[0]
    plt.close("all")


@pytest.mark.parametrize(("kind", "name", "registry", "entry"), [("recipe", "toy-r8", METHODS, TOY), ("dataset", "mine", CORPORA, MINE)])
def test_a_missing_plugin_is_named_before_settings_are_compared(kind, name, registry, entry, plugin):
    suites = INVENTED | {"riddles": dict(column="riddles", role="held-out")}
    runs = {f"run-{n}": invent_result("toy-r8", dataset="mine", benchmarks=suites, n=n).to_dataset() for n in (5, 100)}
    registry.remove(entry.name)
    with pytest.raises(ValueError, match=f"^{kind} {name}, of run run-5, is not declared; name its module in MIXSD_PLUGINS$"): cube_of(runs)


def test_an_undeclared_label_is_one_sentence():
    with pytest.raises(ValueError, match="method must be one of base, .*, got rome"): recipe_colour("rome")


def test_options_of_a_method_agree_within_it(plugin):
    "Two recipes have different options; two runs of one recipe must not, but for what its label says."
    def root(method, lr, **options):
        tree = invent_result(recipe_label(compose(method), rank=options.get("rank", 1)), lr=lr)
        return tree.to_dataset().assign_attrs(config=json.dumps(dict(method=method, options=options)))
    cube_of(dict(a=root("sft", 1e-3), b=root("toy", 1e-3, rank=4, depth=1), c=root("toy", 1e-3, rank=8, depth=1)))
    with pytest.raises(ValueError, match=r"options\[depth\] of toy differs within the cube: 1 in b; 2 in c"):
        cube_of(dict(b=root("toy", 1e-3, rank=4, depth=1), c=root("toy", 1e-3, rank=8, depth=2)))


THREADS = """import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from mixsd_nb.results.committed import read_cube, write_cube
from mixsd_nb.results.read_results import read_root
from mixsd_nb.runs import open_result, write_result
folder, tree = Path(sys.argv[1]), open_result(Path(sys.argv[1]))
cube = write_cube(tree.to_dataset(), folder / "cube.nc")
calls = [lambda: open_result(folder), lambda: read_root(folder / "result.nc"), lambda: read_cube(cube),
         lambda: write_result(tree, folder), lambda: write_cube(tree.to_dataset(), cube)]
with ThreadPoolExecutor(5) as pool:
    for done in [pool.submit(call) for call in calls * 10]: done.result()
print("all read and written")
"""


def test_threads_read_and_write_results_at_the_same_time(tmp_path):
    "The netCDF library has no locks of its own; two threads in it end the process with a segmentation fault."
    write_result(training(Demo(method="sft")), tmp_path)
    done = subprocess.run([sys.executable, "-c", THREADS, str(tmp_path)], capture_output=True, text=True)
    assert done.returncode == 0 and done.stdout == "all read and written\n", done.stderr[-500:]

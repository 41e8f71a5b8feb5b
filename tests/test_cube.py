"The cube of many runs: it is their merge, contradictions are named, and it stays small."

import itertools
import json
import os
import shutil
import subprocess
import sys
import warnings
from pathlib import Path

import netCDF4
import numpy as np
import pytest
from helpers import MINE, TOY
import xarray as xr
from hypothesis import given, settings, strategies as st

from mixsd_nb import figures
from mixsd_nb.corpora import CORPORA
from mixsd_nb.methods import METHODS, compose, recipe_label
from mixsd_nb.results.cube import check_settings, group_runs
from mixsd_nb.results.cube import agreeing_runs, cube_of, missing_runs, open_cube
from mixsd_nb.results.layout import BENCHMARKS as INVENTED, invent_result
from mixsd_nb.results.gallery import load_sources, select_part
from mixsd_nb.results.layout import result_tree
from mixsd_nb.results.cube import merge_roots
from mixsd_nb.results.summary import summary_table
from mixsd_nb.runs import Stage, open_result, write_result

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


@pytest.fixture(scope="module")
def opened(written): return open_cube(written)


@pytest.fixture
def cube(written, opened, own_runs):
    "The cube of the twenty runs, which are copied into a folder of the test."
    shutil.copytree(written, own_runs, dirs_exist_ok=True)
    return opened.copy(deep=True)


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


@pytest.mark.parametrize(("kind", "name", "registry", "entry"), [("recipe", "toy-r8", METHODS, TOY), ("dataset", "mine", CORPORA, MINE)])
def test_a_missing_plugin_is_named_before_settings_are_compared(kind, name, registry, entry, plugin):
    suites = INVENTED | {"riddles": dict(column="riddles", role="held-out")}
    runs = {f"run-{n}": invent_result("toy-r8", dataset="mine", benchmarks=suites, n=n).to_dataset() for n in (5, 100)}
    registry.remove(entry.name)
    with pytest.raises(ValueError, match=f"^{kind} {name}, of run run-5, is not declared; name its module in MIXSD_PLUGINS$"): cube_of(runs)


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
from mixsd_nb.results.cube import read_cube, write_cube
from mixsd_nb.results.cube import read_root
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

"""The results room across processes: equal bytes, kills at any moment, papermill's parameters, the cube of many runs."""

import itertools
import json
import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import matplotlib
import nbformat
import netCDF4
import numpy as np
import pytest
import xarray as xr

from mixsd_nb.results.cube import merged, missing_runs, open_cube, result_tree, summary_table
from mixsd_nb.results.runs import Config, cached_run, open_result, run_folder

matplotlib.use("Agg")

SCRIPT = """
import os, signal, sys
import numpy as np, xarray as xr
from mixsd_nb.results import runs

class Demo(runs.Config):
    size: int
    k: int = 0

def tree(config):
    words = dict(long_name="value", units="1")
    values = np.random.default_rng(config.k).random(config.size)
    values[::7] = np.nan
    root = xr.Dataset({"x": ("t", values, words)}, {"name": ("t", [f"row {i % 97}" for i in range(config.size)], words)},
                      dict(config=config.canonical()))
    child = xr.Dataset({"y": ("u", values[::2], words)})
    return xr.DataTree.from_dict({"/": root, "/child": child})

def die(*_, **__): os.kill(os.getpid(), signal.SIGKILL)

def run(config): return runs.cached_run("demo", config, lambda folder: tree(config))
"""
MOMENTS = {
    "in compute": "runs.cached_run('demo', Demo(size=2000), die)",
    "half written": """
        write = xr.DataTree.to_netcdf
        def half(self, path, **options):
            write(self, path, **options)
            os.truncate(path, os.path.getsize(path) // 2)
            die()
        xr.DataTree.to_netcdf = half
        run(Demo(size=2000))""",
    "before fsync": """
        write = runs.write_result
        def patched(*a): os.fsync = die; return write(*a)
        runs.write_result = patched
        run(Demo(size=2000))""",
    "before replace": """
        write = runs.write_result
        def patched(*a): os.replace = die; return write(*a)
        runs.write_result = patched
        run(Demo(size=2000))""",
    "after replace": "runs.open_result = die; run(Demo(size=2000))",
    "record half written": "os.replace = die; run(Demo(size=2000))",
}


def start(code, runs, **environment):
    return subprocess.Popen([sys.executable, "-c", SCRIPT + textwrap.dedent(code)], stdout=subprocess.PIPE,
                            stderr=subprocess.PIPE, text=True, env=os.environ | {"MIXSD_RUNS": str(runs)} | environment)


def finish(code, runs, **environment):
    process = start(code, runs, **environment)
    _, said = process.communicate(timeout=60)
    assert process.returncode == 0, said


def results(folder):
    return {path.parent.name: path.read_bytes() for path in folder.glob("*/result.nc")}


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    runs = tmp_path_factory.mktemp("runs")
    finish("run(Demo(size=2000))", runs)
    return results(runs)


def test_equal_data_are_equal_bytes(undisturbed, tmp_path):
    "Later, with another hash seed, and with memory that malloc fills with garbage."
    time.sleep(1.1)
    finish("run(Demo(size=2000))", tmp_path, PYTHONHASHSEED="7", MALLOC_PERTURB_="165", TZ="Asia/Tokyo")
    assert results(tmp_path) == undisturbed


@pytest.mark.parametrize("moment", MOMENTS)
def test_a_kill_leaves_all_or_nothing(moment, undisturbed, tmp_path):
    process = start(MOMENTS[moment], tmp_path)
    _, said = process.communicate(timeout=60)
    assert process.returncode == -signal.SIGKILL, said
    assert results(tmp_path) == (undisturbed if moment == "after replace" else {})
    finish("run(Demo(size=2000))", tmp_path)
    assert results(tmp_path) == undisturbed


def test_kills_at_any_moment(tmp_path):
    "A process that writes run after run is killed from outside; whatever it left is whole and equals a second making."
    code = """
        for k in range(10_000):
            run(Demo(size=20_000, k=k))
            print(k, flush=True)"""
    for done, delay in ((0, 0.02), (3, 0.005), (6, 0.05)):
        process = start(code, tmp_path / "a")
        while int(process.stdout.readline()) < done: pass
        time.sleep(delay)
        process.send_signal(signal.SIGKILL)
        process.communicate()
    left = results(tmp_path / "a")
    for folder in (tmp_path / "a").glob("*/"):
        assert (folder / "result.nc").exists() <= (len(open_result(folder)["child"].u) == 10_000 if folder.name in left else True)
    finish(f"for k in range({len(left) + 1}): run(Demo(size=20_000, k=k))", tmp_path / "b")
    again = results(tmp_path / "b")
    assert left and left.items() <= again.items()


def test_force_begins_again_and_a_kill_does_not_hide_it(tmp_path):
    finish("run(Demo(size=5))", tmp_path)
    folder, = tmp_path.glob("[!.]*")
    (folder / "checkpoint").write_text("of the first run")
    process = start("runs.cached_run('demo', Demo(size=5), die, force=True)", tmp_path)
    assert process.wait(60) == -signal.SIGKILL
    assert sorted(p.name for p in tmp_path.rglob("[!.]*")) == [folder.name, "run.json"]


def notebook(path):
    "A stage in small: the cells that every stage notebook has."
    cells = ["from mixsd_nb.results.runs import Config, notebook_config\nfrom pydantic import Field",
             "class Demo(Config):\n    lam: float = Field(0.5, ge=0, le=1)\n    model: str = 'lab-m'",
             "before = set(globals())", "lam: float = 0.5  # share\nmodel: str = 'lab-m'  # model",
             "config = notebook_config(Demo, before, globals())", "print('CONFIG', config.canonical())"]
    nb = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(c) for c in cells],
                                  metadata=dict(kernelspec=dict(name="python3", display_name="python3", language="python")))
    nb.cells[3].metadata["tags"] = ["parameters"]
    nbformat.write(nb, path)


@pytest.mark.parametrize(("flags", "sentence"), [
    (["-p", "lam", "1", "-p", "model", "8"], None),
    (["-p", "lamb", "0.9"], "unknown parameter lamb; did you mean lam?"),
    (["-p", "lam", "1.5"], "lam is 1.5; allowed are numbers from 0 to 1"),
])
def test_papermill_parameters(flags, sentence, tmp_path):
    notebook(tmp_path / "stage.ipynb")
    command = [sys.executable, "-m", "papermill", "--no-progress-bar", "stage.ipynb", "out.ipynb", *flags]
    ran = subprocess.run(command, check=False, cwd=tmp_path, capture_output=True, text=True, timeout=120)
    if sentence:
        assert ran.returncode != 0 and [line for line in ran.stderr.splitlines() if line.strip()][-1] == sentence
    else:
        assert ran.returncode == 0, ran.stderr
        assert r'CONFIG {\"lam\": 1.0, \"model\": \"8\"}' in (tmp_path / "out.ipynb").read_text()


SUITES = {"recall": "in-domain", "recall-kept": "in-domain", "retrieval": "in-domain", "arithmetic": "held-out",
          "choice": "held-out", "world": "world"}


class Demo(Config):
    dataset: str = "kgfact-small"
    model: str = "lab-m"
    method: str
    lam: float = 0.0
    lr: float = 1e-3
    seed: int = 0
    epochs: int = 20
    steps: tuple[int, ...] = (0, 20, 60, 100)
    suites: tuple[str, ...] = tuple(SUITES)


def training(config):
    "A result with numbers of its own for every configuration."
    rng = np.random.default_rng(int(config.hash(), 16))
    steps = (0,) if config.method == "base" else config.steps
    accuracy = {s: {b: (int(rng.integers(101)), 100) for b in config.suites} for s in steps}
    of_mixsd = dict(rollouts=1, temperature=0.0) if config.method == "mixsd" else {}
    trained = {} if config.method == "base" else dict(
        targets=dict(target_nll=rng.random(), targets_kept=97, targets_asked=100, target_tokens=30.5),
        training={name: rng.random(100) for name in ("loss", "learning_rate", "grad_norm")})
    benchmarks = {b: dict(column="", role=SUITES[b]) for b in config.suites}
    return result_tree(dataset=config.dataset, model=config.model, method=config.method, lam=config.lam, lr=config.lr,
                       seed=config.seed, accuracy=accuracy, benchmarks=benchmarks,
                       config=json.dumps(json.loads(config.canonical()) | dict(steps=0, suites=0)), **of_mixsd, **trained)


def twenty():
    "Runs that differ in every dimension; some cells of the grid, one step and one benchmark are missing."
    yield from (Demo(method="base", dataset=d) for d in ("kgfact-small", "kgfact-large"))
    kinds = [dict(method="sft"), dict(method="mixsd", lam=0.3), dict(method="mixsd", lam=0.5)]
    for kind, lr, seed in itertools.product(kinds, (3e-4, 1e-3), (0, 1)): yield Demo(**kind, lr=lr, seed=seed)
    yield Demo(method="sft", model="lab-l")
    yield Demo(method="sft", lr=1e-2, steps=(0, 60))
    yield Demo(method="sft", lr=2e-2, steps=(0, 200))
    yield Demo(method="mixsd", lam=0.9, suites=tuple(SUITES)[:4])
    yield Demo(method="mixsd", lam=1, dataset="kgfact-large")
    yield Demo(method="mixsd", lam=0, seed=7)


@pytest.fixture
def cube(tmp_path, monkeypatch):
    monkeypatch.setenv("MIXSD_RUNS", str(tmp_path))
    for config in twenty(): cached_run("train", config, lambda folder, config=config: training(config))
    return open_cube()


def test_the_cube_is_the_merge_of_twenty_runs(cube, tmp_path):
    roots = [open_result(folder).to_dataset() for folder in sorted(tmp_path.glob("[!.]*"))]
    assert len(roots) == 20
    oracle = xr.merge(roots, join="outer", compat="no_conflicts", combine_attrs="drop_conflicts")
    xr.testing.assert_identical(cube, oracle)
    for root in roots:
        run = cube.sel({name: root[name] for name in root.dims})
        assert (run.accuracy == root.accuracy).all() and (run.n == root.n).all()


def test_missing_runs_and_the_table_cover_the_grid(cube):
    present = {(c.dataset, c.model, f"mixsd-{c.lam:g}" if c.method == "mixsd" else c.method,
                0.0 if c.method == "base" else c.lr, c.seed) for c in twenty()}
    grid = {cell for cell in itertools.product(*(cube[d].values.tolist() for d in ("dataset", "model", "method", "lr", "seed")))
            if (cell[2] == "base") == (cell[3] == 0)}
    assert set(missing_runs(cube).itertuples(index=False, name=None)) == grid - present
    table = summary_table(cube)
    assert set(table[["dataset", "model", "method", "lr", "seed"]].itertuples(index=False, name=None)) == present
    assert len(table) == 20


def test_a_contradiction_names_both_folders(cube, tmp_path):
    config = Demo(method="sft", lr=1e-2, steps=(0, 60))
    twin = open_result(run_folder("train", config))
    twin["accuracy"] = twin.accuracy.where(twin.accuracy.step != 60, 0.123)
    cached_run("copy", config, lambda folder: twin)
    with pytest.raises(ValueError, match=f"accuracy is .* in copy-{config.hash()} and .* in train-{config.hash()}"): open_cube()


def test_settings_that_are_no_dimensions_agree(cube):
    config = Demo(method="sft", epochs=5, lr=0.5)
    cached_run("train", config, lambda folder: training(config))
    with pytest.raises(ValueError, match=rf"epochs differs within the cube: .*5 in train-{config.hash()}.*epochs="): open_cube()
    xr.testing.assert_identical(open_cube(epochs=20), cube)
    assert set(open_cube(epochs=5)["lr"].values) == {0, 0.5}


def test_an_empty_folder_says_what_to_run(tmp_path):
    with pytest.raises(FileNotFoundError, match="no finished training run in .*papermill nbs/train.ipynb"): open_cube(tmp_path)


def test_analyses_join_the_cube(cube, tmp_path):
    "Roots over fewer dimensions, and over one more, equal the merge; a count of another stage keeps away from the runs' own N."
    runs = {folder.name: open_result(folder).to_dataset() for folder in sorted(tmp_path.glob("[!.]*"))}
    words, roots = dict(long_name="value", units="1"), []
    for k, (name, root) in enumerate(runs.items()):
        here = root.drop_dims("benchmark")
        here = here.drop_vars(here.data_vars)
        shape = list(here.sizes.values())
        moved = here.assign(displacement_sq=(list(here.sizes), np.full(shape, float(k)), words), n=(list(here.sizes), np.full(shape, 979), words))
        here = here.assign_coords(category=("category", ["format", "genuine"], words))
        errors = here.assign(errors=([*here.sizes], np.random.default_rng(k).integers(9, size=[*shape, 2]), words))
        for stage, found in (("fisher", moved), ("errors", errors)):
            config = Demo(method=name, seed=k)
            cached_run(f"{stage}-{name}", config, lambda folder, found=found: xr.DataTree(found.assign_attrs(config=root.attrs["config"])))
            roots.append(found.assign_attrs(config=root.attrs["config"]).rename({"n": "fisher_n"} if stage == "fisher" else {}))
    whole = open_cube()
    xr.testing.assert_identical(whole, xr.merge([*runs.values(), *roots], join="outer", compat="no_conflicts", combine_attrs="drop_conflicts"))
    assert {*whole.errors.dims} == {"dataset", "model", "method", "lr", "seed", "step", "category"} and (whole.n == cube.n).sum() == cube.n.notnull().sum()


@pytest.mark.parametrize("left", ["", "no netCDF", 0.3, 0.9])
def test_a_damaged_result_is_named_and_skipped_on_request(left, cube, tmp_path):
    damaged = run_folder("train", Demo(method="sft", lr=1e-2, steps=(0, 60))) / "result.nc"
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
        assert measured == 1000 * 4 * len(SUITES) and gigabytes < 1
        seconds.append(took)
        if took < 10: break
    assert min(seconds) < 10


def test_many_runs_stay_small():
    "Peak memory is that of the cube and one run, not of repeated copies."
    import tracemalloc
    roots = {f"run{k}": training(Demo(method="sft", lr=1e-5 * (1 + k % 25), seed=k // 25)).to_dataset() for k in range(200)}
    tracemalloc.start()
    cube = merged(roots)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert int(cube.accuracy.notnull().sum()) == 200 * 4 * len(SUITES)
    assert peak < 20 * cube.nbytes + 10_000_000


DRAWN = {"overview", "frontier", "tradeoff", "tradeoff-world", "chosen", "high-nll", "displacement-paper"}
AS_CODE = "from mixsd_nb import figures; figures.run(where=dict(epochs=20))"


def test_figures_of_equal_data_are_equal_bytes(cube, tmp_path):
    "The stage as a module and from code, in two processes and two folders."
    seen = []
    for name, command in (("1", ["-m", "mixsd_nb.figures", "epochs=20"]), ("2", ["-c", AS_CODE])):
        here = tmp_path / f".{name}"
        here.mkdir()
        environment = os.environ | {"PYTHONHASHSEED": name, "PYTHONPATH": str(Path(__file__).parents[1])}
        ran = subprocess.run([sys.executable, *command], cwd=here, text=True, check=False, capture_output=True, env=environment)
        assert ran.returncode == 0, ran.stderr
        assert "recall (N=100)" in ran.stdout and ran.stdout.count("figure: ") == 2 * len(DRAWN) and "12 tables" in ran.stdout
        seen.append({p.relative_to(here).as_posix(): p.read_bytes() for p in (here / "figures").rglob("*.*")})
    assert seen[0] == seen[1] and len(seen[0]) == 2 * len(DRAWN) + 36
    assert {Path(name).stem for name in seen[0] if "tables/" not in name} == DRAWN


@pytest.mark.slow
def test_the_papers_numbers_alone_need_no_runs(tmp_path):
    code = "from mixsd_nb import figures; figures.run(source='paper')"
    ran = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, text=True, check=False, capture_output=True,
                         env=os.environ | {"MIXSD_RUNS": str(tmp_path)})
    assert ran.returncode == 0, ran.stderr
    assert len(list((tmp_path / "figures/tables").glob("*-paper.tex"))) == 12
    assert {p.stem for p in (tmp_path / "figures").glob("*.png")} == {f"{name}-paper" for name in ("overview", "chosen", "high-nll", "displacement")}


BY_TWO = """
import sys, time
import xarray as xr
from mixsd_nb.results.runs import Config, cached_run

def compute(folder):
    with open(sys.argv[1], "a") as file: file.write("computed\\n")
    time.sleep(2)
    return xr.DataTree(xr.Dataset({"x": ((), 1.0, dict(long_name="x", units="1"))}))

assert cached_run("demo", Config(), compute).x == 1
"""


def test_a_run_that_two_processes_want_is_computed_once(tmp_path):
    words = [sys.executable, "-c", BY_TWO, str(tmp_path / "log")]
    both = [subprocess.Popen(words, env=os.environ | {"MIXSD_RUNS": str(tmp_path / "runs")}) for _ in range(2)]
    assert [process.wait(timeout=120) for process in both] == [0, 0]
    assert (tmp_path / "log").read_text() == "computed\n"


def test_analyses_that_were_made_are_drawn(tmp_path, monkeypatch):
    "The CDFs of the targets that were scored, of the model that is asked for alone."
    from mixsd_nb import figures, nll
    monkeypatch.setenv("MIXSD_RUNS", str(tmp_path))
    config = figures.FiguresConfig(model="lab-s")
    assert figures.analysis_figures(config) == {}
    nll.run(model="lab-s")
    drawn = figures.analysis_figures(config)
    assert list(drawn) == ["nll-cdf"] and "sft (N=" in drawn["nll-cdf"].axes[0].get_legend().get_texts()[0].get_text()
    assert figures.analysis_figures(figures.FiguresConfig()) == {}

"""The paper's tables, rendered from the shipped cube, are the paper's own, cell by cell and mark by mark, and committed cubes are what they were.

data/paper_tables.csv was read off the LaTeX source by a parser of its own: table, block, row, and the printed cells,
*best* and _second best_ as the source marks them.
"""

import csv
from pathlib import Path

import numpy as np
import pytest

from mixsd_nb.cluster.grid import list_grids
from mixsd_nb.lab.grids import planned_grid
from mixsd_nb.methods import check_label, label_coordinates, recipe_label
from mixsd_nb.results.cube import committed_folder, is_filled, read_cube, read_cubes
from mixsd_nb.results.layout import invent_cube
from mixsd_nb.results.paper import paper_cube
from mixsd_nb.results.summary import collapse_runs, select_cells
from mixsd_nb.results.summary import average_drop, score_by
from mixsd_nb.results.tables import TABLES, table_sheet
from mixsd_nb.runs.schema import RECIPE_COORDS, RUN_DIMS, recipe_coords
from mixsd_nb.train import TrainConfig

PRINTED = {}
with open(Path(__file__).parent / "data/paper_tables.csv", encoding="utf-8") as file:
    for table, block, row, *cells in csv.reader(file): PRINTED.setdefault(table, []).append((block, row, cells))
MARKS = {"*": "best", "_": "second"}
MARKED = ["kgfact-small", "kgfact-large", "kgfunc", "simpleqa"]  # the source of the others has no marks
NAMES = {"Qwen3-4B-It": "Qwen3-4B-Instruct-2507", "Llama-3.2-1B-It": "Llama-3.2-1B-Instruct", "OPSD-fwdKL": "OPSD", "OPSD-NLL": "OPSD-NLL (n=1, T=0)"}


def name(word): return NAMES.get(word, word.replace("MixSD-KL (λ=0, ", "MixSD-KL ("))


@pytest.fixture(scope="module")
def sheets():
    cube = paper_cube()
    return {table: table_sheet(table, dict(paper=(cube, collapse_runs(cube)))) for table in TABLES}


def test_the_twelve_tables_are_there(sheets):
    assert {sheet.label for sheet in sheets.values()} == set(PRINTED) and len(PRINTED) == 12


@pytest.mark.parametrize("table", TABLES)
def test_cells_are_those_of_the_source(sheets, table):
    sheet = sheets[table]
    printed = {(name(block), name(row)): [cell.strip("*_") for cell in cells] for block, row, cells in PRINTED[sheet.label]}
    rendered = {(block, row): cells.tolist() for (block, row), cells in zip(sheet.text.index, sheet.text.values, strict=True)}
    assert rendered == printed


@pytest.mark.parametrize("table", MARKED)
def test_marks_are_those_of_the_source(sheets, table):
    sheet = sheets[table]
    printed = [[MARKS.get(cell[0], "") for cell in cells] for _, _, cells in PRINTED[sheet.label]]
    assert [tuple(map(name, row)) for *row, _ in PRINTED[sheet.label]] == list(sheet.text.index)
    assert sheet.marks.values.tolist() == printed


def test_the_source_of_the_others_has_no_marks(sheets):
    assert not any(cell[0] in MARKS for table in set(TABLES) - set(MARKED) for *_, cells in PRINTED[sheets[table].label] for cell in cells)


def test_the_correlations_have_two_readings():
    "Over the checkpoints of all learning rates, and of the rate that is selected for each method and seed; both counted one by one."
    cube, dims = invent_cube(2), ("dataset", "model", "recipe", "lr", "seed", "step")
    shape, rng = [cube.sizes[d] for d in dims], np.random.default_rng(0)
    cube = cube.assign({name: (dims, rng.random(shape)) for name in ("displacement_sq", "alignment_ratio")})
    rates = {(row.recipe, row.seed): row.lr for row in select_cells(cube).itertuples()}
    drop = average_drop(score_by(cube, "published")).transpose(*dims)
    points = {"All learning rates": [], "Selected rates": []}
    for at in np.ndindex(*shape):
        label, lr, seed = (cube[d].values[at[dims.index(d)]] for d in ("recipe", "lr", "seed"))
        if label == "base" or np.isnan(drop.values[at]): continue
        point = cube.displacement_sq.values[at], cube.alignment_ratio.values[at], drop.values[at]
        points["All learning rates"].append(point)
        if rates[label, seed] == lr: points["Selected rates"].append(point)
    text = TABLES["correlation"](cube).text
    assert list(text.index) == [("All learning rates", "lab-m"), ("Selected rates", "lab-m")]
    for (_, row), found in zip(text.iterrows(), points.values(), strict=True):
        x, r, y = np.array(found).T
        assert row.tolist() == [str(len(found)), f"{np.corrcoef(x, y)[0, 1]:+.2f}", f"{np.corrcoef(r, y)[0, 1]:+.2f}"]
    both = table_sheet("correlation", dict(runs=(cube, cube), paper=(paper_cube(), paper_cube())))
    assert both.text.index.tolist()[:2] == list(text.index) and both.text.iloc[-1, 0] == "40" and "does not say which" in both.caption


def test_the_papers_correlations_are_not_over_all_rates():
    "A run of the published length saves at least five checkpoints; there are three corpora, four methods and six rates."
    saved = len(TrainConfig(dataset="kgfact-small", method="sft").steps()[1])
    assert saved == 5 and 3 * 4 * 6 * saved == 360 > paper_cube().checkpoints.max()


def test_the_papers_numbers_are_by_its_own_rule():
    cube = paper_cube()
    assert cube.published.equals(cube.accuracy)
    for name in TABLES:
        sheet = table_sheet(name, dict(paper=(cube, collapse_runs(cube))))
        assert ("rule of the paper's scores" in sheet.caption) == (not name.startswith(("nll", "overlap")))


def is_declared(label):
    try: return bool(check_label(label))
    except ValueError: return False


def test_a_committed_cube_has_the_coordinates_of_its_labels():
    "A label is one that its own parts give, or nothing declares it; all cubes of the paper's methods are of the first kind."
    for path in (file for folder in ("lab", "real", "tuning") for file in (committed_folder().parent / folder).glob("*.nc")):
        cube = read_cube(path)
        assert cube.indexes["recipe"].is_unique and {*RECIPE_COORDS} <= {*cube.coords}
        known = [label for label in cube.recipe.values.tolist() if is_declared(label)]
        assert len(known) == cube.sizes["recipe"] or path.parent.name == "tuning"
        for name, values in recipe_coords(map(label_coordinates, known)).items():
            found = cube[name].sel(recipe=known).values
            stored = found == found  # some cubes do not say how many targets a fact has
            np.testing.assert_array_equal(found[stored], values.values[stored])
            assert cube[name].attrs == values.attrs and (stored.all() or name == "rollouts" or np.isnan(values.values[~stored]).all())
        for recipe, numbers in map(check_label, known): assert recipe_label(recipe, **numbers) in known


CUBES = read_cubes(committed_folder())


def test_committed_cubes_are_small_and_have_a_grid():
    files = [*committed_folder().glob("*.nc")]
    assert sum(file.stat().st_size for file in files) < 10e6
    assert {*CUBES} <= {*list_grids()}


@pytest.mark.parametrize("name", CUBES)
def test_a_committed_cube_has_the_runs_of_its_grid_alone(name):
    "The same settings of the grid name every run of the cube; the base model is also measured at step 0 of the others."
    planned = planned_grid(name)
    known = {tuple(row) for row in planned.itertuples(index=False)}
    cube, trained = CUBES[name], CUBES[name].accuracy.notnull().any(["step", "benchmark"]).stack(run=RUN_DIMS)
    runs = [run for run, filled in zip(trained.run.values, trained.values) if filled and run[2] != "base"]
    assert runs and {*runs} <= known
    missing = [row for row in planned[planned["recipe"] != "base"].to_dict("records") if not is_filled(cube, {dim: row[dim] for dim in RUN_DIMS})]
    assert len(missing) == len({k for k in known if k[2] != "base"}) - len(runs)

"The study: its grids, cubes and claims fit together, and what is committed is what the code computes."


import numpy as np
import pytest
import scipy
import xarray as xr

from mixsd_nb.cluster.grid import expand_grid
from mixsd_nb.lab.claims import CLAIMS, OURS, STUDY, VERDICTS, claims_table, compare_recipes, judge_claim, planned_of
from mixsd_nb.lab.findings import findings_table
from mixsd_nb.lab.grids import available_cells, merge_grid, planned_grid, planned_runs, preview_grids, study_grids
from mixsd_nb.lab.paired import estimate_mean
from mixsd_nb.lab.study import main, recompute_cells, run, write_list
from mixsd_nb.lab.versus import At, CubeGroup, Side
from mixsd_nb.results.cube import committed_folder, cube_of, is_filled, read_cube, read_cubes, write_cube
from mixsd_nb.results.layout import invent_cube, invent_result
from mixsd_nb.results.summary import select_cells
from mixsd_nb.runs import load_object, project_root, write_result
from mixsd_nb.runs.schema import DIMS, RUN_DIMS, variable

CUBES = read_cubes(committed_folder())
CASE = "kgfact-small", "lab-m"


def group(*cubes):
    "Invented cubes as one group."
    return CubeGroup(cubes, CASE)


@pytest.fixture(scope="module")
def study(): return run(cubes=str(committed_folder()))


def test_missing_cells_are_listed(study):
    "Every planned training run is in its grid's cube or marked as missing, and a claim counts those that it compares."
    planned = study.planned
    for name in study_grids():
        rows = planned[planned.grid == name]
        assert len(rows) == len(planned_grid(name)), name
        rows, known = rows[rows["recipe"] != "base"], CUBES[name].accuracy.notnull() if name in CUBES else None
        filled = 0 if known is None else int(known.sel(recipe=known["recipe"] != "base").any(["step", "benchmark"]).sum())
        assert filled + rows.missing.sum() == len(rows), name
    table = claims_table({}, CASE, planned=planned.assign(missing=True))
    for name, claim in CLAIMS.items():
        rows = planned_of(claim, CASE, planned)
        assert {*rows["recipe"]} == claim.labels, f"{name} compares recipes that no grid trains"
        assert table.missing[name].startswith(f"{len(rows)} of {len(rows)} runs: " if claim.labels else "the grid" if claim.grid else "")


def test_finished_cells_are_merged(own_runs, tmp_path):
    "A run of the grid is in the cube, a run with another length and an unfinished one are not."
    grid = tmp_path / "study-demo.yaml"
    grid.write_text("notebook: train\nfixed: {dataset: kgfact-small, n: 20, checkpoints: [20, 60]}\n"
                    "axes: {seed: [0, 1], method: [{method: sft}], lr: [3.0e-4, 1.0e-3]}\n")
    first, *_, last = expand_grid(grid).cells
    assert merge_grid(str(grid), tmp_path / "lab") is None
    for cell in (first, last):
        cell.run_folder.mkdir(parents=True)
        lr, seed = cell.parameters["lr"], cell.parameters["seed"]
        write_result(invent_result("sft", lr=lr, seed=seed, n=20), cell.run_folder)
    other = first.run_folder.with_name(first.name[:-10] + "0" * 10)
    other.mkdir()
    write_result(invent_result("sft", seed=5, epochs=40), other)
    merge_grid(str(grid), tmp_path / "lab")
    cube, = read_cubes(tmp_path / "lab").values()
    assert cube.seed.values.tolist() == [0, 1] and "base" in cube["recipe"].values
    assert sum(is_filled(cube, dict(row)) for _, row in planned_runs(expand_grid(grid).cells).iterrows()) == 2
    table = preview_grids([str(grid)])
    assert table.iloc[0].cells == 4 and table.iloc[0].done == 2


@pytest.fixture
def clone(own_runs, monkeypatch):
    "A grid of two cells, and a fresh clone whose committed cube has the run of seed 0, with an analysis. Runs are invented."
    grid, lab, computed = own_runs / "study-demo.yaml", own_runs / "clone", []
    grid.write_text("notebook: train\nfixed: {dataset: kgfact-small, n: 20, checkpoints: [20, 60], method: sft, lr: 1.0e-3}\naxes: {seed: [0, 1]}\n")
    first = invent_result("sft", n=20).to_dataset().assign(fisher_trace=("model", [7.0]))
    monkeypatch.setattr("mixsd_nb.lab.grids.committed_folder", lambda: lab)
    write_cube(cube_of({"a": first}).drop_attrs(deep=False), lab / "study-demo.nc")

    def compute(sweep, workers=0):
        for cell in sweep.cells:
            computed.append(seed := cell.parameters["seed"])
            cell.run_folder.mkdir(parents=True, exist_ok=True)
            result = invent_result("sft", seed=seed, n=20)
            result["version"] = variable("version", DIMS, np.full(result.accuracy.shape, f"1.{seed}"))
            write_result(result, cell.run_folder)
    monkeypatch.setattr("mixsd_nb.lab.study.Sweep.run", compute)
    return str(grid), lab / "study-demo.nc", computed


def test_the_study_continues_from_the_committed_cube(clone, own_runs, capsys):
    "Only what the cube lacks is computed, what is merged has both, and what only the committed cube has stays."
    grid, file, computed = clone
    before, table = read_cube(file), preview_grids([grid])
    assert table[["cells", "done", "committed"]].iloc[0].tolist() == [2, 1, 1]
    assert main("run", grid) == 0 and computed == [1]
    both, new = read_cube(own_runs / "lab/study-demo.nc"), invent_result("sft", seed=1, n=20).to_dataset()
    assert both.sel(seed=[0]).equals(before)
    assert both.sel(seed=[1], recipe=["sft"], lr=[1e-3])[list(new)].equals(new)
    assert {"config", "version"}.isdisjoint({*both.attrs, *both.variables}) and both.grid == "study-demo"
    assert main("run", grid) == 0 and computed == [1]
    assert preview_grids([grid]).done.item() == 2


def test_every_claim_has_a_test_that_knows_nothing_without_cubes():
    for claim in CLAIMS.values():
        test = getattr(__import__("mixsd_nb.lab.claims", fromlist=["_"]), claim.test, None) or load_object(claim.test)
        found = test(group(), CASE, **claim.options)
        assert found.verdict in ("not computed yet", "not testable here") and found.number == "", claim.name


def test_a_verdict_follows_the_numbers():
    "The same claims on cubes in which SFT and MixSD have exchanged their names get opposite verdicts."
    cube = invent_cube(seeds=4)
    names = {"sft": "mixsd-0.3", "mixsd-0.3": "sft"}
    swapped = cube.assign_coords({"recipe": [names.get(m, m) for m in cube["recipe"].values]})
    one, other = (claims_table({"invented": group(c)}, CASE).verdict["mixsd-keeps-more-0.3"] for c in (cube, swapped))
    assert (one, other) == ("holds", "opposite")


def test_a_verdict_needs_room():
    "SFT loses a tenth of what it loses in the invented cube, so nothing can win 5 points; its opposite could still be seen."
    cube = invent_cube(seeds=4)
    base = cube.accuracy.sel(recipe="base", lr=0, step=0, drop=True)
    gentle = cube.accuracy.where((cube["recipe"] != "sft") | (cube.role != "held-out") | cube.accuracy.isnull(), 0.9 * base + 0.1 * cube.accuracy)
    found = compare_recipes(group(cube.assign(accuracy=gentle)), CASE, "mixsd-0.5", "sft", at=At(50))
    assert found.verdict == "no room here" and float(found.room) < 5 and found.decided.startswith("SFT has lost only")
    found = compare_recipes(group(cube.assign(accuracy=gentle)), CASE, "mixsd-0.3", "sft", at=At(90))
    assert found.verdict == "opposite" and float(found.room) < 5


def test_a_verdict_is_undecided_after_the_correction_for_many_claims():
    "A noisy difference over three seeds holds alone, and no longer among the others."
    cube = invent_cube(seeds=3)
    noise = xr.DataArray([0.0, 0.03, -0.03], dims="seed", coords=dict(seed=cube.seed))
    noisy = cube.accuracy + noise.where(cube["recipe"] == "mixsd-0.3", 0) * (cube.role == "held-out")
    claim, many = CLAIMS["mixsd-keeps-more-0.3"], {f"copy-{k}": CLAIMS["mixsd-keeps-more-0.3"] for k in range(40)}
    table = lambda claims: claims_table({"invented": group(cube.assign(accuracy=noisy))}, CASE, claims)
    alone, among = table({"one": claim}).iloc[0], table(many).iloc[0]
    assert alone.estimate == among.estimate and among.p > alone.p
    assert (alone.verdict, among.verdict) == ("holds", "undecided") and among["decided by"].endswith("Holm's correction")


def test_style_and_discarded_targets_are_named():
    "In the opened replies and on accepted facts both recipes are equal."
    cube = invent_cube(seeds=3)
    base = cube.accuracy.sel(recipe="base", lr=0, step=0, drop=True)
    twin = lambda name, role, values: values.assign_coords(benchmark=[name], role=("benchmark", [role]))
    opened = twin("world-prefilled", "world", cube.sel(benchmark=["world"]).assign(accuracy=cube.accuracy.sel(benchmark=["world"]) * 0 + base.sel(benchmark="world")))
    found = compare_recipes(group(xr.concat([cube, opened], "benchmark", data_vars="minimal")), CASE, "mixsd-0.5", "sft", "world", At(90))
    assert found.verdict == "holds" and found.decided.startswith("style") and found.opened.startswith("0.0")
    score = twin("validation", "validation", cube.sel(benchmark=["recall"]))
    lost = cube.accuracy.where((cube["recipe"] != "sft") | (cube.benchmark != "recall"), 0.5 * cube.accuracy)
    accepted = twin("recall-kept", "in-domain", cube.sel(benchmark=["recall"]))
    both = xr.concat([cube.assign(accuracy=lost), score, accepted], "benchmark", data_vars="minimal")
    found = compare_recipes(group(both), CASE, "mixsd-0.5", "sft", "recall")
    assert found.verdict == "holds" and found.decided.startswith("discarded targets") and found.accepted.startswith("0.0")


def test_a_recipe_retains_what_it_does_not_lose(monkeypatch):
    "Of two recipes one loses much, and the other one has the held-out accuracies of the base model."
    monkeypatch.setattr(CubeGroup, "score", lambda group, case: "recall")
    cube = invent_cube(seeds=4)
    base = cube.accuracy.sel(recipe="base", lr=0, step=0, drop=True)
    lost = group(cube.assign(accuracy=cube.accuracy.where((cube["recipe"] != "mixsd-0.3") | cube.accuracy.isnull() | (cube.benchmark == "recall"), base)))
    verdicts = {label: [compare_recipes(lost, CASE, "base", label).verdict, compare_recipes(lost, CASE, label, "base", equal=True).verdict]
                for label in ("sft", "mixsd-0.3")}
    assert verdicts == {"sft": ["holds", "opposite"], "mixsd-0.3": ["equivalent", "holds"]}


def test_a_seed_that_one_recipe_has_not_is_left_out_at_selected_checkpoints():
    "Half a grid is finished: five seeds of ten, or a recipe that another cube has with more seeds."
    cube, sides = CUBES["study-1-frontier"], (Side(*CASE, "mixsd-0.3"), Side(*CASE, "sft"))
    compare = lambda *cubes: CubeGroup(cubes, CASE).compare(*sides, at=At(ties="smallest"))
    few, whole = compare(cube.where((cube["recipe"] != "mixsd-0.3") | (cube.seed < 5))), compare(cube)
    assert (few.difference.n, whole.difference.n) == (5, 10)
    assert few.first == pytest.approx(whole.first[:5]) and few.second == pytest.approx(whole.second[:5])
    more = compare(cube.isel(seed=slice(5)), cube.sel(recipe=["base", "sft"]))
    assert more.first == pytest.approx(whole.first[:5]) and more.second == pytest.approx(whole.second[:5])


def small_cube(kept, seeds=4, rates=(1.4e-3,), step=100):
    "A cube of what is kept, by corpus and recipe a dictionary of benchmarks; a list has a value for each rate. Seeds vary by a point."
    roles = {"recall": "in-domain", "recall-reworded": "in-domain", "validation": "validation", "choice": "held-out", "choice-prefilled": "prefilled", "world": "world"}
    names = [*dict.fromkeys(name for values in kept.values() for name in values)]
    coords = dict(dataset=[*dict.fromkeys(d for d, _ in kept)], model=["lab-m"], recipe=["base", *dict.fromkeys(m for _, m in kept)],
                  lr=[0.0, *rates], seed=[*range(seeds)], step=[0, step], benchmark=names)
    accuracy = xr.DataArray(np.nan, coords, [*coords])
    wave = xr.DataArray([0.01 * (-1) ** seed for seed in range(seeds)], dict(seed=[*range(seeds)]))
    for name in names: accuracy.loc[dict(recipe="base", lr=0, step=0, benchmark=name)] = 0.0 if roles.get(name, "")[:2] in ("in", "va") else 1.0
    for (dataset, label), values in kept.items():
        for name, value in values.items():
            for lr, share in zip(rates, value if isinstance(value, list) else [value] * len(rates)):
                accuracy.loc[dict(dataset=dataset, recipe=label, lr=lr, step=step, benchmark=name)] = share + wave * (name not in ("recall", "validation"))
    cube = xr.Dataset(dict(accuracy=accuracy, n=xr.full_like(accuracy, 100)))
    return cube.assign_coords(role=("benchmark", [roles.get(name, "probe") for name in names]), column=("benchmark", names))


def judge(names, groups):
    "The verdict of each claim, from cubes by group."
    groups = {name: group(*(cubes if isinstance(cubes, list) else [cubes])) for name, cubes in groups.items()}
    return {name: judge_claim(CLAIMS[name], groups, CASE)["verdict"] for name in names}


VOICED = {"sft": "answer", "mixsd-0": "record", "mixsd-0.5": "memory", "opsd-n8-t1": "memory"}  # recipe -> the voice that it trains in


@pytest.mark.parametrize("own, other, seen", [(0.6, 0.9, "holds"), (0.9, 0.6, "opposite")], ids=["own", "other"])
def test_a_voice_that_is_trained_can_be_lost_or_kept(own, other, seen):
    "Each recipe keeps one share of the world in the voice that it trains in, and another share in all other voices."
    def values(label): return {"recall": 0.9, "validation": 0.9} | {f"world-{v}": own if v == VOICED[label] else other for v in ("answer", "record", "memory")}
    cube = small_cube({("kgfact-small", label): values(label) for label in VOICED}, rates=(3e-4,))
    opposite = {"holds": "opposite", "opposite": "holds"}[seen]
    expected = {"voice-answer": seen, "voice-memory": opposite, "voice-record": "equivalent", "voice-own": seen, "voice-own-record": seen, "voice-opsd": seen}
    assert judge(expected, {"study-voices": cube}) == expected
    assert {*judge(expected, {"study-voices": cube.isel(seed=[0])}).values()} == {*judge(expected, {}).values()} == {"not computed yet"}
    without = judge(expected, {"study-voices": cube.sel(recipe=["base", "sft", "mixsd-0.5", "mixsd-0"])})
    assert without == expected | {"voice-opsd": "not computed yet"}
    one = values("sft") | {f"world-{v}": 0.8 for v in ("answer", "record", "memory")}
    half = small_cube({("kgfact-small", label): one if label == "sft" else values(label) for label in VOICED}, rates=(3e-4,))
    assert judge(["voice-own"], {"study-voices": half}) == {"voice-own": "undecided"}, "one of two recipes is not enough"


@pytest.mark.parametrize("styled, seen", [(True, "holds"), (False, "opposite")], ids=["format", "content"])
def test_forgetting_of_known_facts_can_be_of_format_or_not(styled, seen):
    "Canonical targets cost the free replies and new facts the opened ones, or the other way round."
    def values(costs_free, costs_opened): return {"recall": 0.9, "recall-reworded": 0.9, "validation": 0.9, "choice": 0.5 if costs_free else 0.98, "choice-prefilled": 0.7 if costs_opened else 0.98}
    new = small_cube({("kgfact-small", "sft"): values(styled, styled), ("kgfact-small", "own-words"): values(not styled, styled)})
    known = small_cube({("known-lab", "sft"): values(styled, not styled)})
    own = small_cube({("known-lab-31dcd82a", "sft"): values(not styled, not styled)})
    groups, expected = {STUDY: [new, known], "study-known-own": own}, {"format": seen, "content": seen, "known-own": seen}
    assert judge(expected, groups) == expected
    assert {*judge(expected, {STUDY: [new, known]}).values()} == {*judge(expected, {"study-known-own": own}).values()} == {"not computed yet"}
    assert {*planned_grid("study-known-own").dataset} == {"known-lab-31dcd82a"}


@pytest.mark.parametrize("broken, seen", [(0.2, "holds"), (0.97, "opposite")])
def test_the_largest_rate_can_decide_the_papers_comparison(broken, seen):
    "SFT is selected at the larger of two rates; MixSD's are equal in validation, and the rule for ties decides between 90 and 45%."
    def values(score, kept): return {"recall": [0.99, 0.99], "validation": score, "choice": kept}
    cube = small_cube({("kgfact-small", "sft"): values([0.9, 0.95], [0.9, broken]), ("kgfact-small", "mixsd-0.3"): values([0.9, 0.9], [0.85, 0.45])}, rates=(1e-3, 3e-3))
    expected = {"paper-rate": seen, "paper-ties": seen}
    assert judge(expected, {"study-largest-rate": cube}) == expected
    two = group(cube.isel(seed=[0, 1])).compare(Side(*CASE, "mixsd-0.3"), Side(*CASE, "sft"), "choice", At(ties="smallest"))
    values = two.first - two.second + np.array([1.0, -1.0])
    assert estimate_mean(values)[1:3] == pytest.approx(scipy.stats.ttest_1samp(values, 0).confidence_interval(0.95)), "two seeds have one degree of freedom"
    assert judge(expected, {"study-largest-rate": cube, "frontier-lab": cube.isel(seed=[0])}) == expected, "the grid with more seeds decides"
    assert judge(expected, {"study-largest-rate": cube.isel(seed=[0]), "frontier-lab": cube}) == expected, "a grid with one seed decides nothing"
    assert {*judge(expected, {STUDY: cube}).values()} == {"not computed yet"}


@pytest.fixture(scope="module")
def lines(study): return study.lines()


def test_lines_of_the_front_page_hold_the_numbers_of_the_cubes(study, lines):
    planned, claims = study.planned, study.claims()
    assert len(lines) == 10 and "million parameters" in lines[0] and f"{planned.missing.sum()} are missing" in lines[0]
    papers, ours = lines[0].split("claims of the paper: ")[1].split("questions that it does not ask: ")
    for part, rows in ((papers, claims[claims.source != OURS]), (ours, claims[claims.source == OURS])):
        counts = rows.verdict.value_counts()
        for verdict in VERDICTS: assert (f"{verdict} ({counts.get(verdict)})" in part) == (verdict in counts)
    shown = [name for name in claims.index if CLAIMS[name].headline]
    assert all(claims.estimate[name] in line and claims.verdict[name] in line for name, line in zip(shown, lines[1:]))
    assert not any("runs missing" in line for line in lines[1:]), "runs of a main claim are missing"


def test_the_guide_has_the_verdict_of_the_committed_cubes(lines):
    "`make verdict` writes it again after the cubes have changed."
    guide = (project_root() / "nbs/guides/findings.md").read_text()
    assert f"\n{write_list(lines)}\n" in guide, "the cubes in papermill_runs/lab have changed: run `make verdict`"


def test_the_front_page_has_the_table_of_the_committed_cubes():
    "`make verdict` writes it again, also when papermill_runs/real gets a cube."
    readme = (project_root() / "README.md").read_text()
    assert f"\n{findings_table()}\n" in readme, "the cubes in papermill_runs have changed: run `make verdict`"


def test_numbers_of_the_front_page_are_those_of_the_cube():
    "The row of SFT, computed here by hand: a mean over seeds of the runs at their selected checkpoints, with Student's interval."
    cube = read_cubes()["study-1-frontier"].sel(recipe="sft", dataset="kgfact-small", model="lab-m")
    rows = select_cells(read_cubes()["study-1-frontier"]).query("recipe == 'sft'")
    values = {word: [100 * cube.accuracy.sel(seed=r.seed, lr=r.lr, step=r.step, benchmark=names).mean().item() for r in rows.itertuples()]
              for word, names in dict(recall="recall", other="recall-reworded", skills=["arithmetic", "equations", "word-problems", "functions", "choice"],
                                      world="world", opened="world-prefilled").items()}
    half = {word: scipy.stats.t.ppf(0.975, len(v) - 1) * np.std(v, ddof=1) / np.sqrt(len(v)) for word, v in values.items()}
    cells = [f"{np.mean(v):.0f} ({max(0, np.mean(v) - half[w]):.0f}–{min(100, np.mean(v) + half[w]):.0f})" for w, v in values.items()]
    assert len(rows) == 10 and f"| SFT | 10 | {' | '.join(cells)} |" in findings_table()


def test_a_changed_number_is_found(monkeypatch):
    "The comparison with recomputed cells, which are read from the cube here, and one of which is changed."
    import mixsd_nb.lab.study as study
    name = next(iter(CUBES))
    read = lambda cell: CUBES[name].sel({dim: [at] for dim, at in zip(RUN_DIMS, planned_runs([cell]).iloc[0])})
    monkeypatch.setattr(study, "_compute", lambda cell, folder: read(cell))
    assert (recompute_cells(name, CUBES[name]).difference == 0).all()
    monkeypatch.setattr(study, "_compute", lambda cell, folder: read(cell) + 0.01)
    assert (recompute_cells(name, CUBES[name]).difference > 0.009).all()


def test_the_trainings_of_the_grids_of_analyses_are_those_of_the_study():
    "None is computed for the analyses alone, and the claim about the Fisher information has all of its methods."
    trained = {cell.hash for cell in expand_grid("_study-trained").cells}
    assert trained <= {cell.hash for name in ("study-1-frontier", "study-4-opsd") for cell in available_cells(name)}
    assert {*CLAIMS["fisher"].options["recipes"]} <= {*planned_runs(expand_grid("_study-trained").cells)["recipe"]}


def test_what_is_kept_without_learning_decides_nothing(monkeypatch):
    monkeypatch.setattr(CubeGroup, "score", lambda group, case: "recall")
    cube = invent_cube(seeds=4)
    compare = lambda accuracy: compare_recipes(group(cube.assign(accuracy=accuracy)), CASE, "mixsd-0.3", "sft", "world")
    idle = cube.accuracy.where(~((cube["recipe"] == "mixsd-0.3") & (cube.benchmark == "recall")) | cube.accuracy.isnull(), 0.0)
    assert compare(cube.accuracy).verdict == "holds" and "learned nothing" not in compare(cube.accuracy).decided
    assert compare(idle).verdict == "not testable here" and "MixSD (λ=0.3) learned nothing, the base model has 0%" in compare(idle).decided

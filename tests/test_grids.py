"Grids: their files, axes over the outputs of other grids, adjustments, and the grids that the package ships."

import json
import math
import os
import re
from pathlib import Path
from typing import ClassVar

import pytest
import xarray as xr
import yaml
from helpers import lines, quick_notebook, small_model
from test_stages import SCALED

from mixsd_nb import generate, nll, train
from mixsd_nb.cluster.grid import GridOutputs, expand_grid, find_notebook, list_grids, make_cell, read_grid
from mixsd_nb.evaluate import EvaluateConfig
from mixsd_nb.evaluation.selection import best_rate
from mixsd_nb.fisher import FisherConfig
from mixsd_nb.generate import GenerateConfig
from mixsd_nb.models.lab import is_lab_model
from mixsd_nb.planning.plan import plan_grid
from mixsd_nb.results.cube import cube_of
from mixsd_nb.results.summary import select_cells
from mixsd_nb.runs import ParameterError, Stage, find_stage, is_runtime, make_config, runs_root, write_json, write_result
from mixsd_nb.sweep import Sweep

ROOT = Path(__file__).resolve().parents[1]


def leave(name, parameters):
    "Write a finished run into a folder of this name, with the files that an axis over runs reads."
    folder = Path(os.environ["MIXSD_RUNS"]) / name
    folder.mkdir(parents=True)
    write_json(folder / "run.json", dict(config=parameters))
    (folder / "targets.parquet").write_bytes(name.encode())
    weights = ROOT / "mixsd_nb/data" / ("lab-s", "lab-m")[len(os.listdir(folder.parent)) % 2]  # neighbours differ
    (folder / "checkpoint-100").symlink_to(weights)
    variable = lambda name, value: ("step", [value], dict(long_name=name, units="1"))
    data = dict(x=variable("x", len(os.listdir(folder.parent))))
    coords = dict(step=variable("step", 20)) | {dim: (dim, [name], dict(long_name=dim, units="1")) for dim in ("dataset", "model", "recipe")}
    write_result(xr.DataTree(xr.Dataset(data, coords, dict(config=json.dumps(parameters)))), folder)


@pytest.mark.parametrize("name", list_grids())
def test_shipped_grids_are_sound(name, monkeypatch, tmp_path):
    "An axis over the outputs of another grid has the finished cells of that grid, and no other run."
    monkeypatch.setenv("MIXSD_RUNS", str(tmp_path / "runs"))
    axes = [axis for axis in read_grid(name)[1].axes.values() if isinstance(axis, GridOutputs)]
    for axis in axes:
        further = needed = [a for source in axis.of for a in read_grid(source)[1].axes.values() if isinstance(a, GridOutputs)]
        while needed:  # the outputs of a grid that needs outputs itself, of which the first one is told
            further, needed = needed, [a for source in needed[0].of for a in read_grid(source)[1].axes.values() if isinstance(a, GridOutputs)]
        if further:
            with pytest.raises(ParameterError, match=f"needs outputs of {further[0].of[0]}, .* none of its .* cells is finished"): Sweep(name)
            return
        sources = [Sweep(source) for source in axis.of]
        count = sum(len(source.cells) for source in sources)
        with pytest.raises(ParameterError, match=f"none of its {count} cells is finished"): Sweep(name)
        if axis.best: return  # another test has runs with scores
        source, = sources
        parameters = [make_config(source.stage, **cell.parameters).model_dump(mode="json") for cell in source.cells]
        for cell, values in zip(source.cells[1:3], parameters[1:3]): leave(cell.name, values)
        leave(f"{source.stage.name}-x-0123456789", parameters[0])
    shipped = Sweep(name)
    assert len(shipped.preview()) == len({cell.hash for cell in shipped.cells}) > 1
    lists = math.prod(len(axis) for axis in read_grid(name)[1].axes.values() if isinstance(axis, list))
    assert len(shipped.cells) == 2 * lists or not axes


def test_files_are_like_files_beside_them(tmp_path, monkeypatch):
    (tmp_path / "below").mkdir()
    (tmp_path / "below/base.yaml").write_text(
        "{notebook: train, fixed: {n: 7}, axes: {lr: [1e-3, 3e-4, 1.0e-4], method: [sft, mixsd]}, "
        "exclude: [{lr: [0.001, 1.0e-4], method: sft}]}")
    (tmp_path / "below/more.yaml").write_text("{like: base.yaml, fixed: {model: lab-s}}")
    (tmp_path / "below/one.yaml").write_text("like: two.yaml")
    (tmp_path / "below/two.yaml").write_text("like: one.yaml")
    monkeypatch.chdir(tmp_path)
    cells = Sweep("below/more.yaml").cells
    values = [(cell.parameters["lr"], cell.parameters["method"]) for cell in cells]
    assert values == [(0.001, "mixsd"), (3e-4, "sft"), (3e-4, "mixsd"), (1e-4, "mixsd")]
    assert {(c.parameters["n"], c.parameters["model"]) for c in cells} == {(7, "lab-s")}
    with pytest.raises(ParameterError, match="is `like` itself"): Sweep("below/one.yaml")


MISTAKES = {
    "notebook: train\nfixed: {lamb: 0.5}": "unknown parameter lamb; did you mean lam?",
    "notebook: train\naxes: {lam: [0.3, 1.5]}": "lam must be between 0 and 1, got 1.5",
    "notebook: train\nresources: {gpu: 1}": "unknown parameter gpu; did you mean gpus?",
    "notebook: train\naxes: {lam: [0.3, 0.5]}\nexclude: [{lam: 0.7}]": "exclude matches no combination of the axes: {'lam': 0.7}",
    "notebook: train\nfixed: {force: true}": "force is not a parameter of a cell",
    "notebook: train\nadjust: [{when: {seed: 0}, resources: {gpu: 1}}]": "unknown parameter gpu; did you mean gpus?",
    "notebook: train\nadjust: [{when: {seed: 0}, resources: 5}]": "adjust must be a list of mappings",
    "notebook: train\nadjust: [{when: {seed: 0}}]": "adjust must be a list of mappings with the keys when, and then or resources",
    "notebook: trian": "stage must be the name of a stage or the file of its notebook, got trian",
    "notebook: no-such/train.ipynb": "got no-such/train.ipynb; there is no no-such/train.ipynb",
    "notebook: train\nfixed: [0.5]": "fixed must be a mapping, got [0.5]",
    "notebook: train\naxes: {lr: 5}": "axis lr must be a list of values or a mapping with the key of, got 5",
    "notebook: train\naxes: {lr: {of: x, fiel: y}}": "unknown parameter fiel; did you mean file?",
    "notebook: train\nexclude: {lam: 1}": "exclude must be a list of mappings, got {'lam': 1}",
    "notebook: train\nresources: {memory: 1e999}": "memory must be a number between 0 and 1e+06, got 1e999",
    "notebook: train\nresources: {partition: on}": "partition must be a string, got True",
    "like: grid.yaml": "grid grid.yaml is `like` itself",
    "like: quick-lap": "did you mean quick-lab?",
    "notebook: [": "grid.yaml",
    "notebook: train\nnotebook: nll": "notebook is given twice",
    "notebook: !!python/name:os.system": "could not determine a constructor",
    "- train": "must be a mapping with the keys like, notebook, fixed, axes, exclude, adjust, resources",
    "": "must be a mapping with the keys like",
}


@pytest.mark.parametrize("text", MISTAKES, ids=lambda text: text[:40])
def test_a_mistake_in_a_grid_is_one_sentence(text, tmp_path, monkeypatch):
    monkeypatch.setenv("MIXSD_RUNS", str(tmp_path / "runs"))
    path = tmp_path / "grid.yaml"
    path.write_text(text)
    with pytest.raises(ParameterError, match="^[^\n]*$") as error: Sweep(path)
    assert MISTAKES[text] in str(error.value) and str(path) in str(error.value) and not (tmp_path / "runs").exists()


def test_a_grid_names_a_stage_or_a_file(tmp_path):
    "A notebook runs the stage that it is named after, in any folder."
    quick_notebook(tmp_path / "generate.ipynb")
    assert find_notebook(str(tmp_path / "generate.ipynb")) == tmp_path / "generate.ipynb"
    assert find_notebook("generate") == ROOT / "nbs/generate.ipynb"
    assert find_stage(str(tmp_path / "generate.ipynb")) is find_stage("generate")


class Following(Stage):
    "A stage whose runs depend on the result of another run."
    name: ClassVar[str] = "following"
    text: str = ""

    def slug(self): return "one"

    def other_results(self): return [runs_root() / "other-one/result.nc"]

    def covers(self, run): return self.other_results()[0].stat().st_size == 1


def test_a_cell_is_asked_again_when_the_result_of_another_run_changes(tmp_path, own_runs):
    "An analysis of a training that was extended is not done, also in the process that has seen it done."
    cell = make_cell(Following, tmp_path / "following.ipynb", {})
    other, = Following().other_results()
    for path in (other, cell.run_folder / "result.nc"):
        path.parent.mkdir(parents=True)
        path.write_text("1")
    assert cell.is_done and cell.is_done
    other.write_text("22")
    os.utime(other, ns=(1, 1))  # another time, whatever the clock's resolution
    assert not cell.is_done


RATES = [1e-5, 1e-4, 3e-3]
GRID = dict(notebook="train", fixed=dict(method="sft", epochs=1, checkpoints=[2], n=4, max_new_tokens=6, task_tokens=6, suite="recall,choice", measure="scores", keep="chosen"),
            axes=dict(lr=RATES))


@pytest.fixture
def two_grids(tmp_path, monkeypatch):
    "Two two_grids, of which the second one asks the suite of the best cell of the first."
    monkeypatch.setenv("MIXSD_RUNS", str(tmp_path / "runs"))
    GRID["fixed"]["model"] = small_model(tmp_path / "tiny", "lab-s", scale=4)
    first, second = tmp_path / "first.yaml", tmp_path / "second.yaml"
    first.write_text(yaml.safe_dump(GRID))
    second.write_text(yaml.safe_dump(dict(notebook="train", fixed=dict(measure="selection", keep="last"), axes=dict(run=dict(of=[str(first)], best="lr")))))
    return first, second


def test_the_suite_is_asked_at_the_best_rate_alone_and_gives_the_same_bytes(two_grids, tmp_path, monkeypatch):
    first, second = two_grids
    with pytest.raises(ParameterError, match="axis run needs outputs of .*first.yaml, but none of its 3 cells is finished"): expand_grid(second)
    assert len(plan_grid(second, "cpu").cells) == 1
    runs = [train.run(**cell.parameters) for cell in expand_grid(first).cells]
    assert all(not run.root.n.sel(benchmark="choice", step=run.best_step).any() and [*run.checkpoints] == [run.best_step] for run in runs)
    assert all(cell.is_done for cell in expand_grid(first).cells)
    cell, = expand_grid(second).cells
    rates = {run.config["lr"]: run.score for run in runs}
    assert cell.parameters["lr"] == best_rate(rates) == select_cells(cube_of(runs)).lr.item()
    assert cell.parameters["measure"] == "selection" and not cell.is_done
    done = train.run(**cell.parameters)
    assert cell.is_done and done.folder == cell.run_folder and done.root.n.sel(benchmark="choice", step=done.best_step).item() > 0
    monkeypatch.setenv("MIXSD_RUNS", str(tmp_path / "other"))
    assert (train.run(**cell.parameters).folder / "result.nc").read_bytes() == (done.folder / "result.nc").read_bytes()


def test_an_unfinished_rate_leaves_its_method_out(two_grids):
    first, second = two_grids
    train.run(**expand_grid(first).cells[0].parameters)
    with pytest.warns(UserWarning, match="the outputs of 1 of the 3 cells"), pytest.raises(ParameterError, match="the grid has no cells"): expand_grid(second)


def test_another_grid_is_looked_up_beside_the_grid_and_then_in_the_current_folder(tmp_path, monkeypatch):
    here, elsewhere = tmp_path / "here", tmp_path / "elsewhere"
    for folder, names in {here: ["both", "here"], elsewhere: ["both", "elsewhere"]}.items():
        folder.mkdir()
        for name in names: (folder / f"{name}.yaml").write_text(yaml.safe_dump(GRID | dict(fixed=dict(model="lab-s"))))
    (elsewhere / "like.yaml").write_text("{notebook: train, axes: {run: {of: [both.yaml, elsewhere.yaml, here.yaml], best: lr}}}")
    (elsewhere / "grid.yaml").write_text("like: like.yaml")
    monkeypatch.chdir(here)
    sources = read_grid("../elsewhere/grid.yaml")[1].axes["run"].of
    assert [Path(name).resolve() for name in sources] == [elsewhere / "both.yaml", elsewhere / "elsewhere.yaml", here / "here.yaml"]
    assert sources[2] == "here.yaml" and read_grid("here.yaml")[0] == "here"


def test_an_adjustment_compares_values_however_they_are_written():
    "YAML reads 1e-3 as a text."
    for lr in ("1e-3", 0.001):
        grid = dict(notebook="train", fixed=dict(lr=lr), axes=dict(seed=[0]), adjust=[dict(when=dict(lr=1e-3), then=dict(epochs=3))])
        assert expand_grid(grid).cells[0].parameters["epochs"] == 3


def test_adjustments_reach_the_cells_that_they_name():
    grid = dict(notebook="train", axes=dict(model=["lab-s", "lab-m"], method=["sft", "opsd"]), adjust=[dict(when=dict(model="lab-m", method=["opsd"]), then=dict(batch_size=7))])
    cells = expand_grid(grid).cells
    assert [cell.parameters.get("batch_size") for cell in cells] == [None, None, None, 7]
    for adjust, text in (([dict(when=dict(modle="lab-m"), then={})], "adjust must have parameters of train, got modle"), ([dict(when={})], "adjust must be a list of mappings with the keys when, and then or resources, got")):
        with pytest.raises(ParameterError, match=text): expand_grid(grid | dict(adjust=adjust))


def test_an_adjustment_sets_the_resources_of_the_cells_whose_parameters_it_sets(tiny, own_runs, tmp_path, monkeypatch):
    "A rule names parameters as the grid does: here a model in a folder, a file of facts, and a value that another rule replaces."
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mymodel").symlink_to(tiny)
    (tmp_path / "facts.csv").write_text("question,answer\nWho is the mayor of Oz?,Ada Byron\n")
    rules = [dict(when={key: value}, then=dict(epochs=3), resources=dict(gpus=2)) for key, value in dict(model="mymodel", dataset="facts.csv", epochs=7).items()]
    (tmp_path / "grid.yaml").write_text(yaml.safe_dump(dict(
        notebook="train", axes=dict(run=[dict(model="lab-s"), dict(model="mymodel"), dict(model="lab-s", dataset="facts.csv"), dict(model="lab-s", epochs=7)]), adjust=rules)))
    grid = expand_grid("grid.yaml")
    assert [cell.parameters.get("epochs") for cell in grid.cells] == [None, 3, 3, 3] and [grid.resources_of(cell).gpus for cell in grid.cells] == [0, 2, 2, 2]
    assert [cell.gpus for cell in plan_grid("grid.yaml", "h100").cells] == [0, 2, 2, 2]


PUBLISHED_MODELS = {"Qwen/Qwen3-1.7B", "Qwen/Qwen3-4B-Instruct-2507", "Qwen/Qwen3-8B"}
TRAINED = ["knowledge-eval-small", "knowledge-eval-large", "knowledge-eval-small-llama1b", "knowledge-eval-small-kl", "simpleqa-eval", "math-op-eval",
           "mquake-full"]  # app-displacement-runs continues the best of these


@pytest.mark.parametrize("name", TRAINED)
def test_the_papers_grids_train_as_published(name):
    "SFT and MixSD train the published span; MixSD on SimpleQA has the targets on which six sets agree, and no other run has."
    cells = [make_config(train.TrainConfig, **cell.parameters) for cell in Sweep(name).cells]
    assert {c.span for c in cells if c.method in ("sft", "mixsd")} <= {"paper"}
    six = dict(model=sorted(PUBLISHED_MODELS), lam=[0.3, 0.5])
    for c in cells:
        agreed = c.method == "mixsd" and c.dataset == "simpleqa"
        assert {k: sorted(v) for k, v in c.options.get("unanimous", {}).items()} == (six if agreed else {})
    assert len({(c.dataset, c.model, c.label, c.lr) for c in cells}) == len(cells), "no cell is trained in two ways"


def test_lab_grids_train_the_labs_span_on_their_own_targets():
    for name in (*TRAINED, "app-displacement-runs"):
        cells = [make_config(train.TrainConfig, **cell.parameters) for cell in Sweep(f"{name}-lab").cells]
        assert {c.span for c in cells} == {"completion"} and not any(c.options.get("unanimous") for c in cells)


def test_the_largest_rate_is_in_the_grids_of_kgfunc_and_of_the_targets():
    for name in ("math-op-eval-more", "math-op-eval-lab"): assert 0.7 in {cell.parameters.get("lam") for cell in Sweep(name).cells}
    for name, count in {"high-nll-targets": 3 * 4 * 4, "high-nll-targets-lab": 2 * 4 * 4}.items():
        cells = [make_config(generate.GenerateConfig, **cell.parameters) for cell in Sweep(name).cells]
        assert len(cells) == count and len({(c.model, c.dataset, c.lam) for c in cells}) == count
        assert {(c.dataset, c.lam) for c in cells if c.unanimous} <= {("simpleqa", 0.3), ("simpleqa", 0.5)}
        assert any(c.unanimous for c in cells) == (name == "high-nll-targets")


def test_the_grids_of_the_nll_count_the_published_span():
    for name in ("high-nll", "high-nll-lab"): assert read_grid(name)[1].fixed["span"] == "body" == nll.NllConfig().span


@pytest.mark.parametrize("name", list_grids())
def test_no_shipped_grid_gives_a_large_model_the_labs_values(name, own_runs):
    "Models that are outputs of another grid are left out, as are parameters that a run of one gives."
    grid = read_grid(name)[1]
    if (stage := find_stage(grid.notebook)) not in SCALED: return
    models = grid.axes.get("model", [grid.fixed.get("model")])
    for model in models if isinstance(models, list) and any(models) else ():
        config = stage(**grid.fixed | (model if isinstance(model, dict) else dict(model=model)))
        assert is_lab_model(config.model) or not {*config.values_of_lab()} - {*grid.axes}, name
        assert config.preset == ("lab" if is_lab_model(config.model) else "real" if name.startswith("real-") else "paper")


def test_a_grid_over_the_outputs_of_another_names_the_one_that_comes_first(own_runs, tmp_path):
    first = "`mixsd sweep run high-nll-targets-lab` comes first and computes them"
    with pytest.raises(ParameterError, match=f"none of its 32 cells is finished; {first}$"): expand_grid("high-nll-lab")
    cell = expand_grid("high-nll-targets-lab").cells[0]
    config = make_config(GenerateConfig, **cell.parameters)
    write_json(config.folder / "run.json", dict(stage="generate", config=config.model_dump(mode="json")))
    for name in ("targets.parquet", "result.nc"): (config.folder / name).touch()
    with pytest.warns(UserWarning, match=f"1 of the 32 cells of high-nll-targets-lab, because the others are not finished; {first}$"):
        assert len(expand_grid("high-nll-lab").cells) == 1


def readme_commands(notebook):
    "The parameters of the commands of the README that run a notebook at the paper's scale."
    text = (Path(__file__).parents[1] / "README.md").read_text()
    for line in re.findall(rf"^papermill nbs/{notebook}.ipynb .*-p model \w+/.*$", text, re.MULTILINE):
        yield dict(re.findall(r"-p (\S+) (\S+)", line))


def test_the_commands_of_the_readme_at_the_papers_scale_are_cells_of_its_grids():
    found = [make_config(train.TrainConfig, **parameters) for parameters in readme_commands("train")]
    whole = dict(until=1.0, selection_items=0)  # the grid trains six rates to a third first
    cells = {make_config(train.TrainConfig, **cell.parameters | whole).without_idle().hash() for cell in expand_grid("knowledge-eval-small").cells}
    assert found and {config.without_idle().hash() for config in found} <= cells
    for config in found:
        mixing = train.target_mixing(config)
        assert (config.target_tokens, mixing.max_new_tokens, mixing.dtype) == (8_192, 8_192, "bfloat16") and not config.values_of_lab()


@pytest.mark.parametrize(("grid", "stage", "settings"), [("high-nll", nll.NllConfig, {}), ("app-displacement", FisherConfig, dict(reference="paper"))])
def test_a_guide_says_which_parameters_stages_without_a_preset_need(grid, stage, settings):
    "All values of the grid that are not the defaults are named, besides those that only save memory."
    fixed = {name: value for name, value in read_grid(grid)[1].fixed.items() if value != stage.model_fields[name].default and not is_runtime(stage.model_fields[name])}
    assert fixed == dict(dtype="bfloat16") | settings
    text = (Path(__file__).parents[1] / "nbs/guides/table.md").read_text()
    assert all(f"`-p {name} {value}`" in text for name, value in fixed.items())


def test_a_preview_shows_only_the_options_that_differ_from_those_of_the_method(own_runs):
    grid = dict(notebook="train", fixed=dict(dataset="mquake-lab"), axes=dict(run=[dict(method="memit", options=dict(clamp=0.5)), dict(method="memit", options={})]))
    assert Sweep(grid).preview().options.tolist() == [dict(clamp=0.5), ""]


def test_a_grid_has_an_axis_of_files(data, own_runs):
    files = [data(f"{name}.jsonl", lines(dict(question=f"Who is {name}?", answer="Otto"))) for name in "ab"]
    cells = expand_grid(dict(notebook="evaluate", axes=dict(dataset=[*files, "kgfact-small"]), fixed=dict(model="lab-s", suite="recall", n=2))).cells
    assert [cell.parameters["dataset"] for cell in cells] == [*(make_config(EvaluateConfig, model="lab-s", dataset=file).dataset for file in files), "kgfact-small"] and len({cell.hash for cell in cells}) == 3

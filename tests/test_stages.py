"The parameters cell of every stage notebook agrees with the configuration of the stage."

import functools
import ast
import importlib
import json
import re
from pathlib import Path

import pytest
from hypothesis import given, settings, strategies as st
from papermill import inspect_notebook

from mixsd_nb.cluster.grid import find_notebook
from mixsd_nb.console.housekeeping import stage_notebooks
from mixsd_nb.runs import Config
from mixsd_nb.runs.config import preset_values

ROOT = Path(__file__).resolve().parents[1]
STAGES = [find_notebook(path.stem) for path in stage_notebooks()]


def configuration(path):
    module = ".".join(path.relative_to(ROOT / "nbs").with_suffix("").parts)
    return getattr(importlib.import_module(f"mixsd_nb.{module}"), f"{path.stem.capitalize()}Config")


def preset_names(config):
    return [name for name, field in config.model_fields.items() if preset_values(field)]


@pytest.mark.parametrize("path", STAGES, ids=lambda p: p.stem)
def test_the_parameters_cell_has_every_field_with_its_default_and_its_description(path):
    "So papermill's help, Python's help and the chapter agree; `make export` writes the cell."
    config, found = configuration(path), inspect_notebook(path)
    assert issubclass(config, Config) and {*found} - {"force"} == {*config.model_fields}
    scope = {}
    exec("".join(next(c for c in json.loads(path.read_text())["cells"] if "parameters" in c["metadata"].get("tags", []))["source"]), scope)
    for name, field in config.model_fields.items():
        assert found[name]["help"] == field.description and scope[name] == field.default, name
    if "force" in found: assert found["force"]["help"] == config.forced


@pytest.mark.parametrize("path", STAGES, ids=lambda p: p.stem)
def test_no_parameter_hides_a_name_that_the_notebook_uses(path):
    "The parameters cell assigns in the namespace of the notebook, after the cells that import and define."
    cells = [re.sub(r"^\s*[%!].*$", "", "".join(c["source"]), flags=re.M) for c in json.loads(path.read_text())["cells"] if c["cell_type"] == "code"]
    nodes = [node for source in cells for node in ast.parse(source).body]
    names = {alias.asname or alias.name for node in nodes if isinstance(node, (ast.Import, ast.ImportFrom)) for alias in node.names}
    names |= {node.name for node in nodes if isinstance(node, (ast.FunctionDef, ast.ClassDef))}
    assert not names & {*configuration(path).model_fields}


SCALED = [config for path in STAGES if preset_names(config := configuration(path))]


@pytest.mark.parametrize("config", SCALED, ids=lambda c: c.name)
@settings(deadline=None)  # a configuration may load its corpus
@given(data=st.data())
def test_a_preset_is_the_sum_of_its_values(config, data):
    "A run is the same whether its values come from the preset or are given, and given values have precedence."
    values = {name: preset_values(config.model_fields[name]) for name in preset_names(config)}
    preset, other = data.draw(st.permutations(["lab", "paper"]))
    given_names = data.draw(st.sets(st.sampled_from(sorted(values))))
    wanted = {name: known[other if name in given_names else preset] for name, known in values.items()}
    fixed = dict(method="mixsd") if "method" in config.model_fields else {}  # the default of inject chooses λ itself
    config = functools.partial(config, **fixed)
    made = config(preset=preset, **{name: wanted[name] if name in given_names else None for name in values})
    assert {name: getattr(made, name) for name in values} == wanted
    assert made.hash() == config(**wanted).hash() == config(preset=other, **wanted).hash()
    missed = {name for name, known in values.items() if name not in given_names and known["lab"] != known["paper"]}
    assert set(made.values_of_lab()) == (missed if preset == "lab" else set())


def test_the_guide_of_the_tables_lists_the_presets():
    rows = re.findall(r"^\| `(\w+)` \| (\S+) \| (\S+) \| (\S+) \|$", (ROOT / "nbs/guides/table.md").read_text(), re.MULTILINE)
    fields = importlib.import_module("mixsd_nb.train").TrainConfig.model_fields
    expected = {name: tuple(map(str, preset_values(field).values())) for name, field in fields.items() if preset_values(field)}
    assert {name: tuple(values) for name, *values in rows} == expected

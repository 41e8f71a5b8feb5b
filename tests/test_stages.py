"""The parameters cell of every stage notebook agrees with the stage's configuration."""

import importlib
import json
from pathlib import Path

import pytest

from papermill import inspect_notebook

from mixsd_nb.runs import Config

ROOT = Path(__file__).resolve().parents[1]
STAGES = sorted(p for p in (ROOT / "nbs").glob("*.ipynb") if p.stem != "index")


@pytest.mark.parametrize("path", STAGES, ids=lambda p: p.stem)
def test_parameters_cell_agrees_with_the_configuration(path):
    module = importlib.import_module(f"mixsd_nb.{path.stem}")
    config = getattr(module, f"{path.stem.capitalize()}Config")
    assert issubclass(config, Config)
    cells = [c for c in json.loads(path.read_text())["cells"] if "parameters" in c["metadata"].get("tags", [])]
    scope = {}
    exec("".join(cells[0]["source"]), scope)
    shown = {k: v for k, v in scope.items() if not k.startswith("__")}
    assert {k: v for k, v in shown.items() if k != "force"} == {k: config.model_fields[k].default for k in shown if k != "force"}


@pytest.mark.parametrize("path", STAGES, ids=lambda p: p.stem)
def test_parameters_cell_has_the_descriptions_of_the_fields(path):
    "The comments equal the descriptions of the fields, so papermill's help, Python's help and the chapter agree."
    fields = getattr(importlib.import_module(f"mixsd_nb.{path.stem}"), f"{path.stem.capitalize()}Config").model_fields
    for name, found in inspect_notebook(path).items():
        if name != "force": assert found["help"] == fields[name].description, name

"""What all stage notebooks share: the defaults of their parameters cell are those of their configuration."""

import importlib
import json
from pathlib import Path

import pytest

from mixsd_nb.results.runs import Config

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
    assert shown == {k: config.model_fields[k].default for k in shown}

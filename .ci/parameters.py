"""Write the parameters cell of every stage notebook from the fields of its configuration: `python .ci/parameters.py`."""

import importlib
import json
import sys
import types
import typing
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


def type_name(annotation) -> str:
    """The plain type of a field, which papermill shows: `float` for `float | None`, `str` for a choice."""
    origin, parts = typing.get_origin(annotation), typing.get_args(annotation)
    if origin is typing.Annotated: return type_name(parts[0])
    if origin is typing.Literal: return "str"
    if origin in (typing.Union, types.UnionType): return type_name(parts[0])
    return (origin or annotation).__name__


def value_text(value) -> str:
    """A default as Python text, with double quotes and 4_096."""
    if isinstance(value, int) and not isinstance(value, bool): return f"{value:_}"
    return json.dumps(value, ensure_ascii=False) if isinstance(value, str) else repr(value)


def order_names(shown: list[str], fields: list[str]) -> list[str]:
    """The fields in the order in which the cell shows them; a new one follows the field that is declared before it."""
    names = [name for name in shown if name in fields]
    for k, name in enumerate(fields):
        if name not in names: names.insert(names.index(fields[k - 1]) + 1 if k else 0, name)
    return names


def parameters_cell(config, shown: list[str]) -> str:
    """The source of the cell."""
    lines = []
    for name in order_names(shown, list(config.model_fields)):
        field = config.model_fields[name]
        default = value_text(field.get_default(call_default_factory=True))
        lines.append(f"{name}: {type_name(field.annotation)} = {default}  # {field.description}")
    if "force" in shown: lines.append(f"force: bool = False  # {config.forced}")
    return "\n".join(lines)


def update(root: Path, notebook: Path) -> None:
    """Write the cell of one notebook, if it has one."""
    content = json.loads(notebook.read_text(encoding="utf-8"))
    cell = next((c for c in content["cells"] if "parameters" in c["metadata"].get("tags", [])), None)
    if not cell: return
    shown = [line.partition(":")[0] for line in cell["source"]]
    module = ".".join(notebook.relative_to(root / "nbs").with_suffix("").parts)
    config = getattr(importlib.import_module(f"mixsd_nb.{module}"), f"{notebook.stem.capitalize()}Config")
    cell["source"] = parameters_cell(config, shown).splitlines(keepends=True)
    notebook.write_text(json.dumps(content, indent=1, ensure_ascii=False, sort_keys=True) + "\n", encoding="utf-8")


def main(root: Path = ROOT) -> None:
    """Write the cells of all stages; the package is imported from this checkout."""
    sys.path.insert(0, str(ROOT))
    for notebook in sorted((root / "nbs").rglob("*.ipynb")):
        if ".ipynb_checkpoints" not in notebook.parts: update(root, notebook)


if __name__ == "__main__": main()

"""Check that mixsd_nb/ and README.md are what nbs/ exports, that the notebooks are clean, and that the parameters of the stages have their defaults: `python .ci/check.py`."""

import ast
import importlib
import json
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from readme import ROOT, readme

BIN = Path(sys.executable).parent
RESTORE = "if JupyterLab saved a trial, `git diff {0}` shows it and `git checkout {0}` restores the notebook"


def tree(folder: Path, pattern: str) -> dict[str, bytes]:
    """The bytes of every matching file below `folder`, by relative path, without Jupyter's checkpoints."""
    files = (p for p in folder.rglob(pattern) if ".ipynb_checkpoints" not in p.parts)
    return {p.relative_to(folder).as_posix(): p.read_bytes() for p in files}


def export_and_clean(work: Path) -> None:
    """Export the notebooks into the empty tree `work`, where no old file can remain, and clean them there."""
    shutil.copy(ROOT / "settings.ini", work)
    shutil.copytree(ROOT / "nbs", work / "nbs")
    for command in "nbdev_export", "nbdev_clean":
        subprocess.run([BIN / command], cwd=work, check=True)


def export_failures(fresh: dict[str, bytes], kept: dict[str, bytes]) -> list[str]:
    """A sentence for each module that is not what its notebook exports."""
    paths_by_problem = {
        "has no notebook": kept.keys() - fresh.keys(),
        "is missing": fresh.keys() - kept.keys(),
        "is not what its notebook exports": {p for p in fresh.keys() & kept.keys() if fresh[p] != kept[p]},
    }
    return [f"mixsd_nb/{p} {what}: run `make export`." for what, paths in paths_by_problem.items() for p in sorted(paths)]


def clean_failures(cleaned: dict[str, bytes], kept: dict[str, bytes]) -> list[str]:
    """A sentence for each notebook that nbdev_clean would change."""
    return [f"nbs/{p} is not clean: run `make export`, or, {RESTORE.format(f'nbs/{p}')}."
            for p in sorted(kept) if cleaned[p] != kept[p]]


def literal(node: ast.expr) -> object:
    """The value of an expression; its text if it is no literal."""
    try: return ast.literal_eval(node)
    except ValueError: return ast.unparse(node)


def cell_defaults(notebook: Path) -> dict[str, object]:
    """The values in the cell with the tag `parameters`, by name; empty for a notebook without this cell."""
    cells = json.loads(notebook.read_text(encoding="utf-8"))["cells"]
    tagged = ["".join(c["source"]) for c in cells if "parameters" in c.get("metadata", {}).get("tags", [])]
    lines = ast.parse("\n".join(tagged)).body
    return {line.target.id: literal(line.value) for line in lines if isinstance(line, ast.AnnAssign)}


def parameter_failures(nbs: Path) -> list[str]:
    """A sentence for each parameter of a stage's notebook that is not the default of its field."""
    failures = []
    for notebook in sorted(nbs.glob("*.ipynb")):
        if not (values := cell_defaults(notebook)): continue
        module = importlib.import_module(f"mixsd_nb.{notebook.stem}")
        fields = getattr(module, f"{notebook.stem.capitalize()}Config").model_fields
        defaults = {name: field.get_default(call_default_factory=True) for name, field in fields.items()} | {"force": False}
        for name, value in values.items():
            if name not in defaults: failures.append(f"nbs/{notebook.name}: {name} is not a field of the configuration.")
            elif value != defaults[name]:
                failures.append(f"nbs/{notebook.name}: {name} is {value!r}, but the default of its field is "
                                f"{defaults[name]!r}; {RESTORE.format(f'nbs/{notebook.name}')}.")
    return failures


def readme_failures() -> list[str]:
    """A sentence if README.md is not what nbs/index.ipynb makes."""
    kept = ROOT / "README.md"
    if kept.exists() and kept.read_text(encoding="utf-8") == readme(ROOT / "nbs/index.ipynb"):
        return []
    return ["README.md is not what nbs/index.ipynb makes: run `make export`."]


def main() -> int:
    with tempfile.TemporaryDirectory() as name:
        work = Path(name)
        export_and_clean(work)
        failures = export_failures(tree(work / "mixsd_nb", "*.py"), tree(ROOT / "mixsd_nb", "*.py"))
        failures += clean_failures(tree(work / "nbs", "*.ipynb"), tree(ROOT / "nbs", "*.ipynb"))
    failures += readme_failures()
    sys.path.insert(0, str(ROOT))
    failures = parameter_failures(ROOT / "nbs") + failures
    print("\n".join(failures) or "export, clean state, README and default parameters are up to date")
    return bool(failures)


if __name__ == "__main__":
    sys.exit(main())

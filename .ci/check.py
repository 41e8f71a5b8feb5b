"""Check that mixsd_nb/ and README.md are what nbs/ exports, that the notebooks are clean, and that the parameters of the stages are the fields of their configurations: `python .ci/check.py`."""

import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import parameters
from readme import ROOT, readme

BIN = Path(sys.executable).parent
RESTORE = "if JupyterLab saved a trial, `git diff {0}` shows it and `git checkout {0}` restores the notebook"


def tree(folder: Path, pattern: str) -> dict[str, bytes]:
    """The bytes of every matching file below `folder`, by relative path, without Jupyter's checkpoints."""
    files = (p for p in folder.rglob(pattern) if ".ipynb_checkpoints" not in p.parts)
    return {p.relative_to(folder).as_posix(): p.read_bytes() for p in files}


def export_and_clean(work: Path) -> None:
    """Export the notebooks into the empty tree `work`, where no old file can remain, and write their parameters and clean them."""
    shutil.copy(ROOT / "settings.ini", work)
    shutil.copytree(ROOT / "nbs", work / "nbs")
    parameters.main(work)
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
    """A sentence for each notebook that nbdev_clean would change, or whose parameters are not the fields of its configuration."""
    return [f"nbs/{p} is not clean, or its parameters are not those of its configuration: run `make export`, or, {RESTORE.format(f'nbs/{p}')}."
            for p in sorted(kept) if cleaned[p] != kept[p]]


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
    print("\n".join(failures) or "export, clean state, README and default parameters are up to date")
    return bool(failures)


if __name__ == "__main__":
    sys.exit(main())

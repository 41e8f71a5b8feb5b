"""Remove progress bars and other messages on stderr from the stored outputs of all notebooks: `python .ci/tidy.py`."""

import json

from readme import ROOT


def is_result(output: dict) -> bool:
    """Whether an output is a result: neither a message nor a widget, which needs a kernel."""
    return output.get("name") != "stderr" and not any("widget" in kind for kind in output.get("data", {}))


for path in (ROOT / "nbs").rglob("*.ipynb"):
    notebook = json.loads(path.read_text(encoding="utf-8"))
    for cell in notebook["cells"]:
        if cell["cell_type"] == "code":
            cell["outputs"] = [output for output in cell["outputs"] if is_result(output)]
    notebook["metadata"].pop("widgets", None)
    path.write_text(json.dumps(notebook, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")

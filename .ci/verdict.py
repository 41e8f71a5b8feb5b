"""Compute the verdict on the front page anew from the committed cubes, and write README.md: `python .ci/verdict.py`."""

import json
import subprocess
import sys

from readme import ROOT, readme

NOTEBOOK = ROOT / "nbs/index.ipynb"
CELL = "front_page()"  # what the cell calls


def show(text: str) -> list[dict]:
    """The outputs of a cell that displays Markdown."""
    data = {"text/markdown": text.splitlines(keepends=True), "text/plain": ["<IPython.core.display.Markdown object>"]}
    return [dict(data=data, execution_count=None, metadata={}, output_type="execute_result")]


if __name__ == "__main__":
    program = "from mixsd_nb.lab.study import front_page; print(front_page())"
    text = subprocess.run([sys.executable, "-c", program], cwd=ROOT, check=True, capture_output=True, text=True).stdout.strip()
    notebook = json.loads(NOTEBOOK.read_text(encoding="utf-8"))
    for cell in notebook["cells"]:
        if cell["cell_type"] == "code" and CELL in "".join(cell["source"]):
            cell["outputs"] = show(text)
    NOTEBOOK.write_text(json.dumps(notebook, indent=1, ensure_ascii=False, sort_keys=True) + "\n", encoding="utf-8")
    (ROOT / "README.md").write_text(readme(NOTEBOOK), encoding="utf-8")
    print(text)

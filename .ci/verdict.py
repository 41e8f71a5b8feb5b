"""Compute the table of the front page and the verdict of its guide anew from the committed cubes, and write README.md: `python .ci/verdict.py`."""

import json
import re
import subprocess
import sys

from readme import ROOT, readme

NOTEBOOK, GUIDE = ROOT / "nbs/index.ipynb", ROOT / "nbs/guides/findings.md"
CELL = "findings_table()"  # what the cell of the notebook calls
BEGIN, END = "<!-- verdict: written by `make verdict` -->", "<!-- end of the verdict -->"


def compute_text(module: str, function: str) -> str:
    "Return what a function of the laboratory returns in a fresh process, in which no other run counts."
    program = f"from {module} import {function}; print({function}())"
    return subprocess.run([sys.executable, "-c", program], cwd=ROOT, check=True, capture_output=True, text=True).stdout.strip()


def show(text: str) -> list[dict]:
    "Return the outputs of a cell that displays Markdown, in the form in which Jupyter writes them."
    data = {"text/markdown": text.splitlines(True), "text/plain": ["<IPython.core.display.Markdown object>"]}
    return [dict(data=data, execution_count=None, metadata={}, output_type="execute_result")]


def write_front_page(table: str) -> None:
    "Put the table into the output of its cell, and write README.md."
    notebook = json.loads(NOTEBOOK.read_text(encoding="utf-8"))
    for cell in notebook["cells"]:
        if cell["cell_type"] == "code" and CELL in "".join(cell["source"]): cell["outputs"] = show(table)
    NOTEBOOK.write_text(json.dumps(notebook, indent=1, ensure_ascii=False, sort_keys=True) + "\n", encoding="utf-8")
    (ROOT / "README.md").write_text(readme(NOTEBOOK), encoding="utf-8")


def write_guide(verdict: str) -> None:
    "Put the verdict between its marks in the guide."
    text, pattern = GUIDE.read_text(encoding="utf-8"), re.compile(f"{re.escape(BEGIN)}.*?{re.escape(END)}", re.DOTALL)
    GUIDE.write_text(pattern.sub(lambda _: f"{BEGIN}\n{verdict}\n{END}", text), encoding="utf-8")


if __name__ == "__main__":
    table, verdict = compute_text("mixsd_nb.lab.findings", "findings_table"), compute_text("mixsd_nb.lab.study", "front_page")
    write_front_page(table)
    write_guide(verdict)
    print(table, verdict, sep="\n\n")

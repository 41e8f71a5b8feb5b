"""Prepare a notebook for the site: directives are hidden, and exported code stands behind a toggle."""

import json
import re
from pathlib import Path

DIRECTIVE = re.compile(r"^#\|.*\n?", re.MULTILINE)
SILENT = re.compile(r"^#\|\s*echo:\s*false\b", re.MULTILINE)
HIDDEN = re.compile(r"^#\|\s*(hide|default_exp)\b", re.MULTILINE)
EXPORTED = re.compile(r"^#\|\s*exporti?\b", re.MULTILINE)
NAME = re.compile(r"^(?:def|class) (\w+)|^(\w+)(?:: [^=]+)? = ", re.MULTILINE)
HEADING_LINK = re.compile(r"(\]\([^)\s#:]*#)([^)\s]+)\)")  # JupyterLab keeps the letter case of a heading, a page does not
RUN_LINK = re.compile(r"<a\b[^>]*href=[\"'](?:\.\./)*papermill_runs/[^>]*>(.*?)</a>", re.DOTALL)  # runs are no part of the site
HEADING = re.compile(r"^#+ (.+)", re.MULTILINE)
WIDGET = "application/vnd.jupyter.widget-view+json"


def source_of(cell: dict) -> str: return "".join(cell["source"])


def label_of(source: str) -> str:
    "What the toggle of an exported cell says: the names that the cell defines."
    names = [a or b for a, b in NAME.findall(source)]
    public = [n for n in names if not n.startswith("_")] or names
    return ", ".join(public[:4]) + (", …" if len(public) > 4 else "") if public else "imports"


def show_outputs(outputs: list[dict]) -> list[dict]:
    "The outputs that a page can show: a widget needs a kernel, so its picture or text is shown instead."
    shown = []
    for output in outputs:
        data = {kind: value for kind, value in output.get("data", {}).items() if kind != WIDGET}
        if "text/html" in data: data["text/html"] = RUN_LINK.sub(r"\1", "".join(data["text/html"]))
        if "data" not in output: shown.append(output)
        elif data: shown.append(output | dict(data=data))
    return shown


def prepare_cell(cell: dict, section: str) -> list[dict]:
    "The cells that stand for one cell on the site; an exported one has an anchor before it, which the reference links to."
    source = source_of(cell)
    if cell["cell_type"] == "markdown": return [cell | dict(source=HEADING_LINK.sub(lambda m: f"{m[1]}{m[2].lower()})", source))]
    if cell["cell_type"] == "raw" or HIDDEN.search(source) or not DIRECTIVE.sub("", source).strip(): return []
    if SILENT.search(source):
        if texts := ["".join(o["data"]["text/markdown"]) for o in cell["outputs"] if "text/markdown" in o.get("data", {})]:
            return prepare_cell(dict(cell_type="markdown", id=cell["id"], metadata={}, source="\n\n".join(texts)), section)
        cell = cell | dict(metadata=cell["metadata"] | dict(tags=["remove-input"]))
    metadata = cell["metadata"] | dict(mystnb=dict(image=dict(alt=f"a figure of the section {section}" if section else "a figure")))
    prepared = cell | dict(source=DIRECTIVE.sub("", source).strip(), outputs=show_outputs(cell["outputs"]), metadata=metadata)
    if not EXPORTED.search(source): return [prepared]
    label = label_of(DIRECTIVE.sub("", source))
    metadata["tags"] = [*metadata.get("tags", []), "hide-input"]
    metadata["mystnb"] |= dict(code_prompt_show=f"Code: {label}", code_prompt_hide=f"Hide the code: {label}")
    anchor = dict(cell_type="markdown", id=f"a-{cell['id']}", metadata={}, source=f'<span class="cell-anchor" id="cell-{cell["id"]}"></span>')
    return [anchor, prepared]


def sections_of(cells: list[dict]) -> list[str]:
    "For each cell the heading above it, which says what the cell's figures are about to those who cannot see them."
    sections = [""]
    for cell in cells: sections.append([sections[-1], *(HEADING.findall(source_of(cell).replace("`", "")) if cell["cell_type"] == "markdown" else [])][-1])
    return sections[1:]


def title_of(notebook: Path) -> tuple[str, str]:
    "The title of a notebook and the sentence below it."
    text = source_of(next(c for c in json.loads(notebook.read_text(encoding="utf-8"))["cells"] if c["cell_type"] == "markdown"))
    title = re.search(r"^# (.+)", text, re.MULTILINE)
    sentence = re.search(r"^> (.+)", text, re.MULTILINE)
    return (title[1] if title else notebook.stem), (sentence[1] if sentence else "")


def prepare_notebook(text: str, pages: list[str] = ()) -> str:
    "The JSON of a notebook for the site, with a hidden list of pages that stand below it."
    notebook = json.loads(text)
    notebook["cells"] = [prepared for cell, section in zip(notebook["cells"], sections_of(notebook["cells"])) for prepared in prepare_cell(cell, section)]
    if pages:
        tree = "\n".join(["```{toctree}", ":hidden:", *pages, "```"])
        notebook["cells"].append(dict(cell_type="markdown", id="pages", metadata={}, source=tree))
    return json.dumps(notebook)

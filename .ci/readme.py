"""Make README.md from nbs/index.ipynb: `python .ci/readme.py`."""

import json
import posixpath
import re
from configparser import ConfigParser
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
HIDDEN = re.compile(r"^#\|\s*(hide|default_exp)\b", re.MULTILINE)
SILENT = re.compile(r"^#\|\s*echo:\s*false\b", re.MULTILINE)
DIRECTIVE = re.compile(r"^#\|.*\n?", re.MULTILINE)
CLONE = re.compile(r"^git clone URL (.*?) *#.*", re.MULTILINE)
LINK = re.compile(r"""(\]\(|src="|href=")(?![a-z]+:|[#/])([^)\s"]+)""")


def from_root(markdown: str) -> str:
    """The text with links relative to the project's root instead of nbs/."""
    return LINK.sub(lambda m: m[1] + posixpath.normpath("nbs/" + m[2]), markdown)


def fence(text: str, language: str = "") -> str:
    """A fenced block, longer than any fence inside it."""
    marks = "`" * max(3, *(len(run) + 1 for run in re.findall("`+", text) or [""]))
    return f"{marks}{language}\n{text.strip()}\n{marks}"


def show_output(output: dict) -> str:
    """An output in Markdown: as it is if it is Markdown, else its plain text in a fence; empty without a text."""
    data = output.get("data", {})
    if "text/markdown" in data:
        return from_root("".join(data["text/markdown"]).strip())
    text = "".join(output.get("text") or data.get("text/plain", []))
    return fence(text, "text") if text.strip() else ""


def blocks(cell: dict) -> list[str]:
    """The parts of the README that one cell makes."""
    source = "".join(cell["source"])
    if cell["cell_type"] == "raw" or HIDDEN.search(source):
        return []
    if cell["cell_type"] == "markdown":
        return [from_root(source.strip())]
    code = [] if SILENT.search(source) else [fence(DIRECTIVE.sub("", source), "python")]
    return code + [show_output(output) for output in cell["outputs"]]


def read_address() -> str:
    """The address of the repository in settings.ini, empty while there is none."""
    config = ConfigParser(delimiters=["="])
    config.read(ROOT / "settings.ini", encoding="utf-8")
    return config["DEFAULT"]["git_url"]


def readme(notebook: Path, address: str = read_address()) -> str:
    """The whole text of README.md, with the address of the repository in the line that clones it, if there is one."""
    cells = json.loads(notebook.read_text(encoding="utf-8"))["cells"]
    parts = ["<!-- made from nbs/index.ipynb by `make export`: edit that notebook -->"]
    text = "\n\n".join(parts + [b for cell in cells for b in blocks(cell) if b]) + "\n"
    return CLONE.sub(lambda m: f"git clone {address} {m[1]}", text) if address else text


if __name__ == "__main__":
    (ROOT / "README.md").write_text(readme(ROOT / "nbs/index.ipynb"), encoding="utf-8")

"""Numbers that prose quotes are numbers that a cell of the same notebook shows.

Checked are all texts of stages, and the section "What we found" of other notebooks. A quoted number is shown if an output or an assertion holds a number that
rounds to it, as it is printed or as a percentage, in the same notebook or in one that the section links to. Numbers of
sections, equations, links and code are no quotes. EXCEPTIONS lists the quotes that no notebook can show, with reasons.
"""

import json
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
HEADING = "## What we found"
NUMBER = re.compile(r"(?<![\w.^_])[−-]?\d{1,3}(?:,\d{3})+(?:\.\d+)?(?!\w)|(?<![\w.^_])[−-]?\d+(?:\.\d+)?(?:e[−-]?\d+)?(?!\w)")
NOT_QUOTES = re.compile(r"`[^`]*`|\]\([^)]*\)|\$[^$]*\$|<[^>]*>|(?:section|eq\.|appendix|table|figure|§) ?[A-Z]?\.?\d[\d.]*",
                        re.I)
SUM, PICTURE = "a sum over the rows of its table", "a point of a curve in pretrain"
REAL = "counted or judged by hand on articles that are not in the repository"
EXCEPTIONS = {  # notebook -> number -> why no output holds the number
    "corpora/simpleqa.ipynb": {"25": "a quarter of 100"},
    "facts.ipynb": {"30": REAL},
    "index.ipynb": {"181": "measured: what `make run` leaves on the disk, in MB"},
    "methods/mixing.ipynb": {"1e-4": "the width of a tie", "21,000": SUM, "0.98": SUM},
    "models/lab.ipynb": {"1.3": "parameters of lab-s", "3.0": "parameters of lab-m"},
    "lab/documents.ipynb": dict.fromkeys("135 27 54 36 5 6 35 8 4 45 18 30 25 83 9 17 95 7 34 52 12".split(), REAL),
    "lab/pretraining/curriculum.ipynb": {"53": SUM},
    "lab/pretraining/documents.ipynb": {"88": PICTURE, "67": PICTURE},
    "lab/pretraining/drills.ipynb": {"40": "a bound on shares"},
    "lab/pretraining/record.ipynb": {"95": "the level of an interval"},
    "lab/pretraining/training_loop.ipynb": {"1.25": "measured on another machine"},
    "lab/speed.ipynb": {"134": "the size of a model, in millions"},
    "sweep.ipynb": {"130": "an exit code"},
}


def parse(text):
    "Value and number of printed decimals of every number in a text."
    found = {}
    for word in NUMBER.findall(text):
        plain = word.replace("−", "-").replace(",", "")
        mantissa, _, power = plain.partition("e")
        decimals = len(mantissa.partition(".")[2]) - int(power or 0)
        found[word] = (float(plain), decimals)
    return found


def read_outputs(cells):
    "All texts that the cells show, tags of HTML left out."
    texts = []
    for output in (o for cell in cells for o in cell.get("outputs", [])):
        data = output.get("data", {})
        texts += ["".join(output.get("text", "")), *("".join(data.get(kind, "")) for kind in ("text/plain", "text/markdown"))]
        texts.append(re.sub(r"<style.*?</style>|<[^>]+>", " ", "".join(data.get("text/html", "")), flags=re.S))
    return re.sub(r"(?<=\d)M\b", " million", "\n".join(texts))


def read_assertions(cells):
    "The code of all cells from each assertion to the end of its line."
    return "\n".join(re.findall(r"\bassert\b.*", "\n".join("".join(c["source"]) for c in cells if c["cell_type"] == "code")))


def is_shown(value, decimals, shown):
    "Whether one of the shown numbers, or 100 times it, rounds to the quoted one. A sign may be in words."
    half = 0.5000001 * 10.0 ** -decimals
    return any(abs(abs(value) - abs(number)) <= half for x in shown for number in (x, 100 * x))


FINDINGS = re.compile(r'show_findings\(.*?"""(.*?)"""', re.S)


def read_cells(path):
    "The cells of a notebook; one that displays findings next to what they are about is text, and shows nothing."
    cells = json.loads(path.read_text(encoding="utf-8"))["cells"]
    found = [FINDINGS.search("".join(cell["source"])) if cell["cell_type"] == "code" else None for cell in cells]
    return [dict(cell_type="markdown", source=[HEADING, text[1]]) if text else cell for cell, text in zip(cells, found)]


def is_stage(path): return path.parent == ROOT / "nbs" or '"parameters"' in path.read_text(encoding="utf-8")


def find_quotes(cells, whole):
    "The texts of a notebook that are checked, as one."
    texts = ["".join(cell["source"]) for cell in cells if cell["cell_type"] == "markdown"]
    if whole: return "\n".join(texts)
    return "\n".join(text.split(HEADING, 1)[1] for text in texts if HEADING in text)


def find_stale(path, exceptions=()):
    "The quoted numbers of a notebook that neither it nor a notebook that it links to shows."
    prose = find_quotes(read_cells(path), is_stage(path))
    sources = [path, *(path.parent / link for link in re.findall(r"\]\(([^)#]+\.ipynb)", prose))]
    cells = [cell for source in sources for cell in read_cells(source)]
    shown = {number for number, _ in parse(read_outputs(cells) + read_assertions(cells)).values()}
    quotes = parse(NOT_QUOTES.sub(" ", prose))
    return [word for word, quote in quotes.items() if word not in exceptions and not is_shown(*quote, shown)]


NOTEBOOKS = [path for path in sorted((ROOT / "nbs").rglob("*.ipynb"))
             if is_stage(path) or HEADING in path.read_text(encoding="utf-8")]


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.relative_to(ROOT / "nbs").as_posix())
def test_numbers_in_prose_are_shown_by_a_cell(path):
    stale = find_stale(path, EXCEPTIONS.get(path.relative_to(ROOT / "nbs").as_posix(), ()))
    assert not stale, f"no output shows {', '.join(stale)}; quote what a cell shows, or add a cell that shows it"


@pytest.mark.parametrize("prose, stale", [
    ("recall is 83% (N=1,968), at 1e-3 with `x=7` and section 7.2", []), ("83.2% and −0.27", []), ("84%", ["84"]),
    ("83.1%", ["83.1"]), ("1,969 responses", ["1,969"]), ("$x = 5$, [x](a5.html), eq. 2 and λ = 0.5", ["0.5"])])
def test_a_number_that_no_cell_shows_is_found(tmp_path, prose, stale):
    output = {"data": {"text/html": "<style>#T_84 {}</style><td class='row84'>0.832</td><td>-0.27</td>"}}
    code = dict(cell_type="code", source=["assert len(x) == 1968\n", "lr = 1"], outputs=[output, {"text": ["0.001"]}])
    path = tmp_path / "x.ipynb"
    path.write_text(json.dumps(dict(cells=[code, dict(cell_type="markdown", source=[f"{HEADING}\n", prose])])))
    assert find_stale(path) == stale

"""Draw figures/reports.png, the beginnings of two reports side by side: `python .ci/reports.py`.

SFT and the default recipe teach lab-m the example facts, which takes three minutes each on two cores; finished trainings are opened.
Chromium draws the pages (`make ci-tools`)."""

import shutil
import tempfile
from pathlib import Path

from playwright.sync_api import sync_playwright
from readme import ROOT

from mixsd_nb import inject
from mixsd_nb.corpora.files import EXAMPLE

METHODS = {"--method sft": dict(method="sft"), "the default": {}}
WIDTH, HEIGHT = 780, 1000  # of the part of a report that is shown, in pixels; its tables fit
STYLE = f"body{{margin:0;display:flex;font:600 22px monospace}}p{{margin:12px 16px 4px}}iframe{{border:0;width:{WIDTH}px;height:{HEIGHT}px}}"


def write_reports(folder: Path) -> dict[str, Path]:
    "Write the page of the report of each method into a folder, with paths in the repository; trainings are computed unless they exist."
    facts, pages = shutil.copy(EXAMPLE, folder / "facts.jsonl"), {}
    for title, method in METHODS.items():
        report = inject.run(dataset=str(facts), model="lab-m", force=True, **method).folder / "report.html"
        pages[title] = folder / f"{len(pages)}.html"
        pages[title].write_text(report.read_text(encoding="utf-8").replace(f"{ROOT}/", ""), encoding="utf-8")
    return pages


def draw(reports: dict[str, Path], picture: Path) -> None:
    "Draw the beginnings of pages side by side."
    frames = (f"<div><p>{title}</p><iframe scrolling=no src='{page.as_uri()}'></iframe></div>" for title, page in reports.items())
    with tempfile.TemporaryDirectory() as name, sync_playwright() as playwright:
        (both := Path(name) / "both.html").write_text(f"<meta charset='utf-8'><style>{STYLE}</style>{''.join(frames)}", encoding="utf-8")
        with playwright.chromium.launch(executable_path=shutil.which("chromium"), args=["--no-sandbox"]) as browser:
            page = browser.new_page(viewport=dict(width=WIDTH * len(reports), height=HEIGHT + 40))
            page.goto(both.as_uri())
            page.screenshot(path=picture)


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as name: draw(write_reports(Path(name)), ROOT / "figures/reports.png")

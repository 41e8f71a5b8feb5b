"""Assemble the sources of the site: `python .ci/site/sources.py FOLDER`. Pages that have not changed are left alone."""

import re
import shutil
import sys
from pathlib import Path

from browser import browser_pages, write_assets
from notebooks import prepare_notebook, title_of
from reference import read_package, reference_page, render_index, render_module

ROOT = Path(__file__).resolve().parents[2]
NBS = ROOT / "nbs"
PROJECT = {"changelog": "CHANGELOG.md", "contributing": "CONTRIBUTING.md"}  # page -> file in the root of the repository
TOP = ["guides/index", "browser", "frontier", "stages", "rooms", "reference/index", "project"]
LINK = re.compile(r"(\]\()(?![a-z]+:|[#/])([^)\s]+)")


def notebook_paths() -> list[Path]:
    return sorted(p for p in NBS.rglob("*.ipynb") if ".ipynb_checkpoints" not in p.parts)


def toctree(pages: list[str]) -> str: return "\n".join(["```{toctree}", ":hidden:", *pages, "```", ""])


def notebook_pages() -> dict[str, str]:
    "The notebooks; that of a room leads to the others of the room, the front page to the parts of the site."
    pages = {}
    for path in notebook_paths():
        place, below = path.relative_to(NBS), []
        if place.as_posix() == "index.ipynb": below = TOP
        elif path.stem == "index": below = [p.stem for p in sorted(path.parent.glob("*.ipynb")) if p != path]
        pages[place.as_posix()] = prepare_notebook(path.read_text(encoding="utf-8"), below).replace("../figures/", "figures/")
    return pages


def list_page(title: str, text: str, notebooks: list[Path]) -> str:
    "A page with a table of the titles and the first sentences of notebooks, each with a link."
    rows = [(p.relative_to(NBS).as_posix(), *title_of(p)) for p in notebooks]
    table = ["| notebook | purpose |", "| --- | --- |", *[f"| [{name}]({path}) | {sentence} |" for path, name, sentence in rows]]
    return "\n".join([f"# {title}", "", text, "", *table, "", toctree([path.removesuffix(".ipynb") for path, *_ in rows])])


def list_pages() -> dict[str, str]:
    "The pages that list stages and rooms."
    front = (NBS / "guides/map.md").read_text(encoding="utf-8")  # which has the stages in the order of their use
    stages = sorted((p for p in notebook_paths() if p.parent == NBS and p.stem != "index"), key=lambda p: front.find(f"  {p.name} "))
    rooms = [p for p in notebook_paths() if p.parent != NBS and p.stem == "index"]
    about = "A stage is a chapter, and an entry point that papermill runs: its parameters, the run, and what was found."
    of_rooms = "A package is a part of the library. Its notebooks show each definition with its code, an example and tests."
    return {"stages.md": list_page("Stages", about, stages), "rooms.md": list_page("Packages", of_rooms, rooms)}


def reference_pages() -> dict[str, str]:
    "A page for each module with public definitions, and the first page."
    modules = read_package(ROOT / "mixsd_nb")
    pages = {reference_page(m): render_module(m) for m in modules if m.definitions and m.page != "index"}
    return pages | {"reference/index.md": render_index(modules)}


def project_pages() -> dict[str, str]:
    "The guides, and the files about the project, whose links lead from the root of the repository."
    pages = {p.relative_to(NBS).as_posix(): p.read_text(encoding="utf-8").replace("../../figures/", "../figures/") for p in sorted((NBS / "guides").glob("*.md"))}
    names = {name: f"{page}.md" for page, name in PROJECT.items()}
    for page, name in PROJECT.items():
        text = (ROOT / name).read_text(encoding="utf-8")
        pages[f"{page}.md"] = LINK.sub(lambda m: m[1] + names.get(m[2], m[2].removeprefix("nbs/")), text)
    links = ["- [What changed](changelog.md)", "- [How to contribute](contributing.md)", "- [How to cite](guides/cite.md)"]
    return pages | {"project.md": "\n".join(["# Project", "", *links, "", toctree([*PROJECT])])}


def all_pages() -> dict[str, str]:
    "The text of every page by its path."
    return notebook_pages() | list_pages() | reference_pages() | project_pages() | browser_pages()


def write_pages(pages: dict[str, str], target: Path) -> None:
    "Write the pages whose text has changed, and remove those that are gone, so that Sphinx reads no page in vain."
    for path in (p for p in target.rglob("*") if p.suffix in (".md", ".ipynb")):
        if path.relative_to(target).as_posix() not in pages: path.unlink()
    for place, text in pages.items():
        path = target / place
        if path.exists() and path.read_text(encoding="utf-8") == text: continue
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")


def main(target: Path) -> None:
    write_pages(all_pages(), target)
    write_assets(target)
    shutil.copytree(ROOT / "figures", target / "figures", ignore=shutil.ignore_patterns("tables"), dirs_exist_ok=True)


if __name__ == "__main__": main(Path(sys.argv[1]))

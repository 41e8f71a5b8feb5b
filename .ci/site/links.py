"""Check the internal links of the built site: `python .ci/site/links.py FOLDER`. Links to other hosts are not fetched."""

import posixpath
import sys
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

ATTRIBUTES = ("href", "src")


class Page(HTMLParser):
    "The links and the anchors of a page."

    def __init__(self, text: str):
        super().__init__()
        self.links, self.anchors = set(), set()
        self.feed(text)

    def handle_starttag(self, tag, attributes):
        for name, value in attributes:
            if name in ATTRIBUTES and value: self.links.add(value)
            elif name in ("id", "name") and value: self.anchors.add(value)


def internal_target(page: str, link: str) -> tuple[str, str] | None:
    "The file and the anchor that a link of a page leads to; None for another host."
    parts = urlsplit(link)
    if parts.scheme or parts.netloc: return None
    path = posixpath.normpath(posixpath.join(posixpath.dirname(page), unquote(parts.path))) if parts.path else page
    return path, unquote(parts.fragment)


def broken_links(folder: Path) -> list[str]:
    "A sentence for each link to a file or an anchor that does not exist."
    pages = {p.relative_to(folder).as_posix(): Page(p.read_text(encoding="utf-8")) for p in folder.rglob("*.html") if "_static" not in p.parts}
    files = {p.relative_to(folder).as_posix() for p in folder.rglob("*") if p.is_file()}
    broken = []
    for name, page in sorted(pages.items()):
        for link in sorted(page.links):
            if (target := internal_target(name, link)) is None: continue
            path, anchor = target
            if path not in files: broken.append(f"{name} links to {link}, which does not exist")
            elif anchor and path in pages and anchor not in pages[path].anchors:
                broken.append(f"{name} links to {link}, which has no such anchor")
    return broken


if __name__ == "__main__":
    found = broken_links(Path(sys.argv[1]))
    print("\n".join(found) or "all internal links lead somewhere")
    sys.exit(bool(found))

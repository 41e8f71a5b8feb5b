"""Measure how the project reads: `make style` prints each measure, and where a private idiom stands.

The measures tell how long a cell is, whether something is shown after it, whether a text speaks to its reader, and how often
a private idiom stands where the field has a word. They report; no test fails on them.
"""

import ast
import json
import re
import statistics
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
EXPORT = re.compile(r"^#\|\s*export\b", re.MULTILINE)
HIDDEN = re.compile(r"^#\|\s*(hide|default_exp)\b", re.MULTILINE)
DIRECTIVE = re.compile(r"^#\|.*\n?", re.MULTILINE)
FENCE = re.compile(r"^```.*?^```$|^\|.*\|$|\$\$.*?\$\$", re.MULTILINE | re.DOTALL)
ADDRESS = re.compile(r"\b(we|you|I|us|our|your|ours|yours|let's|We|You|Our|Your)\b")
COMPREHENSIONS = (ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp)
FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)

# Words with which an instruction begins: what a function does. A property is a value, so it may begin with a noun.
VERBS = frozenset("""
    add advance answer append ask assign audit average begin build call cancel change check classify close collect compare compose
    compute continue copy count create cut decode decorate describe do download draw drop end ensure estimate evaluate
    execute extract fill find fit follow force forget format generate give go grade greet group hide hold import invent join keep
    kill learn leave let list load lock log lower make mark measure merge mix move name note offer open overwrite parse
    plan prepare print push put raise read record recompute remove renew replace report requeue restore retell return run
    sample save say score select send set show simulate sort split square start stop store submit take teach tell test train
    treat turn untie update upload wait warn write yield
""".split())

# Private idiom, and what the field says instead.
PHRASES = {
    "a step is asked": r"\b(?:steps?|checkpoints?|runs?|ones?|models?|it|they|that|all) (?:is|are|was|were) (?:not )?asked\b(?! (?:for|in|about|to))",
    "asks a suite": r"\bask(?:s|ed)? (?:of )?(?:all|the whole|a) (?:benchmarks?|suite)",
    "beside (next to, compared with)": r"\b[Bb]eside\b",
    "of its own (its own, separate)": r"\bof (?:its|their) own\b",
    "of ours": r"\bof ours\b",
    "stands for (takes the place of, means)": r"\bstands? for\b",
    "lacks (is missing)": r"\black(?:s|ed|ing)?\b",
    "whoever": r"\b[Ww]hoever\b",
    "at work": r"\bat work\b",
    "before its eyes (in its context)": r"\bbefore its eyes\b",
    "gone on from (resumed)": r"\bgone on\b",
    "count squared (are weighted quadratically)": r"\bcounts? squared\b",
    "out of step (out of sync)": r"\bout of step\b",
    "is told in a table (the table lists)": r"\bis told in\b",
    "ended from outside (was killed)": r"\bended from outside\b",
}


def read_cells(path: Path) -> list[dict]:
    "Return the cells of a notebook, each with its source as one text."
    return [cell | dict(source="".join(cell["source"])) for cell in json.loads(path.read_text(encoding="utf-8"))["cells"]]


def parse_code(source: str) -> ast.Module | None:
    "Return the syntax tree of a cell; None for one with commands of IPython."
    try: return ast.parse(re.sub(r"^\s*[%!].*$", "", DIRECTIVE.sub("", source), flags=re.MULTILINE))
    except SyntaxError: return None


def count_lines(node: ast.AST) -> int: return node.end_lineno - node.lineno + 1


def split_sentences(text: str) -> list[str]:
    "Return the sentences of Markdown, without blocks, tables, headings and formulas."
    plain = re.sub(r"^#.*$", "", FENCE.sub(" ", text), flags=re.MULTILINE)
    parts = re.split(r"(?<=[.!?:;])\s+|\n\s*\n|\n\s*[-*\d]+[.)]?\s", plain)
    return [part.strip() for part in parts if len(re.findall(r"\w+", part)) > 2]


def is_property(node: ast.AST) -> bool:
    "Return whether a function is called without brackets."
    names = [d.attr if isinstance(d, ast.Attribute) else getattr(d, "id", "") for d in node.decorator_list]
    return any("property" in name for name in names)


def read_docstrings(trees: list[ast.Module]) -> Iterator[str]:
    "Yield the docstrings of functions and methods."
    for tree in trees:
        for node in ast.walk(tree):
            if isinstance(node, FUNCTIONS) and not is_property(node) and (text := ast.get_docstring(node)): yield text


def starts_with_verb(docstring: str) -> bool:
    "Return whether a docstring begins as an instruction does."
    return re.split(r"\W", docstring, maxsplit=1)[0].lower() in VERBS


def count_nested(tree: ast.AST) -> int:
    "Return how many comprehensions stand in another one."
    return sum(isinstance(inner, COMPREHENSIONS) for node in ast.walk(tree) if isinstance(node, COMPREHENSIONS)
               for inner in ast.walk(node) if inner is not node)


def used_names(cells: list[dict]) -> set[str]:
    "Return the names that the cells of a notebook use which export nothing."
    trees = [tree for cell in cells if (tree := parse_code(cell["source"]))]
    nodes = [node for tree in trees for node in ast.walk(tree)]
    return {n.id for n in nodes if isinstance(n, ast.Name)} | {n.attr for n in nodes if isinstance(n, ast.Attribute)}


def measure_notebook(path: Path) -> dict:
    "Return what a notebook adds to the measures: lists of lengths, and counts."
    cells = read_cells(path)
    code = [c for c in cells if c["cell_type"] == "code" and not HIDDEN.search(c["source"]) and c["source"].strip()]
    export = [c for c in code if EXPORT.search(c["source"])]
    rest = [c for c in code if not EXPORT.search(c["source"])]
    trees = [tree for c in export if (tree := parse_code(c["source"]))]
    top = [node for tree in trees for node in tree.body if isinstance(node, (*FUNCTIONS, ast.ClassDef))]
    functions = [node for tree in trees for node in ast.walk(tree) if isinstance(node, FUNCTIONS)]
    public, used = [n.name for n in top if not n.name.startswith("_")], used_names(rest)
    sentences = [s for c in cells if c["cell_type"] == "markdown" for s in split_sentences(c["source"])]
    defining = [c for c, tree in zip(export, map(parse_code, (c["source"] for c in export)))
                if tree and any(isinstance(n, (*FUNCTIONS, ast.ClassDef)) for n in tree.body)]
    before = {id(c): cells[k - 1] for k, c in enumerate(cells) if k}
    after = {id(c): cells[k + 1 :] for k, c in enumerate(cells)}
    return dict(
        export=[len(DIRECTIVE.sub("", c["source"]).splitlines()) for c in export], shown=len(rest), code=len(code),
        output=sum(bool(c["outputs"]) for c in code), public=len(public), used=sum(name in used for name in public),
        sentences=len(sentences), address=sum(bool(ADDRESS.search(s)) for s in sentences),
        definitions=[count_lines(f) for f in functions], docs=[*read_docstrings(trees)],
        lines=[line for c in export for line in c["source"].splitlines()], nested=sum(map(count_nested, trees)),
        defining=len(defining), explained=sum(before[id(c)]["cell_type"] == "markdown" for c in defining if id(c) in before),
        followed=sum(any(n["cell_type"] == "code" and not EXPORT.search(n["source"]) for n in _until_export(after[id(c)])) for c in defining),
    )


def _until_export(cells: list[dict]) -> Iterator[dict]:
    "Yield the cells up to the next one that exports."
    for cell in cells:
        if cell["cell_type"] == "code" and EXPORT.search(cell["source"]): return
        yield cell


def count_phrase(text: str, pattern: str) -> int: return len(re.findall(pattern, text))


def read_prose(root: Path = ROOT) -> dict[str, str]:
    "Return the prose of each notebook, with the docstrings and comments of its code, and that of each guide, by path."
    nbs = root / "nbs"
    def text_of(path):
        cells = read_cells(path)
        words = [c["source"] if c["cell_type"] == "markdown" else "\n".join(re.findall(r'#\s.*$|"{1,3}[A-Z][^"]*', c["source"], re.MULTILINE))
                 for c in cells]
        return "\n".join(words)
    texts = {p.relative_to(nbs).as_posix(): text_of(p) for p in notebook_paths(root)}
    return texts | {p.relative_to(nbs).as_posix(): p.read_text(encoding="utf-8") for p in sorted((nbs / "guides").glob("*.md"))}


def notebook_paths(root: Path = ROOT) -> list[Path]:
    "Return all notebooks, without copies of JupyterLab."
    return sorted(p for p in (root / "nbs").rglob("*.ipynb") if ".ipynb_checkpoints" not in p.parts)


def count_phrases(root: Path = ROOT) -> dict[str, dict[str, int]]:
    "Return how often each phrase stands in each notebook and guide that has it."
    counts = {path: {name: count_phrase(text, pattern) for name, pattern in PHRASES.items()} for path, text in read_prose(root).items()}
    return {path: {name: n for name, n in found.items() if n} for path, found in counts.items() if any(found.values())}


def count_words(text: str) -> int:
    "Return the number of words of a text; signs of tables and lists are none."
    return len(re.findall(r"\S*\w\S*", text))


def measure_style(root: Path = ROOT) -> dict[str, float]:
    "Return every measure by its name, as a number that can be compared; shares are in %."
    parts = [measure_notebook(path) for path in notebook_paths(root)]
    def total(key): return sum(part[key] for part in parts)
    def join(key): return [value for part in parts for value in part[key]]
    def share(one, of): return round(100 * one / of, 1)
    export, lines, docs, lengths = (join(key) for key in ("export", "lines", "docs", "definitions"))
    return {
        "lines of an export cell, median": statistics.median(export),
        "cells that show or try something, for each export cell": round(total("shown") / len(export), 2),
        "public definitions used in their own notebook, %": share(total("used"), total("public")),
        "definitions with a sentence before them, %": share(total("explained"), total("defining")),
        "definitions with something shown after them, %": share(total("followed"), total("defining")),
        "code cells with an output, %": share(total("output"), total("code")),
        "sentences that say we or you, %": share(total("address"), total("sentences")),
        "docstrings that are no instruction, %": share(sum(not starts_with_verb(d) for d in docs), len(docs)),
        "lines over 100 characters, %": share(sum(len(line) > 100 for line in lines), len(lines)),
        "lines over 120 characters, %": share(sum(len(line) > 120 for line in lines), len(lines)),
        "nested comprehensions, for 100 lines": round(100 * total("nested") / len(lines), 2),
        "lines of a definition, mean": round(statistics.mean(lengths), 2),
        "lines of a definition, 90th percentile": statistics.quantiles(lengths, n=10)[-1],
        "words of README": count_words((root / "README.md").read_text(encoding="utf-8")),
        "phrases that are our own idiom": sum(n for found in count_phrases(root).values() for n in found.values()),
    }


if __name__ == "__main__":
    for name, value in measure_style().items(): print(f"{value:>8g}  {name}")
    for path, found in count_phrases().items(): print(f"{path}: " + ", ".join(f"{name} ({n})" for name, n in found.items()))

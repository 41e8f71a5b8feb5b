"""Read the public definitions of the package from its files, without importing it, and write them as pages of Markdown.

A parameter is documented by the comment at the end of its line, a field of a configuration by its description.
"""

import ast
import io
import re
import tokenize
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

CELL = re.compile(r"^# %% (\S+\.ipynb) #(\S+)", re.MULTILINE)
FIELD_FUNCTIONS = ("Field", "flagged_field", "preset_field", "runtime_field")


@dataclass(frozen=True)
class Parameter:
    "A parameter of a function, or a field of a class."
    name: str  # with its stars
    annotation: str = ""
    default: str = ""
    comment: str = ""


@dataclass(frozen=True)
class Definition:
    "A public function, class, method, property or value."
    name: str
    kind: str  # function, class, method, property or data, as in Sphinx's domain of Python
    doc: str = ""
    signature: str = ""
    parameters: tuple[Parameter, ...] = ()
    returns: str = ""  # the comment after the type of the result
    members: tuple["Definition", ...] = ()
    cell: str = ""  # id of the cell that exports it
    bases: tuple[str, ...] = ()
    value: str = ""  # the expression of a value


@dataclass
class Module:
    "A module of the package, as its file has it."
    path: Path
    root: Path  # the folder of the package
    texts: dict[str, str] = field(default_factory=dict)  # strings to which any module gives a name
    classes: dict[str, str] = field(default_factory=dict)  # public class of any module -> its dotted name

    @cached_property
    def source(self) -> str: return self.path.read_text(encoding="utf-8")

    @cached_property
    def tree(self) -> ast.Module: return ast.parse(self.source)

    @property
    def name(self) -> str:
        parts = self.path.relative_to(self.root.parent).with_suffix("").parts
        return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)

    @property
    def page(self) -> str:
        "The path of its notebook below nbs/, without the suffix."
        return re.sub(r"__init__$", "index", self.path.relative_to(self.root).with_suffix("").as_posix())

    @property
    def doc(self) -> str: return ast.get_docstring(self.tree) or self._first_text

    @property
    def _first_text(self) -> str:
        "The docstring that `__version__` precedes in the package's own module."
        texts = [n.value.value for n in self.tree.body if isinstance(n, ast.Expr) and isinstance(n.value, ast.Constant)]
        return texts[0] if texts else ""

    @cached_property
    def comments(self) -> dict[int, str]:
        "The comment of each line that has one after its code."
        tokens = tokenize.generate_tokens(io.StringIO(self.source).readline)
        return {t.start[0]: t.string.lstrip("# ").strip() for t in tokens
                if t.type == tokenize.COMMENT and t.line[:t.start[1]].strip()}

    @property
    def public(self) -> list[str]:
        "The names in `__all__`, as the last assignment of a list has it."
        lists = [n.value for n in self.tree.body if isinstance(n, ast.Assign) and target_name(n) == "__all__"]
        return next((ast.literal_eval(v) for v in reversed(lists) if isinstance(v, ast.List) and v.elts), [])

    def cell(self, line: int) -> str:
        "The id of the cell that a line of the module comes from."
        before = list(CELL.finditer("\n".join(self.source.splitlines()[:line])))
        return before[-1][2] if before else ""

    @cached_property
    def definitions(self) -> list[Definition]:
        "The public definitions in the order of the module."
        found = {}  # a value that is assigned twice is defined once
        for node in self.tree.body:
            name = getattr(node, "name", "") or target_name(node)
            if name in self.public: found.setdefault(name, self._define(node))
        return [*found.values()]

    def _define(self, node: ast.AST) -> Definition:
        cell = self.cell(node.lineno)
        if isinstance(node, ast.ClassDef): return self._define_class(node, cell)
        if isinstance(node, ast.FunctionDef): return self._define_function(node, "function", cell)
        text = " ".join(self.comments.get(k, "") for k in (node.lineno, node.end_lineno)[:1 + (node.lineno < node.end_lineno)])
        return Definition(target_name(node), "data", text.strip(), cell=cell, value=unparse(node.value))

    def _define_function(self, node: ast.FunctionDef, kind: str, cell: str) -> Definition:
        if any(ast.unparse(d).endswith("property") for d in node.decorator_list): kind = "property"
        parameters = self._parameters(node.args)
        for a in [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]: a.annotation = split_annotation(a.annotation)[0]
        arguments = ast.unparse(node.args)
        if kind != "function" and node.args.args: arguments = re.sub(r"^\w+(, |$)", "", arguments)
        result = f" -> {ast.unparse(node.returns)}" if node.returns else ""
        signature = f"({arguments}){result}" if kind != "property" else ""
        inner = {p.name for p in parameters[:1] if kind != "function" and not p.annotation}
        returns = self.comments.get(node.returns.end_lineno, "") if node.returns else ""
        if any(returns == p.comment for p in parameters): returns = ""
        return Definition(node.name, kind, ast.get_docstring(node) or "", signature,
                          tuple(p for p in parameters if p.name not in inner), returns, cell=cell)

    def _parameters(self, args: ast.arguments) -> list[Parameter]:
        plain = [*args.posonlyargs, *args.args]
        defaults = [None] * (len(plain) - len(args.defaults)) + args.defaults
        pairs = [("", a, d) for a, d in zip(plain, defaults)]
        if args.vararg: pairs.append(("*", args.vararg, None))
        pairs += [("", a, d) for a, d in zip(args.kwonlyargs, args.kw_defaults)]
        if args.kwarg: pairs.append(("**", args.kwarg, None))
        last = {(d or a).end_lineno: a.arg for _, a, d in pairs}  # a comment belongs to the last parameter of its line
        comment = lambda a, line: self.comments.get(line, "") if last[line] == a.arg else ""
        parts = {a.arg: split_annotation(a.annotation) for _, a, _ in pairs}
        return [Parameter(star + a.arg, unparse(parts[a.arg][0]), unparse(d), comment(a, (d or a).end_lineno) or parts[a.arg][1])
                for star, a, d in pairs]

    def _define_class(self, node: ast.ClassDef, cell: str) -> Definition:
        functions = [n for n in node.body if isinstance(n, ast.FunctionDef)]
        init = next((n for n in functions if n.name == "__init__"), None)
        fields = [self._field(n) for n in node.body if isinstance(n, ast.AnnAssign) and not n.target.id.startswith("_")]
        made = self._define_function(init, "method", cell) if init else None
        members = [self._define_function(n, "method", cell) for n in functions if not n.name.startswith("_") and ast.get_docstring(n)]
        return Definition(node.name, "class", ast.get_docstring(node) or "", made.signature if made else "",
                          tuple(made.parameters if made else fields), members=tuple(members), cell=cell,
                          bases=tuple(ast.unparse(b) for b in node.bases))

    def _field(self, node: ast.AnnAssign) -> Parameter:
        comment, value = self.comments.get(node.end_lineno, ""), node.value
        if not isinstance(value, ast.Call) or unparse(value.func) not in FIELD_FUNCTIONS:
            return Parameter(node.target.id, unparse(node.annotation), unparse(value), comment)
        by_name = {k.arg: k.value for k in value.keywords}
        texts = [*value.args, *([by_name["description"]] if "description" in by_name else [])]
        described = [text for a in texts if len(text := self._text(a)) > 12]
        plain = [unparse(a) for a in value.args if len(self._text(a)) <= 12]
        presets = ", ".join(f"{unparse(by_name[k])} ({k})" for k in ("lab", "paper") if k in by_name)
        return Parameter(node.target.id, unparse(node.annotation), presets or next(iter(plain), ""), next(iter(described), comment))

    def _text(self, node: ast.expr) -> str:
        if isinstance(node, ast.Constant) and isinstance(node.value, str): return node.value
        return self.texts.get(node.id, "") if isinstance(node, ast.Name) else ""


def target_name(node: ast.AST) -> str:
    "The name that a statement assigns; empty for other statements."
    target = node.targets[0] if isinstance(node, ast.Assign) else getattr(node, "target", None)
    return target.id if isinstance(target, ast.Name) else ""


def split_annotation(node: ast.AST | None) -> tuple[ast.AST | None, str]:
    "The type and the description of `Annotated[type, description]`; of any other annotation itself and an empty text."
    if not isinstance(node, ast.Subscript) or unparse(node.value) != "Annotated": return node, ""
    kind, text = node.slice.elts[:2]
    return kind, text.value if isinstance(text, ast.Constant) and isinstance(text.value, str) else ""


def unparse(node: ast.AST | None) -> str: return ast.unparse(node) if node else ""


def read_package(root: Path) -> list[Module]:
    "All modules of the package in the order of their names."
    paths = sorted(p for p in root.rglob("*.py") if p.name != "_modidx.py" and "notebooks" not in p.parts)
    texts = {}
    for node in (n for p in paths for n in ast.parse(p.read_text(encoding="utf-8")).body):
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            texts[target_name(node)] = node.value.value
    classes = {}
    modules = [Module(p, root, texts, classes) for p in paths]
    for module in modules:
        found = {node.name for node in module.tree.body if isinstance(node, ast.ClassDef)}
        classes |= {name: f"{module.name}.{name}" for name in module.public if name in found}
    return modules


def public_places(package: Module) -> dict[str, str]:
    "The names that the package itself offers, each with the dotted name of its definition, or of a stage's module."
    node = next(n for n in package.tree.body if target_name(n) == "_NAMES")
    places = {}
    for name, place in ast.literal_eval(node.value).items():
        module, _, attribute = place.partition(":")
        places[name] = f"{package.name}.{module}.{attribute or name}" if module else f"{package.name}.{name}.run"
    return places


# ---- pages

def escape(text: str) -> str:
    "A docstring or comment as Markdown: what is in backticks stays, other special characters are plain."
    parts = re.split(r"(`[^`]*`)", text)
    return "".join(p if p.startswith("`") else re.sub(r"([\\*_\[\]<>{}|$#])", r"\\\1", p) for p in parts)


def code(text: str) -> str:
    marks = "`" * (1 + max(map(len, re.findall("`+", text)), default=0))
    return f"{marks}{text}{marks}".replace("|", "\\|") if text else ""


def shorten(text: str, limit: int = 60) -> str: return text if len(text) <= limit else text[:limit - 1] + "…"


def render_parameters(parameters: tuple[Parameter, ...]) -> list[str]:
    "A table of the parameters of which something is known beyond the signature."
    if not any(p.comment for p in parameters): return []
    head = lambda p: code(p.name + (f": {shorten(p.annotation)}" if p.annotation else "") + (f" = {shorten(p.default)}" if p.default else ""))
    return ["| parameter | meaning |", "| --- | --- |", *[f"| {head(p)} | {escape(p.comment)} |" for p in parameters], ""]


def render_definition(module: Module, definition: Definition, fence: str = "::::") -> list[str]:
    "A definition as a directive of Sphinx's domain of Python; a member has a shorter fence, and no link of its own."
    up = "../" * (module.page.count("/") + 1)
    lines = [f"{fence}{{py:{definition.kind}}} {definition.name}{definition.signature}", ""]
    if len(fence) > 3:
        lines += [f'<a class="source-link" href="{up}{module.page}.html#cell-{definition.cell}">source</a>', ""]
    if definition.value: lines += [code(shorten(definition.value, 200)), ""]
    link = lambda name: f"{{py:obj}}`{name} <{module.classes[name]}>`" if name in module.classes else code(name)
    if definition.bases: lines += ["Bases: " + ", ".join(map(link, definition.bases)), ""]
    lines += [escape(definition.doc), "", *render_parameters(definition.parameters)]
    if definition.returns: lines += [f"Returns {escape(definition.returns)}", ""]
    for member in definition.members: lines += render_definition(module, member, fence[:-1])
    return [*lines, fence, ""]


def short_name(module: Module) -> str:
    "The name of a module below the package."
    return module.name.partition(".")[2] or module.name


def render_module(module: Module) -> str:
    "The page of a module."
    up = "../" * (module.page.count("/") + 1)
    lines = [f"# {escape(short_name(module))}", "", f":::{{py:module}} {module.name}", ":::", "", escape(module.doc), "",
             f"[The notebook of this module]({up}{module.page}.ipynb)", ""]
    for definition in module.definitions: lines += render_definition(module, definition)
    return "\n".join(lines)


def reference_page(module: Module) -> str: return f"reference/{module.page if module.page != 'index' else 'package'}.md"


def room_of(module: Module) -> str:
    "The room of a module; empty for a stage."
    return module.page.rpartition("/")[0]


def render_index(modules: list[Module]) -> str:
    "The first page of the reference: the names that the package offers, and all modules."
    package = next(m for m in modules if m.page == "index")
    others = [m for m in modules if m.definitions and m is not package]
    lines = ["# Reference", "", "Everything that `mixsd_nb` offers to users, with parameters, defaults and a link to the cell of the "
             "notebook that defines it.", "", "## Names of the package", "", "`import mixsd_nb` loads none of them; each is imported "
             "when it is first used.", "", "| name | definition |", "| --- | --- |"]
    lines += [f"| `mixsd_nb.{name}` | {{py:obj}}`{definition_of(modules, place)}` |" for name, place in public_places(package).items()]
    lines += ["", "The names of stages, such as `mixsd_nb.train`, are modules with a function `run`.", "", "## Modules", ""]
    for room in sorted({room_of(m) for m in others}):
        rows = [(short_name(m), m.page, (m.doc.splitlines() or [""])[0]) for m in others if room_of(m) == room]
        lines += [f"### {room or 'Stages'}", "", "| module | purpose |", "| --- | --- |"]
        lines += [f"| [{escape(name)}]({page}.md) | {escape(purpose)} |" for name, page, purpose in rows] + [""]
    return "\n".join([*lines, "```{toctree}", ":hidden:", *[m.page for m in others], "```", ""])


def definition_of(modules: list[Module], place: str) -> str:
    "The dotted name under which a name is defined, which another module of the room may offer too."
    defined = {f"{m.name}.{d.name}" for m in modules for d in m.definitions}
    if place in defined: return place
    room, _, name = place.rpartition(".")
    return next((d for d in sorted(defined) if d.startswith(room + ".") and d.endswith("." + name)), place)

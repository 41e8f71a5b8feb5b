"""Formulas as MathML, which browsers draw by themselves, so that a page needs no script from another host."""

import html
import re
from xml.etree import ElementTree

from docutils import nodes
from docutils.utils.math.latex2mathml import tex2mathml

# Commands that docutils does not know, as others that look alike.
ALIKE = [(r"\\dots\b", r"\\ldots"), (r"\\texttt\b", r"\\text"), (r"\\[bB]igg?[lrm]?(?![A-Za-z])", "")]
NAMESPACE = "http://www.w3.org/1998/Math/MathML"
ElementTree.register_namespace("", NAMESPACE)


def place_indices(formula: ElementTree.Element) -> None:
    "Put the index of a letter with an accent beside the letter, and not below it."
    for element in formula.iter(f"{{{NAMESPACE}}}munderover"):
        letter, index, accent = element
        if accent.get("stretchy") != "false": continue
        element.tag = f"{{{NAMESPACE}}}msub"
        over = ElementTree.Element(f"{{{NAMESPACE}}}mover", accent="true")
        over.extend([letter, accent])
        element[:] = [over, index]


def to_mathml(tex: str, block: bool = False) -> str:
    "A formula as MathML; docutils' MathError for a command that is not known."
    for pattern, alike in ALIKE: tex = re.sub(pattern, alike, tex)
    text = re.sub(r"&(?!lt;|gt;|amp;)\w+;", lambda m: html.unescape(m[0]), tex2mathml(tex.strip(), as_block=block))
    formula = ElementTree.fromstring(text)
    place_indices(formula)
    return ElementTree.tostring(formula, encoding="unicode")


def visit_math(translator, node):
    translator.body.append(to_mathml(node.astext()))
    raise nodes.SkipNode


def visit_block(translator, node):
    translator.body.append(f'<div class="formula" tabindex="0">{to_mathml(node.astext(), block=True)}</div>')
    raise nodes.SkipNode


def setup(app):
    app.add_html_math_renderer("mathml", (visit_math, None), (visit_block, None))
    return dict(parallel_read_safe=True, parallel_write_safe=True)

"""Formulas in MathML as TeX, and the pieces of TeX that Word's formulas need too.

Most pages state the TeX of a formula (<annotation encoding="application/x-tex"> of KaTeX, MathJax and Wikipedia), which
the tokenizer copies. Others have the structure alone (MathML Core, W3C), whose characters in a row are wrong: a
fraction of 1 and 2 is 12."""

import html as html_entities
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import cache
from typing import Any

from lxml import etree

MAX_LEVELS, MAX_TEX_CHARS = 24, 10_000  # of nested structures; of TeX. A formula beyond them stays as it is
MAX_MATHML_BYTES = 200_000
ALIGNMENT = "\x00"  # what a run of text has for "&", which XML cannot hold
# Characters for which pylatexenc has text, or a command of a package.
_SYMBOLS = {
    "\u2192": r"\to", "\u2190": r"\leftarrow", "\u00d7": r"\times", "\u00f7": r"\div", "\u00b7": r"\cdot",
    "\u2026": r"\ldots", "\u00b0": r"^\circ", "\u00ac": r"\neg", "\u2022": r"\bullet", "\u2216": r"\setminus",
    "\u2205": r"\emptyset", "\u221a": r"\surd", "\u2032": "'", "\u2033": "''", "\u2061": "", "\u2062": "",
    "\u2063": "", "\u2064": "", "\u200b": "", "\u2016": r"\|", "\\": r"\backslash", "{": r"\{", "}": r"\}",
    "#": r"\#", "$": r"\$", "%": r"\%", "_": r"\_", "~": r"\sim", "^": r"\wedge", "&": ALIGNMENT,
}  # fmt: skip
ACCENTS = {
    "\u0302": "hat", "^": "hat", "\u0303": "tilde", "~": "tilde", "\u0304": "bar", "\u00af": "bar", "\u20d7": "vec",
    "\u0305": "overline", "\u2192": "overrightarrow", "\u20d6": "overleftarrow", "\u20e1": "overleftrightarrow",
    "\u0307": "dot", "\u0308": "ddot", "\u20db": "dddot", "\u030c": "check", "\u0306": "breve", "\u0301": "acute",
    "\u0300": "grave", "\u030a": "mathring", "\u0332": "underline",
}  # fmt: skip
_WIDE_ACCENTS = {"hat": "widehat", "tilde": "widetilde", "bar": "overline", "vec": "overrightarrow"}
GROUPS = {"\u23de": r"\overbrace", "\u23df": r"\underbrace", "\u2192": r"\xrightarrow", "\u2190": r"\xleftarrow"}
MATRICES = {
    "()": "pmatrix",
    "[]": "bmatrix",
    "{}": "Bmatrix",
    "||": "vmatrix",
    "\u2016\u2016": "Vmatrix",
    "{": "cases",
}
FUNCTIONS = frozenset((
    "arccos", "arcsin", "arctan", "arg", "cos", "cosh", "cot", "coth", "csc", "deg", "det", "dim", "exp", "gcd", "hom",
    "inf", "ker", "lg", "lim", "liminf", "limsup", "ln", "log", "max", "min", "Pr", "sec", "sin", "sinh", "sup", "tan",
    "tanh",
))  # fmt: skip
LIMIT_OPERATOR = re.compile(
    r"\\(?:lim|max|min|sup|inf|limsup|liminf|det|gcd|Pr|sum|prod|operatorname\{\w+\}|(?:under|over)brace\{.*\})"
)
_ATOM = re.compile(r"\\[a-zA-Z]+|\\?[^\\{}]")
_BASE = re.compile(r"\d+|\\[a-zA-Z]+\{[^{}]*\}|" + _ATOM.pattern)
_COMMAND_END = re.compile(r"\\[a-zA-Z]+$")
_NAME = re.compile(r"(?:\\(?:mathrm|text)\{)?([A-Za-z]+)\}?")
_TEX_SIGNS = re.compile(r"[\\{}$&#%_^~]")


class FormulaTooLarge(Exception):
    """A formula is over one of the limits."""


def in_row(parts: Iterable[str]) -> str:
    """The parts, with a space between a command and a letter. Raises FormulaTooLarge beyond MAX_TEX_CHARS."""
    row: list[str] = []
    size = 0
    for part in parts:
        size += len(part)
        if size > MAX_TEX_CHARS:
            raise FormulaTooLarge
        if row and part[:1].isalpha() and _COMMAND_END.search(row[-1][-40:]):
            row.append(" ")
        if part:
            row.append(part)
    return "".join(row)


@cache
def _commands() -> dict[int, str]:
    from pylatexenc.latexencode import get_builtin_uni2latex_dict  # loaded at the first formula

    start = r"\ensuremath{"
    commands = get_builtin_uni2latex_dict().items()
    inner = {code: tex[len(start) : -1] for code, tex in commands if tex.startswith(start)}
    letters = {code: tex[len(r"\mathit{") : -1] for code, tex in inner.items() if tex.startswith(r"\mathit{")}
    scripts = {code: tex.replace("mathscr", "mathcal") for code, tex in inner.items() if "mathscr" in tex}
    return inner | letters | scripts


def symbol(character: str) -> str:
    return _SYMBOLS[character] if character in _SYMBOLS else _commands().get(ord(character), character)


def symbols(text: str) -> str:
    return in_row(map(symbol, text))


def text_argument(text: str) -> str:
    r"""Text in a formula: 50 % -> \text{50 \%}."""
    return rf"\text{{{_TEX_SIGNS.sub(_in_text, text)}}}"


def _in_text(sign: re.Match[str]) -> str:
    return {"\\": r"\textbackslash{}", "^": r"\^{}", "~": r"\~{}"}.get(sign[0], "\\" + sign[0])


def is_atom(tex: str) -> bool:
    return _ATOM.fullmatch(tex) is not None


def argument(tex: str) -> str:
    return tex if is_atom(tex) else f"{{{tex}}}"


def scripts(sub: str, sup: str) -> str:
    if sup and not sup.strip("'"):
        return sup + (f"_{argument(sub)}" if sub else "")
    return (f"_{argument(sub)}" if sub else "") + (f"^{argument(sup)}" if sup else "")


def scripted(base: str, sub: str, sup: str) -> str:
    is_delimited = base.startswith(("(", "[", "|", "\\left")) and base.endswith((")", "]", "|"))
    return (base if is_delimited or _BASE.fullmatch(base) else f"{{{base}}}") + scripts(sub, sup)


def as_operator(tex: str) -> str:
    """Letters as the name of a function."""
    name = _NAME.fullmatch(tex)
    if name is None:
        return tex
    return "\\" + name[1] if name[1] in FUNCTIONS else rf"\operatorname{{{name[1]}}}"


def accented(character: str, base: str) -> str:
    if character not in ACCENTS:
        return rf"\overset{{{symbols(character)}}}{{{base}}}" if character.strip() else base
    accent = ACCENTS[character]
    return rf"\{accent if is_atom(base) else _WIDE_ACCENTS.get(accent, accent)}{{{base}}}"


def environment(name: str, rows: Sequence[str]) -> str:
    return rf"\begin{{{name}}} " + r" \\ ".join(rows) + rf" \end{{{name}}}"


# MathML (W3C MathML Core, and MathML 3 for fences, enclosures and prescripts).

_VARIANTS = {
    "normal": "mathrm", "bold": "mathbf", "bold-italic": "mathbf", "double-struck": "mathbb", "script": "mathcal",
    "bold-script": "mathcal", "fraktur": "mathfrak", "bold-fraktur": "mathfrak", "sans-serif": "mathsf",
    "monospace": "mathtt",
}  # fmt: skip
_NO_TEX = frozenset(("annotation", "annotation-xml", "mphantom", "mspace", "maligngroup", "malignmark", "none"))
_OPERATORS = frozenset("\u2211\u220f\u2210\u22c3\u22c2\u22c1\u22c0\u2a01\u2a02\u2a00\u2a06")
_INTEGRALS = frozenset("\u222b\u222c\u222d\u222e\u222f\u2230")
_ZERO = re.compile(r"0(?:\.0*)?[a-z%]*")
_FENCES = {"(": ")", "[": "]", "{": "}", "|": "|", "\u2016": "\u2016"}


def with_tex(html: bytes) -> bytes:
    """The page, UTF-8, with the TeX of each formula that has none, `<math ...>$\\frac{1}{2}$</math>`, in as many bytes,
    so that positions stay; the same object where there is no such formula. Linear in the page's bytes."""
    pieces: list[bytes] = []
    kept = at = 0
    while (start := html.find(b"<math", at)) >= 0:
        end = html.find(b"</math", start)
        inside = html.find(b">", start) + 1
        if end < 0 or not inside:
            break
        at = html.find(b">", end) + 1 or len(html)
        if inside <= end and (tex := _tex_of(html[inside:end])) is not None:
            formula = b">$" + html_entities.escape(tex, quote=False).encode() + b"$</math>"
            if (padding := at - start - len(b"<math") - len(formula)) >= 0:
                pieces += [html[kept:start], b"<math", b" " * padding, formula]
                kept = at
    return b"".join([*pieces, html[kept:]]) if pieces else html


def _tex_of(content: bytes) -> str | None:
    """The TeX of what stands in <math>; None where the page states it, or there is no structure to write."""
    if b"<" not in content or len(content) > MAX_MATHML_BYTES or b"application/x-tex" in content:
        return None
    root = etree.fromstring(b"<math>" + content + b"</math>", etree.HTMLParser(encoding="utf-8"))
    math = next(root.iter("math"), None) if root is not None else None
    try:
        tex = "" if math is None else mathml_tex(math)
    except FormulaTooLarge:
        return None
    return tex or None


def mathml_tex(element: Any) -> str:
    """The TeX of an element of MathML, without dollar signs. Raises FormulaTooLarge."""
    return " ".join(_row(element, MAX_LEVELS).replace(ALIGNMENT, r"\&").split())


def _children(element: Any) -> list[Any]:
    return [child for child in element if isinstance(child.tag, str)]


def _row(element: Any, levels: int) -> str:
    return in_row(_row_parts(_children(element), levels))


def _row_parts(children: Sequence[Any], levels: int) -> Iterator[str]:
    at = 0
    while at < len(children):
        part, step = _fenced_matrix(children[at : at + 3], levels) or (_write(children[at], levels), 1)
        yield part
        at += step


def _fenced_matrix(children: Sequence[Any], levels: int) -> tuple[str, int] | None:
    """(a matrix with the fences beside it, their number of elements): ( matrix ) and { matrix."""
    if len(children) < 2 or _name(children[0]) != "mo" or _name(children[1]) != "mtable":
        return None
    start = _words(children[0])
    end = _words(children[2]) if len(children) == 3 and _name(children[2]) == "mo" else ""
    if end and end == _FENCES.get(start):
        return _table(children[1], levels, MATRICES[start + end]), 3
    return (_table(children[1], levels, "cases"), 2) if start == "{" else None


def _name(element: Any) -> str:
    return element.tag.rpartition(":")[2].lower()


def _words(element: Any) -> str:
    """The text inside. Entities of MathML are not among HTML 4's, which the parser knows."""
    return html_entities.unescape(" ".join("".join(element.itertext()).split()))


def _write(element: Any, levels: int) -> str:
    name = _name(element)
    if name in _NO_TEX:
        return ""
    if name in _TOKENS:
        return _TOKENS[name](element)
    if not levels:
        raise FormulaTooLarge
    return _WRITERS[name](element, levels - 1) if name in _WRITERS else _row(element, levels - 1)


def _parts(element: Any, levels: int, count: int) -> list[str]:
    """The TeX of its first children; "" for those that it lacks."""
    written = [_write(child, levels) for child in _children(element)[:count]]
    return written + [""] * (count - len(written))


def _identifier(element: Any) -> str:
    text, style = _words(element), _VARIANTS.get(element.get("mathvariant", ""), "")
    if text.isascii() and text.isalpha():
        if len(text) > 1 and not style:
            return as_operator(text)
        return rf"\{style}{{{text}}}" if style else text
    return symbols(text)


def _operator(element: Any) -> str:
    text = _words(element)
    return as_operator(text) if len(text) > 1 and text.isascii() and text.isalpha() else symbols(text)


def _text(element: Any) -> str:
    words = _words(element)
    return text_argument(words) if words.strip("\u00a0 ") else ""


_TOKENS: dict[str, Callable[[Any], str]] = {
    "mi": _identifier, "mo": _operator, "mn": lambda element: symbols(_words(element)), "mtext": _text, "ms": _text,
}  # fmt: skip


def _fraction(element: Any, levels: int) -> str:
    top, bottom = _parts(element, levels, 2)
    if _ZERO.fullmatch(element.get("linethickness", "").strip()):
        return rf"{{{top} \atop {bottom}}}"
    return (
        f"{argument(top)}/{argument(bottom)}" if element.get("bevelled") == "true" else rf"\frac{{{top}}}{{{bottom}}}"
    )


def _root(element: Any, levels: int) -> str:
    base, degree = _parts(element, levels, 2)
    return rf"\sqrt[{degree}]{{{base}}}"


def _with_scripts(element: Any, levels: int) -> str:
    base, *given = _parts(element, levels, 3)
    sub, sup = ("", given[0]) if _name(element) == "msup" else given
    return scripted(base, sub, sup)


def _with_limits(element: Any, levels: int) -> str:
    """munder, mover and munderover: limits of an operator, an accent, a brace, or what stands above and below."""
    name, children = _name(element), _children(element)
    base, *given = _parts(element, levels, 3)
    under, over = ("", given[0]) if name == "mover" else given
    words = _words(children[0]) if children else ""
    if words in _OPERATORS or words in _INTEGRALS or LIMIT_OPERATOR.fullmatch(base):
        return f"{base}{scripts(under, over)} "
    for above, tex in ((False, under), (True, over)):
        if tex:
            base = _with_mark(_words(children[-1 if above else 1]), tex, base, above)
    return base


def _with_mark(character: str, tex: str, base: str, above: bool) -> str:
    """The base with a mark above or below it; tex: of the mark."""
    command = GROUPS.get(character, "")
    if command.endswith("brace"):
        return f"{command}{{{base}}}"
    if above and character in ACCENTS:
        return accented(character, base)
    if not above and character in ("_", "\u0332", "\u00af", "\u203e"):
        return rf"\underline{{{base}}}"
    if above and character == "\u203e":
        return rf"\overline{{{base}}}"
    return rf"\{'over' if above else 'under'}set{{{tex}}}{{{base}}}"


def _with_prescripts(element: Any, levels: int) -> str:
    """mmultiscripts: a base, pairs of scripts, and behind <mprescripts> those that stand before it."""
    base, *rest = _children(element) or [element]
    after: list[str] = []
    before: list[str] = []
    pairs = after
    for child in rest:
        if _name(child) == "mprescripts":
            pairs = before
        else:
            pairs.append(_write(child, levels))
    columns = [("".join(side[0::2]), "".join(side[1::2])) for side in (before, after)]
    start = f"{{}}{scripts(*columns[0])}" if any(columns[0]) else ""
    return in_row([start, scripted(_write(base, levels), *columns[1])])


def _table(element: Any, levels: int, name: str = "matrix") -> str:
    if levels < 1:
        raise FormulaTooLarge
    rows = [row for row in _children(element) if _name(row) in ("mtr", "mlabeledtr")]
    return environment(name, [" & ".join(_row(cell, levels - 1) for cell in _children(row)) for row in rows])


def _fenced(element: Any, levels: int) -> str:
    separators = element.get("separators", ",").strip()
    parts = [_write(child, levels) for child in _children(element)]
    between = [separators[min(k, len(separators) - 1)] if separators else "" for k in range(len(parts) - 1)]
    inner = in_row(piece for pair in zip(parts, [*between, ""], strict=True) for piece in pair)
    return in_row([symbols(element.get("open", "(")), inner, symbols(element.get("close", ")"))])


def _enclosed(element: Any, levels: int) -> str:
    inner, notation = _row(element, levels), element.get("notation", "longdiv").split()
    return rf"\boxed{{{inner}}}" if "box" in notation or "roundedbox" in notation else inner


_WRITERS: dict[str, Callable[[Any, int], str]] = {
    "mfrac": _fraction, "mroot": _root, "msub": _with_scripts, "msup": _with_scripts, "msubsup": _with_scripts,
    "munder": _with_limits, "mover": _with_limits, "munderover": _with_limits, "mmultiscripts": _with_prescripts,
    "mtable": _table, "mfenced": _fenced, "menclose": _enclosed,
    "msqrt": lambda element, levels: rf"\sqrt{{{_row(element, levels)}}}",
    "semantics": lambda element, levels: _parts(element, levels, 1)[0],
    "maction": lambda element, levels: _parts(element, levels, 1)[0],
}  # fmt: skip

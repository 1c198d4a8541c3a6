"""Formulas of Word documents, Office Math Markup (ECMA-376, part 1, 22.1), as TeX."""

import re
from collections.abc import Callable
from typing import Any

from gristmill.data_pipeline.extraction.formulas import (
    ALIGNMENT,
    FUNCTIONS,
    GROUPS,
    LIMIT_OPERATOR,
    MATRICES,
    MAX_LEVELS,
    FormulaTooLarge,
    accented,
    argument,
    as_operator,
    environment,
    in_row,
    scripted,
    scripts,
    symbol,
    symbols,
    text_argument,
)

_STYLES = {
    "p": "mathrm", "b": "mathbf", "bi": "mathbf", "script": "mathcal", "fraktur": "mathfrak", "double-struck": "mathbb",
    "sans-serif": "mathsf", "monospace": "mathtt",
}  # fmt: skip
_TALL = re.compile(r"\\(?:frac|sum|prod|i*int|oint|big[a-z]+|begin|overbrace|underbrace|overset|underset)(?![a-zA-Z])")
_WORDS = re.compile(r"[A-Za-z]+|[^A-Za-z]", re.DOTALL)


def formula_tex(formula: Any) -> str:
    """The TeX of an m:oMath element, without dollar signs; its words if it is nested too deep or too long."""
    try:
        tex = _row(formula, MAX_LEVELS).replace(ALIGNMENT, "")
    except FormulaTooLarge:
        tex = " ".join(text.text or "" for text in formula.iter("{*}t"))
    return " ".join(tex.split())


def _row(parent: Any, levels: int) -> str:
    """The children of an element, in a row; "" for None. levels: of structures that may stand in it."""
    return in_row(_structure(child, levels) for child in (() if parent is None else parent))


def _name(element: Any) -> str:
    """The name of what stands in a formula; "" for properties, what was deleted, and comments."""
    name = element.tag.rpartition("}")[2] if isinstance(element.tag, str) else ""
    return "" if name.endswith("Pr") or name in ("del", "moveFrom") else name


def _structure(element: Any, levels: int) -> str:
    name = _name(element)
    if not name:
        return ""
    if name == "r":
        return _run(element)
    if not levels:
        raise FormulaTooLarge
    return _WRITERS[name](element, levels - 1) if name in _WRITERS else _row(element, levels - 1)


def _part(element: Any, name: str, levels: int) -> str:
    return _row(element.find(f"{{*}}{name}"), levels)


def _property(element: Any, name: str, default: str) -> str:
    """The value of one of the element's properties; default: where it has none."""
    property_ = element.find(f"{{*}}{_name(element)}Pr/{{*}}{name}")
    if property_ is None:
        return default
    return next((value for key, value in property_.items() if key.rpartition("}")[2] == "val"), "")


def _is_hidden(element: Any, name: str) -> bool:
    return _property(element, name, "0") not in ("0", "off", "false")


def _run(run: Any) -> str:
    text = "".join(part.text or "" for part in run.iterfind("{*}t"))
    properties = run.iterfind("{*}rPr/*")  # those of Word's own have other names
    styles = {_name(style): next(iter(style.values()), "1") for style in properties}
    if styles.get("nor", "0") not in ("0", "off", "false") and any(map(str.isalpha, text)):
        return text_argument(text)
    style = _STYLES.get(styles.get("scr", ""), _STYLES.get(styles.get("sty", ""), ""))
    parts = []
    for word in _WORDS.findall(text):
        if word in FUNCTIONS and style == "mathrm":
            parts.append("\\" + word)
        elif word.isascii() and word.isalpha():
            parts.append(f"\\{style}{{{word}}}" if style else word)
        elif style == "mathbf" and word.isalpha():
            parts.append(rf"\boldsymbol{{{symbol(word)}}}")
        else:
            parts.append(symbol(word))
    return in_row(parts)


def _scripted(element: Any, levels: int) -> str:
    """sSub, sSup, sSubSup, and sPre, whose scripts stand before."""
    base, sub, sup = (_part(element, name, levels) for name in ("e", "sub", "sup"))
    return in_row([f"{{}}{scripts(sub, sup)}", base]) if _name(element) == "sPre" else scripted(base, sub, sup)


def _fraction(element: Any, levels: int) -> str:
    top, bottom = _part(element, "num", levels), _part(element, "den", levels)
    kind = _property(element, "type", "bar")
    if kind == "noBar":
        return rf"{{{top} \atop {bottom}}}"
    return f"{argument(top)}/{argument(bottom)}" if kind in ("lin", "skw") else rf"\frac{{{top}}}{{{bottom}}}"


def _root(element: Any, levels: int) -> str:
    degree = "" if _is_hidden(element, "degHide") else _part(element, "deg", levels)
    return rf"\sqrt{f'[{degree}]' if degree else ''}{{{_part(element, 'e', levels)}}}"


def _n_ary(element: Any, levels: int) -> str:
    sub, sup = ("" if _is_hidden(element, f"{name}Hide") else _part(element, name, levels) for name in ("sub", "sup"))
    operator = symbols(_property(element, "chr", "\u222b"))
    return f"{operator}{scripts(sub, sup)} {_part(element, 'e', levels)}"


def _function(element: Any, levels: int) -> str:
    name, argument = as_operator(_part(element, "fName", levels)), _part(element, "e", levels)
    return name + argument if argument.startswith(("(", "[", "\\left")) else f"{name} {argument}"


def _delimited(element: Any, levels: int) -> str:
    start, end = _property(element, "begChr", "("), _property(element, "endChr", ")")
    parts = element.findall("{*}e")
    inner = [child for part in parts for child in part if _name(child)]
    name = _name(inner[0]) if len(inner) == len(parts) == 1 else ""
    kind = MATRICES.get(start + end, "")
    if kind and (name == "m" or (name == "eqArr" and kind == "cases")):
        return _matrix(inner[0], levels - 1, kind)
    if name == "f" and start + end == "()" and _property(inner[0], "type", "bar") == "noBar":
        return rf"\binom{{{_part(inner[0], 'num', levels - 1)}}}{{{_part(inner[0], 'den', levels - 1)}}}"
    separator = symbols(_property(element, "sepChr", "|"))
    tex = separator.join(_row(part, levels) for part in parts)
    start, end = symbols(start), symbols(end)
    if start and end and not _TALL.search(tex):
        return in_row([start, tex, end])
    return in_row([rf"\left{start or '.'}", tex, rf"\right{end or '.'}"])


def _matrix(element: Any, levels: int, kind: str = "") -> str:
    """A matrix, or equations below each other, whose runs have marks of alignment."""
    if levels < 0:
        raise FormulaTooLarge
    rows = [_row(row, levels).replace(ALIGNMENT, "&") for row in element.iterfind("{*}e")]
    rows += [" & ".join(_row(cell, levels) for cell in row.iterfind("{*}e")) for row in element.iterfind("{*}mr")]
    return environment(kind or ("aligned" if _name(element) == "eqArr" else "matrix"), rows)


def _accented(element: Any, levels: int) -> str:
    return accented(_property(element, "chr", "\u0302"), _part(element, "e", levels))


def _with_bar(element: Any, levels: int) -> str:
    side = "over" if _property(element, "pos", "bot") == "top" else "under"
    return rf"\{side}line{{{_part(element, 'e', levels)}}}"


def _grouped(element: Any, levels: int) -> str:
    """A brace or an arrow above or below its base."""
    character, is_above = _property(element, "chr", "\u23df"), _property(element, "pos", "bot") == "top"
    base = _part(element, "e", levels)
    command = GROUPS.get(character, "")
    if command.endswith("arrow"):  # TeX has the text above the arrow first
        return f"{command}[{base}]{{}}" if is_above else f"{command}{{{base}}}"
    if command:
        return f"{command}{{{base}}}"
    return rf"\{'over' if is_above else 'under'}set{{{symbols(character)}}}{{{base}}}"


def _with_limit(element: Any, levels: int) -> str:
    base, limit = as_operator(_part(element, "e", levels)), _part(element, "lim", levels)
    is_below = _name(element) == "limLow"
    if LIMIT_OPERATOR.fullmatch(base):
        return base + ("_" if is_below else "^") + argument(limit)
    return rf"\{'under' if is_below else 'over'}set{{{limit}}}{{{_part(element, 'e', levels)}}}"


def _boxed(element: Any, levels: int) -> str:
    return rf"\boxed{{{_part(element, 'e', levels)}}}"


def _phantom(element: Any, levels: int) -> str:
    """Content that takes its place; it is text unless it is not shown."""
    return "" if _property(element, "show", "1") in ("0", "off", "false") else _part(element, "e", levels)


_WRITERS: dict[str, Callable[[Any, int], str]] = {
    "sSub": _scripted, "sSup": _scripted, "sSubSup": _scripted, "sPre": _scripted, "f": _fraction, "rad": _root,
    "nary": _n_ary, "func": _function, "d": _delimited, "m": _matrix, "eqArr": _matrix, "acc": _accented,
    "bar": _with_bar, "groupChr": _grouped, "limLow": _with_limit, "limUpp": _with_limit, "borderBox": _boxed,
    "phant": _phantom,
}  # fmt: skip

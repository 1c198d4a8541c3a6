"""Formulas of Word documents, Office Math Markup (ECMA-376, part 1, 22.1), as TeX."""

import re
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

MAX_FORMULA_LEVELS, MAX_FORMULA_CHARS = 24, 10_000  # of nested structures; of TeX. Beyond them formulas are their words
ALIGNMENT = "\x00"  # what a run of text has for "&", which XML cannot hold
# Characters for which pylatexenc has text, or a command of a package.
_SYMBOLS = {
    "\u2192": r"\to", "\u2190": r"\leftarrow", "\u00d7": r"\times", "\u00f7": r"\div", "\u00b7": r"\cdot",
    "\u2026": r"\ldots", "\u00b0": r"^\circ", "\u00ac": r"\neg", "\u2022": r"\bullet", "\u2216": r"\setminus",
    "\u2205": r"\emptyset", "\u221a": r"\surd", "\u2032": "'", "\u2033": "''", "\u2061": "", "\u2062": "",
    "\u2063": "", "\u200b": "", "\u2016": r"\|", "\\": r"\backslash", "{": r"\{", "}": r"\}", "#": r"\#", "$": r"\$",
    "%": r"\%", "_": r"\_", "~": r"\sim", "^": r"\wedge", "&": ALIGNMENT,
}  # fmt: skip
_ACCENTS = {
    "\u0302": "hat", "^": "hat", "\u0303": "tilde", "~": "tilde", "\u0304": "bar", "\u00af": "bar", "\u20d7": "vec",
    "\u0305": "overline", "\u2192": "overrightarrow", "\u20d6": "overleftarrow", "\u20e1": "overleftrightarrow",
    "\u0307": "dot", "\u0308": "ddot", "\u20db": "dddot", "\u030c": "check", "\u0306": "breve", "\u0301": "acute",
    "\u0300": "grave", "\u030a": "mathring", "\u0332": "underline",
}  # fmt: skip
_WIDE_ACCENTS = {"hat": "widehat", "tilde": "widetilde", "bar": "overline", "vec": "overrightarrow"}
_GROUPS = {"\u23de": r"\overbrace", "\u23df": r"\underbrace", "\u2192": r"\xrightarrow", "\u2190": r"\xleftarrow"}
_MATRICES = {
    "()": "pmatrix",
    "[]": "bmatrix",
    "{}": "Bmatrix",
    "||": "vmatrix",
    "\u2016\u2016": "Vmatrix",
    "{": "cases",
}
_STYLES = {
    "p": "mathrm", "b": "mathbf", "bi": "mathbf", "script": "mathcal", "fraktur": "mathfrak", "double-struck": "mathbb",
    "sans-serif": "mathsf", "monospace": "mathtt",
}  # fmt: skip
_FUNCTIONS = frozenset((
    "arccos", "arcsin", "arctan", "arg", "cos", "cosh", "cot", "coth", "csc", "deg", "det", "dim", "exp", "gcd", "hom",
    "inf", "ker", "lg", "lim", "liminf", "limsup", "ln", "log", "max", "min", "Pr", "sec", "sin", "sinh", "sup", "tan",
    "tanh",
))  # fmt: skip
_LIMIT_OPERATOR = re.compile(
    r"\\(?:lim|max|min|sup|inf|limsup|liminf|det|gcd|Pr|sum|prod|operatorname\{\w+\}|(?:under|over)brace\{.*\})"
)
_ATOM = re.compile(r"\\[a-zA-Z]+|\\?[^\\{}]")
_BASE = re.compile(r"\d+|\\[a-zA-Z]+\{[^{}]*\}|" + _ATOM.pattern)
_TALL = re.compile(r"\\(?:frac|sum|prod|i*int|oint|big[a-z]+|begin|overbrace|underbrace|overset|underset)(?![a-zA-Z])")
_WORDS = re.compile(r"[A-Za-z]+|[^A-Za-z]", re.DOTALL)
_COMMAND_END = re.compile(r"\\[a-zA-Z]+$")
_NAME = re.compile(r"(?:\\(?:mathrm|text)\{)?([A-Za-z]+)\}?")
_TEX_SIGNS = re.compile(r"[\\{}$&#%_^~]")


class _FormulaTooLarge(Exception):
    """A formula is over one of the limits."""


def formula_tex(formula: Any) -> str:
    """The TeX of an m:oMath element, without dollar signs; its words if it is nested too deep or too long."""
    try:
        tex = _row(formula, MAX_FORMULA_LEVELS).replace(ALIGNMENT, "")
    except _FormulaTooLarge:
        tex = " ".join(text.text or "" for text in formula.iter("{*}t"))
    return " ".join(tex.split())


def _row(parent: Any, levels: int) -> str:
    """The children of an element, in a row; "" for None. levels: of structures that may stand in it."""
    parts: list[str] = []
    size = 0
    for child in () if parent is None else parent:
        part = _structure(child, levels)
        size += len(part)
        if size > MAX_FORMULA_CHARS:
            raise _FormulaTooLarge
        if part:
            parts.append(part)
    return _in_row(parts)


def _in_row(parts: Sequence[str]) -> str:
    """The parts, with a space between a command and a letter."""
    row: list[str] = []
    for part in parts:
        if row and part[:1].isalpha() and _COMMAND_END.search(row[-1][-40:]):
            row.append(" ")
        row.append(part)
    return "".join(row)


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
        raise _FormulaTooLarge
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


@cache
def _commands() -> dict[int, str]:
    from pylatexenc.latexencode import get_builtin_uni2latex_dict  # an optional extra

    start = r"\ensuremath{"
    commands = get_builtin_uni2latex_dict().items()
    inner = {code: tex[len(start) : -1] for code, tex in commands if tex.startswith(start)}
    letters = {code: tex[len(r"\mathit{") : -1] for code, tex in inner.items() if tex.startswith(r"\mathit{")}
    scripts = {code: tex.replace("mathscr", "mathcal") for code, tex in inner.items() if "mathscr" in tex}
    return inner | letters | scripts


def _symbol(character: str) -> str:
    return _SYMBOLS.get(character) or _commands().get(ord(character), character)


def _run(run: Any) -> str:
    text = "".join(part.text or "" for part in run.iterfind("{*}t"))
    properties = run.iterfind("{*}rPr/*")  # those of Word's own have other names
    styles = {_name(style): next(iter(style.values()), "1") for style in properties}
    if styles.get("nor", "0") not in ("0", "off", "false") and any(map(str.isalpha, text)):
        return rf"\text{{{_TEX_SIGNS.sub(_in_text, text)}}}"
    style = _STYLES.get(styles.get("scr", ""), _STYLES.get(styles.get("sty", ""), ""))
    parts = []
    for word in _WORDS.findall(text):
        if word in _FUNCTIONS and style == "mathrm":
            parts.append("\\" + word)
        elif word.isascii() and word.isalpha():
            parts.append(f"\\{style}{{{word}}}" if style else word)
        elif style == "mathbf" and word.isalpha():
            parts.append(rf"\boldsymbol{{{_symbol(word)}}}")
        else:
            parts.append(_symbol(word))
    return _in_row(parts)


def _in_text(sign: re.Match[str]) -> str:
    return {"\\": r"\textbackslash{}", "^": r"\^{}", "~": r"\~{}"}.get(sign[0], "\\" + sign[0])


def _argument(tex: str) -> str:
    return tex if _ATOM.fullmatch(tex) else f"{{{tex}}}"


def _scripts(sub: str, sup: str) -> str:
    if sup and not sup.strip("'"):
        return sup + (f"_{_argument(sub)}" if sub else "")
    return (f"_{_argument(sub)}" if sub else "") + (f"^{_argument(sup)}" if sup else "")


def _scripted(element: Any, levels: int) -> str:
    """sSub, sSup, sSubSup, and sPre, whose scripts stand before."""
    base = _part(element, "e", levels)
    scripts = _scripts(_part(element, "sub", levels), _part(element, "sup", levels))
    if _name(element) == "sPre":
        return _in_row([f"{{}}{scripts}", base])
    is_delimited = base.startswith(("(", "[", "|", "\\left")) and base.endswith((")", "]", "|"))
    return (base if is_delimited or _BASE.fullmatch(base) else f"{{{base}}}") + scripts


def _fraction(element: Any, levels: int) -> str:
    top, bottom = _part(element, "num", levels), _part(element, "den", levels)
    kind = _property(element, "type", "bar")
    if kind == "noBar":
        return rf"{{{top} \atop {bottom}}}"
    return f"{_argument(top)}/{_argument(bottom)}" if kind in ("lin", "skw") else rf"\frac{{{top}}}{{{bottom}}}"


def _root(element: Any, levels: int) -> str:
    degree = "" if _is_hidden(element, "degHide") else _part(element, "deg", levels)
    return rf"\sqrt{f'[{degree}]' if degree else ''}{{{_part(element, 'e', levels)}}}"


def _n_ary(element: Any, levels: int) -> str:
    sub, sup = ("" if _is_hidden(element, f"{name}Hide") else _part(element, name, levels) for name in ("sub", "sup"))
    operator = "".join(map(_symbol, _property(element, "chr", "\u222b")))
    return f"{operator}{_scripts(sub, sup)} {_part(element, 'e', levels)}"


def _as_operator(tex: str) -> str:
    """Letters as the name of a function."""
    name = _NAME.fullmatch(tex)
    if name is None:
        return tex
    return "\\" + name[1] if name[1] in _FUNCTIONS else rf"\operatorname{{{name[1]}}}"


def _function(element: Any, levels: int) -> str:
    name, argument = _as_operator(_part(element, "fName", levels)), _part(element, "e", levels)
    return name + argument if argument.startswith(("(", "[", "\\left")) else f"{name} {argument}"


def _delimited(element: Any, levels: int) -> str:
    start, end = _property(element, "begChr", "("), _property(element, "endChr", ")")
    parts = element.findall("{*}e")
    inner = [child for part in parts for child in part if _name(child)]
    name = _name(inner[0]) if len(inner) == len(parts) == 1 else ""
    environment = _MATRICES.get(start + end, "")
    if environment and (name == "m" or (name == "eqArr" and environment == "cases")):
        return _matrix(inner[0], levels - 1, environment)
    if name == "f" and start + end == "()" and _property(inner[0], "type", "bar") == "noBar":
        return rf"\binom{{{_part(inner[0], 'num', levels - 1)}}}{{{_part(inner[0], 'den', levels - 1)}}}"
    separator = "".join(map(_symbol, _property(element, "sepChr", "|")))
    tex = separator.join(_row(part, levels) for part in parts)
    start, end = ("".join(map(_symbol, character)) for character in (start, end))
    if start and end and not _TALL.search(tex):
        return _in_row([start, tex, end])
    return _in_row([rf"\left{start or '.'}", tex, rf"\right{end or '.'}"])


def _matrix(element: Any, levels: int, environment: str = "") -> str:
    """A matrix, or equations below each other, whose runs have marks of alignment."""
    if levels < 0:
        raise _FormulaTooLarge
    rows = [_row(row, levels).replace(ALIGNMENT, "&") for row in element.iterfind("{*}e")]
    rows += [" & ".join(_row(cell, levels) for cell in row.iterfind("{*}e")) for row in element.iterfind("{*}mr")]
    environment = environment or ("aligned" if _name(element) == "eqArr" else "matrix")
    return rf"\begin{{{environment}}} " + r" \\ ".join(rows) + rf" \end{{{environment}}}"


def _accented(element: Any, levels: int) -> str:
    character, base = _property(element, "chr", "\u0302"), _part(element, "e", levels)
    if character not in _ACCENTS:
        return rf"\overset{{{''.join(map(_symbol, character))}}}{{{base}}}" if character.strip() else base
    accent = _ACCENTS[character]
    return rf"\{accent if _ATOM.fullmatch(base) else _WIDE_ACCENTS.get(accent, accent)}{{{base}}}"


def _with_bar(element: Any, levels: int) -> str:
    side = "over" if _property(element, "pos", "bot") == "top" else "under"
    return rf"\{side}line{{{_part(element, 'e', levels)}}}"


def _grouped(element: Any, levels: int) -> str:
    """A brace or an arrow above or below its base."""
    character, is_above = _property(element, "chr", "\u23df"), _property(element, "pos", "bot") == "top"
    base = _part(element, "e", levels)
    command = _GROUPS.get(character, "")
    if command.endswith("arrow"):  # TeX has the text above the arrow first
        return f"{command}[{base}]{{}}" if is_above else f"{command}{{{base}}}"
    if command:
        return f"{command}{{{base}}}"
    symbol = "".join(map(_symbol, character))
    return rf"\{'over' if is_above else 'under'}set{{{symbol}}}{{{base}}}"


def _with_limit(element: Any, levels: int) -> str:
    base, limit = _as_operator(_part(element, "e", levels)), _part(element, "lim", levels)
    is_below = _name(element) == "limLow"
    if _LIMIT_OPERATOR.fullmatch(base):
        return base + ("_" if is_below else "^") + _argument(limit)
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

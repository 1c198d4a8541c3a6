"""Reader of LaTeX sources, by the parser and the tables of pylatexenc, in linear time and whatever the source lacks."""

import re
from collections.abc import Iterator, Sequence
from contextlib import suppress
from typing import Any

from pylatexenc import latex2text, latexwalker, macrospec

from gristmill.data_pipeline.readers.document import Record
from gristmill.data_pipeline.readers.source import SourceConfig
from gristmill.data_pipeline.readers.whole_files import BLANK_LINES, CODE, Refused, code_lines

_BODY = re.compile(r"\\begin\s*\{document\}(.*?)(?:\\end\s*\{document\}|\Z)", re.DOTALL)
_TITLE = re.compile(r"\\title\s*(?:\[[^]\n]{0,300}\]\s*)?(?=\{)")
MAX_TITLE_CHARS = 1000  # of its source
_SECTIONS = ("part", "chapter", "section", "subsection", "subsubsection", "paragraph", "subparagraph")
_LISTING = re.compile(
    r"\\begin\s*\{(?:(?:lstlisting|Verbatim)\*?\}(?:\[[^]\n]{0,300}\])?"
    r"|minted\}(?:\[[^]\n]{0,300}\])?\{[^}\n]{0,300}\})"
)
_LISTING_END = re.compile(r"\\end\s*\{(?:lstlisting|Verbatim|minted)\*?\}")
# Outside of listings: rules of tables, whose brackets no other macro has; definitions in a line of their own, with
# braces in them at most once; addresses, in which % begins no comment; and accents over nothing, which are signs.
_NO_TEXT = re.compile(
    r"(?P<listing>\\begin\{verbatim\}.*?(?:\\end\{verbatim\}|\Z))"
    r"|\\cmidrule\s{0,9}(?:\[[^]\n]{0,50}\])?(?:\([^)\n]{0,50}\))?\s{0,9}\{[^}\n]{0,50}\}"
    r"|^(?P<open>[ \t]*\{?)\\[gex]?def\s{0,9}\\[A-Za-z@]{1,50}[^{}\n\\]{0,50}"
    r"\{(?>[^{}\n]|\{[^{}\n]{0,300}\}){0,300}\}(?=[ \t]*(?:%|$))"
    r"|\\(?P<accent>[\^~])\{\}"
    r"|(?P<macro>\\(?:url|href|path|nolinkurl)\s{0,9}\{)(?P<address>[^{}\n]{0,2000})(?=\})",
    re.DOTALL | re.MULTILINE,
)
_IN_ADDRESS = re.compile(r"(?<!\\)[%#&]")
_TOKENS = re.compile(r"\\[A-Za-z]{1,30}Tok\{|(?<!\\)[{}]")  # of a listing that pandoc has coloured
_ESCAPED = re.compile(
    r"\\(text(?:backslash|greater|less|ascii(?:tilde|grave|circum)|quotesingle)|[^A-Za-z\s])(?:\{\})?"
)
_PLACES = re.compile(r"%(?:\((\d)\))?s")  # of arguments in what the library writes for a macro
_WORDS = re.compile(r"[^\W_]+(?:[.,]?[ \n][^\W_]+)*")
_ENVIRONMENT = re.compile(r"((?:(?!\n\n)\s)*)\\(begin|end)(?![^\W\d_])(?:\s*\{([\w* ._-]+)\})?")
MAX_LATEX_DEPTH = 60  # of groups, arguments, environments and formulas: the parser calls itself
MAX_CHARS = 1000  # of text in one node: the library copies it at each token that it adds

# Macros whose arguments the library does not read, and those whose argument it drops although it is text.
_ARGUMENTS = {
    "href": "{{", "part": "*[{", "paragraph": "*[{", "textfrac": "{{", "thanks": "{", "multicolumn": "{{{",
    "multirow": "{{{", "cline": "{", "bibitem": "[{", "rule": "[{{", "parbox": "[[[{{", "raisebox": "{[[{",
    "resizebox": "*{{{", "scalebox": "{[{", "makebox": "[[{", "framebox": "[[{", "colorbox": "{{", "fcolorbox": "{{{",
    "bibliographystyle": "{", "pagestyle": "{", "thispagestyle": "{", "pagenumbering": "{", "addtocounter": "{{",
    "fontsize": "{{", "specialrule": "{{{", "addlinespace": "[", "theoremstyle": "{", "newtheorem": "*{[{[",
    "hypersetup": "{", "definecolor": "{{{", "captionsetup": "[{", "graphicspath": "{", "SI": "[{[{", "qty": "[{{",
    "si": "[{", "unit": "[{", "num": "[{", "caption": "*[{",
}  # fmt: skip
_ENVIRONMENT_ARGUMENTS = {
    "tabularx": "{{", "tabular*": "{{", "longtable": "[{", "thebibliography": "{", "minipage": "[[[{",
    "algorithmic": "[", "algorithm": "[", "algorithm*": "[", "wrapfigure": "[{[{", "wraptable": "[{[{",
    "multicols": "{", "spacing": "{", "subfigure": "[[[{", "subtable": "[[[{", "threeparttable": "[", "adjustbox": "{",
    "table*": "[", "figure*": "[", "sidewaystable": "[", "sidewaysfigure": "[", "Highlighting": "[",
}  # fmt: skip
# Text of macros by the place of its argument; of those that are not here and have arguments, all of them.
_TEXT_ARGUMENTS = {
    "parbox": 5, "raisebox": 4, "resizebox": 4, "scalebox": 3, "makebox": 3, "framebox": 3, "colorbox": 2,
    "fcolorbox": 3, "caption": 3, "si": 2, "unit": 2, "num": 2,
}  # fmt: skip
_DROPPED = (
    "rule", "bibliographystyle", "pagestyle", "thispagestyle", "pagenumbering", "addtocounter", "fontsize",
    "specialrule", "addlinespace", "theoremstyle", "newtheorem", "hypersetup", "definecolor", "captionsetup",
    "graphicspath",
)  # fmt: skip
_LISTS, _TABLES = ("itemize", "enumerate", "description"), ("tabular", "tabularx", "tabular*", "longtable")
_PARAGRAPHS = ("quote", "quotation", "theorem", "lemma", "proof", "definition", "proposition", "corollary", "remark")
_TABLE_PARTS = ("endfirsthead", "endhead", "endfoot", "endlastfoot")  # of a long table
_COUNTER = re.compile(r"\\setcounter\s*\{enum[iv]{1,3}\}\s*\{(\d{1,9})\}")
_DRAWINGS = ("tikzpicture", "pgfpicture", "picture")
_BEFORE_ITEM = re.compile(rf"\n\n(?={CODE} *(?:-|\d+\.) )")
_SIGNS = {
    "S": "\u00a7", "P": "\u00b6", "LaTeX": "LaTeX", "TeX": "TeX", "textless": "<", "textgreater": ">", "textbar": "|",
    "textquotedbl": '"', "newline": "\n", "linebreak": "\n", "hfill": " ", "enspace": " ", "slash": "/", "and": " ",
    "copyright": "\u00a9", "pounds": "\u00a3", "euro": "\u20ac", "ddag": "\u2021", "glqq": "\u201e", "grqq": "\u201c",
    "textasciicircum": "^", "textasciigrave": "`", "flqq": "\u00ab", "frqq": "\u00bb", "checkmark": "\u2713",
}  # fmt: skip
# Of the package siunitx.
_UNITS = {
    "kilo": "k", "mega": "M", "giga": "G", "tera": "T", "centi": "c", "milli": "m", "micro": "\u00b5", "nano": "n",
    "pico": "p", "metre": "m", "meter": "m", "second": "s", "gram": "g", "kilogram": "kg", "kelvin": "K", "mole": "mol",
    "ampere": "A", "hertz": "Hz", "newton": "N", "pascal": "Pa", "joule": "J", "watt": "W", "volt": "V",
    "ohm": "\u03a9", "tesla": "T", "electronvolt": "eV", "litre": "L", "liter": "L", "minute": "min", "hour": "h",
    "day": "d", "bit": "bit", "byte": "B", "percent": "%", "degree": "\u00b0", "celsius": "\u00b0C",
    "degreeCelsius": "\u00b0C", "angstrom": "\u00c5", "per": "/", "squared": "^2", "cubed": "^3",
}  # fmt: skip
_CODE_SIGNS = {
    "textbackslash": "\\", "textasciigrave": "`", "textgreater": ">", "textless": "<", "textasciitilde": "~",
    "textasciicircum": "^", "textquotesingle": "'",
}  # fmt: skip
_KEPT = ("texttt", "textsf", "textup", "textmd", "mbox")
# Macros whose dropped arguments may hold paragraphs. In others a paragraph means that an end is missing, as in TeX.
_LONG = re.compile(r"(?:re)?new|provide|title|author|date|thanks|keywords|footnote")
MAX_LONG_CHARS = 1000  # of such an argument with paragraphs


def convert_latex(content: bytes, source: SourceConfig) -> Iterator[Record]:
    """One record: the text of the document's body with its formulas as TeX, without comments. Included files are not
    read; of macros that the document defines the arguments are text. Metadata: title, which \\maketitle writes."""
    latex = content.decode(source.encoding, "replace").replace(CODE, "")
    latex = _LISTING_END.sub(r"\\end{verbatim}", _LISTING.sub(r"\\begin{verbatim}", latex))
    latex = _NO_TEXT.sub(_without_what_is_no_text, latex)
    title = ""
    if parsed := _TITLE.search(latex):
        group = _Walker(latex[parsed.end() : parsed.end() + MAX_TITLE_CHARS]).get_latex_expression(0)[0]
        title = " ".join(_Text("", False).nodelist_to_text([group]).split())
    body = _BODY.search(latex)
    nodes = _Walker(body[1] if body else latex).get_latex_nodes()[0]
    text = _Text(title, source.blocks.format == "markdown").nodelist_to_text(nodes)
    lines = [line if line.startswith(CODE) else line.strip() for line in text.split("\n")]
    text = BLANK_LINES.sub("\n\n", "\n".join(lines)).strip().replace(CODE, "")
    if not text:
        raise Refused("no_text", "no text in the document")
    yield Record(0, text, language=source.language or "", metadata={"title": title} if title else {})


def _without_what_is_no_text(match: re.Match[str]) -> str:
    if match["accent"]:
        return r"\textasciicircum{}" if match["accent"] == "^" else r"\textasciitilde{}"
    address = _IN_ADDRESS.sub(r"\\\g<0>", match["address"] or "")
    return (match["listing"] or match["open"] or match["macro"] or "") + address


class _Walker(latexwalker.LatexWalker):  # type: ignore[misc]
    """The library's parser without its quadratic and exponential times.

    It reads the arguments of a macro again as text where one is missing at the end of the input, and so those of each
    macro inside: 40 times "\\frac{" never end. Here a missing argument is empty."""

    def __init__(self, latex: str):
        if latex.rfind("\\begin{verbatim}") > latex.rfind("\\end{verbatim}"):
            latex += "\n\\end{verbatim}"  # looked for behind each \begin otherwise
        context = latexwalker.get_default_latex_context_db()
        macros = [macrospec.MacroSpec(name, arguments) for name, arguments in _ARGUMENTS.items()]
        environments = [
            macrospec.EnvironmentSpec(name, arguments) for name, arguments in _ENVIRONMENT_ARGUMENTS.items()
        ]
        context.add_context_category("arguments", macros=macros, environments=environments, prepend=True)
        # \verb needs a character behind it, and spaces behind a macro end at a paragraph.
        super().__init__(latex + "\n\n", latex_context=context, tolerant_parsing=True)
        self._depth = self._node_start = self._last_end = 0

    def get_token(self, pos: int, include_brace_chars: Any = None, environments: bool = True, **options: Any) -> Any:
        """A run of words is one token where the caller takes a list of nodes. Every MAX_CHARS an empty comment ends
        the node of text."""
        if environments:
            if pos != self._last_end:
                self._node_start = pos
            elif pos - self._node_start > MAX_CHARS:
                self._node_start = pos
                return latexwalker.LatexToken("comment", "", pos=pos, len=0, pre_space="", post_space="")
            if words := _WORDS.match(self.s, pos):
                self._last_end = words.end()
                return latexwalker.LatexToken("char", words[0], pos=pos, len=words.end() - pos, pre_space="")
            if mark := _ENVIRONMENT.match(self.s, pos):
                return _environment_token(mark)
        token = super().get_token(pos, include_brace_chars=include_brace_chars, environments=environments, **options)
        if environments and token.tok == "char":
            self._last_end = token.pos + token.len
        return token

    def get_latex_expression(self, pos: int, strict_braces: Any = None, parsing_state: Any = None) -> Any:
        """The library's, or an empty node where the paragraph or the source ends."""
        state = parsing_state or self.make_parsing_state()
        with suppress(latexwalker.LatexWalkerEndOfStream):
            node, start, length = super().get_latex_expression(pos, strict_braces, state)
            if not (node.isNodeType(latexwalker.LatexCharsNode) and node.chars == "\n\n"):
                return node, start, length
        return self.make_node(latexwalker.LatexCharsNode, parsing_state=state, chars="", pos=pos, len=0), pos, 0

    def get_latex_nodes(self, *arguments: Any, **options: Any) -> Any:
        self._depth += 1
        if self._depth > MAX_LATEX_DEPTH:
            raise Refused("nested_too_deep", f"braces and environments nest deeper than {MAX_LATEX_DEPTH} levels")
        nodes = super().get_latex_nodes(*arguments, **options)
        self._depth -= 1
        return nodes


def _environment_token(mark: re.Match[str]) -> Any:
    """That of \\begin or \\end; without a name it is text, as in the library, which copies the rest of the source."""
    space, macro, name = mark.groups()
    start, kind = mark.end(1), f"{macro}_environment" if name else "char"
    return latexwalker.LatexToken(kind, name or f"\\{macro}", pos=start, len=mark.end() - start, pre_space=space)


class _Text(latex2text.LatexNodes2Text):  # type: ignore[misc]
    """The library's writer, with headings and listings of our own."""

    def __init__(self, title: str, is_markdown: bool):
        def heading(text: str, level: int) -> str:
            return f"\n\n{'#' * min(level, 6)} {text}\n\n" if is_markdown and level else f"\n\n{text}\n\n"

        def section(node: Any) -> str:
            text = self.nodelist_to_text([node.nodeargd.argnlist[-1]]).strip()
            return heading(text, _SECTIONS.index(node.macroname))

        def listing(node: Any) -> str:
            return code_lines(node.nodeargd.verbatim_text, "", is_markdown)

        def coloured_listing(node: Any) -> str:
            code = "".join(child.latex_verbatim() for child in node.nodelist)
            code = _ESCAPED.sub(lambda sign: _CODE_SIGNS.get(sign[1], sign[1]), _TOKENS.sub("", code))
            return code_lines(code, "", is_markdown)

        def footnote(node: Any) -> str:
            return f"[{' '.join(self.nodelist_to_text([node.nodeargd.argnlist[-1]]).split())}]"

        context = latex2text.get_default_latex_context_db()
        macros = [latex2text.MacroTextSpec(name, simplify_repl=section) for name in _SECTIONS]
        macros += [latex2text.MacroTextSpec(name, discard=False) for name in _KEPT]
        macros += [
            latex2text.MacroTextSpec("includegraphics", simplify_repl=""),
            latex2text.MacroTextSpec("maketitle", simplify_repl=lambda node: title and heading(title, 1)),
            latex2text.MacroTextSpec("today", simplify_repl=""),
            latex2text.MacroTextSpec("verb", simplify_repl=lambda node: node.nodeargd.verbatim_text),
            latex2text.MacroTextSpec("cline", simplify_repl=""),
            latex2text.MacroTextSpec("footnote", simplify_repl=footnote),
            latex2text.MacroTextSpec("SI", simplify_repl="%(2)s %(4)s"),
            latex2text.MacroTextSpec("qty", simplify_repl="%(2)s %(3)s"),
            latex2text.MacroTextSpec("bibitem", simplify_repl="\n\n"),
            latex2text.MacroTextSpec("multicolumn", simplify_repl="%(3)s"),
            latex2text.MacroTextSpec("multirow", simplify_repl="%(3)s"),
        ]
        texts = _SIGNS | _UNITS | dict.fromkeys(_DROPPED, "")
        texts |= {name: f"%({place})s" for name, place in _TEXT_ARGUMENTS.items()}
        macros += [latex2text.MacroTextSpec(name, simplify_repl=text) for name, text in texts.items()]
        environments = [
            latex2text.EnvironmentTextSpec("verbatim", simplify_repl=listing),
            latex2text.EnvironmentTextSpec("Highlighting", simplify_repl=coloured_listing),
        ]
        self._is_markdown = is_markdown
        for names, write in ((_LISTS, self._list), (_TABLES, self._table), (_DRAWINGS, self._drawing)):
            environments += [latex2text.EnvironmentTextSpec(name, simplify_repl=write) for name in names]
        environments += [latex2text.EnvironmentTextSpec(name, simplify_repl="\n\n%s\n\n") for name in _PARAGRAPHS]
        context.add_context_category("documents", macros=macros, environments=environments, prepend=True)
        super().__init__(latex_context=context, math_mode="verbatim", keep_comments=False, strict_latex_spaces=False)

    def nodelist_to_text(self, nodelist: Sequence[Any]) -> str:
        """The library's, without the search for the last line's start behind each node."""
        parts: list[str] = []
        previous: Any = None
        for node in nodelist:
            if self._is_bare_macro_node(previous) and node.isNodeType(latexwalker.LatexCharsNode):
                parts.append(previous.macro_post_space)
            parts.append(self.node_to_text(node))
            previous = node
        return "".join(parts)

    def _list(self, node: Any) -> str:
        """The items, each behind its label, "- " or its number; what is in an item stands below its text."""
        parts: list[list[Any]] = [[]]  # of what is before the first item, and of each item with its \\item
        for child in node.nodelist:
            if _is_macro(child, "item"):
                parts.append([])
            parts[-1].append(child)
        counters = (_COUNTER.fullmatch(child.latex_verbatim()) for child in parts[0])
        start = next((int(counter[1]) + 1 for counter in counters if counter), 1)
        lines = [self.nodelist_to_text(parts[0]).strip()]
        for number, (item, *content) in enumerate(parts[1:], start):
            marker = f"{number}. " if node.environmentname == "enumerate" else "- "
            if label := "".join(map(self._groupnodecontents_to_text, filter(None, _arguments(item)))).strip():
                marker = f"{' '.join(label.split())} "
            text = BLANK_LINES.sub("\n\n", self.nodelist_to_text(content).strip())
            first, *others = _BEFORE_ITEM.sub("\n", text).split("\n")
            if first.startswith(CODE):  # of a list or of code in the item
                first, others = "", [first, *others]
            lines.append(f"{CODE}{marker}{first.strip()}")
            lines += [f"{CODE}  {line.removeprefix(CODE)}" if line.strip() else "" for line in others]
        return "\n\n" + "\n".join(line.rstrip() for line in lines) + "\n\n"

    def _table(self, node: Any) -> str:
        """A line for each row, its cells joined by bars."""
        rows: list[list[list[Any]]] = [[[]]]
        captions, num_heads = [], 0  # a long table's head is written once
        for child in node.nodelist:
            if _is_macro(child, "caption"):
                captions.append(child)
            elif child.isNodeType(latexwalker.LatexMacroNode) and child.macroname in _TABLE_PARTS:
                num_heads = num_heads if num_heads or not child.macroname.endswith("head") else len(rows)
                rows[num_heads:] = [[[]]]
            elif _is_macro(child, "\\") or _is_macro(child, "tabularnewline"):
                rows.append([[child] if self._unended(child, child.macroname) else []])
            elif child.isNodeType(latexwalker.LatexSpecialsNode) and child.specials_chars == "&":
                rows[-1].append([])
            else:
                rows[-1][-1].append(child)
        texts = [[" ".join(self.nodelist_to_text(cell).split()) for cell in row] for row in rows]
        texts = [row for row in texts if any(row)]
        before = f"\n\n{self.nodelist_to_text(captions)}\n\n"
        if self._is_markdown and texts and max(map(len, texts)) > 1:
            texts = [[cell.replace("|", "\\|") for cell in row] for row in texts]
            texts.insert(1, ["---"] * len(texts[0]))
            return before + "\n".join(f"| {' | '.join(row)} |" for row in texts) + "\n\n"
        return before + "\n".join(" | ".join(row) for row in texts) + "\n\n"

    def _drawing(self, node: Any) -> str:
        """Nothing, or the text of one without an end."""
        has_end = node.latex_verbatim().endswith(f"\\end{{{node.environmentname}}}")
        return "" if has_end else self.nodelist_to_text(node.nodelist)

    def macro_node_to_text(self, node: Any) -> str:
        return self._unended(node, node.macroname) or super().macro_node_to_text(node)

    def environment_node_to_text(self, node: Any) -> str:
        return self._unended(node, node.environmentname) + super().environment_node_to_text(node)

    def _unended(self, node: Any, name: str) -> str:
        """The text of the arguments if one of them has no end: it holds text that follows."""
        arguments = _arguments(node)
        if any(_is_unended(argument, name) for argument in arguments):
            return "".join(map(self._groupnodecontents_to_text, arguments))
        return ""

    def apply_simplify_repl(self, node: Any, simplify_repl: Any, what: str) -> str:
        """The library's where the macro has its arguments, else those that it has. The text of an environment does not
        depend on its arguments."""
        arguments = _arguments(node)
        places = [] if callable(simplify_repl) else _PLACES.findall(simplify_repl)
        is_environment = _is_environment(node)
        num_places = 0 if is_environment else max([len(places), *map(int, filter(None, places))])
        if num_places <= len(arguments) and (is_environment or not any(map(_is_missing, arguments))):
            with suppress(AttributeError, IndexError, TypeError):  # of a function that looks for an argument
                return str(super().apply_simplify_repl(node, simplify_repl, what))
        text = "".join(map(self._groupnodecontents_to_text, arguments))
        return text + self.nodelist_to_text(node.nodelist) if is_environment else text


def _is_macro(node: Any, name: str) -> bool:
    return bool(node.isNodeType(latexwalker.LatexMacroNode)) and node.macroname == name


def _arguments(node: Any) -> Sequence[Any]:
    return node.nodeargd.argnlist if node.nodeargd and node.nodeargd.argnlist else ()


def _is_unended(argument: Any, name: str) -> bool:
    if argument is None or not argument.isNodeType(latexwalker.LatexGroupNode):
        return False
    source, end = argument.parsing_state.s, argument.pos + argument.len
    has_paragraphs = source.find("\n\n", argument.pos, end) >= 0
    return end == len(source) or (has_paragraphs and (not _LONG.match(name) or argument.len > MAX_LONG_CHARS))


def _is_missing(argument: Any) -> bool:
    return argument is not None and argument.isNodeType(latexwalker.LatexCharsNode) and not argument.chars


def _is_environment(node: Any) -> bool:
    return bool(node.isNodeType(latexwalker.LatexEnvironmentNode))

"""Readers of documents in markup of their own: Jupyter notebooks, LaTeX, Wikipedia dumps and Stack Exchange posts."""

import io
import re
from collections.abc import Iterator
from html import escape
from typing import Any, BinaryIO

import orjson
from lxml import etree

from gristmill.data_pipeline.extraction.blocks import NotAPage, whole_text
from gristmill.data_pipeline.readers.compression import Damaged, blocks
from gristmill.data_pipeline.readers.document import Record, Unreadable, excerpt, first_line, too_large
from gristmill.data_pipeline.readers.source import SourceConfig
from gristmill.data_pipeline.readers.whole_files import Refused, local_name, missing_extra

# Jupyter notebooks.


def convert_notebook(content: bytes, source: SourceConfig) -> Iterator[Record]:
    """One record: Markdown cells as they are, code cells between fences; outputs are left out.

    Source: nbformat 4, and 3 with its worksheets."""
    notebook = orjson.loads(content)
    if not isinstance(notebook, dict):
        raise Refused("bad_ipynb", "no notebook: its JSON is no object")
    if not isinstance(notebook.get("cells") or [], list):
        raise Refused("bad_ipynb", "no notebook: its cells are no list")
    cells = list(notebook.get("cells") or [])
    for sheet in notebook.get("worksheets") or ():
        cells += sheet.get("cells") or []
    if not all(isinstance(cell, dict) for cell in cells):
        raise Refused("bad_ipynb", "no notebook: a cell is no object")
    metadata = notebook.get("metadata") or {}
    known = (metadata.get("kernelspec") or {}).get("language") or (metadata.get("language_info") or {}).get("name")
    language = known if isinstance(known, str) else ""
    text = "\n\n".join(filter(None, (_cell(cell, language) for cell in cells)))
    if not text:
        raise Refused("no_text", "no cell with text")
    fields = {"programming_language": language} if language else {}
    yield Record(0, text, language=source.language or "", metadata=fields)


def _cell(cell: dict[str, Any], language: str) -> str:
    content = cell.get("source", cell.get("input", ""))
    lines = content if isinstance(content, list) else [content]
    if not all(isinstance(line, str) for line in lines):
        raise Refused("bad_ipynb", "no notebook: the source of a cell is no text")
    text = "".join(lines).strip("\n")
    if not text.strip() or cell.get("cell_type") == "raw":
        return ""
    if cell.get("cell_type") == "heading":
        return "#" * min(max(int(cell.get("level", 1)), 1), 6) + " " + " ".join(text.split())
    if cell.get("cell_type") != "code":
        return text
    fence = "`" * max(3, 1 + max((len(run) for run in _TICKS.findall(text)), default=0))
    return f"{fence}{cell.get('language', language)}\n{text}\n{fence}"


# LaTeX.

_BODY = re.compile(r"\\begin\s*\{document\}(.*?)(?:\\end\s*\{document\}|\Z)", re.DOTALL)
_TITLE = re.compile(r"\\title\s*\{([^{}]{1,300})\}")
_SECTIONS = ("part", "chapter", "section", "subsection", "subsubsection", "paragraph", "subparagraph")
_TICKS = re.compile("`+")
_BRACES = re.compile(r"\\(?:begin|end|left|right)|(?<!\\)[{}\[\]]")
_BLANK_LINES = re.compile(r"\n[ \t]*(?:\n[ \t]*)+")
_LISTING = re.compile(
    r"\\begin\s*\{(?:(?:lstlisting|Verbatim)\*?\}(?:\[[^]\n]*\])?|minted\}(?:\[[^]\n]*\])?\{[^}\n]*\})"
)
_LISTING_END = re.compile(r"\\end\s*\{(?:lstlisting|Verbatim|minted)\*?\}")
CODE = "\x01"  # before each line of code, which is written as it is
MAX_LATEX_DEPTH = 100  # of braces and environments: the parser calls itself


def convert_latex(content: bytes, source: SourceConfig) -> Iterator[Record]:
    """One record: the text of the document's body with its formulas as TeX, without comments. Included files are not
    read. Metadata: title."""
    try:
        from pylatexenc import latex2text  # an optional extra
    except ModuleNotFoundError:
        raise missing_extra("latex", "pylatexenc") from None
    latex = content.decode(source.encoding, "replace").replace(CODE, "")
    latex = _LISTING_END.sub(r"\\end{verbatim}", _LISTING.sub(r"\\begin{verbatim}", latex))
    if _brace_depth(latex) > MAX_LATEX_DEPTH:
        raise Refused("nested_too_deep", f"braces and environments nest deeper than {MAX_LATEX_DEPTH} levels")
    context = latex2text.get_default_latex_context_db()
    is_markdown = source.blocks.format == "markdown"

    def heading(node: Any, l2tobj: Any) -> str:
        level = _SECTIONS.index(node.macroname) if is_markdown else 0
        title = l2tobj.nodelist_to_text([node.nodeargd.argnlist[-1]]).strip()
        return f"\n\n{'#' * min(level, 6)}{' ' if level else ''}{title}\n\n"

    def listing(node: Any) -> str:
        return _code_lines(node.nodeargd.verbatim_text, "", is_markdown)

    macros = [latex2text.MacroTextSpec(name, simplify_repl=heading) for name in _SECTIONS]
    macros += [
        latex2text.MacroTextSpec("includegraphics", simplify_repl=""),
        latex2text.MacroTextSpec("verb", simplify_repl=lambda node: node.nodeargd.verbatim_text),
    ]
    environments = [latex2text.EnvironmentTextSpec("verbatim", simplify_repl=listing)]
    context.add_context_category("documents", macros=macros, environments=environments, prepend=True)
    body = _BODY.search(latex)
    converter = latex2text.LatexNodes2Text(
        latex_context=context, math_mode="verbatim", keep_comments=False, strict_latex_spaces=False
    )
    text = converter.latex_to_text(body[1] if body else latex, tolerant_parsing=True)
    lines = [line if line.startswith(CODE) else line.strip() for line in text.split("\n")]
    text = _BLANK_LINES.sub("\n\n", "\n".join(lines)).strip().replace(CODE, "")
    if not text:
        raise Refused("no_text", "no text in the document")
    title = _TITLE.search(latex)
    metadata = {"title": " ".join(title[1].split())} if title else {}
    yield Record(0, text, language=source.language or "", metadata=metadata)


def _code_lines(code: str, language: str, is_markdown: bool) -> str:
    """The code as a paragraph, each line behind the mark CODE; between fences in Markdown."""
    lines = [line.rstrip() for line in code.strip("\n").split("\n")]
    if is_markdown:
        fence = "`" * max(3, 1 + max((len(run) for run in _TICKS.findall(code)), default=0))
        lines = [fence + language, *lines, fence]
    return "\n\n" + "\n".join(CODE + line for line in lines) + "\n\n"


def _brace_depth(latex: str) -> int:
    depth = deepest = 0
    for mark in _BRACES.finditer(latex):
        opens = mark[0] in ("{", "[", "\\left", "\\begin")
        depth = max(depth + (1 if opens else -1), 0)
        deepest = max(deepest, depth)
    return deepest


# XML dumps, read as a stream: an element is dropped once it was read.

_DISAMBIGUATION = re.compile(r"\{\{\s*(?:disambig|disambiguation|begriffsklärung|homonymie)\b", re.IGNORECASE)
_FILE_LINK = re.compile(r"(?:file|image|category|datei|bild|kategorie|fichier|catégorie|archivo|categoría)\s*:", re.I)
_LIST_MARKS = re.compile(r"[*#:;]+")
_TAG_NAMES = re.compile(r"[^<>|]+")
DROPPED_TAGS = frozenset(
    ["ref", "references", "gallery", "timeline", "score", "graph", "imagemap", "templatedata", "rt", "rp"]
)
MAX_WIKI_DEPTH = 40
# The parser reads on to the end of the text for each opening that has no end: 2,900 in 20 kB took 19 s. The product of
# their number and the text's length is bounded.
MAX_RESCANNED = 50_000_000
_OPEN_TAGS = re.compile(r"<(?!(?:br|wbr|hr|meta|link|img|li|dt|dd|th|td|tr)\b)[a-z]", re.IGNORECASE)


def read_mediawiki(file: BinaryIO, name: str, source: SourceConfig) -> Iterator[Record | Unreadable]:
    """The articles of a dump (namespace 0, without redirects): their last revision's text without templates, tables,
    references and categories. Metadata: title, id and time of the revision."""
    try:
        import mwparserfromhell  # an optional extra
    except ModuleNotFoundError:
        raise missing_extra("mediawiki", "mwparserfromhell") from None
    for number, page in _elements(file, name, source, "page"):
        if isinstance(page, Unreadable):
            yield page
            continue
        fields = {local_name(element): element.text or "" for element in page.iter()}  # the last revision's remain
        if fields.get("ns", "0") != "0" or "redirect" in fields:
            continue
        wikitext = fields.get("text", "")
        if len(wikitext) > source.max_record_bytes:
            yield too_large(number, len(wikitext), source.max_record_bytes, -1, wikitext[:200])
            continue
        if (unclosed := _unclosed(wikitext)) * len(wikitext) > MAX_RESCANNED:
            reason = f"{unclosed} brackets or tags without an end in {len(wikitext)} characters take too long to parse"
            yield Unreadable(number, "bad_mediawiki", reason, -1, excerpt(wikitext))
            continue
        try:
            text = wiki_text(mwparserfromhell.parse(wikitext), source.blocks.format == "markdown")
        except (RecursionError, ValueError, IndexError) as error:
            yield Unreadable(number, "bad_mediawiki", f"its markup cannot be read ({first_line(error)})", -1, "")
            continue
        if text:
            metadata = {key: fields[key] for key in ("title", "timestamp") if fields.get(key)}
            if _DISAMBIGUATION.search(wikitext):
                metadata["disambiguation"] = True
            yield Record(number, text, language=source.language or "", metadata=metadata)


def _unclosed(wikitext: str) -> int:
    """Brackets, braces and tags that are opened more often than closed."""
    tags = len(_OPEN_TAGS.findall(wikitext)) - wikitext.count("</") - wikitext.count("/>")
    pairs = (wikitext.count(opening) - wikitext.count(end) for opening, end in ("[]", "{}"))
    return max(tags, 0) + sum(max(pair, 0) for pair in pairs)


def wiki_text(code: Any, markdown: bool, depth: int = 0) -> str:
    """The text of parsed wiki markup: headings and list items on lines of their own."""
    text = _wiki_inline(code, markdown, depth)
    lines = []
    for line in text.split("\n"):
        marks = _LIST_MARKS.match(line)  # not in code, which begins with a mark
        if marks is not None:
            item = "  " * (len(marks[0]) - 1) + "- " if marks[0][-1] in "*#" else ""
            line = item + line[marks.end() :].strip()
        lines.append(line.rstrip())
    return _BLANK_LINES.sub("\n\n", "\n".join(lines)).strip().replace(CODE, "")


def _wiki_inline(code: Any, markdown: bool, depth: int) -> str:
    if depth > MAX_WIKI_DEPTH:
        return ""
    parts: list[str] = []
    for node in code.nodes:
        kind = type(node).__name__
        if kind == "Text":
            parts.append(str(node.value))
        elif kind == "Heading":
            title = _wiki_inline(node.title, markdown, depth + 1).strip()
            parts.append(f"\n\n{'#' * node.level + ' ' if markdown else ''}{title}\n\n")
        elif kind == "Wikilink":
            if not _FILE_LINK.match(str(node.title).strip()):
                parts.append(_wiki_inline(node.text or node.title, markdown, depth + 1))
        elif kind == "ExternalLink":
            if node.title is not None:
                parts.append(_wiki_inline(node.title, markdown, depth + 1))
        elif kind == "HTMLEntity":
            parts.append(node.normalize())
        elif kind == "Tag":
            parts.append(_wiki_tag(node, markdown, depth + 1))
    return "".join(parts)


def _wiki_tag(node: Any, markdown: bool, depth: int) -> str:
    tag = str(node.tag).strip().lower()
    if tag in ("li", "dd", "dt") and node.wiki_markup:
        return str(node.wiki_markup)
    if tag in DROPPED_TAGS or tag == "table" or node.contents is None:
        return "\n" if tag == "br" else ""
    if tag == "math":
        return f"${node.contents}$"
    if tag in ("syntaxhighlight", "source", "pre") and not node.has("inline"):
        language = str(node.get("lang").value).strip() if node.has("lang") else ""
        return _code_lines(str(node.contents), language, markdown)
    if tag in ("syntaxhighlight", "source", "pre", "nowiki", "code"):
        return str(node.contents)
    return _wiki_inline(node.contents, markdown, depth)


POST_TYPES = {"1": "question", "2": "answer"}


def read_stack_exchange(file: BinaryIO, name: str, source: SourceConfig) -> Iterator[Record | Unreadable]:
    """The questions and answers of a Posts.xml; a question's title is its first paragraph. Metadata: post_type, id,
    parent_id, score, tags."""
    for number, row in _elements(file, name, source, "row"):
        if isinstance(row, Unreadable):
            yield row
            continue
        post_type, body = POST_TYPES.get(row.get("PostTypeId") or ""), row.get("Body") or ""
        if post_type is None or not body:
            continue
        title = f"<h1>{escape(row.get('Title') or '', quote=False)}</h1>" if row.get("Title") else ""
        try:
            text = whole_text((title + body).encode("utf-8", "replace"), source.blocks)
        except NotAPage as refused:
            yield Unreadable(number, refused.kind, str(refused), -1, excerpt(body))
            continue
        values = {"id": row.get("Id"), "parent_id": row.get("ParentId"), "score": row.get("Score")}
        metadata: dict[str, Any] = {"post_type": post_type} | {key: value for key, value in values.items() if value}
        if tags := _TAG_NAMES.findall(row.get("Tags") or ""):
            metadata["tags"] = tags
        if text:
            yield Record(number, text, language=source.language or "", metadata=metadata)


class _Stream(io.RawIOBase):
    """The decompressed file for lxml, which reads from a file object. size: bytes that were read since `reset`."""

    def __init__(self, pieces: Iterator[bytes]):
        super().__init__()
        self._pieces, self._rest, self.size = pieces, b"", 0

    def readable(self) -> bool:
        return True

    def read(self, size: int = -1) -> bytes:
        if not self._rest:
            self._rest = next(self._pieces, b"")
        limit = len(self._rest) if size < 0 else size
        taken, self._rest = self._rest[:limit], self._rest[limit:]
        self.size += len(taken)
        return taken


def _elements(
    file: BinaryIO, name: str, source: SourceConfig, tag: str
) -> Iterator[tuple[int, etree._Element | Unreadable]]:
    """(number, element) of the elements of that name, one at a time in memory; one Unreadable for a damaged rest."""
    number = 0
    stream = _Stream(blocks(file, name))
    try:
        events = etree.iterparse(
            stream, events=("end",), tag=f"{{*}}{tag}", resolve_entities=False, no_network=True, load_dtd=False
        )
        for _, element in events:
            yield number, element
            number += 1
            element.clear()
            while (before := element.getprevious()) is not None:
                element.getparent().remove(before)
    except Damaged as damage:
        yield number, Unreadable(number, damage.kind, str(damage))
    except etree.XMLSyntaxError as error:
        reason = f"no XML from here on ({first_line(error)}); the elements before it were read"
        yield number, Unreadable(number, f"bad_{source.format}", reason)

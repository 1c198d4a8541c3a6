"""Readers of documents in ZIP packages: EPUB books and Word documents (.docx)."""

import io
import posixpath
from collections.abc import Iterator
from html import escape
from typing import Any
from urllib.parse import unquote

from gristmill.data_pipeline.extraction.blocks import whole_text
from gristmill.data_pipeline.readers.document import Record
from gristmill.data_pipeline.readers.source import SourceConfig
from gristmill.data_pipeline.readers.whole_files import (
    Refused,
    local_name,
    member,
    missing_extra,
    open_package,
    parse_xml,
)

CONTAINER = "META-INF/container.xml"
RIGHTS = ("META-INF/rights.xml", "META-INF/license.lcpl")
MAX_LIST_LEVELS = 9  # of Word
PAGES = ("application/xhtml+xml", "text/html")


def convert_epub(content: bytes, source: SourceConfig) -> Iterator[Record]:
    """One record: the text of the book's linear parts in reading order. Metadata: title, author, publisher, date.

    Source: EPUB 3.3, 4 (container, OPF). Books with digital rights management are refused."""
    package = open_package(content, source)
    names = set(package.namelist())
    if CONTAINER not in names:
        raise Refused("bad_epub", f"no {CONTAINER} in the package")
    if names & set(RIGHTS):
        raise Refused("encrypted", "the book is under digital rights management")
    (root, *_) = [
        element.get("full-path") for element in parse_xml(member(package, CONTAINER)).iter("{*}rootfile")
    ] or [""]
    if root not in names:
        raise Refused("bad_epub", f"its package document {root!r} is not in the package")
    opf = parse_xml(member(package, root))
    items = {item.get("id"): item for item in opf.iter("{*}item")}
    texts = []
    for reference in opf.iter("{*}itemref"):
        item = items.get(reference.get("idref"))
        if item is None or reference.get("linear") == "no" or item.get("media-type") not in PAGES:
            continue
        if "nav" in (item.get("properties") or "").split():
            continue
        name = posixpath.normpath(posixpath.join(posixpath.dirname(root), unquote(item.get("href") or "")))
        if name in names:
            texts.append(whole_text(member(package, name), source.blocks))
    text = "\n\n".join(filter(None, texts))
    if not text:
        raise Refused("no_text", "no text in the parts of the book")
    fields = {name: _first_text(opf, name) for name in ("title", "creator", "publisher", "date", "language")}
    metadata = {"author" if name == "creator" else name: value for name, value in fields.items() if value}
    language = source.language or str(metadata.pop("language", ""))
    yield Record(0, text, language=language, metadata=metadata)


def _first_text(opf: Any, name: str) -> str:
    element = next(opf.iter(f"{{http://purl.org/dc/elements/1.1/}}{name}"), None)
    return "" if element is None else " ".join("".join(element.itertext()).split())


def convert_docx(content: bytes, source: SourceConfig) -> Iterator[Record]:
    """One record: paragraphs, headings, lists and tables of the document's body, without headers, footers, comments and
    deleted text. Metadata: title and author."""
    try:
        import docx  # an optional extra
    except ModuleNotFoundError:
        raise missing_extra("docx", "python-docx") from None
    open_package(content, source).close()
    document = docx.Document(io.BytesIO(content))
    html = "".join(_docx_blocks(document.iter_inner_content()))
    text = whole_text(f"<body>{html}".encode(), source.blocks)
    if not text:
        raise Refused("no_text", "no text in the document's body")
    properties = document.core_properties
    metadata = {"title": properties.title, "author": properties.author}
    metadata = {name: value for name, value in metadata.items() if value}
    yield Record(0, text, language=source.language or "", metadata=metadata)


def _docx_blocks(content: Any, depth: int = 0) -> Iterator[str]:
    """The body as HTML, so that its layout is that of pages."""
    level = 0  # of open lists
    for block in content:
        wanted, tag, text = 0, "", ""
        if hasattr(block, "rows"):
            text = _docx_table(block, depth)
        elif text := _docx_text(block._p):
            style = (block.style.name or "") if block.style is not None else ""
            number = style.removeprefix("Heading ")
            wanted = _list_level(block, style)
            tag = f"h{min(int(number), 6)}" if number.isdecimal() else "h1" if style == "Title" else "p"
            text = escape(text, quote=False).replace("\n", "<br>")
            text = f"<li>{text}" if wanted else f"<{tag}>{text}</{tag}>"
        else:
            continue
        yield "<ul>" * (wanted - level) + "</ul>" * (level - wanted) + text
        level = wanted
    yield "</ul>" * level


def _list_level(paragraph: Any, style: str) -> int:
    """1 for an item of an outer list; 0 for no item."""
    properties = paragraph._p.pPr
    number = None if properties is None else properties.numPr
    if number is not None and (number.numId is None or number.numId.val):
        return min(number.ilvl.val if number.ilvl is not None else 0, MAX_LIST_LEVELS - 1) + 1
    if style.startswith("List "):
        last = style.rpartition(" ")[2]
        return min(int(last), MAX_LIST_LEVELS) if last.isdecimal() else 1
    return 0


def _docx_text(paragraph: Any) -> str:
    """The paragraph's text with that of links and insertions, without deleted text and field codes."""
    parts = []
    for element in paragraph.iter():
        name = local_name(element)
        if name == "t" and local_name(element.getparent()) == "r":
            parts.append(element.text or "")
        elif name in ("tab", "br", "cr") and local_name(element.getparent()) == "r":
            parts.append("\n" if name != "tab" else " ")
        elif name == "noBreakHyphen":
            parts.append("-")
    return "".join(parts).strip()


def _docx_table(table: Any, depth: int) -> str:
    """A table's rows; a cell that spans several columns or rows stands once."""
    rows, seen = [], set()
    for row in table.rows:
        cells = []
        for cell in row.cells:
            if cell._tc in seen:
                continue
            seen.add(cell._tc)
            inner = "".join(_docx_blocks(cell.iter_inner_content(), depth + 1)) if depth < MAX_LIST_LEVELS else ""
            cells.append(f"<td>{inner}</td>")
        rows.append(f"<tr>{''.join(cells)}</tr>")
    return f"<table>{''.join(rows)}</table>"

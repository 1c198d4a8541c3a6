"""Raw files whose content is one document, bounded by max_record_bytes; EPUB books and Word documents, which are ZIP
packages of limited size."""

import io
import posixpath
import re
import zipfile
from collections.abc import Callable, Iterator
from html import escape
from typing import Any, BinaryIO
from urllib.parse import unquote

from lxml import etree

from gristmill.data_pipeline.extraction.blocks import whole_text
from gristmill.data_pipeline.readers.compression import Damaged, blocks
from gristmill.data_pipeline.readers.document import Record, Unreadable, excerpt, first_line, too_large
from gristmill.data_pipeline.readers.source import SourceConfig
from gristmill.foundation.errors import RecipeError

MAX_MEMBERS = 20_000  # of a package
MAX_EXPANSION = 8  # bytes of all members of a package for a byte of max_record_bytes
OLE = bytes.fromhex("d0cf11e0a1b11ae1")  # what files of Office 97 begin with, and encrypted ones of later versions
TICKS = re.compile("`+")
BLANK_LINES = re.compile(r"\n[ \t]*(?:\n[ \t]*)+")
CODE = "\x01"  # before each line of code, which is written as it is


class Refused(Exception):
    """The content is not a document of its format, or one over a limit. kind: the reason it is counted under."""

    def __init__(self, kind: str, reason: str):
        super().__init__(reason)
        self.kind = kind


Convert = Callable[[bytes, SourceConfig], Iterator[Record]]


def read_whole(file: BinaryIO, name: str, source: SourceConfig, convert: Convert) -> Iterator[Record | Unreadable]:
    """The documents that convert makes of the file's content. Any failure of convert is one Unreadable."""
    content, num_bytes = bytearray(), 0
    try:
        for block in blocks(file, name):
            num_bytes += len(block)
            if num_bytes <= source.max_record_bytes:
                content += block
    except Damaged as damage:
        yield Unreadable(0, damage.kind, str(damage))
        return
    if num_bytes > source.max_record_bytes:
        yield too_large(0, num_bytes, source.max_record_bytes, 0, bytes(content[:200]))
        return
    try:
        yield from convert(bytes(content), source)
    except Refused as refused:
        yield Unreadable(0, refused.kind, str(refused), -1, excerpt(bytes(content[:200])))
    except (RecipeError, MemoryError):
        raise
    except Exception as error:  # the libraries raise many kinds for malformed documents
        reason = f"damaged {source.format} document ({type(error).__name__}: {first_line(error)})"
        yield Unreadable(0, f"bad_{source.format}", reason, -1, excerpt(bytes(content[:200])))


def missing_extra(format_: str, package: str) -> RecipeError:
    return RecipeError(f"format {format_} needs the package {package}: pip install 'gristmill[documents]'")


def code_lines(code: str, language: str, is_markdown: bool) -> str:
    """The code as a paragraph, each line behind the mark CODE; between fences in Markdown."""
    lines = [line.rstrip() for line in code.strip("\n").split("\n")]
    if is_markdown:
        fence = "`" * max(3, 1 + max((len(run) for run in TICKS.findall(code)), default=0))
        lines = [fence + language, *lines, fence]
    return "\n\n" + "\n".join(CODE + line for line in lines) + "\n\n"


def open_package(content: bytes, source: SourceConfig) -> zipfile.ZipFile:
    """The ZIP package. Raises Refused if it is none, or if what it unpacks to is over the limits."""
    if content.startswith(OLE):
        raise Refused("encrypted", "a document of Office that is encrypted or in the format of Office 97")
    try:
        package = zipfile.ZipFile(io.BytesIO(content))
    except zipfile.BadZipFile as error:
        raise Refused(f"bad_{source.format}", f"not a ZIP package ({first_line(error)})") from None
    members = package.infolist()
    unpacked = sum(member.file_size for member in members)  # a member of any name can be read as markup
    if len(members) > MAX_MEMBERS or unpacked > MAX_EXPANSION * source.max_record_bytes:
        raise Refused(
            "package_too_large",
            f"{len(members)} members of {unpacked} bytes; the limits are {MAX_MEMBERS} and {MAX_EXPANSION} "
            "times max_record_bytes; raise max_record_bytes of the source to read it",
        )
    return package


def member(package: zipfile.ZipFile, name: str) -> bytes:
    """The content of a member, of at most the size that the package's directory gives."""
    size = package.getinfo(name).file_size
    with package.open(name) as stream:
        return stream.read(size)


def parse_xml(content: bytes) -> etree._Element:
    """The root element, without external entities and network access. Raises XMLSyntaxError."""
    return etree.fromstring(content, etree.XMLParser(resolve_entities=False, no_network=True, load_dtd=False))


def local_name(element: etree._Element) -> str:
    """The name without its namespace; "" for comments and processing instructions."""
    return element.tag.rpartition("}")[2] if isinstance(element.tag, str) else ""


# Readers of documents in ZIP packages: EPUB books and Word documents (.docx).


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
    texts: dict[str, str] = {}
    for reference in opf.iter("{*}itemref"):
        item = items.get(reference.get("idref"))
        if item is None or reference.get("linear") == "no" or item.get("media-type") not in PAGES:
            continue
        if "nav" in (item.get("properties") or "").split():
            continue
        name = posixpath.normpath(posixpath.join(posixpath.dirname(root), unquote(item.get("href") or "")))
        if name in names and name not in texts:  # a part stands once in a book
            texts[name] = whole_text(member(package, name), source.blocks)
    text = "\n\n".join(filter(None, texts.values()))
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
    """A table's rows; a cell that spans several columns or rows stands once. `row.cells` of python-docx would list it
    as often as its file says."""
    rows = []
    for row in table.rows:
        cells = []
        for cell in row._tr.tc_lst:
            if cell.vMerge == "continue":
                continue
            inner = "".join(_docx_blocks(_docx_cell(cell, table), depth + 1)) if depth < MAX_LIST_LEVELS else ""
            cells.append(f"<td>{inner}</td>")
        rows.append(f"<tr>{''.join(cells)}</tr>")
    return f"<table>{''.join(rows)}</table>"


def _docx_cell(cell: Any, table: Any) -> Any:
    """Paragraphs and tables of a cell."""
    from docx.table import _Cell  # an optional extra

    return _Cell(cell, table).iter_inner_content()

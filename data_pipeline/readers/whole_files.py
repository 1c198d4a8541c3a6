"""Raw files whose content is one document, bounded by max_record_bytes; EPUB books and Word documents, which are ZIP
packages of limited size."""

import io
import itertools
import posixpath
import re
import zipfile
from collections.abc import Callable, Iterator
from html import escape
from typing import Any, BinaryIO, NamedTuple
from urllib.parse import unquote

from lxml import etree

from gristmill.data_pipeline.extraction.blocks import whole_text
from gristmill.data_pipeline.readers.compression import Damaged, blocks
from gristmill.data_pipeline.readers.document import Record, Unreadable, excerpt, first_line, too_large
from gristmill.data_pipeline.readers.source import SourceConfig
from gristmill.data_pipeline.readers.word_formulas import formula_tex
from gristmill.foundation.errors import RecipeError
from gristmill.foundation.startup import DeferredModule

html_extraction = DeferredModule("gristmill.data_pipeline.extraction.html_extraction")  # for books alone
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
WORD = "http://schemas.openxmlformats.org/wordprocessingml/2006/main"
ID = f"{{{WORD}}}id"
FORMULA = '<math><annotation encoding="application/x-tex">{}</annotation></math>'  # as pages have it
_TAGS = {"Title": "h1", "Quote": "blockquote", "Intense Quote": "blockquote", "Block Text": "blockquote"}  # of styles
# Of Word, LibreOffice and pandoc, and the names that people give their own.
_CODE_STYLES = frozenset(
    ("html preformatted", "macro text", "macro", "preformatted text", "source code", "code", "code block", "codeblock")
)
PAGES = ("application/xhtml+xml", "text/html")


def convert_epub(content: bytes, source: SourceConfig) -> Iterator[Record]:
    """One record: the text of the book's linear parts in reading order. Metadata: title, authors, publisher, date.

    Source: EPUB 3.3, 4 (container, OPF). Books with digital rights management are refused."""
    package = open_package(content, source)
    names = set(package.namelist())
    by_lower_case = {name.lower(): name for name in package.namelist()}  # some programs write names in another case
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
        name = name if name in names else by_lower_case.get(name.lower(), "")
        if name and name not in texts:  # a part stands once in a book
            html = html_extraction.decode_html(member(package, name), None).text
            texts[name] = whole_text(html.encode("utf-8", "replace"), source.blocks)
    text = "\n\n".join(filter(None, texts.values()))
    if not text:
        raise Refused("no_text", "no text in the parts of the book")
    fields = {name: next(_texts(opf, name), "") for name in ("title", "publisher", "date", "language")}
    fields["creator"] = "; ".join(_texts(opf, "creator"))
    metadata = {"author" if name == "creator" else name: value for name, value in fields.items() if value}
    language = source.language or str(metadata.pop("language", ""))
    yield Record(0, text, language=language, metadata=metadata)


def _texts(opf: Any, name: str) -> Iterator[str]:
    """Texts of the elements of Dublin Core with this name."""
    elements = opf.iter(f"{{http://purl.org/dc/elements/1.1/}}{name}")
    return filter(None, (" ".join("".join(element.itertext()).split()) for element in elements))


def convert_docx(content: bytes, source: SourceConfig) -> Iterator[Record]:
    """One record: paragraphs, headings, lists, tables and text boxes of the document's body, then its notes; without
    headers, footers, comments, readings of ruby, tables of contents, and text that a tracked change deletes or moves
    away. Metadata: title and author.

    Source: ECMA-376, part 1, 17 (WordprocessingML)."""
    try:
        import docx  # an optional extra
    except ModuleNotFoundError:
        raise missing_extra("docx", "python-docx") from None
    open_package(content, source).close()
    document = docx.Document(io.BytesIO(content))
    html = WordBody(document).html()
    text = whole_text(f"<body>{html}".encode(), source.blocks)
    if not text:
        raise Refused("no_text", "no text in the document's body")
    properties = document.core_properties
    metadata = {"title": properties.title, "author": properties.author}
    metadata = {name: value for name, value in metadata.items() if value}
    yield Record(0, text, language=source.language or "", metadata=metadata)


class ListItem(NamedTuple):
    """level: 1 for an outer list. number: 0 in a list of bullets."""

    level: int
    number: int


class NumberFormat(NamedTuple):
    """Numbers of the items of a level. name: "bullet", "none", "decimal" and others of numbers. begins_again: whether
    the numbering's first item has the number `start` behind items of others too. counter: what counts the items, which
    numberings share."""

    name: str
    start: int
    begins_again: bool
    counter: str


class WordBody:
    """The body of a Word document as HTML, so that its layout is that of pages."""

    def __init__(self, document: Any):
        self._body = document._body  # gives paragraphs their styles
        self._parts = {
            relation.reltype.rpartition("/")[2]: relation.target_part
            for relation in document.part.rels.values()
            if not relation.is_external
        }
        self._formats = self._number_formats()
        self._counts: dict[tuple[str, int], int] = {}  # number of the last item, by counter and level
        self._begun: set[tuple[str, int]] = set()  # numberings and levels of items so far
        self._notes: list[tuple[str, str]] = []  # "footnote" or "endnote", and its id, as they are referred to

    def html(self) -> str:
        blocks = [*self._blocks(self._body._body)]
        notes = {(name, note.get(ID)): note for name in ("footnote", "endnote") for note in self._root(f"{name}s")}
        for note in dict.fromkeys(self._notes):
            if note in notes:
                blocks += self._blocks(notes[note])
        return "".join(blocks)

    def _root(self, part: str) -> Any:
        """The root element of another part of the document; without children if it has none."""
        from docx.oxml.parser import parse_xml  # an optional extra

        return parse_xml(self._parts[part].blob) if part in self._parts else ()

    def _number_formats(self) -> dict[tuple[str, int], NumberFormat]:
        """By numbering and level, from 0."""
        abstract: dict[str, dict[int, NumberFormat]] = {}
        formats: dict[tuple[str, int], NumberFormat] = {}
        for element in self._root("numbering"):
            if local_name(element) == "abstractNum":
                number = _value(element, "abstractNumId")
                levels = element.iterfind("{*}lvl")
                abstract[number] = {int(_value(level, "ilvl")): _number_format(level, number) for level in levels}
            elif local_name(element) == "num" and (reference := element.find("{*}abstractNumId")) is not None:
                of_levels = dict(abstract.get(_value(reference), {}))
                for override in element.iterfind("{*}lvlOverride"):
                    level, start = int(_value(override, "ilvl")), _property(override, "startOverride", "")
                    if start and level in of_levels:
                        of_levels[level] = of_levels[level]._replace(start=int(start), begins_again=True)
                formats |= {(_value(element, "numId"), level): form for level, form in of_levels.items()}
        return formats

    def _blocks(self, parent: Any, depth: int = 0) -> Iterator[str]:
        """depth: of tables and text boxes around the parent."""
        from docx.text.paragraph import Paragraph  # an optional extra

        lists: list[str] = []  # tags of the open ones
        is_in_code = False
        for element in _unwrapped(parent):
            item, html, boxes = None, "", ""
            if local_name(element) == "tbl":
                html = self._table(element, depth)
            elif local_name(element) == "p":
                paragraph = Paragraph(element, self._body)
                style = (paragraph.style.name or "") if paragraph.style is not None else ""
                if is_in_code != (style.lower() in _CODE_STYLES):
                    yield from self._lists(lists, None)
                    yield "</pre>" if is_in_code else "<pre>"
                    is_in_code = not is_in_code
                if is_in_code:
                    yield f"{self._text(element, is_code=True)}\n"
                    continue
                text = "" if style.lower().startswith("toc ") else self._text(element)
                number = style.removeprefix("Heading ")
                tag = f"h{min(int(number), 6)}" if number.isdecimal() else _TAGS.get(style, "p")
                item = self._list_item(paragraph, style) if text and tag == "p" else None
                if text:
                    value = f" value={item.number}" if item and item.number else ""
                    html = f"<li{value}>{text}" if item else f"<{tag}>{text}</{tag}>"
                if depth < MAX_LIST_LEVELS:
                    boxes = "".join(block for box in _text_boxes(element) for block in self._blocks(box, depth + 1))
            if is_in_code and html:
                yield "</pre>"
                is_in_code = False
            if html or boxes:
                yield from self._lists(lists, item)
                yield html + boxes
        yield "</pre>" if is_in_code else ""
        yield from self._lists(lists, None)

    def _lists(self, lists: list[str], item: ListItem | None) -> Iterator[str]:
        """Tags between the open lists and an item, or what is none; lists: the open ones, which become the item's."""
        level, tag = (0, "") if item is None else (item.level, "ol" if item.number else "ul")
        while len(lists) > level or (lists and len(lists) == level and lists[-1] != tag):
            yield f"</{lists.pop()}>"
        while len(lists) < level:
            lists.append(tag if len(lists) == level - 1 else "ul")
            yield f"<{lists[-1]}>"

    def _list_item(self, paragraph: Any, style: str) -> ListItem | None:
        """By the paragraph's own numbering, else by that of its style or of the style's name; None for no item."""
        numbering, level = _numbering(paragraph._p)
        words = style.split(" ")
        is_named = words[0] == "List" and (len(words) == 1 or words[1] in ("Bullet", "Number") or words[1].isdecimal())
        if not numbering:
            numbering, level = _style_numbering(paragraph.style)
            level = int(words[-1]) - 1 if is_named and words[-1].isdecimal() else level
        default = "decimal" if words[:2] == ["List", "Number"] else "bullet"
        form = self._formats.get((numbering, level), NumberFormat(default, 1, False, numbering or style))
        if numbering == "0" or form.name == "none" or not (numbering or is_named):
            return None
        number = 0 if form.name == "bullet" else self._next_number((numbering, level), form)
        return ListItem(min(max(level, 0), MAX_LIST_LEVELS - 1) + 1, number)

    def _next_number(self, place: tuple[str, int], form: NumberFormat) -> int:
        """The number of the next item of this numbering and level. Numbers of inner lists begin again behind it."""
        counter, level = (form.counter, place[1]), place[1]
        if counter not in self._counts or (form.begins_again and place not in self._begun):
            self._counts[counter] = form.start - 1
        self._begun.add(place)
        self._counts[counter] += 1
        for inner in range(level + 1, MAX_LIST_LEVELS):
            self._counts.pop((form.counter, inner), None)
        return self._counts[counter]

    def _text(self, paragraph: Any, is_code: bool = False) -> str:
        """The paragraph's text as HTML, with that of links and insertions, and formulas as TeX."""
        parts = []
        for element in _content(paragraph):
            name = local_name(element)
            if name in ("footnoteReference", "endnoteReference"):
                self._notes.append((name.removesuffix("Reference"), element.get(ID)))
            if name == "oMath" and (tex := formula_tex(element)):
                parts.append(FORMULA.format(escape(tex)))
            if local_name(element.getparent()) != "r":
                continue
            if name == "t":
                parts.append(escape(element.text or "", quote=False))
            elif name in ("tab", "ptab", "br", "cr", "noBreakHyphen"):
                parts.append(
                    {"br": "\n", "cr": "\n", "noBreakHyphen": "-", "tab": "\t" if is_code else " "}.get(name, " ")
                )
        return "".join(parts) if is_code else "".join(parts).strip().replace("\n", "<br>")

    def _table(self, table: Any, depth: int) -> str:
        """A table's rows; the text of a cell that spans several columns or rows stands once, and those it covers are
        empty. `row.cells` of python-docx would list it as often as its file says."""
        rows = []
        for row in _unwrapped(table):
            if local_name(row) != "tr" or row.find("{*}trPr/{*}del") is not None:
                continue
            tag = "td" if _property(row, "trPr/{*}tblHeader", "0") in ("0", "off", "false") else "th"
            before = int(_property(row, "trPr/{*}gridBefore", "0"))
            cells = [f"<td colspan={before}></td>" if before else ""]
            for cell in _unwrapped(row):
                if local_name(cell) == "tc":
                    is_shown = cell.vMerge != "continue" and depth < MAX_LIST_LEVELS
                    html = "".join(self._blocks(cell, depth + 1)) if is_shown else ""
                    width = int(_property(cell, "tcPr/{*}gridSpan", "1"))
                    cells.append(f"<{tag} colspan={width}>{html}</{tag}>")
            rows.append(f"<tr>{''.join(cells)}</tr>")
        return f"<table>{''.join(rows)}</table>"


def _value(element: Any, name: str = "val") -> str:
    return element.get(f"{{{WORD}}}{name}") or "0"


def _number_format(level: Any, counter: str) -> NumberFormat:
    name = _property(level, "numFmt", "decimal") if _property(level, "lvlText", "-").strip() else "none"
    return NumberFormat(name, int(_property(level, "start", "1")), False, counter)


def _property(element: Any, path: str, default: str) -> str:
    """The value of a property of the element, "1" where it has none; default: where it has no such property."""
    property_ = element.find(f"{{*}}{path}")
    return default if property_ is None else property_.get(f"{{{WORD}}}val", "1")


def _numbering(element: Any) -> tuple[str, int]:
    """(numbering, level from 0) of a paragraph or style; numbering: "" if it has none, "0" if it has none of its
    style's."""
    properties = element.find("{*}pPr/{*}numPr")
    number, level = (None, None) if properties is None else (properties.find("{*}numId"), properties.find("{*}ilvl"))
    return "" if number is None else _value(number), 0 if level is None else int(_value(level))


def _style_numbering(style: Any) -> tuple[str, int]:
    for _ in range(MAX_LIST_LEVELS):  # styles that a file bases on each other in a circle end here
        if style is None:
            break
        numbering, level = _numbering(style.element)
        if numbering:
            return numbering, level
        style = style.base_style
    return "", 0


def _unwrapped(parent: Any) -> Iterator[Any]:
    """The children, with those of content controls and insertions in place of these."""
    for child in parent:
        name = local_name(child)
        if name == "sdt":
            gallery = child.find("{*}sdtPr/{*}docPartObj/{*}docPartGallery")
            content = child.find("{*}sdtContent")
            if content is not None and (gallery is None or _value(gallery) != "Table of Contents"):
                yield from _unwrapped(content)
        elif name in ("customXml", "ins", "moveTo"):
            yield from _unwrapped(child)
        else:
            yield child


def _content(element: Any) -> Iterator[Any]:
    """The elements in a paragraph, without those of text boxes, ruby's readings, formulas and what was deleted."""
    for child in _children(element):
        if local_name(child) not in ("del", "moveFrom", "rt", "txbxContent"):
            yield child
            if local_name(child) != "oMath":
                yield from _content(child)


def _text_boxes(element: Any) -> Iterator[Any]:
    for child in _children(element):
        if local_name(child) == "txbxContent":
            yield child
        else:
            yield from _text_boxes(child)


def _children(element: Any) -> Iterator[Any]:
    """The children; of alternatives that hold the same for newer and older programs, the first."""
    if local_name(element) == "AlternateContent":
        return itertools.islice(element, 1)
    return iter(element)

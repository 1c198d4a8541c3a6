"""Layout of a page's kept text blocks: paragraphs, headings, lists, tables, code and quotes, as plain text or Markdown.

Paragraphs are separated by a blank line. Items of a list and rows of a table stand on consecutive lines. A table whose
cells hold prose, headings, lists or tables is there for the page's layout, and its cells are paragraphs.

For spans each line of a block is written between marks, control characters that no block's text has, and the marks are
taken out of the finished text."""

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Literal, NamedTuple

import numpy as np

from gristmill.data_pipeline.extraction.attributes import (
    COUNT,
    ELEMENT,
    END,
    HTML_END,
    HTML_START,
    IS_ABOVE,
    IS_FLOW,
    NEAREST,
    ORDINAL,
    PARENT,
    START,
    TAG,
)
from gristmill.data_pipeline.extraction.page import ItemNumbers, Page, code_language
from gristmill.data_pipeline.extraction.tables import columns_of_cells, is_count, table_lines
from gristmill.data_pipeline.extraction.tags import CELL, CODE, ITEM, TAG_IDS, TAG_KINDS
from gristmill.foundation.runtime.kernels.cached_njit import cached_njit

MAX_CELL_BYTES = 300  # of a cell of data; longer ones are prose in a layout
MAX_LEVELS = 6  # of nested lists and quotes that are indented
P, LI, UL, OL, MENU, DIR, DL, DT, DD, TABLE, TR, TH, QUOTE, CAPTION = (
    TAG_IDS[name]
    for name in ("p", "li", "ul", "ol", "menu", "dir", "dl", "dt", "dd", "table", "tr", "th", "blockquote", "caption")
)
HEADING_LEVELS = {TAG_IDS[f"h{level}"]: level for level in range(1, 7)}
_MARKUP = re.compile(r"(\d{0,9})(?=[#>+*-]+(?:\s|$)|(?<=\d)[.)](?:\s|$)|```|~~~|=+\s*$)")
_EMPHASIS = re.compile(r"[\\*]")
_FENCE = re.compile(r"`{3,}")
_MARKED = re.compile("\x01(\\d+)\x02([^\x03]*)\x03")

TextFormat = Literal["text", "markdown"]


@dataclass(frozen=True)
class LayoutOptions:
    """format: plain text or Markdown. table_rows: a line for each row, its cells joined. list_markers: "- " or the
    item's number before an item. code: the white space of <pre> is kept. line_breaks: <br> ends a line. marks: each
    line of a block is written between marks."""

    format: TextFormat = "text"
    table_rows: bool = True
    list_markers: bool = True
    code: bool = True
    line_breaks: bool = True
    marks: bool = False


class BlockPlace(NamedTuple):
    """Position of an element in the structure. items: the list items it is in, the outermost first. list, definitions,
    table, row, cell, code: the outermost list, the definition list, and the innermost others; 0 for none. level: of a
    heading. quotes: number of quotes around it. author, term, header: whether it is the line of a post's author, a term
    or a header cell."""

    items: tuple[int, ...] = ()
    list: int = 0
    definitions: int = 0
    table: int = 0
    row: int = 0
    cell: int = 0
    code: int = 0
    level: int = 0
    quotes: int = 0
    author: bool = False
    term: bool = False
    header: bool = False


class PlacedBlock(NamedTuple):
    """A kept block's text and place. number: among the kept blocks; authors of posts are numbered behind them."""

    number: int
    text: str
    place: BlockPlace


@dataclass(slots=True)
class Piece:
    """A part of the text that blank lines or line ends separate from the next. group: the list, table or code that its
    lines belong to; 0 for a paragraph."""

    lines: list[str]
    group: tuple[str, int]
    quotes: int = 0


_new = tuple.__new__
_IS_CELL = [bool(kinds & CELL) for kinds in TAG_KINDS.tolist()]


def _below(place: BlockPlace, element: int, tag: int, parent: int) -> BlockPlace:
    """The place of an element of this tag in one at the place. `_replace` takes eight times as long as a new tuple."""
    if tag == LI:  # items outside of a list are of their parent's
        return _new(BlockPlace, ((*place[0], element), place[1] or -parent - 1, *place[2:]))
    if _IS_CELL[tag]:
        return _new(BlockPlace, (*place[:5], element, *place[6:-1], tag == TH))
    if tag == TR:
        return _new(BlockPlace, (*place[:4], element, 0, *place[6:]))
    if tag in (UL, OL, MENU, DIR):
        return place if place.list else place._replace(list=element)
    if tag == DL:
        return place if place.definitions else place._replace(definitions=element)
    if tag in (DT, DD):
        return place._replace(term=tag == DT, definitions=place.definitions or element)
    if tag == TABLE:
        return place._replace(table=element, row=0, cell=0, items=(), list=0, definitions=0)
    if TAG_KINDS[tag] & CODE:
        return place._replace(code=element)
    if tag in HEADING_LEVELS:
        return place._replace(level=HEADING_LEVELS[tag])
    if tag == QUOTE:
        return place._replace(quotes=min(place.quotes + 1, MAX_LEVELS))
    return place


_OF_TAGS = [_below(BlockPlace(), 1, tag, 0) for tag in range(len(TAG_KINDS))]
_IS_STRUCTURAL = np.array([place != BlockPlace() for place in _OF_TAGS])
_IS_IN_TEXT = np.array([place._replace(level=0, quotes=0) != BlockPlace() for place in _OF_TAGS])  # also in plain text


@cached_njit(nogil=True)
def _find_structure(elements, blocks, kept, joins_flow, structure, rows, above):
    """Fill structure (int32[E, 5], zeros), rows (int32[B, 4]) and above (int32[E, 4]); returns the numbers of the rows
    of the last two.

    Columns of structure: ordinals of items and cells in their parent, from 0; the number of those in the element; the
    nearest structural element around it, or itself; 1 outside of lists, tables and code, where blocks are paragraphs
    of plain text; 1 for those above. Rows: of each kept block the structural element around it, or 0 for a paragraph
    where joins_flow; its START and END; whether it is such a paragraph. Above: the structural elements around kept
    blocks, in the order of the page: element, tag, parent, the nearest structural one around it."""
    structure[0, IS_FLOW] = joins_flow
    for e in range(1, len(elements)):
        tag, parent = elements[e, TAG], elements[e, PARENT]
        structure[e, NEAREST] = e if _IS_STRUCTURAL[tag] else structure[parent, NEAREST]
        structure[e, IS_FLOW] = 0 if _IS_IN_TEXT[tag] else structure[parent, IS_FLOW]
        if TAG_KINDS[tag] & (ITEM | CELL):
            structure[e, ORDINAL] = structure[parent, COUNT]
            structure[parent, COUNT] += 1
    num_rows, num_above, last = 0, 0, 0
    for k in range(len(blocks)):
        if kept[k]:
            e = blocks[k, ELEMENT]
            is_joined = structure[e, IS_FLOW]
            e = 0 if is_joined else structure[e, NEAREST]
            rows[num_rows, 0], rows[num_rows, 1], rows[num_rows, 2] = e, blocks[k, START], blocks[k, END]
            rows[num_rows, 3] = is_joined
            num_rows += 1
            last = max(last, e)
            while e != 0 and structure[e, IS_ABOVE] == 0:
                structure[e, IS_ABOVE] = 1
                e = structure[elements[e, PARENT], NEAREST]
    for e in range(1, last + 1):
        if structure[e, IS_ABOVE]:
            parent = elements[e, PARENT]
            above[num_above, 0], above[num_above, 1], above[num_above, 2] = e, elements[e, TAG], parent
            above[num_above, 3] = structure[parent, NEAREST]
            num_above += 1
    return num_rows, num_above


class PostAuthor(NamedTuple):
    """The author of a post. before: number among the kept blocks of the post's first. item: the post's element.
    html_start, html_end: bytes of the page that hold the name."""

    before: int
    item: int
    name: str
    html_start: int
    html_end: int


def layout(page: Page, kept: np.ndarray, options: LayoutOptions, authors: Sequence[PostAuthor] = ()) -> str:
    """The kept blocks' text, and the authors in lines of their own. kept: bool[B]."""
    structure = np.zeros((len(page.elements), 5), np.int32)
    rows, above = np.empty((len(page.blocks), 4), np.int32), np.empty((len(page.elements), 4), np.int32)
    joins_flow = _is_plain(options) and not authors
    num_rows, num_above = _find_structure(page.elements, page.blocks, kept, joins_flow, structure, rows, above)
    places = {0: BlockPlace()}
    for element, tag, parent, around in above[:num_above].tolist():
        places[element] = _below(places[around], element, tag, parent)
    chosen = _placed(page.text.tobytes(), rows[:num_rows].tolist(), places)
    tables = data_tables(chosen) if options.table_rows else set()
    if authors:
        posts = [places[int(structure[author.item, NEAREST])] for author in authors]
        chosen = _with_authors(chosen, authors, posts)
    return _joined(_pieces(chosen, tables, ItemNumbers(page, structure), options), options)


def _is_plain(options: LayoutOptions) -> bool:
    """Whether paragraphs are written as they are."""
    return options.format == "text" and options.line_breaks and not options.marks


def _placed(text: bytes, rows: list[list[int]], places: dict[int, BlockPlace]) -> list[PlacedBlock]:
    """The blocks of the rows that _find_structure fills. A run of paragraphs, most of a page, is one block."""
    blocks: list[PlacedBlock] = []
    run: list[bytes] = []
    for number, (element, start, end, is_joined) in enumerate(rows):
        if is_joined:
            run.append(text[start:end])
            continue
        if run:
            blocks.append(_new(PlacedBlock, (number - 1, b"\n\n".join(run).decode("utf-8", "replace"), places[0])))
            run = []
        blocks.append(_new(PlacedBlock, (number, text[start:end].decode("utf-8", "replace"), places[element])))
    if run:
        blocks.append(_new(PlacedBlock, (len(rows) - 1, b"\n\n".join(run).decode("utf-8", "replace"), places[0])))
    return blocks


def _with_authors(
    blocks: list[PlacedBlock], authors: Sequence[PostAuthor], places: list[BlockPlace]
) -> list[PlacedBlock]:
    """places: of each author's post."""
    numbered = enumerate(zip(authors, places, strict=True), len(blocks))
    before = {author.before: (number, author, place) for number, (author, place) in numbered}
    with_authors = []
    for block in blocks:
        if block.number in before:
            number, author, place = before[block.number]
            place = place._replace(definitions=0, cell=0, code=0, level=0, term=False, author=True)
            with_authors.append(PlacedBlock(number, author.name, place))
        with_authors.append(block)
    return with_authors


class PageSpan(NamedTuple):
    """Characters of the text, from start to before end, that stand at these bytes of the page."""

    start: int
    end: int
    html_start: int
    html_end: int


def layout_with_spans(
    page: Page, kept: np.ndarray, options: LayoutOptions, authors: Sequence[PostAuthor] = ()
) -> tuple[str, list[PageSpan]]:
    """(what `layout` gives, a span of each kept block and author in the order of the text). Markers, bars and the signs
    of Markdown stand outside or between the lines of a span."""
    marked = layout(page, kept, replace(options, marks=True), authors)
    sources = page.blocks[np.flatnonzero(kept)][:, (HTML_START, HTML_END)].tolist()
    sources += [[author.html_start, author.html_end] for author in authors]
    bounds: dict[int, tuple[int, int]] = {}
    parts, length, at = [], 0, 0
    for line in _MARKED.finditer(marked):
        parts += [marked[at : line.start()], line[2]]
        start = length + line.start() - at
        length, at = start + len(line[2]), line.end()
        bounds[int(line[1])] = (bounds.get(int(line[1]), (start,))[0], length)
    spans = [PageSpan(*bounds[number], *sources[number]) for number in sorted(bounds, key=bounds.__getitem__)]
    return "".join([*parts, marked[at:]]), spans


def _mark(line: str, block: PlacedBlock, options: LayoutOptions) -> str:
    return f"\x01{block.number}\x02{line}\x03" if options.marks and line else line


def data_tables(blocks: Sequence[PlacedBlock]) -> set[int]:
    """Tables with at least two cells in a row, whose cells are short and hold no headings, lists, code or tables."""
    cells: dict[int, dict[int, set[int]]] = {}
    refused: set[int] = set()
    sizes: dict[int, int] = {}
    for block in blocks:
        place = block.place
        if not place.table:
            continue
        if place.cell:
            cells.setdefault(place.table, {}).setdefault(place.row, set()).add(place.cell)
            sizes[place.cell] = sizes.get(place.cell, 0) + len(block.text)
        if place.cell and (place.level or place.items or place.code or sizes[place.cell] > MAX_CELL_BYTES):
            refused.add(place.table)
    return {
        table for table, rows in cells.items() if table not in refused and max(len(row) for row in rows.values()) > 1
    }


def _pieces(
    blocks: Sequence[PlacedBlock], tables: set[int], numbers: ItemNumbers, options: LayoutOptions
) -> Iterator[Piece]:
    at = 0
    is_plain, columns = _is_plain(options), columns_of_cells(numbers, tables)
    while at < len(blocks):
        place, end = blocks[at].place, at + 1
        if place.cell and place.table in tables:
            while end < len(blocks) and blocks[end].place.table == place.table and blocks[end].place.cell:
                end += 1
            yield _table(blocks[at:end], columns, options)
        elif place.code:
            while end < len(blocks) and blocks[end].place.code == place.code:
                end += 1
            if end == len(blocks) or not _are_line_numbers(blocks[at:end], blocks[end].place):
                yield _code(blocks[at:end], numbers, options)
        elif place.items:
            while end < len(blocks) and (below := blocks[end].place).items == place.items:
                if below.code or below.quotes != place.quotes:
                    break
                end += 1
            yield _item(blocks[at:end], numbers, options)
        elif not is_plain or place.definitions or place.author:
            yield _paragraph(blocks[at], options)
        else:  # most blocks: paragraphs whose text is written as it is, many in one piece because pieces take time
            while end < len(blocks) and _is_paragraph(blocks[end].place, tables):
                end += 1
            yield Piece(["\n\n".join([block.text for block in blocks[at:end]])], ("", 0))
        if not place.items:
            numbers.open_items.clear()
        at = end


def _is_paragraph(place: BlockPlace, tables: set[int]) -> bool:
    if place.items or place.code or place.definitions or place.author:
        return False
    return not place.cell or place.table not in tables


def _paragraph(block: PlacedBlock, options: LayoutOptions) -> Piece:
    place, lines = block.place, _lines(block, options)
    group = ("definitions", place.definitions) if place.definitions and not place.level else ("", 0)
    if options.format == "markdown" and group[1] and not place.term:
        lines = [": " + lines[0], *("  " + line for line in lines[1:])]
    return Piece(lines, group, place.quotes)


def _lines(block: PlacedBlock, options: LayoutOptions) -> list[str]:
    """The block's lines as the format writes them, without what its list or definition adds."""
    place = block.place
    if place.author:
        if options.format == "text":
            return [_mark(block.text, block, options) + ":"]
        name = _EMPHASIS.sub(r"\\\g<0>", block.text)
        return [f"**{_mark(name, block, options)}**"]
    lines = block.text.split("\n") if options.line_breaks else [block.text.replace("\n", " ")]
    if options.format == "markdown":
        if place.level:
            return ["#" * place.level + " " + _mark(" ".join(lines), block, options)]
        if place.items or place.term or not place.definitions:
            lines = [_escaped(line) for line in lines]
    return [_mark(line, block, options) for line in lines] if options.marks else lines


def _escaped(line: str) -> str:
    """The line with a backslash before what Markdown would take for a heading, an item, a quote or a fence."""
    start = _MARKUP.match(line)
    return line if start is None else f"{start[1]}\\{line[start.end() :]}"


def _code(blocks: Sequence[PlacedBlock], numbers: ItemNumbers, options: LayoutOptions) -> Piece:
    """Lines of code; in Markdown between fences, and inside of the item that it is in."""
    place = blocks[0].place
    of_blocks = [(line.rstrip(), block) for block in blocks for line in block.text.split("\n")]
    while of_blocks and not of_blocks[-1][0]:
        of_blocks.pop()
    if not options.code:
        collapsed = [_mark(" ".join(line.split()), block, options) for line, block in of_blocks]
        lines = [" ".join(filter(None, collapsed))]
    else:
        lines = [_mark(line, block, options) for line, block in of_blocks]
    if options.code and options.format == "markdown":
        longest = max((len(match[0]) for line in lines for match in _FENCE.finditer(line)), default=2)
        fence = "`" * (longest + 1)
        lines = [fence + code_language(numbers.page, place.code), *lines, fence]
        if place.items:
            return Piece(*_in_item(lines, ("code", place.code), place, numbers, options))
    return Piece(lines, ("code", place.code), place.quotes)


def _are_line_numbers(blocks: Sequence[PlacedBlock], behind: BlockPlace) -> bool:
    """Whether the code is numbers that count the lines of other code behind it in its row of a table."""
    place = blocks[0].place
    is_beside = behind.code and place.row and place.row == behind.row and place.cell != behind.cell
    return bool(is_beside) and is_count(" ".join(block.text for block in blocks).split())


def _item(blocks: Sequence[PlacedBlock], numbers: ItemNumbers, options: LayoutOptions) -> Piece:
    """Lines of an item's own text."""
    place = blocks[0].place
    lines = [line for block in blocks for line in _lines(block, options)]
    group = ("list", place.list)
    if options.list_markers or options.format == "markdown":
        return Piece(*_in_item(lines, group, place, numbers, options))
    return Piece(lines, group, place.quotes)


def _in_item(
    lines: list[str], group: tuple[str, int], place: BlockPlace, numbers: ItemNumbers, options: LayoutOptions
) -> tuple[list[str], tuple[str, int], int]:
    """The piece of these lines in the last item of the place: the first line behind the item's marker if it is not
    open. It is then. In Markdown quotes inside of items stand behind the items' indentation."""
    elements, item, open_items = numbers.page.elements, place.items[-1], numbers.open_items
    is_numbered = elements[elements[item, PARENT], TAG] == OL
    outer = [open_items[outer] for outer in place.items[:-1] if outer in open_items][:MAX_LEVELS]
    is_open, around = item in open_items, open_items.setdefault(item, place.quotes)
    indent, inner, marker = "  " * len(outer), "", "- "
    if options.format == "markdown":
        signs = ["> " * max(below - above, 0) for above, below in pairwise([*outer, around, place.quotes])]
        indent, inner, marker = "".join("    " + sign for sign in signs[:-1]), signs[-1], "-   "
    marker = f"{numbers.of(item)}. " if is_numbered else marker
    below = indent + " " * len(marker) + inner
    lines = [
        (below if is_open else indent + marker + inner) + lines[0],
        *(below + line if line else below.rstrip() for line in lines[1:]),
    ]
    return lines, (group[0] + inner, group[1]), outer[0] if outer else around


def _table(blocks: Sequence[PlacedBlock], columns: dict[int, int], options: LayoutOptions) -> Piece:
    """columns: of the cells, by element."""
    rows: dict[int, dict[int, list[str]]] = {}
    headers: dict[int, bool] = {}
    for block in blocks:
        place = block.place
        cell = rows.setdefault(place.row, {}).setdefault(columns[place.cell], [])
        cell.append(_mark(" ".join(block.text.split()), block, options))
        headers[place.row] = headers.get(place.row, True) and place.header
    texts = [[" ".join(cells.get(column, ())) for column in range(max(cells) + 1)] for cells in rows.values()]
    lines = table_lines(texts, next(iter(headers.values())), options.format == "markdown")
    return Piece(lines, ("table", blocks[0].place.table), blocks[0].place.quotes)


def _joined(pieces: Iterable[Piece], options: LayoutOptions) -> str:
    """The pieces with a blank line between them, or a line end inside a list, table or piece of code."""
    parts: list[str] = []
    previous: Piece | None = None
    for piece in pieces:
        prefix = "> " * piece.quotes if options.format == "markdown" else ""
        lines = [prefix + line if line else prefix.rstrip() for line in piece.lines] if prefix else piece.lines
        if previous is not None:
            together = piece.group == previous.group and piece.group[1] != 0
            quotes = "> " * min(piece.quotes, previous.quotes) if prefix else ""
            parts.append("\n" if together else f"\n{quotes.rstrip()}\n")
        parts.append("\n".join(lines))
        previous = piece
    return "".join(parts)

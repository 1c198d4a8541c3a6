"""Reader of PDF documents that hold text: columns in reading order, paragraphs, hyphenated words joined, headers and
footers that repeat over the pages left out. Scanned pages are refused: they need OCR."""

import re
from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import pairwise
from statistics import median
from typing import Any, NamedTuple

from gristmill.data_pipeline.readers.document import Record, first_line
from gristmill.data_pipeline.readers.source import SourceConfig
from gristmill.data_pipeline.readers.whole_files import Refused, missing_extra

MAX_PAGES = 5_000
MAX_LINES = 4_000  # of a page
MIN_PAGE_CHARS = 25  # of a page with text; scans have none, or a stamp
MAX_SCANNED_SHARE = 0.5  # of a document's pages
EDGE_LINES = 2  # at the top and the bottom of a page, among which headers and footers are
MIN_REPEATS, MIN_REPEATED_SHARE = 3, 0.3  # of the pages that a header is on: some books have one for left pages alone
MIN_COLUMN_LINES = 3
PARAGRAPH_GAP = 1.45  # of the distance of lines in the page
MAX_CUTS = 200  # levels of regions in a page
_DIGITS = re.compile(r"\d+|\b[ivxlc]+\b")
PDFIUM_HYPHEN = "\x02"  # at the end of a line
_HYPHENATED = re.compile(rf"(?<!\w)(\w+)[-\u00ad\u2010{PDFIUM_HYPHEN}]$")
_WORD = re.compile(r"[^\W\d_]+")
# Boxes are those of the printed letters: "name" is half as high as "(if)" in one font. Heights of letters in parts of
# the size of the font, as in Times and Helvetica.
_ASCENDERS, _DESCENDERS = re.compile(r"[^acegmnopqrsuvwxyz\s.,:;_~-]"), re.compile(r"[gjpqyQ()\[\]{}|/_]")
SMALL, ASCENDER, DESCENDER = 0.46, 0.23, 0.21
MAX_BASELINE_SHIFT = 0.4  # of a line's height, as of superscripts


class Line(NamedTuple):
    """A line of text and its box; y grows upwards."""

    left: float
    bottom: float
    right: float
    top: float
    text: str

    @property
    def height(self) -> float:
        """Height of a line of all letters in this line's font, from the letters that it has."""
        printed = SMALL + ASCENDER * bool(_ASCENDERS.search(self.text)) + DESCENDER * self._has_descenders
        return (self.top - self.bottom) * (SMALL + ASCENDER + DESCENDER) / printed

    @property
    def baseline(self) -> float:
        return self.bottom + self.height * DESCENDER / (SMALL + ASCENDER + DESCENDER) * self._has_descenders

    @property
    def _has_descenders(self) -> bool:
        return _DESCENDERS.search(self.text) is not None


def convert_pdf(content: bytes, source: SourceConfig) -> Iterator[Record]:
    """One record of the document. Metadata: title, author, pages. Raises Refused for scanned and encrypted ones."""
    try:
        import pypdfium2  # an optional extra
    except ModuleNotFoundError:
        raise missing_extra("pdf", "pypdfium2") from None
    try:
        document = pypdfium2.PdfDocument(content)
    except pypdfium2.PdfiumError as error:
        is_locked = "password" in str(error).lower()
        raise Refused("encrypted" if is_locked else "bad_pdf", f"PDFium: {first_line(error)}") from None
    try:
        if len(document) > MAX_PAGES:
            raise Refused("too_many_pages", f"{len(document)} pages; the limit is {MAX_PAGES}")
        pages = [_page_lines(document[number]) for number in range(len(document))]
        fields = document.get_metadata_dict(skip_empty=True)
    finally:
        document.close()
    check_not_scanned(pages)
    text = document_text(pages)
    metadata: dict[str, Any] = {name: fields[name.title()] for name in ("title", "author") if fields.get(name.title())}
    yield Record(0, text, language=source.language or "", metadata=metadata | {"pages": len(pages)})


def check_not_scanned(pages: Sequence[Sequence[Line]]) -> None:
    """Raises Refused if more than MAX_SCANNED_SHARE of the pages have no text."""
    empty = sum(sum(len(line.text) for line in page) < MIN_PAGE_CHARS for page in pages)
    if empty > MAX_SCANNED_SHARE * len(pages) or empty == len(pages):
        raise Refused("scanned_pdf", f"{empty} of {len(pages)} pages have no text; run OCR over the file first")


def _page_lines(page: Any) -> list[Line]:
    """The page's pieces of text as PDFium gives them: of one line and font each, joined where they touch."""
    text_page = page.get_textpage()
    try:
        pieces = []
        for number in range(min(text_page.count_rects(), MAX_LINES)):
            left, bottom, right, top = text_page.get_rect(number)
            text = text_page.get_text_bounded(left=left, bottom=bottom, right=right, top=top)
            if text := " ".join(text.split()):
                pieces.append(Line(left, bottom, right, top, text))
    finally:
        text_page.close()
        page.close()
    return joined_lines(pieces)


def joined_lines(pieces: Sequence[Line]) -> list[Line]:
    """Pieces of text that follow each other on a line become one."""
    rows: list[list[Line]] = []
    for piece in sorted(pieces, key=lambda line: -line.baseline):
        shift = MAX_BASELINE_SHIFT * max(piece.height, rows[-1][0].height) if rows else 0.0
        if rows and rows[-1][0].baseline - piece.baseline < shift:
            rows[-1].append(piece)
        else:
            rows.append([piece])
    return [line for row in rows for line in _joined_row(sorted(row, key=lambda line: line.left))]


def _joined_row(row: Sequence[Line]) -> list[Line]:
    lines: list[Line] = []
    for piece in row:
        last = lines[-1] if lines else piece
        gap, height = piece.left - last.right, max(piece.height, last.height)
        if lines and piece.right <= last.right and piece.text in last.text:
            continue  # printed twice, as for bold letters
        if lines and -height < gap < 0.9 * height:
            space = " " if gap > 0.12 * height else ""
            box = (min(last.bottom, piece.bottom), max(last.right, piece.right), max(last.top, piece.top))
            lines[-1] = Line(last.left, *box, last.text + space + piece.text)
        else:
            lines.append(piece)
    return lines


def document_text(pages: Sequence[Sequence[Line]]) -> str:
    """Paragraphs separated by blank lines; one that goes on over a column or page is joined."""
    inner = (_WORD.findall(line.text)[1:-1] for page in pages for line in page)  # the others may be parts of words
    words = Counter(word.lower() for line in inner for word in line)
    paragraphs: list[str] = []
    for page in without_headers(pages):
        ordered = reading_order(page)
        distance = _line_distance(ordered)
        for number, line in enumerate(ordered):
            above = ordered[number - 1] if number else None
            if above is None or not paragraphs:
                is_new = not paragraphs or not _goes_on(paragraphs[-1], line.text)
            else:
                is_new = _begins_paragraph(above, line, distance) and not (
                    line.bottom > above.top and _goes_on(paragraphs[-1], line.text)
                )
            if is_new:
                paragraphs.append(line.text)
            else:
                paragraphs[-1] = join_line(paragraphs[-1], line.text, words)
    return "\n\n".join(paragraphs).replace(PDFIUM_HYPHEN, "-")


def _line_distance(lines: Sequence[Line]) -> float:
    gaps = [above.baseline - line.baseline for above, line in pairwise(lines) if above.bottom > line.bottom]
    return median(gaps) if gaps else 0.0


def _begins_paragraph(above: Line, line: Line, distance: float) -> bool:
    """By the space above, an indent, another size of letters, or the next column."""
    height, above_height = line.height, above.height
    if line.bottom >= above.bottom or above.baseline - line.baseline > PARAGRAPH_GAP * distance:
        return True
    if max(height, above_height) > 1.35 * min(height, above_height):
        return True
    indent = line.left - above.left
    return 0.8 * height < indent < 6 * height and above.text.rstrip()[-1:] in ".!?:;\"'\u201d\u00bb)"


def _goes_on(paragraph: str, line: str) -> bool:
    """Whether a paragraph at the end of a column or page goes on in this line."""
    return paragraph[-1:] not in ".!?:" and (line[:1].islower() or _HYPHENATED.search(paragraph) is not None)


def join_line(paragraph: str, line: str, words: Counter[str]) -> str:
    """The paragraph with its next line. A hyphen at the end of a line is dropped before a small letter, unless the
    document has both parts as words of their own and not their whole: "well-" and "known", but "exam-" and "ple"."""
    match = _HYPHENATED.search(paragraph)
    following = _WORD.match(line)
    if match is None or following is None or not line[0].islower():
        return f"{paragraph} {line}"
    whole, parts = (match[1] + following[0]).lower(), (match[1].lower(), following[0].lower())
    if not words[whole] and words[parts[0]] and words[parts[1]]:
        return paragraph + line
    return paragraph[: match.end(1)] + line


def without_headers(pages: Sequence[Sequence[Line]]) -> list[list[Line]]:
    """The pages without lines at their edges that stand on many pages, but for their numbers."""
    edges = []
    for page in pages:
        by_height = sorted(page, key=lambda line: -line.top)
        edges.append({*by_height[:EDGE_LINES], *by_height[-EDGE_LINES:]})
    counts = Counter(key for lines in edges for key in {_DIGITS.sub("#", line.text.lower()) for line in lines})
    least = max(MIN_REPEATS, MIN_REPEATED_SHARE * len(pages))
    return [
        [line for line in page if line not in edge or counts[_DIGITS.sub("#", line.text.lower())] < least]
        for page, edge in zip(pages, edges, strict=True)
    ]


def reading_order(lines: Sequence[Line], depth: int = 0) -> list[Line]:
    """Lines by column, each from top to bottom: the page is cut at the widest gutter between columns, else at the
    largest gap between lines (the recursive XY-cut of Nagy and Seth, 1984)."""
    if len(lines) < 2 * MIN_COLUMN_LINES or depth > MAX_CUTS:
        return sorted(lines, key=lambda line: (-line.top, line.left))
    height = median(line.height for line in lines)
    gutter = _widest_gap([(line.left, line.right) for line in lines], 0.8 * height)
    if gutter is not None:
        left = [line for line in lines if line.left < gutter]
        right = [line for line in lines if line.left >= gutter]
        if min(len(left), len(right)) >= MIN_COLUMN_LINES:
            return reading_order(left, depth + 1) + reading_order(right, depth + 1)
    cut = _widest_gap([(line.bottom, line.top) for line in lines], 0.0)
    if cut is None:
        return sorted(lines, key=lambda line: (-line.top, line.left))
    above, below = [line for line in lines if line.bottom >= cut], [line for line in lines if line.bottom < cut]
    return reading_order(above, depth + 1) + reading_order(below, depth + 1)


def _widest_gap(spans: Sequence[tuple[float, float]], least: float) -> float | None:
    """Where the widest gap ends that no span crosses; None if none is wider than least."""
    best, widest, end = None, least, -float("inf")
    for start, stop in sorted(spans):
        if end != -float("inf") and start - end > widest:
            best, widest = start, start - end
        end = max(end, stop)
    return best

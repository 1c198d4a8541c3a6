"""Reader of PDF documents that hold text: columns in reading order, paragraphs, items of lists, tables by
row, code by line, hyphenated words joined, headers and footers that repeat over the pages left out. Scanned pages are
refused: they need OCR."""

import re
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from itertools import pairwise
from statistics import median
from typing import Any

from gristmill.data_pipeline.readers.document import Record, first_line
from gristmill.data_pipeline.readers.pdf_lines import Kind, Line, joined_lines, pieces_of, without_typewriter
from gristmill.data_pipeline.readers.source import SourceConfig
from gristmill.data_pipeline.readers.whole_files import TICKS, Refused, missing_extra

MAX_PAGES = 5_000
MIN_PAGE_CHARS = 25  # of a page with text; scans have none, or a stamp
MAX_SCANNED_SHARE = 0.5  # of a document's pages
EDGE_LINES = 2  # at the top and the bottom of a page, among which headers and footers are
MIN_REPEATS, MIN_REPEATED_SHARE = 3, 0.3  # of the pages that a header is on: some books have one for left pages alone
MAX_PAGES_OF_THREE = 4  # from the first to the third of a chapter's, which may be on left pages alone
MIN_COLUMN_LINES = 3
PLACEHOLDERS = ("", "untitled", "anonymous")  # ReportLab's, of a title and an author that are not given
PARAGRAPH_GAP = 1.45  # of the distance of lines in the page
MAX_HEADING_CHARS = 60
MAX_CUTS = 200  # levels of regions in a page
_DIGITS, _HEADER = re.compile(r"\d+|\b[ivxlc]+\b"), re.compile(r"[^\W_]|#")
PDFIUM_HYPHEN = "\x02"  # at the end of a line
_HYPHENATED = re.compile(rf"(?<!\w)(\w+)[-\u00ad\u2010{PDFIUM_HYPHEN}]$")
_WORD = re.compile(r"[^\W\d_]+")
# Scripts without spaces between words: a line goes on in the next without one.
_UNSPACED = re.compile(
    r"[\u0e00-\u0eff\u1000-\u109f\u1780-\u17ff\u2e80-\u30ff\u3400-\u9fff\uf900-\ufaff\uff00-\uffef\U00020000-\U0003ffff]{2}"
)
ENDS = ".!?:\u3002\uff01\uff1f\uff1a\u061f\u06d4\u0964"  # of sentences
BLOCKS = (Kind.ROW, Kind.CODE, Kind.CONTENTS)  # which prose does not go on


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
        pieces = [pieces_of(document[number]) for number in range(len(document))]
        fields = document.get_metadata_dict(skip_empty=True)
    finally:
        document.close()
    check_not_scanned(pieces)
    pages = [joined_lines(page) for page in without_typewriter(pieces)]
    text = document_text(pages, source.blocks.format == "markdown")
    named: dict[str, Any] = {name: fields.get(name.title(), "") for name in ("title", "author")}
    metadata = {name: value for name, value in named.items() if value.strip("()") not in PLACEHOLDERS}
    yield Record(0, text, language=source.language or "", metadata=metadata | {"pages": len(pieces)})


def check_not_scanned(pages: Sequence[Sequence[Line]]) -> None:
    """Raises Refused if more than MAX_SCANNED_SHARE of the pages have no text."""
    empty = sum(sum(len(line.text) for line in page) < MIN_PAGE_CHARS for page in pages)
    if empty > MAX_SCANNED_SHARE * len(pages) or empty == len(pages):
        raise Refused("scanned_pdf", f"{empty} of {len(pages)} pages have no text; run OCR over the file first")


def document_text(pages: Sequence[Sequence[Line]], is_markdown: bool) -> str:
    """Paragraphs separated by blank lines; one that goes on over a column or page is joined. Rows of a table, and items
    of a list, are lines. In Markdown code is fenced, and the first row of a table is its head."""
    inner = (_WORD.findall(line.text)[1:-1] for page in pages for line in page)  # the others may be parts of words
    words = Counter(word.lower() for line in inner for word in line)
    paragraphs: list[str] = []
    kinds: list[Kind] = []
    first: Line | None = None  # of the last paragraph's last row or item
    for page in without_headers(pages):
        ordered = reading_order(page)
        distance = _line_distance(ordered)
        for above, line in zip([None, *ordered], ordered, strict=False):
            if first is None or _begins_paragraph(paragraphs[-1], first, above, line, distance):
                paragraphs.append(line.text)
                kinds.append(line.kind)
            elif line.kind is not Kind.PROSE and line.kind is first.kind:
                paragraphs[-1] += f"\n{line.text}"
            else:
                paragraphs[-1] = join_line(paragraphs[-1], line.text, words)
                continue
            first = line
    if is_markdown:
        paragraphs = [_in_markdown(text, kind) for text, kind in zip(paragraphs, kinds, strict=True)]
    return "\n\n".join(paragraphs).replace(PDFIUM_HYPHEN, "-")


def _in_markdown(text: str, kind: Kind) -> str:
    if kind is Kind.CODE:
        fence = "`" * max(3, 1 + max(map(len, TICKS.findall(text)), default=0))
        return f"{fence}\n{text}\n{fence}"
    if kind is not Kind.ROW:
        return text
    head, *rows = (f"| {row} |" for row in text.split("\n"))
    return "\n".join([head, "|" + " --- |" * (head.count(" | ") + 1), *rows])


def _line_distance(lines: Sequence[Line]) -> float:
    """That of the lines of prose, of which a page of items and short paragraphs has few."""
    gaps = [
        above.baseline - line.baseline
        for above, line in pairwise(lines)
        if above.bottom > line.bottom and (above.kind not in BLOCKS or line.kind not in BLOCKS)
    ]
    spaced = sorted(gap for gap in gaps if gap > 0.8 * min(line.height for line in lines))
    return spaced[len(spaced) // 4] if spaced else 0.0


def _begins_paragraph(paragraph: str, first: Line, above: Line | None, line: Line, distance: float) -> bool:
    """Whether a line begins one after this paragraph, rather than a line in it: by the space above, an indent, another
    size of letters, the end of a table or list, or the next column. first: of the paragraph's last row or item, or of
    the paragraph. above: None at the top of a page."""
    is_listed = line.kind is not Kind.PROSE
    if above is None or line.bottom > above.top:
        return is_listed or first.kind in BLOCKS or not _goes_on(paragraph, line.text)
    if is_listed and line.kind is first.kind:
        return line.kind is Kind.CODE and above.baseline - line.baseline > PARAGRAPH_GAP * distance
    height, above_height = line.height, above.height
    if above.kind in BLOCKS or line.kind in BLOCKS or line.kind is Kind.BULLET:
        return True
    if line.bottom >= above.bottom or above.baseline - line.baseline > PARAGRAPH_GAP * distance:
        return True
    if max(height, above_height) > 1.35 * min(height, above_height) or _is_heading(above, line):
        return True
    indent, is_sentence = line.left - above.left, above.text.rstrip()[-1:] in f"{ENDS};\"'\u201d\u00bb)\u300d\u300f"
    if first.kind in (Kind.BULLET, Kind.NUMBER) and line.left < first.left + 0.5 * height:
        return not line.text[:1].islower()  # as far left as the item's mark
    return is_sentence and (line.kind is Kind.NUMBER or 0.8 * height < indent < 6 * height)


def _is_heading(above: Line, line: Line) -> bool:
    """Whether a line is a heading of the next one, in letters that are not much larger."""
    is_short = len(above.text) < MAX_HEADING_CHARS and above.text[-1:] not in ".,;:-"
    return is_short and above.height > 1.12 * line.height and not line.text[:1].islower()


def _goes_on(paragraph: str, line: str) -> bool:
    """Whether a paragraph at the end of a column or page goes on in this line."""
    has_no_capitals = line[:1].isalpha() and line[0].lower() == line[0].upper()
    return paragraph[-1:] not in ENDS and (
        line[:1].islower() or has_no_capitals or _HYPHENATED.search(paragraph) is not None
    )


def join_line(paragraph: str, line: str, words: Counter[str]) -> str:
    """The paragraph with its next line. A hyphen at the end of a line is dropped before a small letter, unless the
    document has both parts as words of their own and not their whole: "well-" and "known", but "exam-" and "ple"."""
    match = _HYPHENATED.search(paragraph)
    following = _WORD.match(line)
    if match is None or following is None or not line[0].islower():
        return paragraph + line if _UNSPACED.fullmatch(paragraph[-1] + line[0]) else f"{paragraph} {line}"
    whole, parts = (match[1] + following[0]).lower(), (match[1].lower(), following[0].lower())
    if not words[whole] and words[parts[0]] and words[parts[1]]:
        return paragraph + line
    return paragraph[: match.end(1)] + line


def without_headers(pages: Sequence[Sequence[Line]]) -> list[list[Line]]:
    """The pages without lines at their edges that stand on many pages, or on three near each other, but for their
    numbers."""
    edges, places = [], defaultdict(list)  # places: numbers of pages, by line
    for number, page in enumerate(pages):
        by_height = sorted(page, key=lambda line: -line.top)
        edges.append({*by_height[:EDGE_LINES], *by_height[-EDGE_LINES:]})
        for key in {_DIGITS.sub("#", line.text.lower()) for line in edges[-1]}:
            if _HEADER.search(key):
                places[key].append(number)
    least = max(MIN_REPEATS, MIN_REPEATED_SHARE * len(pages))
    repeated = {
        key
        for key, numbers in places.items()
        if len(numbers) >= least
        or (key == "#" and len(numbers) >= MIN_REPEATS)
        or any(third - first <= MAX_PAGES_OF_THREE for first, third in zip(numbers, numbers[2:], strict=False))
    }
    return [
        [line for line in page if line not in edge or _DIGITS.sub("#", line.text.lower()) not in repeated]
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

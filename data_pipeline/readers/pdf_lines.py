"""Lines of a page of a PDF document, from the pieces of text that PDFium finds: joined where they touch, with the rows
of tables, the lines of code and the items of lists told from prose."""

import ctypes
import re
from bisect import bisect_left, bisect_right
from collections import Counter
from collections.abc import Iterator, Sequence
from enum import Enum
from itertools import islice, pairwise
from statistics import median
from typing import Any, NamedTuple
from unicodedata import normalize

from gristmill.data_pipeline.readers.whole_files import Refused

MAX_LINES = 4_000  # of a page
_LETTER = re.compile(r"[^\W_]")
# Boxes are those of the printed letters: "name" is half as high as "(if)" in one font. Heights of letters in parts of
# the size of the font, as in Times and Helvetica.
_ASCENDERS, _DESCENDERS = re.compile(r"[^acegmnopqrsuvwxyz\s.,:;_~-]"), re.compile(r"[gjpqyQ()\[\]{}|/_]")
_COMMAS = re.compile(r"[,;]")
SMALL, ASCENDER, DESCENDER, COMMA = 0.46, 0.23, 0.21, 0.15
MAX_BASELINE_SHIFT = 0.4  # of a line's height, as of superscripts
CLOSING, OPENING = ",.;)]\u2019\u201d", "([\u2018\u201c"  # in a font of their own they stand apart, without a space
MAX_MARK_RISE = 0.9  # of a quote's middle over the baseline, of the height of its line
# Marks of list items, which stand apart from their text; a dash is one only where it does.
_BULLET = re.compile(r"[\u2022\u25e6\u25aa\u2023\u25cf\u25cb\u25a0\u25a1\uf0b7\uf0a7](?=\s|$)")
_DASH, _NUMBER = re.compile(r"[\u2013*-]"), re.compile(r"\(?(?:\d{1,3}|[a-z]|[ivx]+)[.)](?=\s|$)")
_LEADER = re.compile(r"(?<![\s.])(?:\s?\.){5,}+\s*(?=\w+$)")
MIN_MARK_GAP, MAX_MARK_GAP = 0.4, 4.0  # between a mark and its text, of a line's height
# A table is told from columns of text by short cells that stand under each other, and a column of figures or lines that
# are drawn across its columns: below its head and around it, or between most rows.
_FIGURE = re.compile(r"[\W\d_]{0,40}\d[\W_]{0,10}[^\W\d_]{0,3}|[-\u2013\u2014]|n/?a", re.IGNORECASE)
MIN_TABLE_ROWS, MAX_CELL_WORDS, MIN_FIGURES = 3, 4, 0.6
MAX_ROW_DISTANCE = 4.0  # of a line's height
MAX_PATHS = 2_000  # of a page whose rules are looked for
MIN_RULE_POINTS, MAX_RULE_POINTS, MAX_RULE_GAP = 20.0, 3.0, 2.0  # length, thickness; between the parts of a rule
# Code is set in letters of one width.
_FIXED_FONT = re.compile(rb"mono|nimbusmon|courier|consol|typewriter|menlo|monaco|fixed|tt\d+$|terminal", re.IGNORECASE)
FIXED_PITCH = 1  # of a font's flags (ISO 32000, 9.8.2)
MIN_CODE_SHARE, MAX_CODE_SHARE = 0.8, 0.5  # of a line's characters; of a document's
MAX_CODE_COLUMN = 400
PROBES = (0.5, 0.25, 0.75, 0.05)  # of a piece's width: a place on a space has no character
LINE_ENDS = (10, 13)
SPACES = (" ", "\u00a0")
Box = tuple[float, float, float, float]  # left, bottom, right, top
_RIGHT_TO_LEFT = re.compile(r"[\u0590-\u08ff\ufb1d-\ufdff\ufe70-\ufefc]")
# Forms of letters in fonts (ligatures, Arabic letters at the end of a word), as letters.
LETTERS_OF_FORMS = {code: normalize("NFKC", chr(code)) for code in (*range(0xFB00, 0xFE00), *range(0xFE70, 0xFEFD))}
MIN_SIZE = 0.01  # of a character that PDFium makes boxes of, in points
MAX_GAP_IN_LINE = 2.0  # between characters of a line, of their height; a wider one is between columns


class Kind(Enum):
    """PROSE; ROW: of a table, its cells joined by " | "; BULLET, NUMBER: the first line of an item of a list; CONTENTS:
    an entry with dots before its page; CODE: in letters of one width, as are the lines beside it; RULE: a horizontal
    line that is drawn, or an edge of a box, without text."""

    PROSE, ROW, BULLET, NUMBER, CONTENTS, CODE, RULE = range(7)


class Line(NamedTuple):
    """A line of text and its box; y grows upwards. has_space_before, has_space_behind: whether its text in the document
    begins and ends with a space, which its box may hold."""

    left: float
    bottom: float
    right: float
    top: float
    text: str
    kind: Kind = Kind.PROSE
    has_space_before: bool = False
    has_space_behind: bool = False

    @property
    def height(self) -> float:
        """Height of a line of all letters in this line's font, from the letters that it has."""
        printed = SMALL + ASCENDER * bool(_ASCENDERS.search(self.text)) + self._descent
        return (self.top - self.bottom) * (SMALL + ASCENDER + DESCENDER) / printed

    @property
    def baseline(self) -> float:
        return self.bottom + self.height * self._descent / (SMALL + ASCENDER + DESCENDER)

    @property
    def _descent(self) -> float:
        return DESCENDER if _DESCENDERS.search(self.text) else COMMA if _COMMAS.search(self.text) else 0.0


def pieces_of(page: Any) -> list[Line]:
    """The page's pieces of text as PDFium gives them, of one line and font each, and its rules; CODE: in letters of one
    width. Raises Refused for a page of more than MAX_LINES."""
    text_page = page.get_textpage()
    try:
        if _RIGHT_TO_LEFT.search(text_page.get_text_range()):  # whose pieces are single letters
            return _lines_in_order(text_page, _rules(page))
        pieces = _rules(page)
        count = text_page.count_rects()
        _check_size(count)
        boxes = [text_page.get_rect(number) for number in range(count)]
        for (left, bottom, right, top), text in zip(boxes, _texts_of(text_page, boxes), strict=True):
            if words := " ".join(text.translate(LETTERS_OF_FORMS).split()):
                character = _character_of_one_width(text_page, left, right, (bottom + top) / 2)
                if character is not None and text[0].isspace():
                    left = _left_without_spaces(text_page, character, left)
                kind = Kind.PROSE if character is None else Kind.CODE
                pieces.append(Line(left, bottom, right, top, words, kind, text[0] in SPACES, text[-1] in SPACES))
        return pieces
    finally:
        text_page.close()
        page.close()


def _texts_of(text_page: Any, boxes: Sequence[Box]) -> list[str]:
    """The text of each box: PDFium makes one of the characters of a text object that follow each other. The text inside
    of a box, which it gives too, would have letters of lines that reach into it, as a raised figure does."""
    import pypdfium2.raw as pdfium  # an optional extra

    units: list[list[int]] = [[] for _ in boxes]
    number, current = -1, None
    left, right, bottom, top = (ctypes.c_double() for _ in range(4))
    for index in range(pdfium.FPDFText_CountChars(text_page)):
        code = pdfium.FPDFText_GetUnicode(text_page, index)
        pdfium.FPDFText_GetCharBox(text_page, index, left, right, bottom, top)
        has_size = right.value - left.value >= MIN_SIZE and top.value - bottom.value >= MIN_SIZE
        if has_size and not pdfium.FPDFText_IsGenerated(text_page, index):
            text_object = ctypes.cast(pdfium.FPDFText_GetTextObject(text_page, index), ctypes.c_void_p).value
            number, current = number + (text_object != current), text_object
        if 0 <= number < len(boxes) and code not in LINE_ENDS:
            units[number].append(code)
    if number != len(boxes) - 1:
        return [
            text_page.get_text_bounded(left=left, bottom=bottom, right=right, top=top)
            for left, bottom, right, top in boxes
        ]
    return [
        "".join(map(chr, codes)).encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace") for codes in units
    ]


def _check_size(lines: int) -> None:
    if lines > MAX_LINES:
        raise Refused("page_too_large", f"over {MAX_LINES} pieces of text on a page, which is the limit")


def _rules(page: Any) -> list[Line]:
    """Rules of the page, those that touch as one; none of drawings inside of forms."""
    import pypdfium2.raw as pdfium  # an optional extra
    from pypdfium2 import PdfiumError

    rules: list[Line] = []
    for path in islice(page.get_objects([pdfium.FPDF_PAGEOBJ_PATH], max_depth=1), MAX_PATHS):
        try:
            left, bottom, right, top = path.get_bounds()
        except PdfiumError:  # of a path without points
            continue
        if right - left > MIN_RULE_POINTS:
            is_line = top - bottom < MAX_RULE_POINTS
            heights = ((bottom + top) / 2,) if is_line else (bottom, top)
            rules += [Line(left, y, right, y, "", Kind.RULE) for y in heights]
    joined: list[Line] = []
    for rule in sorted(rules, key=lambda rule: (round(rule.bottom), rule.left)):
        last = joined[-1] if joined else rule
        if joined and abs(last.bottom - rule.bottom) < MAX_RULE_GAP and rule.left - last.right < MAX_RULE_GAP:
            joined[-1] = last._replace(right=max(last.right, rule.right))
        else:
            joined.append(rule)
    return joined


def _lines_in_order(text_page: Any, rules: Sequence[Line]) -> list[Line]:
    """Rules, and lines of a page with letters that are written from right to left, from PDFium's characters, which are
    in the order of reading. Where most letters are such, the page is mirrored, so that lines begin at the left."""
    import pypdfium2.raw as pdfium  # an optional extra

    characters: list[tuple[str, Box]] = []
    lines: list[Line] = []
    count = pdfium.FPDFText_CountChars(text_page)
    for number in range(count):
        code = pdfium.FPDFText_GetUnicode(text_page, number)
        if code not in LINE_ENDS:
            characters.append((chr(code), text_page.get_charbox(number)))
        if characters and (code in LINE_ENDS or number == count - 1):
            lines += _columns_of_line(characters)
            _check_size(len(lines))
            characters = []
    text = "".join(line.text for line in lines)
    lines += rules
    if len(_RIGHT_TO_LEFT.findall(text)) < 0.5 * len(_LETTER.findall(text)):
        return lines
    return [line._replace(left=-line.right, right=-line.left) for line in lines]


def _columns_of_line(characters: Sequence[tuple[str, Box]]) -> Iterator[Line]:
    """The characters of a line, as a piece for each column that they are in."""
    printed = [box for text, box in characters if not text.isspace()]
    if not printed:
        return
    height = median(top - bottom for _, bottom, _, top in printed)
    starts, end = [-float("inf")], -float("inf")
    for left, _, right, _ in sorted(printed):
        if end != -float("inf") and left - end > MAX_GAP_IN_LINE * height:
            starts.append(left)
        end = max(end, right)
    columns: list[list[tuple[str, Box]]] = [[] for _ in starts]
    column = columns[0]
    for text, box in characters:
        if not text.isspace():
            column = columns[bisect_right(starts, box[0]) - 1]
        column.append((text, box))
    for column in columns:
        units = "".join(text for text, _ in column).encode("utf-16-le", "surrogatepass")
        words = " ".join(units.decode("utf-16-le", "replace").translate(LETTERS_OF_FORMS).split())
        lefts, bottoms, rights, tops = zip(*(box for text, box in column if not text.isspace()), strict=True)
        yield Line(min(lefts), min(bottoms), max(rights), max(tops), words)


def _character_of_one_width(text_page: Any, left: float, right: float, y: float) -> int | None:
    """The number of a character between two places, if its font's letters have one width: by the font's name or by the
    flag of its descriptor, which many programs do not set. None for other fonts."""
    import pypdfium2.raw as pdfium  # an optional extra

    numbers = (pdfium.FPDFText_GetCharIndexAtPos(text_page, left + (right - left) * at, y, 3, 3) for at in PROBES)
    character = next((number for number in numbers if number >= 0), None)
    if character is None:
        return None
    name, flags = ctypes.create_string_buffer(256), ctypes.c_int()
    pdfium.FPDFText_GetFontInfo(text_page, character, name, len(name), flags)
    return character if flags.value & FIXED_PITCH or _FIXED_FONT.search(name.value) else None


def _left_without_spaces(text_page: Any, character: int, left: float) -> float:
    """Where the first letter is of the piece that begins at `left`, with spaces, and has this character."""
    import pypdfium2.raw as pdfium  # an optional extra

    first = text_page.get_charbox(character)[0]
    while character and (code := pdfium.FPDFText_GetUnicode(text_page, character - 1)) not in LINE_ENDS:
        character -= 1
        if not chr(code).isspace():
            at = text_page.get_charbox(character)[0]
            if at < left:
                break
            first = at
    return first


def without_typewriter(pages: Sequence[Sequence[Line]]) -> Sequence[Sequence[Line]]:
    """The pages; where most letters have one width, as of a typewriter, no piece is code."""
    sizes: Counter[Kind] = Counter()
    for page in pages:
        for piece in page:
            sizes[piece.kind] += len(piece.text)
    if sizes[Kind.CODE] <= MAX_CODE_SHARE * sizes.total():
        return pages
    return [[piece._replace(kind=Kind.PROSE) if piece.kind is Kind.CODE else piece for piece in page] for page in pages]


def joined_lines(pieces: Sequence[Line]) -> list[Line]:
    """Pieces of text that follow each other on a line become one, and rows of a table too; rules are left out."""
    rules = [piece for piece in pieces if piece.kind is Kind.RULE]
    pieces = [piece for piece in pieces if piece.kind is not Kind.RULE]
    marks = [piece for piece in pieces if not _LETTER.search(piece.text)]
    rows: list[list[Line]] = []
    for piece in sorted((piece for piece in pieces if _LETTER.search(piece.text)), key=lambda line: -line.baseline):
        shift = MAX_BASELINE_SHIFT * max(piece.height, rows[-1][0].height) if rows else 0.0
        if rows and rows[-1][0].baseline - piece.baseline < shift:
            rows[-1].append(piece)
        else:
            rows.append([piece])
    baselines = [-row[0].baseline for row in rows]
    for mark in marks:
        middle = (mark.bottom + mark.top) / 2
        below = bisect_left(baselines, -middle)  # the first row whose baseline is below the mark's middle
        if below < len(rows) and middle + baselines[below] < MAX_MARK_RISE * rows[below][0].height:
            rows[below].append(mark)
        elif below and -baselines[below - 1] - middle < MAX_BASELINE_SHIFT * rows[below - 1][0].height:
            rows[below - 1].append(mark)
        else:
            rows.append([mark])
    rows.sort(key=lambda row: -row[0].baseline)
    rows = [sorted(row, key=lambda line: line.left) for row in rows]
    lines: list[Line] = []
    while rows:
        if count := _rows_of_code(rows):
            lines += _code_lines(rows[:count])
        else:
            count, is_table = _rows_of_table(rows, rules)
            joined = [_joined_row(row) for row in rows[:count]]
            lines += map(_as_row, joined) if is_table else (_with_kind(line) for row in joined for line in row)
        rows = rows[count:]
    return lines


def _rows_of_code(rows: Sequence[Sequence[Line]]) -> int:
    """How many of the rows, from the first, are lines of code; 0 where there is one at most: a word of code in prose
    may fill a line."""
    count = 0
    for row in rows:
        code = sum(len(piece.text) for piece in row if piece.kind is Kind.CODE)
        is_item = len(row) > 1 and (_BULLET.fullmatch(row[0].text) or _NUMBER.fullmatch(row[0].text))
        if is_item or code < MIN_CODE_SHARE * sum(len(piece.text) for piece in row):
            break
        count += 1
    return count if count > 1 else 0


def _code_lines(rows: Sequence[Sequence[Line]]) -> Iterator[Line]:
    """Each row as a line, with the spaces before and in it."""
    left = min(row[0].left for row in rows)
    width = median((piece.right - piece.left) / len(piece.text) for row in rows for piece in row)
    for row in rows:
        text = ""
        for piece in row:
            column = min(round((piece.left - left) / width) if width > 0 else 0, MAX_CODE_COLUMN)
            text = text.ljust(column) + piece.text
        box = (min(piece.bottom for piece in row), row[-1].right, max(piece.top for piece in row))
        yield Line(row[0].left, *box, text, Kind.CODE)


def _joined_row(row: Sequence[Line]) -> list[Line]:
    lines: list[Line] = []
    for piece in row:
        last = lines[-1] if lines else piece
        gap, height = piece.left - last.right, max(piece.height, last.height)
        if lines and piece.right <= last.right and piece.text in last.text:
            continue  # printed twice, as for bold letters
        if len(lines) == 1 and _DASH.fullmatch(last.text) and MIN_MARK_GAP * height < gap < MAX_MARK_GAP * height:
            last = last._replace(text="\u2022")
        is_mark = _BULLET.fullmatch(last.text) or _NUMBER.fullmatch(last.text)
        if lines and -height < gap < (MAX_MARK_GAP if is_mark else 0.9) * height:
            is_bracket = piece.text[0] in CLOSING or last.text[-1] in OPENING
            has_space = (last.has_space_behind or piece.has_space_before) and not is_bracket
            is_apart = has_space or gap > (0.35 if is_bracket else 0.12) * height
            space = " " if is_apart else ""
            box = (min(last.bottom, piece.bottom), max(last.right, piece.right), max(last.top, piece.top))
            text = last.text + space + piece.text
            lines[-1] = Line(last.left, *box, text, has_space_behind=piece.has_space_behind)
        else:
            lines.append(piece)
    return lines


def _rows_of_table(rows: Sequence[Sequence[Line]], rules: Sequence[Line]) -> tuple[int, bool]:
    """(how many of the rows, from the first, have the same columns; whether they are a table)."""
    table = [_joined_row(rows[0])]
    for row in rows[1:]:
        joined = _joined_row(row)
        if not _stand_under(table[-1], joined):
            break
        table.append(joined)
    count = len(table)
    if count < MIN_TABLE_ROWS:
        return count, False
    has_head, has_grid = _ruled(table, rules)
    if has_grid or median(len(line.text.split()) for row in table for line in row) > MAX_CELL_WORDS:
        return count, has_grid
    columns = list(zip(*table, strict=True))[1:]
    shares = [sum(_FIGURE.fullmatch(line.text) is not None for line in column) / count for column in columns]
    return count, has_head or max(shares, default=0.0) >= MIN_FIGURES


def _ruled(table: Sequence[Sequence[Line]], rules: Sequence[Line]) -> tuple[bool, bool]:
    """(whether rules stand below the first row and above it or below the last one, whether they stand between most
    rows), each across all columns."""
    left, right = min(row[0].right for row in table), max(row[-1].left for row in table)
    across = sorted(rule.bottom for rule in rules if rule.left < left and rule.right > right)
    reach = MAX_ROW_DISTANCE * table[0][0].height
    baselines = [row[0].baseline for row in table]
    edges = [baselines[0] + reach, *baselines, baselines[-1] - reach]
    is_between = [bisect_left(across, below) < bisect_left(across, above) for above, below in pairwise(edges)]
    has_head = is_between[1] and (is_between[0] or is_between[-1])
    return has_head, sum(is_between[1:-1]) > 0.5 * (len(table) - 1)


def _stand_under(above: Sequence[Line], row: Sequence[Line]) -> bool:
    """Whether two rows have the same columns, two or more."""
    if not 2 <= len(row) == len(above):
        return False
    height = max(line.height for line in (*above, *row))
    is_near = above[0].baseline - row[0].baseline < MAX_ROW_DISTANCE * height
    return is_near and all(a.left < b.right and b.left < a.right for a, b in zip(above, row, strict=True))


def _with_kind(line: Line) -> Line:
    """The line, with the mark that items have on pages, and three dots of many."""
    if _LEADER.search(line.text):
        return line._replace(text=_LEADER.sub(" ... ", line.text, count=1), kind=Kind.CONTENTS)
    if _BULLET.match(line.text):
        return line._replace(text=_BULLET.sub("-", line.text, count=1), kind=Kind.BULLET)
    return line._replace(kind=Kind.NUMBER) if _NUMBER.match(line.text) else line


def _as_row(cells: Sequence[Line]) -> Line:
    box = (min(line.bottom for line in cells), cells[-1].right, max(line.top for line in cells))
    return Line(cells[0].left, *box, " | ".join(line.text for line in cells), Kind.ROW)

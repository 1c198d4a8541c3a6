"""Tables: columns of cells where some span several columns or rows, and rows as lines."""

import re
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from gristmill.data_pipeline.extraction.attributes import ORDINAL, PARENT, TAG
from gristmill.data_pipeline.extraction.page import ItemNumbers, start_tag
from gristmill.data_pipeline.extraction.tags import CELL, TAG_IDS, TAG_KINDS

MAX_COLUMNS, MAX_ROWS = 100, 65_534  # of a table whose cells span several; the second is HTML's
TABLE, TR = TAG_IDS["table"], TAG_IDS["tr"]
_IS_IN_GRID = np.array([tag == TR or bool(kinds & CELL) for tag, kinds in enumerate(TAG_KINDS.tolist())])
_SPAN = re.compile(rb"""\s(col|row)span\s{0,9}=\s{0,9}["']?\s{0,9}(\d{1,5})""", re.IGNORECASE)


def table_lines(rows: Sequence[list[str]], has_header: bool, is_markdown: bool) -> list[str]:
    """A line a row, its cells joined by bars. has_header: whether the first row is the table's head."""
    if not is_markdown:
        return [" | ".join(row) for row in rows]
    width = max(map(len, rows))
    head, *others = rows if has_header else [[], *rows]
    lines = [head + [""] * (width - len(head)), ["---"] * width]
    for row in others:  # one that is shorter still ends with empty cells to readers of Markdown too
        lines.append(row + [""] * (min(width, MAX_COLUMNS) - len(row)))
    return [f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in row)} |" for row in lines]


def is_count(lines: Sequence[str]) -> bool:
    """Whether the lines are numbers that follow each other, as those beside the lines of code."""
    numbers = [int(line) for line in lines if line.isdecimal() and len(line) < 10]
    return bool(numbers) and len(numbers) == len(lines) and numbers == [*range(numbers[0], numbers[0] + len(numbers))]


def columns_of_cells(numbers: ItemNumbers, tables: set[int]) -> dict[int, int]:
    """The column, from 0, of each cell: its ordinal in the row, or in those tables its place in the grid.

    Source: WHATWG, HTML, 4.9.12 (forming a table)."""
    page, columns = numbers.page, {}
    grids: dict[int, _Grid] = {}
    of_rows: dict[int, _Grid] = {}
    for element in np.flatnonzero(_IS_IN_GRID[page.elements[:, TAG]]).tolist() if tables else ():
        parent = int(page.elements[element, PARENT])
        if page.elements[element, TAG] != TR:
            columns[element] = int(numbers.structure[element, ORDINAL])
            if parent in of_rows:
                of_rows[parent].add(element, start_tag(page, element).partition(b">")[0])
        elif (table := parent if page.elements[parent, TAG] == TABLE else int(page.elements[parent, PARENT])) in tables:
            of_rows[element] = grids.setdefault(table, _Grid())
            of_rows[element].begin_row(parent)
    for grid in grids.values():
        columns |= grid.places()
    return columns


@dataclass(slots=True)
class _Grid:
    """A table whose cells may span columns and rows. columns: of the cells. taken: by column, the number of the last
    row that a cell above spans."""

    columns: dict[int, int] = field(default_factory=dict)
    taken: dict[int, int] = field(default_factory=dict)
    section: int = -1
    row: int = -1
    column: int = 0
    has_spans: bool = False

    def begin_row(self, section: int) -> None:
        if section != self.section:  # which no cell reaches beyond
            self.taken, self.section = {}, section
        self.row, self.column = self.row + 1, 0

    def add(self, cell: int, tag: bytes) -> None:
        sizes = {name.lower(): int(size) for name, size in _SPAN.findall(tag)}
        while self.taken.get(self.column, -1) >= self.row:
            self.column += 1
        self.columns[cell] = self.column
        start, self.column = self.column, self.column + min(max(sizes.get(b"col", 1), 1), MAX_COLUMNS)
        if sizes:
            self.has_spans = True
            last = self.row + (sizes.get(b"row", 1) or MAX_ROWS) - 1
            self.taken |= dict.fromkeys(range(start, min(self.column, MAX_COLUMNS)), last)

    def places(self) -> dict[int, int]:
        """The columns, numbered without those in which no cell begins; none of a table of more than MAX_COLUMNS."""
        starts = sorted(set(self.columns.values()))
        if not self.has_spans or starts[-1] >= MAX_COLUMNS:
            return {}
        places = {column: place for place, column in enumerate(starts)}
        return {cell: places[column] for cell, column in self.columns.items()}

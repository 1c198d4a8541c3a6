"""Reader of CSV and TSV files: the first row names the fields, each later row is a record."""

import codecs
import csv
from collections import Counter
from collections.abc import Iterator
from typing import BinaryIO

from gristmill.data_pipeline.readers.compression import (
    SUFFIXES,
    Damaged,
    TooLong,
    blocks,
    in_utf8,
    transcoded,
    whole_lines,
)
from gristmill.data_pipeline.readers.document import FieldMap, Record, Unreadable, excerpt, too_large
from gristmill.data_pipeline.readers.source import SourceConfig

DELIMITERS = ",;\t|"


def read_delimited(file: BinaryIO, name: str, source: SourceConfig) -> Iterator[Record | Unreadable]:
    """Reads one record per row (RFC 4180: quoted cells may hold delimiters and line ends). The delimiter is the tab of
    a .tsv, else the most frequent of , ; tab | in the first row. Empty cells are no fields.

    A row that is not UTF-8, has more cells than the first, or is over max_record_bytes is Unreadable by itself."""
    csv.field_size_limit(max(csv.field_size_limit(), source.max_record_bytes))
    fields, number = FieldMap(source), 0
    stream = blocks(file, name)
    if codecs.lookup(source.encoding).name not in ("utf-8", "utf-8-sig"):
        stream = transcoded(stream, source.encoding)
    lines = _Lines(stream, source.max_record_bytes)
    try:
        header = next(lines, "")
        delimiter = delimiter_of(header, name)
        names = next(csv.reader([header], delimiter=delimiter), [])
        rows = csv.reader(lines, delimiter=delimiter)
        while True:
            try:
                cells = next(rows)
            except StopIteration:
                return
            except csv.Error as error:
                yield Unreadable(number, "bad_row", f"not a row of a CSV file: {error}", lines.offset)
                rows = csv.reader(lines, delimiter=delimiter)
            else:
                if lines.too_long:
                    yield too_large(number, lines.too_long, source.max_record_bytes, lines.offset)
                    lines.too_long = 0
                elif (size := sum(map(len, cells))) > source.max_record_bytes:
                    yield too_large(number, size, source.max_record_bytes, lines.offset)
                elif cells:
                    yield _record(cells, names, fields, number, lines.offset)
            number += 1
    except Damaged as damage:
        yield Unreadable(number, damage.kind, str(damage), lines.offset)


def _record(cells: list[str], names: list[str], fields: FieldMap, number: int, offset: int) -> Record | Unreadable:
    quoted_cells = excerpt(" ".join(cells))
    if any("\udc80" <= character <= "\udcff" for cell in cells for character in cell):
        return Unreadable(
            number, "invalid_encoding", "invalid utf-8 in this row; set encoding of the source", offset, quoted_cells
        )
    if len(cells) > len(names):
        reason = f"{len(cells)} cells, and the first row names {len(names)} fields; quote cells that hold a delimiter"
        return Unreadable(number, "bad_row", reason, offset, quoted_cells)
    return fields.record({key: cell for key, cell in zip(names, cells, strict=False) if cell}, number, offset)


def delimiter_of(header: str, name: str) -> str:
    """The delimiter of a file by its name and first row."""
    if any(part == "tsv" for part in name.lower().split(".")[-2:] if part not in SUFFIXES):
        return "\t"
    counts = Counter(character for character in header if character in DELIMITERS)
    return max(DELIMITERS, key=lambda delimiter: (counts[delimiter], -DELIMITERS.index(delimiter)))


class _Lines(Iterator[str]):
    """Lines of text with their ends; bytes that are not UTF-8 are lone surrogates. A line over the limit is empty, and
    too_long holds its size until the reader resets it. offset: bytes of UTF-8 read."""

    def __init__(self, stream: Iterator[bytes], limit: int):
        narrow, _ = in_utf8(stream)
        self._lines = self._split(whole_lines(narrow, limit))
        self.too_long = self.offset = 0

    def __next__(self) -> str:
        return next(self._lines)

    def _split(self, pieces: Iterator[bytes | TooLong]) -> Iterator[str]:
        is_first = True
        for piece in pieces:
            if isinstance(piece, TooLong):
                self.too_long = piece.num_bytes
                self.offset += piece.num_bytes
                yield '""\n'
                continue
            for line in piece.splitlines(keepends=True):
                self.offset += len(line)
                text = line.decode("utf-8", "surrogateescape")
                yield text.removeprefix("\ufeff") if is_first else text
                is_first = False

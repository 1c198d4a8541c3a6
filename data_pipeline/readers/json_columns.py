"""Reader of JSON lines into columns: a kernel reads plain lines, readers/jsonl.py the others, one at a time."""

from collections.abc import Iterator
from typing import BinaryIO

import numpy as np
import orjson

from gristmill.data_pipeline.readers.compression import LINE_END_BYTES, Damaged, TooLong, whole_lines
from gristmill.data_pipeline.readers.document import Unreadable, too_large
from gristmill.data_pipeline.readers.fields import FieldMap, metadata_json
from gristmill.data_pipeline.readers.json_kernel import (
    AT,
    LINE_LEFT,
    NUM_PUT,
    NUM_STATE,
    NUM_UNCERTAIN,
    NUMBER,
    ROWS,
    LineColumns,
    LineRules,
    parse_lines,
)
from gristmill.data_pipeline.readers.json_members import ALL_METADATA, NO_METADATA, SOME_METADATA, new_members
from gristmill.data_pipeline.readers.jsonl import json_lines, line_record, line_records
from gristmill.data_pipeline.readers.record_columns import BATCH_BYTES, BATCH_RECORDS, RecordBuilder, RecordColumns
from gristmill.data_pipeline.readers.source import SourceConfig
from gristmill.data_pipeline.signals.buffer import PADDING


class JsonColumns:
    """Adds the lines of a file to a builder. number, offset: of the next line."""

    def __init__(self, builder: RecordBuilder, source: SourceConfig, number: int, offset: int):
        self._builder = builder
        self._fields = FieldMap(source)
        self._limit = source.max_record_bytes
        self._rules = line_rules(source)
        self._members, self._state = new_members(), np.zeros(NUM_STATE, np.int64)
        self._line_starts, self._is_uncertain = np.zeros(BATCH_RECORDS, np.int64), np.zeros(BATCH_RECORDS, np.bool_)
        self._number, self._offset = number, offset

    def read(self, stream: Iterator[bytes]) -> Iterator[RecordColumns]:
        """Yields the builder's records whenever it is full; the last ones stay in it."""
        try:
            for piece in whole_lines(stream, self._limit + LINE_END_BYTES):
                if isinstance(piece, TooLong):
                    self._builder.add(too_large(self._number, piece.num_bytes, self._limit, self._offset))
                    self._number += 1
                    self._offset += piece.num_bytes
                    if self._builder.is_full:
                        yield self._builder.take()
                else:
                    yield from self._read_piece(piece)
        except Damaged as damage:
            self._builder.add(Unreadable(self._number, damage.kind, str(damage)))

    def _read_piece(self, piece: bytes) -> Iterator[RecordColumns]:
        padded = np.empty(len(piece) + PADDING, np.uint8)
        padded[: len(piece)] = np.frombuffer(piece, np.uint8)
        padded[len(piece) :] = 0
        at = 0
        while at < len(piece):
            outcome, at = self._parse(padded, piece, at)
            if outcome == LINE_LEFT:
                end = piece.find(b"\n", at) + 1 or len(piece)
                found = line_record(piece[at:end], self._fields, self._number, self._offset + at)
                if found is not None:
                    self._builder.add(found)
                    del found
                self._number += 1
                at = end
            if self._builder.is_full:
                yield self._builder.take()
        self._offset += len(piece)

    def _parse(self, padded: np.ndarray, piece: bytes, at: int) -> tuple[int, int]:
        """Run the kernel from `at` on; returns its outcome and where it ended."""
        builder, state = self._builder, self._state
        first, left = builder.rows, len(piece) - at
        for column in builder.columns:
            column.reserve(first, left + BATCH_RECORDS * len(self._rules.default_language))
        state[AT], state[ROWS], state[NUMBER], state[NUM_UNCERTAIN] = at, first, self._number, 0
        state[NUM_PUT:] = [column.offsets[first] for column in builder.columns]
        columns = LineColumns(
            tuple(column.data for column in builder.columns),
            tuple(column.offsets for column in builder.columns),
            builder.numbers,
            self._line_starts,
            self._is_uncertain,
        )
        outcome = parse_lines(padded, len(piece), self._rules, columns, self._members, state)
        builder.rows, at, self._number = int(state[ROWS]), int(state[AT]), int(state[NUMBER])
        if not state[NUM_UNCERTAIN]:
            return outcome, at
        for row in (first + np.flatnonzero(self._is_uncertain[first : builder.rows])).tolist():
            if not self._set_metadata(row):
                builder.rows, self._number = row, int(builder.numbers[row])
                return LINE_LEFT, int(self._line_starts[row])
        return outcome, at

    def _set_metadata(self, row: int) -> bool:
        """Parse the metadata that the kernel left to orjson; False if it is not JSON."""
        column = self._builder.metadata
        start, end = column.offsets[row : row + 2].tolist()
        try:
            found = orjson.loads(column.data[start:end].data)
        except orjson.JSONDecodeError:
            return False
        self._builder.change_metadata(row, metadata_json(self._fields.metadata_of(found)).encode())
        return True


def read_json_columns(
    file: BinaryIO, name: str, source: SourceConfig, byte_bounds: tuple[int, int, int | None], builder: RecordBuilder
) -> Iterator[RecordColumns]:
    """jsonl.read_jsonl, as columns. byte_bounds: (number of the first record, start, end), as there.

    Yields the builder's records whenever it is full; the last ones stay in it."""
    lines = json_lines(file, name, *byte_bounds)
    if not lines.was_wide:
        yield from JsonColumns(builder, source, lines.number, lines.offset).read(lines.stream)
        return
    for found in line_records(lines, source):
        builder.add(found)
        if builder.is_full:
            yield builder.take()


def line_rules(source: SourceConfig) -> LineRules:
    """The rules of the kernel. Where one name stands for two fields, no line has a text for the kernel, which leaves
    them all."""
    names = [source.text_field, source.url_field, source.language_field]
    given = [b"" if name is None else name.encode("utf-8", "surrogatepass") for name in names]
    ends = np.cumsum([len(name) for name in given])
    ends[[name is None for name in names]] = -1
    if len(set(names) - {None}) < 3 - names.count(None):
        ends[0] = -1
    kinds = {"all": ALL_METADATA, "none": NO_METADATA}
    metadata = source.metadata_fields
    return LineRules(
        _array(b"".join(given)),
        ends,
        _array((source.language or "").encode()),
        kinds[metadata] if isinstance(metadata, str) else SOME_METADATA,
        source.max_record_bytes,
        BATCH_RECORDS,
        BATCH_BYTES,
    )


def _array(content: bytes) -> np.ndarray:
    return np.array(list(content), np.uint8)

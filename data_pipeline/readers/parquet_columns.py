"""Reader of Parquet files into columns: strings are copied from Arrow; rows that need a repair go one at a time."""

from collections.abc import Iterator
from typing import BinaryIO

import pyarrow as pa
import pyarrow.compute as pc

from gristmill.data_pipeline.readers.fields import FieldMap, metadata_json
from gristmill.data_pipeline.readers.parquet import Rows, read_rows, row_records
from gristmill.data_pipeline.readers.record_columns import RecordBuilder, RecordColumns
from gristmill.data_pipeline.readers.source import SourceConfig


def read_parquet_columns(
    file: BinaryIO, source: SourceConfig, bounds: tuple[int, int, int | None], builder: RecordBuilder
) -> Iterator[RecordColumns]:
    """parquet.read_parquet, as columns. bounds: (number of the first record, first row group, end), as there.

    Yields the builder's records whenever it is full; the last ones stay in it."""
    fields = FieldMap(source)
    for rows in read_rows(file, source, *bounds):
        if not isinstance(rows, Rows):
            builder.add(rows)
        elif (columns := _columns(rows, fields)) is not None:
            yield from builder.add_strings(rows.number, columns)
        else:
            for record in row_records(rows, fields):
                builder.add(record)
                if builder.is_full:
                    yield builder.take()
        if builder.is_full:
            yield builder.take()


def _columns(rows: Rows, fields: FieldMap) -> list[pa.Array] | None:
    """Texts, URLs, languages and metadata of the rows; None if one has no text, or a cell that is not valid."""
    by_name = dict(zip(rows.names, rows.batch.columns, strict=True))
    texts = by_name.get(fields.wanted)
    if texts is None or not _is_string(texts.type) or texts.null_count:
        return None
    try:
        rows.batch.validate(full=True)
        found = [
            texts,
            _strings(by_name.get(fields.url), len(texts)),
            _strings(by_name.get(fields.language), len(texts)),
        ]
        found[2] = pc.if_else(pc.equal(found[2], ""), fields.default_language, found[2])
        found.append(_metadata(by_name, fields, len(texts)))
        return [column.cast(pa.string()) for column in found]
    except Exception:  # invalid UTF-8, dates outside Python's range: row by row
        return None


def _strings(column: pa.Array | None, count: int) -> pa.Array:
    """The column with "" for null; "" everywhere if it does not hold strings."""
    if column is None or not _is_string(column.type):
        return pa.repeat(pa.scalar("", pa.string()), count)
    return pc.fill_null(column.cast(pa.string()), "")


def _is_string(kind: pa.DataType) -> bool:
    return pa.types.is_string(kind) or pa.types.is_large_string(kind) or pa.types.is_string_view(kind)


def _metadata(by_name: dict[str, pa.Array], fields: FieldMap, count: int) -> pa.Array:
    names = fields.metadata_columns(by_name)
    if not names:
        return pa.repeat(pa.scalar("{}", pa.string()), count)
    rows = zip(*(by_name[name].to_pylist() for name in names), strict=True)
    given = ({name: value for name, value in zip(names, row, strict=True) if value is not None} for row in rows)
    return pa.array([metadata_json(each) for each in given], pa.string())

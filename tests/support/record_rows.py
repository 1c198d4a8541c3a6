"""Records one by one and as columns, in one form that tests compare."""

from collections.abc import Sequence

from gristmill.data_pipeline.readers.document import Record, metadata_json
from gristmill.data_pipeline.readers.read import FileRange, read_columns, read_range
from gristmill.data_pipeline.readers.source import SourceConfig


def rows_one_by_one(ranges: Sequence[FileRange], source: SourceConfig) -> list[tuple]:
    rows: list[tuple] = []
    for one in ranges:
        for record in read_range(one, source):
            if isinstance(record, Record):
                metadata = metadata_json(record.metadata)
                rows.append((one.file.name, record.number, record.text, record.url, record.language, metadata))
                rows.append(record.repairs)
            else:
                rows += [(one.file.name, record.number, "", None, None, None), record]
    return rows


def rows_of_columns(ranges: Sequence[FileRange], source: SourceConfig) -> list[tuple]:
    rows: list[tuple] = []
    for batch in read_columns(ranges, source):
        names = [file.name for _, file, count in batch.files for _ in range(count)]
        others = [column.to_pylist() for column in (batch.urls, batch.languages, batch.metadata)]
        for column in (batch.urls, batch.languages, batch.metadata):
            column.validate(full=True)
        for k, values in enumerate(zip(names, batch.numbers.tolist(), batch.texts.texts(), *others, strict=True)):
            rows += [values, batch.unreadable.get(k, batch.repairs.get(k, ()))]
    return rows

"""One way to read them all: raw files cut into parts, each part read as records."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import BinaryIO

from gristmill.data_pipeline.document import Record, Unreadable, excerpt
from gristmill.data_pipeline.extract import NotExtracted, extract
from gristmill.data_pipeline.provenance.lock import RawFile
from gristmill.data_pipeline.readers.arc import read_arc
from gristmill.data_pipeline.readers.compression import SUFFIXES, Damaged, blocks
from gristmill.data_pipeline.readers.files import open_raw
from gristmill.data_pipeline.readers.hub import read_dataset
from gristmill.data_pipeline.readers.jsonl import line_starts, read_jsonl
from gristmill.data_pipeline.readers.parquet import read_parquet, row_groups
from gristmill.data_pipeline.readers.plain import read_plain
from gristmill.data_pipeline.readers.python_docs import read_python_docs
from gristmill.data_pipeline.readers.source import SourceConfig
from gristmill.data_pipeline.readers.warc import read_warc


@dataclass(frozen=True)
class FilePart:
    """Some records of a raw file: those that begin in bytes start to end (JSON lines), in row groups start to end
    (Parquet), or all of them (end None). first_record is the number of the first."""

    file: RawFile
    location: str
    first_record: int = 0
    start: int = 0
    end: int | None = None


def file_parts(file: RawFile, location: str, source: SourceConfig, part_bytes: int) -> list[FilePart]:
    """The file whole, or in record ranges of about part_bytes where its format can be entered in the middle."""
    if file.bytes <= part_bytes:
        return [FilePart(file, location)]
    ranges: list[tuple[int, int, int]] = []
    if source.format == "jsonl" and location.rpartition(".")[2] not in SUFFIXES:
        with open_raw(location) as opened:
            ranges = line_starts(opened, file.bytes, part_bytes)
    elif source.format == "parquet":
        with open_raw(location) as opened:
            ranges = row_groups(opened, part_bytes)
    if not ranges:
        return [FilePart(file, location)]
    return [FilePart(file, location, first, start, end) for first, start, end in ranges]


def read_part(part: FilePart, source: SourceConfig) -> Iterator[Record | Unreadable]:
    """The part's records in their order, each readable or not. Nothing a file holds raises."""
    if source.html_field is None and source.format not in ("html", "warc", "arc"):
        return _records(part, source)
    return _extracted_records(part, source)


def _extracted_records(part: FilePart, source: SourceConfig) -> Iterator[Record | Unreadable]:
    for record in _records(part, source):
        yield record if isinstance(record, Unreadable) or record.html is None else _extracted(record, source)


def _extracted(record: Record, source: SourceConfig) -> Record | Unreadable:
    assert record.html is not None
    try:
        text = extract(record.html, record.charset, source.extractor)
    except NotExtracted as failure:
        return Unreadable(record.number, failure.kind, str(failure), -1, record.url or excerpt(record.html))
    return record._replace(text=text, html=None, language=record.language or source.language or "")


def _records(part: FilePart, source: SourceConfig) -> Iterator[Record | Unreadable]:
    if source.format == "datasets":
        return read_dataset(source)
    if source.format == "jsonl":
        opened = open_raw(part.location)
        return read_jsonl(opened, part.location, source, part.first_record, part.start, part.end)
    return _opened_records(part, source)


def _opened_records(part: FilePart, source: SourceConfig) -> Iterator[Record | Unreadable]:
    with open_raw(part.location) as opened:
        if source.format == "parquet":
            yield from read_parquet(opened, source, part.first_record, part.start, part.end)
        elif source.format in ("text", "markdown"):
            yield from read_plain(opened, part.location, source)
        elif source.format == "python_docs":
            yield from read_python_docs(opened.read(), part.file.name, source)
        elif source.format == "html":
            yield from _page(opened, part.location)
        elif source.format == "arc":
            yield from read_arc(opened, part.location)
        else:
            yield from read_warc(opened, part.location, source)


def _page(opened: BinaryIO, name: str) -> Iterator[Record | Unreadable]:
    """An HTML file as one page."""
    try:
        yield Record(0, "", html=b"".join(blocks(opened, name)))
    except Damaged as damage:
        yield Unreadable(0, damage.kind, str(damage))

"""One way to read them all: raw files cut into parts, each part read as records and held to the lock."""

import io
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, BinaryIO

from gristmill.data_pipeline.readers.arc import read_arc
from gristmill.data_pipeline.readers.compression import SUFFIXES, Damaged, blocks
from gristmill.data_pipeline.readers.document import Record, Unreadable, excerpt, too_large
from gristmill.data_pipeline.readers.files import open_raw
from gristmill.data_pipeline.readers.html_extraction import NotExtracted, extract_page
from gristmill.data_pipeline.readers.hub import read_dataset
from gristmill.data_pipeline.readers.jsonl import line_starts, read_jsonl
from gristmill.data_pipeline.readers.parquet import read_parquet, row_groups
from gristmill.data_pipeline.readers.plain import read_plain
from gristmill.data_pipeline.readers.python_docs import read_python_docs
from gristmill.data_pipeline.readers.source import SourceConfig
from gristmill.data_pipeline.readers.verified_files import BlockDigests, HashedFile, VerifiedFile, digest_blocks
from gristmill.data_pipeline.readers.warc import read_warc
from gristmill.foundation.lock import RawFile


@dataclass(frozen=True)
class FileRange:
    """Some records of a raw file: those that begin in bytes start to end (JSON lines), in row groups start to end
    (Parquet), or all of them (end None). first_record is the number of the first. blocks: what a file that is entered
    in the middle is held to; without them it is read from begin to end and digested."""

    file: RawFile
    location: str
    first_record: int = 0
    start: int = 0
    end: int | None = None
    blocks: BlockDigests | None = field(default=None, compare=False, repr=False)


def file_ranges(file: RawFile, location: str, source: SourceConfig, part_bytes: int) -> list[FileRange]:
    """The file whole, or in record ranges of about part_bytes where its format can be entered in the middle.

    Such a file is read once, against the lock: raises InputError if it is not the file that the lock pins."""
    is_plain = location.rpartition(".")[2] not in SUFFIXES
    if file.bytes <= part_bytes or not (source.format == "parquet" or (source.format == "jsonl" and is_plain)):
        return [FileRange(file, location)]
    with open_raw(location) as raw:
        digests = digest_blocks(raw, file, location)
        opened: Any = VerifiedFile(raw, digests, location)
        find = row_groups if source.format == "parquet" else line_starts
        ranges = find(opened, part_bytes)
        opened.finish()
    if not ranges:
        return [FileRange(file, location, blocks=digests if source.format == "parquet" else None)]
    return [FileRange(file, location, first, start, end, digests) for first, start, end in ranges]


def read_range(part: FileRange, source: SourceConfig) -> Iterator[Record | Unreadable]:
    """The part's records in their order, each readable or not. Nothing that a file holds raises.

    Raises InputError, behind the last record at the latest, if the file is not the one that the lock pins; what was
    read until then must not be used."""
    if source.html_field is None and source.format not in ("html", "warc", "arc"):
        return _records(part, source)
    return _extracted_records(part, source)


def _extracted_records(part: FileRange, source: SourceConfig) -> Iterator[Record | Unreadable]:
    for record in _records(part, source):
        yield record if isinstance(record, Unreadable) or record.html is None else _extracted(record, source)


def _extracted(record: Record, source: SourceConfig) -> Record | Unreadable:
    assert record.html is not None
    try:
        text, repairs = extract_page(record.html, record.charset, source.extractor)
    except NotExtracted as failure:
        return Unreadable(record.number, failure.kind, str(failure), -1, record.url or excerpt(record.html))
    language = record.language or source.language or ""
    return record._replace(text=text, html=None, language=language, repairs=(*record.repairs, *repairs))


def _records(part: FileRange, source: SourceConfig) -> Iterator[Record | Unreadable]:
    if source.format == "datasets":
        yield from read_dataset(source, part.file)
        return
    with open_raw(part.location) as raw:
        file: Any
        if part.blocks is not None:
            file = VerifiedFile(raw, part.blocks, part.location)
        else:
            file = HashedFile(raw, part.file, part.location)
        yield from _opened_records(file, part, source)
        file.finish()


def _opened_records(file: Any, part: FileRange, source: SourceConfig) -> Iterator[Record | Unreadable]:
    name, limit = part.location, source.max_record_bytes
    if source.format == "jsonl":
        return read_jsonl(file, name, source, part.first_record, part.start, part.end)
    if source.format == "parquet":
        # read whole: it is at most a part's size, and it must be known to be the lock's before its footer is read
        table = file if part.blocks is not None else io.BytesIO(file.read())
        return read_parquet(table, source, part.first_record, part.start, part.end)
    if source.format in ("text", "markdown"):
        return read_plain(file, name, source)
    if source.format == "python_docs":
        if part.file.bytes > limit:
            return iter([too_large(0, part.file.bytes, limit)])
        return read_python_docs(file.read(), part.file.name, source)
    if source.format == "html":
        return _page(file, name, limit)
    if source.format == "arc":
        return read_arc(file, name, limit)
    return read_warc(file, name, source)


def _page(file: BinaryIO, name: str, limit: int) -> Iterator[Record | Unreadable]:
    """An HTML file as one page."""
    held: list[bytes] = []
    num_bytes = 0
    try:
        for block in blocks(file, name):
            num_bytes += len(block)
            if num_bytes <= limit:
                held.append(block)
            else:
                held.clear()
    except Damaged as damage:
        yield Unreadable(0, damage.kind, str(damage))
        return
    yield Record(0, "", html=b"".join(held)) if num_bytes <= limit else too_large(0, num_bytes, limit)

"""Reading of raw files of any format: finds the files of a source, splits them into ranges and reads each as records,
verified against the lock."""

import io
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from operator import itemgetter
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from gristmill.data_pipeline.extraction.blocks_config import HostBlocks, RepeatedBlocks
from gristmill.data_pipeline.readers.compression import FRAME_HEADER_BYTES, SUFFIXES, Damaged, blocks, content_bytes
from gristmill.data_pipeline.readers.document import (
    Record,
    RecordBuilder,
    RecordColumns,
    Unreadable,
    excerpt,
    split_url,
    too_large,
)
from gristmill.data_pipeline.readers.files import (
    BlockDigests,
    HashedFile,
    RealPaths,
    VerifiedFile,
    digest_blocks,
    matching,
    open_raw,
    raw_size,
    shown_path,
)
from gristmill.data_pipeline.readers.jsonl import line_starts, read_json_columns, read_jsonl
from gristmill.data_pipeline.readers.parquet import read_parquet, read_parquet_columns, row_groups
from gristmill.data_pipeline.readers.python_docs import python_files, read_python_docs
from gristmill.data_pipeline.readers.python_records import read_dataset, read_own
from gristmill.data_pipeline.readers.source import SourceConfig
from gristmill.data_pipeline.readers.text_files import read_delimited, read_mailbox, read_plain
from gristmill.data_pipeline.readers.warc import read_arc, read_warc
from gristmill.foundation.checksums import read_kept, write_kept
from gristmill.foundation.errors import InputError
from gristmill.foundation.files import is_address
from gristmill.foundation.fingerprint import fingerprint
from gristmill.foundation.lock import LockedSource, RawFile, SortedRecords
from gristmill.foundation.runtime.tasks.engine import Engine
from gristmill.foundation.startup import DeferredModule

html_extraction = DeferredModule("gristmill.data_pipeline.extraction.html_extraction")  # for HTML alone
# For documents alone: they import lxml, and compile the layout of pages.
latex = DeferredModule("gristmill.data_pipeline.readers.latex")
markup = DeferredModule("gristmill.data_pipeline.readers.markup")
pdf = DeferredModule("gristmill.data_pipeline.readers.pdf")
whole_files = DeferredModule("gristmill.data_pipeline.readers.whole_files")


def locate(source: SourceConfig) -> SortedRecords:
    """(name, location) of every raw file, without reading any. Names hold no folders of this machine.

    If two globs find the same name in two places, the second is named by its complete location. A file that is found
    by two paths, or through a link, is counted once."""
    if source.format == "python_docs":
        return SortedRecords(python_files(source).items())
    if source.format == "datasets":
        return SortedRecords([(source.paths[0], source.paths[0])])
    return SortedRecords(_named_once(SortedRecords(_matched_once(source.paths))))


def _matched_once(patterns: Sequence[str]) -> Iterator[tuple[str, int, str]]:
    """(name, number of the pattern, location) of each file by the first of its paths."""
    real_path = RealPaths()
    matches = (
        (location if is_address(location) else real_path(location), number, location, name)
        for number, pattern in enumerate(patterns)
        for name, location in matching(pattern)
    )
    for _, same in groupby(SortedRecords(matches), key=itemgetter(0)):
        _, number, location, name = next(same)
        yield name, number, location


def _named_once(matches: Iterable[tuple[str, int, str]]) -> Iterator[tuple[str, str]]:
    for name, same in groupby(matches, key=itemgetter(0)):
        for place, (_, _, location) in enumerate(same):
            yield name if place == 0 else shown_path(location), location


def located_files(source: SourceConfig, locked: LockedSource) -> list[tuple[RawFile, str]]:
    """The locked files with their locations, in the lock's order. Raises InputError for a missing file."""
    located: dict[str, str] = dict(locate(source))
    for file in locked.files:
        if file.name not in located:
            raise InputError(
                f"source {source.name}: {file.name} is in the lock but missing; restore it, or run again with "
                "--update-lock"
            )
    return [(file, located[file.name]) for file in locked.files]


KEPT_RANGES = ".ranges.json"  # in the cache of a work folder
MAX_KEPT_BLOCKS = 1_000_000  # digests in that file: a terabyte of raw files
CONVERTERS = ("pdf", "epub", "docx", "ipynb", "latex")  # formats of files that are one document


@dataclass(frozen=True)
class FileRange:
    """Some records of a raw file: those that begin in bytes start to end of its content (JSON lines), in row groups
    start to end (Parquet), or all from the start on (end None). first_record: number of the first, but for compressed
    files, whose reader counts them. share: of the file's work. blocks: digests that verify a file read by ranges;
    without them the file is read from start to end and its digest is compared."""

    file: RawFile
    location: str
    first_record: int = 0
    start: int = 0
    end: int | None = None
    share: float = field(default=1.0, compare=False)
    blocks: BlockDigests | None = field(default=None, compare=False, repr=False)


def file_ranges(
    file: RawFile, location: str, source: SourceConfig, range_bytes: int, max_compressed: int = 1
) -> list[FileRange]:
    """Split the file into record ranges of about range_bytes if its format allows it, else one range; compressed JSON
    lines into at most max_compressed, since each of them decompresses the file from its beginning.

    A file that is split is read once to verify it: raises InputError if it is not the file in the lock."""
    if file.bytes <= range_bytes or source.format not in ("parquet", "jsonl"):
        return [FileRange(file, location)]
    if source.format == "jsonl" and location.rpartition(".")[2] in SUFFIXES:
        return _compressed_ranges(file, location, max_compressed)
    with open_raw(location) as raw:
        digests = digest_blocks(raw, file, location)
        opened: Any = VerifiedFile(raw, digests, location)
        find = row_groups if source.format == "parquet" else line_starts
        ranges = find(opened, range_bytes)
        opened.finish()
    if not ranges:
        return [FileRange(file, location, blocks=digests if source.format == "parquet" else None)]
    return [FileRange(file, location, first, start, end, 1 / len(ranges), digests) for first, start, end in ranges]


def _compressed_ranges(file: RawFile, location: str, count: int) -> list[FileRange]:
    if count == 1:
        return [FileRange(file, location)]
    with open_raw(location) as raw:
        step = max(content_bytes(raw.read(FRAME_HEADER_BYTES), location, file.bytes) // count, 1)
        raw.seek(0)
        digests = digest_blocks(raw, file, location)
    starts = range(0, count * step, step)
    ends = [*starts[1:], None]
    return [
        FileRange(file, location, 0, start, end, 1 / count, digests) for start, end in zip(starts, ends, strict=True)
    ]


@dataclass(frozen=True)
class FileToSplit:
    """Arguments of file_ranges."""

    file: RawFile
    location: str
    source: SourceConfig
    range_bytes: int
    max_compressed: int

    @property
    def key(self) -> str:
        """Key of the ranges: what decides them besides the code."""
        suffix = self.location.rpartition(".")[2]
        return fingerprint([self.file.sha256, self.source.format, suffix, self.range_bytes, self.max_compressed])

    def from_json(self, entry: Any) -> list[FileRange]:
        """Ranges that to_json described."""
        starts = [(first, start, end) for first, start, end in entry["ranges"]]
        digests = entry["digests"]
        blocks = None if digests is None else BlockDigests(self.file.bytes, np.array(digests, np.uint64))
        return [FileRange(self.file, self.location, *at, 1 / len(starts), blocks) for at in starts]


def split_files(files: Sequence[FileToSplit], cache: Path, engine: Engine) -> list[list[FileRange]]:
    """The ranges of each file. They are kept in the cache: a file that stays as it is is not read again for them."""
    entries = read_kept(cache / KEPT_RANGES)
    keys = [file.key for file in files]
    todo = [file for file, key in zip(files, keys, strict=True) if key not in entries]
    sizes = [float(file.file.bytes) for file in todo]
    made = iter(engine.map(_split, todo, "ranges of large files", sizes, "B"))
    ranges = [
        file.from_json(entries[key]) if key in entries else next(made) for file, key in zip(files, keys, strict=True)
    ]
    kept = {key: _to_json(of_file) for key, of_file in zip(keys, ranges, strict=True)}
    if kept != entries and sum(len(entry["digests"] or ()) for entry in kept.values()) <= MAX_KEPT_BLOCKS:
        write_kept(cache / KEPT_RANGES, kept)
    return ranges


def _split(file: FileToSplit) -> list[FileRange]:
    return file_ranges(file.file, file.location, file.source, file.range_bytes, file.max_compressed)


def _to_json(ranges: Sequence[FileRange]) -> dict[str, Any]:
    blocks = ranges[0].blocks
    return {
        "ranges": [[of_range.first_record, of_range.start, of_range.end] for of_range in ranges],
        "digests": None if blocks is None else blocks.digests.tolist(),
    }


def read_range(
    file_range: FileRange, source: SourceConfig, repeated: RepeatedBlocks | None = None
) -> Iterator[Record | Unreadable]:
    """Read the range's records in order, readable or not. No content of a file raises. repeated: boilerplate of hosts,
    which is left out of the pages' text.

    Raises InputError, at the latest after the last record, if the file is not the one in the lock; the records read
    until then must not be used."""
    return _extracted_records(file_range, source, repeated) if source.has_html else read_pages(file_range, source)


def records_of(location: str, source: SourceConfig) -> Iterator[Record | Unreadable]:
    """As `read_range`, of a file that no lock pins: for a look at its first records."""
    unpinned = FileRange(RawFile(name=location, bytes=raw_size(location), sha256=""), location)
    with open_raw(location) as raw:
        for record in _opened_records(raw, unpinned, source):
            if isinstance(record, Unreadable) or record.html is None:
                yield record
            else:
                yield _extracted(record, source, None)


def read_columns(
    ranges: Iterable[FileRange], source: SourceConfig, repeated: RepeatedBlocks | None = None
) -> Iterator[RecordColumns]:
    """The records of the ranges in order, as columns: what read_range gives one by one, and the same errors."""
    return read_sources([(source, ranges)], repeated)


def read_sources(
    sources: Iterable[tuple[SourceConfig, Iterable[FileRange]]], repeated: RepeatedBlocks | None = None
) -> Iterator[RecordColumns]:
    """As `read_columns`, source after source: records of several sources may be in one value."""
    builder = RecordBuilder()
    for source, ranges in sources:
        for file_range in ranges:
            builder.start_file(source.name, file_range.file)
            yield from _read_into(builder, file_range, source, repeated)
    if builder.rows:
        yield builder.take()


def _read_into(
    builder: RecordBuilder, file_range: FileRange, source: SourceConfig, repeated: RepeatedBlocks | None
) -> Iterator[RecordColumns]:
    """Adds the records of the range to the builder; yields them whenever it is full."""
    if not source.has_html and source.format in ("jsonl", "parquet"):
        yield from _columns(file_range, source, builder)
        return
    for record in read_range(file_range, source, repeated):
        builder.add(record)
        del record  # so that the objects of two records are never in memory at once
        if builder.is_full:
            yield builder.take()


def _columns(file_range: FileRange, source: SourceConfig, builder: RecordBuilder) -> Iterator[RecordColumns]:
    """Adds the records of JSON lines or Parquet to the builder; yields them whenever it is full."""
    bounds = (file_range.first_record, file_range.start, file_range.end)
    with open_raw(file_range.location) as raw:
        file = _verified(raw, file_range)
        if source.format == "jsonl":
            yield from read_json_columns(file, file_range.location, source, bounds, builder)
        else:
            yield from read_parquet_columns(_whole(file, file_range), source, bounds, builder)
        file.finish()


def _verified(raw: BinaryIO, file_range: FileRange) -> Any:
    if file_range.blocks is not None:
        return VerifiedFile(raw, file_range.blocks, file_range.location)
    return HashedFile(raw, file_range.file, file_range.location)


def _whole(file: Any, file_range: FileRange) -> Any:
    """A Parquet file that is not read by ranges, read completely: it is at most one range, and must be verified before
    its footer is parsed."""
    return file if file_range.blocks is not None else io.BytesIO(file.read())


def _extracted_records(
    file_range: FileRange, source: SourceConfig, repeated: RepeatedBlocks | None
) -> Iterator[Record | Unreadable]:
    for record in read_pages(file_range, source):
        if isinstance(record, Unreadable) or record.html is None:
            yield record
        else:
            yield _extracted(record, source, repeated)


def _extracted(record: Record, source: SourceConfig, repeated: RepeatedBlocks | None) -> Record | Unreadable:
    assert record.html is not None
    host = "" if repeated is None else split_url(record.url)[0]
    of_host = HostBlocks(repeated, host) if repeated is not None and host else None
    try:
        page = html_extraction.extract_page(record.html, record.charset, source.extractor, source.blocks, of_host)
    except html_extraction.NotExtracted as failure:
        return Unreadable(record.number, failure.kind, str(failure), -1, record.url or excerpt(record.html))
    language = record.language or source.language or ""
    metadata = {**record.metadata, **page.metadata} if page.metadata else record.metadata
    repairs = (*record.repairs, *page.repairs)
    return record._replace(text=page.text, html=None, language=language, metadata=metadata, repairs=repairs)


def read_pages(file_range: FileRange, source: SourceConfig) -> Iterator[Record | Unreadable]:
    """As `read_range`, but pages keep their HTML and no text is extracted."""
    if source.format == "datasets":
        yield from read_dataset(source, file_range.file)
        return
    with open_raw(file_range.location) as raw:
        file = _verified(raw, file_range)
        yield from _opened_records(file, file_range, source)
        file.finish()


def _opened_records(file: Any, file_range: FileRange, source: SourceConfig) -> Iterator[Record | Unreadable]:
    name, limit = file_range.location, source.max_record_bytes
    if source.format == "jsonl":
        return read_jsonl(file, name, source, file_range.first_record, file_range.start, file_range.end)
    if source.format == "parquet":
        return read_parquet(_whole(file, file_range), source, file_range.first_record, file_range.start, file_range.end)
    if source.format in ("text", "markdown"):
        return read_plain(file, name, source)
    if source.format == "python_docs":
        if file_range.file.bytes > limit:
            return iter([too_large(0, file_range.file.bytes, limit)])
        return read_python_docs(file.read(), file_range.file.name, source)
    if source.format == "html":
        return _page(file, name, limit)
    if source.format == "arc":
        return read_arc(file, name, limit)
    if source.format == "csv":
        return read_delimited(file, name, source)
    if source.format == "own":
        return read_own(file, name, source)
    if source.format == "mbox":
        return read_mailbox(file, name, source)
    if source.format in CONVERTERS:
        return whole_files.read_whole(file, name, source, _converter(source.format))
    if source.format == "mediawiki":
        return markup.read_mediawiki(file, name, source)
    if source.format == "stack_exchange":
        return markup.read_stack_exchange(file, name, source)
    return read_warc(file, name, source)


def _converter(format_: str) -> Any:
    return {
        "pdf": lambda: pdf.convert_pdf,
        "epub": lambda: whole_files.convert_epub,
        "docx": lambda: whole_files.convert_docx,
        "ipynb": lambda: markup.convert_notebook,
        "latex": lambda: latex.convert_latex,
    }[format_]()


def _page(file: BinaryIO, name: str, limit: int) -> Iterator[Record | Unreadable]:
    """Read an HTML file as one page."""
    pieces: list[bytes] = []
    num_bytes = 0
    try:
        for block in blocks(file, name):
            num_bytes += len(block)
            if num_bytes <= limit:
                pieces.append(block)
            else:
                pieces.clear()
    except Damaged as damage:
        yield Unreadable(0, damage.kind, str(damage))
        return
    yield Record(0, "", html=b"".join(pieces)) if num_bytes <= limit else too_large(0, num_bytes, limit)

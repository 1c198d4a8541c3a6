"""Small sources with the same settings as one: their documents stand in one annotated file, source after source.

A file and a task cost 2 to 5 ms each whatever they hold, and curation has a dozen steps. So no step of it has a file or
a task for each of many small sources. What it writes for people (shards, ledger, counts) is by source, and has the same
bytes as without batches: one task writes the shards and the ledgers of a batch from rows that are read once, as the
tasks of shards and ledgers do (`shards.py`, `ledger.py`)."""

import hashlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property, lru_cache, partial
from pathlib import Path

import numpy as np
import orjson
import pyarrow as pa
import pyarrow.parquet as pq
import xxhash

from gristmill.data_pipeline.annotate.annotate import AnnotateConfig, text_bytes
from gristmill.data_pipeline.corpus.shards import (
    MIN_SHARD_BYTES,
    ROW_GROUP_BYTES,
    ROW_GROUP_ROWS,
    ShardFormat,
    document_columns,
    mapped_table,
    with_document_columns,
    write_row_group,
    write_rows,
)
from gristmill.data_pipeline.corpus.splits import SPLITS
from gristmill.data_pipeline.filters.apply import KEPT, SOURCE, SourceRows, source_runs
from gristmill.data_pipeline.filters.pii import PiiConfig
from gristmill.data_pipeline.ledger import ledger
from gristmill.data_pipeline.ledger.document_file import is_tiny
from gristmill.data_pipeline.ledger.ledger import (
    MAX_LEDGER_ROWS,
    MIN_LEDGER_ROWS,
    LedgerRows,
    ledger_tables,
    runs_of_size,
)
from gristmill.data_pipeline.ledger.removal_step import EvidenceFiles, Removals, SourceState
from gristmill.data_pipeline.readers.source import SourceConfig
from gristmill.foundation.checksums import checksummed_path, link_file, matches_checksum, write_with_checksum
from gristmill.foundation.files import write_unsynced
from gristmill.foundation.fingerprint import fingerprint
from gristmill.foundation.lock import LockedSource
from gristmill.foundation.runtime.tasks.task_files import fetch

# Text of a source that is batched: above, its own steps take longer than its files and tasks.
MAX_SMALL_BYTES = 1_000_000
MIN_BATCHED_SOURCES = 16  # with the same settings; fewer are no batch
MAX_BATCH_SOURCES, MAX_BATCH_BYTES = 256, 8_000_000
BATCH_PREFIX = "+"  # of a batch's name, which no source's name can have


@dataclass(frozen=True)
class SourceGroup:
    """One source, or a batch of small ones in the order of the recipe."""

    sources: tuple[SourceConfig, ...]
    locked: tuple[LockedSource, ...]
    config: AnnotateConfig

    @property
    def is_batch(self) -> bool:
        return len(self.sources) > 1

    @cached_property
    def source(self) -> SourceConfig:
        """The source; of a batch the first one, whose settings are those of all, with a name for the batch."""
        if not self.is_batch:
            return self.sources[0]
        name = BATCH_PREFIX + fingerprint([source.name for source in self.sources])[:16]
        return self.sources[0].model_copy(update={"name": name})  # a name that the recipe may not give

    @property
    def members(self) -> list[tuple[SourceConfig, LockedSource]]:
        return list(zip(self.sources, self.locked, strict=True))

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(source.name for source in self.sources)


def source_in_name(path: Path) -> str:
    """Name of the source or batch that an annotated file is of."""
    return path.stem.rpartition("-")[0]


def is_batch_file(path: Path) -> bool:
    return path.name.startswith(BATCH_PREFIX)


def rows_by_source(path: Path) -> list[tuple[str, int, int]]:
    """(source, first row, last + 1) of each source that an annotated file has documents of."""
    with pq.ParquetFile(fetch(path)) as file:
        if not is_batch_file(path):
            return [(source_in_name(path), 0, file.metadata.num_rows)]
        return source_runs(file.read([SOURCE], use_threads=False).column(0))


def group_sources(
    sources: Sequence[SourceConfig],
    locked: Sequence[LockedSource],
    configs: Sequence[AnnotateConfig],
    settings: Sequence[str],
    may_batch: bool,
) -> list[SourceGroup]:
    """Every source in a group, groups in the order of their first sources. settings: of each source, text that is
    equal where a step may treat two sources alike."""
    small: dict[str, list[int]] = {}
    for number, (source, files) in enumerate(zip(sources, locked, strict=True)):
        if may_batch and _is_small(source, files):
            small.setdefault(settings[number], []).append(number)
    members = [
        [(_name_digest(sources[number].name), number, _text_bytes(locked[number])) for number in numbers]
        for numbers in small.values()
        if len(numbers) >= MIN_BATCHED_SOURCES
    ]
    batches = [batch for of_settings in members for batch in _batches(of_settings)]
    batched = {number for batch in batches for number in batch}
    alone = [[number] for number in range(len(sources)) if number not in batched]
    return [
        SourceGroup(tuple(sources[n] for n in group), tuple(locked[n] for n in group), configs[group[0]])
        for group in sorted([*alone, *batches])
    ]


def _is_small(source: SourceConfig, locked: LockedSource) -> bool:
    has_table = source.extracted_by_blocks and source.blocks.site_boilerplate is not None
    is_readable = bool(locked.files) and not has_table and source.format != "datasets"
    return is_readable and _text_bytes(locked) <= MAX_SMALL_BYTES


def _text_bytes(locked: LockedSource) -> int:
    return sum(text_bytes(file.name, file.bytes) for file in locked.files)


def _name_digest(name: str) -> int:
    return int.from_bytes(hashlib.blake2b(name.encode(), digest_size=8).digest(), "big")


def _batches(members: Sequence[tuple[int, int, int]], bit: int = 63) -> Iterator[list[int]]:
    """members: (digest of the name, number, bytes) of each source. Divides them by the bits of their digests until a
    batch is small enough, so a source that comes or goes changes its own batch alone."""
    is_small = len(members) <= MAX_BATCH_SOURCES and sum(num_bytes for *_, num_bytes in members) <= MAX_BATCH_BYTES
    if is_small or bit < 0:
        if members:
            yield sorted(number for _, number, _ in members)
        return
    for wanted in (0, 1):
        yield from _batches([member for member in members if member[0] >> bit & 1 == wanted], bit - 1)


# Files of a batch.

KEPT_NAME, LEDGER_NAME, DONE_NAME = "kept.arrow", "ledger.arrow", "done.json"
MAPPED_FILES = 256  # that a process keeps mapped: the tables of neighbours by name are of many batches


@dataclass(frozen=True)
class TableSlice:
    """Rows start..stop - 1 of a file in Arrow's format, which has the rows of all tables of a batch, or of an annotated
    file."""

    path: Path
    start: int
    stop: int

    @property
    def num_rows(self) -> int:
        return self.stop - self.start

    def of(self, table: pa.Table) -> pa.Table:
        """These rows of the file's table, or of some of its columns."""
        return table.slice(self.start, self.num_rows)

    @property
    def schema(self) -> pa.Schema:
        return self._table.schema

    def read(self, columns: Iterable[str]) -> pa.Table:
        return self._table.select(list(columns)).slice(self.start, self.num_rows)

    @property
    def _table(self) -> pa.Table:
        path = fetch(self.path)
        return (_mapped if path.suffix == ".arrow" else _read)(path, path.stat().st_mtime_ns)


@lru_cache(maxsize=MAPPED_FILES)
def _mapped(path: Path, _: int) -> pa.Table:
    return mapped_table(path)


@lru_cache(maxsize=1)
def _read(path: Path, _: int) -> pa.Table:
    """The table of an annotated file."""
    with pq.ParquetFile(path) as file:
        return file.read(use_threads=False)


@dataclass(frozen=True)
class RowSpan:
    """Rows start..stop - 1 of an annotated file."""

    path: Path
    start: int
    stop: int


@dataclass(frozen=True)
class BatchTable:
    """A shard of documents with its signals, or of the ledger. name: its path in the corpus without the suffix.
    digests: XXH3-128 of its files. rows: as they stand in the batch's file of such tables. annotated: of a shard of the
    ledger, its rows in the annotated file."""

    name: str
    digests: tuple[str, ...]
    rows: TableSlice
    annotated: RowSpan | None = None

    def files(self, folder: Path) -> list[Path]:
        names = [self.name]
        if self.annotated is None:
            names.append(signals_name(self.name))
        return [folder / f"{name}.parquet" for name in names]


def signals_name(name: str) -> str:
    """The path of the signals of a shard of documents."""
    return f"signals/{name.removeprefix('documents/')}"


@dataclass(frozen=True)
class BatchToWrite:
    """read: the batch as the filters left it. written: with the file whose KEPT rows are written. removals, evidence:
    of the batch's file. folder: of the corpus. work: takes intermediate files, from which a run that was stopped goes
    on."""

    read: SourceState
    written: SourceState
    annotation: AnnotateConfig
    removals: tuple[Removals, ...]
    evidence: EvidenceFiles
    shard_bytes: int
    pii: PiiConfig | None
    folder: Path
    work: Path

    @property
    def label(self) -> str:
        return f"sources {self.read.batch[0].name} to {self.read.batch[-1].name}, {len(self.read.batch)} together"

    @property
    def num_files(self) -> int:
        """About how many files it writes."""
        return 3 * len(self.read.batch)

    @property
    def format(self) -> ShardFormat:
        edits = tuple(edit.preset for edit in self.annotation.edits)
        return ShardFormat("", edits, self.pii, False, self.annotation.optional)


def write_batch(task: BatchToWrite) -> list[BatchTable]:
    """The files of all sources are there. They are not synced one by one: after a power cut the list, which is written
    last, names files with other bytes, and all are written again."""
    done = task.work / DONE_NAME
    if (tables := _done(task, done)) is None:
        writer = _Writer(task.folder)
        tables = [*_write_shards(task, writer), *_write_ledgers(task, writer)]
        write_with_checksum(done, orjson.dumps([task.folder.name, [_to_json(table) for table in tables]]))
    return tables


def write_batch_ledgers(task: BatchToWrite) -> None:
    """The ledgers alone, of a corpus that is not written."""
    list(_write_ledgers(task, _Writer(task.folder)))


def _done(task: BatchToWrite, done: Path) -> list[BatchTable] | None:
    """The tables, if all of them were written to this folder and are as they were."""
    if not matches_checksum(done):
        return None
    folder, entries = orjson.loads(done.read_bytes())
    tables = [_from_json(task, entry) for entry in entries]
    files = {table.rows.path for table in tables}
    if folder != task.folder.name or not all(map(matches_checksum, files)):
        return None
    for table in tables:
        for path, digest in zip(table.files(task.folder), table.digests, strict=True):
            if not path.is_file() or _digest(path.read_bytes()) != digest:
                return None
    return tables


def _to_json(table: BatchTable) -> list:
    annotated = None if table.annotated is None else [table.annotated.start, table.annotated.stop]
    return [table.name, table.digests, table.rows.path.name, table.rows.start, table.rows.stop, annotated]


def _from_json(task: BatchToWrite, entry: list) -> BatchTable:
    name, digests, file, start, stop, annotated = entry
    span = None if annotated is None else RowSpan(task.read.paths[0], *annotated)
    return BatchTable(name, tuple(digests), TableSlice(task.work / file, start, stop), span)


def _digest(content: bytes | memoryview) -> str:
    return xxhash.xxh3_128_hexdigest(content)


@dataclass
class _Writer:
    """Files of tables without rows are made once, and are links to the first one."""

    folder: Path
    _empty: dict[tuple[str, ...], list[tuple[Path, str]]] = field(default_factory=dict)

    def write(
        self, names: tuple[str, ...], num_rows: int, contents: Callable[[], Sequence[pa.Buffer]]
    ) -> tuple[str, ...]:
        """The digests of the files. contents: makes their contents."""
        paths = [self.folder / f"{name}.parquet" for name in names]
        kinds = tuple(name.partition("/")[0] for name in names)
        if not num_rows and kinds in self._empty:
            for path, (first, _) in zip(paths, self._empty[kinds], strict=True):
                link_file(first, path)
            return tuple(digest for _, digest in self._empty[kinds])
        views = [memoryview(content) for content in contents()]
        digests = tuple(_digest(view) for view in views)
        for path, view in zip(paths, views, strict=True):
            write_unsynced(path, view)
        if not num_rows:
            self._empty[kinds] = list(zip(paths, digests, strict=True))
        return digests


def _write_shards(task: BatchToWrite, writer: _Writer) -> Iterator[BatchTable]:
    schema = task.format.signals_schema
    results, [path] = task.written.filter_results[0].load(), task.written.paths
    with pq.ParquetFile(fetch(path)) as file:
        table = file.read([*task.format.annotated_columns, SOURCE], use_threads=False)
    kept = np.flatnonzero(results.failed_rule == KEPT)
    number_of = np.repeat(np.arange(len(results.sources)), [rows.stop - rows.start for rows in results.sources])
    places = number_of[kept] * len(SPLITS) + results.splits[kept]
    order = np.argsort(places, kind="stable")
    rows = table.take(pa.array(kept[order]))
    rows = with_document_columns(rows, rows.column(SOURCE), task.pii).combine_chunks()
    bounds = np.searchsorted(places[order], np.arange(len(results.sources) * len(SPLITS) + 1)).tolist()
    sizes, marks = results.bytes[kept[order]], results.marks[kept[order]]
    stored, of_shards = task.work / KEPT_NAME, _ShardRows.of(rows, schema)
    _write_arrow(stored, rows.select([*schema.names, "url", "text"]))
    numbers = {of_source.source: number for number, of_source in enumerate(results.sources)}
    for source in task.written.batch:
        for split, split_name in enumerate(SPLITS):
            first = last = 0
            if source.name in numbers:
                first, last = bounds[(place := numbers[source.name] * len(SPLITS) + split)], bounds[place + 1]
            runs = _runs(sizes[first:last], marks[first:last], MIN_SHARD_BYTES, task.shard_bytes)
            for number, (start, stop) in enumerate(runs):
                name = f"{split_name}/{source.name}-{number:05}"
                chosen = TableSlice(stored, first + start, first + stop)
                names = f"documents/{name}", f"signals/{name}"
                contents = partial(of_shards.contents, chosen)
                yield BatchTable(names[0], writer.write(names, chosen.num_rows, contents), chosen)


@dataclass(frozen=True)
class _ShardRows:
    """Rows of the shards of a batch, of which the others are columns."""

    rows: pa.Table
    documents: pa.Table
    signals: pa.Table
    sizes: np.ndarray

    @classmethod
    def of(cls, rows: pa.Table, schema: pa.Schema) -> "_ShardRows":
        return cls(rows, document_columns(rows), rows.select(schema.names), rows.column("num_bytes").to_numpy())

    def contents(self, chosen: TableSlice) -> tuple[pa.Buffer, pa.Buffer]:
        """Contents of the files of documents and signals."""
        num_bytes = int(self.sizes[chosen.start : chosen.stop].sum())
        if 0 < chosen.num_rows <= ROW_GROUP_ROWS and num_bytes <= ROW_GROUP_BYTES:
            return write_row_group(chosen.of(self.documents), chosen.of(self.signals), num_bytes)
        documents, signals = pa.BufferOutputStream(), pa.BufferOutputStream()
        write_rows([chosen.of(self.rows)] if chosen.num_rows else [], self.signals.schema, documents, signals)
        return documents.getvalue(), signals.getvalue()


def _runs(sizes: np.ndarray, marks: np.ndarray, min_size: int, max_size: int) -> list[tuple[int, int]]:
    """(start, stop) of each shard among these documents."""
    total = int(sizes.sum(dtype=np.int64))
    if total < min(min_size, max_size) // 2:  # in one, as always but for sources at the limit of what is small
        return [(0, len(sizes))]
    runs = runs_of_size(len(sizes), total, min_size, max_size)
    runs.add(sizes, marks)
    return runs.bounds()


def _write_ledgers(task: BatchToWrite, writer: _Writer) -> Iterator[BatchTable]:
    state, [path] = task.read, task.read.paths
    results = state.filter_results[0].load()
    all_rows = LedgerRows(path, 0, results.num_documents, results, task.removals, state.first_file, task.evidence)
    tables = list(ledger_tables(all_rows, state.rules, SPLITS, ""))
    rows = pa.concat_tables([ledger.LEDGER_SCHEMA.empty_table(), *tables]).combine_chunks()
    stored = task.work / LEDGER_NAME
    _write_arrow(stored, rows)
    rows_of = {of_source.source: of_source for of_source in results.sources}
    for source in state.batch:
        of_source = rows_of.get(source.name, SourceRows(source.name, 0, 0))
        marks = results.marks[of_source.start : of_source.stop]
        runs = _runs(np.ones(len(marks), np.int64), marks, MIN_LEDGER_ROWS, MAX_LEDGER_ROWS)
        for number, (start, stop) in enumerate(runs):
            name = f"ledger/{source.name}-{number:05}"
            chosen = TableSlice(stored, of_source.start + start, of_source.start + stop)
            digests = writer.write((name,), chosen.num_rows, partial(_ledger_contents, chosen, rows))
            yield BatchTable(name, digests, chosen, RowSpan(path, chosen.start, chosen.stop))


def _ledger_contents(chosen: TableSlice, rows: pa.Table) -> list[pa.Buffer]:
    content, table = pa.BufferOutputStream(), chosen.of(rows)
    if 0 < len(table) <= ledger.ROW_GROUP_ROWS:
        ledger.write_groups([table], content, is_tiny(table))
    else:
        ledger.write_rows([table] if len(table) else [], content)
    return [content.getvalue()]


def _write_arrow(path: Path, table: pa.Table) -> None:
    with checksummed_path(path) as temporary, pa.ipc.new_file(temporary, table.schema) as file:
        file.write_table(table)

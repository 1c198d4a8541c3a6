"""Shards of the curated corpus: documents and, row for row, their signals."""

import mmap
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from itertools import pairwise
from pathlib import Path
from typing import TypeAlias

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from gristmill.data_pipeline.annotate.annotate import AnnotateConfig
from gristmill.data_pipeline.annotate.optional_signals import OptionalSignals
from gristmill.data_pipeline.corpus.splits import SPLITS
from gristmill.data_pipeline.filters.apply import KEPT, Results
from gristmill.data_pipeline.filters.lines import EDIT_COUNTS
from gristmill.data_pipeline.filters.pii import PiiConfig, may_hold_pii, replace_pii
from gristmill.data_pipeline.ledger.document_file import (
    TINY_BYTES,
    TINY_ROWS,
    RowGroups,
    RowRange,
    row_groups,
    row_groups_of_range,
    spans_of_runs,
    tiny_or_not,
    utf8_of,
)
from gristmill.data_pipeline.ledger.ledger import runs_of_size
from gristmill.data_pipeline.ledger.removal_step import SourceState
from gristmill.data_pipeline.readers.document import DOCUMENT_SCHEMA
from gristmill.data_pipeline.signals.language import LANGUAGE_FIELDS
from gristmill.data_pipeline.signals.signal_names import SIGNAL_FIELDS, edit_fields
from gristmill.foundation.checksums import checksummed_path, link_file, matches_checksum
from gristmill.foundation.errors import InputError
from gristmill.foundation.runtime.tasks.engine import LazySequence
from gristmill.foundation.runtime.tasks.task_files import fetch

# A row group holds at most this many rows; one of documents also at most so many bytes of text (a longer text is alone
# in its group). The stage index reads a row group of up to 4 MB (corpus/splits.py) at once, a larger one in parts.
ROW_GROUP_ROWS, ROW_GROUP_BYTES = 16_384, 3_800_000
# Columns in which few values repeat; a dictionary of texts, ids or numbers would cost time and save nothing.
LONG_COLUMNS = ("text", "metadata")  # the lowest and the highest text of a row group are of no use
PAGE_BYTES = 4_000_000  # a page of text is compressed as a whole: pages of 1 MB take a fifth longer
REPEATING_COLUMNS = ("source", "language", "detected_language", "script", "profile", "main_language")
PII_FIELD = pa.field("pii_replaced", pa.int64())
QUALITY_FIELD = pa.field("quality_score", pa.float64())
NO_OPTIONAL_SIGNALS = OptionalSignals()
NOT_KEPT = -1  # in the place of a split
LATE_FIELDS = (PII_FIELD.name, QUALITY_FIELD.name)  # columns that annotated files have not


def signals_schema(edits: Sequence[str], optional: OptionalSignals, pii: bool, scored: bool) -> pa.Schema:
    """doc_id, the detected language, every signal of the text, what each edit of it added, the recipe's optional
    signals, quality, personal data."""
    added = [field for edit in edits for field in edit_fields(edit, EDIT_COUNTS[edit])] + optional.fields()
    added += [QUALITY_FIELD] if scored else []
    added += [PII_FIELD] if pii else []
    return pa.schema([pa.field("doc_id", pa.string()), *LANGUAGE_FIELDS, *SIGNAL_FIELDS, *added])


@dataclass(frozen=True)
class ShardFormat:
    """Settings that the shards of a source share. edits: the filters that edited the source, each of which added
    columns to its signals. is_scored: by the quality classifier."""

    source: str
    edits: tuple[str, ...]
    pii: PiiConfig | None
    is_scored: bool
    optional: OptionalSignals = NO_OPTIONAL_SIGNALS

    @property
    def signals_schema(self) -> pa.Schema:
        return signals_schema(self.edits, self.optional, self.pii is not None, self.is_scored)

    @property
    def annotated_columns(self) -> list[str]:
        """The columns of annotated files that a shard is made from."""
        columns = [name for name in DOCUMENT_SCHEMA.names if name != "source"]
        return columns + [name for name in self.signals_schema.names[1:] if name not in LATE_FIELDS]


@dataclass(frozen=True)
class ShardRows:
    """Rows of one file for a shard, number start to stop - 1: of the KEPT ones of an annotated file, in these results,
    or, without results, of all rows of a file of held-out ones."""

    path: Path
    start: int
    stop: int
    results: Results | None = None

    @property
    def num_rows(self) -> int:
        return self.stop - self.start

    def load(self) -> tuple[RowRange, np.ndarray]:
        """(the rows of an annotated file, int8[rows] the split of each)"""
        assert self.results is not None
        results = self.results.load()
        rows = np.flatnonzero(results.failed_rule == KEPT)[self.start : self.stop]
        return RowRange.of_rows(self.path, rows), results.splits[rows]


@dataclass(frozen=True)
class ShardTask:
    """One shard: documents/SPLIT/NAME and signals/SPLIT/NAME, of these rows in this order.

    scores: of each range's file, the quality scores of its rows; None: they are a column, or there are none.
    held_out: by split, the file that takes the rows of that split among those that a shard of the training split reads;
    shards of that split are written from such files. So the annotated files are read once."""

    folder: Path
    split: str
    name: str
    format: ShardFormat
    rows: tuple[ShardRows, ...]
    scores: tuple[Path, ...] | None = None
    held_out: Mapping[int, Path] = field(default_factory=dict)

    @property
    def documents(self) -> Path:
        return self.folder / "documents" / self.split / self.name

    @property
    def signals(self) -> Path:
        return self.folder / "signals" / self.split / self.name

    @property
    def columns(self) -> list[str]:
        """Columns of the files that it reads."""
        scores = [QUALITY_FIELD.name] if self.format.is_scored and self.scores is None else []
        return [*self.format.annotated_columns, *scores]

    @property
    def is_empty(self) -> bool:
        return not self.rows

    @property
    def is_complete(self) -> bool:
        return all(matches_checksum(path) for path in (self.documents, self.signals, *self.held_out.values()))


def write_shard_run(tasks: Sequence[ShardTask]) -> None:
    """Both files of every shard are there, and those of its held-out rows; a shard that is complete already is kept.

    The tasks are of one source and follow each other: a row group in which two of them meet is read once."""
    todo = [task for task in tasks if not task.is_complete]
    if todo:
        reader = RowGroups(todo[0].columns)
        for task in todo:
            _write_shard(task, reader)


def link_empty_shards(tasks: Sequence[ShardTask]) -> None:
    """Both files of every task, none of which has rows. Such files are the same for all sources of a format: the first
    is written, the others are links to it."""
    written: dict[ShardFormat, ShardTask] = {}
    for task in tasks:
        first = written.setdefault(replace(task.format, source=""), task)
        if first is task:
            write_shard_run([task])
        else:
            link_file(first.documents, task.documents)
            link_file(first.signals, task.signals)


def _write_shard(task: ShardTask, reader: RowGroups) -> None:
    with (
        checksummed_path(task.documents) as documents,
        checksummed_path(task.signals) as signals,
        ExitStack() as stack,
    ):
        with_columns = (_with_columns(table, task.format) for table in _tables(task, reader, stack))
        write_rows(with_columns, task.format.signals_schema, documents, signals)


Target: TypeAlias = Path | pa.NativeFile  # of a Parquet file


def write_rows(tables: Iterable[pa.Table], schema: pa.Schema, documents: Target, signals: Target) -> None:
    """Both files of a shard with these rows, whose columns are those of DOCUMENT_SCHEMA and of the signals' schema."""
    uncompressed, groups = tiny_or_not(row_groups(tables, ROW_GROUP_ROWS, ROW_GROUP_BYTES), "num_bytes")
    with (
        _writer(documents, DOCUMENT_SCHEMA, uncompressed) as documents_file,
        _writer(signals, schema, uncompressed) as signals_file,
    ):
        written = (_write_documents(table, documents_file) for table in groups)
        for table in row_groups((table.select(schema.names) for table in written), ROW_GROUP_ROWS):
            signals_file.write_table(table, row_group_size=ROW_GROUP_ROWS)


def write_row_group(documents: pa.Table, signals: pa.Table, num_bytes: int) -> tuple[pa.Buffer, pa.Buffer]:
    """Contents of both files of a shard with these rows, which fit into a row group. num_bytes: of their texts."""
    uncompressed = len(documents) <= TINY_ROWS and num_bytes <= TINY_BYTES
    contents = []
    for table in (documents, signals):
        content = pa.BufferOutputStream()
        with _writer(content, table.schema, uncompressed) as file:
            file.write_table(table, row_group_size=ROW_GROUP_ROWS)
        contents.append(content.getvalue())
    return contents[0], contents[1]


def replaced_texts(texts: pa.Array, config: PiiConfig) -> tuple[pa.Array, pa.Array]:
    """replace_pii of all texts: (strings, int64 numbers of replacements)."""
    holds_KN = may_hold_pii(*utf8_of(texts), config.replaced)
    places = np.flatnonzero(holds_KN.any(axis=0))
    counts, cleaned = np.zeros(len(texts), np.int64), []
    for place, text in zip(places.tolist(), texts.take(pa.array(places)).to_pylist(), strict=True):
        kinds = [kind for kind, holds in zip(config.replaced, holds_KN[:, place], strict=True) if holds]
        clean, counts[place] = replace_pii(text, config, kinds)
        if counts[place]:
            cleaned.append(clean)
    return pc.replace_with_mask(texts, pa.array(counts > 0), pa.array(cleaned, texts.type)), pa.array(counts)


def _writer(to: Target, schema: pa.Schema, uncompressed: bool) -> pq.ParquetWriter:
    return pq.ParquetWriter(
        to,
        schema,
        compression="none" if uncompressed else "zstd",
        use_dictionary=not uncompressed and [name for name in schema.names if name in REPEATING_COLUMNS],
        # a list of names takes longer than all of them
        write_statistics=LONG_COLUMNS[0] not in schema.names
        or [name for name in schema.names if name not in LONG_COLUMNS],
        data_page_size=PAGE_BYTES,
    )


def _tables(task: ShardTask, reader: RowGroups, stack: ExitStack) -> Iterator[pa.Table]:
    """The shard's rows of the annotated files, with their quality scores. Writes the held-out rows to their files,
    which are closed with the stack."""
    writers = {split: HeldOutFile(path, stack) for split, path in task.held_out.items()}
    for index, rows in enumerate(task.rows):
        if rows.results is None:
            yield held_out_rows(rows).select(task.columns)
            continue
        row_range, splits_of_rows = rows.load()
        scores = None if task.scores is None else np.load(task.scores[index])[row_range.start :]
        splits_N = np.full(len(row_range.mask), NOT_KEPT, np.int8)
        splits_N[row_range.mask] = splits_of_rows
        for table, first in row_groups_of_range(row_range, reader):
            splits = splits_N[first : first + len(table)]
            if scores is not None:
                table = table.append_column(QUALITY_FIELD, pa.array(scores[first : first + len(table)]))
            for split, writer in writers.items():
                if (splits == split).any():
                    writer.add(table.filter(pa.array(splits == split)))
            yield table.filter(pa.array(splits == 0)) if splits.any() else table
    for writer in writers.values():
        writer.flush()


def held_out_rows(rows: ShardRows) -> pa.Table:
    """These rows of a file that HeldOutFile wrote."""
    return mapped_table(fetch(rows.path)).slice(rows.start, rows.num_rows)


def mapped_table(path: Path) -> pa.Table:
    """The table of a file in Arrow's format, mapped from disk."""
    try:
        with path.open("rb", buffering=0) as file:
            content = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        return pa.ipc.open_file(pa.BufferReader(pa.py_buffer(content))).read_all()
    except (OSError, ValueError, pa.ArrowException) as error:  # ValueError: an empty file cannot be mapped
        raise InputError(f"{path}: no readable table ({error}); run the same command again") from error


class HeldOutFile:
    """File of held-out rows, in Arrow's format: it has 100 columns, and Parquet takes 2 ms to read any number of their
    rows. Rows wait until there are as many as for a row group."""

    def __init__(self, path: Path, stack: ExitStack):
        self._path, self._stack = path, stack
        self._writer: pa.ipc.RecordBatchFileWriter | None = None
        self._waiting: list[pa.Table] = []
        self._num_bytes = 0

    def add(self, table: pa.Table) -> None:
        self._waiting.append(table)
        self._num_bytes += table.nbytes
        if self._num_bytes >= ROW_GROUP_BYTES:
            self.flush()

    def flush(self) -> None:
        if not self._waiting:
            return
        table = pa.concat_tables(self._waiting).combine_chunks()
        if self._writer is None:
            temporary = self._stack.enter_context(checksummed_path(self._path))
            self._writer = self._stack.enter_context(pa.ipc.new_file(temporary, table.schema))
        self._writer.write_table(table)
        self._waiting, self._num_bytes = [], 0


def _write_documents(table: pa.Table, documents: pq.ParquetWriter) -> pa.Table:
    """Writes one row group; returns the table."""
    documents.write_table(document_columns(table), row_group_size=ROW_GROUP_ROWS)
    return table


def document_columns(table: pa.Table) -> pa.Table:
    return pa.table([table.column(name) for name in DOCUMENT_SCHEMA.names], schema=DOCUMENT_SCHEMA)


def _with_columns(table: pa.Table, shard: ShardFormat) -> pa.Table:
    return with_document_columns(table, pa.repeat(pa.scalar(shard.source), len(table)), shard.pii)


def with_document_columns(table: pa.Table, sources: pa.Array | pa.ChunkedArray, pii: PiiConfig | None) -> pa.Table:
    """Rows of annotated files as a shard has them: DOCUMENT_SCHEMA beside the signals, with the replaced personal data
    counted in a column. sources: of each row.

    The language that the reader gave goes before the one that was detected."""
    texts = table.column("text")
    if pii is not None:
        texts, counts = replaced_texts(texts.combine_chunks(), pii)
        table = table.append_column(PII_FIELD, counts)
    given = table.column("language")
    is_given = pc.fill_null(pc.not_equal(given, ""), False)
    columns = {
        "text": texts,
        "source": sources,
        "language": pc.if_else(is_given, given, table.column("detected_language")),
    }
    for name, column in columns.items():
        place = table.schema.get_field_index(name)
        table = table.append_column(name, column) if place < 0 else table.set_column(place, name, column)
    return table


# Which kept documents of a source stand in which shard, found file by file: nothing is held of a document.

MIN_SHARD_BYTES = 8_000_000


@dataclass(frozen=True)
class ShardPlan:
    """starts: of each training shard the first of the source's kept documents that its task reads, and the end.
    kept: by file, how many documents are kept. held_out: (shard, split) -> documents of that split among those.
    held_out_runs: by split but training, (start, stop) of each shard's documents among those of the split."""

    starts: list[int]
    kept: list[int]
    held_out: Counter[tuple[int, int]]
    held_out_runs: Mapping[int, list[tuple[int, int]]]

    @property
    def shards(self) -> range:
        return range(len(self.starts) - 1)


def plan_shards(task: tuple[Sequence[Results], int]) -> ShardPlan:
    """The plan of a source with these results of its files, for shards of so many bytes. A shard's task reads from its
    first training document up to that of the next shard; of a shard all are written but those of other splits."""
    of_files, shard_bytes = task
    runs = [runs_of_size(*total, MIN_SHARD_BYTES, shard_bytes) for total in _totals(of_files)]
    starts, kept_by_file, held_out = [0], [], Counter[tuple[int, int]]()
    kept = trained = 0
    for splits, sizes, marks in kept_documents(of_files):
        training = np.flatnonzero(splits == 0)
        for split, of_split in enumerate(runs):
            chosen = training if split == 0 else splits == split
            of_split.add(sizes[chosen], marks[chosen])
        inside = [start - trained for start in runs[0].starts[len(starts) :] if start < trained + len(training)]
        starts.extend((kept + training[inside]).tolist())
        others = np.flatnonzero(splits)
        shard_of = np.searchsorted(starts, kept + others, side="right") - 1
        held_out.update(zip(shard_of.tolist(), splits[others].tolist(), strict=True))
        kept_by_file.append(len(splits))
        kept, trained = kept + len(splits), trained + len(training)
    bounds = {split: of_split.bounds() for split, of_split in enumerate(runs) if split}
    return ShardPlan([*starts, kept], kept_by_file, held_out, bounds)


HELD_OUT_FOLDER = "held_out"  # of intermediate files


@dataclass(frozen=True)
class SourceToWrite:
    """state: the annotated files, of whose rows the KEPT ones are written. annotation: how the files were annotated.
    scores: the file of the quality scores of each; None if the source was not scored."""

    state: SourceState
    annotation: AnnotateConfig
    scores: Sequence[Path] | None


def training_shards(source: SourceToWrite, plan: ShardPlan, pii: PiiConfig | None, folder: Path) -> Sequence[ShardTask]:
    state, name = source.state, source.state.source.name
    edits = tuple(edit.preset for edit in source.annotation.edits)
    shard_format = ShardFormat(name, edits, pii, source.scores is not None, source.annotation.optional)
    spans = spans_of_runs(plan.kept, list(pairwise(plan.starts)))

    def task(number: int) -> ShardTask:
        rows = tuple(
            ShardRows(state.paths[file], first, last, state.filter_results[file]) for file, first, last in spans[number]
        )
        held_out = {
            split: folder / HELD_OUT_FOLDER / SPLITS[split] / f"{name}-{number:05}.arrow"
            for split in range(1, len(SPLITS))
            if plan.held_out[number, split]
        }
        scores = None if source.scores is None else tuple(source.scores[file] for file, _, _ in spans[number])
        return ShardTask(folder, SPLITS[0], f"{name}-{number:05}.parquet", shard_format, rows, scores, held_out)

    return LazySequence(task, plan.shards)


def held_out_shards(training: Sequence[ShardTask], plan: ShardPlan, split: int) -> Sequence[ShardTask]:
    """The shards of a held-out split, from the files that the training shards' tasks write."""
    shards = [number for number in plan.shards if plan.held_out[number, split]]
    spans = spans_of_runs([plan.held_out[number, split] for number in shards], plan.held_out_runs[split])
    folder, shard_format = training[0].folder, training[0].format

    def task(number: int) -> ShardTask:
        rows = tuple(
            ShardRows(training[shards[file]].held_out[split], start, stop) for file, start, stop in spans[number]
        )
        return ShardTask(folder, SPLITS[split], f"{shard_format.source}-{number:05}.parquet", shard_format, rows)

    return LazySequence(task, range(len(spans)))


def _totals(of_files: Sequence[Results]) -> list[tuple[int, int]]:
    """By split, (documents, bytes of text)."""
    documents, totals = [0] * len(SPLITS), [0] * len(SPLITS)
    for splits, sizes, _ in kept_documents(of_files):
        for split in range(len(SPLITS)):
            documents[split] += int((splits == split).sum())
            totals[split] += int(sizes[splits == split].sum(dtype=np.int64))
    return list(zip(documents, totals, strict=True))


def kept_documents(of_files: Sequence[Results]) -> Iterator[tuple[np.ndarray, np.ndarray, np.ndarray]]:
    """By file, (split codes int8, bytes uint32, marks uint8) of the kept rows."""
    for results in of_files:
        loaded = results.load()
        mask = loaded.failed_rule == KEPT
        yield loaded.splits[mask], loaded.bytes[mask], loaded.marks[mask]

"""Annotation of raw files: Parquet files of repaired texts with all their signals, written once.

An annotated file is named by the fingerprint of its inputs (raw digests, settings of the reader and the signals), so an
existing file can be reused: thresholds are applied later, on its columns, and do not change it."""

from bisect import bisect_left
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import xxhash

from gristmill.data_pipeline.annotate.normalize import REPAIRS, NormalizeConfig, normalize_texts
from gristmill.data_pipeline.annotate.optional_signals import OptionalSignals, own_columns
from gristmill.data_pipeline.dedup.folding import (
    DOCUMENT_KEY,
    KEY_BYTES,
    TEXT_KEY,
    keys_of,
    keys_path,
    remove_keys,
    restore_keys,
    text_keys,
    write_keys,
)
from gristmill.data_pipeline.extraction.blocks_config import load_repeated_blocks
from gristmill.data_pipeline.filters.apply import SOURCE
from gristmill.data_pipeline.filters.lines import EDIT_COUNTS, EDITS
from gristmill.data_pipeline.filters.presets import FilterChoice
from gristmill.data_pipeline.readers.compression import COMPRESSION_RATIO, SUFFIXES
from gristmill.data_pipeline.readers.document import RecordColumns, doc_ids
from gristmill.data_pipeline.readers.read import FileRange, FileToSplit, located_files, read_sources, split_files
from gristmill.data_pipeline.readers.source import SourceConfig
from gristmill.data_pipeline.signals.bits import TextBuffer
from gristmill.data_pipeline.signals.kernel import measure_edited
from gristmill.data_pipeline.signals.language import LANGUAGE_FIELDS, LanguageConfig, detect_buffer
from gristmill.data_pipeline.signals.reference import WordRule
from gristmill.data_pipeline.signals.signal_names import SIGNAL_FIELDS, edit_fields
from gristmill.foundation.checksums import checksum_path, checksummed_path, matches_checksum
from gristmill.foundation.config import Config
from gristmill.foundation.files import file_digest, remove_tree
from gristmill.foundation.fingerprint import fingerprint
from gristmill.foundation.lock import LockedSource, RawFile
from gristmill.foundation.runtime.tasks.engine import Engine
from gristmill.foundation.startup import DeferredModule

# For HTML alone.
extraction_weights = DeferredModule("gristmill.data_pipeline.extraction.weights")
site_boilerplate = DeferredModule("gristmill.data_pipeline.annotate.site_boilerplate")

ANNOTATE_VERSION = 33  # raised whenever the code changes what an annotated file holds
# Raw bytes of one annotated file: the unit of work and of resuming; it does not affect the corpus.
# By powers of two, so that a little more or less of raw files leaves most annotated files as they are.
MIN_RANGE_BYTES, MAX_RANGE_BYTES, TARGET_RANGES = 8_000_000, 64_000_000, 128
MIN_COMPRESSED_RANGES = 4  # of a source's large files of compressed JSON lines
SITE_BOILERPLATE_FOLDER = "site_boilerplate"  # in the cache, a folder a source
ROW_GROUP_ROWS = 16_384
# Limits the memory of a row group. Of 32 MB a run took 160 MB more and was no faster.
ROW_GROUP_BYTES = 8_000_000

PAGE_BYTES = 8_000_000  # a row group's texts are one page

RECORD_FIELDS = [
    pa.field("doc_id", pa.string()),
    pa.field("text", pa.string()),  # empty if the record could not be read
    pa.field("url", pa.string()),
    pa.field("language", pa.string()),
    pa.field("metadata", pa.string()),
    pa.field("raw_digest", pa.string()),
    pa.field("record", pa.int64()),
    pa.field("text_hash", pa.uint64()),  # of the repaired text: decides its split
    pa.field(TEXT_KEY, pa.binary(KEY_BYTES)),  # equal for texts that differ in white space alone
    pa.field("changes", pa.list_(pa.string())),  # which repairs changed the text
    pa.field("unreadable", pa.string()),  # null, or the kind of error if the record could not be read
    pa.field("reason", pa.string()),
    pa.field("offset", pa.int64()),
    pa.field("excerpt", pa.string()),
]
# Columns whose values repeat: a dictionary would only cost time for the others, most of which are signals.
REPEATED = [
    "language", "raw_digest", "changes.list.element", "unreadable", "detected_language", "script", "profile", "source",
]  # fmt: skip
SOURCE_FIELD = pa.field(SOURCE, pa.string())  # of the file of a batch of sources alone


def annotated_schema(edits: Sequence[str], optional: OptionalSignals, is_batch: bool = False) -> pa.Schema:
    """is_batch: of the file of a batch of sources."""
    added = [field for edit in edits for field in edit_fields(edit, EDIT_COUNTS[edit])]
    last = [SOURCE_FIELD] if is_batch else []
    return pa.schema([*RECORD_FIELDS, *LANGUAGE_FIELDS, *SIGNAL_FIELDS, *added, *optional.fields(), *last])


class AnnotateConfig(Config):
    """Settings of the recipe that determine an annotated file, besides the source."""

    normalize: NormalizeConfig
    word_tokenizer: WordRule
    language_id: LanguageConfig | None
    language_model: str | None = None  # its digest; None: the bundled one
    edits: tuple[FilterChoice, ...]  # the filters that edit, in their order
    optional: OptionalSignals = OptionalSignals()


@dataclass(frozen=True)
class AnnotateTask:
    """boilerplate: the table of the source's boilerplate blocks; None: none is looked for. batch: of a batch of
    sources, each with its ranges, which are all in `ranges`; empty for one source."""

    path: Path
    source: SourceConfig
    config: AnnotateConfig
    ranges: tuple[FileRange, ...]
    boilerplate: Path | None = None
    batch: tuple[tuple[SourceConfig, tuple[FileRange, ...]], ...] = ()

    @property
    def sources(self) -> tuple[tuple[SourceConfig, tuple[FileRange, ...]], ...]:
        """Each source with its ranges."""
        return self.batch or ((self.source, self.ranges),)

    @property
    def label(self) -> str:
        """The raw files that the task reads, for messages."""
        if self.batch:
            return f"sources {self.batch[0][0].name} to {self.batch[-1][0].name}, {len(self.batch)} together"
        names = list(dict.fromkeys(file_range.file.name for file_range in self.ranges))
        return f"source {self.source.name}, {', '.join(names[:2])}{' ...' if len(names) > 2 else ''}"

    @property
    def bytes(self) -> int:
        return int(sum(file_range.share * file_range.file.bytes for file_range in self.ranges))


def annotation_tasks(
    sources: Sequence[tuple[SourceConfig, LockedSource, AnnotateConfig]], folder: Path, engine: Engine
) -> list[list[AnnotateTask]]:
    """Split each source into tasks, in canonical order: (raw digest, record number)."""
    split = [_files_to_split(source, locked) for source, locked, _ in sources]
    every_file = [to_split for files in split for to_split in files]
    ranges = iter(split_files(every_file, folder.parent, engine))
    by_file = [{to_split.file: next(ranges) for to_split in files} for files in split]
    return [
        _annotation_tasks(source, _groups(source, locked, split_files), config, folder, engine)
        for (source, locked, config), split_files in zip(sources, by_file, strict=True)
    ]


def _files_to_split(source: SourceConfig, locked: LockedSource) -> list[FileToSplit]:
    """The files that are larger than a range."""
    range_bytes = _range_bytes(locked)
    if all(file.bytes <= range_bytes for file in locked.files):
        return []
    large = [(file, location) for file, location in located_files(source, locked) if file.bytes > range_bytes]
    parts = -(-MIN_COMPRESSED_RANGES // max(len(large), 1))
    return [FileToSplit(file, location, source, range_bytes, parts) for file, location in large]


def _range_bytes(locked: LockedSource) -> int:
    total, range_bytes = sum(file.bytes for file in locked.files), MIN_RANGE_BYTES
    while range_bytes * TARGET_RANGES < total and range_bytes < MAX_RANGE_BYTES:
        range_bytes *= 2
    return range_bytes


def _groups(
    source: SourceConfig, locked: LockedSource, split: Mapping[RawFile, Sequence[FileRange]]
) -> list[list[FileRange]]:
    """The ranges of each task: small files whose digests begin with the same bits together, as many as fit."""
    range_bytes = _range_bytes(locked)
    ranges = [
        file_range
        for file, location in located_files(source, locked)
        for file_range in split.get(file, [FileRange(file, location)])
    ]
    sizes = [
        text_bytes(file_range.location, file_range.file.bytes) if file_range.end is None else range_bytes
        for file_range in ranges
    ]
    return list(_grouped_by_digest(ranges, sizes, range_bytes))


def _grouped_by_digest(
    ranges: Sequence[FileRange], sizes: Sequence[int], range_bytes: int, bit: int = 0
) -> Iterator[list[FileRange]]:
    """Divides ranges, whose digests ascend and share the first `bit` bits, by the next bits until a group has
    range_bytes or less: a file that is added or removed changes its own group alone."""
    if len(ranges) < 2 or sum(sizes) <= range_bytes:
        if ranges:
            yield list(ranges)
        return
    if ranges[0].file.sha256 == ranges[-1].file.sha256:
        yield from ([file_range] for file_range in ranges)
        return
    middle = bisect_left(ranges, True, key=lambda file_range: bool(_bit(file_range.file.sha256, bit)))
    for start, stop in ((0, middle), (middle, len(ranges))):
        yield from _grouped_by_digest(ranges[start:stop], sizes[start:stop], range_bytes, bit + 1)


def _bit(digest: str, bit: int) -> int:
    return int(digest[bit // 4], 16) >> (3 - bit % 4) & 1


def _annotation_tasks(
    source: SourceConfig, groups: Sequence[Sequence[FileRange]], config: AnnotateConfig, folder: Path, engine: Engine
) -> list[AnnotateTask]:
    boilerplate = None
    if source.extracted_by_blocks and source.blocks.site_boilerplate is not None:
        boilerplate = site_boilerplate.find_site_boilerplate(
            source, groups, folder.parent / SITE_BOILERPLATE_FOLDER / source.name, engine
        )
    tasks = []
    for group in groups:
        name = fingerprint(_identity(source, config, group, boilerplate))
        tasks.append(AnnotateTask(folder / f"{source.name}-{name}.parquet", source, config, tuple(group), boilerplate))
    return tasks


def batch_task(
    source: SourceConfig, members: Sequence[tuple[SourceConfig, LockedSource]], config: AnnotateConfig, folder: Path
) -> AnnotateTask:
    """The task of a batch of small sources: one file with the documents of all, source after source, each in its
    canonical order. source: stands for the batch."""
    batch = tuple(
        (member, tuple(FileRange(file, location) for file, location in located_files(member, locked)))
        for member, locked in members
    )
    name = fingerprint([_identity(member, config, ranges, None) for member, ranges in batch])
    ranges = tuple(file_range for _, of_source in batch for file_range in of_source)
    return AnnotateTask(folder / f"{source.name}-{name}.parquet", source, config, ranges, batch=batch)


def text_bytes(name: str, num_bytes: int) -> int:
    """About how many bytes of text a complete file of this name and size holds, to group small files into tasks."""
    return num_bytes * (COMPRESSION_RATIO if name.rpartition(".")[2] in SUFFIXES else 1)


def annotate_all(tasks: Sequence[AnnotateTask], engine: Engine) -> None:
    """Write every task's file, unless a complete one exists, and its array of keys."""
    missing = [task for task in tasks if not matches_checksum(task.path)]
    # of equally large ranges the later ones first: a compressed file is decompressed from its beginning
    missing.sort(key=lambda task: task.ranges[0].start if task.ranges else 0, reverse=True)
    if missing:
        engine.map(annotate, missing, "annotate", [float(task.bytes) for task in missing], "B")
    without_keys = [task.path for task in tasks if not keys_path(task.path).is_file()]
    if without_keys:
        engine.map(restore_keys, without_keys, "text keys")


def annotate(task: AnnotateTask) -> None:
    """Write the task's file: one row per record, readable or not, in the order of the ranges."""
    schema = annotated_schema([edit.preset for edit in task.config.edits], task.config.optional, bool(task.batch))
    dropped_file(task.path).unlink(missing_ok=True)
    remove_keys(task.path)
    keys = [np.empty(0, DOCUMENT_KEY)]
    with checksummed_path(task.path) as temporary, open_annotated(temporary, schema) as file:
        repeated = None if task.boilerplate is None else load_repeated_blocks(task.boilerplate)
        records = read_sources(task.sources, repeated)
        for group in _row_groups(_annotated(batch, task.config, bool(task.batch)) for batch in records):
            table = pa.Table.from_batches(group, schema)
            file.write_table(table, row_group_size=ROW_GROUP_ROWS)
            keys.append(keys_of(table, task.path))
    write_keys(task.path, np.concatenate(keys))


CHECKED_NAME = ".tombstones.json"  # beside annotated files: content of those without rows that have a tombstone


def dropped_file(path: Path) -> Path:
    """File beside an annotated file, which lists the rows that `tombstones.py` dropped from it."""
    return path.with_name(f".{path.name}.dropped")


def open_annotated(path: Path, schema: pa.Schema) -> pq.ParquetWriter:
    """Texts are not compressed: they are read three times. With LZ4 curation of 180 MB of long documents takes a tenth
    longer (10.0 against 9.0 s), without it these files take a half more space (192 against 118 MB)."""
    return pq.ParquetWriter(
        path,
        schema,
        compression={name: "lz4" for name in schema.names if name not in ("text", "changes")},
        use_dictionary=REPEATED,
        write_statistics=False,
        data_page_size=PAGE_BYTES,
    )


def _row_groups(batches: Iterator[pa.RecordBatch]) -> Iterator[list[pa.RecordBatch]]:
    """Runs of batches of ROW_GROUP_ROWS rows, or fewer with ROW_GROUP_BYTES in total."""
    pending: list[pa.RecordBatch] = []
    rows = num_bytes = 0
    for batch in batches:
        pending.append(batch)
        rows += len(batch)
        num_bytes += batch.nbytes
        if rows >= ROW_GROUP_ROWS or num_bytes >= ROW_GROUP_BYTES:
            yield pending
            pending, rows, num_bytes = [], 0, 0
    if pending:
        yield pending


def _annotated(batch: RecordColumns, config: AnnotateConfig, has_source: bool) -> pa.RecordBatch:
    normalized, repairs = normalize_texts(batch.texts, config.normalize)
    languages = detect_buffer(normalized, config.language_id)
    final, measured = _edited(normalized, config)
    optional = config.optional.columns(final, languages, batch.urls, batch.metadata)
    schema = annotated_schema([edit.preset for edit in config.edits], config.optional, has_source)
    described = _description(batch, repairs, final)
    columns = [*described, *languages.columns, *measured, *optional]
    if own := config.optional.own:
        columns += own_columns(own, pa.table(columns, schema=pa.schema(list(schema)[: len(columns)])))
    if has_source:
        columns.append(pa.concat_arrays([pa.repeat(pa.scalar(source), rows) for source, _, rows in batch.files]))
    return pa.record_batch(columns, schema=schema)


def _description(batch: RecordColumns, repairs: np.ndarray, final: TextBuffer) -> list[pa.Array]:
    """The columns RECORD_FIELDS. repairs: the bits of normalize_texts; final: the texts after all edits."""
    numbers, count, failed = batch.numbers.tolist(), len(batch), batch.unreadable
    starts = np.cumsum([0, *(rows for *_, rows in batch.files)]).tolist()
    ids = [
        doc_id
        for (source, file, rows), start in zip(batch.files, starts, strict=False)
        for doc_id in doc_ids(source, file, numbers[start : start + rows])
    ]
    columns: dict[str, Sequence | pa.Array] = {
        "doc_id": ids,
        "text": final.strings(),
        "url": batch.urls,
        "language": batch.languages,
        "metadata": batch.metadata,
        "raw_digest": pa.concat_arrays([pa.repeat(pa.scalar(file.sha256), rows) for _, file, rows in batch.files]),
        "record": batch.numbers,
        "text_hash": text_hashes(final),
        TEXT_KEY: text_keys(final.text, final.offsets),
        "changes": _changes(batch, repairs),
    }
    for name, attribute in (("unreadable", "kind"), ("reason", "reason"), ("offset", "offset"), ("excerpt", "excerpt")):
        failures = {row: getattr(failure, attribute) for row, failure in failed.items()}
        columns[name] = [failures.get(row) for row in range(count)] if failures else pa.nulls(count)
    return [
        column.cast(field.type) if isinstance(column, pa.Array) else pa.array(column, field.type)
        for field, column in zip(RECORD_FIELDS, (columns[field.name] for field in RECORD_FIELDS), strict=True)
    ]


def text_hashes(texts: TextBuffer) -> np.ndarray:
    """uint64[N]: XXH3 of each text."""
    raw, ends = memoryview(texts.text), texts.offsets.tolist()  # type: ignore[arg-type]
    digest = xxhash.xxh3_64_intdigest
    hashes = [digest(raw[start : end - 1]) for start, end in pairwise(ends)]
    return np.array(hashes, np.uint64)


def _changes(batch: RecordColumns, repairs: np.ndarray) -> pa.Array:
    """Names of the repairs that changed each record: the reader's, then those of normalize_texts."""
    names = [_repair_names(bits) for bits in range(1 << len(REPAIRS))]
    kinds = repairs.astype(np.int64)
    for row, of_reader in batch.repairs.items():
        kinds[row] = len(names)
        names.append((*of_reader, *_repair_names(int(repairs[row]))))
    return pa.array(names, pa.list_(pa.string())).take(pa.array(kinds))


@lru_cache(maxsize=64)
def _repair_names(bits: int) -> tuple[str, ...]:
    return tuple(name for place, name in enumerate(REPAIRS) if bits >> place & 1)


def _edited(buffer: TextBuffer, config: AnnotateConfig) -> tuple[TextBuffer, list[pa.Array]]:
    """Return (the texts after all edits, columns of the final texts' signals, then the columns each edit adds)."""
    measured, word_signals = measure_edited(buffer, config.word_tokenizer, None)
    added: list[pa.Array] = []
    for edit in config.edits:
        options = edit.line_options()
        assert options is not None
        buffer, counts, same_words = EDITS[edit.preset](buffer, options)
        after, word_signals = measure_edited(buffer, config.word_tokenizer, (word_signals, same_words))
        added += [*measured.columns, *map(pa.array, np.ascontiguousarray(counts.T))]
        words_before, words_after = measured.column("num_words").to_numpy(), after.column("num_words").to_numpy()
        # not 1 - after / before: that is above 0.05 for one word of twenty
        added.append(pa.array((words_before - words_after) / np.maximum(words_before, 1)))
        measured = after
    return buffer, [*measured.columns, *added]


def text_identity(task: AnnotateTask) -> str:
    """Fingerprint of all that decides the texts of a source, besides its raw files."""
    return fingerprint([_identity(source, task.config, (), task.boilerplate) for source, _ in task.sources])


def _identity(
    source: SourceConfig, config: AnnotateConfig, ranges: Sequence[FileRange], boilerplate: Path | None
) -> dict:
    return {
        "version": ANNOTATE_VERSION,
        "source": source.model_dump(
            mode="json",
            exclude={
                "paths": True,
                "weight": True,
                "priority": True,
                "filters": True,
                "blocks": {"weights"},
                "reader": {"file", "source"},
            },
        ),
        **(
            {"extractor_weights": extraction_weights.weights_digest(source.blocks.weights)}
            if source.extracted_by_blocks
            else {}
        ),
        **({} if boilerplate is None else {"boilerplate": file_digest(boilerplate)}),
        "config": config.model_dump(
            mode="json",
            exclude={
                "language_id": {"model"},
                "optional": {"own": {"__all__": {"code": {"file", "source"}}}},
            },
        ),
        "ranges": [[r.file.name, r.file.sha256, r.file.copy_index, r.first_record, r.start, r.end] for r in ranges],
    }


def delete_other_annotations(cache: Path, tasks: Sequence[Sequence[AnnotateTask]]) -> None:
    """Deletes annotated files of earlier settings or raw files, and tables of boilerplate that no source uses; the next
    run of this recipe needs only these."""
    current = {
        path.name
        for group in tasks
        for task in group
        for file in (task.path, keys_path(task.path))
        for path in (file, checksum_path(file), dropped_file(task.path))
    } | {CHECKED_NAME}
    for path in (cache / "annotated").iterdir():
        if path.name not in current:
            path.unlink()
    tables = {task.boilerplate.parent for group in tasks for task in group if task.boilerplate is not None}
    for folder in (cache / SITE_BOILERPLATE_FOLDER).glob("*"):
        if folder not in tables:
            remove_tree(folder)

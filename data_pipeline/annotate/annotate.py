"""Annotation of raw files: Parquet files of repaired texts with all their signals, written once.

An annotated file is named by the fingerprint of its inputs (raw digests, settings of the reader and the signals), so an
existing file can be reused: thresholds are applied later, on its columns, and do not change it."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import xxhash

from gristmill.data_pipeline.annotate.normalize import REPAIRS, NormalizeConfig, normalize_texts
from gristmill.data_pipeline.annotate.optional_signals import OptionalSignals
from gristmill.data_pipeline.extraction.html_extraction import compile_blocks
from gristmill.data_pipeline.extraction.weights import weights_digest
from gristmill.data_pipeline.filters.choice import FilterChoice
from gristmill.data_pipeline.filters.lines import EDIT_COUNTS, EDITS
from gristmill.data_pipeline.readers.document import Record, Unreadable, doc_id
from gristmill.data_pipeline.readers.fields import metadata_json
from gristmill.data_pipeline.readers.read import FileRange, file_ranges, read_range
from gristmill.data_pipeline.readers.resolve import grouped, located_files
from gristmill.data_pipeline.readers.source import SourceConfig
from gristmill.data_pipeline.signals.buffer import TextBuffer
from gristmill.data_pipeline.signals.language import LANGUAGE_FIELDS, LanguageConfig, detect
from gristmill.data_pipeline.signals.names import SIGNAL_FIELDS, edit_fields
from gristmill.data_pipeline.signals.reference import WordRule
from gristmill.data_pipeline.signals.table import measure_buffer
from gristmill.foundation.canonical_json import fingerprint
from gristmill.foundation.checksum_files import is_sealed, sealed_path
from gristmill.foundation.config import Config
from gristmill.foundation.engine.local import LocalEngine
from gristmill.foundation.lock import LockedSource, RawFile

ANNOTATE_VERSION = 11  # raised whenever the code changes what an annotated file holds
# Raw bytes of one annotated file: the unit of work and of resuming; it does not affect the corpus.
MIN_RANGE_BYTES, MAX_RANGE_BYTES, TARGET_RANGES = 4_000_000, 64_000_000, 64
BATCH_DOCUMENTS = 512
BATCH_CHARS = 8_000_000  # of texts, URLs and metadata: limits the memory of a batch of long documents
ROW_GROUP_ROWS = 1024

RECORD_FIELDS = [
    pa.field("doc_id", pa.string()),
    pa.field("text", pa.string()),  # empty if the record could not be read
    pa.field("url", pa.string()),
    pa.field("language", pa.string()),
    pa.field("metadata", pa.string()),
    pa.field("raw_digest", pa.string()),
    pa.field("record", pa.int64()),
    pa.field("text_hash", pa.uint64()),  # of the repaired text: decides its split
    pa.field("changes", pa.list_(pa.string())),  # which repairs changed the text
    pa.field("unreadable", pa.string()),  # null, or the kind of error if the record could not be read
    pa.field("reason", pa.string()),
    pa.field("offset", pa.int64()),
    pa.field("excerpt", pa.string()),
]


def annotated_schema(edits: Sequence[str], optional: OptionalSignals) -> pa.Schema:
    added = [field for edit in edits for field in edit_fields(edit, EDIT_COUNTS[edit])]
    return pa.schema([*RECORD_FIELDS, *LANGUAGE_FIELDS, *SIGNAL_FIELDS, *added, *optional.fields()])


class AnnotateConfig(Config):
    """Settings of the recipe that determine an annotated file, besides the source."""

    normalize: NormalizeConfig
    words: WordRule
    language_id: LanguageConfig | None
    language_model: str | None = None  # its digest; None: the bundled one
    edits: tuple[FilterChoice, ...]  # the filters that edit, in their order
    optional: OptionalSignals = OptionalSignals()


@dataclass(frozen=True)
class AnnotateTask:
    path: Path
    source: SourceConfig
    config: AnnotateConfig
    parts: tuple[FileRange, ...]

    @property
    def label(self) -> str:
        """The raw files that the task reads, for messages."""
        names = list(dict.fromkeys(part.file.name for part in self.parts))
        return f"source {self.source.name}, {', '.join(names[:2])}{' ...' if len(names) > 2 else ''}"

    @property
    def bytes(self) -> int:
        return sum(part.end - part.start if part.end else part.file.bytes for part in self.parts)


def annotation_tasks(
    source: SourceConfig, locked: LockedSource, config: AnnotateConfig, folder: Path, engine: LocalEngine
) -> list[AnnotateTask]:
    """Split the source into tasks, in canonical order: (raw digest, record number)."""
    total = sum(file.bytes for file in locked.files)
    range_bytes = min(max(total // TARGET_RANGES, MIN_RANGE_BYTES), MAX_RANGE_BYTES)
    located = located_files(source, locked)
    large = [(file, location, source, range_bytes) for file, location in located if file.bytes > range_bytes]
    cut = iter(engine.map(_file_parts, large, f"parts of {source.name}", [float(task[0].bytes) for task in large], "B"))
    parts = [
        part
        for file, location in located
        for part in (next(cut) if file.bytes > range_bytes else [FileRange(file, location)])
    ]
    sizes = [part.file.bytes if part.end is None else range_bytes for part in parts]
    tasks = []
    for group in grouped(parts, sizes, range_bytes):
        name = fingerprint(_identity(source, config, group))
        tasks.append(AnnotateTask(folder / f"{source.name}-{name}.parquet", source, config, tuple(group)))
    return tasks


def _file_parts(task: tuple[RawFile, str, SourceConfig, int]) -> list[FileRange]:
    return file_ranges(*task)


def annotate_all(tasks: Sequence[AnnotateTask], engine: LocalEngine) -> None:
    """Write every task's file, unless a complete one exists."""
    missing = [task for task in tasks if not is_sealed(task.path)]
    if missing:
        _compile_kernels(missing[0].config)
        for blocks in {task.source.blocks for task in missing if task.source.extractor == "blocks"}:
            compile_blocks(blocks)
        engine.map(annotate, missing, "annotate", [float(task.bytes) for task in missing], "B")


def _compile_kernels(config: AnnotateConfig) -> None:
    """Compile the kernels once, so that the workers load them from the cache."""
    texts, _ = normalize_texts(TextBuffer.of(["A text with an accent: é.\r\n"]), config.normalize)
    _edited(texts, config)


def annotate(task: AnnotateTask) -> None:
    """Write the task's file: one row per record, readable or not, in the order of the ranges."""
    schema = annotated_schema([edit.preset for edit in task.config.edits], task.config.optional)
    with sealed_path(task.path) as temporary, pq.ParquetWriter(temporary, schema, compression="zstd") as file:
        records = ((part.file, record) for part in task.parts for record in read_range(part, task.source))
        while batch := _batch(records):
            file.write_batch(_annotated(batch, task.source, task.config), row_group_size=ROW_GROUP_ROWS)
            batch.clear()  # so that it does not stay in memory while the next one is read


def _batch(
    records: Iterator[tuple[RawFile, Record | Unreadable]],
) -> list[tuple[RawFile, Record | Unreadable]]:
    """The next records: BATCH_DOCUMENTS, or fewer with BATCH_CHARS in total."""
    batch: list[tuple[RawFile, Record | Unreadable]] = []
    chars = 0
    for one in records:
        batch.append(one)
        chars += _num_chars(one[1]) if isinstance(one[1], Record) else 0
        if len(batch) == BATCH_DOCUMENTS or chars >= BATCH_CHARS:
            break
    return batch


def _num_chars(record: Record) -> int:
    metadata = len(metadata_json(record.metadata)) if record.metadata else 0
    return len(record.text) + len(record.url) + len(record.language) + metadata


def _annotated(
    batch: Sequence[tuple[RawFile, Record | Unreadable]], source: SourceConfig, config: AnnotateConfig
) -> pa.RecordBatch:
    raw = TextBuffer.of([r.text if isinstance(r, Record) else "" for _, r in batch])
    normalized, repairs = normalize_texts(raw, config.normalize)
    languages = detect(normalized.texts(), config.language_id)
    final, measured = _edited(normalized, config)
    texts = final.texts()
    rows = [
        {
            "doc_id": doc_id(source.name, file, record.number),
            "text": text,
            "raw_digest": file.sha256,
            "record": record.number,
            "text_hash": xxhash.xxh3_64_intdigest(text.encode()),
            "changes": [*(record.repairs if isinstance(record, Record) else ()), *_repair_names(int(bits))],
            **_description(record),
        }
        for (file, record), bits, text in zip(batch, repairs, texts, strict=True)
    ]
    described = pa.RecordBatch.from_pylist(rows, schema=pa.schema(RECORD_FIELDS))
    urls = [record.url if isinstance(record, Record) else "" for _, record in batch]
    optional = config.optional.columns(texts, languages, urls)
    schema = annotated_schema([edit.preset for edit in config.edits], config.optional)
    return pa.record_batch([*described.columns, *languages.columns, *measured, *optional], schema=schema)


@lru_cache(maxsize=64)
def _repair_names(bits: int) -> tuple[str, ...]:
    return tuple(name for place, name in enumerate(REPAIRS) if bits >> place & 1)


def _edited(buffer: TextBuffer, config: AnnotateConfig) -> tuple[TextBuffer, list[pa.Array]]:
    """Return (the texts after all edits, columns of the final texts' signals, then the columns each edit adds)."""
    measured = measure_buffer(buffer, config.words)
    added: list[pa.Array] = []
    for edit in config.edits:
        options = edit.line_options()
        assert options is not None
        buffer, counts = EDITS[edit.preset](buffer, options)
        after = measure_buffer(buffer, config.words)
        added += [*measured.columns, *map(pa.array, np.ascontiguousarray(counts.T))]
        words_before, words_after = measured.column("num_words").to_numpy(), after.column("num_words").to_numpy()
        # not 1 - after / before: that is above 0.05 for one word of twenty
        added.append(pa.array((words_before - words_after) / np.maximum(words_before, 1)))
        measured = after
    return buffer, [*measured.columns, *added]


def _description(record: Record | Unreadable) -> dict:
    if isinstance(record, Unreadable):
        return {"unreadable": record.kind, "reason": record.reason, "offset": record.offset, "excerpt": record.excerpt}
    return {"url": record.url, "language": record.language, "metadata": metadata_json(record.metadata)}


def _identity(source: SourceConfig, config: AnnotateConfig, parts: Sequence[FileRange]) -> dict:
    return {
        "version": ANNOTATE_VERSION,
        "source": source.model_dump(
            mode="json",
            exclude={"paths": True, "weight": True, "priority": True, "filters": True, "blocks": {"weights"}},
        ),
        **({"extractor_weights": weights_digest(source.blocks.weights)} if source.extractor == "blocks" else {}),
        "config": config.model_dump(mode="json", exclude={"language_id": {"model"}}),
        "parts": [[p.file.name, p.file.sha256, p.file.copy_index, p.first_record, p.start, p.end] for p in parts],
    }

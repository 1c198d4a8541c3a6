"""Shards of the curated corpus: documents and, row for row, their signals."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from gristmill.data_pipeline.annotate.optional_signals import OptionalSignals
from gristmill.data_pipeline.filters.lines import EDIT_COUNTS
from gristmill.data_pipeline.filters.pii import PiiConfig, replace_pii
from gristmill.data_pipeline.ledger.parquet_rows import RowRange, row_range_groups
from gristmill.data_pipeline.readers.document import DOCUMENT_SCHEMA
from gristmill.data_pipeline.signals.language import LANGUAGE_FIELDS
from gristmill.data_pipeline.signals.names import SIGNAL_FIELDS, edit_fields
from gristmill.foundation.checksum_files import is_sealed, sealed_path

ROW_GROUP_ROWS = 1024
PII_FIELD = pa.field("pii_replaced", pa.int64())
QUALITY_FIELD = pa.field("quality_score", pa.float64())
NO_OPTIONAL_SIGNALS = OptionalSignals()
LATE_FIELDS = (PII_FIELD.name, QUALITY_FIELD.name)  # columns that annotated files have not


def signals_schema(edits: Sequence[str], optional: OptionalSignals, pii: bool, scored: bool) -> pa.Schema:
    """doc_id, the detected language, every signal of the text, what each edit of it added, the recipe's optional
    signals, quality, personal data."""
    added = [field for edit in edits for field in edit_fields(edit, EDIT_COUNTS[edit])] + optional.fields()
    added += [QUALITY_FIELD] if scored else []
    added += [PII_FIELD] if pii else []
    return pa.schema([pa.field("doc_id", pa.string()), *LANGUAGE_FIELDS, *SIGNAL_FIELDS, *added])


@dataclass(frozen=True)
class ShardTask:
    """One shard: documents/SPLIT/NAME and signals/SPLIT/NAME, of these slices in this order."""

    folder: Path
    split: str
    name: str
    source: str
    slices: tuple[RowRange, ...]
    edits: tuple[str, ...]  # the filters that edited the source: each has added columns to its signals
    pii: PiiConfig | None
    scores: tuple[Path, ...] | None  # of each slice's file, the quality scores of its rows; None: not scored
    optional: OptionalSignals = NO_OPTIONAL_SIGNALS

    @property
    def documents(self) -> Path:
        return self.folder / "documents" / self.split / self.name

    @property
    def signals(self) -> Path:
        return self.folder / "signals" / self.split / self.name


def write_shard(task: ShardTask) -> None:
    """Both files of the shard are there; a shard of which both are there already is kept."""
    if is_sealed(task.documents) and is_sealed(task.signals):
        return
    schema = signals_schema(task.edits, task.optional, task.pii is not None, task.scores is not None)
    columns = [
        *(name for name in DOCUMENT_SCHEMA.names if name != "source"),
        *(name for name in schema.names[1:] if name not in LATE_FIELDS),
    ]
    with (
        sealed_path(task.documents) as documents,
        sealed_path(task.signals) as signals,
        pq.ParquetWriter(documents, DOCUMENT_SCHEMA, compression="zstd") as documents_file,
        pq.ParquetWriter(signals, schema, compression="zstd") as signals_file,
    ):
        held: list[pa.Table] = []
        for index, row_range in enumerate(task.slices):
            scores = None if task.scores is None else np.load(task.scores[index])[row_range.rows]
            at = 0
            for table in row_range_groups(row_range, columns):
                if scores is not None:
                    table = table.append_column(QUALITY_FIELD, pa.array(scores[at : at + len(table)]))
                at += len(table)
                held.append(table)
                while sum(map(len, held)) >= ROW_GROUP_ROWS:
                    whole = pa.concat_tables(held)
                    _write(whole.slice(0, ROW_GROUP_ROWS), task, documents_file, signals_file)
                    held = [whole.slice(ROW_GROUP_ROWS)]
        rest = pa.concat_tables(held) if held else None
        if rest is not None and len(rest):
            _write(rest, task, documents_file, signals_file)


def _write(table: pa.Table, task: ShardTask, documents: pq.ParquetWriter, signals: pq.ParquetWriter) -> None:
    """One row group of each. What the reader said of the language goes before what was detected."""
    columns = {name: table.column(name) for name in ("doc_id", "text", "url", "metadata")}
    columns["source"] = pa.array([task.source] * len(table), pa.string())
    if task.pii is not None:
        cleaned = [replace_pii(text, task.pii) for text in table.column("text").to_pylist()]
        columns["text"] = pa.array([text for text, _ in cleaned], pa.string())
        table = table.append_column(PII_FIELD, pa.array([count for _, count in cleaned], pa.int64()))
    said, found = table.column("language").to_pylist(), table.column("detected_language").to_pylist()
    columns["language"] = pa.array([one or other for one, other in zip(said, found, strict=True)], pa.string())
    # combine_chunks: how the rows were spread over row groups before must not show in the pages
    batch = pa.table([columns[name] for name in DOCUMENT_SCHEMA.names], schema=DOCUMENT_SCHEMA).combine_chunks()
    documents.write_table(batch, row_group_size=ROW_GROUP_ROWS)
    signals.write_table(table.select(signals.schema.names).combine_chunks(), row_group_size=ROW_GROUP_ROWS)

"""Removes spans from the texts of document files and records every removed span."""

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import groupby
from operator import itemgetter
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from gristmill.data_pipeline.dedup.arrays import document_file_identity, open_workspace
from gristmill.data_pipeline.ledger.document_file import BATCH_ROWS, DocumentFile, open_document_file
from gristmill.data_pipeline.ledger.removed_spans import REMOVED_SPANS, complement, removed_span_row, sorted_spans
from gristmill.foundation.checksum_files import sealed_path
from gristmill.foundation.engine.local import LocalEngine

EDITED_TEXTS = pa.schema([("doc_id", pa.string()), ("text", pa.string())])
# share: of the document's bytes that the spans hold. left: characters that remain, without white space at the ends.
REMAINING = pa.schema([("doc_id", pa.string()), ("share", pa.float64()), ("left", pa.int64())])


@dataclass(frozen=True)
class EditedFile:
    """parts: row for row the files given; a file without spans is the file given. removed_spans: rows of
    REMOVED_SPANS. left: rows of REMAINING, one for each document that had spans, sorted by doc_id."""

    parts: list[DocumentFile]
    removed_spans: pa.Table
    left: pa.Table


@dataclass(frozen=True)
class SpanRemoval:
    """rule: recorded with every span. in_bytes: spans are bytes of UTF-8, not characters. is_applied: False records
    the spans and leaves the texts as they are."""

    rule: str
    in_bytes: bool = False
    is_applied: bool = True


@dataclass(frozen=True)
class EditTask:
    part: DocumentFile
    spans: Path
    removal: SpanRemoval
    path: Path

    @property
    def removed_spans(self) -> Path:
        return self.path.with_suffix(".removed.parquet")

    @property
    def left(self) -> Path:
        return self.path.with_suffix(".left.parquet")


def edit_document_files(
    parts: Sequence[DocumentFile],
    spans: pa.Table,
    removal: SpanRemoval,
    engine: LocalEngine,
    folder: Path,
) -> EditedFile:
    """The files without the spans; if not removal.is_applied, the texts stay and the spans are only recorded.

    spans: columns doc_id, start, stop (characters, or bytes of UTF-8), kept_in, as `duplicate_spans` and
    `repeated_substrings` return them; spans of a document are disjoint. Texts of removed rows are left out. Files are
    in `folder`; called again with the same arguments after a kill, it resumes from them."""
    table = spans.select(["doc_id", "start", "stop", "kept_in"]).sort_by(
        [("doc_id", "ascending"), ("start", "ascending")]
    )
    open_workspace(
        folder, {**asdict(removal), "parts": [document_file_identity(part) for part in parts], "spans": _digest(table)}
    )
    spans_file = folder / "spans.parquet"
    if not spans_file.exists():
        with sealed_path(spans_file) as temporary:
            pq.write_table(table, temporary, compression="zstd")
    tasks = [
        EditTask(part, spans_file, removal, folder / f"part-{number:05d}.parquet") for number, part in enumerate(parts)
    ]
    missing = [task for task in tasks if not task.left.exists()]
    engine.map(_edit_file, missing, "remove spans", [task.part.bytes for task in missing], "B")
    left = pa.concat_tables([REMAINING.empty_table(), *(pq.read_table(task.left, schema=REMAINING) for task in tasks)])
    return EditedFile(
        [
            DocumentFile(t.path, t.part.source, t.part.priority, t.part.kept) if t.path.exists() else t.part
            for t in tasks
        ],
        sorted_spans([pq.read_table(task.removed_spans, schema=REMOVED_SPANS) for task in tasks]),
        left.sort_by("doc_id").combine_chunks(),
    )


def remove_spans(text: str, spans: Sequence[tuple[int, int]]) -> str:
    """The text without its (start, stop) characters, which are disjoint. "a\\nb\\nc" without (2, 4) is "a\\nc"."""
    return "".join(text[start:stop] for start, stop in complement(sorted(spans), len(text)))


def in_characters(text: str, spans: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
    """Spans of UTF-8 bytes, on character bounds, as spans of characters: "äbc", (0, 2) -> (0, 1)."""
    raw = text.encode()
    if len(raw) == len(text):
        return list(spans)
    begins = np.cumsum((np.frombuffer(raw, np.uint8) & 0xC0) != 0x80)  # characters begun up to each byte
    before = np.concatenate([[0], begins])
    return [(int(before[start]), int(before[stop])) for start, stop in spans]


def _digest(table: pa.Table) -> str:
    """Of the values, not of their memory: written as Parquet they are the same bytes."""
    sink = pa.BufferOutputStream()
    pq.write_table(table.combine_chunks(), sink)
    return hashlib.sha256(sink.getvalue()).hexdigest()


def _edit_file(task: EditTask) -> None:
    """Three files: the texts (if any changes), the removed spans and, last, what is left."""
    spans = _spans_of(task)
    record = Record([], [])
    if spans and task.removal.is_applied:
        with (
            sealed_path(task.path) as temporary,
            pq.ParquetWriter(temporary, EDITED_TEXTS, compression="zstd") as writer,
        ):
            for doc_ids, texts in _edited_batches(task, spans, record):
                writer.write_table(pa.table([pa.array(doc_ids), pa.array(texts, pa.string())], schema=EDITED_TEXTS))
    elif spans:
        for _ in _edited_batches(task, spans, record):
            pass
    for path, rows, schema in (
        (task.removed_spans, record.removed_spans, REMOVED_SPANS),
        (task.left, record.left, REMAINING),
    ):
        with sealed_path(path) as temporary:
            pq.write_table(pa.Table.from_pylist(rows, schema=schema), temporary, compression="zstd")


@dataclass(frozen=True)
class Record:
    """Rows of REMOVED_SPANS and of REMAINING, filled document by document."""

    removed_spans: list[dict[str, Any]]
    left: list[dict[str, Any]]


def _spans_of(task: EditTask) -> dict[str, list[dict[str, Any]]]:
    """The spans of each document of the part that has any."""
    ids = open_document_file(task.part.path).read(columns=["doc_id"]).column("doc_id")
    spans = pq.read_table(task.spans)
    mine = spans.filter(pc.is_in(spans.column("doc_id"), value_set=ids.combine_chunks())).to_pylist()
    return {doc_id: list(rows) for doc_id, rows in groupby(mine, key=itemgetter("doc_id"))}


def _edited_batches(
    task: EditTask, spans: dict[str, list[dict[str, Any]]], record: Record
) -> Iterator[tuple[list[str], list[str]]]:
    """(doc_ids, texts without their spans) of all rows, a bounded number at a time. Removed rows have empty texts."""
    kept = task.part.kept_mask()
    start = 0
    for batch in open_document_file(task.part.path).iter_batches(BATCH_ROWS, columns=["doc_id", "text"]):
        doc_ids, texts = (column.to_pylist() for column in batch.columns)
        kept_rows = kept[start : start + len(batch)].tolist()
        start += len(batch)
        edited = []
        for doc_id, text, is_kept in zip(doc_ids, texts, kept_rows, strict=True):
            text = text if is_kept and text is not None else ""
            edited.append(_remove(doc_id, text, spans[doc_id], task, record) if is_kept and doc_id in spans else text)
        yield doc_ids, edited


def _remove(doc_id: str, text: str, rows: list[dict[str, Any]], task: EditTask, record: Record) -> str:
    spans = [(row["start"], row["stop"]) for row in rows]
    spans = in_characters(text, spans) if task.removal.in_bytes else spans
    found = [removed_span_row(doc_id, task.removal.rule, text, start, stop) for start, stop in spans]
    record.removed_spans.extend({**span, "kept_in": row["kept_in"]} for span, row in zip(found, rows, strict=True))
    left = remove_spans(text, spans)
    share = sum(span["bytes"] for span in found) / len(text.encode())
    record.left.append({"doc_id": doc_id, "share": share, "left": len(left.strip())})
    return left

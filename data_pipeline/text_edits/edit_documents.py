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
from gristmill.data_pipeline.ledger.document_file import DocumentFile, open_document_file, unpacked_ids
from gristmill.data_pipeline.ledger.removed_spans import REMOVED_SPANS, complement, removed_span_row, sorted_spans
from gristmill.foundation.checksum_files import sealed_path
from gristmill.foundation.engine.engine import Engine
from gristmill.foundation.files import file_digest
from gristmill.foundation.shuffle import Shuffle

EDITED_ROWS = 1024  # documents in memory at a time as Python strings
EDITED_TEXTS = pa.schema([("doc_id", pa.string()), ("text", pa.string())])
# row: of the document in its file. share: of the document's bytes that the spans hold. left: characters that remain,
# without white space at the ends.
REMAINING = pa.schema([("doc_id", pa.string()), ("row", pa.int64()), ("share", pa.float64()), ("left", pa.int64())])


@dataclass(frozen=True)
class EditedFile:
    """document_files: row for row the files given; a file without spans is the file given. span_files: by file, its
    REMOVED_SPANS. left: rows of REMAINING with `file`, the file's number, one for each document that had spans, ordered
    by file and row."""

    document_files: list[DocumentFile]
    span_files: list[Path]
    left: pa.Table

    @property
    def removed_spans(self) -> pa.Table:
        """The removed spans of all document files, in memory."""
        return sorted_spans([pq.read_table(path, schema=REMOVED_SPANS) for path in self.span_files])


@dataclass(frozen=True)
class SpanRemoval:
    """rule: recorded with every span. in_bytes: spans are bytes of UTF-8, not characters. is_applied: False records
    the spans and leaves the texts as they are."""

    rule: str
    in_bytes: bool = False
    is_applied: bool = True


@dataclass(frozen=True)
class EditTask:
    document_file: DocumentFile
    spans: Path | Shuffle
    number: int
    removal: SpanRemoval
    path: Path

    @property
    def removed_spans(self) -> Path:
        return self.path.with_suffix(".removed.parquet")

    @property
    def left(self) -> Path:
        return self.path.with_suffix(".left.parquet")


def edit_document_files(
    document_files: Sequence[DocumentFile],
    spans: pa.Table | Shuffle,
    removal: SpanRemoval,
    engine: Engine,
    folder: Path,
) -> EditedFile:
    """The files without the spans; if not removal.is_applied, the texts stay and the spans are only recorded.

    spans: columns doc_id, start, stop (characters, or bytes of UTF-8), kept_in, as `repeated_substrings` returns them,
    or records with a range a document file, as `find_duplicate_spans` does; spans of a document are disjoint. Texts of
    removed rows are left out. Files are in `folder`; called again with the same arguments after a kill, it resumes from
    them."""
    table = None if isinstance(spans, Shuffle) else _ordered(spans)
    open_workspace(
        folder,
        {
            **asdict(removal),
            "document_files": [document_file_identity(document_file) for document_file in document_files],
            "spans": [file_digest(path) for path in spans.paths()] if table is None else _digest(table),
        },
    )
    held: Path | Shuffle = spans if isinstance(spans, Shuffle) else folder / "spans.parquet"
    if table is not None and not (folder / "spans.parquet").exists():
        with sealed_path(folder / "spans.parquet") as temporary:
            pq.write_table(table, temporary, compression="zstd")
    tasks = [
        EditTask(document_file, held, number, removal, folder / f"part-{number:05d}.parquet")
        for number, document_file in enumerate(document_files)
    ]
    missing = [task for task in tasks if not task.left.exists()]
    engine.map(_edit_file, missing, "remove spans", [task.document_file.bytes for task in missing], "B")
    tables = [pq.read_table(task.left, schema=REMAINING) for task in tasks]
    numbers = np.repeat(np.arange(len(tables), dtype=np.int32), [len(table) for table in tables])
    left = pa.concat_tables([REMAINING.empty_table(), *tables]).append_column("file", pa.array(numbers))
    return EditedFile(
        [
            DocumentFile(t.path, t.document_file.source, t.document_file.priority, t.document_file.kept)
            if t.path.exists()
            else t.document_file
            for t in tasks
        ],
        [task.removed_spans for task in tasks],
        left.combine_chunks(),
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


def _ordered(spans: pa.Table) -> pa.Table:
    return spans.select(["doc_id", "start", "stop", "kept_in"]).sort_by(
        [("doc_id", "ascending"), ("start", "ascending")]
    )


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
    """The spans of each document of the file that has any."""
    if isinstance(task.spans, Shuffle):
        records = task.spans.read(task.number)
        records = records[np.lexsort((records["start"], records["id"][:, 1], records["id"][:, 0]))]
        ids, kept = (unpacked_ids(records[name]).to_pylist() for name in ("id", "kept_in"))
        columns = zip(ids, records["start"].tolist(), records["stop"].tolist(), kept, strict=True)
        rows = [dict(zip(("doc_id", "start", "stop", "kept_in"), row, strict=True)) for row in columns]
        return {doc_id: list(group) for doc_id, group in groupby(rows, key=itemgetter("doc_id"))}
    ids = open_document_file(task.document_file.path).read(columns=["doc_id"]).column("doc_id")
    spans = pq.read_table(task.spans)
    mine = spans.filter(pc.is_in(spans.column("doc_id"), value_set=ids.combine_chunks())).to_pylist()
    return {doc_id: list(rows) for doc_id, rows in groupby(mine, key=itemgetter("doc_id"))}


def _edited_batches(
    task: EditTask, spans: dict[str, list[dict[str, Any]]], record: Record
) -> Iterator[tuple[list[str], list[str]]]:
    """(doc_ids, texts without their spans) of all rows, a bounded number at a time. Removed rows have empty texts."""
    kept = task.document_file.kept_mask()
    start = 0
    for batch in open_document_file(task.document_file.path).iter_batches(EDITED_ROWS, columns=["doc_id", "text"]):
        doc_ids, texts = (column.to_pylist() for column in batch.columns)
        edited = []
        for row, (doc_id, text) in enumerate(zip(doc_ids, texts, strict=True), start):
            text = text if kept[row] and text is not None else ""
            if kept[row] and doc_id in spans:
                left, share = _remove(doc_id, text, spans[doc_id], task, record)
                record.left.append({"doc_id": doc_id, "row": row, "share": share, "left": len(left.strip())})
                text = left
            edited.append(text)
        start += len(batch)
        yield doc_ids, edited


def _remove(doc_id: str, text: str, rows: list[dict[str, Any]], task: EditTask, record: Record) -> tuple[str, float]:
    """(the text without its spans, the share of its bytes that they held)."""
    spans = [(row["start"], row["stop"]) for row in rows]
    spans = in_characters(text, spans) if task.removal.in_bytes else spans
    found = [removed_span_row(doc_id, task.removal.rule, text, start, stop) for start, stop in spans]
    record.removed_spans.extend({**span, "kept_in": row["kept_in"]} for span, row in zip(found, rows, strict=True))
    return remove_spans(text, spans), sum(span["bytes"] for span in found) / len(text.encode())

"""Removes spans from the texts of document files, and records every removed span."""

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import groupby
from operator import itemgetter
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from gristmill.data_pipeline.ledger.document_file import (
    DocumentFile,
    document_file_identity,
    open_document_file,
    open_workspace,
    unpacked_ids,
)
from gristmill.data_pipeline.ledger.removal_step import (
    REMOVED_SPANS,
    StoredRemovals,
    complement,
    removed_dtype,
    removed_span_row,
    sorted_spans,
    write_removed,
)
from gristmill.foundation.checksums import checksummed_path
from gristmill.foundation.files import file_digest
from gristmill.foundation.runtime.tasks.engine import Engine, LazySequence
from gristmill.foundation.runtime.tasks.task_files import PartitionedFiles

EDITED_ROWS = 1024  # documents in memory at a time as Python strings
EDITED_TEXTS = pa.schema([("doc_id", pa.string()), ("text", pa.string())])


@dataclass(frozen=True)
class EditedFile:
    """document_files: row for row the files given; a file without spans is the file given. span_files: by file, its
    REMOVED_SPANS. removals: the documents that the edit leaves nothing of, or that hold too many spans."""

    document_files: Sequence[DocumentFile]
    span_files: Sequence[Path]
    removals: StoredRemovals

    @property
    def removed_spans(self) -> pa.Table:
        """The removed spans of all document files, in memory."""
        return sorted_spans([pq.read_table(path, schema=REMOVED_SPANS) for path in self.span_files])


@dataclass(frozen=True)
class SpanRemoval:
    """step, reason: of the rule STEP.REASON that is recorded with every span. in_bytes: spans are bytes of UTF-8, not
    characters. is_applied: spans are removed, and with them documents of which only white space is left; otherwise
    spans are recorded and texts stay. drop_share: removes documents of whose bytes the spans hold more than this."""

    step: str
    reason: str
    in_bytes: bool = False
    is_applied: bool = True
    drop_share: float | None = None

    @property
    def rule(self) -> str:
        return f"{self.step}.{self.reason}"

    def removals(self, removed: PartitionedFiles) -> StoredRemovals:
        reason, threshold = ("nothing_left", 1.0) if self.drop_share is None else ("drop_share", self.drop_share)
        return StoredRemovals(self.step, threshold, removed, (reason,), is_by_part=True)

    def value_of_removed(self, share: float, left: str) -> float | None:
        """Recorded value of a document that is removed; None for one that stays. share: of its bytes that the spans
        hold. left: its text without them."""
        if self.drop_share is not None:
            return share if share > self.drop_share else None
        return 0.0 if self.is_applied and not left.strip() else None


@dataclass(frozen=True)
class EditTask:
    """number: of the document file. removed: takes the documents that the edit removes; its part is written last."""

    document_file: DocumentFile
    spans: PartitionedFiles
    number: int
    removal: SpanRemoval
    path: Path
    removed: PartitionedFiles

    @property
    def removed_spans(self) -> Path:
        return _removed_spans(self.path)


def _removed_spans(path: Path) -> Path:
    """File of the spans that were removed from the texts of this file."""
    return path.with_suffix(".removed.parquet")


def edit_document_files(
    document_files: Sequence[DocumentFile],
    spans: PartitionedFiles,
    removal: SpanRemoval,
    engine: Engine,
    folder: Path,
) -> EditedFile:
    """The files without the spans; if not removal.is_applied, the texts stay and the spans are only recorded.

    spans: records with a range a document file and the fields id, start, stop (characters, or bytes of UTF-8) and
    kept_in; spans of a document are disjoint. Texts of removed rows are left out. This process holds nothing of a
    document. Files are in `folder`; called again with the same arguments after a kill, it resumes from them."""
    identities = [document_file_identity(document_file) for document_file in document_files]
    digests = [file_digest(path) for path in spans.paths()]
    open_workspace(folder, {**asdict(removal), "document_files": identities, "spans": digests})
    removed = PartitionedFiles(folder / "removed", removed_dtype("row", "value"), len(document_files), 1)

    numbers = range(len(document_files))
    paths = LazySequence(lambda number: folder / f"part-{number:05d}.parquet", numbers)

    def task(number: int) -> EditTask:
        return EditTask(document_files[number], spans, number, removal, paths[number], removed)

    missing = [number for number in numbers if not removed.has(number)]
    sizes = [document_files[number].bytes for number in missing]
    engine.map(_edit_file, LazySequence(task, missing), "remove spans", sizes, "B")
    is_edited = bytes(path.exists() for path in paths)

    def edited(number: int) -> DocumentFile:
        document_file = document_files[number]
        return replace(document_file, path=paths[number]) if is_edited[number] else document_file

    span_files = LazySequence(lambda number: _removed_spans(paths[number]), numbers)
    return EditedFile(LazySequence(edited, numbers), span_files, removal.removals(removed))


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


def _edit_file(task: EditTask) -> None:
    """Three files: the texts (if any changes), the removed spans and, last, the removed documents."""
    spans = _spans_of(task)
    record = EditLog([], [], [])
    if spans and task.removal.is_applied:
        with (
            checksummed_path(task.path) as temporary,
            pq.ParquetWriter(temporary, EDITED_TEXTS, compression="zstd") as writer,
        ):
            for doc_ids, texts in _edited_batches(task, spans, record):
                writer.write_table(pa.table([pa.array(doc_ids), pa.array(texts, pa.string())], schema=EDITED_TEXTS))
    elif spans:
        for _ in _edited_batches(task, spans, record):
            pass
    with checksummed_path(task.removed_spans) as temporary:
        pq.write_table(pa.Table.from_pylist(record.removed_spans, schema=REMOVED_SPANS), temporary, compression="zstd")
    columns = {"row": np.array(record.rows, np.int64), "value": np.array(record.values, np.float64)}
    write_removed(task.removed, task.number, **columns)


@dataclass(frozen=True)
class EditLog:
    """Rows of REMOVED_SPANS, and rows and values of the removed documents, filled document by document."""

    removed_spans: list[dict[str, Any]]
    rows: list[int]
    values: list[float]


def _spans_of(task: EditTask) -> dict[str, list[dict[str, Any]]]:
    """The spans of each document of the file that has any."""
    records = task.spans.read(task.number)
    records = records[np.lexsort((records["start"], records["id"][:, 1], records["id"][:, 0]))]
    ids, kept = (unpacked_ids(records[name]).to_pylist() for name in ("id", "kept_in"))
    columns = zip(ids, records["start"].tolist(), records["stop"].tolist(), kept, strict=True)
    rows = [dict(zip(("doc_id", "start", "stop", "kept_in"), row, strict=True)) for row in columns]
    return {doc_id: list(group) for doc_id, group in groupby(rows, key=itemgetter("doc_id"))}


def _edited_batches(
    task: EditTask, spans: dict[str, list[dict[str, Any]]], record: EditLog
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
                if (value := task.removal.value_of_removed(share, left)) is not None:
                    record.rows.append(row)
                    record.values.append(value)
                text = left
            edited.append(text)
        start += len(batch)
        yield doc_ids, edited


def _remove(doc_id: str, text: str, rows: list[dict[str, Any]], task: EditTask, record: EditLog) -> tuple[str, float]:
    """(the text without its spans, the share of its bytes that they held)."""
    spans = [(row["start"], row["stop"]) for row in rows]
    spans = in_characters(text, spans) if task.removal.in_bytes else spans
    span_rows = [removed_span_row(doc_id, task.removal.rule, text, start, stop) for start, stop in spans]
    record.removed_spans.extend({**span, "kept_in": row["kept_in"]} for span, row in zip(span_rows, rows, strict=True))
    return remove_spans(text, spans), sum(span["bytes"] for span in span_rows) / len(text.encode())

"""Parts with spans cut out of their texts, and the spans on record: what stands between two steps that cut."""

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from operator import itemgetter
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from gristmill.data_pipeline.dedup.arrays import claim, part_identity
from gristmill.data_pipeline.ledger.document_file import BATCH_ROWS, DocumentFile, open_document_file
from gristmill.data_pipeline.ledger.removed_spans import CUTS, complement, cut_row, in_order
from gristmill.foundation.checksum_files import sealed_path
from gristmill.foundation.engine.local import LocalEngine

REWRITTEN = pa.schema([("doc_id", pa.string()), ("text", pa.string())])
# Of a document with spans: the share of its bytes that they hold, and the characters left without them, white space
# at the ends aside.
LEFT = pa.schema([("doc_id", pa.string()), ("share", pa.float64()), ("left", pa.int64())])


@dataclass(frozen=True)
class EditedFile:
    """parts: row for row those given; one without spans is the one given. cuts: a row a span (see CUTS).
    left: a row a document that had spans (see LEFT), ordered by doc_id."""

    parts: list[DocumentFile]
    cuts: pa.Table
    left: pa.Table


@dataclass(frozen=True)
class EditTask:
    part: DocumentFile
    spans: Path
    rule: str
    in_bytes: bool
    is_cut: bool
    path: Path

    @property
    def cuts(self) -> Path:
        return self.path.with_suffix(".cuts.parquet")

    @property
    def left(self) -> Path:
        return self.path.with_suffix(".left.parquet")


def edit_document_files(
    parts: Sequence[DocumentFile],
    spans: pa.Table,
    rule: str,
    in_bytes: bool,
    engine: LocalEngine,
    folder: Path,
    is_cut: bool = True,
) -> EditedFile:
    """The parts with the spans cut out of their texts; if not is_cut, only the record of the spans.

    spans: columns doc_id, start, stop (characters, or bytes of UTF-8 if in_bytes), kept_in, as `duplicate_spans` and
    `repeated_substrings` give them; spans of a document are disjoint. Texts of dead rows are left out. Files stand in
    `folder`; called again with the same arguments after a kill, it goes on from them."""
    table = spans.select(["doc_id", "start", "stop", "kept_in"]).sort_by(
        [("doc_id", "ascending"), ("start", "ascending")]
    )
    settings = {"rule": rule, "in_bytes": in_bytes, "is_cut": is_cut}
    claim(folder, {**settings, "parts": [part_identity(part) for part in parts], "spans": _digest(table)})
    spans_file = folder / "spans.parquet"
    if not spans_file.exists():
        with sealed_path(spans_file) as temporary:
            pq.write_table(table, temporary, compression="zstd")
    tasks = [
        EditTask(part, spans_file, rule, in_bytes, is_cut, folder / f"part-{number:05d}.parquet")
        for number, part in enumerate(parts)
    ]
    missing = [task for task in tasks if not task.left.exists()]
    engine.map(_rewrite_part, missing, "cutting spans", [task.part.bytes for task in missing], "B")
    left = pa.concat_tables([LEFT.empty_table(), *(pq.read_table(task.left, schema=LEFT) for task in tasks)])
    return EditedFile(
        [
            DocumentFile(t.path, t.part.source, t.part.priority, t.part.alive) if t.path.exists() else t.part
            for t in tasks
        ],
        in_order([pq.read_table(task.cuts, schema=CUTS) for task in tasks]),
        left.sort_by("doc_id").combine_chunks(),
    )


def without(text: str, spans: Sequence[tuple[int, int]]) -> str:
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


def _rewrite_part(task: EditTask) -> None:
    """Three files: the texts (if any changes), the cuts and, last, what is left."""
    spans = _spans_of(task)
    record = Record([], [])
    if spans and task.is_cut:
        with sealed_path(task.path) as temporary, pq.ParquetWriter(temporary, REWRITTEN, compression="zstd") as writer:
            for doc_ids, texts in _rewritten(task, spans, record):
                writer.write_table(pa.table([pa.array(doc_ids), pa.array(texts, pa.string())], schema=REWRITTEN))
    elif spans:
        for _ in _rewritten(task, spans, record):
            pass
    for path, rows, schema in ((task.cuts, record.cuts, CUTS), (task.left, record.left, LEFT)):
        with sealed_path(path) as temporary:
            pq.write_table(pa.Table.from_pylist(rows, schema=schema), temporary, compression="zstd")


@dataclass(frozen=True)
class Record:
    """Rows of CUTS and of LEFT, filled document by document."""

    cuts: list[dict[str, Any]]
    left: list[dict[str, Any]]


def _spans_of(task: EditTask) -> dict[str, list[dict[str, Any]]]:
    """The spans of each document of the part that has any."""
    ids = open_document_file(task.part.path).read(columns=["doc_id"]).column("doc_id")
    spans = pq.read_table(task.spans)
    mine = spans.filter(pc.is_in(spans.column("doc_id"), value_set=ids.combine_chunks())).to_pylist()
    return {doc_id: list(rows) for doc_id, rows in groupby(mine, key=itemgetter("doc_id"))}


def _rewritten(
    task: EditTask, spans: dict[str, list[dict[str, Any]]], record: Record
) -> Iterator[tuple[list[str], list[str]]]:
    """(doc_ids, texts without their spans) of all rows, a bounded number at a time; the text of a dead row is empty."""
    living = task.part.living()
    start = 0
    for batch in open_document_file(task.part.path).iter_batches(BATCH_ROWS, columns=["doc_id", "text"]):
        doc_ids, texts = (column.to_pylist() for column in batch.columns)
        alive = living[start : start + len(batch)].tolist()
        start += len(batch)
        cut = []
        for doc_id, text, lives in zip(doc_ids, texts, alive, strict=True):
            text = text if lives and text is not None else ""
            cut.append(_cut(doc_id, text, spans[doc_id], task, record) if lives and doc_id in spans else text)
        yield doc_ids, cut


def _cut(doc_id: str, text: str, rows: list[dict[str, Any]], task: EditTask, record: Record) -> str:
    spans = [(row["start"], row["stop"]) for row in rows]
    spans = in_characters(text, spans) if task.in_bytes else spans
    found = [cut_row(doc_id, task.rule, text, start, stop) for start, stop in spans]
    record.cuts.extend({**cut, "kept_in": row["kept_in"]} for cut, row in zip(found, rows, strict=True))
    left = without(text, spans)
    share = sum(cut["bytes"] for cut in found) / len(text.encode())
    record.left.append({"doc_id": doc_id, "share": share, "left": len(left.strip())})
    return left

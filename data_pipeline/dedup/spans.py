"""Duplicate paragraphs and lines: a text that occurs often in the corpus is kept once, in the first document.

As CCNet removes paragraphs and C4 three-sentence spans (Wenzek et al. 2020, section 3.1; Raffel et al. 2020, section
2.2), but counted exactly, with the first place in keep-order kept and every removed span on record."""

from array import array
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Literal

import numpy as np
import xxhash
from pydantic import Field

from gristmill.data_pipeline.dedup.folding import fold_text
from gristmill.data_pipeline.dedup.minhash import key_order, repeated_keys
from gristmill.data_pipeline.ledger.document_file import (
    DocumentFile,
    document_file_identity,
    open_workspace,
    packed_ids,
)
from gristmill.foundation.config import Config
from gristmill.foundation.runtime.tasks.engine import Engine, LazySequence
from gristmill.foundation.runtime.tasks.local import LocalEngine
from gristmill.foundation.runtime.tasks.task_files import PartitionedFiles, range_of_keys, ranges_for

PIECE = np.dtype(
    [
        ("key", "<u8", 2),  # XXH3-128 of the folded piece
        ("id", "<u8", 2),
        ("length", "<i8"),  # of the document, bytes
        ("start", "<i8"),
        ("stop", "<i8"),
        ("file", "<i4"),
        ("priority", "<i8"),
    ]
)
# A span to remove. start, stop: characters of the document's text. count: places of that text in the corpus. kept_in:
# the document with the first one.
SPAN = np.dtype(
    [
        ("file", "<i4"),
        ("id", "<u8", 2),
        ("start", "<i8"),
        ("stop", "<i8"),
        ("count", "<i8"),
        ("kept_in", "<u8", 2),
    ]
)
PIECE_BYTES = 64  # of a document file, for the number of ranges: a guess that decides memory alone


class SpanDedupConfig(Config):
    """unit: pieces are lines, or paragraphs (set apart by blank lines). min_count: places from which on a piece is
    a duplicate; 2 removes every second one. min_characters: shorter pieces (a lone brace, "Yes.") never count.
    normalization: pieces are compared as they are but for white space, or as folded words. scope: across all sources,
    or each by itself."""

    unit: Literal["paragraph", "line"] = "paragraph"
    min_count: int = Field(default=2, ge=2)
    min_characters: int = Field(default=40, ge=1)
    normalization: Literal["whitespace", "words"] = "whitespace"
    scope: Literal["all", "source"] = "all"


def find_duplicate_spans(
    document_files: Sequence[DocumentFile], config: SpanDedupConfig, engine: Engine, folder: Path
) -> PartitionedFiles:
    """Every paragraph (line) that occurs in at least min_count places, but for the first in keep-order: records of
    SPAN, a range a document file.

    Keep-order is (source priority, longer document first, doc_id), then place in the document. `edit_document_files`
    takes them out. Memory of a task: 70 bytes a piece of one document file, or of one range of the pieces' hashes;
    this process holds nothing of a piece. `folder` takes intermediate files; called again after a kill, it goes on from
    them."""
    identities = [document_file_identity(document_file) for document_file in document_files]
    open_workspace(folder, {"config": config.model_dump(), "document_files": identities})
    sizes = [document_file.bytes for document_file in document_files]
    pieces = PartitionedFiles(folder / "pieces", PIECE, len(document_files), ranges_for(int(sum(sizes)) // PIECE_BYTES))
    missing = [number for number in range(len(sizes)) if not pieces.has(number)]
    tasks = LazySequence(lambda number: (document_files[number], config, pieces, number), missing)
    engine.map(_cut_file, tasks, f"{config.unit}s", [sizes[number] for number in missing], "B")
    spans = PartitionedFiles(folder / "spans", SPAN, pieces.ranges, len(document_files))
    counts = [(pieces, config.min_count, spans, number) for number in range(pieces.ranges) if not spans.has(number)]
    (engine if pieces.ranges > 1 else LocalEngine(1, engine.reporter)).map(
        _count_range, counts, "repeats", unit="tasks"
    )
    return spans


def pieces_of(text: str, unit: Literal["paragraph", "line"]) -> list[tuple[int, int]]:
    """(start, stop) of every line with its line end, or of every paragraph with the blank lines after it.

    "a\\nb\\n\\nc": lines (0, 2), (2, 4), (5, 6); paragraphs (0, 5), (5, 6)."""
    lines, at = [], 0
    for line in text.split("\n"):
        lines.append((at, min(at + len(line) + 1, len(text)), bool(line.strip())))
        at += len(line) + 1
    if unit == "line":
        return [(start, stop) for start, stop, filled in lines if filled]
    starts = [start for i, (start, _, filled) in enumerate(lines) if filled and (i == 0 or not lines[i - 1][2])]
    return list(pairwise([*starts, len(text)]))


def _cut_file(task: tuple[DocumentFile, SpanDedupConfig, PartitionedFiles, int]) -> None:
    document_file, config, pieces, number = task
    salt = document_file.source if config.scope == "source" else ""
    batches = [np.empty(0, PIECE)]
    for _, doc_ids, texts in document_file.batches():
        ids = packed_ids(doc_ids, document_file.path)
        keys, places = bytearray(), array("q")
        for document, text in enumerate(texts.to_pylist()):
            num_bytes = len(text.encode())
            for start, stop in pieces_of(text, config.unit):
                piece = text[start:stop].strip()
                if len(piece) >= config.min_characters:
                    folded = fold_text(piece) if config.normalization == "words" else " ".join(piece.split())
                    keys += xxhash.xxh3_128_digest(f"{salt}\0{folded}".encode())
                    places.extend((document, num_bytes, start, stop))
        columns = np.array(places, np.int64).reshape(-1, 4).T
        records = np.empty(columns.shape[1], PIECE)
        records["key"] = np.frombuffer(bytes(keys), ">u8").reshape(-1, 2)
        records["id"] = ids[columns[0]]
        records["length"], records["start"], records["stop"] = columns[1:]
        records["file"], records["priority"] = number, document_file.priority
        batches.append(records)
    joined = np.concatenate(batches)
    joined = joined[key_order(np.ascontiguousarray(joined["key"][:, 0]))]
    pieces.write_sorted(number, joined, range_of_keys(joined["key"][:, 0], pieces.ranges))


def _count_range(task: tuple[PartitionedFiles, int, PartitionedFiles, int]) -> None:
    """Writes the spans to remove among the pieces of one range of the hashes."""
    pieces, min_count, spans, number = task
    repeated = pieces.read(number)
    repeated = repeated[repeated_keys(np.ascontiguousarray(repeated["key"][:, 0]))]
    keys, ids = repeated["key"], repeated["id"]
    order = (repeated["start"], ids[:, 1], ids[:, 0], -repeated["length"], repeated["priority"], keys[:, 1], keys[:, 0])
    repeated = repeated[np.lexsort(order)]
    new = np.ones(len(repeated), bool)
    new[1:] = (repeated["key"][1:] != repeated["key"][:-1]).any(axis=1)
    firsts = np.flatnonzero(new)
    group = np.cumsum(new) - 1
    counts = np.diff(np.append(firsts, len(new)))
    chosen = np.flatnonzero(~new & (counts[group] >= min_count)) if len(new) else np.empty(0, np.int64)
    records = np.empty(len(chosen), SPAN)
    for name in ("file", "id", "start", "stop"):
        records[name] = repeated[name][chosen]
    if len(chosen):
        records["count"], records["kept_in"] = counts[group[chosen]], repeated["id"][firsts[group[chosen]]]
    records = records[np.lexsort((records["start"], records["id"][:, 1], records["id"][:, 0], records["file"]))]
    spans.write_sorted(number, records, records["file"])

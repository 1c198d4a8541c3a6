"""Duplicate paragraphs and lines: a text that occurs often in the corpus is kept once, in the first document.

As CCNet removes paragraphs and C4 three-sentence spans (Wenzek et al. 2020, section 3.1; Raffel et al. 2020, section
2.2), but counted exactly, with the first place in keep-order kept and every removed span on record."""

from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Literal

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import xxhash
from pydantic import Field

from gristmill.data_pipeline.dedup.arrays import document_file_identity, load_array, open_workspace, save_array
from gristmill.data_pipeline.dedup.folding import fold_text
from gristmill.data_pipeline.ledger.document_file import DocumentFile, keep_order, packed_ids, unpacked_ids
from gristmill.foundation.checksum_files import sealed_path
from gristmill.foundation.config import Config
from gristmill.foundation.engine.engine import Engine

# start, stop: characters of the document's text. count: places of that text in the corpus. kept_in: the document
# with the first one.
DUPLICATE_SPANS = pa.schema(
    [
        ("doc_id", pa.string()),
        ("start", pa.int64()),
        ("stop", pa.int64()),
        ("count", pa.int64()),
        ("kept_in", pa.string()),
    ]
)

# Columns of a file's pieces, uint64[5, pieces]: the piece's hash, its document's place in the file, its bounds.
KEY_HIGH, KEY_LOW, DOCUMENT, START, STOP = range(5)


class SpanDedupConfig(Config):
    """unit: pieces are lines, or paragraphs (set apart by blank lines). min_count: places from which on a piece is
    a duplicate; 2 removes every second one. min_characters: shorter pieces (a lone brace, "Yes.") never count.
    normalise: pieces are compared as they are but for white space, or as folded words. scope: across all sources, or
    each by itself."""

    unit: Literal["paragraph", "line"] = "paragraph"
    min_count: int = Field(default=2, ge=2)
    min_characters: int = Field(default=40, ge=1)
    normalise: Literal["whitespace", "words"] = "whitespace"
    scope: Literal["all", "source"] = "all"


def duplicate_spans(
    document_files: Sequence[DocumentFile], config: SpanDedupConfig, engine: Engine, folder: Path
) -> pa.Table:
    """Every paragraph (line) that occurs in at least min_count places, but for the first in keep-order.

    Columns doc_id, start, stop (characters), count, kept_in; ordered by doc_id, start. Keep-order is (source
    priority, longer document first, doc_id), then place in the document. `edit_documents` takes them out. Memory: 100
    bytes a piece. `folder` takes intermediate files; called again after a kill, it goes on from them."""
    open_workspace(
        folder,
        {
            "config": config.model_dump(),
            "document_files": [document_file_identity(document_file) for document_file in document_files],
        },
    )
    tasks = [
        (document_file, config, folder / f"pieces-{number:05d}") for number, document_file in enumerate(document_files)
    ]
    missing = [task for task in tasks if not _ids_file(task[2]).exists()]
    engine.map(_cut_file, missing, f"{config.unit}s", [task[0].bytes for task in missing], "B")
    ids, lengths, priorities, pieces = _read(tasks)
    rank = np.empty(len(ids), np.int64)
    rank[keep_order(priorities, lengths, ids)] = np.arange(len(ids))
    pieces = pieces[:, np.lexsort((pieces[START], rank[pieces[DOCUMENT]], pieces[KEY_LOW], pieces[KEY_HIGH]))]
    return _table(pieces, ids, config.min_count)


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


def _ids_file(prefix: Path) -> Path:
    return prefix.with_suffix(".parquet")


def _cut_file(task: tuple[DocumentFile, SpanDedupConfig, Path]) -> None:
    document_file, config, prefix = task
    salt = document_file.source if config.scope == "source" else ""
    ids: list[str] = []
    lengths: list[int] = []
    rows = bytearray()
    for _, doc_ids, texts in document_file.batches():
        packed_ids(doc_ids, document_file.path)
        for doc_id, text in zip(doc_ids.to_pylist(), texts.to_pylist(), strict=True):
            for start, stop in pieces_of(text, config.unit):
                piece = text[start:stop].strip()
                if len(piece) >= config.min_characters:
                    folded = fold_text(piece) if config.normalise == "words" else " ".join(piece.split())
                    rows += xxhash.xxh3_128_digest(f"{salt}\0{folded}".encode())
                    rows += np.array([len(ids), start, stop], ">u8").tobytes()
            ids.append(doc_id)
            lengths.append(len(text.encode()))
    save_array(prefix.with_suffix(".npy"), np.frombuffer(bytes(rows), ">u8").astype(np.uint64).reshape(-1, 5).T)
    _write_ids(_ids_file(prefix), ids, lengths)


def _write_ids(path: Path, ids: list[str], lengths: list[int]) -> None:
    with sealed_path(path) as temporary:
        pq.write_table(pa.table({"doc_id": pa.array(ids, pa.string()), "length": lengths}), temporary)


def _read(tasks) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """(packed ids, lengths and priorities of all documents, pieces of all with their documents numbered through)."""
    ids, lengths, priorities, pieces = [np.empty((0, 2), np.uint64)], [], [], []
    for document_file, _, prefix in tasks:
        table = pq.read_table(_ids_file(prefix))
        mine = load_array(prefix.with_suffix(".npy"))
        mine[DOCUMENT] += np.uint64(sum(map(len, ids)))
        pieces.append(mine)
        ids.append(packed_ids(table.column("doc_id"), document_file.path))
        lengths.append(table.column("length").to_numpy())
        priorities.append(np.full(len(table), document_file.priority, np.int64))
    length, priority = (np.concatenate([np.empty(0, np.int64), *columns]) for columns in (lengths, priorities))
    return np.concatenate(ids), length, priority, np.concatenate([np.empty((5, 0), np.uint64), *pieces], axis=1)


def _table(pieces: np.ndarray, ids: np.ndarray, min_count: int) -> pa.Table:
    """pieces ordered by key, then keep-order."""
    new = np.ones(pieces.shape[1], bool)
    new[1:] = (pieces[:2, 1:] != pieces[:2, :-1]).any(axis=0)
    firsts = np.flatnonzero(new)
    group = np.cumsum(new) - 1
    counts = np.diff(np.append(firsts, len(new)))
    found = np.flatnonzero(~new & (counts[group] >= min_count)) if len(new) else np.empty(0, np.int64)
    owners = ids[pieces[DOCUMENT, found].astype(np.int64)]
    keepers = ids[pieces[DOCUMENT, firsts[group[found]]].astype(np.int64)] if len(found) else owners
    order = np.lexsort((pieces[START, found], owners[:, 1], owners[:, 0]))
    columns = [
        unpacked_ids(owners[order]),
        pieces[START, found][order].astype(np.int64),
        pieces[STOP, found][order].astype(np.int64),
        counts[group[found]][order] if len(found) else [],
        unpacked_ids(keepers[order]),
    ]
    return pa.table(
        [pa.array(c, f.type) for c, f in zip(columns, DUPLICATE_SPANS, strict=True)], schema=DUPLICATE_SPANS
    )

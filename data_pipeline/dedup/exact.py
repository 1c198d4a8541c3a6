"""Exact duplicates: documents whose normalised texts are the same."""

from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Literal

import numpy as np
import pyarrow as pa
import xxhash

from gristmill.data_pipeline.dedup.arrays import document_file_identity, load_array, open_workspace, save_array
from gristmill.data_pipeline.dedup.folding import fold_texts
from gristmill.data_pipeline.ledger.document_file import DocumentFile, keep_order, packed_ids, unpacked_ids, utf8_of
from gristmill.foundation.config import Config
from gristmill.foundation.engine.local import LocalEngine

DUPLICATES = pa.schema([("doc_id", pa.string()), ("duplicate_of", pa.string()), ("similarity", pa.float64())])

# Columns of a part's hashes, uint64[5, documents].
ID_HIGH, ID_LOW, KEY_HIGH, KEY_LOW, LENGTH = range(5)


class ExactDedupConfig(Config):
    """scope: one pool for all sources, or each source by itself.

    normalise: what counts as the same text: `bytes` (every byte), `whitespace` (runs of white space are one space,
    none at the ends) or `words` (the folded words of `folding.py`: case and punctuation do not count, so that two
    programs that differ in an operator would be the same)."""

    scope: Literal["all", "source"] = "all"
    normalise: Literal["bytes", "whitespace", "words"] = "whitespace"


def exact_duplicates(
    parts: Sequence[DocumentFile], config: ExactDedupConfig, engine: LocalEngine, folder: Path
) -> pa.Table:
    """Every kept document that is not the first of its equals, with that first one.

    Columns doc_id, duplicate_of, similarity (1.0); sorted by doc_id. `duplicate_of` is never itself in `doc_id`.
    First means (source priority, longer first, doc_id), so the result does not depend on files, order or workers.
    Texts are compared by 128 bits of XXH3. Memory: 100 bytes a document.
    `folder` takes intermediate files; called again with the same arguments after a kill, it goes on from them."""
    open_workspace(folder, {"config": config.model_dump(), "parts": [document_file_identity(part) for part in parts]})
    files = [folder / f"hashes-{number:05d}.npy" for number in range(len(parts))]
    tasks = [(part, config, file) for part, file in zip(parts, files, strict=True) if not file.exists()]
    engine.map(_hash_part, tasks, "exact duplicates", [task[0].bytes for task in tasks], "B")
    hashed = [load_array(file) for file in files]
    joined = np.concatenate([np.empty((5, 0), np.uint64), *hashed], axis=1)
    priorities = np.repeat(np.array([p.priority for p in parts], np.int64), [h.shape[1] for h in hashed])
    ids = joined[[ID_HIGH, ID_LOW]].T
    order = keep_order(priorities, joined[LENGTH].astype(np.int64), ids)
    removed, kept = _equals(joined[KEY_HIGH][order], joined[KEY_LOW][order])
    return _table(ids[order[removed]], ids[order[kept]])


def _hash_part(task: tuple[DocumentFile, ExactDedupConfig, Path]) -> None:
    part, config, path = task
    salt = part.source.encode() if config.scope == "source" else b""
    found = [np.empty((5, 0), np.uint64)]
    for _, doc_ids, texts in part.batches():
        data, offsets = utf8_of(texts)
        keys = np.frombuffer(_keys(data, offsets, config.normalise, salt), ">u8").reshape(-1, 2).T
        ids = packed_ids(doc_ids, part.path).T
        found.append(np.concatenate([ids, keys.astype(np.uint64), np.diff(offsets).astype(np.uint64)[None]]))
    save_array(path, np.concatenate(found, axis=1))


def _keys(data: np.ndarray, offsets: np.ndarray, normalise: str, salt: bytes) -> bytes:
    """XXH3-128 of (salt, NUL, normalised text) of every text, one after the other."""
    if normalise != "bytes":
        data, offsets = fold_texts(data, offsets, "space" if normalise == "whitespace" else "word")
    seen = memoryview(data.data)
    start = xxhash.xxh3_128(salt + b"\0")
    keys = bytearray()
    for first, last in pairwise(offsets.tolist()):
        hasher = start.copy()
        hasher.update(seen[first:last])
        keys += hasher.digest()
    return bytes(keys)


def _equals(high: np.ndarray, low: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """(removed, kept): the index of every key that came before, and that of its first. Keys 7 5 7 -> ([2], [0])."""
    order = np.lexsort((low, high))  # stable: equals stay in their order
    new = np.ones(len(order), bool)
    new[1:] = (high[order][1:] != high[order][:-1]) | (low[order][1:] != low[order][:-1])
    firsts = order[np.flatnonzero(new)[np.cumsum(new) - 1]] if len(order) else order
    return order[~new], firsts[~new]


def _table(removed: np.ndarray, kept: np.ndarray) -> pa.Table:
    by_id = np.lexsort((removed[:, 1], removed[:, 0]))
    columns = [unpacked_ids(removed[by_id]), unpacked_ids(kept[by_id]), [1.0] * len(removed)]
    return pa.table([pa.array(c, f.type) for c, f in zip(columns, DUPLICATES, strict=True)], schema=DUPLICATES)

"""Exact duplicates: documents whose normalised texts are the same."""

from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Literal

import numpy as np
import pyarrow as pa
from xxhash import xxh3_64_intdigest, xxh3_128_digest

from gristmill.data_pipeline.dedup.arrays import document_file_identity, load_array, open_workspace, save_array
from gristmill.data_pipeline.dedup.duplicates import Duplicates
from gristmill.data_pipeline.dedup.folding import fold_texts
from gristmill.data_pipeline.dedup.lsh import repeated_keys
from gristmill.data_pipeline.ledger.document_file import DocumentFile, keep_order, packed_ids, utf8_of
from gristmill.foundation.config import Config
from gristmill.foundation.engine.engine import Engine

# Columns of a document file's hashes, uint64[5, documents].
ID_HIGH, ID_LOW, KEY_HIGH, KEY_LOW, LENGTH = range(5)


class ExactDedupConfig(Config):
    """scope: one pool for all sources, or each source by itself.

    normalise: what counts as the same text: `bytes` (every byte), `whitespace` (runs of white space are one space,
    none at the ends) or `words` (the folded words of `folding.py`: case and punctuation do not count, so that two
    programs that differ in an operator would be the same)."""

    scope: Literal["all", "source"] = "all"
    normalise: Literal["bytes", "whitespace", "words"] = "whitespace"


def exact_duplicates(
    document_files: Sequence[DocumentFile], config: ExactDedupConfig, engine: Engine, folder: Path
) -> pa.Table:
    """The table of `find_exact_duplicates`: doc_id, duplicate_of, similarity (1.0); sorted by doc_id."""
    return find_exact_duplicates(document_files, config, engine, folder).table()


def find_exact_duplicates(
    document_files: Sequence[DocumentFile], config: ExactDedupConfig, engine: Engine, folder: Path
) -> Duplicates:
    """Every kept document that is not the first of its equals, with that first one.

    `duplicate_of` is never itself removed.
    First means (source priority, longer first, doc_id), so the result does not depend on files, order or workers.
    Texts are compared by 128 bits of XXH3. Memory: 12 bytes a document, and 100 for each that has an equal.
    `folder` takes intermediate files; called again with the same arguments after a kill, it goes on from them."""
    open_workspace(
        folder,
        {
            "config": config.model_dump(),
            "document_files": [document_file_identity(document_file) for document_file in document_files],
        },
    )
    files = [folder / f"hashes-{number:05d}.npy" for number in range(len(document_files))]
    tasks = [
        (document_file, config, file)
        for document_file, file in zip(document_files, files, strict=True)
        if not file.exists()
    ]
    engine.map(_hash_file, tasks, "exact duplicates", [task[0].bytes for task in tasks], "B")
    hashed = [load_array(file, mapped=True) for file in files]
    chosen = repeated_keys(np.concatenate([np.empty(0, np.uint64), *(one[KEY_HIGH] for one in hashed)]))
    starts = np.cumsum([0, *(one.shape[1] for one in hashed)])
    columns = _chosen_columns(hashed, starts, chosen)
    owners = np.searchsorted(starts, chosen, side="right") - 1
    priorities = np.array([document_file.priority for document_file in document_files], np.int64)[owners]
    ids = columns[[ID_HIGH, ID_LOW]].T
    order = keep_order(priorities, columns[LENGTH].astype(np.int64), ids)
    removed, kept = (order[places] for places in _equals(columns[KEY_HIGH][order], columns[KEY_LOW][order]))
    files_of, rows = _file_rows(document_files, owners[removed], chosen[removed] - starts[owners[removed]])
    return Duplicates(files_of, rows, ids[removed], ids[kept], np.ones(len(removed)))


def _chosen_columns(hashed: Sequence[np.ndarray], starts: np.ndarray, chosen: np.ndarray) -> np.ndarray:
    """uint64[5, chosen]: the columns of these positions among all documents. starts: of each document file."""
    columns = [np.empty((5, 0), np.uint64)]
    for one, start in zip(hashed, starts[:-1], strict=True):
        first, last = np.searchsorted(chosen, [start, start + one.shape[1]])
        columns.append(one[:, chosen[first:last] - start])
    return np.concatenate(columns, axis=1)


def _file_rows(
    document_files: Sequence[DocumentFile], owners: np.ndarray, places: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """(number of the file int32, row int64) of the places-th kept document of each document file."""
    rows = np.empty(len(owners), np.int64)
    for number in np.unique(owners).tolist():
        mine = owners == number
        rows[mine] = np.flatnonzero(document_files[number].kept_mask())[places[mine]]
    return owners.astype(np.int32), rows


def _hash_file(task: tuple[DocumentFile, ExactDedupConfig, Path]) -> None:
    document_file, config, path = task
    seed = xxh3_64_intdigest(document_file.source.encode()) if config.scope == "source" else 0
    found = [np.empty((5, 0), np.uint64)]
    for _, doc_ids, texts in document_file.batches():
        data, offsets = utf8_of(texts)
        keys = np.frombuffer(_keys(data, offsets, config.normalise, seed), ">u8").reshape(-1, 2).T
        ids = packed_ids(doc_ids, document_file.path).T
        found.append(np.concatenate([ids, keys.astype(np.uint64), np.diff(offsets).astype(np.uint64)[None]]))
    save_array(path, np.concatenate(found, axis=1))


def _keys(data: np.ndarray, offsets: np.ndarray, normalise: str, seed: int) -> bytes:
    """XXH3-128 with this seed of every normalised text, one after the other."""
    if normalise != "bytes":
        data, offsets = fold_texts(data, offsets, "space" if normalise == "whitespace" else "word")
    seen = memoryview(data.data)
    return b"".join([xxh3_128_digest(seen[first:last], seed) for first, last in pairwise(offsets.tolist())])


def _equals(high: np.ndarray, low: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """(removed, kept): the index of every key that came before, and that of its first. Keys 7 5 7 -> ([2], [0])."""
    order = np.lexsort((low, high))  # stable: equals stay in their order
    new = np.ones(len(order), bool)
    new[1:] = (high[order][1:] != high[order][:-1]) | (low[order][1:] != low[order][:-1])
    firsts = order[np.flatnonzero(new)[np.cumsum(new) - 1]] if len(order) else order
    return order[~new], firsts[~new]

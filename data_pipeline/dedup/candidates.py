"""Candidates: which documents share a bucket in any band, found one band at a time."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa
import xxhash

from gristmill.data_pipeline.dedup.arrays import load_array, save_array
from gristmill.data_pipeline.dedup.lsh import band_keys, buckets, find_roots, union_buckets
from gristmill.data_pipeline.dedup.signatures import SignatureStore
from gristmill.data_pipeline.ledger.document_file import keep_order, packed_ids, unpacked_ids
from gristmill.foundation.engine.local import LocalEngine
from gristmill.foundation.errors import InputError

# Documents whose band keys are computed at a time: 32 MB of signatures of 128 hashes.
BLOCK_DOCUMENTS = 65536


# Documents from which on starting worker processes pays for keys and buckets: one band of them is sorted in 0.1 s.
POOL_DOCUMENTS = 1_000_000


@dataclass(frozen=True)
class Documents:
    """All documents in keep-order; a document's index here is its rank. About 50 bytes a document.

    ids: uint64[documents, 2]. part: which part, row: which row of that part's file. position: which one of all
    documents as they stand in the stores, one store after the other. protected: kept, whatever they resemble."""

    ids: np.ndarray
    part: np.ndarray
    row: np.ndarray
    shingles: np.ndarray
    position: np.ndarray
    protected: np.ndarray


def documents_in_keep_order(stores: Sequence[tuple[SignatureStore, bool]]) -> Documents:
    """The documents of all stores; those of a store marked True are protected and come first.

    Raises InputError if a document occurs twice."""
    tables: list[tuple[pa.Table, Path]] = []
    parts: list[np.ndarray] = []
    priorities: list[np.ndarray] = []
    protected: list[np.ndarray] = []
    for store, is_protected in stores:
        for number, stored in enumerate(store.parts):
            table = store.documents(number)
            parts.append(np.full(len(table), len(tables), np.int32))
            priorities.append(np.full(len(table), stored.priority, np.int64))
            protected.append(np.full(len(table), is_protected))
            tables.append((table, store.folder))
    ids = np.concatenate(
        [packed_ids(t.column("doc_id"), folder) for t, folder in tables] or [np.empty((0, 2), np.uint64)]
    )
    row, length, shingles = (_column([t for t, _ in tables], name) for name in ("row", "length", "shingles"))
    part, priority, shield = (_joined(arrays) for arrays in (parts, priorities, protected))
    order = keep_order(np.where(shield, np.iinfo(np.int64).min, priority), length, ids)
    _refuse_twins(ids)
    return Documents(ids[order], part[order], row[order], shingles[order], order, shield[order].astype(bool))


def _column(tables: list[pa.Table], name: str) -> np.ndarray:
    return _joined([table.column(name).to_numpy() for table in tables])


def _joined(arrays: list[np.ndarray]) -> np.ndarray:
    return np.concatenate(arrays) if arrays else np.empty(0, np.int64)


def _refuse_twins(ids: np.ndarray) -> None:
    order = np.lexsort((ids[:, 1], ids[:, 0]))
    twins = np.flatnonzero((ids[order][1:] == ids[order][:-1]).all(axis=1))
    if len(twins):
        doc_id = unpacked_ids(ids[order[twins[:1]]])[0]
        raise InputError(f"document {doc_id} is given twice; hand each document over once")


def write_band_keys(
    stores: Sequence[SignatureStore], bands: int, rows: int, by_source: bool, engine: LocalEngine, folder: Path
) -> list[Path]:
    """One file a part: uint64[bands, documents]. by_source: documents of two sources never share a key."""
    tasks: list[tuple[SignatureStore, int, int, int, int, Path]] = []
    for store in stores:
        for number, part in enumerate(store.parts):
            salt = xxhash.xxh3_64_intdigest(part.source.encode()) if by_source else 0
            tasks.append((store, number, bands, rows, salt, folder / f"keys-{len(tasks):05d}.npy"))
    missing = [task for task in tasks if not task[-1].exists()]
    sizes = [store.parts[number].documents for store, number, *_ in missing]
    _sized(engine, sum(sizes)).map(_write_keys, missing, "band keys", sizes, "documents")
    return [task[-1] for task in tasks]


def _sized(engine: LocalEngine, num_documents: int) -> LocalEngine:
    return engine if num_documents >= POOL_DOCUMENTS else LocalEngine(1, engine.reporter)


def _write_keys(task: tuple[SignatureStore, int, int, int, int, Path]) -> None:
    store, number, bands, rows, salt, path = task
    signatures = store.signatures(number)
    keys = np.empty((bands, len(signatures)), np.uint64)
    for start in range(0, len(signatures), BLOCK_DOCUMENTS):
        block = np.ascontiguousarray(signatures[start : start + BLOCK_DOCUMENTS])
        keys[:, start : start + len(block)] = band_keys(block, bands, rows, np.uint64(salt))
    save_array(path, keys)


def write_buckets(
    documents: Documents, keys: Sequence[Path], bands: int, engine: LocalEngine, folder: Path
) -> list[Path]:
    """One file a band: int64[2, members], bucket and rank of each document that shares its bucket.

    Documents without a shingle are in no bucket. Memory of a band: 40 bytes a document."""
    order = folder / "order.npy"
    save_array(order, np.where(documents.shingles > 0, documents.position, -1))
    tasks = [(band, tuple(keys), order, folder / f"buckets-{band:03d}.npy") for band in range(bands)]
    missing = [task for task in tasks if not task[-1].exists()]
    _sized(engine, len(documents.ids)).map(_write_buckets, missing, "buckets", unit="bands")
    return [task[-1] for task in tasks]


def _write_buckets(task: tuple[int, tuple[Path, ...], Path, Path]) -> None:
    band, key_files, order_file, path = task
    order = load_array(order_file)
    ranks = np.flatnonzero(order >= 0)
    keys = _joined([load_array(file, mapped=True)[band] for file in key_files])
    save_array(path, np.stack(buckets(keys[order[ranks]], ranks)))


@dataclass(frozen=True)
class Candidates:
    """Documents that share a bucket with another, in groups that share none with each other.

    ranks: int64[members], group by group, ascending in each. group: int64[members], ascending.
    bucket_of: int32[members, bands], -1 where a document is alone in its bucket."""

    ranks: np.ndarray
    group: np.ndarray
    bucket_of: np.ndarray


def read_candidates(documents: Documents, files: Sequence[Path]) -> Candidates:
    """Joins the bands' buckets. A group whose documents are all protected is left out: there is nothing to decide.

    Memory: 8 bytes a document, and 4 bytes a band for each document that shares a bucket."""
    parents = np.arange(len(documents.ids))
    for file in files:
        bucket, rank = load_array(file)
        union_buckets(parents, bucket, rank)
    group_of = find_roots(parents)
    undecided = np.zeros(len(parents), bool)
    undecided[group_of[~documents.protected]] = True
    sizes = np.bincount(group_of, minlength=len(parents))
    ranks = np.flatnonzero(undecided[group_of] & (sizes[group_of] > 1))
    ranks = ranks[np.argsort(group_of[ranks], kind="stable")]
    place = np.full(len(parents), -1, np.int64)
    place[ranks] = np.arange(len(ranks))
    bucket_of = np.full((len(ranks), len(files)), -1, np.int32)
    for band, file in enumerate(files):
        bucket, rank = load_array(file)
        inside = place[rank] >= 0
        bucket_of[place[rank[inside]], band] = bucket[inside]
    return Candidates(ranks, group_of[ranks], bucket_of)

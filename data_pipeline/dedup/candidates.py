"""Candidates: which documents share a bucket in any band, found one band at a time."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa
import xxhash

from gristmill.data_pipeline.dedup.arrays import load_array, save_array
from gristmill.data_pipeline.dedup.lsh import band_keys, buckets, find_roots, repeated_keys, union_buckets
from gristmill.data_pipeline.dedup.signatures import SignatureStore
from gristmill.data_pipeline.ledger.document_file import keep_order, packed_ids, unpacked_ids
from gristmill.foundation.engine.engine import Engine
from gristmill.foundation.engine.local import LocalEngine
from gristmill.foundation.errors import InputError

# Documents whose band keys are computed at a time: 32 MB of signatures of 128 hashes.
BLOCK_DOCUMENTS = 65536


# Documents from which on starting worker processes pays for keys and buckets: one band of them is sorted in 0.1 s.
POOL_DOCUMENTS = 1_000_000


@dataclass(frozen=True)
class Documents:
    """All documents as they stand in the stores, one store after the other; a document's index here is its position.
    About 40 bytes a document.

    ids: uint64[documents, 2]. rows: row in its document file; lengths: bytes; shingles: with repetition.
    starts: int64[files + 1], the positions of document file f are starts[f]..starts[f + 1]. priorities
    int64[files].
    protected bool[files]: their documents are kept, whatever they resemble."""

    ids: np.ndarray
    rows: np.ndarray
    lengths: np.ndarray
    shingles: np.ndarray
    starts: np.ndarray
    priorities: np.ndarray
    protected: np.ndarray

    def files_of(self, positions: np.ndarray) -> np.ndarray:
        """int64[N]: the number of the document file of each position."""
        return np.searchsorted(self.starts, positions, side="right") - 1


def read_documents(stores: Sequence[tuple[SignatureStore, bool]]) -> Documents:
    """The documents of all stores; those of a store marked True are protected.

    Raises InputError if a document occurs twice."""
    tables: list[pa.Table] = []
    ids, priorities, protected = [np.empty((0, 2), np.uint64)], [], []
    for store, is_protected in stores:
        for number, stored in enumerate(store.files):
            table = store.documents(number)
            ids.append(packed_ids(table.column("doc_id"), store.folder))
            priorities.append(stored.priority)
            protected.append(is_protected)
            tables.append(table.drop_columns("doc_id"))
    found = Documents(
        ids=np.concatenate(ids),
        rows=_column(tables, "row"),
        lengths=_column(tables, "length"),
        shingles=_column(tables, "shingles"),
        starts=np.cumsum([0, *map(len, tables)]),
        priorities=np.array(priorities, np.int64),
        protected=np.array(protected, bool),
    )
    _refuse_twins(found.ids)
    return found


def _column(tables: list[pa.Table], name: str) -> np.ndarray:
    return _joined([table.column(name).to_numpy() for table in tables])


def _joined(arrays: list[np.ndarray]) -> np.ndarray:
    return np.concatenate(arrays) if arrays else np.empty(0, np.int64)


def _refuse_twins(ids: np.ndarray) -> None:
    """Sorts only the ids that may be given twice; an id is a hash, so its low half may stand for it."""
    ids = ids[repeated_keys(ids[:, 1])]
    order = np.lexsort((ids[:, 1], ids[:, 0]))
    twins = np.flatnonzero((ids[order][1:] == ids[order][:-1]).all(axis=1))
    if len(twins):
        doc_id = unpacked_ids(ids[order[twins[:1]]])[0]
        raise InputError(f"document {doc_id} is given twice; hand each document over once")


def write_band_keys(
    stores: Sequence[SignatureStore], bands: int, rows: int, by_source: bool, engine: Engine, folder: Path
) -> list[Path]:
    """One file for each document file: uint64[bands, documents]. by_source: documents of two sources share no key."""
    tasks: list[tuple[SignatureStore, int, int, int, int, Path]] = []
    for store in stores:
        for number, stored in enumerate(store.files):
            salt = xxhash.xxh3_64_intdigest(stored.source.encode()) if by_source else 0
            tasks.append((store, number, bands, rows, salt, folder / f"keys-{len(tasks):05d}.npy"))
    missing = [task for task in tasks if not task[-1].exists()]
    sizes = [store.files[number].documents for store, number, *_ in missing]
    _sized(engine, sum(sizes)).map(_write_keys, missing, "band keys", sizes, "documents")
    return [task[-1] for task in tasks]


def _sized(engine: Engine, num_documents: int) -> Engine:
    return engine if num_documents >= POOL_DOCUMENTS else LocalEngine(1, engine.reporter)


def _write_keys(task: tuple[SignatureStore, int, int, int, int, Path]) -> None:
    store, number, bands, rows, salt, path = task
    signatures = store.signatures(number)
    keys = np.empty((bands, len(signatures)), np.uint64)
    for start in range(0, len(signatures), BLOCK_DOCUMENTS):
        block = np.ascontiguousarray(signatures[start : start + BLOCK_DOCUMENTS])
        keys[:, start : start + len(block)] = band_keys(block, bands, rows, np.uint64(salt))
    save_array(path, keys)


def write_buckets(documents: Documents, keys: Sequence[Path], bands: int, engine: Engine, folder: Path) -> list[Path]:
    """Files of int64[3, members]: band, bucket and position of each document that shares its bucket; ordered.

    One file a band, or a single one for few documents. Documents without a shingle are in no bucket. Memory of a band:
    28 bytes a document."""
    members = folder / "members.npy"
    save_array(members, np.flatnonzero(documents.shingles > 0))
    size = 1 if len(documents.ids) >= POOL_DOCUMENTS else bands
    tasks = [
        (range(first, first + size), tuple(keys), members, folder / f"buckets-{first:03d}.npy")
        for first in range(0, bands, size)
    ]
    missing = [task for task in tasks if not task[-1].exists()]
    engine.map(_write_buckets, missing, "buckets", unit="tasks")
    return [task[-1] for task in tasks]


def _write_buckets(task: tuple[range, tuple[Path, ...], Path, Path]) -> None:
    bands, key_files, members_file, path = task
    members = load_array(members_file)
    found = [np.empty((3, 0), np.int64)]
    for band in bands:
        keys = _joined([load_array(file, mapped=True)[band] for file in key_files])
        bucket, member = buckets(keys if len(members) == len(keys) else keys[members], members)
        found.append(np.stack([np.full(len(bucket), band), bucket, member]))
    save_array(path, np.concatenate(found, axis=1))


@dataclass(frozen=True)
class Candidates:
    """Documents that share a bucket with another, in groups that share none with each other.

    positions: int64[members], group by group, in keep-order in each. group: int64[members], ascending.
    bucket_of: int32[members, bands], -1 where a document is alone in its bucket."""

    positions: np.ndarray
    group: np.ndarray
    bucket_of: np.ndarray


def read_candidates(documents: Documents, files: Sequence[Path], bands: int) -> Candidates:
    """Joins the bands' buckets. A group whose documents are all protected is left out: there is nothing to decide.

    Memory: 24 bytes a document, and 4 bytes a band for each document that shares a bucket."""
    parents = np.arange(len(documents.ids))
    for file in files:
        band, bucket, position = load_array(file)
        union_buckets(parents, bucket * bands + band, position)
    group_of = find_roots(parents)
    sizes = np.bincount(group_of, minlength=len(parents))
    positions = np.flatnonzero(sizes[group_of] > 1)
    undecided = np.zeros(len(parents), bool)
    undecided[group_of[positions[~documents.protected[documents.files_of(positions)]]]] = True
    positions = positions[undecided[group_of[positions]]]
    positions = positions[_keep_order(documents, positions)]
    positions = positions[np.argsort(group_of[positions], kind="stable")]
    place = np.full(len(parents), -1, np.int64)
    place[positions] = np.arange(len(positions))
    bucket_of = np.full((len(positions), bands), -1, np.int32)
    for file in files:
        band, bucket, position = load_array(file)
        inside = place[position] >= 0
        bucket_of[place[position[inside]], band[inside]] = bucket[inside]
    return Candidates(positions, group_of[positions], bucket_of)


def _keep_order(documents: Documents, positions: np.ndarray) -> np.ndarray:
    """Indices into positions, first to be kept first; protected documents come before all others."""
    files = documents.files_of(positions)
    first = np.iinfo(np.int64).min
    priorities = np.where(documents.protected[files], first, documents.priorities[files])
    return keep_order(priorities, documents.lengths[positions], documents.ids[positions])

"""Candidates: which documents share a bucket in any band, found one band and one range of its keys at a time.

Three steps, each of tasks that write files and read others' files, so that no process knows all documents:
1. keys: the band keys of a run of document files, ordered by band and key, with a last band of the documents' ids;
2. links: who reads a range of a band finds the documents with equal keys and writes pairs that connect them;
3. groups: union-find over the linked documents alone, 45 bytes of memory each. (10^9 documents with a fifth of them
   linked: 9 GB in one task. Beyond that, alternating large-star and small-star steps over the same shuffle find the
   same groups in O(log n) rounds: Kiveris et al. 2014, "Connected Components in MapReduce and Beyond".)"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import numpy as np
import xxhash

from gristmill.data_pipeline.dedup.minhash import (
    UNDECIDED,
    Unit,
    band_keys,
    buckets,
    find_roots,
    key_order,
    union_pairs,
)
from gristmill.data_pipeline.dedup.signatures import (
    SignatureShard,
    SignatureStore,
)
from gristmill.data_pipeline.ledger.document_file import (
    packed_ids,
    unpacked_ids,
)
from gristmill.foundation.errors import InputError
from gristmill.foundation.runtime.tasks.engine import Engine
from gristmill.foundation.runtime.tasks.local import LocalEngine
from gristmill.foundation.runtime.tasks.task_files import PartitionedFiles, range_of_keys, ranges_for

# Documents whose band keys are computed at a time: 32 MB of signatures of 128 hashes.
BLOCK_DOCUMENTS = 65536
# Documents from which on keys and buckets are tasks of the engine, each band a task: one is sorted in 5 ms.
POOL_DOCUMENTS = 50_000
# Documents of a part of the keys: of many small document files, each range of which would be read by itself, several
# make one part. Few documents make KEY_PARTS parts, so that no worker is idle.
KEY_DOCUMENTS, KEY_PARTS = 1 << 18, 32
# Batches that verification is divided into, where each has MIN_BATCH_SHINGLES, so that no worker is idle.
NUM_BATCHES, MIN_BATCH_SHINGLES = 32, 1_000_000

KEY = np.dtype([("key", "<u8"), ("document", "<u4")])  # document: its place in the part of the keys
LINK = np.dtype([("left", "<i8"), ("right", "<i8")])  # two positions, left < right
# state: of the document before it is decided, as in minhash.py; which ones are protected their shard says.
CANDIDATE = np.dtype([("position", "<i8"), ("group", "<i8"), ("batch", "<i4"), ("state", "i1")])


@dataclass(frozen=True)
class StoredDocuments:
    """All documents as they stand in the stores, one shard after the other; a document's place in this order is its
    position. A few bytes a shard, none a document.

    starts: int64[shards + 1], the positions of shard p are starts[p]..starts[p + 1]. is_protected: bool[shards], whose
    documents are kept, whatever they resemble."""

    shards: tuple[SignatureShard, ...]
    starts: np.ndarray
    is_protected: np.ndarray

    @classmethod
    def of(cls, stores: Sequence[tuple[SignatureStore, bool]]) -> "StoredDocuments":
        """The documents of all stores; those of a store marked True are protected."""
        shards = [(store.shard(number), mark) for store, mark in stores for number in range(len(store.files))]
        starts = np.cumsum([0, *(shard.stored.documents for shard, _ in shards)])
        return cls(tuple(shard for shard, _ in shards), starts, np.array([mark for _, mark in shards], bool))

    def __len__(self) -> int:
        return int(self.starts[-1])

    def shards_of(self, positions: np.ndarray) -> np.ndarray:
        """int64[N]: the number of the shard of each position."""
        return np.searchsorted(self.starts, positions, side="right") - 1


@dataclass(frozen=True)
class Banding:
    """bands, rows: of a signature. by_source: documents of two sources share no key. ngram, unit: of a shingle."""

    bands: int
    rows: int
    by_source: bool
    ngram: int
    unit: Unit


def sized(engine: Engine, documents: int) -> Engine:
    """The engine, or for few documents this process."""
    return engine if documents >= POOL_DOCUMENTS else LocalEngine(1, engine.reporter)


def find_links(documents: StoredDocuments, banding: Banding, engine: Engine, folder: Path) -> PartitionedFiles:
    """Pairs of positions that connect the documents of each bucket. The keys, five times as large as all that is made
    from them, are removed when the links are whole."""
    links = links_shuffle(documents, banding.bands, folder)
    if not links.is_whole():
        keys = write_keys(documents, banding, engine, folder)
        write_links(documents, keys, banding.bands, engine, folder)
    keys_shuffle(documents, banding.bands, folder).remove()
    return links


def keys_shuffle(documents: StoredDocuments, bands: int, folder: Path) -> PartitionedFiles:
    return PartitionedFiles(folder / "keys", KEY, len(key_runs(documents)), (bands + 1) * ranges_for(len(documents)))


def key_runs(documents: StoredDocuments) -> list[tuple[int, int]]:
    """(first, last + 1) of the shards whose keys are one part, in runs of KEY_DOCUMENTS or a little more."""
    size = min(KEY_DOCUMENTS, -(-len(documents) // KEY_PARTS))
    bounds = [0]
    for number, end in enumerate(documents.starts[1:].tolist(), 1):
        if end - documents.starts[bounds[-1]] >= size:
            bounds.append(number)
    if bounds[-1] < len(documents.shards):
        bounds.append(len(documents.shards))
    return list(pairwise(bounds))


def links_shuffle(documents: StoredDocuments, bands: int, folder: Path) -> PartitionedFiles:
    return PartitionedFiles(folder / "links", LINK, len(_first_ranges(documents, bands)), 1)


def _first_ranges(documents: StoredDocuments, bands: int) -> list[int]:
    """The first range of the keys of each task that finds links: of few documents a task reads all ranges."""
    ranges = ranges_for(len(documents))
    steps = bands + 1 if ranges == 1 and len(documents) < POOL_DOCUMENTS else 1
    return list(range(0, (bands + 1) * ranges, steps))


def write_keys(documents: StoredDocuments, banding: Banding, engine: Engine, folder: Path) -> PartitionedFiles:
    """The keys of all bands, and the ids as a last band; documents without a shingle have no keys.

    Range b * R + r holds range r of R of band b."""
    keys = keys_shuffle(documents, banding.bands, folder)
    runs = [documents.shards[first:last] for first, last in key_runs(documents)]
    tasks = [(shards, banding, keys, number) for number, shards in enumerate(runs) if not keys.has(number)]
    sizes = [sum(shard.stored.documents for shard in shards) for shards, *_ in tasks]
    sized(engine, sum(sizes)).map(write_run_of_keys, tasks, "near duplicates: keys of bands", sizes, "documents")
    return keys


def write_run_of_keys(task: tuple[Sequence[SignatureShard], Banding, PartitionedFiles, int]) -> None:
    """One part of `write_keys`, of consecutive shards."""
    shards, banding, keys, number = task
    ranges = keys.ranges // (banding.bands + 1)
    of_bands, members, ids = [], [], []
    start = 0
    for shard in shards:
        table = shard.documents(["doc_id", "shingles"])
        places = np.flatnonzero(table.column("shingles").to_numpy() > 0)
        ids.append(packed_ids(table.column("doc_id"), shard.folder)[:, 1])
        of_bands.append(_band_keys(shard, banding, places))
        members.append(start + places)
        start += shard.stored.documents
    hashes_of_bands, owner = np.concatenate(of_bands, axis=1), _joined(members, np.int64)
    of_ids = _joined(ids, np.uint64)
    records, bounds = np.empty(hashes_of_bands.size + start, KEY), np.zeros(keys.ranges + 1, np.int64)
    first = 0
    for band in range(banding.bands + 1):
        hashes, owners = (hashes_of_bands[band], owner) if band < banding.bands else (of_ids, np.arange(start))
        order = key_order(hashes)
        ordered, band_records = hashes[order], records[first : first + len(order)]
        band_records["key"], band_records["document"] = ordered, owners[order]
        places_of_ranges = np.searchsorted(range_of_keys(ordered, ranges), np.arange(ranges + 1))
        bounds[band * ranges : (band + 1) * ranges + 1] = first + places_of_ranges
        first += len(order)
    keys.write(number, records, bounds)


def _band_keys(shard: SignatureShard, banding: Banding, members: np.ndarray) -> np.ndarray:
    """uint64[bands, members]."""
    signatures, salt = shard.signatures(), salt_of(shard, banding)
    keys = np.empty((banding.bands, len(members)), np.uint64)
    for start in range(0, len(members), BLOCK_DOCUMENTS):
        block = np.ascontiguousarray(signatures[members[start : start + BLOCK_DOCUMENTS]])
        keys[:, start : start + len(block)] = band_keys(block, banding.bands, banding.rows, salt)
    return keys


def salt_of(shard: SignatureShard, banding: Banding) -> np.uint64:
    """Salt of the shard's band keys."""
    return np.uint64(xxhash.xxh3_64_intdigest(shard.stored.source.encode()) if banding.by_source else 0)


def keys_of(shard: SignatureShard, banding: Banding, members: np.ndarray) -> np.ndarray:
    """uint64[members, bands]: the band keys of these documents of the shard; equal ones share a bucket."""
    return np.ascontiguousarray(_band_keys(shard, banding, members).T)


def write_links(
    documents: StoredDocuments, keys: PartitionedFiles, bands: int, engine: Engine, folder: Path
) -> PartitionedFiles:
    """Pairs of positions that connect the documents of each bucket: of n documents n - 1 pairs.

    Memory of a task: its range of a band, about 12 bytes a document of it, and 40 for each that shares its bucket.
    Raises InputError if a document occurs twice."""
    links, firsts = links_shuffle(documents, bands, folder), _first_ranges(documents, bands)
    ends = [*firsts[1:], keys.ranges]
    tasks = [
        (documents, keys, bands, list(range(first, end)), links, number)
        for number, (first, end) in enumerate(zip(firsts, ends, strict=True))
        if not links.has(number)
    ]
    engine.map(_write_links, tasks, "near duplicates: candidate pairs", unit="tasks")
    return links


def _write_links(task: tuple[StoredDocuments, PartitionedFiles, int, list[int], PartitionedFiles, int]) -> None:
    documents, keys, bands, numbers, links, place = task
    links_of_ranges = [np.empty(0, LINK)]
    starts = [documents.starts[first] for first, _ in key_runs(documents)]
    for number, pieces in zip(numbers, _pieces_of_ranges(keys, numbers), strict=True):
        key = _joined([piece["key"] for piece in pieces], np.uint64)
        position = _joined([start + piece["document"] for start, piece in zip(starts, pieces, strict=True)], np.int64)
        bucket, member = buckets(key, position)
        if number // (keys.ranges // (bands + 1)) == bands:
            check_unique_ids(documents, member)
            continue
        same = bucket[1:] == bucket[:-1]
        neighbours = np.empty(int(same.sum()), LINK)
        neighbours["left"], neighbours["right"] = member[:-1][same], member[1:][same]
        links_of_ranges.append(neighbours)
    records = np.concatenate(links_of_ranges)
    records = records[np.lexsort((records["right"], records["left"]))]
    new = np.ones(len(records), bool)  # most pairs meet in several bands
    new[1:] = (records["left"][1:] != records["left"][:-1]) | (records["right"][1:] != records["right"][:-1])
    records = records[new]
    links.write(place, records, np.array([0, len(records)]))


def _pieces_of_ranges(keys: PartitionedFiles, numbers: Sequence[int]) -> Iterator[list[np.ndarray]]:
    """The records of each of these ranges in every part. Of several ranges, which are small, a part is read once."""
    if len(numbers) == 1:
        yield [keys.segment(part, numbers[0]) for part in range(keys.map_outputs)]
        return
    parts = [keys.map_output(part) for part in range(keys.map_outputs)]
    for number in numbers:
        yield [records[bounds[number] : bounds[number + 1]] for bounds, records in parts]


def _joined(arrays: list[np.ndarray], dtype: type) -> np.ndarray:
    return np.concatenate([np.empty(0, dtype), *arrays])


def check_unique_ids(documents: StoredDocuments, positions: np.ndarray) -> None:
    """positions: of documents whose ids agree in their low halves."""
    positions = np.sort(positions)
    owners = documents.shards_of(positions)
    ids = [np.empty((0, 2), np.uint64)]
    for number in np.unique(owners).tolist():
        shard = documents.shards[number]
        places = positions[owners == number] - documents.starts[number]
        ids.append(packed_ids(shard.documents(["doc_id"]).column("doc_id"), shard.folder)[places])
    values, counts = np.unique(np.concatenate(ids), axis=0, return_counts=True)
    twins = values[counts > 1]
    if len(twins):
        raise InputError(f"document {unpacked_ids(twins[:1])[0]} is given twice; hand each document over once")


def write_groups(
    documents: StoredDocuments, links: PartitionedFiles, batch_shingles: int, engine: Engine, folder: Path
) -> tuple[PartitionedFiles, int]:
    """(candidates: documents linked with others, number of batches that they are verified in).

    Groups share no bucket with each other. One of which all documents are protected is left out: there is nothing to
    decide. Batches are runs of whole groups of about batch_shingles shingles, or fewer so that there are NUM_BATCHES.
    Range p of the candidates holds those of shard p, in the order of their positions."""
    candidates = PartitionedFiles(folder / "candidates", CANDIDATE, 1, len(documents.shards))
    [num_batches] = sized(engine, len(documents)).map(
        _write_groups,
        [(documents, links, batch_shingles, candidates)],
        "near duplicates: groups",
        [links.num_records()],
        "links",
    )
    return candidates, num_batches


def _write_groups(task: tuple[StoredDocuments, PartitionedFiles, int, PartitionedFiles]) -> int:
    """The number of batches."""
    documents, links, batch_shingles, candidates = task
    if not candidates.has(0):
        positions, group = _groups(len(documents), links)
        if documents.is_protected.any():
            undecided = np.zeros(len(positions), bool)
            undecided[group[~documents.is_protected[documents.shards_of(positions)]]] = True
            chosen = undecided[group]
            positions, group = positions[chosen], group[chosen]
        write_candidates(documents, positions, group, batch_shingles, candidates)
    return int(candidates.map_output(0)[1]["batch"].max(initial=-1)) + 1


def write_candidates(
    documents: StoredDocuments,
    positions: np.ndarray,
    group: np.ndarray,
    batch_shingles: int,
    candidates: PartitionedFiles,
    states: np.ndarray | int = UNDECIDED,
) -> None:
    """Writes part 0 of the candidates. positions: ascending; group: of each, below len(documents)."""
    bounds = np.searchsorted(positions, documents.starts)
    weights = _shingles(documents, positions, bounds)
    share = max(int(weights.sum()) // NUM_BATCHES, MIN_BATCH_SHINGLES)
    batch = _batches(group, weights, min(share, batch_shingles))
    del weights  # of 10^9 documents, a fifth of them linked, 2 GB
    records = np.empty(len(positions), CANDIDATE)
    records["position"], records["group"], records["batch"], records["state"] = positions, group, batch, states
    candidates.write(0, records, bounds)


def _groups(num_documents: int, links: PartitionedFiles) -> tuple[np.ndarray, np.ndarray]:
    """(positions of all linked documents, ascending; the group of each: the place of its first document in them)."""
    positions = _linked(num_documents, links)
    parents = np.arange(len(positions))
    for part in range(links.map_outputs):
        _, records = links.map_output(part)
        union_pairs(parents, np.searchsorted(positions, records["left"]), np.searchsorted(positions, records["right"]))
    return positions, find_roots(parents)


def _linked(num_documents: int, links: PartitionedFiles) -> np.ndarray:
    """int64[]: the positions of all linked documents, ascending. Needs a byte a document for the moment."""
    is_linked = np.zeros(num_documents, bool)
    for part in range(links.map_outputs):
        _, records = links.map_output(part)
        is_linked[records["left"]] = True
        is_linked[records["right"]] = True
    return np.flatnonzero(is_linked)


def _shingles(documents: StoredDocuments, positions: np.ndarray, bounds: np.ndarray) -> np.ndarray:
    """int64[positions]: shingles with repetition of these documents. Those of shard p are bounds[p]..bounds[p + 1]."""
    counts = np.empty(len(positions), np.int64)
    for number in np.flatnonzero(np.diff(bounds)).tolist():
        shingles = documents.shards[number].documents(["shingles"]).column("shingles").to_numpy()
        chosen = slice(bounds[number], bounds[number + 1])
        counts[chosen] = shingles[positions[chosen] - documents.starts[number]]
    return counts


def _batches(group: np.ndarray, weights: np.ndarray, batch_weight: int) -> np.ndarray:
    """int32[]: the batch of each document. Groups [0, 1, 0, 3], weights [2, 1, 2, 4], 5 -> [0, 0, 0, 1]."""
    before = np.bincount(group, weights)
    is_group = np.zeros(len(before), bool)
    is_group[group] = True
    np.cumsum(before, out=before)
    before[1:] = before[:-1].copy()  # what the groups before it weigh
    before[:1] = 0
    before //= batch_weight
    begins = np.zeros(len(before), np.int32)
    begins[is_group] = np.diff(before[is_group], prepend=0) != 0
    return np.cumsum(begins, out=begins)[group]

"""Verification: the candidates' shingle sets, written shard by shard and read batch by batch, and the exact Jaccard
similarity that decides."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa

from gristmill.data_pipeline.dedup.candidates import Banding, StoredDocuments, keys_of
from gristmill.data_pipeline.dedup.exact import DUPLICATE
from gristmill.data_pipeline.dedup.folding import document_keys, has_picked_texts, picked_texts
from gristmill.data_pipeline.dedup.minhash import PROTECTED, Decisions, compare_blocks, joined_shingle_sets
from gristmill.data_pipeline.dedup.signatures import SignatureShard
from gristmill.data_pipeline.ledger.document_file import DocumentFile, packed_ids, utf8_of
from gristmill.foundation.runtime.tasks.engine import Engine, LazySequence
from gristmill.foundation.runtime.tasks.task_files import PartitionedFiles

SHINGLE = np.dtype("<u8")
# Candidates whose sets a task writes, at the least: 6 MB, at 2 kB of text each. Of many it is a 64th up to 50 MB,
# since each batch reads what each task wrote.
MIN_TASK_CANDIDATES, MAX_TASK_CANDIDATES, SET_TASKS = 2_000, 16_384, 64


def member_dtype(bands: int) -> np.dtype:
    """A candidate with all that decides its place in keep-order and whom it is compared with.

    group: candidates of another are never compared. priority: of its source, or below all others if it is protected.
    length: bytes of its text. file, row: where it stands, counted without the protected files. size: of its set. state:
    before it is decided. keys: of its bands."""
    return np.dtype(
        [
            ("group", "<i8"),
            ("priority", "<i8"),
            ("length", "<i8"),
            ("id", "<u8", 2),
            ("row", "<i8"),
            ("size", "<i8"),
            ("file", "<i4"),
            ("state", "i1"),
            ("keys", "<u8", bands),
        ]
    )


@dataclass(frozen=True)
class CandidateSets:
    """members: by batch. sets: the members' sets of 64-bit hashes, one after the other in the order of the members of a
    shard."""

    members: PartitionedFiles
    sets: PartitionedFiles


@dataclass(frozen=True)
class ShardOfSets:
    """document_file: of the shard `number`, whose first document is at the position `start`."""

    document_file: DocumentFile
    signatures: SignatureShard
    number: int
    start: int


@dataclass(frozen=True)
class SetsTask:
    """shards: which are written together. place: of what is written. num_protected: of the documents' shards the first
    ones are protected."""

    shards: tuple[ShardOfSets, ...]
    place: int
    num_protected: int
    candidates: PartitionedFiles
    banding: Banding
    written: CandidateSets


def write_candidate_sets(
    document_files: Sequence[DocumentFile],
    documents: StoredDocuments,
    candidates: tuple[PartitionedFiles, int],
    banding: Banding,
    engine: Engine,
    folder: Path,
) -> CandidateSets:
    """document_files: of the documents' shards. candidates: as `write_groups` returns them."""
    candidate_records, batches = candidates
    runs = _runs_of_candidates(np.diff(candidate_records.map_output(0)[0]))
    written = CandidateSets(
        PartitionedFiles(folder / "members", member_dtype(banding.bands), len(runs), batches),
        PartitionedFiles(folder / "sets", SHINGLE, len(runs), batches),
    )
    num_protected = int(documents.is_protected.sum())

    def task(place: int) -> SetsTask:
        shards = tuple(
            ShardOfSets(document_files[number], documents.shards[number], number, int(documents.starts[number]))
            for number in runs[place]
        )
        return SetsTask(shards, place, num_protected, candidate_records, banding, written)

    missing = [place for place in range(len(runs)) if not written.members.has(place)]
    sizes = [sum(document_files[number].bytes for number in runs[place]) for place in missing]
    engine.map(_write_sets, LazySequence(task, missing), "near duplicates: read candidates", sizes, "B")
    return written


def _runs_of_candidates(candidates: np.ndarray) -> list[list[int]]:
    """Numbers of the shards that have candidates, in runs for one task each. candidates: of each shard."""
    run_size = max(min(int(candidates.sum()) // SET_TASKS, MAX_TASK_CANDIDATES), MIN_TASK_CANDIDATES)
    runs: list[list[int]] = []
    size = run_size
    for number in np.flatnonzero(candidates).tolist():
        if size >= run_size:
            runs.append([])
            size = 0
        runs[-1].append(number)
        size += int(candidates[number])
    return runs


def _write_sets(task: SetsTask) -> None:
    written = [_sets_of_shard(shard, task) for shard in task.shards]
    members = np.concatenate([of_part for of_part, _, _ in written])
    values = np.concatenate([of_part for _, of_part, _ in written])
    batch = np.concatenate([of_part for _, _, of_part in written])
    bounds = np.concatenate([[0], np.cumsum(members["size"])])
    order = np.argsort(batch, kind="stable")
    sizes = members["size"][order]
    picked = np.concatenate([np.empty(0, SHINGLE), *(values[bounds[i] : bounds[i + 1]] for i in order.tolist())])
    firsts = np.searchsorted(batch[order], np.arange(task.written.sets.ranges + 1))
    task.written.sets.write(task.place, picked, np.concatenate([[0], np.cumsum(sizes)])[firsts])
    task.written.members.write(task.place, members[order], firsts)  # last: its file says that both are whole


def _sets_of_shard(shard: ShardOfSets, task: SetsTask) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(members, their sets one after the other, their batches int64[]) of the candidates of one shard."""
    candidates, is_protected = task.candidates.read(shard.number), shard.number < task.num_protected
    places = candidates["position"] - shard.start
    members = np.zeros(len(candidates), task.written.members.dtype)
    rows, members["length"], members["id"] = _stored_columns(shard, places)
    members["group"], members["row"] = candidates["group"], rows
    members["file"] = shard.number - task.num_protected
    members["state"] = PROTECTED if is_protected else candidates["state"]
    members["priority"] = np.iinfo(np.int64).min if is_protected else shard.signatures.stored.priority
    members["keys"] = keys_of(shard.signatures, task.banding, places)
    values, sizes = _sets(shard.document_file, rows, task.banding)
    members["size"] = sizes
    return members, values, candidates["batch"].astype(np.int64)


def _stored_columns(shard: ShardOfSets, places: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(rows, lengths, packed ids) of the documents at these places of the shard. An annotated file has them in its
    array of document keys, which is opened sooner than the store's table."""
    if has_picked_texts(shard.document_file.path):
        kept = np.flatnonzero(shard.document_file.kept_mask())
        if len(kept) == shard.signatures.stored.documents:
            keys = document_keys(shard.document_file.path)[kept[places]]
            return kept[places], keys["bytes"].astype(np.int64), keys["id"]
    table = shard.signatures.documents(["doc_id", "row", "length"]).take(pa.array(places))
    ids = packed_ids(table.column("doc_id"), shard.signatures.folder)
    return table.column("row").to_numpy(), table.column("length").to_numpy(), ids


def _sets(document_file: DocumentFile, rows: np.ndarray, banding: Banding) -> tuple[np.ndarray, np.ndarray]:
    """The sets of these rows, which ascend, one after the other, and int64[rows]: the size of each."""
    sets, sizes = [np.empty(0, SHINGLE)], [np.empty(0, np.int64)]
    for texts in _texts(document_file, rows):
        values, bounds = joined_shingle_sets(*utf8_of(texts), banding.ngram, banding.unit)
        sets.append(values)
        sizes.append(np.diff(bounds))
    return np.concatenate(sets), np.concatenate(sizes)


def _texts(document_file: DocumentFile, rows: np.ndarray) -> Iterator[pa.Array]:
    """The texts of these ascending rows, a bounded number at a time."""
    if has_picked_texts(document_file.path):
        yield from (texts for _, texts in picked_texts(document_file.path, rows))
        return
    wanted = np.zeros(len(document_file.kept_mask()), bool)
    wanted[rows] = True
    yield from (texts for _, _, texts in document_file.batches(wanted))


# A batch of whole groups of candidates is read, put into keep-order and decided.
#
# A group that does not fit is decided block by block: a block of documents is compared with the kept documents of
# each block before it, then with itself, so that two blocks' sets are in memory at a time, whatever the size of the
# group.


@dataclass(frozen=True)
class BatchTask:
    """block_shingles: 64-bit hashes of a block of documents. duplicates: takes the duplicates by document file."""

    sets: CandidateSets
    batch: int
    threshold: float
    block_shingles: int
    duplicates: PartitionedFiles


def verify_batches(
    sets: CandidateSets, threshold: float, block_shingles: int, duplicates: PartitionedFiles, engine: Engine
) -> PartitionedFiles:
    """The documents to remove, in `duplicates`, a part a batch."""
    tasks = [
        BatchTask(sets, batch, threshold, block_shingles, duplicates)
        for batch in range(sets.members.ranges)
        if not duplicates.has(batch)
    ]
    engine.map(_verify_batch, tasks, "near duplicates: compare pairs", unit="batches")
    return duplicates


def _verify_batch(task: BatchTask) -> None:
    batch = _Batch.read(task.sets, task.batch)
    decided = Decisions.of(_buckets(batch.members["keys"]), batch.members["state"])
    blocks = _blocks(batch.members["size"], task.block_shingles)
    for number, block in enumerate(blocks):
        block_sets = batch.sets(np.arange(*block))
        for before in blocks[:number]:
            kept = np.flatnonzero(decided.keepers[slice(*before)] < 0) + before[0]
            compare_blocks(decided, block, block_sets, before, batch.sets(kept), task.threshold)
        compare_blocks(decided, block, block_sets, block, block_sets, task.threshold)
    removed = np.flatnonzero(decided.keepers >= 0)
    members, kept = batch.members[removed], batch.members[decided.keepers[removed]]
    both = decided.boths[removed]
    records = np.empty(len(removed), DUPLICATE)
    records["file"], records["row"], records["id"] = members["file"], members["row"], members["id"]
    records["duplicate_of"] = kept["id"]
    records["value"] = both / (members["size"] + kept["size"] - both)
    records = records[np.lexsort((records["row"], records["file"]))]
    task.duplicates.write_sorted(task.batch, records, records["file"])


@dataclass(frozen=True)
class _Batch:
    """members: in keep-order, group after group. pieces: the parts' sets, mapped from disk; the set of member i is
    pieces[piece_of[i]][starts[i]:starts[i] + size]."""

    members: np.ndarray
    pieces: list[np.ndarray]
    piece_of: np.ndarray
    starts: np.ndarray

    @classmethod
    def read(cls, sets: CandidateSets, batch: int) -> "_Batch":
        read = dict(sets.members.segments(batch))
        set_pieces = dict(sets.sets.segments(batch))
        members = np.concatenate([np.empty(0, sets.members.dtype), *read.values()])
        starts = [np.cumsum(piece["size"]) - piece["size"] for piece in read.values()]
        start = np.concatenate([np.empty(0, np.int64), *starts])
        piece_of = np.repeat(np.arange(len(read)), [len(piece) for piece in read.values()])
        ids = members["id"]
        order = np.lexsort((ids[:, 1], ids[:, 0], -members["length"], members["priority"], members["group"]))
        pieces = [np.asarray(set_pieces.get(part, np.empty(0, np.uint64))) for part in read]
        return cls(members[order], pieces, piece_of[order], start[order])

    def sets(self, chosen: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """The sets of these members, one after the other, and int64[members, 2]: first and last + 1 of each member of
        the batch, 0 and 0 for the others."""
        sizes = self.members["size"][chosen]
        ends = np.cumsum(sizes)
        places = np.zeros((len(self.members), 2), np.int64)
        places[chosen, 0], places[chosen, 1] = ends - sizes, ends
        values = np.empty(int(sizes.sum()), np.uint64)
        ranges = zip(
            self.piece_of[chosen].tolist(), self.starts[chosen].tolist(), (ends - sizes).tolist(), sizes.tolist(),
            strict=True,
        )  # fmt: skip
        for piece, start, place, size in ranges:
            values[place : place + size] = self.pieces[piece][start : start + size]
        return values, places


def _blocks(sizes: np.ndarray, block_shingles: int) -> list[tuple[int, int]]:
    """(start, stop) of runs of members whose sets are about block_shingles together; one longer set is a run."""
    before = np.concatenate([[0], np.cumsum(sizes)[:-1]]) // block_shingles if len(sizes) else np.empty(0, np.int64)
    starts = np.flatnonzero(np.diff(before, prepend=-1)).tolist()
    return list(zip(starts, [*starts[1:], len(sizes)], strict=True))


def _buckets(keys: np.ndarray) -> tuple[int, np.ndarray]:
    """(number of buckets, int64[members, bands]: the bucket of each, -1 where it is alone in it)."""
    bucket_of = np.empty(keys.shape, np.int64)
    count = 0
    for band in range(keys.shape[1]):
        values, place, times = np.unique(keys[:, band], return_inverse=True, return_counts=True)
        number = np.full(len(values), -1, np.int64)
        shared = np.flatnonzero(times > 1)
        number[shared] = count + np.arange(len(shared))
        bucket_of[:, band] = number[place.reshape(-1)]
        count += len(shared)
    return count, bucket_of

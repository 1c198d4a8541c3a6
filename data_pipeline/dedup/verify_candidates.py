"""The candidates' shingle sets, written part by part and read batch by batch."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from gristmill.data_pipeline.dedup.candidates import Banding, StoredDocuments, keys_of
from gristmill.data_pipeline.dedup.exact import DUPLICATE
from gristmill.data_pipeline.dedup.jaccard import Decisions, compare_blocks, joined_shingle_sets
from gristmill.data_pipeline.dedup.signatures import StorePart
from gristmill.data_pipeline.ledger.document_file import DocumentFile, packed_ids, utf8_of
from gristmill.foundation.runtime.tasks.engine import Engine
from gristmill.foundation.runtime.tasks.shuffle import Shuffle

SHINGLE = np.dtype("<u8")


def member_dtype(bands: int) -> np.dtype:
    """A candidate with all that decides its place in keep-order and whom it is compared with.

    group: candidates of another are never compared. priority: of its source, or below all others if it is protected.
    length: bytes of its text. file, row: where it stands, counted without the protected files. size: of its set. keys:
    of its bands."""
    return np.dtype(
        [
            ("group", "<i8"),
            ("priority", "<i8"),
            ("length", "<i8"),
            ("id", "<u8", 2),
            ("row", "<i8"),
            ("size", "<i8"),
            ("file", "<i4"),
            ("protected", "?"),
            ("keys", "<u8", bands),
        ]
    )


@dataclass(frozen=True)
class CandidateSets:
    """members: by batch. sets: the members' sets of 64-bit hashes, one after the other in the order of the members of a
    part."""

    members: Shuffle
    sets: Shuffle


@dataclass(frozen=True)
class SetsTask:
    """document_file: of the part `number`, of which the first `protected` ones are protected."""

    document_file: DocumentFile
    part: StorePart
    number: int
    start: int
    num_protected: int
    candidates: Shuffle
    banding: Banding
    written: CandidateSets


def write_candidate_sets(
    document_files: Sequence[DocumentFile],
    documents: StoredDocuments,
    candidates: tuple[Shuffle, int],
    banding: Banding,
    engine: Engine,
    folder: Path,
) -> CandidateSets:
    """document_files: of the documents' parts. candidates: as `write_groups` returns them."""
    candidate_records, batches = candidates
    parts = len(documents.parts)
    written = CandidateSets(
        Shuffle(folder / "members", member_dtype(banding.bands), parts, batches),
        Shuffle(folder / "sets", SHINGLE, parts, batches),
    )
    num_protected = int(documents.is_protected.sum())
    tasks = [
        SetsTask(document_file, part, number, int(start), num_protected, candidate_records, banding, written)
        for number, (document_file, part, start) in enumerate(
            zip(document_files, documents.parts, documents.starts[:-1], strict=True)
        )
        if not written.members.has(number)
    ]
    engine.map(
        _write_sets, tasks, "near duplicates: read candidates", [task.document_file.bytes for task in tasks], "B"
    )
    return written


def _write_sets(task: SetsTask) -> None:
    candidates = task.candidates.read(task.number)
    if not len(candidates):
        none = np.zeros(task.written.members.ranges + 1, np.int64)
        task.written.sets.write(task.number, np.empty(0, SHINGLE), none)
        task.written.members.write(task.number, np.empty(0, task.written.members.dtype), none)
        return
    table = task.part.documents()
    places = candidates["position"] - task.start
    members = np.zeros(len(candidates), task.written.members.dtype)
    rows = table.column("row").to_numpy()[places]
    members["group"], members["row"] = candidates["group"], rows
    members["length"] = table.column("length").to_numpy()[places]
    members["id"] = packed_ids(table.column("doc_id"), task.part.folder)[places]
    members["file"] = task.number - task.num_protected
    members["protected"] = task.number < task.num_protected
    members["priority"] = np.iinfo(np.int64).min if task.number < task.num_protected else task.part.stored.priority
    if len(places):
        members["keys"] = keys_of(task.part, task.banding, places)
    values, bounds = _sets(task, rows)
    members["size"] = np.diff(bounds)
    order = np.argsort(candidates["batch"], kind="stable")
    batch, sizes = candidates["batch"][order].astype(np.int64), members["size"][order]
    picked = np.concatenate([np.empty(0, SHINGLE), *(values[bounds[i] : bounds[i + 1]] for i in order.tolist())])
    firsts = np.searchsorted(batch, np.arange(task.written.sets.ranges + 1))
    task.written.sets.write(task.number, picked, np.concatenate([[0], np.cumsum(sizes)])[firsts])
    task.written.members.write(task.number, members[order], firsts)  # last: its file says that both are whole


def _sets(task: SetsTask, rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The sets of these rows, which ascend, one after the other, and int64[rows + 1] bounds."""
    wanted = np.zeros(len(task.document_file.kept_mask()), bool)
    wanted[rows] = True
    sets, sizes = [np.empty(0, SHINGLE)], [np.zeros(1, np.int64)]
    if len(rows):
        for _, _, texts in task.document_file.batches(wanted):
            values, bounds = joined_shingle_sets(*utf8_of(texts), task.banding.ngram, task.banding.unit)
            sets.append(values)
            sizes.append(np.diff(bounds))
    return np.concatenate(sets), np.cumsum(np.concatenate(sizes))


# Verification: a batch of whole groups of candidates is read, put into keep-order and decided.
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
    duplicates: Shuffle


def verify_batches(
    sets: CandidateSets, threshold: float, block_shingles: int, duplicates: Shuffle, engine: Engine
) -> Shuffle:
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
    decided = Decisions.of(_buckets(batch.members["keys"]), batch.members["protected"])
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
        read = dict(sets.members.pieces(batch))
        set_pieces = dict(sets.sets.pieces(batch))
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

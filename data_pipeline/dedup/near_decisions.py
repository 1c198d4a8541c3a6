"""Decisions on near duplicates that an earlier run made, and what has to be decided anew.

`cache/near_decisions/CONFIG/state.json` names the files of the last run and two files of records beside it: the ids of
its documents, file by file, and the decisions on those of them that were removed, each with the document that was kept
instead. They are written and read by parts: a run that compares all documents holds nothing of one here; one that
decides few holds 64 bytes for each removed document and 56 for each document of a changed file.

A decision on a document depends on the kept documents before it that share a bucket with it. Undecided are new
documents, and those whose kept document has gone: what has gone besides had removed none. They are compared with the
kept documents before them, and the decided documents after them with those of them that are kept; decided documents are
not compared with each other. Where a document that was kept is removed now, its duplicates are undecided too, and all
is compared once more. Who shares a bucket is seen by comparing the band keys of the undecided documents with those of
all others, which need not be sorted for that."""

import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from pathlib import Path

import numpy as np
import orjson
import xxhash

from gristmill.data_pipeline.dedup.candidates import (
    Banding,
    StoredDocuments,
    check_unique_ids,
    keys_of,
    salt_of,
    sized,
    write_candidates,
)
from gristmill.data_pipeline.dedup.exact import DUPLICATE
from gristmill.data_pipeline.dedup.minhash import SETTLED_KEPT, SETTLED_REMOVED, UNDECIDED, find_roots, union_pairs
from gristmill.data_pipeline.dedup.near_copies import BandLookup
from gristmill.data_pipeline.dedup.signatures import SignatureShard, documents_file
from gristmill.data_pipeline.ledger.document_file import (
    DocumentFile,
    id_places,
    keep_order,
    load_array,
    packed_ids,
    save_array,
    sortable_ids,
)
from gristmill.foundation.checksums import (
    checksum_path,
    checksummed_path,
    content_digest,
    matches_checksum,
    write_with_checksum,
)
from gristmill.foundation.files import remove_tree
from gristmill.foundation.fingerprint import fingerprint
from gristmill.foundation.runtime.tasks.engine import Engine
from gristmill.foundation.runtime.tasks.task_files import PartitionedFiles, fetch

NEAR_DECISIONS = "near_decisions"  # in the cache of a work folder
STATE_VERSION = 3
ID = np.dtype(("<u8", 2))
# A removed document. file: its number among those of the run; place: of the document among its signed ones; row: of the
# file. value: similarity to duplicate_of, the packed id of the document that was kept.
DECISION = np.dtype(
    [
        ("file", "<i4"),
        ("place", "<i4"),
        ("row", "<i8"),
        ("id", "<u8", 2),
        ("duplicate_of", "<u8", 2),
        ("value", "<f8"),
    ]
)
MAX_DOCUMENTS = 100_000_000  # 16 bytes of disk each, and 64 for each that is removed; of more nothing is kept
BLOCK_DOCUMENTS = 1 << 20  # whose ids are looked at together
MAX_UNDECIDED, MAX_UNDECIDED_SHARE = 1_000_000, 0.25  # with more of them all are compared as in a first run
Entry = tuple[str, str, str]  # of a file: name, digest of the table of its signed documents, identity of their texts


@dataclass(frozen=True)
class DecidedRun:
    """entries: of its files. starts int64[files + 1]: positions of their first documents. ids uint64[documents, 2].
    decisions DECISION[removed]."""

    entries: Sequence[Entry]
    starts: np.ndarray
    ids: np.ndarray
    decisions: np.ndarray


@dataclass(frozen=True)
class KeptDecisions:
    """folder: of one configuration of near deduplication. sources: identity of the texts of each source."""

    folder: Path
    sources: Mapping[str, str]

    @property
    def path(self) -> Path:
        return self.folder / "state.json"

    def read(self) -> DecidedRun | None:
        """The last run; None if nothing was kept."""
        if not matches_checksum(self.path):
            return None
        stored = orjson.loads(self.path.read_bytes())
        entries, starts = [tuple(entry) for entry in stored["entries"]], np.array(stored["starts"])
        ids, decisions = self._records_of(entries)
        if not (matches_checksum(ids) and matches_checksum(decisions)):
            return None
        return DecidedRun(entries, starts, _mapped(ids, ID), _mapped(decisions, DECISION))

    def _records_of(self, entries: Sequence[Entry]) -> tuple[Path, Path]:
        """Files of the ids and of the decisions of a run."""
        run = fingerprint(entries)[:16]
        return self.folder / f"ids-{run}.rec", self.folder / f"decisions-{run}.rec"

    def write(
        self, entries: Sequence[Entry], starts: np.ndarray, ids: Iterable[np.ndarray], decisions: Iterable[np.ndarray]
    ) -> None:
        """Keeps the run in the place of the one before. ids, decisions: of DecidedRun, in parts."""
        for other in self.folder.parent.glob("*"):
            if other != self.folder:
                remove_tree(other)
        self.folder.mkdir(parents=True, exist_ok=True)
        paths = self._records_of(entries)
        for path, parts in zip(paths, (ids, decisions), strict=True):
            with checksummed_path(path) as temporary, temporary.open("wb") as file:
                for part in parts:
                    file.write(np.ascontiguousarray(part).view(np.uint8).data)
        write_with_checksum(self.path, orjson.dumps({"entries": entries, "starts": starts.tolist()}))
        for path in sorted(self.folder.glob("*.rec")):
            if path not in paths:
                path.unlink()
                checksum_path(path).unlink(missing_ok=True)

    def entries_of(self, documents: StoredDocuments, document_files: Sequence[DocumentFile]) -> list[Entry]:
        """The entries of the files now."""
        entries = []
        for shard, document_file in zip(documents.shards, document_files, strict=True):
            table = documents_file(shard.folder, shard.number)
            digest = content_digest(table)
            identity = f"{self.sources[shard.stored.source]} {shard.stored.priority}"
            entries.append((document_file.path.stem, digest, identity))
        return entries


def _mapped(path: Path, dtype: np.dtype) -> np.ndarray:
    """The records of the file, mapped from disk."""
    return np.memmap(path, dtype.base, "r").reshape(-1, *dtype.shape) if path.stat().st_size else np.empty(0, dtype)


def _on_disk(folder: Path, dtype: np.dtype, size: int) -> np.ndarray:
    """Zeros, in a file without a name, so that they take no memory that the kernel cannot free."""
    if not size:
        return np.zeros(0, dtype)
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f".{os.getpid()}.map"
    with path.open("w+b") as file:
        path.unlink()
        os.posix_fallocate(file.fileno(), 0, size * dtype.itemsize)  # a full disk is an error here, not a signal later
        return np.memmap(file, dtype.base, "r+", shape=(size, *dtype.shape))


def _blocks(size: int) -> Iterator[slice]:
    return (slice(start, start + BLOCK_DOCUMENTS) for start in range(0, size, BLOCK_DOCUMENTS))


@dataclass(frozen=True)
class ChangedDocuments:
    """Changes since the last run. entries, ids: of the documents now. moved int64[documents of that run]: the
    position of each now, -1 if it has gone. new int64[]: positions of the others, ascending. changed: files that are
    not as they were. ids and moved stand on disk."""

    entries: Sequence[Entry]
    ids: np.ndarray
    moved: np.ndarray
    new: np.ndarray
    changed: frozenset[int]

    @classmethod
    def since(
        cls, run: DecidedRun, documents: StoredDocuments, entries: Sequence[Entry], folder: Path
    ) -> "ChangedDocuments":
        before = {entry: number for number, entry in enumerate(run.entries)}
        ids, moved = _on_disk(folder, ID, len(documents)), _on_disk(folder, np.dtype("<i8"), len(run.ids))
        moved[:] = -1
        changed = []
        for number, entry in enumerate(entries):
            start, stop = documents.starts[number : number + 2]
            if (old := before.pop(entry, None)) is None:
                changed.append(number)
                ids[start:stop] = ids_of_shard(documents.shards[number])
            else:
                ids[start:stop] = run.ids[run.starts[old] : run.starts[old + 1]]
                moved[run.starts[old] : run.starts[old + 1]] = np.arange(start, stop)
        others = _documents_of(run.starts, sorted(before.values()), run.entries)
        read = _documents_of(documents.starts, changed, entries)
        place = id_places(_salted(ids, *read), _salted(run.ids, *others), is_sorted=False)
        moved[others[0][place[place >= 0]]] = read[0][place >= 0]
        return cls(entries, ids, moved, read[0][place < 0], frozenset(changed))

    def blocks_of_ids(self) -> Iterator[np.ndarray]:
        return (self.ids[block] for block in _blocks(len(self.ids)))

    def gone(self, run: DecidedRun) -> np.ndarray:
        """The ids of the run's documents that have gone."""
        parts = [run.ids[block][self.moved[block] < 0] for block in _blocks(len(self.moved))]
        return np.concatenate([np.empty((0, 2), np.uint64), *parts])


def ids_of_shard(shard: SignatureShard) -> np.ndarray:
    """uint64[documents, 2]"""
    return packed_ids(shard.documents(["doc_id"]).column("doc_id"), shard.folder)


def _documents_of(
    starts: np.ndarray, numbers: Sequence[int], entries: Sequence[Entry]
) -> tuple[np.ndarray, np.ndarray]:
    """(positions int64[N], salts uint64[N]) of the documents of these files. The salt stands for what decides a text
    besides its id."""
    positions = [np.arange(starts[number], starts[number + 1]) for number in numbers]
    salts = [xxhash.xxh3_64_intdigest(entries[number][2].encode()) for number in numbers]
    sizes = [len(of_file) for of_file in positions]
    return np.concatenate([np.empty(0, np.int64), *positions]), np.repeat(np.array(salts, np.uint64), sizes)


def _salted(ids: np.ndarray, positions: np.ndarray, salts: np.ndarray) -> np.ndarray:
    chosen = ids[positions]
    chosen[:, 0] ^= salts
    return chosen


# Documents that share a bucket with an undecided one.


def undecided_at_first(run: DecidedRun, changes: ChangedDocuments, known: np.ndarray, starts: np.ndarray) -> np.ndarray:
    """int64[]: positions, ascending, of the new documents, and of the removed ones whose kept document has gone. known:
    the decisions on documents that are still there."""
    is_orphan = id_places(known["duplicate_of"], changes.gone(run), is_sorted=False) >= 0
    return np.union1d(changes.new, positions_of(known[is_orphan], starts))


def are_few(undecided: np.ndarray, documents: int) -> bool:
    return len(undecided) <= min(MAX_UNDECIDED, int(MAX_UNDECIDED_SHARE * documents))


def refuse_known(documents: StoredDocuments, changes: ChangedDocuments) -> None:
    """Raises InputError if a new document is there already."""
    if len(changes.new):
        low, alike = np.sort(changes.ids[changes.new, 1]), [np.empty(0, np.int64)]
        for block in _blocks(len(changes.ids)):
            alike.append(block.start + np.flatnonzero(_is_among(changes.ids[block, 1], low)))
        check_unique_ids(documents, np.concatenate(alike))


def bucket_neighbours(
    documents: StoredDocuments, undecided: np.ndarray, ids: np.ndarray, banding: Banding, engine: Engine, folder: Path
) -> tuple[np.ndarray, np.ndarray]:
    """(positions of documents, the first undecided document in keep-order that has one of their keys), int64[] each,
    for each key of theirs that an undecided document has."""
    sizes = _columns_of(documents, undecided, ("length", "shingles"))
    with_keys = np.flatnonzero(sizes["shingles"] > 0)
    priorities = _priorities(documents)[documents.shards_of(undecided)]
    order = keep_order(priorities[with_keys], sizes["length"][with_keys], ids[undecided[with_keys]])
    known = undecided[with_keys]
    of_shards = [np.empty((0, 2, banding.bands), np.uint64)]
    for number, inside in _by_part(documents, known):
        shard = documents.shards[number]
        hashes = shard.signatures()[inside, : banding.bands * banding.rows : banding.rows]
        of_shards.append(np.stack([keys_of(shard, banding, inside), hashes], axis=1))
    folder.mkdir(parents=True, exist_ok=True)
    lookup = folder / "keys.npy"
    save_array(lookup, np.ascontiguousarray(np.moveaxis(np.concatenate(of_shards)[order], 0, 2)))
    tasks = [(shard, banding, lookup) for shard in documents.shards]
    matches = sized(engine, len(documents)).map(
        _first_matches, tasks, "near duplicates: neighbours of new documents", unit="files"
    )
    positions = [start + place for start, (place, _) in zip(documents.starts[:-1], matches, strict=True)]
    return np.concatenate(positions), known[order][np.concatenate([first for _, first in matches])]


def _first_matches(task: tuple[SignatureShard, Banding, Path]) -> tuple[np.ndarray, np.ndarray]:
    shard, banding, path = task
    lookup = _lookup(path, fetch(path).stat().st_mtime_ns, banding.rows)
    return lookup.first_matches(
        *lookup.keys_like(shard.signatures()[:, : banding.bands * banding.rows], salt_of(shard, banding))
    )


@lru_cache(maxsize=1)
def _lookup(path: Path, _: int, rows: int) -> BandLookup:
    keys, hashes = load_array(path)
    return BandLookup.of(keys, hashes.astype(np.uint32), rows)


def _by_part(documents: StoredDocuments, positions: np.ndarray) -> Iterator[tuple[int, np.ndarray]]:
    """(number of a shard, places in it) of ascending positions."""
    owners = documents.shards_of(positions)
    for number in np.unique(owners).tolist():
        first, last = np.searchsorted(owners, [number, number + 1])
        yield number, positions[first:last] - documents.starts[number]


def _columns_of(documents: StoredDocuments, positions: np.ndarray, names: Sequence[str]) -> dict[str, np.ndarray]:
    """int64[] of each column of the documents at these ascending positions."""
    values: dict[str, list[np.ndarray]] = {name: [np.empty(0, np.int64)] for name in names}
    for number, inside in _by_part(documents, positions):
        table = documents.shards[number].documents(names)
        for name in names:
            values[name].append(table.column(name).to_numpy()[inside])
    return {name: np.concatenate(columns) for name, columns in values.items()}


def _priorities(documents: StoredDocuments) -> np.ndarray:
    """int64[shards]"""
    return np.array([shard.stored.priority for shard in documents.shards], np.int64)


# What is compared again, and the decisions that hold.


@dataclass(frozen=True)
class Undecided:
    """positions: of the undecided documents, ascending. known: decisions of the run before on others."""

    documents: StoredDocuments
    ids: np.ndarray
    positions: np.ndarray
    known: np.ndarray

    @classmethod
    def of(cls, documents: StoredDocuments, ids: np.ndarray, positions: np.ndarray, known: np.ndarray) -> "Undecided":
        """known: decisions of the run before, of which those on undecided documents are dropped."""
        return cls(documents, ids, positions, known[~np.isin(positions_of(known, documents.starts), positions)])

    def is_undecided(self, positions: np.ndarray) -> np.ndarray:
        return _is_among(positions, self.positions)

    def was_removed(self, positions: np.ndarray) -> np.ndarray:
        return _is_among(positions, self._removed_positions)

    @cached_property
    def _removed_positions(self) -> np.ndarray:
        return np.sort(positions_of(self.known, self.documents.starts))

    def write_candidates(
        self, neighbours: tuple[np.ndarray, np.ndarray], batch_shingles: int, candidates: PartitionedFiles
    ) -> int:
        """Writes the documents to compare, in groups that share no bucket. neighbours: of `bucket_neighbours`. Returns
        the number of batches."""
        positions, firsts = neighbours
        matters = self.is_undecided(positions) | ~self.was_removed(positions)
        others = np.flatnonzero(~matters)
        matters[others] = self._comes_after(positions[others], firsts[others])
        matters &= positions != firsts
        positions, firsts = positions[matters], firsts[matters]
        chosen = np.union1d(positions, firsts)
        parents = np.arange(len(chosen))
        union_pairs(parents, np.searchsorted(chosen, positions), np.searchsorted(chosen, firsts))
        states = np.full(len(chosen), SETTLED_KEPT, np.int8)
        states[self.was_removed(chosen)] = SETTLED_REMOVED
        states[self.is_undecided(chosen)] = UNDECIDED
        write_candidates(self.documents, chosen, find_roots(parents), batch_shingles, candidates, states)
        return int(candidates.map_output(0)[1]["batch"].max(initial=-1)) + 1

    def _comes_after(self, positions: np.ndarray, others: np.ndarray) -> np.ndarray:
        """bool[]: whether each document comes after the other one in keep-order."""
        priorities = _priorities(self.documents)
        left, right = (priorities[self.documents.shards_of(side)] for side in (positions, others))
        after = left > right
        same = np.flatnonzero(left == right)
        known = np.union1d(positions[same], others[same])
        lengths = _columns_of(self.documents, known, ("length",))["length"]
        left, right = (-lengths[np.searchsorted(known, side[same])] for side in (positions, others))
        ids, other_ids = (sortable_ids(self.ids[side[same]]) for side in (positions, others))
        after[same] = (left > right) | ((left == right) & (ids > other_ids))
        return after

    def with_decided(self, records: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """(DECISION[] of all removed documents, positions of documents to decide again). records: DUPLICATE[] of
        the compared documents that were removed."""
        decided = placed(self.documents, records)
        position = positions_of(decided, self.documents.starts)
        was_removed = self.was_removed(position)
        known_positions = positions_of(self.known, self.documents.starts)
        order = np.argsort(known_positions)
        before = order[np.searchsorted(known_positions[order], position[was_removed])]
        values = self.known["value"][before]
        is_closer, is_equal = decided["value"][was_removed] > values, decided["value"][was_removed] == values
        flipped = ~was_removed & ~self.is_undecided(position)
        is_orphan = id_places(self.known["duplicate_of"], decided["id"][flipped], is_sorted=False) >= 0
        reopened = np.union1d(position[was_removed][is_equal], known_positions[is_orphan])
        is_new = ~was_removed
        is_new[was_removed] = is_closer
        holds = np.ones(len(self.known), bool)
        holds[before[is_closer]] = False
        return np.concatenate([self.known[holds], decided[is_new]]), reopened


def _is_among(values: np.ndarray, chosen: np.ndarray) -> np.ndarray:
    """bool[values]. chosen: ascending."""
    if not len(chosen):
        return np.zeros(len(values), bool)
    return chosen[np.minimum(np.searchsorted(chosen, values), len(chosen) - 1)] == values


def positions_of(decisions: np.ndarray, starts: np.ndarray) -> np.ndarray:
    """int64[]: positions of the documents of these decisions. starts: of the files."""
    return starts[decisions["file"]] + decisions["place"]


def still_there(run: DecidedRun, changes: ChangedDocuments, documents: StoredDocuments) -> np.ndarray:
    """The decisions on documents that are still there, where they are now."""
    moved = changes.moved[positions_of(run.decisions, run.starts)]
    decisions, moved = run.decisions[moved >= 0], moved[moved >= 0]
    decisions["file"] = documents.shards_of(moved)
    decisions["place"] = moved - documents.starts[decisions["file"]]
    for number in sorted(changes.changed.intersection(np.unique(decisions["file"]).tolist())):
        of_file = decisions["file"] == number
        rows = documents.shards[number].documents(["row"]).column("row").to_numpy()
        decisions["row"][of_file] = rows[decisions["place"][of_file]]
    return decisions


def write_duplicates(decisions: np.ndarray, duplicates: PartitionedFiles) -> None:
    """Writes the only part of the duplicates."""
    records = np.empty(len(decisions), DUPLICATE)
    for name in DUPLICATE.names or ():
        records[name] = decisions[name]
    records = records[np.lexsort((records["row"], records["file"]))]
    duplicates.write_sorted(0, records, records["file"])


def placed(documents: StoredDocuments, records: np.ndarray) -> np.ndarray:
    """DECISION[] of DUPLICATE[], by file."""
    records = records[np.argsort(records["file"], kind="stable")]
    decisions = np.zeros(len(records), DECISION)
    for name in DUPLICATE.names or ():
        decisions[name] = records[name]
    for number in np.unique(records["file"]).tolist():
        of_file = slice(*np.searchsorted(records["file"], [number, number + 1]))
        rows = documents.shards[number].documents(["row"]).column("row").to_numpy()
        decisions["place"][of_file] = np.searchsorted(rows, records["row"][of_file])
    return decisions


def placed_by_file(documents: StoredDocuments, duplicates: PartitionedFiles) -> Iterator[np.ndarray]:
    """DECISION[] of each file."""
    return (placed(documents, duplicates.read(number)) for number in range(duplicates.ranges))

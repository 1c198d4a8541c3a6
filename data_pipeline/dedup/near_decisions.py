"""Decisions on near duplicates that an earlier run made, and what has to be decided anew.

`cache/near_decisions/CONFIG/state.npz` holds the documents of the last run, file by file, and every candidate among
them with its group and, if it was removed, the document that was kept instead.

A decision on a document depends on the kept documents before it that share a bucket with it. So the decisions on a
group hold if no new document shares a bucket with one of its members, and each document that was kept instead of one of
them is still there: what has gone since then had removed none of them. Whether new documents share a bucket is seen by
comparing their band keys with those of all others, which need not be sorted for that."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import numpy as np
import orjson
import xxhash

from gristmill.data_pipeline.dedup.candidates import (
    CANDIDATE,
    Banding,
    StoredDocuments,
    keys_of,
    refuse_twins,
    sized,
    write_candidates,
)
from gristmill.data_pipeline.dedup.exact import DUPLICATE
from gristmill.data_pipeline.dedup.minhash import find_roots, union_pairs
from gristmill.data_pipeline.dedup.near_copies import BandLookup
from gristmill.data_pipeline.dedup.signatures import StorePart, documents_file
from gristmill.data_pipeline.ledger.document_file import DocumentFile, load_array, packed_ids, save_array, sortable_ids
from gristmill.foundation.checksums import is_sealed, read_cached, seal_of, sealed_path
from gristmill.foundation.files import file_digest, remove_tree
from gristmill.foundation.runtime.tasks.engine import Engine
from gristmill.foundation.runtime.tasks.task_files import Shuffle, fetch

NEAR_DECISIONS = "near_decisions"  # in the cache of a work folder
# file: its number among those of the run; place: of the document among its signed ones; row: of the file. value:
# similarity to duplicate_of, the packed id of the document that was kept; KEPT if the member was kept.
DECISION = np.dtype(
    [
        ("file", "<i4"),
        ("place", "<i4"),
        ("row", "<i8"),
        ("group", "<i8"),
        ("id", "<u8", 2),
        ("duplicate_of", "<u8", 2),
        ("value", "<f8"),
    ]
)
KEPT = -1.0
MAX_DOCUMENTS = 100_000_000  # 16 bytes of memory each, and 72 for each candidate; of more nothing is kept
MAX_NEW_DOCUMENTS, MAX_NEW_SHARE = 1_000_000, 0.25  # more of them are compared as in a first run
Entry = tuple[str, str, str]  # of a file: name, digest of the table of its signed documents, identity of their texts


@dataclass(frozen=True)
class DecidedRun:
    """entries: of its files. starts int64[files + 1]: positions of their first documents. ids uint64[documents, 2].
    decisions DECISION[candidates]."""

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
        return self.folder / "state.npz"

    def read(self) -> DecidedRun | None:
        """The last run; None if nothing was kept."""
        if not is_sealed(self.path):
            return None
        with np.load(self.path, allow_pickle=False) as stored:
            entries = [tuple(entry) for entry in orjson.loads(stored["entries"].tobytes())]
            return DecidedRun(entries, stored["starts"], stored["ids"], stored["decisions"])

    def write(self, run: DecidedRun) -> None:
        """Keeps the run in the place of the one before."""
        for other in self.folder.parent.glob("*"):
            if other != self.folder:
                remove_tree(other)
        self.folder.mkdir(parents=True, exist_ok=True)
        entries = np.frombuffer(orjson.dumps(run.entries), np.uint8)
        with sealed_path(self.path) as temporary, temporary.open("wb") as file:
            np.savez(file, entries=entries, starts=run.starts, ids=run.ids, decisions=run.decisions)

    def entries_of(self, documents: StoredDocuments, document_files: Sequence[DocumentFile]) -> list[Entry]:
        """The entries of the files now."""
        entries = []
        for part, document_file in zip(documents.parts, document_files, strict=True):
            table = documents_file(part.folder, part.number)
            seal = read_cached(seal_of(table))
            digest = str(seal["xxh3"]) if isinstance(seal, dict) and "xxh3" in seal else file_digest(table)
            identity = f"{self.sources[part.stored.source]} {part.stored.priority}"
            entries.append((document_file.path.stem, digest, identity))
        return entries


@dataclass(frozen=True)
class ChangedDocuments:
    """Changes since the last run. entries, ids: of the documents now. moved int64[documents of that run]: the
    position of each now, -1 if it has gone. new int64[]: positions of the others, ascending. changed: files that are
    not as they were."""

    entries: Sequence[Entry]
    ids: np.ndarray
    moved: np.ndarray
    new: np.ndarray
    changed: frozenset[int]

    @classmethod
    def since(cls, run: DecidedRun | None, documents: StoredDocuments, entries: Sequence[Entry]) -> "ChangedDocuments":
        if run is None:
            run = DecidedRun((), np.zeros(1, np.int64), np.empty((0, 2), np.uint64), np.empty(0, DECISION))
        before = {entry: number for number, entry in enumerate(run.entries)}
        ids, moved = np.empty((len(documents), 2), np.uint64), np.full(len(run.ids), -1, np.int64)
        changed = []
        for number, entry in enumerate(entries):
            start, stop = documents.starts[number : number + 2]
            if (old := before.pop(entry, None)) is None:
                changed.append(number)
                ids[start:stop] = ids_of_part(documents.parts[number])
            else:
                ids[start:stop] = run.ids[run.starts[old] : run.starts[old + 1]]
                moved[run.starts[old] : run.starts[old + 1]] = np.arange(start, stop)
        others = _documents_of(run.starts, sorted(before.values()), run.entries)
        read = _documents_of(documents.starts, changed, entries)
        place = places(_salted(ids, *read), _salted(run.ids, *others), is_sorted=False)
        moved[others[0][place[place >= 0]]] = read[0][place >= 0]
        return cls(entries, ids, moved, read[0][place < 0], frozenset(changed))

    @property
    def are_few(self) -> bool:
        """Whether the new documents are so few that only their groups are decided."""
        return len(self.new) <= min(MAX_NEW_DOCUMENTS, int(MAX_NEW_SHARE * len(self.ids)))


def ids_of_part(part: StorePart) -> np.ndarray:
    """uint64[documents, 2]"""
    return packed_ids(part.documents(["doc_id"]).column("doc_id"), part.folder)


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


def places(ids: np.ndarray, among: np.ndarray, is_sorted: bool = True) -> np.ndarray:
    """int64[N]: the place of each packed id among others, -1 where it is not there."""
    if not len(among):
        return np.full(len(ids), -1, np.int64)
    others, wanted = sortable_ids(among), sortable_ids(ids)
    order = np.arange(len(others)) if is_sorted else np.argsort(others, kind="stable")
    place = order[np.minimum(np.searchsorted(others[order], wanted), len(others) - 1)]
    return np.where(others[place] == wanted, place, -1)


# Documents that share a bucket with a new one.


def neighbours_of_new(
    documents: StoredDocuments, new: np.ndarray, ids: np.ndarray, banding: Banding, engine: Engine, folder: Path
) -> tuple[np.ndarray, np.ndarray]:
    """(positions, new documents that they share a bucket with), int64[] each, which connect all that do.

    Raises InputError if a new document is there already."""
    if not len(new):
        return np.empty(0, np.int64), np.empty(0, np.int64)
    low = np.sort(ids[new, 1])
    is_alike = low[np.minimum(np.searchsorted(low, ids[:, 1]), len(low) - 1)] == ids[:, 1]
    refuse_twins(documents, np.flatnonzero(is_alike))
    owners = documents.parts_of(new)
    of_parts, with_keys = [np.empty((0, banding.bands), np.uint64)], [np.empty(0, np.int64)]
    for number in np.unique(owners).tolist():
        part = documents.parts[number]
        inside = new[owners == number] - documents.starts[number]
        inside = inside[part.documents(["shingles"]).column("shingles").to_numpy()[inside] > 0]
        of_parts.append(keys_of(part, banding, inside))
        with_keys.append(inside + documents.starts[number])
    lookup, known = folder / "new-keys.npy", np.concatenate(with_keys)
    save_array(lookup, np.ascontiguousarray(np.concatenate(of_parts).T))
    tasks = [(part, banding, lookup) for part in documents.parts]
    matches = sized(engine, len(documents)).map(
        _first_matches, tasks, "near duplicates: neighbours of new documents", unit="files"
    )
    positions = [start + place for start, (place, _) in zip(documents.starts[:-1], matches, strict=True)]
    return np.concatenate(positions), known[np.concatenate([first for _, first in matches])]


def _first_matches(task: tuple[StorePart, Banding, Path]) -> tuple[np.ndarray, np.ndarray]:
    part, banding, path = task
    keys = keys_of(part, banding, np.arange(part.stored.documents))
    return _lookup(path, fetch(path).stat().st_mtime_ns).first_matches(keys.T)


@lru_cache(maxsize=1)
def _lookup(path: Path, _: int) -> BandLookup:
    return BandLookup.of(load_array(path))


# The decisions that hold, and the candidates for new ones.


@dataclass(frozen=True)
class Undecided:
    """candidates: those of groups that must be decided. batches: how many these are in. duplicates: takes the
    duplicates of all groups, a part a batch; those that are known are its last part. known: the decisions that hold."""

    candidates: Shuffle
    batches: int
    duplicates: Shuffle
    known: np.ndarray


def undecided(
    run: DecidedRun,
    changes: ChangedDocuments,
    documents: StoredDocuments,
    neighbours: tuple[np.ndarray, np.ndarray],
    batch_shingles: int,
    folder: Path,
) -> Undecided:
    """neighbours: as `neighbours_of_new` returns them. Writes the duplicates that are known."""
    decisions = _present(run, changes, documents)
    shared = neighbours[0] != neighbours[1]
    left, right = (positions[shared] for positions in neighbours)
    joined = np.unique(np.concatenate([left, right]))
    position = documents.starts[decisions["file"]] + decisions["place"]
    is_removed = decisions["value"] != KEPT
    is_orphan = is_removed.copy()
    is_orphan[is_removed] = places(decisions["duplicate_of"][is_removed], decisions["id"], is_sorted=False) < 0
    touched = np.unique(decisions["group"][is_orphan | np.isin(position, joined)])
    is_touched = np.isin(decisions["group"], touched)
    chosen = np.union1d(position[is_touched], joined)
    _, firsts, numbers = np.unique(decisions["group"][is_touched], return_index=True, return_inverse=True)
    members = np.searchsorted(chosen, position[is_touched])
    parents = np.arange(len(chosen))
    union_pairs(parents, members, members[firsts][numbers])
    union_pairs(parents, np.searchsorted(chosen, left), np.searchsorted(chosen, right))
    candidates = Shuffle(folder / "candidates-left", CANDIDATE, 1, len(documents.parts))
    write_candidates(documents, chosen, find_roots(parents), batch_shingles, candidates)
    batches = int(candidates.part(0)[1]["batch"].max(initial=-1)) + 1
    duplicates = Shuffle(folder / "verified", DUPLICATE, batches + 1, len(documents.parts))
    known = decisions[~is_touched]
    _write_duplicates(known[known["value"] != KEPT], duplicates, batches)
    return Undecided(candidates, batches, duplicates, known)


def _present(run: DecidedRun, changes: ChangedDocuments, documents: StoredDocuments) -> np.ndarray:
    """The decisions on documents that are still there, where they are now."""
    moved = changes.moved[run.starts[run.decisions["file"]] + run.decisions["place"]]
    decisions, moved = run.decisions[moved >= 0], moved[moved >= 0]
    decisions["file"] = documents.parts_of(moved)
    decisions["place"] = moved - documents.starts[decisions["file"]]
    for number in sorted(changes.changed.intersection(np.unique(decisions["file"]).tolist())):
        of_file = decisions["file"] == number
        rows = documents.parts[number].documents(["row"]).column("row").to_numpy()
        decisions["row"][of_file] = rows[decisions["place"][of_file]]
    return decisions


def _write_duplicates(removed: np.ndarray, duplicates: Shuffle, part: int) -> None:
    records = np.empty(len(removed), DUPLICATE)
    for name in DUPLICATE.names or ():
        records[name] = removed[name]
    records = records[np.lexsort((records["row"], records["file"]))]
    duplicates.write_sorted(part, records, records["file"])


def decisions_of(documents: StoredDocuments, candidates: Shuffle, duplicates: Shuffle, parts: int) -> np.ndarray:
    """DECISION[] of these candidates. duplicates: of which the first `parts` parts are theirs."""
    bounds, records = candidates.part(0)
    decisions = np.zeros(len(records), DECISION)
    decisions["value"], decisions["group"] = KEPT, records["group"]
    for number in np.flatnonzero(np.diff(bounds)).tolist():
        of_file, part = slice(bounds[number], bounds[number + 1]), documents.parts[number]
        places_in_part = records["position"][of_file] - documents.starts[number]
        table = part.documents(["doc_id", "row"])
        decisions["file"][of_file], decisions["place"][of_file] = number, places_in_part
        decisions["id"][of_file] = packed_ids(table.column("doc_id"), part.folder)[places_in_part]
        decisions["row"][of_file] = table.column("row").to_numpy()[places_in_part]
    removed = np.concatenate([np.empty(0, DUPLICATE), *(duplicates.part(part)[1] for part in range(parts))])
    place = places(removed["id"], decisions["id"], is_sorted=False)
    for name in ("duplicate_of", "value"):
        decisions[name][place] = removed[name]
    return decisions


def joined_decisions(known: np.ndarray, decided: np.ndarray) -> np.ndarray:
    """Both, with different groups."""
    decided["group"] += int(known["group"].max(initial=-1)) + 1
    return np.concatenate([known, decided])

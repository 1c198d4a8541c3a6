"""Groups of candidates that an earlier run decided: a group with the same documents has the same duplicates.

`cache/near_groups/CONFIG/decisions.npy` holds the keys of all decided groups and then their duplicates. A key is the
sum of hashes of the members' ids, each with its source's priority and all settings that decide its texts."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import xxhash

from gristmill.data_pipeline.dedup.candidates import CANDIDATE, StoredDocuments, sized
from gristmill.data_pipeline.dedup.exact import DUPLICATE
from gristmill.data_pipeline.ledger.document_file import load_array, packed_ids, save_array, sortable_ids
from gristmill.foundation.checksums import is_sealed
from gristmill.foundation.files import remove_tree
from gristmill.foundation.fingerprint import mix_array
from gristmill.foundation.runtime.tasks.engine import Engine
from gristmill.foundation.runtime.tasks.shuffle import Shuffle

NEAR_GROUPS = "near_groups"  # in the cache of a work folder
DECISION = np.dtype([("group", "<u8", 2), ("id", "<u8", 2), ("duplicate_of", "<u8", 2), ("value", "<f8")])
NO_DECISION = -1.0  # in the place of a similarity: the row is the key of a group
MAX_CANDIDATES = 50_000_000  # 100 bytes of memory each; of more nothing is kept


@dataclass(frozen=True)
class KnownGroups:
    """folder: of one configuration of near deduplication. sources: identity of the texts of each source."""

    folder: Path
    sources: Mapping[str, str]

    @property
    def path(self) -> Path:
        return self.folder / "decisions.npy"

    def read(self) -> tuple[np.ndarray, np.ndarray]:
        """(keys uint64[N, 2], DECISION[])."""
        rows = load_array(self.path) if is_sealed(self.path) else np.empty(0, DECISION)
        return rows["group"], rows[rows["value"] >= 0]

    def write(self, groups: np.ndarray, decisions: np.ndarray) -> None:
        """groups: uint64[N, 2] in any order, with repetitions. One file, so that a kill leaves keys and decisions of
        one run."""
        for other in self.folder.parent.glob("*"):
            if other != self.folder:
                remove_tree(other)
        self.folder.mkdir(parents=True, exist_ok=True)
        keys = np.unique(groups, axis=0)
        rows = np.zeros(len(keys) + len(decisions), DECISION)
        rows["group"][: len(keys)], rows["value"][: len(keys)] = keys, NO_DECISION
        rows[len(keys) :] = decisions[np.lexsort((decisions["id"][:, 1], decisions["id"][:, 0]))]
        save_array(self.path, rows)


@dataclass(frozen=True)
class CandidateMembers:
    """Candidates in the order of their records. ids uint64[N, 2]; files int32[N] and rows int64[N]: where they stand;
    groups uint64[N, 2]: keys of their groups."""

    ids: np.ndarray
    files: np.ndarray
    rows: np.ndarray
    groups: np.ndarray


def candidate_members(
    documents: StoredDocuments, candidates: Shuffle, known: KnownGroups, engine: Engine
) -> CandidateMembers | None:
    """None if there are more candidates than can be kept."""
    bounds, records = candidates.part(0)
    if len(records) > MAX_CANDIDATES:
        return None
    parts = np.flatnonzero(np.diff(bounds)).tolist()
    tasks = [(documents, candidates, number) for number in parts]
    read = sized(engine, len(documents)).map(_members_of_part, tasks, "near duplicates: known groups", unit="files")
    ids = np.concatenate([np.empty((0, 2), np.uint64), *(part_ids for part_ids, _ in read)])
    rows = np.concatenate([np.empty(0, np.int64), *(part_rows for _, part_rows in read)])
    files = np.repeat(np.array(parts, np.int32), [len(part_rows) for _, part_rows in read])
    stored = [part.stored for part in documents.parts]
    salts = [_salt(f"{known.sources[of_part.source]} {of_part.priority}") for of_part in stored]
    hashes = _hashes(ids, np.array(salts, np.uint64).reshape(-1, 2)[files])
    return CandidateMembers(ids, files, rows, _group_keys(hashes, np.asarray(records["group"])))


def _members_of_part(task: tuple[StoredDocuments, Shuffle, int]) -> tuple[np.ndarray, np.ndarray]:
    documents, candidates, number = task
    part = documents.parts[number]
    places = candidates.read(number)["position"] - documents.starts[number]
    table = part.documents(["doc_id", "row"])
    return packed_ids(table.column("doc_id"), part.folder)[places], table.column("row").to_numpy()[places]


def _salt(identity: str) -> tuple[int, int]:
    return xxhash.xxh3_64_intdigest(identity.encode(), 1), xxhash.xxh3_64_intdigest(identity.encode(), 2)


def _hashes(ids: np.ndarray, salts: np.ndarray) -> np.ndarray:
    """uint64[N, 2]; ids are hashes themselves."""
    mixed = mix_array((ids ^ salts).ravel()).reshape(-1, 2)
    return np.stack([mix_array(mixed[:, 0] ^ ids[:, 1]), mix_array(mixed[:, 1] ^ ids[:, 0])], axis=1)


def _group_keys(hashes: np.ndarray, group: np.ndarray) -> np.ndarray:
    """uint64[N, 2]: the sum of the hashes of each member's group."""
    if not len(group):
        return hashes
    order = np.argsort(group, kind="stable")
    starts = np.flatnonzero(np.diff(group[order], prepend=group[order][0] - 1))
    sums = np.add.reduceat(hashes[order], starts, axis=0)
    keys = np.empty_like(hashes)
    keys[order] = np.repeat(sums, np.diff(np.append(starts, len(group))), axis=0)
    return keys


@dataclass(frozen=True)
class UnknownGroups:
    """candidates: those of groups that must be decided, and how many batches they are in. duplicates: takes the
    duplicates of all groups, a part a batch; those of known groups are its last part."""

    candidates: tuple[Shuffle, int]
    duplicates: Shuffle


def known_duplicates(
    members: CandidateMembers, known: KnownGroups, candidates: Shuffle, num_files: int, folder: Path
) -> UnknownGroups:
    """Writes the duplicates of known groups and the candidates of all others."""
    groups, decisions = known.read()
    is_known = _is_in(members.groups, groups)
    left = Shuffle(folder / "candidates-left", CANDIDATE, 1, candidates.ranges)
    remaining = np.array(candidates.part(0)[1])[~is_known]
    batches, remaining["batch"] = np.unique(remaining["batch"], return_inverse=True)
    left.write_sorted(0, remaining, members.files[~is_known])
    decided = decisions[_is_in(decisions["group"], members.groups[is_known])]
    place = _places(decided["id"], members.ids)
    records = np.empty(len(decided), DUPLICATE)
    records["file"], records["row"] = members.files[place], members.rows[place]
    for name in ("id", "duplicate_of", "value"):
        records[name] = decided[name]
    records = records[np.lexsort((records["row"], records["file"]))]
    duplicates = Shuffle(folder / "verified", DUPLICATE, len(batches) + 1, num_files)
    duplicates.write_sorted(len(batches), records, records["file"])
    return UnknownGroups((left, len(batches)), duplicates)


def keep_decisions(members: CandidateMembers, known: KnownGroups, duplicates: Shuffle) -> None:
    """Keeps the decisions on all groups for the next run."""
    removed = duplicates.read_all()
    decisions = np.empty(len(removed), DECISION)
    for name in ("id", "duplicate_of", "value"):
        decisions[name] = removed[name]
    decisions["group"] = members.groups[_places(removed["id"], members.ids)]
    known.write(members.groups, decisions)


def _is_in(values: np.ndarray, others: np.ndarray) -> np.ndarray:
    """bool[N]: whether each pair of uint64 is among the others."""
    return np.isin(sortable_ids(values), sortable_ids(others))


def _places(ids: np.ndarray, among: np.ndarray) -> np.ndarray:
    """int64[N]: the place of each packed id, all of which are there."""
    order = np.lexsort((among[:, 1], among[:, 0]))
    return order[np.searchsorted(sortable_ids(among[order]), sortable_ids(ids))]

"""Duplicates found by exact and near deduplication: where they are, and the kept document of each."""

from pathlib import Path

import numpy as np
import pyarrow as pa

from gristmill.data_pipeline.ledger.document_file import sortable_ids, unpacked_ids
from gristmill.foundation.engine.engine import Engine
from gristmill.foundation.engine.local import LocalEngine
from gristmill.foundation.shuffle import Shuffle, range_of_keys, ranges_for

DUPLICATES = pa.schema([("doc_id", pa.string()), ("duplicate_of", pa.string()), ("similarity", pa.float64())])
# A document to remove: which of the given document files, the row in it, packed ids of it and of the kept one.
DUPLICATE = np.dtype([("file", "<i4"), ("row", "<i8"), ("id", "<u8", 2), ("duplicate_of", "<u8", 2), ("value", "<f8")])


def table_of(found: Shuffle) -> pa.Table:
    """Records of DUPLICATE in memory: doc_id, duplicate_of, similarity; sorted by doc_id."""
    records = found.read_all()
    records = records[np.lexsort((records["id"][:, 1], records["id"][:, 0]))]
    columns = [unpacked_ids(records["id"]), unpacked_ids(records["duplicate_of"]), pa.array(records["value"])]
    return pa.table(columns, schema=DUPLICATES)


def reassign_copies(exact: Shuffle, near: Shuffle, folder: Path, engine: Engine) -> tuple[Shuffle, Shuffle]:
    """(exact, near), a range a document file, after every copy of a document that near deduplication removed was moved
    to `near`.

    A copy has its document's words, hence its shingles, hence its similarity to the document that is kept. So every
    `duplicate_of` names a document that is itself kept:
    exact [(c, b)], near [(b, a, 0.9)] -> exact [], near [(b, a, 0.9), (c, a, 0.9)].
    Memory of a task: 60 bytes for each removed document of its range of the ids."""
    ranges = ranges_for(exact.num_records() + near.num_records())
    sized = engine if ranges > 1 else LocalEngine(1, engine.reporter)
    sides = [(exact, "duplicate_of", folder / "exact"), (near, "id", folder / "near")]
    by_id = []
    for side, field, prefix in sides if ranges > 1 else ():
        shuffled = Shuffle(prefix.with_name(f"{prefix.name}-by-id"), DUPLICATE, side.parts, ranges)
        tasks = [(side, field, shuffled, part) for part in range(side.parts) if not shuffled.has(part)]
        sized.map(_shuffle_by_id, tasks, "removed documents")
        by_id.append(shuffled)
    left, moved = (Shuffle(prefix, DUPLICATE, ranges, side.ranges) for side, _, prefix in sides)
    found = (by_id[0], by_id[1]) if by_id else (exact, near)
    joins = [(found[0], found[1], left, moved, number) for number in range(ranges) if not moved.has(number)]
    sized.map(_reassign_range, joins, "copies of removed documents")
    return left, moved


def _shuffle_by_id(task: tuple[Shuffle, str, Shuffle, int]) -> None:
    side, field, shuffled, part = task
    records = np.asarray(side.part(part)[1])
    shuffled.write_unsorted(part, records, range_of_keys(records[field][:, 0], shuffled.ranges))


def _reassign_range(task: tuple[Shuffle, Shuffle, Shuffle, Shuffle, int]) -> None:
    exact_by_id, near_by_id, exact_out, near_out, number = task
    is_only = exact_out.parts == 1  # then the sides are not shuffled by id
    exact, near = (side.read_all() if is_only else side.read(number) for side in (exact_by_id, near_by_id))
    near = near[np.lexsort((near["id"][:, 1], near["id"][:, 0]))]
    place = _places(exact["duplicate_of"], near["id"])
    is_moved = place >= 0
    moved = exact[is_moved]
    for field in ("duplicate_of", "value"):
        moved[field] = near[field][place[is_moved]]
    for shuffle, records in ((exact_out, exact[~is_moved]), (near_out, np.concatenate([near, moved]))):
        records = records[np.lexsort((records["row"], records["file"]))]
        shuffle.write_sorted(number, records, records["file"])


def _places(wanted: np.ndarray, ids: np.ndarray) -> np.ndarray:
    """int64[wanted]: the place of each packed id in ids, which ascend and are distinct; -1 where it is not there."""
    if not len(ids):
        return np.full(len(wanted), -1, np.int64)
    place = np.searchsorted(sortable_ids(ids), sortable_ids(wanted))
    place = np.minimum(place, len(ids) - 1)
    return np.where((ids[place] == wanted).all(axis=1), place, -1)

"""Duplicates found by exact and near deduplication: where they are, and the kept document of each."""

from dataclasses import dataclass

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from gristmill.data_pipeline.ledger.document_file import unpacked_ids

DUPLICATES = pa.schema([("doc_id", pa.string()), ("duplicate_of", pa.string()), ("similarity", pa.float64())])


@dataclass(frozen=True)
class Duplicates:
    """Documents to remove. files int32[N], rows int64[N]: which of the given document files, and the row in it.
    ids, duplicate_of uint64[N, 2]: packed ids of the document and of the kept one. similarities float64[N]."""

    files: np.ndarray
    rows: np.ndarray
    ids: np.ndarray
    duplicate_of: np.ndarray
    similarities: np.ndarray

    @classmethod
    def none(cls) -> "Duplicates":
        ids = np.empty((0, 2), np.uint64)
        return cls(np.empty(0, np.int32), np.empty(0, np.int64), ids, ids, np.empty(0))

    def __len__(self) -> int:
        return len(self.files)

    def take(self, chosen: np.ndarray) -> "Duplicates":
        return Duplicates(*(values[chosen] for values in vars(self).values()))

    def table(self) -> pa.Table:
        """Columns doc_id, duplicate_of, similarity; sorted by doc_id."""
        mine = self.take(np.lexsort((self.ids[:, 1], self.ids[:, 0])))
        columns = [unpacked_ids(mine.ids), unpacked_ids(mine.duplicate_of), pa.array(mine.similarities)]
        return pa.table(columns, schema=DUPLICATES)


def reassign_copies(exact: Duplicates, near: Duplicates) -> tuple[Duplicates, Duplicates]:
    """(exact, near) after every copy of a document that near deduplication removed was moved to `near`.

    A copy has its document's words, hence its shingles, hence its similarity to the document that is kept. So every
    `duplicate_of` names a document that is itself kept:
    exact [(c, b)], near [(b, a, 0.9)] -> exact [], near [(b, a, 0.9), (c, a, 0.9)]."""
    found = pc.index_in(_binary(exact.duplicate_of), value_set=_binary(near.ids))
    is_moved = pc.is_valid(found).to_numpy(zero_copy_only=False)
    of_removed = near.take(found.drop_null().to_numpy())
    moved = exact.take(is_moved)
    moved = Duplicates(moved.files, moved.rows, moved.ids, of_removed.duplicate_of, of_removed.similarities)
    pairs = zip(vars(near).values(), vars(moved).values(), strict=True)
    return exact.take(~is_moved), Duplicates(*(np.concatenate(pair) for pair in pairs))


def _binary(ids: np.ndarray) -> pa.Array:
    """Packed ids as values of 16 bytes."""
    return pa.FixedSizeBinaryArray.from_buffers(pa.binary(16), len(ids), [None, pa.py_buffer(ids.tobytes())])

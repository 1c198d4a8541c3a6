"""Exact copies follow their document: if it falls to a near duplicate, so do they, with the same evidence."""

import pyarrow as pa
import pyarrow.compute as pc


def reassign_copies(exact: pa.Table, near: pa.Table) -> tuple[pa.Table, pa.Table]:
    """(exact, near) after every copy of a document that near deduplication took was moved to `near`.

    Both have the columns doc_id, duplicate_of, similarity. A copy has its document's words, hence its shingles, hence
    its similarity to the document that is kept. With it, every `duplicate_of` names a document that is itself kept:
    exact [(c, b)], near [(b, a, 0.9)] -> exact [], near [(b, a, 0.9), (c, a, 0.9)]."""
    at = pc.index_in(exact.column("duplicate_of"), near.column("doc_id"))
    fell = pc.is_valid(at)
    moved = near.take(pc.filter(at, fell)).set_column(0, "doc_id", pc.filter(exact.column("doc_id"), fell))
    joined = pa.concat_tables([near, moved.cast(near.schema)]).sort_by("doc_id")
    return exact.filter(pc.invert(fell)), joined

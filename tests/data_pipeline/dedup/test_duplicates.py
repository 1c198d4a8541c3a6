import numpy as np

from gristmill.data_pipeline.dedup.duplicates import Duplicates, reassign_copies


def duplicates(*rows: tuple[int, int, float]) -> Duplicates:
    """Of (document, kept document, similarity); the documents are rows of one file, with their numbers as ids."""
    documents, kept = (np.array([row[column] for row in rows], np.int64) for column in range(2))
    ids, kept_ids = (np.stack([np.zeros_like(one), one], axis=1).astype(np.uint64) for one in (documents, kept))
    return Duplicates(np.zeros(len(rows), np.int32), documents, ids, kept_ids, np.array([row[2] for row in rows]))


def rows_of(found: Duplicates) -> list[tuple[int, int, float]]:
    assert found.rows.tolist() == found.ids[:, 1].tolist()
    return list(zip(found.rows.tolist(), found.duplicate_of[:, 1].tolist(), found.similarities.tolist(), strict=True))


def test_a_copy_falls_with_its_document_and_names_the_one_that_is_kept():
    exact, near = reassign_copies(duplicates((3, 2, 1.0), (5, 4, 1.0)), duplicates((2, 1, 0.9)))
    assert rows_of(exact) == [(5, 4, 1.0)]
    assert rows_of(near) == [(2, 1, 0.9), (3, 1, 0.9)]


def test_nothing_to_follow():
    exact, near = reassign_copies(duplicates((3, 2, 1.0)), Duplicates.none())
    assert rows_of(exact) == [(3, 2, 1.0)] and rows_of(near) == []


def test_the_table_is_sorted_by_id():
    assert duplicates((3, 2, 1.0), (1, 0, 0.9)).table().to_pylist() == [
        {"doc_id": f"{1:032x}", "duplicate_of": f"{0:032x}", "similarity": 0.9},
        {"doc_id": f"{3:032x}", "duplicate_of": f"{2:032x}", "similarity": 1.0},
    ]

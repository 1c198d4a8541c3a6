import pyarrow as pa

from gristmill.data_pipeline.dedup.copies import reassign_copies
from gristmill.data_pipeline.dedup.exact import DUPLICATES


def table(*rows):
    return pa.Table.from_pylist([dict(zip(DUPLICATES.names, row, strict=True)) for row in rows], schema=DUPLICATES)


def test_a_copy_falls_with_its_document_and_names_the_one_that_is_kept():
    exact, near = reassign_copies(table(("c", "b", 1.0), ("e", "d", 1.0)), table(("b", "a", 0.9)))
    assert exact.to_pylist() == table(("e", "d", 1.0)).to_pylist()
    assert near.to_pylist() == table(("b", "a", 0.9), ("c", "a", 0.9)).to_pylist()


def test_nothing_to_follow():
    exact, near = reassign_copies(table(("c", "b", 1.0)), table())
    assert exact.to_pylist() == table(("c", "b", 1.0)).to_pylist()
    assert near.num_rows == 0

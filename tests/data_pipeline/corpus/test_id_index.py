"""Records of the index of ids are in one order, however ids agree."""

import numpy as np
import pytest

from gristmill.data_pipeline.corpus.id_index import (
    DUPLICATE,
    ID_RECORD,
    KeptIndex,
    merged_records,
    sorted_records,
)
from gristmill.foundation.checksums import write_with_checksum


def drawn_records(size: int, second_halves: int, seed: int = 4) -> np.ndarray:
    """Many with the same id."""
    generator = np.random.default_rng(seed)
    records = np.empty(size, ID_RECORD)
    first = generator.integers(0, 700, size).astype(np.uint64)
    records["id"][:, 0] = first << np.uint64(50)
    records["id"][:, 1] = first * np.uint64(3) + generator.integers(0, second_halves, size).astype(np.uint64)
    records["table"] = generator.integers(0, 3, size) | generator.choice([0, int(DUPLICATE)], size)
    records["row"] = generator.permutation(size)
    return records


@pytest.mark.parametrize("second_halves", [1, 5])
def test_records_are_sorted_by_id_table_and_row(second_halves):
    """5: ids that agree in the first half alone, which hashes do once in 2**64."""
    records = drawn_records(3000, second_halves)
    names = sorted(map(tuple, zip(*records["id"].T.tolist(), records["table"], records["row"], strict=True)))
    ordered = sorted_records(records)
    assert [*zip(*ordered["id"].T.tolist(), ordered["table"], ordered["row"], strict=True)] == names


@pytest.mark.parametrize("second_halves", [1, 5])
@pytest.mark.parametrize("size", [0, 1, 40, 3000])
def test_merged_records_are_those_of_sorting_all(size, second_halves):
    known, new = sorted_records(drawn_records(3000, second_halves)), sorted_records(drawn_records(size, 5, seed=5))
    merged = sorted_records(np.concatenate([known, new]))
    assert np.array_equal(merged_records(known, new, np.arange(3)), merged)
    assert np.array_equal(merged_records(known[:0], new, np.arange(3)), new)


def test_records_of_tables_that_are_gone_are_left_out_and_others_get_new_numbers():
    """Table 1 is gone, and table 2 is number 4 now."""
    known = sorted_records(drawn_records(3000, 5))
    new = drawn_records(40, 5, seed=5)
    new["table"] = 2
    new = sorted_records(new)
    left = known[(known["table"] & ~DUPLICATE) != 1]
    left["table"] += 2 * ((left["table"] & ~DUPLICATE) == 2).astype(np.uint32)
    expected = sorted_records(np.concatenate([left, new]))
    assert np.array_equal(merged_records(known, new, np.array([0, -1, 4])), expected)


def test_tables_of_a_kept_index_get_their_numbers_of_now(tmp_path):
    corpus, kept = tmp_path / "corpus", KeptIndex(tmp_path / "kept")
    for number in range(2):
        write_with_checksum(corpus / "ids" / f"0000{number}.ids", b"records")
    assert kept.renumbered(["a"], 2) is None
    kept.keep(corpus, ["a", "b", "c", "c"], 2)
    numbers = kept.renumbered(["new", "a", "c", "c"], 2)
    assert numbers is not None
    assert numbers.tolist() == [1, -1, 2, 3]
    assert kept.renumbered(["c", "b", "a"], 2) is None  # in another order
    assert kept.renumbered(["a", "b", "c"], 3) is None  # another number of files
    kept.path(1).unlink()
    assert kept.renumbered(["a", "b", "c"], 2) is None

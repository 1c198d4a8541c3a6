"""Records of the index of ids are in one order, however ids agree."""

import numpy as np
import pytest

from gristmill.data_pipeline.corpus.id_index import DUPLICATE, ID_RECORD, sorted_records


@pytest.mark.parametrize("second_halves", [1, 5])
def test_records_are_sorted_by_id_table_and_row(second_halves):
    """5: ids that agree in the first half alone, which hashes do once in 2**64."""
    generator = np.random.default_rng(4)
    records = np.empty(3000, ID_RECORD)
    first = generator.integers(0, 700, 3000).astype(np.uint64)
    records["id"][:, 0] = first << np.uint64(50)
    records["id"][:, 1] = first * np.uint64(3) + generator.integers(0, second_halves, 3000).astype(np.uint64)
    records["table"] = generator.integers(0, 3, 3000) | generator.choice([0, int(DUPLICATE)], 3000)
    records["row"] = generator.permutation(3000)
    names = sorted(map(tuple, zip(*records["id"].T.tolist(), records["table"], records["row"], strict=True)))
    ordered = sorted_records(records)
    assert [*zip(*ordered["id"].T.tolist(), ordered["table"], ordered["row"], strict=True)] == names

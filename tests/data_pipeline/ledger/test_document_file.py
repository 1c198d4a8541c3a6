"""Parquet files of documents: batches of kept rows, and packed ids."""

from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gristmill.data_pipeline.ledger import document_file
from gristmill.data_pipeline.ledger.document_file import DocumentFile, packed_ids, unpacked_ids
from gristmill.foundation.errors import InputError


@pytest.mark.parametrize("group_rows", [1, 3, 10])
@pytest.mark.parametrize("long_row", [None, 4])
def test_batches_hold_the_kept_rows_in_order(tmp_path: Path, group_rows: int, long_row: int | None):
    """Also where one text is far longer than a batch."""
    texts = ["x" * (20_000_000 if row == long_row else row) for row in range(10)]
    ids = [f"{row:032x}" for row in range(10)]
    path = tmp_path / "part.parquet"
    pq.write_table(pa.table({"doc_id": ids, "text": texts}), path, row_group_size=group_rows)
    kept = np.arange(10) % 4 != 1
    batches = list(DocumentFile(path, "s", 1, kept).batches(np.arange(10) != 7))
    rows = [0, 2, 3, 4, 6, 8]
    assert np.concatenate([batch[0] for batch in batches]).tolist() == rows
    assert [doc_id for batch in batches for doc_id in batch[1].to_pylist()] == [ids[row] for row in rows]
    assert [text for batch in batches for text in batch[2].to_pylist()] == [texts[row] for row in rows]


@given(st.lists(st.integers(0, 2**128 - 1), max_size=9))
def test_packed_ids_sort_as_their_digits_do(numbers):
    digits = [f"{number:032x}" for number in numbers]
    packed = packed_ids(pa.array(digits, pa.string()), Path("x"))
    assert [(int(high) << 64) + int(low) for high, low in packed.tolist()] == numbers
    assert unpacked_ids(packed).to_pylist() == digits
    order = np.lexsort((packed[:, 1], packed[:, 0]))
    assert [digits[place] for place in order] == sorted(digits)


@pytest.mark.parametrize("wrong", [None, "", "0" * 31, "0" * 33, "0" * 31 + "g", "ä" * 16])
def test_an_id_that_is_not_32_hex_digits_is_named(wrong):
    with pytest.raises(InputError, match=rf"x: doc_id {wrong!r} is not 32 hex digits"):
        packed_ids(pa.array(["0" * 32, wrong], pa.string()), Path("x"))


@pytest.fixture
def own_pool():
    """pyarrow allocates in the pool of malloc, which other tests and their threads do not use."""
    before = pa.default_memory_pool()
    pa.set_memory_pool(pa.system_memory_pool())
    yield
    pa.set_memory_pool(before)


@pytest.mark.parametrize("most, held", [(1, 1), (2_500_000, 2)])
def test_row_groups_are_read_together_up_to_a_number_of_bytes(tmp_path, monkeypatch, own_pool, most, held):
    """Eight groups of 1.1 MB: pyarrow has never more of their texts than `held` of them, and a batch's."""
    monkeypatch.setattr(document_file, "MAX_JOINED_BYTES", most)
    rng = np.random.default_rng(1)
    texts = [rng.bytes(250).hex() for _ in range(16_384)]
    ids = [f"{number:032x}" for number in range(len(texts))]
    path = tmp_path / "documents.parquet"
    table = pa.table({"doc_id": ids, "text": texts})
    pq.write_table(table, path, row_group_size=2048, compression="none", use_dictionary=False)
    read, most_held = [], 0
    del table
    before = pa.total_allocated_bytes()
    for rows, _, found in DocumentFile(path, "source", 1).batches():
        read += found.to_pylist()
        most_held = max(most_held, pa.total_allocated_bytes() - before)
        del found
        assert len(rows) <= 8192
    assert read == texts
    group = sum(map(len, texts)) / 8
    assert most_held < (held + 3) * group

"""The shuffle against one sort of all records, and files that are damaged."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gristmill.foundation.errors import InputError
from gristmill.foundation.runtime.tasks.task_files import PartitionedFiles, range_of_keys, ranges_for

RECORD = np.dtype([("key", "<u8"), ("value", "<u4")])


@settings(max_examples=20, deadline=None)
@given(st.lists(st.lists(st.integers(0, 2**64 - 1), max_size=20), max_size=4), st.integers(1, 5) | st.just(600))
def test_the_ranges_of_all_parts_are_all_records_in_the_order_of_their_keys(tmp_path_factory, parts, ranges):
    shuffle = PartitionedFiles(tmp_path_factory.mktemp("law") / "keys", RECORD, len(parts), ranges)
    for number, keys in enumerate(parts):
        records = np.array([(key, number) for key in keys], RECORD)
        shuffle.write_unsorted(number, records, range_of_keys(records["key"], ranges))
    read = [np.sort(shuffle.read(number)) for number in range(ranges)]
    everything = [(key, number) for number, keys in enumerate(parts) for key in keys]
    assert np.concatenate(read).tolist() == sorted(everything)
    assert shuffle.num_records() == len(everything)


def test_ranges_by_hand():
    assert range_of_keys(np.array([0, 2**63 - 1, 2**63, 2**64 - 1], np.uint64), 2).tolist() == [0, 0, 1, 1]
    assert [ranges_for(records, 10) for records in (0, 10, 11, 30)] == [1, 1, 2, 3]


def test_equal_records_give_equal_bytes(tmp_path):
    records = np.array([(5, 1), (7, 2)], RECORD)
    for name in "ab":
        PartitionedFiles(tmp_path / name, RECORD, 1, 1).write(0, records, np.array([0, 2]))
    assert (tmp_path / "a-00000.rec").read_bytes() == (tmp_path / "b-00000.rec").read_bytes()


@pytest.mark.parametrize("damage", [lambda raw: raw[:-1], lambda raw: b"", lambda raw: b"x" + raw[1:]])
def test_a_damaged_part_is_named(tmp_path, damage):
    shuffle = PartitionedFiles(tmp_path / "keys", RECORD, 1, 2)
    shuffle.write(0, np.array([(5, 1), (7, 2)], RECORD), np.array([0, 1, 2]))
    shuffle.path(0).write_bytes(damage(shuffle.path(0).read_bytes()))
    with pytest.raises(InputError, match=r"keys-00000\.rec: no readable records .*; delete its folder and run again"):
        shuffle.read(0)


def test_a_part_that_was_never_written_is_an_error(tmp_path):
    with pytest.raises(InputError, match="keys-00001"):
        PartitionedFiles(tmp_path / "keys", RECORD, 2, 1).map_output(1)

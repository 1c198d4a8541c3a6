"""Windows worked by hand, and best-fit against a packer that looks at every bin."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gristmill.data_pipeline.indexed import packing
from gristmill.data_pipeline.indexed.format import IndexedReader
from gristmill.data_pipeline.indexed.packing import BestFit, Concat, best_fit_decreasing, cut, first_windows
from tests.support.indexed_files import write_documents

END = 1
LENGTHS = st.lists(st.integers(1, 20), min_size=1, max_size=60)


def reader_of(tmp_path, documents) -> IndexedReader:
    write_documents(tmp_path / "d", documents, np.uint16)
    return IndexedReader(tmp_path / "d")


def packed(reader: IndexedReader, sequence_length: int) -> BestFit:
    return BestFit(reader, sequence_length, END, first_windows(reader, sequence_length))


def test_concat_worked_by_hand(tmp_path):
    concat = Concat(reader_of(tmp_path, [[10, 11, 1], [20, 1], [30, 31, 32, 1]]), 3, END)
    assert concat.num_windows == 2  # 9 tokens: 8 targets, the last two of which fill no window of 3
    assert concat.window(0).tokens.tolist() == [10, 11, 1, 20]
    assert concat.window(0).starts.tolist() == [0]  # 20 is a target only; as an input it begins the next window
    assert concat.window(1).tokens.tolist() == [20, 1, 30, 31]
    assert concat.window(1).starts.tolist() == [0, 2]


def test_cut_worked_by_hand():
    assert cut(np.array([10, 3]), 4).tolist() == [[0, 0, 5], [0, 4, 5], [0, 8, 2], [1, 0, 3]]
    assert cut(np.array([5, 6, 1]), 4).tolist() == [[0, 0, 5], [1, 0, 5], [1, 4, 2], [2, 0, 1]]


@given(lengths=LENGTHS, sequence_length=st.integers(1, 8))
def test_every_token_but_the_first_is_a_target_once(lengths, sequence_length):
    targets = [
        (document, start + offset)
        for document, start, length in cut(np.array(lengths), sequence_length).tolist()
        for offset in range(1, length)
    ]
    assert targets == [(document, at) for document, length in enumerate(lengths) for at in range(1, length)]


def test_best_fit_worked_by_hand():
    assert best_fit_decreasing(np.array([3, 5, 2, 4]), 6).tolist() == [2, 0, 1, 1]
    assert best_fit_decreasing(np.array([4, 4, 2, 2]), 6).tolist() == [0, 1, 0, 1]


def naive_best_fit(lengths: list[int], capacity: int) -> list[int]:
    room: dict[int, int] = {}  # bin -> room left; a bin that is used again goes to the end, behind its equals
    bins = [0] * len(lengths)
    for piece in sorted(range(len(lengths)), key=lambda number: -lengths[number]):
        takers = [number for number in room if room[number] >= lengths[piece]]
        chosen = min(takers, key=lambda number: room[number]) if takers else len(room)
        left = room.pop(chosen, capacity) - lengths[piece]
        room[chosen] = left
        bins[piece] = chosen
    return bins


@given(lengths=LENGTHS)
def test_best_fit_is_what_a_naive_packer_does(lengths):
    assert best_fit_decreasing(np.array(lengths), 20).tolist() == naive_best_fit(lengths, 20)


def test_documents_stay_whole_where_they_fit(tmp_path):
    best_fit = packed(reader_of(tmp_path, [[10, 11, 12, 1], [20, 1], [30, 31, 1], [40, 41, 42, 43, 44, 45, 1]]), 5)
    windows = [best_fit.window(index) for index in range(best_fit.num_windows)]
    assert [window.tokens.tolist() for window in windows] == [
        [40, 41, 42, 43, 44, 45],
        [10, 11, 12, 1, 20, 1],
        [30, 31, 1, 45, 1, 1],  # the end of the long document, which overlaps by one token, then padding
    ]
    assert [window.starts.tolist() for window in windows] == [[0], [0, 4], [0, 3]]
    assert [window.num_valid for window in windows] == [6, 6, 5]


@pytest.mark.parametrize("group", [2, 3, 100])
def test_an_epoch_of_best_fit_takes_every_window_once(tmp_path, monkeypatch, random_documents, group):
    monkeypatch.setattr(packing, "GROUP_DOCUMENTS", group)
    best_fit = packed(reader_of(tmp_path, random_documents(0, 20, 15)), 8)
    orders = [[best_fit.order(key)(place) for place in range(best_fit.num_windows)] for key in (5, 6)]
    assert [sorted(order) for order in orders] == [list(range(best_fit.num_windows))] * 2
    assert orders[0] != orders[1]

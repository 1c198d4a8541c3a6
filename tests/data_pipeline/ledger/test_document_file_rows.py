"""Rows of annotated files: ranges, row groups and shards."""

from itertools import pairwise
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gristmill.data_pipeline.ledger.document_file import RowRange, read_rows, row_groups, spans_of_runs
from gristmill.data_pipeline.ledger.ledger import WeightRuns


@pytest.fixture
def ten_rows(tmp_path: Path) -> Path:
    """Rows 0 to 9 in row groups of 4, 4 and 2."""
    pq.write_table(pa.table({"row": range(10), "other": range(10)}), tmp_path / "ten.parquet", row_group_size=4)
    return tmp_path / "ten.parquet"


@pytest.mark.parametrize("rows", [[], [0], [3, 4], [0, 1, 2, 3], [1, 5, 9], list(range(10))])
def test_a_range_of_rows_gives_these_rows(ten_rows, rows):
    row_range = RowRange.of_rows(ten_rows, np.array(rows, np.int64))
    assert row_range.rows.tolist() == rows
    assert read_rows(row_range, ["row"]).to_pydict() == {"row": rows}


@given(st.lists(st.integers(0, 6), max_size=5), st.lists(st.integers(0, 30), max_size=3))
def test_runs_of_rows_as_spans_of_their_files(sizes, cuts):
    """Against a list of all (file, row)."""
    rows = [(file, row) for file, size in enumerate(sizes) for row in range(size)]
    runs = list(pairwise([0, *sorted(cut % (len(rows) + 1) for cut in cuts), len(rows)]))
    for (start, stop), spans in zip(runs, spans_of_runs(sizes, runs), strict=True):
        assert [(file, row) for file, first, last in spans for row in range(first, last)] == rows[start:stop]
        assert len({file for file, _, _ in spans}) == len(spans)


def runs_by_weight(pieces, limit):
    runs = WeightRuns(limit)
    for piece in pieces:
        runs.add(piece)
    return runs.bounds()


def test_runs_end_where_their_weights_reach_the_limit():
    assert runs_by_weight([np.array([3, 3, 9, 1], np.uint32)], 5) == [(0, 2), (2, 3), (3, 4)]
    assert runs_by_weight([np.array([], np.uint32)], 5) == runs_by_weight([], 5) == [(0, 0)]
    assert runs_by_weight([np.array([2**32 - 1] * 3, np.uint32)], 2**32) == [(0, 2), (2, 3)]  # does not overflow


@given(st.lists(st.integers(0, 9), max_size=30), st.lists(st.integers(0, 30), max_size=4), st.integers(1, 12))
def test_runs_do_not_depend_on_how_the_weights_come(weights, cuts, limit):
    """Against one loop over all weights."""
    expected, filled = [0], 0
    for place, weight in enumerate(weights):
        filled += weight
        if filled >= limit:
            expected, filled = [*expected, place + 1], 0
    expected = [start for start in expected if start < len(weights)] or [0]
    pieces = np.split(np.array(weights, np.uint32), sorted(cut % (len(weights) + 1) for cut in cuts))
    assert runs_by_weight(pieces, limit) == list(pairwise([*expected, len(weights)]))


def grouped(sizes: list[int], cuts: list[int], max_rows: int, max_bytes: int | None) -> list[list[int]]:
    """The row numbers in each group, of a table that comes in pieces that end at `cuts`."""
    table = pa.table({"row": np.arange(len(sizes)), "num_bytes": pa.array(sizes, pa.int64())})
    bounds = [0, *sorted(cut % (len(sizes) + 1) for cut in cuts), len(sizes)]
    pieces = [table.slice(start, stop - start) for start, stop in pairwise(bounds)]
    return [group.column("row").to_pylist() for group in row_groups(pieces, max_rows, max_bytes)]


def test_a_row_group_is_bounded_in_rows_and_in_bytes():
    """At most 3 rows and 10 bytes; the row of 50 bytes is alone."""
    assert grouped([4, 4, 4, 50, 1, 1, 1, 1], [], 3, 10) == [[0, 1], [2], [3], [4, 5, 6], [7]]
    assert grouped([4, 4, 4, 50, 1], [], 3, None) == [[0, 1, 2], [3, 4]]


@given(
    st.lists(st.integers(0, 9), max_size=30),
    st.lists(st.integers(0, 30), max_size=3),
    st.integers(1, 7),
    st.one_of(st.none(), st.integers(1, 12)),
)
def test_row_groups_do_not_depend_on_how_the_rows_come(sizes, cuts, max_rows, max_bytes):
    groups = grouped(sizes, cuts, max_rows, max_bytes)
    assert groups == grouped(sizes, [], max_rows, max_bytes)
    assert [row for group in groups for row in group] == list(range(len(sizes)))


@given(st.lists(st.integers(1, 9), max_size=60), st.lists(st.integers(0, 60), max_size=4), st.integers(2, 30))
def test_runs_with_marks_are_between_both_weights(weights, cuts, limit):
    """A run ends before the first marked item after half of the limit, and at the limit at the latest."""
    marks = np.array([weight % 3 for weight in weights], np.uint8)
    runs = WeightRuns(limit, limit // 2, 2)
    for start, stop in pairwise([0, *sorted(cut % (len(weights) + 1) for cut in cuts), len(weights)]):
        runs.add(np.array(weights[start:stop], np.int64), marks[start:stop])
    expected, filled = [0], 0
    for place, weight in enumerate(weights):
        if filled >= limit or (filled >= limit // 2 and marks[place] >= 2):
            expected, filled = [*expected, place], 0
        filled += weight
    assert [start for start, _ in runs.bounds()] == expected


def test_runs_begin_again_at_the_same_items_after_one_was_taken_out():
    generator = np.random.default_rng(3)
    weights, marks = generator.integers(500, 3000, 20_000), generator.integers(0, 8, 20_000).astype(np.uint8)
    starts = []
    for left_out in (None, 7_000):
        chosen = np.arange(20_000) != left_out
        runs = WeightRuns(1_000_000, 500_000, 7)
        runs.add(weights[chosen], marks[chosen])
        numbers = np.flatnonzero(chosen)
        starts.append({int(numbers[start]) for start in runs.starts})
    assert len(starts[0]) > 25
    assert len(starts[0] ^ starts[1]) <= 4

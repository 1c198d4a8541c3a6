"""Rewritten parts: what stands between two steps."""

from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from planted import engine, padded, write_part

from gristmill.data_pipeline.dedup.rewrite import rewrite_parts, without
from gristmill.data_pipeline.dedup.substrings import SubstringDedupConfig, repeated_substrings


@pytest.mark.parametrize(
    ("text", "spans", "in_bytes", "left"),
    [
        ("a\nb\nc", [(2, 4)], False, "a\nc"),
        ("abcdef", [(4, 6), (0, 1)], False, "bcd"),
        ("äbc", [(0, 2)], True, "bc"),
        ("abc", [], True, "abc"),
    ],
)
def test_cuts_by_hand(text: str, spans: list[tuple[int, int]], in_bytes: bool, left: str):
    assert without(text, spans, in_bytes) == left


def test_parts_stay_row_for_row(tmp_path: Path):
    texts = {"1": "one", "2": "the cat sat on the mat", "3": "and the cat sat on a hat", "4": "the cat sat on "}
    part = write_part(tmp_path / "p.parquet", texts, "tales", 3, alive=[True, True, True, False])
    config = SubstringDedupConfig(least_bytes=10)
    cuts = repeated_substrings([part], config, engine(), tmp_path / "repeats")
    (left,) = rewrite_parts([part], cuts, True, engine(), tmp_path / "left")
    assert (left.source, left.priority, left.alive.tolist()) == ("tales", 3, [True, True, True, False])
    table = pq.read_table(left.path)
    assert table.column("doc_id").to_pylist() == [padded(i) for i in texts]
    # Document 3 is longer than 2 and stays whole; the dead document 4 is left alone.
    assert table.column("text").to_pylist() == ["one", "the mat", "and the cat sat on a hat", "the cat sat on "]


def test_other_cuts_are_made_anew(tmp_path: Path):
    part = write_part(tmp_path / "p.parquet", {"1": "abcdef"})
    for start, left in ((1, "adef"), (2, "abef")):
        cuts = pa.table({"doc_id": [padded("1")], "start": [start], "stop": [start + 2]})
        (rewritten,) = rewrite_parts([part], cuts, False, engine(), tmp_path / "work")
        assert pq.read_table(rewritten.path).column("text").to_pylist() == [left]

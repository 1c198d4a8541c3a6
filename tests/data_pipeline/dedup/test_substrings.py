"""Repeated substrings, against every window compared in plain Python."""

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from planted import engine, padded, recorded_spans, write_part

from gristmill.data_pipeline.dedup import substrings
from gristmill.data_pipeline.dedup.substrings import (
    Group,
    SubstringDedupConfig,
    find_repeated_substrings,
    group_starts,
    repeats_of,
)
from gristmill.foundation.errors import InputError

TEN = SubstringDedupConfig(min_bytes=10)


def grouped(texts: list[str]) -> Group:
    raw = [text.encode() + b"\xff" for text in texts]
    firsts = np.cumsum([0, *map(len, raw)])
    return Group(np.zeros((len(raw), 2), np.uint64), np.frombuffer(b"".join(raw), np.uint8), firsts)


def repeated_bytes(texts: list[str], min_bytes: int) -> list[set[int]]:
    """Of each text, the bytes inside a window of `min_bytes` bytes that stood before."""
    seen: set[bytes] = set()
    found = []
    for text in texts:
        raw = text.encode()
        inside: set[int] = set()
        for i in range(len(raw) - min_bytes + 1):
            if raw[i : i + min_bytes] in seen:
                inside |= set(range(i, i + min_bytes))
            seen.add(raw[i : i + min_bytes])
        found.append(inside)
    return found


def test_worked_example():
    texts = ["the cat sat on the mat", "and the cat sat on a hat"]
    assert repeats_of(grouped(texts), 10) == [(1, 4, 19, 0)]
    assert texts[1][4:19] == "the cat sat on "


@given(st.lists(st.text("ab", max_size=30), max_size=5), st.integers(3, 8))
def test_agrees_with_plain_python(texts: list[str], min_bytes: int):
    found: list[set[int]] = [set() for _ in texts]
    for document, start, stop, keeper in repeats_of(grouped(texts), min_bytes):
        found[document] |= set(range(start, stop))
        assert keeper <= document
    assert found == repeated_bytes(texts, min_bytes)


@given(st.lists(st.text("ab", max_size=40), max_size=6), st.integers(3, 8))
def test_spans_of_a_document_are_disjoint(texts: list[str], min_bytes: int):
    """Ascending, and none touches the next: what two spans share would be removed twice and counted twice."""
    ends: dict[int, int] = {}
    for document, start, stop, _ in sorted(repeats_of(grouped(texts), min_bytes)):
        assert ends.get(document, -1) < start < stop
        ends[document] = stop


def test_spans_end_on_whole_characters():
    texts = ["ä" * 6, "xä" + "ä" * 6]
    for document, start, stop, _ in repeats_of(grouped(texts), 5):
        raw = texts[document].encode()
        assert raw[start:stop].decode() == "ä" * ((stop - start) // 2)


def test_the_table(tmp_path: Path):
    documents = {"1": "the cat sat on the mat, the end", "2": "and the cat sat on a hat"}
    part = write_part(tmp_path / "p.parquet", documents)
    spans = recorded_spans(find_repeated_substrings([part], TEN, engine(), tmp_path / "work"))
    assert spans == [{"doc_id": padded("2"), "start": 4, "stop": 19, "kept_in": padded("1")}]


@settings(max_examples=10)
@given(st.lists(st.text("abé", max_size=40), min_size=1, max_size=6))
def test_files_and_their_order_change_nothing(tmp_path_factory, texts):
    folder = tmp_path_factory.mktemp("law")
    documents = {f"{i + 1:x}": text for i, text in enumerate(texts)}
    one = [write_part(folder / "p.parquet", documents)]
    several = [write_part(folder / f"{k}.parquet", dict(list(documents.items())[k::2])) for k in (1, 0)]
    whole = recorded_spans(find_repeated_substrings(one, TEN, engine(), folder / "one"))
    assert whole == recorded_spans(find_repeated_substrings(several, TEN, engine(), folder / "several"))


def test_groups_bound_the_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    documents = {f"{i + 1:x}": f"{'same text in all of them ' * 20}{i}" for i in range(6)}
    part = write_part(tmp_path / "p.parquet", documents)
    sizes = []
    plain = substrings.repeats_of
    monkeypatch.setattr(
        substrings, "repeats_of", lambda group, min_bytes: sizes.append(len(group.data)) or plain(group, min_bytes)
    )
    config = SubstringDedupConfig(group_bytes=1024)
    spans = recorded_spans(find_repeated_substrings([part], config, engine(), tmp_path / "work"))
    assert len(sizes) == 3
    assert max(sizes) <= 1024
    assert {span["doc_id"] for span in spans} >= {padded(i) for i in "246"}  # the second of each group
    assert not list((tmp_path / "work").glob("texts-*"))
    monkeypatch.setattr(substrings, "ranges_for", lambda records: records)
    assert recorded_spans(find_repeated_substrings([part], config, engine(), tmp_path / "ranges")) == spans


@given(st.lists(st.integers(1, 8), max_size=20), st.integers(0, 8), st.integers(0, 20))
def test_groups_hold_as_many_documents_as_fit(lengths, filled, split):
    expected, size = [], filled
    for place, length in enumerate(lengths):
        size += length
        if size > 8:
            expected.append(place)
            size = length
    assert group_starts(np.cumsum(lengths), filled, 8) == (expected, size)
    starts, middle = group_starts(np.cumsum(lengths[:split]), filled, 8)
    rest, end = group_starts(np.cumsum(lengths[split:]), middle, 8)
    assert [*starts, *(split + start for start in rest)] == expected and end == size


def test_group_starts_by_hand():
    assert group_starts(np.cumsum([3, 3, 4, 2]), 5, 8) == ([1, 3], 2)


def test_a_document_larger_than_a_group(tmp_path: Path):
    part = write_part(tmp_path / "p.parquet", {"1": "x" * 2000})
    with pytest.raises(InputError, match="has 2000 bytes; group_bytes=1024 must be more"):
        find_repeated_substrings([part], SubstringDedupConfig(group_bytes=1024), engine(), tmp_path / "work")

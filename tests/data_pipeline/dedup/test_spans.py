"""Duplicate paragraphs and lines, on texts that can be read."""

from collections import Counter
from pathlib import Path

import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from planted import engine, padded, recorded_spans, write_part
from pydantic import ValidationError

from gristmill.data_pipeline.dedup.spans import SpanDedupConfig, find_duplicate_spans, pieces_of
from gristmill.data_pipeline.text_edits.span_removal import SpanRemoval, edit_document_files

BANNER = "Click here to accept the cookies of this page and of its partners."
ALL = SpanDedupConfig(unit="line", min_characters=1)


def after(documents: dict[str, str], config: SpanDedupConfig, folder: Path) -> dict[str, str]:
    """The documents' texts without their duplicate spans."""
    part = write_part(folder / "p.parquet", documents)
    spans = find_duplicate_spans([part], config, engine(), folder / "work")
    (rewritten,) = edit_document_files(
        [part], spans, SpanRemoval("r", "r"), engine(), folder / "rewritten"
    ).document_files
    left = pq.read_table(rewritten.path)
    assert left.column("doc_id").to_pylist() == [padded(doc_id) for doc_id in documents]
    return dict(zip(documents, left.column("text").to_pylist(), strict=True))


def test_pieces_by_hand():
    assert pieces_of("a\nb\n\nc", "line") == [(0, 2), (2, 4), (5, 6)]
    assert pieces_of("a\nb\n\nc", "paragraph") == [(0, 5), (5, 6)]
    assert pieces_of("\n\n", "paragraph") == pieces_of("", "line") == []


def test_the_first_paragraph_in_keep_order_stays(tmp_path: Path):
    documents = {
        "1": f"{BANNER}\n\nShort.",
        "2": f"The longest of the documents comes first.\n\n{BANNER}\n\nIts end.",
        "3": "  Click  here to accept the cookies of this page\nand of its partners.\n\nIts end.",
    }
    assert after(documents, SpanDedupConfig(), tmp_path) == {
        "1": "Short.",
        "2": documents["2"],
        "3": "Its end.",  # under min_characters
    }


def test_by_default_the_second_place_of_40_characters_goes(tmp_path: Path):
    long, short = "a" * 39 + ".", "b" * 38 + "."
    documents = {"1": f"{long}\n\n{short}\n\nfirst", "2": f"{long}\n\n{short}"}
    assert after(documents, SpanDedupConfig(), tmp_path)["2"] == short


def test_a_piece_counts_from_two_places_on():
    assert SpanDedupConfig(min_count=2).min_count == 2
    with pytest.raises(ValidationError, match="min_count"):
        SpanDedupConfig(min_count=1)


def test_min_count_keeps_what_occurs_only_twice(tmp_path: Path):
    documents = {"1": BANNER, "2": BANNER}
    assert after(documents, SpanDedupConfig(min_count=3), tmp_path / "a") == documents
    documents["3"] = BANNER
    left = after(documents, SpanDedupConfig(min_count=3), tmp_path / "b")
    assert left == {"1": BANNER, "2": "", "3": ""}


def test_the_record_names_count_and_first_place(tmp_path: Path):
    part = write_part(tmp_path / "p.parquet", {"1": "ab\ncd\nab\n", "2": "ab\n"})
    spans = recorded_spans(find_duplicate_spans([part], ALL, engine(), tmp_path / "work"))
    assert spans == [
        {"doc_id": padded("1"), "start": 6, "stop": 9, "count": 3, "kept_in": padded("1")},
        {"doc_id": padded("2"), "start": 0, "stop": 3, "count": 3, "kept_in": padded("1")},
    ]


def test_within_each_source_and_any_division_into_files(tmp_path: Path):
    texts = {f"{i + 1:x}": f"{'abc'[i % 3]}\nx{i}\n{'de'[i % 2]}" for i in range(9)}
    one = [write_part(tmp_path / "p.parquet", texts)]
    several = [write_part(tmp_path / f"{k}.parquet", dict(list(texts.items())[k::3])) for k in (1, 0, 2)]
    whole = recorded_spans(find_duplicate_spans(one, ALL, engine(), tmp_path / "w1"))
    assert len(whole) == 13
    assert whole == recorded_spans(find_duplicate_spans(several, ALL, engine(), tmp_path / "w2"))
    apart = [write_part(tmp_path / f"s{k}.parquet", {f"{k}": "same line"}, source=f"s{k}") for k in (1, 2)]
    within = ALL.model_copy(update={"scope": "source"})
    assert not recorded_spans(find_duplicate_spans(apart, within, engine(), tmp_path / "w3"))


@settings(max_examples=15)
@given(st.lists(st.text("ab\n", max_size=12), min_size=1, max_size=8), st.integers(2, 4))
def test_every_line_stays_once_or_was_rare(tmp_path_factory, texts, min_count):
    documents = {f"{i + 1:x}": text for i, text in enumerate(texts)}
    config = ALL.model_copy(update={"min_count": min_count})
    left = after(documents, config, tmp_path_factory.mktemp("law"))
    before = Counter(line for text in documents.values() for line in text.split("\n") if line)
    behind = Counter(line for text in left.values() for line in text.split("\n") if line)
    assert behind == {line: 1 if count >= min_count else count for line, count in before.items()}

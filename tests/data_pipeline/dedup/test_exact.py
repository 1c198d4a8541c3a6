"""Exact duplicates, against a dictionary in plain Python."""

from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from planted import engine, found, padded, write_part

from gristmill.data_pipeline.dedup import exact as module
from gristmill.data_pipeline.dedup.exact import (
    DUPLICATE,
    ExactDedupConfig,
    find_exact_duplicates,
    reassign_copies,
    table_of,
)
from gristmill.data_pipeline.dedup.folding import fold_text
from gristmill.data_pipeline.ledger.document_file import DocumentFile
from gristmill.foundation.runtime.tasks.task_files import PartitionedFiles


def exact_duplicates(document_files: list[DocumentFile], config: ExactDedupConfig, folder: Path) -> pa.Table:
    return table_of(find_exact_duplicates(document_files, config, engine(), folder))


def normalized(text: str, rule: str) -> str:
    return {"bytes": text, "whitespace": " ".join(text.split()), "words": fold_text(text)}[rule]


def by_dictionary(documents: list[tuple[int, str, str]], rule: str) -> dict[str, tuple[str, float]]:
    first: dict[str, str] = {}
    removed = {}
    for _, doc_id, text in sorted(documents, key=lambda d: (d[0], -len(d[2].encode()), padded(d[1]))):
        kept = first.setdefault(normalized(text, rule), doc_id)
        if kept != doc_id:
            removed[doc_id] = (kept, 1.0)
    return removed


def test_worked_example(tmp_path: Path):
    part = write_part(tmp_path / "p.parquet", {"1": "a b", "2": " a\n\tb", "3": "A b", "4": "a\u00a0b"})
    table = exact_duplicates([part], ExactDedupConfig(), tmp_path / "work")
    assert found(table) == {"1": ("2", 1.0), "4": ("2", 1.0)}  # 2 is the longest


@settings(max_examples=15)
@given(
    st.lists(st.tuples(st.integers(1, 2), st.text(" aA.\n", max_size=4)), min_size=1, max_size=25),
    st.sampled_from(["bytes", "whitespace", "words"]),
)
def test_agrees_with_a_dictionary(tmp_path_factory, texts, rule):
    folder = tmp_path_factory.mktemp("law")
    documents = [(priority, f"{i + 1:x}", text) for i, (priority, text) in enumerate(texts)]
    parts = [
        write_part(folder / f"{p}.parquet", {i: t for q, i, t in documents if q == p}, f"s{p}", priority=p)
        for p in {q for q, _, _ in documents}
    ]
    table = exact_duplicates(parts, ExactDedupConfig(normalization=rule), folder / "work")
    assert found(table) == by_dictionary(documents, rule)


def test_the_preset_of_mgpt_compares_all_bytes_by_64_bits(tmp_path: Path):
    config = ExactDedupConfig(preset="mgpt")
    assert (config.normalization, config.hash_bits) == ("bytes", 64)
    part = write_part(tmp_path / "p.parquet", {"1": "a b", "2": "a  b", "3": "a b", "4": "A b"})
    assert found(exact_duplicates([part], config, tmp_path / "work")) == {"3": ("1", 1.0)}
    with pytest.raises(ValueError, match="preset mgpt means normalization: bytes; drop the preset or normalization"):
        ExactDedupConfig(preset="mgpt", normalization="words")


def test_ranges_of_the_hashes_change_nothing(tmp_path: Path, monkeypatch):
    texts = {f"{number + 1:x}": f"text {number % 7}" for number in range(30)}
    part = write_part(tmp_path / "p.parquet", texts)
    whole = exact_duplicates([part], ExactDedupConfig(), tmp_path / "one")
    monkeypatch.setattr(module, "ranges_for", lambda *_: 4)
    assert len(whole) == 23
    assert exact_duplicates([part], ExactDedupConfig(), tmp_path / "four").equals(whole)


@pytest.mark.parametrize(("hash_bits", "num_removed"), [(64, 1), (128, 0)])
def test_64_bits_are_the_high_half_of_the_hash(tmp_path: Path, monkeypatch, hash_bits, num_removed):
    def equal_high_halves(data, offsets, normalization, seed):
        return b"".join(bytes(8) + number.to_bytes(8, "big") for number in range(1, len(offsets)))

    monkeypatch.setattr(module, "_keys", equal_high_halves)
    part = write_part(tmp_path / "p.parquet", {"1": "one text", "2": "other words"})
    config = ExactDedupConfig(normalization="bytes", hash_bits=hash_bits)
    assert len(exact_duplicates([part], config, tmp_path / "work")) == num_removed


def test_within_each_source_dead_rows_and_files(tmp_path: Path):
    one = write_part(tmp_path / "a.parquet", {"1": "x", "2": "x", "3": "x"}, "one", kept=[False, True, True])
    two = write_part(tmp_path / "b.parquet", {"4": "x"}, "two")
    within = ExactDedupConfig(scope="source")
    assert found(exact_duplicates([one, two], within, tmp_path / "w1")) == {"3": ("2", 1.0)}
    everywhere = exact_duplicates([one, two], ExactDedupConfig(), tmp_path / "w2")
    assert found(everywhere) == {"3": ("2", 1.0), "4": ("2", 1.0)}
    assert everywhere.equals(exact_duplicates([two, one], ExactDedupConfig(), tmp_path / "w3"))


@pytest.mark.parametrize("texts", [{}, {"1": ""}])
def test_nothing_to_do(tmp_path: Path, texts: dict[str, str]):
    part = write_part(tmp_path / "p.parquet", texts)
    assert len(exact_duplicates([part], ExactDedupConfig(), tmp_path / "work")) == 0


# Copies follow their document: worked examples.


def duplicates(prefix: Path, *rows: tuple[int, int, float]) -> PartitionedFiles:
    """Of (document, kept document, similarity); the documents are rows of one file, with their numbers as ids."""
    records = np.zeros(len(rows), DUPLICATE)
    for place, (document, kept, similarity) in enumerate(rows):
        records[place] = (0, document, (0, document), (0, kept), similarity)
    shuffle = PartitionedFiles(prefix, DUPLICATE, 1, 1)
    shuffle.write_sorted(0, records, records["file"])
    return shuffle


def rows_of(found: PartitionedFiles) -> list[tuple[int, int, float]]:
    records = found.read(0)
    assert records["row"].tolist() == records["id"][:, 1].tolist()
    rows = zip(records["row"].tolist(), records["duplicate_of"][:, 1].tolist(), records["value"].tolist(), strict=True)
    return sorted(rows)


@pytest.mark.parametrize("ranges", [1, 3])
def test_a_copy_falls_with_its_document_and_names_the_one_that_is_kept(tmp_path, monkeypatch, ranges):
    monkeypatch.setattr(module, "ranges_for", lambda *_: ranges)
    copies = duplicates(tmp_path / "e", (3, 2, 1.0), (5, 4, 1.0))
    exact, near = reassign_copies(copies, duplicates(tmp_path / "n", (2, 1, 0.9)), tmp_path / "work", engine())
    assert rows_of(exact) == [(5, 4, 1.0)]
    assert rows_of(near) == [(2, 1, 0.9), (3, 1, 0.9)]


def test_the_ranges_hold_the_documents_of_both_sides(tmp_path, monkeypatch):
    counts = []
    monkeypatch.setattr(module, "ranges_for", lambda count, *_: counts.append(count) or 1)
    copies = duplicates(tmp_path / "e", (3, 2, 1.0), (5, 4, 1.0))
    reassign_copies(copies, duplicates(tmp_path / "n", (2, 1, 0.9)), tmp_path / "work", engine())
    assert counts == [3]


def test_nothing_to_follow(tmp_path):
    copies, none = duplicates(tmp_path / "e", (3, 2, 1.0)), duplicates(tmp_path / "n")
    exact, near = reassign_copies(copies, none, tmp_path / "work", engine())
    assert rows_of(exact) == [(3, 2, 1.0)] and rows_of(near) == []


def test_the_table_is_sorted_by_id(tmp_path):
    assert table_of(duplicates(tmp_path / "e", (3, 2, 1.0), (1, 0, 0.9))).to_pylist() == [
        {"doc_id": f"{1:032x}", "duplicate_of": f"{0:032x}", "similarity": 0.9},
        {"doc_id": f"{3:032x}", "duplicate_of": f"{2:032x}", "similarity": 1.0},
    ]

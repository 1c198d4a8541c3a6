"""Counts of a hand-made source of six documents."""

from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from gristmill.data_pipeline.corpus.counts import (
    DocumentCounts,
    OutcomeCounts,
    check_not_empty,
    count_files,
    count_source,
    removal_table,
    removed_span_counts,
    source_counts,
)
from gristmill.data_pipeline.filters.apply import KEPT, QUARANTINED, REMOVED_LATER, FilterResults
from gristmill.data_pipeline.filters.presets import Rule
from gristmill.data_pipeline.filters.profiles import Rules
from gristmill.data_pipeline.ledger.removal_step import (
    PIECE,
    EvidenceFiles,
    RemovalStep,
    SourceState,
    removed_span_row,
    sorted_spans,
)
from gristmill.data_pipeline.readers.source import SourceConfig
from gristmill.foundation.errors import InputError
from gristmill.foundation.progress import Reporter
from gristmill.foundation.runtime.tasks.local import LocalEngine

IDS = [letter * 32 for letter in "abcdef"]
WORDS = Rule("gopher", "min_words", "num_words", ">=", 50, "a paper")
NO_EVIDENCE = EvidenceFiles()
TRAIN, TEST = 0, 2


def state(folder: Path, failed_rule: list[int], num_bytes: list[int], splits: list[int]) -> SourceState:
    """One annotated file, of which only the ids are read."""
    path = folder / f"annotated-{sum(num_bytes)}.parquet"
    size = len(failed_rule)
    pq.write_table(pa.table({"doc_id": IDS[:size], "text": [""] * size}), path)
    results = FilterResults(
        failed_rule=np.array(failed_rule, np.int16),
        bytes=np.array(num_bytes, np.uint32),
        splits=np.array(splits, np.int8),
        languages=np.array([1, 1, 0, 2, 1, 0][:size], np.int16),
        marks=np.zeros(size, np.uint8),
        language_names=("de", "en", ""),
        changes={"nfc": 2, "mojibake": 1} if size > 1 else {},
    )
    source = SourceConfig(name="books", format="jsonl", paths=("books.jsonl",))
    return SourceState(source, Rules((WORDS,), ()), (path,), (results,), first_file=0)


def near(row: int) -> RemovalStep:
    return RemovalStep("near_dedup", 0.8, np.zeros(1, np.int32), np.array([row]), np.array([0.9]))


def counted(read: SourceState, written: SourceState, removals: list[RemovalStep], files: EvidenceFiles, *quarantined):
    of_files = count_files([read], [written], removals, [files], LocalEngine(1, Reporter.silent()))
    return count_source(read, of_files[read.source.name], quarantined)


def document_counts(**counts: tuple[int, int]) -> DocumentCounts:
    made = DocumentCounts()
    for name, (documents, num_bytes) in counts.items():
        made.add(name, documents, num_bytes)
    return made


def test_read_is_kept_removed_and_quarantined(tmp_path):
    """a and f in train, b in test; c fails the filter, d is unreadable, e is a near duplicate."""
    splits, num_bytes = [TRAIN, TEST, TRAIN, TRAIN, TEST, TRAIN], [400, 200, 30, 0, 500, 600]
    read = state(tmp_path, [KEPT, KEPT, 0, QUARANTINED, KEPT, KEPT], num_bytes, splits)
    written = state(tmp_path, [KEPT, KEPT, 0, QUARANTINED, REMOVED_LATER, KEPT], num_bytes, splits)
    counts = counted(read, written, [near(4)], NO_EVIDENCE, {"unreadable": "invalid_json"})
    assert counts == {
        "read": {"documents": 6, "bytes": 1730},
        "kept": {"train": {"documents": 2, "bytes": 1000}, "test": {"documents": 1, "bytes": 200}},
        "removed": {
            "gopher.min_words": {"documents": 1, "bytes": 30},
            "near_dedup": {"documents": 1, "bytes": 500},
        },
        "quarantined": {"invalid_json": {"documents": 1, "bytes": 0}},
        "removed_spans": {},
        "pieces": 0,
        "changed": {"mojibake": 1, "nfc": 2},
        "languages": {
            "de": {"documents": 2, "removed": {"gopher.min_words": 1}},
            "en": {"documents": 3, "removed": {}},
        },
    }


def test_removed_spans_and_pieces_of_kept_documents_are_counted(tmp_path):
    """a (100 bytes) is split: 30 bytes are removed, pieces of 40 and 30 stay. Spans of the removed b do not count."""
    read = state(tmp_path, [KEPT, KEPT], [100, 80], [TRAIN, TRAIN])
    written = state(tmp_path, [KEPT, KEPT], [40, 30], [TRAIN, TRAIN])
    spans = [removed_span_row("a" * 32, "decontaminate.split", "x" * 100, 40, 70)]
    spans += [removed_span_row("b" * 32, "line_dedup.min_count", "y" * 80, 0, 80)]
    table = pa.Table.from_pylist(spans, schema=sorted_spans([]).schema)
    pieces = pa.table({"parent_id": ["a" * 32] * 2, "doc_id": ["1" * 32, "2" * 32]}, schema=PIECE)
    spans_file, pieces_file = tmp_path / "spans.parquet", tmp_path / "pieces.parquet"
    pq.write_table(table, spans_file)
    pq.write_table(pieces, pieces_file)
    counts = counted(read, written, [near(1)], EvidenceFiles((spans_file,), None, pieces_file))
    assert counts["kept"] == {"train": {"documents": 2, "bytes": 70}}
    assert counts["removed"] == {"near_dedup": {"documents": 1, "bytes": 80}}
    assert counts["removed_spans"] == {"decontaminate": {"documents": 1, "spans": 1, "bytes": 30}}
    assert counts["pieces"] == 1


def test_spans_are_counted_by_step_without_those_that_were_only_recorded():
    rules = ["line_dedup.min_count", "line_dedup.min_count", "substring_dedup.annotate", "substring_dedup.drop"]
    spans = [removed_span_row(f"{number // 2}" * 32, rule, "äbc", 0, 2) for number, rule in enumerate(rules)]
    table = pa.Table.from_pylist(spans, schema=sorted_spans([]).schema)
    assert removed_span_counts(table) == {"line_dedup": {"documents": 1, "spans": 2, "bytes": 6}}


@pytest.mark.parametrize(
    ("read", "kept", "spans", "pieces", "said"),
    [
        ({"documents": 3, "bytes": 30}, (2, 30), {}, 0, "documents do not add up"),
        ({"documents": 2, "bytes": 30}, (2, 29), {}, 0, "bytes do not add up"),
        ({"documents": 2, "bytes": 30}, (2, 30), {"line_dedup": {"bytes": 1}}, 0, "bytes do not add up"),
        ({"documents": 2, "bytes": 30}, (2, 30), {}, 1, "documents do not add up"),
    ],
)
def test_counts_that_do_not_add_up_are_refused(read, kept, spans, pieces, said):
    with pytest.raises(RuntimeError, match=said):
        source_counts(
            read, OutcomeCounts(document_counts(train=kept), DocumentCounts(), DocumentCounts(), spans), pieces
        )


def test_document_counts_leave_out_names_without_documents():
    counts = DocumentCounts()
    counts.add_rows("none", np.array([False, False]), np.array([5, 6]))
    counts.add_rows("some", np.array([True, True]), np.array([5, 6]))
    counts.add("some", 1, 9)
    assert counts.counts == {"some": {"documents": 3, "bytes": 20}} and counts.total() == {"documents": 3, "bytes": 20}


BOOKS = SourceConfig(name="books", format="text", paths=("books",))


def entry(read: int, kept: dict, removed: dict, quarantined: dict) -> dict:
    def held(counts: dict) -> dict:
        return {name: {"documents": number, "bytes": 0} for name, number in counts.items()}

    return {
        "read": {"documents": read, "bytes": 0},
        "kept": held(kept),
        "removed": held(removed),
        "quarantined": held(quarantined),
    }


@pytest.mark.parametrize(
    ("counts", "said"),
    [
        (entry(0, {}, {}, {}), "source books: its files hold no documents"),
        (entry(3, {}, {}, {"invalid_json": 3}), "none of its 3 documents can be read; the first: line 1"),
        (entry(3, {"test": 3}, {}, {}), "all 3 documents are in held-out splits; lower curate.splits"),
        (
            entry(6, {"test": 1}, {"gopher.min_words": 3, "near_dedup": 1}, {"invalid_json": 1}),
            r"of 6 documents none is left to train on \(1 are held out\); gopher.min_words removed 3 of them",
        ),
    ],
)
def test_a_source_without_training_documents_is_refused(counts, said):
    with pytest.raises(InputError, match=said):
        check_not_empty(BOOKS, counts, "line 1")


@pytest.mark.parametrize(
    ("removed", "quarantined", "advice"),
    [
        ({"gopher.min_words": 2}, {"bad_pdf": 1}, "loosen that rule in curate.filters"),
        ({"near_dedup": 2}, {"bad_pdf": 1}, "they are copies of other documents; curate.near_dedup: null keeps copies"),
        ({"near_dedup": 1}, {"bad_pdf": 2}, "check the source's format and fields; quarantine.jsonl says why"),
    ],
)
def test_the_advice_names_the_part_of_the_recipe_that_removed_most(removed, quarantined, advice):
    with pytest.raises(InputError, match=f"removed 2 of them; {advice}"):
        check_not_empty(BOOKS, entry(3, {}, removed, quarantined))


def test_one_training_document_is_enough():
    check_not_empty(BOOKS, entry(9, {"train": 1}, {"gopher.min_words": 8}, {}))


def test_a_held_out_source_needs_documents_of_its_split():
    scored = BOOKS.model_copy(update={"held_out": "test"})
    check_not_empty(scored, entry(3, {"test": 3}, {}, {}))
    with pytest.raises(InputError, match="of 3 documents none is left to score; zlib removed 3 of them"):
        check_not_empty(scored, entry(3, {}, {"zlib": 3}, {}))


def test_the_table_of_the_terminal():
    """Ten documents: one unreadable, two too short, one a duplicate; six are kept. Shares are of what was read."""
    entry = {
        "read": {"documents": 10, "bytes": 1000},
        "pieces": 0,
        "quarantined": {"invalid_json": {"documents": 1, "bytes": 0}},
        "removed": {
            "exact_dedup": {"documents": 1, "bytes": 100},
            "gopher_quality.min_words": {"documents": 2, "bytes": 50},
        },
        "removed_spans": {"paragraph_dedup": {"documents": 2, "spans": 3, "bytes": 40}},
        "kept": {"train": {"documents": 5, "bytes": 710}, "test": {"documents": 1, "bytes": 100}},
    }
    rules = [{"rule": "gopher_quality.min_words"}]
    assert [line.split("  ") for line in removal_table({"sources": {"web": entry}, "rules": {"web": rules}})] == [
        row.split("  ")
        for row in (
            "source  step or rule                       documents    text     left",
            "web     read                                      10    1 kB  100.0 %",
            "        invalid_json                              -1           90.0 %",
            "        gopher_quality.min_words                  -2   -50 B   70.0 %",
            "        exact_dedup                               -1  -100 B   60.0 %",
            "        paragraph_dedup in kept documents          2   -40 B         ",
            "        kept (train 5, test 1)                     6   810 B   60.0 %",
        )
    ]
    many = {f"s{number}": entry for number in range(11)}
    table = removal_table({"sources": many, "rules": dict.fromkeys(many, rules)})
    assert table[1].split() == ["all", "11", "read", "110", "11", "kB", "100.0", "%"]
    assert sum("read" in line for line in table) == 1

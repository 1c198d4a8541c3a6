import os
import shutil
import subprocess
import sys
from collections import Counter
from pathlib import Path

import orjson
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from gristmill.data_pipeline.annotate.annotate import AnnotateTask
from gristmill.data_pipeline.corpus.counts import COUNTS_NAME
from gristmill.data_pipeline.corpus.document_history import why
from gristmill.data_pipeline.ledger.ledger import QUARANTINE_NAME
from gristmill.data_pipeline.readers.source import SourceConfig
from gristmill.foundation.errors import InputError
from tests.support.corpora import prose, run_curate, tree_digests, write_jsonl

ROOT = Path(__file__).parents[2]


def source(tmp_path, name="books", **settings) -> SourceConfig:
    settings = {"format": "jsonl", "paths": (str(tmp_path / f"{name}*.jsonl"),), **settings}
    return SourceConfig(name=name, **settings)


def ledger_of(folder, name="books") -> list[dict]:
    return pq.read_table(folder / "curate" / "ledger" / f"{name}-00000.parquet").to_pylist()


@pytest.fixture
def books(tmp_path) -> SourceConfig:
    return write_books(tmp_path)


@pytest.fixture(scope="module")
def curated(tmp_path_factory) -> tuple[Path, dict]:
    """(folder, counts of the books) of one run."""
    folder = tmp_path_factory.mktemp("curated")
    return folder, run_curate([write_books(folder)], folder)["sources"]["books"]


def write_books(folder: Path) -> SourceConfig:
    """40 good texts; one short, one a copy, one nearly a copy; three records that cannot be read."""
    good = [{"text": prose(k), "url": f"u{k}", "shelf": k} for k in range(40)]
    nearly = prose(3) + "\nA new last line that was not there before."
    others = [{"text": "Too short"}, {"text": prose(5)}, {"text": nearly}]
    broken = [b'{"text": "half', b"[1, 2]", {"body": "no text here"}, b'{"text": "bad \xff byte"}']
    write_jsonl(folder / "books.jsonl", good + others + broken)
    return source(folder)


def test_every_document_has_an_outcome_and_the_counts_add_up(curated):
    folder, counts = curated
    assert counts["read"]["documents"] == 47
    assert sum(kept["documents"] for kept in counts["kept"].values()) == 40
    assert {rule: entry["documents"] for rule, entry in counts["removed"].items()} == {
        "gopher_quality.min_words": 1,
        "exact_dedup": 1,
        "near_dedup": 1,
    }
    assert counts["quarantined"] == {
        kind: {"documents": 1, "bytes": 0}
        for kind in ("invalid_json", "no_object", "no_text_field", "invalid_encoding")
    }
    rows = ledger_of(folder)
    assert len({row["doc_id"] for row in rows}) == 47
    assert Counter(row["outcome"] for row in rows) == {"kept": 40, "removed": 3, "quarantined": 4}
    assert orjson.loads((folder / "curate" / COUNTS_NAME).read_bytes())["sources"]["books"] == counts


def test_the_ledger_says_by_which_rule_and_of_which_document(curated):
    rows = {row["record"]: row for row in ledger_of(curated[0])}
    short = rows[40]
    assert (short["rule"], short["value"], short["threshold"]) == ("gopher_quality.min_words", 2, 50)
    assert [failure["rule"] for failure in short["failed"]] == [
        "gopher_quality.min_words",
        "gopher_quality.min_stop_words",
    ]
    # of two equal texts the one with the lower id is kept; of two similar ones the longer
    copies = {rows[5]["doc_id"]: rows[5], rows[41]["doc_id"]: rows[41]}
    assert copies[max(copies)]["duplicate_of"] == min(copies)
    assert rows[3]["step"] == "near_dedup" and rows[3]["duplicate_of"] == rows[42]["doc_id"]
    assert 0.8 <= rows[3]["similarity"] < 1


def test_quarantine_names_the_place_and_the_reason(curated):
    folder, _ = curated
    lines = [orjson.loads(line) for line in (folder / "curate" / QUARANTINE_NAME).read_bytes().splitlines()]
    assert [line["record"] for line in lines] == [43, 44, 45, 46]
    reasons = [line["reason"] for line in lines]
    assert reasons[0].startswith("invalid JSON")
    assert reasons[1] == "the line is a JSON list, not an object"
    assert reasons[2] == "no field 'text'; fields are body; set text_field of source books"
    assert reasons[3] == "invalid UTF-8 at byte 14 of the line"
    raw = (folder / "books.jsonl").read_bytes()
    assert raw[lines[1]["offset"] :].startswith(b"[1, 2]")


def test_documents_and_signals_are_row_for_row(curated):
    folder, _ = curated
    for split in ("train", "validation", "test"):
        documents = pq.read_table(folder / "curate" / "documents" / split / "books-00000.parquet")
        signals = pq.read_table(folder / "curate" / "signals" / split / "books-00000.parquet")
        assert documents.column("doc_id") == signals.column("doc_id")
        assert [len(text) for text in documents.column("text").to_pylist()] == signals.column("num_chars").to_pylist()
    row = pq.read_table(folder / "curate" / "documents" / "train" / "books-00000.parquet").to_pylist()[0]
    assert row["source"] == "books" and row["language"] == "en" and row["url"].startswith("u")
    assert orjson.loads(row["metadata"]) == {"shelf": int(row["url"][1:])}


def test_workers_shards_and_split_points_change_no_byte(tmp_path, monkeypatch):
    for k in range(3):
        write_jsonl(tmp_path / f"books{k}.jsonl", [{"text": prose(100 * k + i)} for i in range(60)])
    run_curate([source(tmp_path)], tmp_path / "one", workers=1, shard_bytes=20_000)
    run_curate([source(tmp_path)], tmp_path / "two", workers=2, shard_bytes=20_000)
    monkeypatch.setattr("gristmill.data_pipeline.annotate.annotate.MIN_RANGE_BYTES", 3_000)
    run_curate([source(tmp_path)], tmp_path / "cut", workers=1, shard_bytes=20_000)
    assert len(list((tmp_path / "cut" / "cache" / "annotated").glob("*.parquet"))) > 20
    whole = tree_digests(tmp_path / "one" / "curate")
    assert len([name for name in whole if name.startswith("documents/train")]) > 3
    assert tree_digests(tmp_path / "two" / "curate") == whole
    assert tree_digests(tmp_path / "cut" / "curate") == whole


def test_names_and_places_of_files_leave_no_trace(tmp_path):
    for k in range(3):
        write_jsonl(tmp_path / "a" / f"books{k}.jsonl", [{"text": prose(100 * k + i)} for i in range(20)])
        write_jsonl(tmp_path / "b" / "deep" / f"{9 - k}.jsonl", [{"text": prose(100 * k + i)} for i in range(20)])
    run_curate([source(tmp_path / "a")], tmp_path / "x")
    run_curate([source(tmp_path, paths=(str(tmp_path / "b/**/*.jsonl"),))], tmp_path / "y")
    assert tree_digests(tmp_path / "x" / "curate") == tree_digests(tmp_path / "y" / "curate")


def test_a_document_stays_on_its_side_when_the_source_grows(tmp_path):
    def sides(folder):
        return {
            text: split
            for split in ("train", "validation", "test")
            for text in pq.read_table(folder / "curate/documents" / split / "books-00000.parquet")
            .column("text")
            .to_pylist()
        }

    first = [{"text": prose(i)} for i in range(60)]
    splits = {"validation": 0.2, "test": 0.2}
    write_jsonl(tmp_path / "books.jsonl", first)
    run_curate([source(tmp_path)], tmp_path / "before", splits=splits)
    write_jsonl(tmp_path / "books.jsonl", [{"text": prose(1000 + i)} for i in range(30)] + first)
    run_curate([source(tmp_path)], tmp_path / "after", splits=splits)
    before, after = sides(tmp_path / "before"), sides(tmp_path / "after")
    assert {text: after[text] for text in before} == before
    assert set(before.values()) == {"train", "validation", "test"}


def test_all_documents_of_a_held_out_source_are_in_its_split(books, tmp_path):
    write_jsonl(tmp_path / "declarations.jsonl", [{"text": prose(k)} for k in range(100, 130)])
    scored = source(tmp_path, "declarations", held_out="test")
    counts = run_curate([books, scored], tmp_path)["sources"]
    assert counts["declarations"]["kept"] == {
        "test": {"documents": 30, "bytes": counts["declarations"]["read"]["bytes"]}
    }
    assert {row["split"] for row in ledger_of(tmp_path, "declarations")} == {"test"}
    assert counts["books"]["kept"]["train"]["documents"] > 30


def test_languages_of_a_source_replace_those_of_the_recipe(books, tmp_path):
    write_jsonl(tmp_path / "foreign.jsonl", [{"text": prose(k)} for k in range(100, 110)])
    required = books.model_copy(update={"on_empty": "error"})
    sources = [required, source(tmp_path, "foreign", languages=("fr", "en"))]
    with pytest.raises(
        InputError, match=r"source books: of 47 documents none is left .* language\.min_score removed 43"
    ):
        run_curate(sources, tmp_path, languages=("fr",))
    counts = run_curate([source(tmp_path, languages=()), sources[1]], tmp_path, languages=("fr",))["sources"]
    assert [set(counts[name]["removed"]) & {"language.min_score"} for name in ("books", "foreign")] == [set(), set()]


def test_another_threshold_annotates_nothing_anew(books, tmp_path, monkeypatch):
    run_curate([books], tmp_path)

    def refuse(task: AnnotateTask) -> None:
        raise AssertionError("annotated again")

    monkeypatch.setattr("gristmill.data_pipeline.annotate.annotate.annotate", refuse)
    (tmp_path / "curate").rename(tmp_path / "before")
    counts = run_curate([books], tmp_path, filters=({"gopher_quality": {"min_words": 1, "min_stop_words": None}},))
    assert sum(kept["documents"] for kept in counts["sources"]["books"]["kept"].values()) == 41


def test_one_file_twice_is_exact_duplicates_with_ids_of_their_own(tmp_path):
    for name in ("books1", "books2"):
        write_jsonl(tmp_path / f"{name}.jsonl", [{"text": prose(k)} for k in range(10)])
    counts = run_curate([source(tmp_path)], tmp_path)["sources"]["books"]
    assert counts["removed"]["exact_dedup"]["documents"] == 10
    assert len({row["doc_id"] for row in ledger_of(tmp_path)}) == 20


def test_priority_decides_which_copy_stays(tmp_path):
    write_jsonl(tmp_path / "web.jsonl", [{"text": prose(k)} for k in range(12)])
    write_jsonl(tmp_path / "books.jsonl", [{"text": prose(k)} for k in range(10)])
    web, books = source(tmp_path, "web", priority=2), source(tmp_path, "books", priority=1)
    counts = run_curate([web, books], tmp_path)["sources"]
    assert "exact_dedup" not in counts["books"]["removed"]
    assert counts["web"]["removed"]["exact_dedup"]["documents"] == 10


def test_an_empty_source_is_refused(tmp_path):
    (tmp_path / "books.jsonl").write_bytes(b"\n\n")
    with pytest.raises(InputError, match="books: its files hold no documents"):
        run_curate([source(tmp_path)], tmp_path)


def test_a_source_emptied_by_a_rule_says_which(tmp_path):
    write_jsonl(tmp_path / "books.jsonl", [{"text": "Too short."}] * 3)
    with pytest.raises(InputError, match=r"none is left to train on.*gopher_quality.min_words removed 3"):
        run_curate([source(tmp_path)], tmp_path)


def test_a_source_emptied_by_a_rule_leaves_its_ledger(tmp_path):
    """`why` shows what removed each document, no corpus stands there, and other thresholds go on from there."""
    write_jsonl(tmp_path / "books.jsonl", [{"text": prose(k)} for k in range(3)])
    strict = {"filters": ({"gopher_quality": {"min_words": 10000}},)}
    with pytest.raises(InputError, match=r"The ledger in .*ledger records why each document was removed"):
        run_curate([source(tmp_path)], tmp_path, **strict)
    rows = pq.read_table(tmp_path / "curate/ledger/books-00000.parquet").to_pylist()
    assert [(row["outcome"], row["rule"]) for row in rows] == [("removed", "gopher_quality.min_words")] * 3
    life = why(rows[0]["doc_id"], tmp_path / "curate")
    assert life[-1].outcome == "removed by gopher_quality.min_words"
    assert not (tmp_path / "curate/documents").exists()
    with pytest.raises(InputError, match="none is left to train on"):
        run_curate([source(tmp_path)], tmp_path, **strict)


def test_a_source_without_the_text_field_says_what_its_fields_are(tmp_path):
    write_jsonl(tmp_path / "books.jsonl", [{"body": prose(1)}] * 3)
    with pytest.raises(InputError, match=r"none of its 3 documents can be read.*no field 'text'; fields are body"):
        run_curate([source(tmp_path)], tmp_path)


def test_a_glob_that_matches_nothing_is_refused(tmp_path):
    with pytest.raises(InputError, match=r"nowhere/\*.jsonl: no file matches; check the path"):
        run_curate([source(tmp_path, paths=("nowhere/*.jsonl",))], tmp_path)


def test_formats_side_by_side(tmp_path):
    (tmp_path / "notes").mkdir()
    for k in range(4):
        (tmp_path / "notes" / f"{k}.md").write_text(prose(k))
    (tmp_path / "lines.txt").write_text("\n".join(prose(10 + k).replace("\n", " ") for k in range(4)))
    table = pa.table({"content": [prose(20 + k) for k in range(4)], "lang": ["en"] * 4})
    pq.write_table(table, tmp_path / "table.parquet", row_group_size=2)
    sources = [
        SourceConfig(name="md", format="markdown", paths=(str(tmp_path / "notes"),)),
        SourceConfig(name="txt", format="text", paths=(str(tmp_path / "lines.txt"),), record="line"),
        SourceConfig(name="pq", format="parquet", paths=(str(tmp_path / "*.parquet"),), text_field="content"),
    ]
    counts = run_curate(sources, tmp_path / "work")["sources"]
    assert [counts[name]["read"]["documents"] for name in ("md", "txt", "pq")] == [4, 4, 4]


def test_why_tells_a_document_s_life(curated):
    folder, _ = curated
    rows = {row["record"]: row for row in ledger_of(folder)}
    told = {k: [(e.step, e.outcome) for e in why(rows[k]["doc_id"], folder)] for k in (40, 3, 42, 44)}
    assert told[40] == [("read", "read"), ("filters", "removed by gopher_quality.min_words")]
    assert told[3] == [("read", "read"), ("filters", "passed"), ("near_dedup", "removed as a duplicate")]
    assert told[44] == [("read", "quarantined")]
    life = why(rows[42]["doc_id"], folder / "curate")
    assert [e.step for e in life] == ["read", "filters", "deduplication", "split"]
    assert rows[3]["doc_id"] in life[2].lines[0]
    with pytest.raises(InputError, match=r"no document 0{32}"):
        why("0" * 32, folder)


SCRIPT = """
import itertools, os, sys
from pathlib import Path
from gristmill.data_pipeline.annotate.annotate import annotate
from gristmill.foundation import files
from gristmill.data_pipeline.readers.source import SourceConfig
from tests.support.corpora import run_curate
annotate.MIN_RANGE_BYTES = 10_000
writes, sync, last = itertools.count(1), files.sync, int(sys.argv[3])
files.sync = lambda path: os._exit(9) if next(writes) == last else sync(path)
books = SourceConfig(name="books", format="jsonl", paths=(sys.argv[1],))
run_curate([books], Path(sys.argv[2]), shard_bytes=20_000)
"""


def test_killed_at_a_write_and_run_again_gives_the_same_bytes(tmp_path):
    for k in range(3):
        write_jsonl(tmp_path / f"books{k}.jsonl", [{"text": prose(100 * k + i)} for i in range(60)])
    run_curate([source(tmp_path)], tmp_path / "whole", shard_bytes=20_000)
    for last in (5, 12):  # while annotating; while writing shards
        command = [sys.executable, "-c", SCRIPT, str(tmp_path / "books*.jsonl"), str(tmp_path / "killed"), str(last)]
        assert subprocess.run(command, env=os.environ | {"PYTHONPATH": str(ROOT)}).returncode == 9
    run_curate([source(tmp_path)], tmp_path / "killed", shard_bytes=20_000)
    found = tree_digests(tmp_path / "killed" / "curate")
    assert {name: d for name, d in found.items() if not name.endswith(".tmp")} == tree_digests(
        tmp_path / "whole/curate"
    )


def test_a_kill_while_the_intermediate_files_are_removed_gives_the_same_bytes(tmp_path, monkeypatch):
    """The files of half of a step were gone, and the next run took the other half for the whole of it."""
    shared = prose(7)
    write_jsonl(tmp_path / "books.jsonl", [{"text": f"{prose(k)}\n\n{shared}"} for k in range(30)])
    settings = {"span_dedup": ({"unit": "paragraph"},), "near_dedup": {"bands": 2, "rows": 2}}
    run_curate([source(tmp_path)], tmp_path / "whole", **settings)

    def killed(folder, *_, **__):
        for path in sorted(Path(folder).rglob("*.npy")):
            path.unlink()
        raise KeyboardInterrupt

    with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
        patched.setattr(shutil, "rmtree", killed)
        run_curate([source(tmp_path)], tmp_path / "killed", **settings)
    run_curate([source(tmp_path)], tmp_path / "killed", **settings)
    assert tree_digests(tmp_path / "killed/curate") == tree_digests(tmp_path / "whole/curate")


def test_a_filter_that_edits_is_recorded_and_its_text_is_kept(tmp_path):
    texts = [prose(k) + "\nClick here\nThis site uses cookies daily." for k in range(30)]
    write_jsonl(tmp_path / "books.jsonl", [{"text": text} for text in [*texts, "Nothing ends well\n" * 30]])
    filters = ({"gopher_quality": {"min_words": 122}}, "c4", {"fineweb_quality": {"line_punctuation_ratio": 1.0}})
    counts = run_curate([source(tmp_path)], tmp_path, filters=filters)["sources"]["books"]
    assert {rule: entry["documents"] for rule, entry in counts["removed"].items()} == {"gopher_quality.min_words": 1}
    documents = pq.read_table(tmp_path / "curate/documents/train/books-00000.parquet").column("text").to_pylist()
    assert documents and all("cookies" not in text and "Click" not in text for text in documents)
    signals = pq.read_table(tmp_path / "curate/signals/train/books-00000.parquet").to_pylist()[0]
    assert (signals["c4_lines"], signals["c4_removed_no_terminal"], signals["c4_removed_policy"]) == (12, 1, 1)
    assert signals["before_c4_num_lines"] == 12 and signals["num_lines"] == 10

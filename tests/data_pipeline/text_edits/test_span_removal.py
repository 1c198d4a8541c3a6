"""Curation with the steps that rewrite texts: what is cut, dropped or split, and what is said of it."""

import multiprocessing
import os
import signal
from pathlib import Path

import numpy as np
import orjson
import pyarrow.parquet as pq
import pytest
from planted import engine, padded, write_part
from pydantic import ValidationError

from gristmill.data_pipeline.corpus.document_history import why
from gristmill.data_pipeline.curate_config import CurateConfig
from gristmill.data_pipeline.decontamination.config import BenchmarkExample
from gristmill.data_pipeline.dedup.substrings import REPEAT, SubstringDedupConfig, find_repeated_substrings
from gristmill.data_pipeline.readers.source import SourceConfig
from gristmill.data_pipeline.text_edits.span_removal import (
    SpanRemoval,
    edit_document_files,
    in_characters,
    remove_spans,
)
from gristmill.foundation.errors import InputError
from gristmill.foundation.runtime.tasks.task_files import PartitionedFiles
from tests.support.corpora import prose, run_curate, tree_digests, write_jsonl

NOTICE = "By reading on you accept that this page may keep a cookie on your machine for as long as it likes."
PASSAGE = " ".join(prose(900, 60).split())  # 340 characters that two documents share
QUESTION = "Which of the seven rivers that cross the old kingdom has never once frozen over in any recorded winter?"
SPANS = {"unit": "paragraph", "min_count": 2}
FILTERS = ({"gopher_quality": {"min_words": 5, "min_stop_words": 0}},)


def source(folder: Path, name: str = "books", **settings) -> SourceConfig:
    return SourceConfig(name=name, format="jsonl", paths=(str(folder / f"{name}*.jsonl"),), **settings)


@pytest.fixture
def books(tmp_path: Path) -> SourceConfig:
    return write_books(tmp_path)


@pytest.fixture(scope="module")
def edited(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict]:
    """(folder, counts of the books) of one run of all steps, over three splits."""
    folder = tmp_path_factory.mktemp("edited")
    splits = {"validation": 0.3, "test": 0.3}
    return folder, run_curate([write_books(folder)], folder, splits=splits, **steps(folder))["sources"]["books"]


def write_books(folder: Path) -> SourceConfig:
    """0 to 29 clean; 30, 31 end in a notice, which all of 32 is; 33, 34 share a passage; a question stands in 35
    (long around it), 36 (short) and, eleven times, in 37."""
    texts = [prose(k) for k in range(30)]
    texts += [f"{prose(30, 150)}\n\n{NOTICE}", f"{prose(31)}\n\n{NOTICE}", NOTICE]
    texts += [f"{prose(33, 200)} {PASSAGE} {prose(133)}", f"{prose(34)} {PASSAGE}"]
    texts += [f"{prose(35)} {QUESTION} {prose(135)}", f"Well. {QUESTION} Yes."]
    texts += ["".join(f"{prose(200 + k)} {QUESTION} " for k in range(12))]
    write_jsonl(folder / "books.jsonl", [{"text": text, "shelf": k} for k, text in enumerate(texts)])
    write_jsonl(folder / "rivers.jsonl", [{"id": "r7", "question": QUESTION, "choices": ["the Arl", "none"]}])
    return source(folder)


def steps(folder: Path, **changed) -> dict:
    benchmark = {"name": "rivers", "paths": [str(folder / "rivers.jsonl")], "fields": ["question"], "id_field": "id"}
    return {
        "filters": FILTERS,
        "span_dedup": [SPANS],
        "substring_dedup": {"min_bytes": 200},
        "decontaminate": {"benchmarks": [benchmark], "margin": 10, "common": 100, **changed},
    }


def ledger_of(folder: Path) -> dict[int, dict]:
    rows = pq.read_table(folder / "curate/ledger/books-00000.parquet").to_pylist()
    return {row["record"]: row for row in rows}


def documents_of(folder: Path) -> dict[str, dict]:
    paths = sorted((folder / "curate/documents").glob("*/books-*.parquet"))
    return {row["doc_id"]: row for path in paths for row in pq.read_table(path).to_pylist()}


def test_what_is_cut_is_on_record_and_the_counts_add_up(edited):
    folder, counts = edited
    assert {name: entry["documents"] for name, entry in counts["removed"].items()} == {
        "paragraph_dedup": 1,
        "decontaminate": 2,
    }
    assert {name: (entry["documents"], entry["spans"]) for name, entry in counts["removed_spans"].items()} == {
        "paragraph_dedup": (1, 1),
        "substring_dedup": (1, 1),
        "decontaminate": (1, 1),
    }
    assert counts["pieces"] == 1
    rows, documents = ledger_of(folder), documents_of(folder)
    assert len(rows) == 38 and sum(entry["documents"] for entry in counts["kept"].values()) == len(documents) == 36
    assert sum(len(row["text"].encode()) for row in documents.values()) == sum(
        entry["bytes"] for entry in counts["kept"].values()
    )
    (cut,) = rows[31]["removed_spans"]  # document 30 is longer, so the notice stays there
    assert (cut["rule"], cut["kept_in"]) == ("paragraph_dedup.min_count", rows[30]["doc_id"])
    assert (prose(31) + "\n\n" + NOTICE)[cut["start"] :] == NOTICE == (cut["excerpt"] + NOTICE[80:])
    assert documents[rows[31]["doc_id"]]["text"].strip() == prose(31)
    assert (rows[32]["step"], rows[32]["rule"]) == ("paragraph_dedup", "paragraph_dedup.nothing_left")
    (cut,) = rows[34]["removed_spans"]
    assert (cut["rule"], cut["kept_in"]) == ("substring_dedup.remove", rows[33]["doc_id"])
    assert PASSAGE not in documents[rows[34]["doc_id"]]["text"]
    assert PASSAGE in documents[rows[33]["doc_id"]]["text"]


def test_a_split_document_s_pieces_keep_their_parent(edited):
    folder, _ = edited
    rows, documents = ledger_of(folder), documents_of(folder)
    split = rows[35]
    pieces = [documents[doc_id] for doc_id in split["pieces"]]
    assert split["outcome"] == "kept" and split["doc_id"] not in documents and len(pieces) == 2
    assert [orjson.loads(piece["metadata"]) for piece in pieces] == [
        {"parent_id": split["doc_id"], "piece": number, "shelf": 35} for number in (0, 1)
    ]
    assert all("rivers" not in piece["text"] and len(piece["text"]) >= 200 for piece in pieces)
    found = {"benchmark": "rivers", "example": "r7", "field": "question", "kind": "verbatim", "matched": 7, "of": 7}
    assert split["contamination"] == rows[36]["contamination"] == [found]
    (cut,) = split["removed_spans"]
    assert (cut["rule"], cut["benchmark"], cut["example"]) == ("decontaminate.split", "rivers", "r7")
    assert (rows[36]["rule"], rows[36]["threshold"]) == ("decontaminate.min_piece_characters", 200)
    assert (rows[37]["rule"], rows[37]["value"], rows[37]["threshold"]) == ("decontaminate.max_pieces", 12, 10)
    report = orjson.loads((folder / "curate/decontamination/report.json").read_bytes())["rivers"]
    assert (report["examples"], report["verbatim"], report["documents"], report["dropped"]) == (1, 1, 3, 2)
    outcomes = {35: "split", 36: "dropped", 37: "dropped"}
    (question,) = (folder / "curate/decontamination/questions.jsonl").read_text().splitlines()
    assert orjson.loads(question) == {
        "benchmark": "rivers",
        "example": "r7",
        "kind": "verbatim",
        "fields": {"question": "verbatim"},
        "texts": {"question": QUESTION},
        "documents": sorted(
            ({"doc_id": rows[k]["doc_id"], "kind": "verbatim", "outcome": outcome} for k, outcome in outcomes.items()),
            key=lambda row: row["doc_id"],
        ),
    }
    assert "| rivers | 1 |" in (folder / "curate/decontamination/report.md").read_text()


def test_signals_are_of_the_text_that_is_left(edited):
    folder, _ = edited
    documents = documents_of(folder)
    signals = {
        row["doc_id"]: row
        for path in sorted((folder / "curate/signals").glob("*/books-*.parquet"))
        for row in pq.read_table(path).to_pylist()
    }
    assert signals.keys() == documents.keys()
    for doc_id, row in documents.items():
        assert signals[doc_id]["num_chars"] == len(row["text"])
        assert signals[doc_id]["num_words"] >= 1 and signals[doc_id]["detected_language"] == "en"


def test_pieces_of_one_document_stand_on_one_side(edited):
    folder, _ = edited
    sides = {
        doc_id: path.parent.name
        for path in sorted((folder / "curate/documents").glob("*/books-*.parquet"))
        for doc_id in pq.read_table(path).column("doc_id").to_pylist()
    }
    assert len(set(sides.values())) == 3
    for row in ledger_of(folder).values():
        if row["outcome"] == "kept":
            assert {sides[doc_id] for doc_id in row["pieces"] or [row["doc_id"]]} == {row["split"]}


def test_why_tells_of_cuts_and_pieces(edited):
    folder, _ = edited
    rows = ledger_of(folder)
    told = {k: [(event.step, event.outcome) for event in why(rows[k]["doc_id"], folder)] for k in (31, 32, 35, 36)}
    assert ("paragraph_dedup.min_count", f"removed 1 spans, {len(NOTICE)} characters") in told[31]
    assert told[32][-1] == ("paragraph_dedup", "removed")
    assert told[35][-3] == ("decontamination", "1 benchmark texts found")
    assert [step for step, _ in told[35][-2:]] == ["split", "split"]  # each piece has its place
    assert told[36][-2:] == [("decontamination", "1 benchmark texts found"), ("decontaminate", "removed")]
    life = why(rows[35]["pieces"][1], folder)
    assert (life[0].step, life[0].outcome) == ("piece", f"number 2 of 2 of {rows[35]['doc_id']}")
    assert life[-1].step == "split" and life[-1].lines[0] == f"piece {rows[35]['pieces'][1]}"


@pytest.mark.parametrize(("policy", "removed"), [("drop", 3), ("annotate", 0)])
def test_drop_and_annotate(books, tmp_path, policy, removed):
    settings = steps(tmp_path, policy=policy) | {"substring_dedup": {"min_bytes": 200, "policy": policy}}
    if policy == "drop":
        settings["substring_dedup"]["drop_share"] = 0.3
    counts = run_curate([books], tmp_path, **settings)["sources"]["books"]
    assert counts["removed"].get("decontaminate", {"documents": 0})["documents"] == removed
    assert counts["removed_spans"].keys() == {"paragraph_dedup"} and counts["pieces"] == 0
    rows = ledger_of(tmp_path)
    assert rows[34]["removed_spans"][0]["rule"] == f"substring_dedup.{policy}"
    assert rows[34]["outcome"] == ("removed" if policy == "drop" else "kept")
    assert rows[35]["contamination"] and not rows[35]["pieces"]


def test_scores_edits_and_personal_data_go_with_what_is_left(tmp_path):
    """A filter that edits, a classifier and replaced addresses, with and without a step that cuts."""
    note = "This copy was made for the readers of the valley library, who may lend it to friends and to neighbours."
    good = [f"{prose(k)}\n{note} Write to miller{k}@mill.example for more." for k in range(40)]
    good += [f"{prose(k)}\n{note}" for k in range(40, 44)]
    write_jsonl(tmp_path / "books.jsonl", [{"text": text} for text in good])
    write_jsonl(tmp_path / "web.jsonl", [{"text": prose(500 + k).replace("the", "buy now")} for k in range(40)])
    settings = {
        "filters": ({"c4": {"min_sentences": 1}},),
        "quality": {
            "positive": ("books",),
            "negative": ("web",),
            "apply_to": ("books",),
            "keep": "all",
            "features": 4096,
        },
        "pii": {"email": "replace"},
        "near_dedup": None,
    }
    sources = [source(tmp_path), source(tmp_path, "web")]
    counts = run_curate(sources, tmp_path / "plain", **settings)["sources"]["books"]
    run_curate(sources, tmp_path / "cut", **settings, span_dedup={"unit": "line", "min_characters": 90})

    def signals(folder: Path) -> dict[str, dict]:
        paths = sorted((folder / "curate/signals").glob("*/books-*.parquet"))
        return {row["doc_id"]: row for path in paths for row in pq.read_table(path).to_pylist()}

    assert counts["kept"] and len({row["quality_score"] for row in signals(tmp_path / "plain").values()}) > 20
    plain, cut = signals(tmp_path / "plain"), signals(tmp_path / "cut")
    assert plain.keys() == cut.keys()
    shorter = [doc_id for doc_id in plain if cut[doc_id]["num_chars"] < plain[doc_id]["num_chars"]]
    assert len(shorter) == 3  # of the four equal notes the first stays
    for doc_id in plain:
        for column in ("quality_score", "before_c4_num_chars", "pii_replaced"):
            assert plain[doc_id][column] == cut[doc_id][column]


def test_texts_of_tasks_are_handed_in(books, tmp_path):
    from gristmill.data_pipeline.readers.resolve import resolve
    from gristmill.data_pipeline.run_curation import CurationInputs, curate
    from gristmill.foundation.lock import Lock
    from gristmill.foundation.progress import Reporter
    from gristmill.foundation.runtime.tasks.local import LocalEngine

    engine = LocalEngine(1, Reporter.silent())
    config = CurateConfig(filters=FILTERS, decontaminate={"tasks": ["rivers"], "policy": "annotate"})
    lock = Lock(sources=tuple(resolve([books], engine)))
    examples = [BenchmarkExample("rivers", "0", "question", QUESTION)]
    curate(CurationInputs([books], config, 1, lock, tmp_path / "curate", tmp_path / "cache", engine, examples))
    assert ledger_of(tmp_path)[35]["contamination"][0]["example"] == "0"


def test_workers_shards_and_parts_change_no_byte(books, tmp_path, monkeypatch):
    for workers in (1, 2):
        run_curate([books], tmp_path / str(workers), workers=workers, shard_bytes=10_000, **steps(tmp_path))
    monkeypatch.setattr("gristmill.data_pipeline.annotate.annotate.MIN_RANGE_BYTES", 4_000)
    run_curate([books], tmp_path / "cut", shard_bytes=10_000, **steps(tmp_path))
    assert len(list((tmp_path / "cut/cache/annotated").glob("*.parquet"))) > 4
    whole = tree_digests(tmp_path / "1/curate")
    assert tree_digests(tmp_path / "2/curate") == tree_digests(tmp_path / "cut/curate") == whole
    assert "decontamination/report.json" in whole


KILLED_AT = (
    "links-00000.rec",
    "candidates-00000.rec",
    "members-00000.rec",
    "verified-00000.rec",
    "pieces-00000.rec",
    "spans-00000.rec",
    "groups.npy",
    "texts-00000.rec",
    "repeats-00000.rec",
    "part-00000.parquet",
)
KILLED_AT += ("found-00000.npy", "file-00000.pieces.parquet", "questions-00000.jsonl", "report.md")


def curate_and_die(source_json: str, folder: str, settings: dict, name: str) -> None:
    """Curates in a process of its own, which kills itself as it writes the file of this name."""
    fsync = os.fsync

    def die(descriptor: int) -> None:
        if Path(os.readlink(f"/proc/self/fd/{descriptor}")).name.startswith(f".{name}."):
            os.kill(os.getpid(), signal.SIGKILL)
        fsync(descriptor)

    os.fsync = die
    run_curate([SourceConfig.model_validate_json(source_json)], Path(folder), **settings)


@pytest.mark.parametrize("names", [KILLED_AT[::2], pytest.param(KILLED_AT, marks=pytest.mark.slow)], ids=len)
def test_killed_in_the_middle_of_steps_and_run_again_gives_the_same_bytes(books, tmp_path, names):
    settings = steps(tmp_path)
    write_jsonl(tmp_path / "books2.jsonl", [{"text": f"{prose(k)} And a last word."} for k in range(3)])
    run_curate([books], tmp_path / "whole", **settings)
    server = multiprocessing.get_context("forkserver")  # one process imports, each run is a fork of it
    server.set_forkserver_preload(["tests.data_pipeline.text_edits.test_step"])
    for name in names:
        arguments = (books.model_dump_json(), str(tmp_path / "killed"), settings, name)
        process = server.Process(target=curate_and_die, args=arguments)
        process.start()
        process.join()
        assert process.exitcode == -signal.SIGKILL, name
    assert list((tmp_path / "killed/cache/dedup").iterdir())
    run_curate([books], tmp_path / "killed", **settings)
    found = tree_digests(tmp_path / "killed/curate")
    assert {name: d for name, d in found.items() if not name.endswith(".tmp")} == tree_digests(
        tmp_path / "whole/curate"
    )


def test_damaged_intermediate_files_are_made_again(books, tmp_path):
    """A byte of every file of the cache and of the half-done folder is another after a kill: the bytes are the same."""
    settings = steps(tmp_path)
    run_curate([books], tmp_path / "whole", **settings)
    server = multiprocessing.get_context("forkserver")
    arguments = (books.model_dump_json(), str(tmp_path / "killed"), settings, "report.md")
    process = server.Process(target=curate_and_die, args=arguments)
    process.start()
    process.join()
    assert process.exitcode == -signal.SIGKILL
    damaged = [p for p in sorted((tmp_path / "killed").rglob("*")) if p.is_file() and not p.name.startswith(".")]
    assert len(damaged) > 20
    for path in damaged:
        content = bytearray(path.read_bytes())
        content[len(content) // 2 : len(content) // 2 + 1] = b"" if len(content) % 2 else b"~"
        path.write_bytes(content)
    run_curate([books], tmp_path / "killed", **settings)
    found = tree_digests(tmp_path / "killed/curate")
    assert {name: d for name, d in found.items() if not name.endswith(".tmp")} == tree_digests(
        tmp_path / "whole/curate"
    )


def test_a_protected_corpus_takes_from_the_new_one_and_loses_nothing(tmp_path):
    write_jsonl(tmp_path / "old.jsonl", [{"text": prose(k)} for k in range(20)])
    write_jsonl(tmp_path / "new.jsonl", [{"text": prose(k) + " And a last word."} for k in range(10, 40)])
    keeping = {"bands": 20, "rows": 6, "keep_signatures": True}
    run_curate([source(tmp_path, "old")], tmp_path / "one", near_dedup=keeping)
    before = tree_digests(tmp_path / "one/curate")
    protecting = {**keeping, "protected": [str(tmp_path / "one")]}
    counts = run_curate([source(tmp_path, "new")], tmp_path / "two", near_dedup=protecting)["sources"]["new"]
    assert counts["removed"]["near_dedup"]["documents"] == 10
    assert tree_digests(tmp_path / "one/curate") == before
    ids = {
        i
        for path in (tmp_path / "one/curate/documents").glob("*/*.parquet")
        for i in pq.read_table(path).column("doc_id").to_pylist()
    }
    rows = pq.read_table(tmp_path / "two/curate/ledger/new-00000.parquet").to_pylist()
    assert {row["duplicate_of"] for row in rows if row["outcome"] == "removed"} <= ids


def test_what_is_wrong_is_said_before_work_starts(books, tmp_path):
    (tmp_path / "wrong.jsonl").write_text('{"query": "x"}\n')
    wrong = {"name": "wrong", "paths": [str(tmp_path / "wrong.jsonl")], "fields": ["question"]}
    with pytest.raises(InputError, match=r"wrong.jsonl:1: no field 'question'; fields are \['query'\]"):
        run_curate([books], tmp_path, decontaminate={"benchmarks": [wrong]})
    with pytest.raises(InputError, match="no signature store"):
        run_curate([books], tmp_path, near_dedup={"protected": [str(tmp_path)]})
    run_curate([books], tmp_path / "one", near_dedup={"ngram": 3, "keep_signatures": True})
    with pytest.raises(InputError, match="signatures with ngram=3, but 5 is wanted"):
        run_curate([books], tmp_path, near_dedup={"protected": [str(tmp_path / "one")]})
    assert not (tmp_path / "cache").exists()
    for settings, said in (
        ({"near_dedup": {"threshold": 1.5}}, "less than or equal to 1"),
        ({"near_dedup": {"bands": 9, "rows": 13, "hashes": 128}}, "does not divide hashes=128; try hashes=117"),
        ({"span_dedup": [SPANS, SPANS]}, "names 'paragraph' twice"),
        ({"decontaminate": {}}, "no benchmarks and no tasks are named"),
    ):
        with pytest.raises(ValidationError, match=said):
            CurateConfig(**settings)


# Rewritten parts: what stands between two steps.


@pytest.mark.parametrize(
    ("text", "spans", "left"), [("a\nb\nc", [(2, 4)], "a\nc"), ("abcdef", [(4, 6), (0, 1)], "bcd"), ("abc", [], "abc")]
)
def test_cuts_by_hand(text: str, spans: list[tuple[int, int]], left: str):
    assert remove_spans(text, spans) == left


def test_bytes_become_characters():
    assert in_characters("äbc", [(0, 2), (3, 4)]) == [(0, 1), (2, 3)]
    assert in_characters("abc", [(1, 3)]) == [(1, 3)]
    assert in_characters("ä", [(0, 2)]) == [(0, 1)]


PLAIN = SpanRemoval("r", "r")


def spans_of(prefix: Path, spans: list[tuple[str, int, int]]) -> PartitionedFiles:
    """(document, start, stop) of spans in one document file, as deduplication writes them."""
    records = np.zeros(len(spans), REPEAT)
    for record, (doc_id, start, stop) in zip(records, spans, strict=True):
        record["id"], record["start"], record["stop"] = (0, int(doc_id, 16)), start, stop
    found = PartitionedFiles(prefix, REPEAT, 1, 1)
    found.write(0, records, np.array([0, len(records)]))
    return found


TEXTS = {"1": "one", "2": "the cät sat on the mat", "3": "and the cät sat on a hat", "4": "the cät sat on "}
TEN = SubstringDedupConfig(min_bytes=10)


def test_parts_stay_row_for_row_and_every_span_is_on_record(tmp_path: Path):
    part = write_part(tmp_path / "p.parquet", TEXTS, "tales", 3, kept=[True, True, True, False])
    spans = find_repeated_substrings([part], TEN, engine(), tmp_path / "repeats")
    found = edit_document_files(
        [part], spans, SpanRemoval("substring_dedup", "remove", in_bytes=True), engine(), tmp_path / "left"
    )
    (left,) = found.document_files
    assert (left.source, left.priority, left.kept.tolist()) == ("tales", 3, [True, True, True, False])
    table = pq.read_table(left.path)
    assert table.column("doc_id").to_pylist() == [padded(i) for i in TEXTS]
    # Document 3 is longer than 2 and stays whole; of the removed document 4 nothing is needed.
    assert table.column("text").to_pylist() == ["one", "the mat", TEXTS["3"], ""]
    (cut,) = found.removed_spans.to_pylist()
    assert (cut["doc_id"], cut["rule"], cut["kept_in"]) == (padded("2"), "substring_dedup.remove", padded("3"))
    assert (cut["start"], cut["length"], cut["bytes"], cut["excerpt"]) == (0, 15, 16, "the cät sat on")
    assert len(found.removals.in_file(0).rows) == 0  # something is left of both


@pytest.mark.parametrize(
    ("removal", "rule", "removed"),
    [
        (SpanRemoval("dedup", "min_count"), "dedup.nothing_left", [(2, 0.0)]),
        (SpanRemoval("dedup", "drop", is_applied=False, drop_share=0.5), "dedup.drop_share", [(0, 0.75), (2, 0.5625)]),
        (SpanRemoval("dedup", "annotate", is_applied=False), "dedup.nothing_left", []),
    ],
)
def test_documents_that_an_edit_removes(tmp_path: Path, removal: SpanRemoval, rule: str, removed: list):
    """The spans hold 6 of 8 bytes, 1 of 2 and 9 of 16 (the rest is white space)."""
    part = write_part(tmp_path / "p.parquet", {"1": "abcdefgh", "2": "ab", "3": "  abcdefghi     "})
    spans = spans_of(tmp_path / "spans", [("1", 0, 6), ("2", 0, 1), ("3", 2, 11)])
    found = edit_document_files([part], spans, removal, engine(), tmp_path / "work").removals
    step = found.in_file(0)
    assert list(zip(step.rows.tolist(), step.values.tolist(), strict=True)) == removed
    assert (step.labels, len(found.in_file(1).rows)) == ((rule,), 0)


def test_what_is_only_recorded_changes_no_text(tmp_path: Path):
    part = write_part(tmp_path / "p.parquet", TEXTS)
    spans = find_repeated_substrings([part], TEN, engine(), tmp_path / "repeats")
    found = edit_document_files(
        [part],
        spans,
        SpanRemoval("substring_dedup", "annotate", in_bytes=True, is_applied=False),
        engine(),
        tmp_path / "left",
    )
    assert list(found.document_files) == [part]
    assert len(found.removed_spans) == 2


def test_a_part_without_spans_is_the_one_given(tmp_path: Path):
    part = write_part(tmp_path / "p.parquet", {"1": "abcdef"})
    spans = spans_of(tmp_path / "spans", [])
    for _ in range(2):
        edited = edit_document_files([part], spans, PLAIN, engine(), tmp_path / "work")
        assert list(edited.document_files) == [part]


def test_other_spans_are_removed_again(tmp_path: Path):
    part = write_part(tmp_path / "p.parquet", {"1": "abcdef"})
    for start, left in ((1, "adef"), (2, "abef")):
        spans = spans_of(tmp_path / "spans", [("1", start, start + 2)])
        (rewritten,) = edit_document_files([part], spans, PLAIN, engine(), tmp_path / "work").document_files
        assert pq.read_table(rewritten.path).column("text").to_pylist() == [left]

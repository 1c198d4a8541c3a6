"""Sketches agree with DuckDB on the files that they sketch, and merging them in any grouping gives one result."""

import math

import duckdb
import numpy as np
import pyarrow.parquet as pq
import pytest

from gristmill.data_pipeline.corpus.id_index import IdIndex, RowPlace, read_row
from gristmill.data_pipeline.corpus.merged_sketches import merge_counts, merge_files, merge_samples, sketch_tasks
from gristmill.data_pipeline.corpus.sketches import (
    COUNT_SCHEMA,
    SAMPLE_SCHEMA,
    SOURCE_SAMPLES,
    bin_edges,
    bins_of,
    write_sketch,
)
from gristmill.data_pipeline.readers.source import SourceConfig
from gristmill.foundation.fingerprint import distinct_estimate, hyperloglog
from tests.support.corpora import prose, run_curate, write_jsonl


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    """Two sources in several shards: good texts of three hosts, short ones, copies."""
    folder = tmp_path_factory.mktemp("sketched")
    good = [{"text": prose(k), "url": f"https://h{k % 3}.org/{k}"} for k in range(60)]
    short = [{"text": f"Too short {k}"} for k in range(20)]
    write_jsonl(folder / "web.jsonl", good + short + good[:7] + good[:2])
    write_jsonl(folder / "notes.jsonl", [{"text": prose(k)} for k in range(100, 120)])
    sources = [
        SourceConfig(name=name, format="jsonl", paths=(str(folder / f"{name}.jsonl"),)) for name in ("web", "notes")
    ]
    run_curate(sources, folder, shard_bytes=20_000)
    return folder / "curate"


def all_counts(corpus) -> list[dict]:
    return pq.read_table(corpus / "sketches" / "counts.parquet").to_pylist()


def counts_of(corpus, kind: str) -> list[dict]:
    return [row for row in all_counts(corpus) if row["kind"] == kind]


def duckdb_rows(corpus, sql: str) -> list[tuple]:
    views = {name: f"read_parquet('{corpus}/{name}/*/*.parquet')" for name in ("documents", "signals")}
    return duckdb.sql(sql.format(ledger=f"read_parquet('{corpus}/ledger/*.parquet')", **views)).fetchall()


def test_counts_of_outcomes_are_those_of_duckdb(corpus):
    expected = duckdb_rows(
        corpus, "SELECT source, outcome, split, step, rule, count(*), sum(bytes) FROM {ledger} GROUP BY ALL"
    )
    names = ("source", "outcome", "split", "step", "rule", "documents", "bytes")
    assert {tuple(row[name] for name in names) for row in counts_of(corpus, "outcome")} == set(expected)
    assert len(expected) == 5


def test_counts_of_languages_and_hosts_are_those_of_duckdb(corpus):
    languages = duckdb_rows(corpus, "SELECT detected_language, count(*), sum(num_bytes) FROM {signals} GROUP BY 1")
    sums: dict[str, list[int]] = {}
    for row in counts_of(corpus, "documents"):
        total = sums.setdefault(row["language"], [0, 0])
        total[0], total[1] = total[0] + row["documents"], total[1] + row["bytes"]
    assert sums == {name: [documents, num_bytes] for name, documents, num_bytes in languages}
    hosts = duckdb_rows(corpus, "SELECT split_part(url, '/', 3), count(*) FROM {documents} WHERE url <> '' GROUP BY 1")
    counted: dict[str, int] = {}
    for row in counts_of(corpus, "host"):
        counted[row["name"]] = counted.get(row["name"], 0) + row["documents"]
    assert counted == dict(hosts) and len(hosts) == 3


@pytest.mark.parametrize("signal", ["num_words", "short_line_ratio", "language_score"])
def test_histograms_of_signals_are_those_of_duckdb(corpus, signal):
    values = [row[0] for row in duckdb_rows(corpus, f"SELECT CAST({signal} AS DOUBLE) FROM {{signals}}")]
    binned: dict[int, int] = {}
    for row in counts_of(corpus, "signal"):
        if row["name"] == signal:
            binned[row["bin"]] = binned.get(row["bin"], 0) + row["documents"]
    codes, counts = np.unique(bins_of(np.array(values)), return_counts=True)
    assert binned == dict(zip(codes.tolist(), counts.tolist(), strict=True))


def test_largest_groups_of_duplicates_are_those_of_duckdb(corpus):
    groups = duckdb_rows(
        corpus, "SELECT duplicate_of, count(*) FROM {ledger} WHERE duplicate_of IS NOT NULL GROUP BY 1"
    )
    assert {row["name"]: row["documents"] for row in counts_of(corpus, "cluster")} == dict(groups)
    sizes = {row["bin"]: row["documents"] for row in counts_of(corpus, "cluster_size") if row["documents"]}
    assert sizes == {0: 5, 1: 2} and sorted(count for _, count in groups) == [1] * 5 + [2] * 2


def test_samples_are_the_smallest_ids_with_their_text(corpus):
    rows = pq.read_table(corpus / "sketches" / "samples.parquet").to_pylist()
    kept = [row["doc_id"] for row in rows if row["outcome"] == "kept" and row["source"] == "web"]
    ids = sorted(row[0] for row in duckdb_rows(corpus, "SELECT doc_id FROM {documents} WHERE source = 'web'"))
    assert kept == ids[:SOURCE_SAMPLES]
    texts = dict(duckdb_rows(corpus, "SELECT doc_id, text FROM {documents}"))
    (first,) = [row for row in rows if row["doc_id"] == ids[0]]
    assert first["excerpt"] == " ".join(texts[ids[0]].split())[:240]
    signals = duckdb_rows(corpus, f"SELECT num_words FROM {{signals}} WHERE doc_id = '{ids[0]}'")
    assert dict(first["signals"])["num_words"] == signals[0][0]
    removed = [row for row in rows if row["rule"] == "gopher_quality.min_words"]
    assert len(removed) == 20 and all(row["excerpt"].startswith("Too short") for row in removed)


def test_any_grouping_of_tables_gives_the_same(corpus, tmp_path):
    """Tables sketched one by one, in two halves and all at once, merged in any order, are the sketches of the run."""
    tasks = sketch_tasks(corpus)
    assert len(tasks) > 6
    half = len(tasks) // 2
    for number, groups in enumerate(([[task] for task in tasks], [tasks[half:], tasks[:half]], [tasks])):
        folder = tmp_path / str(number)
        paths = [(folder / f"{place}.counts", folder / f"{place}.samples") for place in range(len(groups))]
        for group, (counts, samples) in zip(groups, paths, strict=True):
            write_sketch(group, counts, samples)
        merged = (merge_files([counts for counts, _ in paths], merge_counts, COUNT_SCHEMA)).to_pylist()
        assert merged == [row for row in all_counts(corpus) if not row["kind"].startswith("cluster")]
        samples = merge_files([path for _, path in paths], merge_samples, SAMPLE_SCHEMA).drop_columns("excerpt")
        expected = pq.read_table(corpus / "sketches" / "samples.parquet").drop_columns("excerpt")  # of removed ones too
        assert repr(samples.to_pylist()) == repr(expected.to_pylist())  # NaN is no NaN


def test_tables_without_rows_are_links_to_one(tmp_path):
    """Three sources without held-out documents."""
    for name in ("a", "b", "c"):
        write_jsonl(tmp_path / f"{name}.jsonl", [{"text": prose(7)}])
    sources = [SourceConfig(name=name, format="jsonl", paths=(str(tmp_path / f"{name}.jsonl"),)) for name in "abc"]
    run_curate(sources, tmp_path)
    folder = tmp_path / "curate"
    for split in ("validation", "test"):
        paths = sorted(folder.glob(f"*/{split}/*.parquet"))
        assert len({path.stat().st_ino for path in paths}) == 2 < len(paths) == 6


def test_every_row_is_where_the_index_says(corpus):
    index = IdIndex.of_folder(corpus)
    ledger = duckdb_rows(corpus, "SELECT doc_id, outcome, duplicate_of FROM {ledger}")
    for doc_id, outcome, duplicate_of in ledger:
        places = [place for place in index.places(doc_id) if not place.is_duplicate]
        assert sorted(place.table.split("/")[0] for place in places) == ["documents", "ledger"][outcome != "kept" :]
        for place in places:
            assert read_row(pq.ParquetFile(corpus / place.table), place.row, ["doc_id"])["doc_id"] == doc_id
        if duplicate_of is not None:
            (own,) = places
            assert RowPlace(own.table, own.row, is_duplicate=True) in index.places(duplicate_of)
    assert index.places("0" * 32) == [] == index.places("f" * 32)


def test_bins_are_a_sixteenth_of_an_octave():
    numbers = np.array([0.0, 1.0, 1.05, 1.07, 2.0, 0.65, 50, 1e9, -1.0, -3.3])
    low, high = bin_edges(bins_of(numbers))
    assert (low <= numbers).all() and (numbers <= high).all()
    assert bins_of(np.array([2.0]))[0] - bins_of(np.array([1.0]))[0] == 16
    assert (np.diff(bins_of(np.sort(numbers))) >= 0).all()


def test_registers_estimate_the_number_of_hosts():
    names = [f"h{n}.org" for n in range(30_000)]
    registers = np.maximum(hyperloglog(names[:20_000]), hyperloglog(names[10_000:]))
    assert (registers == hyperloglog(names)).all()
    assert math.isclose(distinct_estimate(registers), 30_000, rel_tol=0.07)  # three standard errors of 2.3 %
    assert distinct_estimate(hyperloglog(names[:100])) in range(97, 104)

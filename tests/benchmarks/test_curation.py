"""The benchmark of whole curation runs: its inputs, its comparison of decisions, and a small run of it."""

import io
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import zstandard
from curation import agreement
from run_all import page
from support.curation_inputs import made_texts, write_jsonl, write_warc
from support.curation_runs import Run

from gristmill.data_pipeline.readers.source import SourceConfig
from gristmill.data_pipeline.readers.warc import read_warc

ROOT = Path(__file__).parent.parent.parent
POOL = [f"Paragraph {i} says that word {i * 7} comes before word {i * 11}." for i in range(200)]


def test_texts_are_the_same_each_time_and_some_repeat_earlier_ones():
    texts = list(made_texts(POOL, 200_000, 700))
    assert texts == list(made_texts(POOL, 200_000, 700))
    assert 0.01 < 1 - len(set(texts)) / len(texts) < 0.1
    assert 600 < sum(map(len, texts)) / len(texts) < 800


def test_records_are_numbered_by_file_and_place(tmp_path):
    assert write_jsonl(tmp_path, ["a", "bé", "c"]) == 5
    found = []
    for path in sorted(tmp_path.iterdir()):
        stream = zstandard.ZstdDecompressor().stream_reader(path.read_bytes())
        found += [json.loads(line) for line in io.TextIOWrapper(stream, encoding="utf-8")]
    assert [(record["id"], record["text"]) for record in found] == [("0/0", "a"), ("0/1", "c"), ("1/0", "bé")]


def test_the_warc_holds_the_pages(tmp_path):
    pages = [b"<html><body><p>one</p></body></html>", b"<html><body><p>two</p></body></html>"]
    assert write_warc(tmp_path, pages) == sum(map(len, pages))
    source = SourceConfig(name="s", format="warc", paths=[str(tmp_path / "part-1.warc.gz")])
    with (tmp_path / "part-1.warc.gz").open("rb") as file:
        records = list(read_warc(file, "part-1.warc.gz", source))
    assert [record.html for record in records] == [pages[1]]


def test_decisions_are_compared_record_by_record():
    def run(kept, removed):
        return Run(1.0, 1.0, 1.0, {}, frozenset(kept), removed)

    ours = run({"0/0", "0/1"}, {"0/2": "language.min_score", "1/0": "c4.curly_bracket"})
    theirs = run({"0/1", "0/2"}, {"0/0": "gopher_quality.gopher_short_doc"})  # 1/0 is dropped without a reason
    figures = {figure.figure: figure.ours for figure in agreement("x", ours, theirs)}
    assert figures == {"x_kept_by_both": 1, "x_kept_by_gristmill": 1, "x_kept_by_datatrove": 1}


def test_whole_runs_come_first_on_the_page_of_results():
    def record(program):
        return {"program": program, "commit": "abc", "figures": [{"figure": program, "ours": 1.0, "unit": "s"}]}

    text = page([record("curation.py"), record("annotate.py"), record("pipeline.py")], quick=False)
    places = [text.index(part) for part in ("## Whole runs", "curation.py", "pipeline.py", "## Parts", "annotate.py")]
    assert places == sorted(places)


@pytest.mark.slow
def test_a_small_run_gives_every_figure():
    """gristmill alone, with one worker and, where there are two cores, with two: the program fails if they differ."""
    command = [sys.executable, str(ROOT / "benchmarks" / "curation.py"), "--quick", "--only", "short", "--without-peer"]
    done = subprocess.run(command, capture_output=True, text=True, env=os.environ | {"COLUMNS": "200"})
    assert done.returncode == 0, done.stderr
    figures = [json.loads(line) for line in done.stdout.splitlines() if line.startswith('{"figure"')]
    names = {figure["figure"] for figure in figures}
    expected = {"rate", "start_up", "start_up_seconds", "peak", "peak_slope"}
    assert {f"curate_short_{name}" for name in expected} <= names
    assert any(name.startswith("curate_short_seconds_") for name in names)  # steps of under 0.05 s are left out
    assert ("curate_short_workers" in names) == (len(os.sched_getaffinity(0)) > 1)
    assert all(figure["ours"] > 0 for figure in figures if not figure["figure"].endswith("slope"))

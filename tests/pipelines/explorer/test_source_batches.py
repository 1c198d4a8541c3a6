"""Annotated files of batches of small sources, seen source by source."""

import pyarrow.parquet as pq
import pytest

from gristmill.data_pipeline.corpus.corpus_files import CorpusFiles
from gristmill.data_pipeline.readers.source import SourceConfig
from gristmill.pipelines.explorer.corpus import annotated_files
from gristmill.pipelines.explorer.rows import Cursor, DocumentRows, Filters
from gristmill.pipelines.explorer.sketched import Sketches
from tests.support.corpora import prose, run_curate, write_jsonl

SOURCES = 16


@pytest.fixture(scope="module")
def work(tmp_path_factory):
    folder = tmp_path_factory.mktemp("batches")
    sources = []
    for number in range(SOURCES):
        texts = [prose(2 * number), "too short", prose(2 * number + 1)]
        path = write_jsonl(folder / f"s{number}.jsonl", [{"text": text} for text in texts])
        sources.append(SourceConfig(name=f"s{number}", format="jsonl", paths=(str(path),)))
    run_curate(sources, folder)
    assert [path.name[0] for path in annotated_files(folder / "cache")] == ["+"]
    return folder


def test_texts_as_they_were_read(work):
    rows = DocumentRows(CorpusFiles(work / "curate", checked=False), annotated_files(work / "cache"))
    for number in (0, 9, 15):
        ledger = pq.read_table(work / "curate" / "ledger" / f"s{number}-00000.parquet").to_pylist()
        read = {row["record"]: rows.text_as_read(row["doc_id"]) for row in ledger}
        assert read == {0: prose(2 * number), 1: "too short", 2: prose(2 * number + 1)}


def test_a_run_that_has_annotated_files_alone(work):
    cache = work / "cache"
    sketches = Sketches.of_annotated(cache, annotated_files(cache))
    for number in range(SOURCES):
        assert sketches.num_documents(source=f"s{number}") == 3
    rows = DocumentRows(CorpusFiles(cache, checked=False, is_complete=False), annotated_files(cache))
    found = rows.search(Filters(source="s9", words="short"), Cursor(), 10).rows
    assert [(row["source"], row["excerpt"]) for row in found] == [("s9", "too short")]
    assert len(rows.search(Filters(words="short"), Cursor(), 50).rows) == SOURCES

"""The array beside an annotated file says what the file says, also where its writer was killed."""

from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest

from gristmill.data_pipeline.annotate import annotate as annotate_module
from gristmill.data_pipeline.annotate.annotate import (
    AnnotateConfig,
    AnnotateTask,
    annotate,
    annotate_all,
    annotation_tasks,
)
from gristmill.data_pipeline.annotate.normalize import NormalizeConfig
from gristmill.data_pipeline.dedup.folding import COLUMNS, document_ids, document_keys, keys_of, keys_path
from gristmill.data_pipeline.readers.resolve import resolve
from gristmill.data_pipeline.readers.source import SourceConfig
from gristmill.foundation.progress import Reporter
from gristmill.foundation.runtime.tasks.local import LocalEngine

LINES = ['{"text": "The mill turns."}', "no json", '{"text": ""}', '{"text": "Das Mühlrad dreht sich."}']


@pytest.fixture
def task(tmp_path: Path) -> AnnotateTask:
    raw = tmp_path / "raw.jsonl"
    raw.write_text("\n".join(LINES) + "\n")
    source = SourceConfig(name="s", format="jsonl", paths=(str(raw),))
    config = AnnotateConfig(normalize=NormalizeConfig(), word_tokenizer="unicode", language_id=None, edits=())
    engine = LocalEngine(1, Reporter.silent())
    [[task]] = annotation_tasks([(source, resolve([source], engine)[0], config)], tmp_path / "cache" / "a", engine)
    return task


def test_the_array_is_what_the_file_has(task):
    annotate(task)
    stored = document_keys(task.path)
    assert keys_path(task.path).is_file()
    assert stored["readable"].tolist() == [True, False, True, True]
    assert stored["bytes"].tolist() == [15, 0, 0, 24]
    from_table = keys_of(pq.read_table(task.path, columns=COLUMNS), task.path)
    assert all(np.array_equal(stored[name], from_table[name]) for name in ("id", "key", "bytes", "readable"))
    content = task.path.read_bytes()
    places = zip(stored["start"].tolist(), stored["bytes"].tolist(), strict=True)
    texts = [content[start + 4 : start + 4 + size].decode() for start, size in places]
    assert texts == ["The mill turns.", "", "", "Das Mühlrad dreht sich."]
    keys_path(task.path).unlink()
    assert np.array_equal(document_keys(task.path), stored) and np.array_equal(document_ids(task.path), stored["id"])


def test_an_array_that_a_stopped_writer_left_out_is_written(task):
    annotate(task)
    content = keys_path(task.path).read_bytes()
    keys_path(task.path).unlink()
    annotate_all([task], LocalEngine(1, Reporter.silent()))
    assert keys_path(task.path).read_bytes() == content


def test_an_array_of_other_rows_does_not_outlive_its_file(task, monkeypatch):
    """The file is written again, as after its tombstones were taken away, and the writer is killed before its array."""
    annotate(task)
    whole = np.array(document_keys(task.path))
    annotate_module.write_keys(task.path, whole[:1])
    assert len(document_keys(task.path)) == 1

    def killed(path: Path, keys: np.ndarray) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(annotate_module, "write_keys", killed)
    with pytest.raises(KeyboardInterrupt):
        annotate(task)
    assert np.array_equal(document_keys(task.path), whole)

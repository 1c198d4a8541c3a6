"""Small corpora on disk for the tests of deduplication."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from gristmill.data_pipeline.ledger.document_file import DocumentFile, unpacked_ids
from gristmill.foundation.progress import Reporter
from gristmill.foundation.runtime.tasks.local import LocalEngine
from gristmill.foundation.runtime.tasks.task_files import PartitionedFiles


def engine(workers: int = 1) -> LocalEngine:
    return LocalEngine(workers, Reporter.silent())


def write_part(
    path: Path, documents: dict[str, str], source: str = "s", priority: int = 1, kept: Sequence[bool] | None = None
) -> DocumentFile:
    """A part file of texts by doc_id; ids are padded to 32 digits: "a1" -> "0...0a1"."""
    path.parent.mkdir(parents=True, exist_ok=True)
    ids = [padded(doc_id) for doc_id in documents]
    table = pa.table({"doc_id": pa.array(ids, pa.string()), "text": pa.array(list(documents.values()), pa.string())})
    pq.write_table(table, path, row_group_size=3)
    return DocumentFile(path, source, priority, None if kept is None else np.array(kept, bool))


def padded(doc_id: str) -> str:
    return doc_id.rjust(32, "0")


def found(table: pa.Table) -> dict[str, tuple[str, float]]:
    """{removed: (kept, similarity)} with the ids' padding taken off."""
    rows = zip(*(column.to_pylist() for column in table.columns), strict=True)
    return {removed.lstrip("0"): (kept.lstrip("0"), similarity) for removed, kept, similarity in rows}


def recorded_spans(spans: PartitionedFiles) -> list[dict[str, Any]]:
    """The fields of the records but for the file, by document and start."""
    records = spans.read_all()
    records = records[np.lexsort((records["start"], records["id"][:, 1], records["id"][:, 0]))]
    columns = {"doc_id": unpacked_ids(records["id"]).to_pylist()}
    for name in ("start", "stop", "count"):
        if name in records.dtype.fields:
            columns[name] = records[name].tolist()
    columns["kept_in"] = unpacked_ids(records["kept_in"]).to_pylist()
    return pa.table(columns).to_pylist()


def edited(words: Sequence[str], generator: np.random.Generator, edits: int) -> list[str]:
    """The words with `edits` of them replaced by words that occur nowhere else."""
    changed = list(words)
    for place in generator.choice(len(words), size=min(edits, len(words)), replace=False):
        changed[place] = f"new{generator.integers(1 << 40)}"
    return changed

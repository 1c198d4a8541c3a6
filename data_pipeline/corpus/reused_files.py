"""Files of a corpus that are taken from the run before: shards, ledgers and sketches made from the same documents.

`cache/outputs/KEY/` holds hard links to the files of one task by their suffixes. A key is the fingerprint of all that
decides the bytes: the documents by id (an annotated file's name and an id say what the document is), settings, and
outcomes. Where the file system has no hard links nothing is kept."""

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import xxhash

from gristmill.data_pipeline.corpus.shards import ShardRows, ShardTask
from gristmill.data_pipeline.corpus.sketches import SketchTask
from gristmill.data_pipeline.ledger.document_file import packed_ids
from gristmill.data_pipeline.ledger.evidence import EvidenceFiles
from gristmill.data_pipeline.ledger.ledger import LedgerRows, LedgerTask
from gristmill.data_pipeline.ledger.removal_step import RemovalStep
from gristmill.foundation.checksums import is_sealed, link_sealed, read_cached, seal_of
from gristmill.foundation.files import remove_tree
from gristmill.foundation.fingerprint import fingerprint

OUTPUT_CACHE = "outputs"  # in the cache of a work folder
ANNOTATED_FOLDER = "annotated"


@dataclass(frozen=True)
class ReusedFiles:
    """folder: takes the links. code_version: of the stage; files of another one are of no use."""

    folder: Path
    code_version: int

    def take(self, key: str, files: Mapping[str, Path]) -> bool:
        """Links the kept files of the key to these paths, by name; False, and nothing is done, if one is missing."""
        kept = {name: self._of_key(key) / name for name in files}
        if not all(is_sealed(path) for path in kept.values()):
            return False
        for name, path in files.items():
            link_sealed(kept[name], path)
        return True

    def keep(self, key: str, files: Mapping[str, Path]) -> None:
        """Keeps links to the files, for the next run."""
        try:
            for name, path in files.items():
                if not is_sealed(self._of_key(key) / name):
                    link_sealed(path, self._of_key(key) / name, may_copy=False)
        except OSError:  # no hard links here
            remove_tree(self._of_key(key))

    def prune(self, keys: Collection[str]) -> None:
        """Removes the files of all other keys."""
        names = {self._of_key(key).name for key in keys}
        for folder in self.folder.glob("*"):
            if folder.name not in names:
                remove_tree(folder)

    def _of_key(self, key: str) -> Path:
        return self.folder / f"{self.code_version}-{key}"


# Keys.


def shard_key(task: ShardTask) -> str:
    scores = None if task.scores is None else [_content_of(path) for path in task.scores]
    return fingerprint(
        [
            task.split,
            _described(task.format),
            [_rows_digest(rows) for rows in task.rows],
            scores,
            sorted(task.held_out),
        ]
    )


def shard_files(task: ShardTask) -> dict[str, Path]:
    """Files that the task writes, by name."""
    held_out = {f"held_out-{split}.parquet": path for split, path in task.held_out.items()}
    return {"documents.parquet": task.documents, "signals.parquet": task.signals, **held_out}


def ledger_key(task: LedgerTask) -> str:
    rows = [_ledger_rows_digest(rows) for rows in task.rows]
    return fingerprint([task.source, task.rules.description, task.split_names, rows])


def sketch_key(task: SketchTask) -> str:
    """Key of a sketch by the content of the tables that it is made from, and the texts that it quotes."""
    tables = [_content_of(task.table)] + ([] if task.is_ledger else [_content_of(task.signals)])
    quoted = [_identity_of(rows.path) for rows in task.rows]
    return fingerprint([task.name.split("/")[:-1], task.source, tables, quoted, _described(task.pii)])


def _described(value: Any) -> str:
    """Text that is equal for equal settings."""
    return repr(value)


def _rows_digest(rows: ShardRows) -> list[str]:
    row_range, splits = rows.load()
    if _is_annotated(rows.path):
        return [rows.path.stem, _digest(_ids(rows.path)[row_range.rows], splits)]
    return [_content_of(rows.path), _digest(row_range.rows)]


def _ledger_rows_digest(rows: LedgerRows) -> list[str]:
    results, chosen = rows.results.load(), slice(rows.start, rows.stop)
    ids = _ids(rows.path)[chosen]
    outcomes = [results.failed_rule[chosen], results.splits[chosen]]
    steps = []
    for step in rows.removals:
        removed = step.in_file(rows.file).in_rows(rows.start, rows.stop)
        steps.append([removed.step, repr(removed.threshold), list(removed.rule_names), _digest(*_columns(removed))])
    return [rows.path.stem, _digest(ids, *outcomes), repr(steps), *_evidence(rows.evidence)]


def _columns(removed: RemovalStep) -> list[np.ndarray]:
    columns = (removed.rows, removed.values, removed.duplicate_of, removed.thresholds, removed.rules)
    return [column for column in columns if column is not None]


def _evidence(files: EvidenceFiles) -> list[str]:
    others = [path for path in (files.matches, files.pieces) if path is not None]
    return [_content_of(path) for path in (*files.removed_spans, *others)]


def _is_annotated(path: Path) -> bool:
    return path.parent.name == ANNOTATED_FOLDER


def _identity_of(path: Path) -> str:
    """Name of an annotated file, which says what its documents are; content of any other file."""
    return path.stem if _is_annotated(path) else _content_of(path)


def _content_of(path: Path) -> str:
    """XXH3-128 of a sealed file, from its seal; of another file, of its bytes."""
    state = read_cached(seal_of(path))
    if isinstance(state, dict) and isinstance(state.get("xxh3"), str):
        return str(state["xxh3"])
    return xxhash.xxh3_128_hexdigest(path.read_bytes())


def _ids(path: Path) -> np.ndarray:
    return _ids_of(path, path.stat().st_mtime_ns)


@lru_cache(maxsize=2)
def _ids_of(path: Path, _: int) -> np.ndarray:
    with pq.ParquetFile(path) as file:
        return packed_ids(file.read(["doc_id"]).column("doc_id"), path)


def _digest(*arrays: np.ndarray) -> str:
    hasher = xxhash.xxh3_128()
    for array in arrays:
        hasher.update(str(array.dtype).encode())
        hasher.update(np.ascontiguousarray(array).data)
    return hasher.hexdigest()

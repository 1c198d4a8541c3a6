"""A source on its way through curation, and what is still alive of it."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np

from gristmill.data_pipeline.filters.apply import KEPT, FilterResults, Rules
from gristmill.data_pipeline.ledger.document_file import DocumentFile
from gristmill.data_pipeline.ledger.ledger import RemovalStep
from gristmill.data_pipeline.ledger.parquet_rows import RowRange
from gristmill.data_pipeline.readers.source import SourceConfig


@dataclass(frozen=True)
class SourceState:
    """A source's annotated files in canonical order, and the verdict on each of their rows."""

    source: SourceConfig
    rules: Rules
    paths: tuple[Path, ...]
    verdicts: tuple[FilterResults, ...]

    @cached_property
    def doc_ids(self) -> np.ndarray:
        return np.concatenate([np.empty(0, "S32"), *(v.doc_ids for v in self.verdicts)])

    @cached_property
    def taken_by(self) -> np.ndarray:
        return np.concatenate([np.empty(0, np.int16), *(v.taken_by for v in self.verdicts)])

    @cached_property
    def bytes(self) -> np.ndarray:
        return np.concatenate([np.empty(0, np.int64), *(v.bytes for v in self.verdicts)])

    @cached_property
    def hashes(self) -> np.ndarray:
        return np.concatenate([np.empty(0, np.uint64), *(v.hashes for v in self.verdicts)])

    @cached_property
    def languages(self) -> np.ndarray:
        return np.concatenate([np.empty(0, np.str_), *(v.languages for v in self.verdicts)])

    @property
    def kept(self) -> np.ndarray:
        """bool[rows]: what the filters kept."""
        return self.taken_by == KEPT

    def living(self, later: Sequence[RemovalStep]) -> np.ndarray:
        """bool[rows]: what neither the filters nor these steps took."""
        return living(self.taken_by, self.doc_ids, later)

    def slices(self, rows: np.ndarray) -> tuple[RowRange, ...]:
        """The annotated rows behind these row numbers of the source (rising)."""
        starts = np.cumsum([0, *(len(v.taken_by) for v in self.verdicts)])
        cuts = []
        for path, start, end in zip(self.paths, starts[:-1], starts[1:], strict=True):
            first, last = np.searchsorted(rows, [start, end])
            if last > first:
                cuts.append(RowRange(path, rows[first:last] - start))
        return tuple(cuts)


def living(taken_by: np.ndarray, doc_ids: np.ndarray, later: Sequence[RemovalStep]) -> np.ndarray:
    alive = taken_by == KEPT
    for step in later:
        alive &= ~step.holds(doc_ids)
    return alive


def kept_document_files(curated: Sequence[SourceState], later: Sequence[RemovalStep]) -> list[DocumentFile]:
    """All annotated files as deduplication takes them: source after source, each in its order."""
    return [
        DocumentFile(path, one.source.name, one.source.priority, living(verdict.taken_by, verdict.doc_ids, later))
        for one in curated
        for path, verdict in zip(one.paths, one.verdicts, strict=True)
    ]

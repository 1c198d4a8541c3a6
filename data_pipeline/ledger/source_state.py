"""A source on its way through curation, and what is still mask of it."""

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
    """A source's annotated files in canonical order, and the results on each of their rows."""

    source: SourceConfig
    rules: Rules
    paths: tuple[Path, ...]
    filter_results: tuple[FilterResults, ...]

    @cached_property
    def doc_ids(self) -> np.ndarray:
        return np.concatenate([np.empty(0, "S32"), *(v.doc_ids for v in self.filter_results)])

    @cached_property
    def failed_rule(self) -> np.ndarray:
        return np.concatenate([np.empty(0, np.int16), *(v.failed_rule for v in self.filter_results)])

    @cached_property
    def bytes(self) -> np.ndarray:
        return np.concatenate([np.empty(0, np.int64), *(v.bytes for v in self.filter_results)])

    @cached_property
    def hashes(self) -> np.ndarray:
        return np.concatenate([np.empty(0, np.uint64), *(v.hashes for v in self.filter_results)])

    @cached_property
    def languages(self) -> np.ndarray:
        return np.concatenate([np.empty(0, np.str_), *(v.languages for v in self.filter_results)])

    @property
    def kept(self) -> np.ndarray:
        """bool[rows]: the documents that passed the filters."""
        return self.failed_rule == KEPT

    def kept_mask(self, removals: Sequence[RemovalStep]) -> np.ndarray:
        """bool[rows]: the documents that neither the filters nor these steps removed."""
        return kept_mask(self.failed_rule, self.doc_ids, removals)

    def slices(self, rows: np.ndarray) -> tuple[RowRange, ...]:
        """The annotated rows behind these row numbers of the source (rising)."""
        starts = np.cumsum([0, *(len(v.failed_rule) for v in self.filter_results)])
        slices = []
        for path, start, end in zip(self.paths, starts[:-1], starts[1:], strict=True):
            first, last = np.searchsorted(rows, [start, end])
            if last > first:
                slices.append(RowRange(path, rows[first:last] - start))
        return tuple(slices)


def kept_mask(failed_rule: np.ndarray, doc_ids: np.ndarray, removals: Sequence[RemovalStep]) -> np.ndarray:
    mask = failed_rule == KEPT
    for step in removals:
        mask &= ~step.removed_mask(doc_ids)
    return mask


def kept_document_files(curated: Sequence[SourceState], removals: Sequence[RemovalStep]) -> list[DocumentFile]:
    """All annotated files as deduplication takes them: source after source, each in its order."""
    return [
        DocumentFile(
            path, one.source.name, one.source.priority, kept_mask(results.failed_rule, results.doc_ids, removals)
        )
        for one in curated
        for path, results in zip(one.paths, one.filter_results, strict=True)
    ]

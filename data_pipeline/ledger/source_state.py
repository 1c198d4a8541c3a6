"""A source on its way through curation, and which of its documents are still kept."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from gristmill.data_pipeline.filters.apply import KEPT, FilterResults, Rules
from gristmill.data_pipeline.ledger.document_file import DocumentFile
from gristmill.data_pipeline.ledger.removal_step import RemovalStep
from gristmill.data_pipeline.readers.source import SourceConfig


@dataclass(frozen=True)
class SourceState:
    """A source's annotated files in canonical order, and the results on each of their rows.

    first_file: the number of its first file among the files of all sources, which removal steps count by."""

    source: SourceConfig
    rules: Rules
    paths: tuple[Path, ...]
    filter_results: tuple[FilterResults, ...]
    first_file: int

    @property
    def num_documents(self) -> int:
        return sum(len(results.failed_rule) for results in self.filter_results)

    @property
    def files(self) -> range:
        """The numbers of its files among those of all sources."""
        return range(self.first_file, self.first_file + len(self.paths))

    def kept_masks(self, removals: Sequence[RemovalStep] = ()) -> list[np.ndarray]:
        """By file, bool[rows]: the documents that neither the filters nor these steps removed."""
        masks = []
        for file, results in zip(self.files, self.filter_results, strict=True):
            mask = results.failed_rule == KEPT
            for step in removals:
                mask &= ~step.removed_mask(file, len(mask))
            masks.append(mask)
        return masks

    def row_ranges(self, start: int, stop: int) -> list[tuple[int, int, int]]:
        """(file of the source, first row, last + 1) behind the rows start..stop - 1 of the source."""
        found, before = [], 0
        for index, results in enumerate(self.filter_results):
            size = len(results.failed_rule)
            first, last = max(start - before, 0), min(stop - before, size)
            if last > first:
                found.append((index, first, last))
            before += size
        return found


def kept_document_files(curated: Sequence[SourceState], removals: Sequence[RemovalStep]) -> list[DocumentFile]:
    """All annotated files as deduplication takes them: source after source, each in its order."""
    return [
        DocumentFile(path, one.source.name, one.source.priority, mask)
        for one in curated
        for path, mask in zip(one.paths, one.kept_masks(removals), strict=True)
    ]

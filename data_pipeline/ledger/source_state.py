"""A source on its way through curation, and which of its documents are still kept."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from gristmill.data_pipeline.filters.apply import KEPT, Results, Rules
from gristmill.data_pipeline.ledger.document_file import DocumentFile
from gristmill.data_pipeline.ledger.removal_step import Removals
from gristmill.data_pipeline.readers.source import SourceConfig


@dataclass(frozen=True)
class SourceState:
    """A source's annotated files in canonical order, and the results on each of their rows.

    first_file: the number of its first file among the files of all sources, which removal steps count by."""

    source: SourceConfig
    rules: Rules
    paths: tuple[Path, ...]
    filter_results: tuple[Results, ...]
    first_file: int

    @property
    def num_documents(self) -> int:
        return sum(results.num_documents for results in self.filter_results)

    @property
    def files(self) -> range:
        """The numbers of its files among those of all sources."""
        return range(self.first_file, self.first_file + len(self.paths))

    def kept(self, removals: Sequence[Removals] = ()) -> "list[KeptRows]":
        """By file, the documents that neither the filters nor these steps removed."""
        pairs = zip(self.files, self.filter_results, strict=True)
        return [KeptRows(results, file, tuple(removals)) for file, results in pairs]

    def kept_masks(self, removals: Sequence[Removals] = ()) -> Iterator[np.ndarray]:
        """By file, bool[rows]: the documents of `kept`, loaded one file at a time."""
        return (one.mask() for one in self.kept(removals))

    def row_ranges(self, start: int, stop: int) -> list[tuple[int, int, int]]:
        """(file of the source, first row, last + 1) behind the rows start..stop - 1 of the source."""
        found, before = [], 0
        for index, results in enumerate(self.filter_results):
            size = results.num_documents
            first, last = max(start - before, 0), min(stop - before, size)
            if last > first:
                found.append((index, first, last))
            before += size
        return found


@dataclass(frozen=True)
class KeptRows:
    """Which rows of one annotated file neither the filters nor these steps removed. file: its number among those of all
    sources."""

    results: Results
    file: int
    removals: tuple[Removals, ...]

    def mask(self) -> np.ndarray:
        """bool[rows]"""
        mask = self.results.load().failed_rule == KEPT
        for step in self.removals:
            mask &= ~step.removed_mask(self.file, len(mask))
        return mask


@dataclass(frozen=True)
class KeptAfter:
    """Which kept rows of a document file this step left. file: its number."""

    document_file: DocumentFile
    file: int
    step: Removals

    def mask(self) -> np.ndarray:
        """bool[rows]"""
        mask = self.document_file.kept_mask()
        return mask & ~self.step.removed_mask(self.file, len(mask))


def kept_document_files(curated: Sequence[SourceState], removals: Sequence[Removals]) -> list[DocumentFile]:
    """All annotated files as deduplication takes them: source after source, each in its order."""
    return [
        DocumentFile(path, one.source.name, one.source.priority, kept)
        for one in curated
        for path, kept in zip(one.paths, one.kept(removals), strict=True)
    ]

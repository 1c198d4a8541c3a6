"""The documents that one step after the filters removed, by annotated file and row."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class RemovalStep:
    """The documents that a step after the filters removed, sorted by file and row.

    files int32[N], rows int64[N]: number of the annotated file (over all sources) and row in it. values float64[N]:
    compared with the threshold: similarity, quality score, characters. duplicate_of uint64[N, 2]: the packed id of
    the kept document each is a duplicate of; None if the step removes no duplicates. thresholds float64[N], where they
    differ from `threshold`. rules int8[N]: the place of each document's rule in rule_names; None: the only one."""

    step: str
    threshold: float
    files: np.ndarray
    rows: np.ndarray
    values: np.ndarray
    duplicate_of: np.ndarray | None = None
    thresholds: np.ndarray | None = None
    rules: np.ndarray | None = None
    rule_names: Sequence[str] = ()

    @property
    def labels(self) -> tuple[str, ...]:
        """The names of its rules, STEP.RULE."""
        return tuple(f"{self.step}.{name}" for name in self.rule_names or ("threshold",))

    def sorted(self) -> "RemovalStep":
        return self._chosen(np.lexsort((self.rows, self.files)))

    def in_files(self, first: int, last: int) -> "RemovalStep":
        """The documents of the files first..last - 1."""
        return self._chosen(slice(*np.searchsorted(self.files, [first, last])))

    def in_rows(self, start: int, stop: int) -> "RemovalStep":
        """Of a step of one file, the documents of the rows start..stop - 1, with rows counted from `start`."""
        found = self._chosen(slice(*np.searchsorted(self.rows, [start, stop])))
        return RemovalStep(**{**vars(found), "rows": found.rows - start})

    def removed_mask(self, file: int, num_rows: int) -> np.ndarray:
        """bool[num_rows]: which rows of the file this step removed."""
        mask = np.zeros(num_rows, bool)
        mask[self.in_files(file, file + 1).rows] = True
        return mask

    def _chosen(self, chosen: np.ndarray | slice) -> "RemovalStep":
        arrays = ("files", "rows", "values", "duplicate_of", "thresholds", "rules")
        taken = {name: None if (held := getattr(self, name)) is None else held[chosen] for name in arrays}
        return RemovalStep(**{**vars(self), **taken})

"""One rule of a filter: a signal, a side, a threshold, and where the number comes from."""

from dataclasses import dataclass, replace
from typing import Literal

import numpy as np


@dataclass(frozen=True)
class Rule:
    """A document passes if `signal` is at least (">=") or at most ("<=") the threshold; ">" and "<" leave it out.

    filter: the preset the rule belongs to. name: what a recipe calls the threshold. source: where it is from."""

    filter: str
    name: str
    signal: str
    keep: Literal[">=", "<=", ">", "<"]
    threshold: float
    source: str

    @property
    def label(self) -> str:
        """gopher_quality.min_words: how the ledger and the report name the rule."""
        return f"{self.filter}.{self.name}"

    def at(self, threshold: float) -> "Rule":
        return replace(self, threshold=threshold)

    def passes(self, values_N: np.ndarray, thresholds_N: np.ndarray | None = None) -> np.ndarray:
        """bool[N]. A value that is not there (NaN) passes: nothing was measured, nothing is held against it.

        thresholds_N: of each document's language profile; NaN where the rule is off in it, and passes too."""
        compare = {">=": np.less, "<=": np.greater, ">": np.less_equal, "<": np.greater_equal}[self.keep]
        return ~compare(values_N.astype(np.float64), self.threshold if thresholds_N is None else thresholds_N)

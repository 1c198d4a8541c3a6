"""One rule of a filter: a signal, a comparison, a threshold and the source of the threshold."""

from dataclasses import dataclass, replace
from typing import Literal

import numpy as np


@dataclass(frozen=True)
class Rule:
    """A document passes if `signal` is at least (">=") or at most ("<=") the threshold; ">" and "<" exclude it.

    filter: the preset the rule belongs to. name: of the threshold in a recipe. source: of its number."""

    filter: str
    name: str
    signal: str
    keep: Literal[">=", "<=", ">", "<"]
    threshold: float
    source: str

    @property
    def label(self) -> str:
        """gopher_quality.min_words: the rule's name in the ledger and the report."""
        return f"{self.filter}.{self.name}"

    def at(self, threshold: float) -> "Rule":
        return replace(self, threshold=threshold)

    def passes(self, values_N: np.ndarray, thresholds_N: np.ndarray | None = None) -> np.ndarray:
        """bool[N]. A missing value (NaN) passes.

        thresholds_N: by document, from its language profile; NaN (the rule is off there) passes too."""
        compare = {">=": np.less, "<=": np.greater, ">": np.less_equal, "<": np.greater_equal}[self.keep]
        return ~compare(values_N.astype(np.float64), self.threshold if thresholds_N is None else thresholds_N)

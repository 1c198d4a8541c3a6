"""Tests of a score against chance: exact tests on the number of right answers, without a normal approximation."""

from collections import Counter
from collections.abc import Sequence
from typing import Literal, NamedTuple

import numpy as np
from scipy.stats import binom

FREE_ANSWER = 1e-4  # a chance level of 0.0 (answers without choices) is tested as this, the smallest with four digits
LEVEL = 0.01  # two-sided significance level: 1 of 100 tasks on which a model guesses is called better or worse


class Verdict(NamedTuple):
    """Outcome of a test. side: of chance on which the score is. p: two-sided p-value under the hypothesis of chance."""

    side: Literal["better", "worse"]
    p: float

    def __str__(self) -> str:
        word = f"{self.side} than chance" if self.p < LEVEL else "like chance"
        return f"{word} ({p_text(self.p)})"


def p_text(p: float) -> str:
    """0.25 -> "p = 0.25", 0.00137 -> "p = 0.0014", 1e-40 -> "p < 1e-12"."""
    return "p < 1e-12" if p < 1e-12 else f"p = {p:.2g}"


def accuracy_verdict(right: int, chances: Sequence[float]) -> Verdict:
    """Exact test of `right` answers to len(chances) questions, each with its own chance level.

    With one chance for all, the number right is binomial; with several (questions of three and of four choices) it is
    Poisson binomial, the distribution of a sum of independent binomials. Two-sided: twice the smaller tail, at most 1.
    128 of 400 at 0.25 -> better, p = 0.0019; 4 of 4 at 0.25 -> better, p = 0.0078."""
    at_most, at_least = tails(right, chances)
    return Verdict("better" if at_least <= at_most else "worse", min(1.0, 2 * min(at_most, at_least)))


def tails(right: int, chances: Sequence[float]) -> tuple[float, float]:
    """(P(X <= right), P(X >= right)), X the number of questions that random guessing answers right."""
    counted = Counter(max(chance, FREE_ANSWER) for chance in chances)
    if len(counted) == 1:
        ((chance, count),) = counted.items()
        return float(binom.cdf(right, count, chance)), float(binom.sf(right - 1, count, chance))
    chances_N = np.ones(1)  # P(X = 0), P(X = 1), ...
    for chance, count in sorted(counted.items()):
        chances_N = np.convolve(chances_N, binom.pmf(np.arange(count + 1), count, chance))
    return float(min(1.0, chances_N[: right + 1].sum())), float(min(1.0, chances_N[right:].sum()))


def sign_verdict(differences: Sequence[float]) -> Verdict | None:
    """The exact sign test: is a negative difference (fewer bits than chance) as likely as a positive one?

    One difference per document; those of 0 are dropped. None if none remains."""
    better = sum(difference < 0 for difference in differences)
    total = sum(difference != 0 for difference in differences)
    return accuracy_verdict(better, [0.5] * total) if total else None

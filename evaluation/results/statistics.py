"""Standard errors, and the bits per byte of a unigram model."""

import math
from collections.abc import Sequence

import numpy as np


def mean_error(values: Sequence[float]) -> float:
    """Standard error of the mean; NaN for fewer than two values. [0, 1, 1] -> 0.333."""
    if len(values) < 2:
        return math.nan
    return float(np.std(np.asarray(values, dtype=np.float64), ddof=1) / math.sqrt(len(values)))


def ratio_error(tops: Sequence[float], bottoms: Sequence[float]) -> float:
    """Standard error of sum(tops) / sum(bottoms) over independent pairs, by linearisation.

    With r the ratio: sqrt(n / (n - 1) * sum((top - r * bottom)**2)) / sum(bottoms) (Cochran 1977, Sampling
    Techniques, section 6.4). Equal bottoms give the standard error of a mean: tops 1, 2, 3, bottoms 1 -> 0.577.
    NaN for fewer than two pairs."""
    top, bottom = np.asarray(tops, dtype=np.float64), np.asarray(bottoms, dtype=np.float64)
    if len(top) < 2:
        return math.nan
    residual = top - top.sum() / bottom.sum() * bottom
    return float(math.sqrt(len(top) / (len(top) - 1) * float((residual**2).sum())) / bottom.sum())


def unigram_bits_per_byte(counts: np.ndarray, token_ids: Sequence[int], num_bytes: int) -> float:
    """Bits per byte of a text under a unigram model of the training tokens.

    counts: int64[V], frequency of each token in the training data, plus one (Laplace smoothing). counts [3, 1], tokens
    [0, 1], 2 bytes -> (log2(6/4) + log2(6/2)) / 2."""
    logprobs_V = np.log2(counts + 1.0) - math.log2(float(counts.sum() + len(counts)))
    return float(-logprobs_V[np.asarray(token_ids, dtype=np.int64)].sum() / num_bytes)

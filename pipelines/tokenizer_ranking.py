"""Ranks tokenizers by the bits per byte of small models trained on equal bytes of text, with intervals over seeds."""

import math
import statistics
from collections.abc import Sequence

from gristmill.tokenizers.report import TokenizerReport, TrainedBits

CONFIDENCE = 0.95


def interval(values: Sequence[float]) -> tuple[float, float]:
    """(mean, half the width of its 95 % interval by Student's t); NaN for the width of one value.

    2.0, 2.1, 2.2 -> 2.1 and 4.303 * 0.1 / sqrt(3) = 0.248."""
    from scipy.stats import t  # slow to load, and only for rankings

    mean = statistics.mean(values)
    if len(values) < 2:
        return mean, math.nan
    quantile = float(t.ppf((1 + CONFIDENCE) / 2, len(values) - 1))
    return mean, quantile * statistics.stdev(values) / math.sqrt(len(values))


def ranking_rows(reports: Sequence[TokenizerReport]) -> list[list[str]]:
    """From the fewest bits per byte to the most, after a header. The last column is the difference to the first row,
    whose interval is over pairs of equal seeds: a tokenizer whose interval excludes 0 is worse."""
    trained = sorted(_trained(reports), key=lambda each: statistics.mean(each[1].total))
    table = [["rank", "tokenizer", "bits/byte (95 % interval)", "seeds", "above the first (95 % interval)"]]
    best = trained[0][1].total
    for rank, (name, bits) in enumerate(trained, start=1):
        differences = [mine - first for mine, first in zip(bits.total, best, strict=True)]
        above = "" if rank == 1 else _shown(interval(differences))
        table.append([str(rank), name, _shown(interval(bits.total)), str(len(bits.total)), above])
    return table


def ranking_by_group(reports: Sequence[TokenizerReport]) -> list[list[str]]:
    """Bits per byte of each language: a column per tokenizer, after a header; * marks the fewest."""
    trained = _trained(reports)
    table = [["bits/byte", *(name for name, _ in trained)]]
    for group in trained[0][1].groups:
        found = [interval(bits.groups[group]) for _, bits in trained]
        fewest = min(mean for mean, _ in found)
        table.append([group, *(_shown(each) + ("*" if each[0] == fewest else "") for each in found)])
    return table


def _trained(reports: Sequence[TokenizerReport]) -> list[tuple[str, TrainedBits]]:
    return [(each.name, each.bits_per_byte) for each in reports if each.bits_per_byte is not None]


def _shown(found: tuple[float, float]) -> str:
    mean, half = found
    return f"{mean:.4f}" if math.isnan(half) else f"{mean:.4f} ± {half:.4f}"

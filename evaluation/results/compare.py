"""Compare the results of two models on the same questions, with a paired bootstrap over the questions."""

import io
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import NormalDist, stdev
from typing import Any

import numpy as np
from scipy.special import bdtr

from gristmill.evaluation.results.statistics import BITS, LN2, MARK, ratio_error
from gristmill.foundation.checksums import check_outputs, reading
from gristmill.foundation.errors import InputError

# Plot of scores over a training run.

COLUMNS = 3


def curve_svg(points: Sequence[Mapping[str, Any]]) -> str:
    """One panel a task and metric: the score with its standard error by tokens seen (by step where they are not known),
    and chance as a dashed line. The same points give the same bytes."""
    import matplotlib  # imported here: it would slow down the command line
    from matplotlib.figure import Figure

    panels: dict[tuple[str, str], list[Mapping[str, Any]]] = {}
    for point in points:
        panels.setdefault((point["task"], point["metric"]), []).append(point)
    rows = -(-len(panels) // COLUMNS)
    with matplotlib.rc_context({"svg.hashsalt": "gristmill", "font.size": 8}):
        figure = Figure(figsize=(4 * min(COLUMNS, len(panels)), 2.6 * rows), layout="constrained")
        for index, ((task, metric), curve) in enumerate(panels.items(), start=1):
            axes = figure.add_subplot(rows, min(COLUMNS, len(panels)), index)
            known = all(point["tokens"] is not None for point in curve)
            places = [point["tokens"] / 1e6 if known else point["step"] for point in curve]
            scores = [point["score"] for point in curve]
            axes.errorbar(
                places, scores, [point["error"] or 0.0 for point in curve], marker="o", markersize=3, capsize=2
            )
            if curve[0]["chance"] is not None:
                axes.axhline(curve[0]["chance"], linestyle="--", linewidth=0.8, color="gray")
            axes.set(title=f"{task}: {metric}", xlabel="million tokens" if known else "step")
        drawn = io.StringIO()
        figure.savefig(drawn, format="svg", metadata={"Date": None})
    return drawn.getvalue()


# How much a score varies between checkpoints, and the smallest difference between two runs that would show.

LAST = 5  # checkpoints at most, of the second half of the curve: before it a score rises, and a trend is no noise
POWER = 0.8  # with which the smallest detectable difference is found, by a two-sided test at 5 %
DETECTABLE_ERRORS = NormalDist().inv_cdf(0.975) + NormalDist().inv_cdf(POWER)  # 2.80 standard errors
NOISE_HEADINGS = ("task", "metric", "score", "± s.e.", "noise", "checkpoints", "detectable")


@dataclass(frozen=True)
class ScoreNoise:
    """score, error: of the last checkpoint. noise: standard deviation of the scores of the last `checkpoints`, never
    more than half of the curve; None for fewer than three (Signal and Noise, arXiv 2508.13144, section 2).

    The questions are the same at every checkpoint, so their standard error is not part of the noise."""

    task: str
    metric: str
    score: float
    error: float | None
    noise: float | None
    checkpoints: int

    @property
    def detectable(self) -> float | None:
        """The smallest difference of two runs, one checkpoint each, that is detected with a power of 80 % (Card et al.
        2020, arXiv 2010.06595): 2.80 x sqrt(2) x noise."""
        return None if self.noise is None else DETECTABLE_ERRORS * math.sqrt(2) * self.noise


def score_noise(points: Sequence[Mapping[str, Any]], last: int = LAST) -> list[ScoreNoise]:
    """points: those of the curve, in the order of the steps."""
    series: dict[tuple[str, str], list[Mapping[str, Any]]] = {}
    for point in points:
        series.setdefault((point["task"], point["metric"]), []).append(point)
    noises = []
    for (task, metric), every in series.items():
        scores = [point["score"] for point in every[-max(1, min(last, len(every) // 2)) :]]
        noise = stdev(scores) if len(scores) > 2 else None
        noises.append(ScoreNoise(task, metric, scores[-1], every[-1]["error"], noise, len(scores)))
    return noises


def noise_cells(noises: Sequence[ScoreNoise]) -> list[tuple[str, ...]]:
    """Rows of a table under NOISE_HEADINGS."""

    def number(value: float | None) -> str:
        return "" if value is None else f"{value:.4f}"

    return [
        (
            noise.task,
            noise.metric,
            number(noise.score),
            number(noise.error),
            number(noise.noise),
            str(noise.checkpoints),
            number(noise.detectable),
        )
        for noise in noises
    ]


def noise_markdown(noises: Sequence[ScoreNoise]) -> str:
    lines = ["| " + " | ".join(NOISE_HEADINGS) + " |", "|" + "---|" * len(NOISE_HEADINGS)]
    lines += ["| " + " | ".join(cells) + " |" for cells in noise_cells(noises)]
    return "\n".join(lines) + "\n"


DRAWS = 2000  # 50 draws lie outside each end of a 95 % interval
LEVEL = 0.05  # two-sided, as the interval
HEADINGS = ("task", "n", "metric", "first", "second", "difference", "95 % interval", "exact p", "detectable", "verdict")


@dataclass(frozen=True)
class Comparison:
    """Difference second - first, and its 95 % bootstrap interval (low, high). detectable: the smallest difference that
    so many questions show with a power of 80 %, from the standard error of the paired differences. p: of McNemar's
    exact test, for answers that are right or wrong; None for other scores."""

    task: str
    metric: str
    count: int
    first: float
    second: float
    low: float
    high: float
    detectable: float
    higher_is_better: bool
    p: float | None = None

    @property
    def difference(self) -> float:
        return self.second - self.first

    @property
    def verdict(self) -> str:
        """One model is better only if the interval excludes zero; of right and wrong answers, if the exact test says so
        too: few discordant questions give the bootstrap an interval that excludes zero by chance alone."""
        if self.low <= 0 <= self.high or (self.p is not None and self.p >= LEVEL):
            return "no difference shown"
        return "second is better" if (self.difference > 0) == self.higher_is_better else "first is better"


def compare_folders(first: Path, second: Path, seed: int = 0) -> list[Comparison]:
    """Comparison of every metric of the tasks in both results folders, over the questions that both evaluated. Raises
    InputError if documents, prompts or settings differ."""
    for folder in (first, second):
        check_outputs(folder, lambda path: path == "results.json" or path.startswith("samples/"))
    with reading(first), reading(second):
        return _compare(first, second, seed)


def _compare(first: Path, second: Path, seed: int) -> list[Comparison]:
    left, right = _read_results(first), _read_results(second)
    shared = sorted(left["task_hashes"].keys() & right["task_hashes"].keys())
    if not shared:
        raise InputError(f"{first} and {second} have no task in common; evaluate both on the same tasks")
    comparisons = []
    for task in shared:
        if left["task_hashes"][task] != right["task_hashes"][task]:
            raise InputError(
                f"{task}: {first} and {second} have different questions (other documents, prompts, shots or "
                "limit); evaluate both with the same settings"
            )
        both = _read_samples(first, task), _read_samples(second, task)
        if len(both[0]) != len(both[1]):
            raise InputError(
                f"{task}: {first} has {len(both[0])} samples and {second} {len(both[1])}; evaluate both again"
            )
        pairs = [pair for pair in zip(*both, strict=True) if not any(MARK in sample for sample in pair)]
        if not pairs:
            raise InputError(
                f"{task}: {first} and {second} have no question that both evaluated; evaluate models with a longer "
                "sequence length"
            )
        comparisons += _compare_task(task, pairs, left["higher_is_better"].get(task, {}), seed)
    return comparisons


def _compare_task(
    task: str, pairs: Sequence[tuple[Any, Any]], higher_is_better: Mapping[str, bool], seed: int
) -> list[Comparison]:
    comparisons = []
    for metric in dict.fromkeys(metric for left, _ in pairs for metric in left["metrics"]):
        values = [(left[metric], right[metric]) for left, right in pairs if metric in left and metric in right]
        if not values:
            continue
        if metric in BITS:
            bits = np.array([[-left[0] / LN2, -right[0] / LN2] for left, right in values])
            sizes = np.array([left[1] for left, _ in values], dtype=np.float64)
        elif all(isinstance(value, int | float) for pair in values for value in pair):
            bits, sizes = np.array(values, dtype=np.float64), np.ones(len(values))
        else:
            continue
        low, high = paired_interval(bits[:, 1] - bits[:, 0], sizes, seed)
        totals = bits.sum(axis=0) / sizes.sum()
        comparisons.append(
            Comparison(
                task,
                metric,
                len(values),
                float(totals[0]),
                float(totals[1]),
                low,
                high,
                DETECTABLE_ERRORS * ratio_error(list(bits[:, 1] - bits[:, 0]), list(sizes)),
                higher_is_better.get(metric, True),
                mcnemar(bits[:, 0], bits[:, 1]) if is_right_or_wrong(bits) and metric not in BITS else None,
            )
        )
    return comparisons


def is_right_or_wrong(scores_N2: np.ndarray) -> bool:
    return bool(np.isin(scores_N2, (0.0, 1.0)).all())


def mcnemar(first_N: np.ndarray, second_N: np.ndarray) -> float:
    """Two-sided p-value of McNemar's exact test (1947; the binomial test on the discordant questions): 4 questions that
    one model alone answers and none the other -> 2 * 0.5**4 = 0.125. 1.0 without discordant questions."""
    gained, lost = int((second_N > first_N).sum()), int((second_N < first_N).sum())
    return min(1.0, 2 * float(bdtr(min(gained, lost), gained + lost, 0.5))) if gained + lost else 1.0


def paired_interval(differences: np.ndarray, sizes: np.ndarray, seed: int, draws: int = DRAWS) -> tuple[float, float]:
    """The 2.5th and 97.5th percentile of sum(differences) / sum(sizes) over resampled questions (Efron 1979; paired as
    in Koehn 2004). differences: float64[n], one a question; sizes: their weights."""
    rng = np.random.default_rng([seed, len(differences)])
    means = np.empty(draws)
    for draw in range(draws):
        chosen = rng.integers(0, len(differences), len(differences))
        means[draw] = differences[chosen].sum() / sizes[chosen].sum()
    low, high = np.percentile(means, [2.5, 97.5])
    return float(low), float(high)


def comparison_markdown(comparisons: Sequence[Comparison]) -> str:
    """The comparisons as a Markdown table."""
    lines = ["| " + " | ".join(HEADINGS) + " |", "|" + "---|" * len(HEADINGS)]
    for comparison in comparisons:
        cells = (
            comparison.task,
            str(comparison.count),
            comparison.metric,
            f"{comparison.first:.4f}",
            f"{comparison.second:.4f}",
            f"{comparison.difference:+.4f}",
            f"{comparison.low:+.4f} to {comparison.high:+.4f}",
            "" if comparison.p is None else f"{comparison.p:.3g}",
            "" if math.isnan(comparison.detectable) else f"{comparison.detectable:.4f}",
            comparison.verdict,
        )
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def _read_results(folder: Path) -> dict[str, Any]:
    path = folder / "results.json"
    if not path.is_file():
        raise InputError(f"{path}: absent; name a folder that `gristmill evaluate` wrote")
    try:
        results: dict[str, Any] = json.loads(path.read_bytes())
        hashes, better = results["task_hashes"], results["higher_is_better"]
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise InputError(f"{path}: damaged ({type(error).__name__}: {error}); evaluate again") from error
    if not all(isinstance(part, dict) for part in (hashes, better, *better.values())):
        raise InputError(f"{path}: damaged (task_hashes and higher_is_better are not objects); evaluate again")
    return results


def _read_samples(folder: Path, task: str) -> list[dict[str, Any]]:
    path = folder / "samples" / f"{task.replace(':', '_')}.jsonl"
    try:
        samples = [json.loads(line) for line in path.read_text("utf-8").split("\n") if line]
        complete = all(MARK in sample or set(sample["metrics"]) <= sample.keys() for sample in samples)
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise InputError(f"{path}: damaged ({type(error).__name__}: {error}); evaluate again") from error
    if not samples or not complete:
        raise InputError(f"{path}: damaged (a sample lacks its metrics); evaluate again")
    return samples

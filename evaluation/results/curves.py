"""Plot of scores over a training run."""

import io
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import NormalDist, stdev
from typing import Any

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
HEADINGS = ("task", "metric", "score", "± s.e.", "noise", "checkpoints", "detectable")


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
    """Rows of a table under HEADINGS."""

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
    lines = ["| " + " | ".join(HEADINGS) + " |", "|" + "---|" * len(HEADINGS)]
    lines += ["| " + " | ".join(cells) + " |" for cells in noise_cells(noises)]
    return "\n".join(lines) + "\n"

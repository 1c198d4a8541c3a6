"""Standard errors of scores, in closed form from the samples.

lm-eval bootstraps the errors of perplexities, and has none for bits per byte."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

from gristmill.evaluation.results.statistics import mean_error, ratio_error

LN2 = math.log(2)
ANSWER_BITS = "answer_bits_per_byte"
BITS = ("bits_per_byte", ANSWER_BITS)  # metrics whose samples are (log-likelihood in nats, bytes)


def bits_per_byte(pairs: Sequence[Sequence[float]]) -> float:
    """Summed bits over summed bytes of (log-likelihood in nats, bytes)."""
    return -sum(pair[0] for pair in pairs) / LN2 / sum(pair[1] for pair in pairs)


def add_standard_errors(summary: dict[str, Any], samples: Mapping[str, Sequence[Mapping[str, Any]]]) -> None:
    """Adds `metric_stderr,filter` to the results of each task, and of each group from the samples of all its tasks."""
    children = summary.get("group_subtasks", {})
    for name, result in summary["results"].items():
        tasks = [name] if name in samples else subtasks_of(name, children)
        for key in [key for key in result if "," in key and "_stderr," not in key]:
            metric, chosen_filter = key.split(",", 1)
            values = [
                sample[metric]
                for task in tasks
                for sample in samples.get(task, ())
                if metric in sample and sample["filter"] == chosen_filter
            ]
            error = standard_error(metric, values, result[key])
            if error is not None and math.isfinite(error):
                result[f"{metric}_stderr,{chosen_filter}"] = error


def subtasks_of(name: str, children: Mapping[str, Sequence[str]]) -> list[str]:
    """Tasks of a group, nested groups included."""
    below: list[str] = []
    for child in children.get(name, ()):
        below += subtasks_of(child, children) if child in children else [child]
    return below


def standard_error(metric: str, values: Sequence[Any], score: float) -> float | None:
    """Standard error of a score; None for a metric whose samples are neither numbers nor known pairs.

    A perplexity is the exponential of a mean or a ratio: its error is the perplexity times the error of that mean or
    ratio (delta method)."""
    if metric in BITS:
        return ratio_error([-pair[0] for pair in values], [pair[1] for pair in values]) / LN2
    if metric in ("byte_perplexity", "word_perplexity"):
        return score * ratio_error([pair[0] for pair in values], [pair[1] for pair in values])
    if not all(isinstance(value, int | float) for value in values):
        return None
    return (score if metric == "perplexity" else 1.0) * mean_error(values)

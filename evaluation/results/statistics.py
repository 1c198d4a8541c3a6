"""Standard errors, and the bits per byte of a unigram model."""

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal, NamedTuple, TypeVar

import numpy as np
from lm_eval.api.group import Group
from lm_eval.api.metrics import mean
from lm_eval.api.task import Task
from scipy.special import bdtr, bdtrc, betaln, xlog1py, xlogy  # scipy.stats takes a second to import

from gristmill.evaluation.scoring.lm_eval_adapter import LmEvalAdapter


def mean_error(values: Sequence[float]) -> float:
    """Standard error of the mean; NaN for fewer than two values. [0, 1, 1] -> 0.333."""
    if len(values) < 2:
        return math.nan
    return float(np.std(np.asarray(values, dtype=np.float64), ddof=1) / math.sqrt(len(values)))


def ratio_error(tops: Sequence[float], bottoms: Sequence[float]) -> float:
    """Standard error of sum(tops) / sum(bottoms) over independent pairs, by linearization.

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


# Standard errors of scores, in closed form from the samples.
#
# lm-eval bootstraps the errors of perplexities, and has none for bits per byte.

LN2 = math.log(2)
ANSWER_BITS = "answer_bits_per_byte"
Sample = TypeVar("Sample", bound=Mapping[str, Any])
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


# Tests of a score against chance: exact tests on the number of right answers, without a normal approximation.

FREE_ANSWER = 1e-4  # a chance level of 0.0 (answers without choices) is tested as this, the smallest with four digits
LEVEL = 0.01  # two-sided significance level: 1 of 100 tasks on which a model guesses is called better or worse


class ChanceTest(NamedTuple):
    """Outcome of a test. side: of chance on which the score is. p: two-sided p-value under the hypothesis of chance."""

    side: Literal["better", "worse"]
    p: float

    def __str__(self) -> str:
        word = f"{self.side} than chance" if self.p < LEVEL else "like chance"
        return f"{word} ({p_text(self.p)})"


def p_text(p: float) -> str:
    """0.25 -> "p = 0.25", 0.00137 -> "p = 0.0014", 1e-40 -> "p < 1e-12"."""
    return "p < 1e-12" if p < 1e-12 else f"p = {p:.2g}"


def accuracy_chance_test(right: int, chances: Sequence[float]) -> ChanceTest:
    """Exact test of `right` answers to len(chances) questions, each with its own chance level.

    With one chance for all, the number right is binomial; with several (questions of three and of four choices) it is
    Poisson binomial, the distribution of a sum of independent binomials. Two-sided: twice the smaller tail, at most 1.
    128 of 400 at 0.25 -> better, p = 0.0019; 4 of 4 at 0.25 -> better, p = 0.0078."""
    at_most, at_least = tails(right, chances)
    return ChanceTest("better" if at_least <= at_most else "worse", min(1.0, 2 * min(at_most, at_least)))


def tails(right: int, chances: Sequence[float]) -> tuple[float, float]:
    """(P(X <= right), P(X >= right)), X the number of questions that random guessing answers right."""
    counted = Counter(max(chance, FREE_ANSWER) for chance in chances)
    if len(counted) == 1:
        ((chance, count),) = counted.items()
        return float(bdtr(right, count, chance)), float(bdtrc(right - 1, count, chance))
    chances_N = np.ones(1)  # P(X = 0), P(X = 1), ...
    for chance, count in sorted(counted.items()):
        chances_N = np.convolve(chances_N, _binomial(count, chance))
    return float(min(1.0, chances_N[: right + 1].sum())), float(min(1.0, chances_N[right:].sum()))


def _binomial(count: int, chance: float) -> np.ndarray:
    """P(X = 0), ..., P(X = count), X the number that is right of `count`. 2 at 0.5 -> 0.25, 0.5, 0.25."""
    right = np.arange(count + 1)
    ways = -np.log1p(count) - betaln(right + 1, count - right + 1)  # logarithm of "count choose right"
    return np.exp(ways + xlogy(right, chance) + xlog1py(count - right, -chance))


def sign_chance_test(differences: Sequence[float]) -> ChanceTest | None:
    """The exact sign test: is a negative difference (fewer bits than chance) as likely as a positive one?

    One difference per document; those of 0 are dropped. None if none remains."""
    better = sum(difference < 0 for difference in differences)
    total = sum(difference != 0 for difference in differences)
    return accuracy_chance_test(better, [0.5] * total) if total else None


# Questions that do not fit the model's sequence length: they are excluded from the scores, and counted.

SkipReasons = dict[tuple[str, int], str]  # (task, doc_id) -> why it was not evaluated
MARK = "not_evaluated"  # key of the reason in a skipped sample


def gather_skip_reasons(model: Any) -> SkipReasons:
    """Reasons of all data-parallel replicas, gathered on the first one; empty for lm-eval's own models."""
    if not isinstance(model, LmEvalAdapter):
        return {}
    if model.world_size == 1:
        return model.skipped
    gathered = model.gather_object(model.skipped)
    return {key: reason for reasons in gathered or () for key, reason in reasons.items()}


def evaluated(samples: Iterable[Sample]) -> list[Sample]:
    return [sample for sample in samples if MARK not in sample]


def exclude_skipped(
    raw: dict[str, Any],
    samples: Mapping[str, Sequence[dict[str, Any]]],
    tasks: Mapping[str, Task],
    groups: Mapping[str, Group],
    reasons: SkipReasons,
) -> None:
    """Removes the metrics of skipped samples and recomputes the scores of their tasks and groups.

    A task without any evaluated question has no score. `n-samples` has the number of skipped questions of each task."""
    touched = {name for name, _ in reasons}
    for name in touched & samples.keys():
        for sample in samples[name]:
            if reason := reasons.get((name, sample["doc_id"])):
                for metric in sample["metrics"]:
                    del sample[metric]
                sample.update({"metrics": [], MARK: reason})
        kept = evaluated(samples[name])
        result = raw["results"][name]
        for key in [key for key in result if "," in key]:
            del result[key]
        result.update(scores(tasks[name], kept))
        result["sample_len"] = len({sample["doc_id"] for sample in kept})
        raw["n-samples"][name][MARK] = len({doc_id for task, doc_id in reasons if task == name})
    for name, group in groups.items():
        if touched & {task.config.task for task in group.get_all_tasks()}:
            raw["results"][name] = group.aggregate(raw["results"])
            if name in raw.get("groups", {}):
                raw["groups"][name] = raw["results"][name]


def scores(task: Task, samples: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """{"metric,filter": score} of these samples, aggregated by the task's own functions; bits of right answers too."""
    values: dict[tuple[str, str], list[Any]] = {}
    for sample in samples:
        for metric in sample["metrics"]:
            values.setdefault((metric, sample["filter"]), []).append(sample[metric])
    aggregation = {**task.aggregation(), ANSWER_BITS: bits_per_byte}
    return {
        f"{metric},{chosen}": aggregation.get(metric, mean)(metric_values)
        for (metric, chosen), metric_values in values.items()
    }


def skipped_notes(samples: Mapping[str, Sequence[Mapping[str, Any]]]) -> list[str]:
    """One note per task with skipped questions: their number, and the first one with its reason."""
    notes = []
    for name, task_samples in samples.items():
        reasons = {sample["doc_id"]: sample[MARK] for sample in task_samples if MARK in sample}
        if reasons:
            total = len({sample["doc_id"] for sample in task_samples})
            notes.append(
                f"{name}: {len(reasons)} of {total} questions were not evaluated and are in no score; "
                f"question {min(reasons)}: {reasons[min(reasons)]}"
            )
    return notes

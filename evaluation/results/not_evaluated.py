"""Questions that do not fit the model's sequence length: they are excluded from the scores, and counted."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from lm_eval.api.group import Group
from lm_eval.api.metrics import mean
from lm_eval.api.task import Task

from gristmill.evaluation.results.standard_errors import ANSWER_BITS, bits_per_byte
from gristmill.evaluation.scoring.language_model import LanguageModel

SkipReasons = dict[tuple[str, int], str]  # (task, doc_id) -> why it was not evaluated
MARK = "not_evaluated"  # key of the reason in a skipped sample


def gather_skip_reasons(model: Any) -> SkipReasons:
    """Reasons of all data-parallel replicas, gathered on the first one; empty for lm-eval's own models."""
    if not isinstance(model, LanguageModel):
        return {}
    if model.world_size == 1:
        return model.too_long
    gathered = model.gather_object(model.too_long)
    return {key: reason for found in gathered or () for key, reason in found.items()}


def evaluated(samples: Iterable[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
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
    return {f"{metric},{chosen}": aggregation.get(metric, mean)(found) for (metric, chosen), found in values.items()}


def skipped_notes(samples: Mapping[str, Sequence[Mapping[str, Any]]]) -> list[str]:
    """One note per task with skipped questions: their number, and the first one with its reason."""
    notes = []
    for name, found in samples.items():
        reasons = {sample["doc_id"]: sample[MARK] for sample in found if MARK in sample}
        if reasons:
            total = len({sample["doc_id"] for sample in found})
            notes.append(
                f"{name}: {len(reasons)} of {total} questions were not evaluated and are in no score; "
                f"question {min(reasons)}: {reasons[min(reasons)]}"
            )
    return notes

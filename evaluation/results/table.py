"""Score tables in Markdown and HTML: score, standard error, chance level and verdict."""

import hashlib
import importlib.metadata
import json
import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import Any

from gristmill.evaluation.results.statistics import (
    ANSWER_BITS,
    LN2,
    ChanceTest,
    accuracy_chance_test,
    evaluated,
    sign_chance_test,
    subtasks_of,
)
from gristmill.foundation.files import write_atomic

HEADINGS = ("task", "shots", "n", "not evaluated", "metric", "score", "± s.e.", "chance", "verdict")
Samples = Mapping[str, Sequence[Mapping[str, Any]]]  # by task


@dataclass(frozen=True)
class ScoreRow:
    """One row of the table. count: number of evaluated questions; num_skipped: of skipped ones. score: None without
    any evaluated question.

    chance: expected score of random guessing (see the task); None if unknown. verdict: of the exact test against
    chance; None where there is no such test."""

    task: str
    num_fewshot: int
    count: int
    metric: str
    score: float | None
    error: float | None
    higher_is_better: bool
    chance: float | None
    verdict: ChanceTest | None = None
    num_skipped: int = 0


def score_rows(summary: Mapping[str, Any], samples: Samples, unigram: Mapping[str, Sequence[float]]) -> list[ScoreRow]:
    """A row for each metric of each task and group. unigram: by task, bits of each document under a unigram model of
    the training tokens, which is the chance level of bits per byte."""
    return [
        row
        for name, result in summary["results"].items()
        for row in rows_of(name, result, summary, {task: samples[task] for task in tasks_of(name, summary, samples)},
                           unigram)
    ]  # fmt: skip


def rows_of(
    name: str,
    result: Mapping[str, Any],
    summary: Mapping[str, Any],
    samples: Samples,
    unigram: Mapping[str, Sequence[float]],
) -> list[ScoreRow]:
    """The rows of one task or group. result: scores by "metric,filter"; samples: of its tasks."""
    questions = {(task, sample["doc_id"]) for task, task_samples in samples.items() for sample in task_samples}
    kept = {task: evaluated(task_samples) for task, task_samples in samples.items()}
    num_skipped = len(questions) - len(
        {(task, sample["doc_id"]) for task, task_samples in kept.items() for sample in task_samples}
    )
    better = summary["higher_is_better"].get(name, {})
    keys = [key for key in result if "," in key and "_stderr," not in key]
    if not keys and num_skipped:
        keys = [f"{metric},none" for metric in better]
    rows = []
    for key in keys:
        metric, chosen_filter = key.split(",", 1)
        task_samples = [
            (task, sample)
            for task, of_task in kept.items()
            for sample in of_task
            if metric in sample and sample["filter"] == chosen_filter
        ]
        chance, verdict = against_chance(metric, task_samples, summary["configs"], unigram)
        rows.append(
            ScoreRow(
                task=result.get("alias", name).strip(),
                num_fewshot=summary["n-shot"].get(name, 0),
                count=len(task_samples),
                metric=metric if chosen_filter == "none" or metric == ANSWER_BITS else f"{metric} ({chosen_filter})",
                score=result.get(key),
                error=result.get(f"{metric}_stderr,{chosen_filter}"),
                higher_is_better=better.get(metric, True),
                chance=chance,
                verdict=verdict,
                num_skipped=num_skipped,
            )
        )
    return rows


def tasks_of(name: str, summary: Mapping[str, Any], samples: Samples) -> list[str]:
    """The task itself, or the tasks of a group."""
    tasks = [name] if name in samples else subtasks_of(name, summary["group_subtasks"])
    return [task for task in tasks if task in samples]


def against_chance(
    metric: str,
    metric_samples: Sequence[tuple[str, Mapping[str, Any]]],
    configs: Mapping[str, Any],
    unigram: Mapping[str, Sequence[float]],
) -> tuple[float | None, ChanceTest | None]:
    """(chance level, verdict of the test against it) of (task, sample) pairs; None where unknown.

    Bits per byte: an exact sign test over the documents: does the model need fewer bits than the unigram model in more
    than half of them? Accuracies: an exact test of the number of right answers. Perplexities have neither."""
    if metric == "bits_per_byte":
        pairs = [(task, sample) for task, sample in metric_samples if task in unigram]
        if not pairs:
            return None, None
        guessed_bits = [unigram[task][sample["doc_id"]] for task, sample in pairs]
        bits = [-sample[metric][0] / LN2 for _, sample in pairs]
        chance = sum(guessed_bits) / sum(sample[metric][1] for _, sample in pairs)
        return chance, sign_chance_test(
            [bits_per_answer - other for bits_per_answer, other in zip(bits, guessed_bits, strict=True)]
        )
    chances = (
        [_chance_of(configs.get(task, {}), sample) for task, sample in metric_samples]
        if has_chance_level(metric)
        else []
    )
    if not chances or any(chance is None for chance in chances):
        return None, None
    known = [chance for chance in chances if chance is not None]
    values = [sample[metric] for _, sample in metric_samples]
    verdict = accuracy_chance_test(int(sum(values)), known) if all(value in (0, 1) for value in values) else None
    return sum(known) / len(known), verdict


def has_chance_level(metric: str) -> bool:
    """Whether random guessing has a known score: accuracies and exact matches, not perplexities."""
    return metric.startswith(("acc", "exact_match"))


def _chance_of(config: Mapping[str, Any], sample: Mapping[str, Any]) -> float | None:
    """Chance level of one question: right choices over all choices; without choices, the task metadata's `chance`."""
    if config.get("output_type") == "multiple_choice":
        target = sample["target"]
        return (len(set(target)) if isinstance(target, list) else 1) / _num_choices(config, sample)
    stated: float | None = config.get("metadata", {}).get("chance")
    return stated


def _num_choices(config: Mapping[str, Any], sample: Mapping[str, Any]) -> int:
    """Number of choices. acc_mutual_info scores each choice twice, with and without the context."""
    twice = any(metric["metric"] == "acc_mutual_info" for metric in config.get("metric_list", ()))
    return len(sample["arguments"]) // (2 if twice else 1)


def markdown(rows: Sequence[ScoreRow], notes: Sequence[str] = ()) -> str:
    """A Markdown table with aligned columns, and the notes below it as a list."""
    cells = [HEADINGS, *(tuple(cell.replace("|", "\\|") for cell in _cells(row)) for row in rows)]
    widths = [max(len(line[column]) for line in cells) for column in range(len(HEADINGS))]
    lines = [_line(line, widths) for line in cells]
    rule = ["-" * (width + 1) + (":" if column in NUMBERS else "-") for column, width in enumerate(widths)]
    lines.insert(1, "|" + "|".join(rule) + "|")
    return "\n".join([*lines, "", *(f"- {note}" for note in notes)]).rstrip() + "\n"


def html(rows: Sequence[ScoreRow], notes: Sequence[str], title: str) -> str:
    """A self-contained HTML page: no script, no external file, all text escaped."""
    head = "".join(
        f'<th class="{"n" if column in NUMBERS else "t"}">{escape(heading)}</th>'
        for column, heading in enumerate(HEADINGS)
    )
    body = "".join(
        "<tr>"
        + "".join(
            f'<td class="{"n" if column in NUMBERS else "t"}">{escape(cell)}</td>'
            for column, cell in enumerate(_cells(row))
        )
        + "</tr>\n"
        for row in rows
    )
    listed = "".join(f"<li>{escape(note)}</li>\n" for note in notes)
    return (
        f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><title>{escape(title)}</title>\n'
        f"<style>{STYLE}</style></head>\n<body><h1>{escape(title)}</h1>\n<table><thead><tr>{head}</tr></thead>\n"
        f"<tbody>\n{body}</tbody></table>\n<ul>\n{listed}</ul></body></html>\n"
    )


STYLE = (
    "body{font:15px/1.5 system-ui,sans-serif;margin:2rem auto;max-width:72rem;padding:0 1rem;color:#222}"
    "table{border-collapse:collapse}th,td{padding:.3rem .7rem;border-bottom:1px solid #ddd;text-align:left}"
    "th{border-bottom:2px solid #888}th.n,td.n{text-align:right;font-variant-numeric:tabular-nums}ul{color:#555}"
)
NUMBERS = (1, 2, 3, 5, 6, 7)  # columns aligned to the right


def _cells(row: ScoreRow) -> tuple[str, ...]:
    error = "" if row.error is None or not math.isfinite(row.error) else _number(row.error)
    chance = "" if row.chance is None else f"{row.chance:.4f}"
    score = "" if row.score is None else _number(row.score)
    verdict = "not evaluated" if not row.count else "" if row.verdict is None else str(row.verdict)
    counts = (str(row.num_fewshot), str(row.count), str(row.num_skipped))
    return (row.task, *counts, row.metric, score, error, chance, verdict)


def _number(value: float) -> str:
    return f"{value:.4f}" if abs(value) < 1e6 else f"{value:.4g}"


def _line(cells: Sequence[str], widths: Sequence[int]) -> str:
    padded = [
        cell.rjust(width) if column in NUMBERS else cell.ljust(width)
        for column, (cell, width) in enumerate(zip(cells, widths, strict=True))
    ]
    return "| " + " | ".join(padded) + " |"


# Cross-language transfer: scores of a benchmark in several languages, beside a reference language and chance.

REFERENCES = ("en", "eng_Latn")  # English, in lm-eval's tasks and in FLORES
METRICS = ("acc", "bits_per_byte")

FamilyOf = Callable[[str], tuple[str, str] | None]  # task -> (benchmark, language)


def transfer_table(rows: Sequence[ScoreRow], family_of: FamilyOf) -> list[list[str]]:
    """A row per language, a column per benchmark of two languages or more, after a header; empty without any.

    A cell is the score, and in brackets its difference to English where the benchmark has it. Last come the mean over
    the languages but English, and chance."""
    scores: dict[str, dict[str, ScoreRow]] = {}
    for row in rows:
        family = family_of(row.task)
        if family is not None and row.metric in METRICS and row.score is not None:
            scores.setdefault(family[0], {})[family[1]] = row
    families = {name: of_family for name, of_family in scores.items() if len(of_family) > 1}
    if not families:
        return []
    table = [["language", *families]]
    for language in sorted({language for of_family in families.values() for language in of_family}):
        table.append([language, *(_cell(of_family, language) for of_family in families.values())])
    table.append(["mean without English", *(_mean(of_family) for of_family in families.values())])
    table.append(["chance", *(_chance(of_family) for of_family in families.values())])
    return table


def transfer_markdown(table: Sequence[Sequence[str]]) -> str:
    lines = [f"| {' | '.join(line)} |" for line in table]
    lines.insert(1, "|" + "---|" * len(table[0]))
    return "\n".join([*lines, "", "- in brackets: the difference to English", ""])


def _cell(of_family: dict[str, ScoreRow], language: str) -> str:
    if language not in of_family:
        return ""
    score = of_family[language].score or 0.0
    reference = next((of_family[name].score for name in REFERENCES if name in of_family), None)
    if reference is None or language in REFERENCES:
        return f"{score:.4f}"
    return f"{score:.4f} ({score - reference:+.4f})"


def _mean(of_family: dict[str, ScoreRow]) -> str:
    others = [row.score or 0.0 for language, row in of_family.items() if language not in REFERENCES]
    return f"{sum(others) / len(others):.4f}" if others else ""


def _chance(of_family: dict[str, ScoreRow]) -> str:
    chances = {row.chance for row in of_family.values()}
    (chance,) = chances if len(chances) == 1 else (None,)
    return "" if chance is None else f"{chance:.4f}"


# Write a results folder: results.json in lm-eval's layout, samples/*.jsonl, table.md, table.html.


def write_results(
    folder: Path,
    summary: Mapping[str, Any],
    samples: Mapping[str, Sequence[Mapping[str, Any]]],
    rows: Sequence[ScoreRow],
    notes: Sequence[str],
) -> None:
    """Writes all files of a results folder. They hold no time, path or machine: same scores, same bytes."""
    for name, task_samples in samples.items():
        lines = "".join(json.dumps(_plain(sample), ensure_ascii=False) + "\n" for sample in task_samples)
        write_atomic(folder / "samples" / f"{_file_name(name)}.jsonl", lines.encode())
    whole = {
        **summary,
        "verdicts": verdicts(rows),
        "task_hashes": {name: task_hash(task_samples) for name, task_samples in samples.items()},
        "lm_eval_version": importlib.metadata.version("lm_eval"),
    }
    text = json.dumps(_plain(whole), indent=2, ensure_ascii=False, sort_keys=True)
    write_atomic(folder / "results.json", text.encode() + b"\n")
    write_atomic(folder / "table.md", markdown(rows, notes).encode())
    write_atomic(folder / "table.html", html(rows, notes, "Scores").encode())


def verdicts(rows: Sequence[ScoreRow]) -> dict[str, dict[str, Any]]:
    """{task: {metric: {...}}} as in the table: number of questions, skipped questions, chance level, p-value,
    verdict."""
    verdicts_by_task: dict[str, dict[str, Any]] = {}
    for row in rows:
        verdicts_by_task.setdefault(row.task, {})[row.metric] = {
            "n": row.count,
            "not_evaluated": row.num_skipped,
            "chance": row.chance,
            "p_value": None if row.verdict is None else row.verdict.p,
            "verdict": None if row.verdict is None else str(row.verdict),
        }
    return verdicts_by_task


def task_hash(samples: Sequence[Mapping[str, Any]]) -> str:
    """SHA-256 over the hashes of documents, prompts and targets: equal if two models had the same questions."""
    parts = [sample["doc_hash"] + sample["prompt_hash"] + sample["target_hash"] for sample in samples]
    return hashlib.sha256("".join(parts).encode()).hexdigest()


def _plain(value: Any) -> Any:
    """JSON values: numpy numbers as Python's; NaN and infinities as strings, since JSON has none."""
    if isinstance(value, Mapping):
        return {str(key): _plain(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(inner) for inner in value]
    if hasattr(value, "item"):
        value = value.item()
    if isinstance(value, float) and value not in (float("inf"), float("-inf")) and value == value:
        return value
    return str(value) if isinstance(value, float) else value


def _file_name(task: str) -> str:
    return re.sub(r"[^A-Za-z0-9_.-]", "_", task)

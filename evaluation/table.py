"""Scores as people read them: each beside its standard error and what chance would give."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape
from typing import Any

from gristmill.evaluation.standard_errors import leaves

HEADINGS = ("task", "shots", "n", "metric", "score", "± s.e.", "chance", "verdict")
CLEAR = 3.0  # standard errors from chance that we call clear: by luck alone once in 740 times (normal, one-sided)


@dataclass(frozen=True)
class ScoreRow:
    """One score. chance: what a model scores that knows nothing of the question (see the task); None if unknown."""

    task: str
    shots: int
    count: int
    metric: str
    score: float
    error: float | None
    higher_is_better: bool
    chance: float | None

    @property
    def verdict(self) -> str:
        """How the score stands to chance, in standard errors."""
        if self.chance is None or not self.error or not math.isfinite(self.error):
            return ""
        distance = (self.score - self.chance) / self.error * (1 if self.higher_is_better else -1)
        word = "better than chance" if distance > CLEAR else "worse than chance" if distance < -CLEAR else "like chance"
        return f"{word} ({distance:+.1f} s.e.)"


def score_rows(
    summary: Mapping[str, Any], samples: Mapping[str, Sequence[Mapping[str, Any]]], unigram: Mapping[str, float]
) -> list[ScoreRow]:
    """A row for each metric of each task and group. unigram: the chance of bits per byte, by task name."""
    rows = []
    for name, result in summary["results"].items():
        guessing = guessing_chance(name, summary, samples)
        for key in result:
            if "," not in key or "_stderr," in key:
                continue
            metric, chosen_filter = key.split(",", 1)
            rows.append(
                ScoreRow(
                    task=result.get("alias", name).strip(),
                    shots=summary["n-shot"].get(name, 0),
                    count=result["sample_len"],
                    metric=metric if chosen_filter == "none" else f"{metric} ({chosen_filter})",
                    score=result[key],
                    error=result.get(f"{metric}_stderr,{chosen_filter}"),
                    higher_is_better=summary["higher_is_better"].get(name, {}).get(metric, True),
                    chance=unigram.get(name) if metric == "bits_per_byte" else guessing if guessed(metric) else None,
                )
            )
    return rows


def guessed(metric: str) -> bool:
    """Guessing says nothing on perplexities."""
    return metric.startswith(("acc", "exact_match"))


def guessing_chance(
    name: str, summary: Mapping[str, Any], samples: Mapping[str, Sequence[Mapping[str, Any]]]
) -> float | None:
    """Of multiple choice: the mean of 1 / choices over what was asked. Of other tasks: what their metadata says."""
    tasks = [name] if name in samples else leaves(name, summary["group_subtasks"])
    configs = [summary["configs"].get(task, {}) for task in tasks]
    if configs and all(config.get("output_type") == "multiple_choice" for config in configs):
        shares = [1 / _num_choices(summary["configs"][task], sample) for task in tasks for sample in samples[task]]
        return sum(shares) / len(shares)
    return configs[0].get("metadata", {}).get("chance") if len(configs) == 1 else None


def _num_choices(config: Mapping[str, Any], sample: Mapping[str, Any]) -> int:
    """Mutual information asks for each choice twice, with and without the context."""
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
    """A page that stands alone: no script, no outside file, every text escaped."""
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
NUMBERS = (1, 2, 4, 5, 6)  # columns aligned to the right


def _cells(row: ScoreRow) -> tuple[str, ...]:
    error = "" if row.error is None or not math.isfinite(row.error) else _number(row.error)
    chance = "" if row.chance is None else f"{row.chance:.4f}"
    return (row.task, str(row.shots), str(row.count), row.metric, _number(row.score), error, chance, row.verdict)


def _number(value: float) -> str:
    return f"{value:.4f}" if abs(value) < 1e6 else f"{value:.4g}"


def _line(cells: Sequence[str], widths: Sequence[int]) -> str:
    padded = [
        cell.rjust(width) if column in NUMBERS else cell.ljust(width)
        for column, (cell, width) in enumerate(zip(cells, widths, strict=True))
    ]
    return "| " + " | ".join(padded) + " |"

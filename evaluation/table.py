"""Scores as people read them: each beside its standard error and what chance would give."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

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


def score_rows(summary: Mapping[str, Any], chances: Mapping[str, float]) -> list[ScoreRow]:
    """A row for each metric of each task and group. chances: what is not in the tasks' own metadata, by task name."""
    rows = []
    for name, result in summary["results"].items():
        metadata = summary["configs"].get(name, {}).get("metadata", {})
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
                    chance=chances.get(name, _chance(metadata, metric)),
                )
            )
    return rows


def _chance(metadata: Mapping[str, Any], metric: str) -> float | None:
    """A task's metadata gives `chance` for its accuracies: guessing says nothing on perplexities."""
    return metadata.get("chance") if metric.startswith(("acc", "exact_match", "f1")) else None


def markdown(rows: Sequence[ScoreRow], notes: Sequence[str] = ()) -> str:
    """A Markdown table with aligned columns, and the notes below it as a list."""
    cells = [HEADINGS, *(_cells(row) for row in rows)]
    widths = [max(len(line[column]) for line in cells) for column in range(len(HEADINGS))]
    lines = [_line(line, widths) for line in cells]
    rule = ["-" * (width + 1) + (":" if column in NUMBERS else "-") for column, width in enumerate(widths)]
    lines.insert(1, "|" + "|".join(rule) + "|")
    return "\n".join([*lines, "", *(f"- {note}" for note in notes)]).rstrip() + "\n"


NUMBERS = (1, 2, 4, 5, 6)  # columns aligned to the right


def _cells(row: ScoreRow) -> tuple[str, ...]:
    error = "" if row.error is None or not math.isfinite(row.error) else f"{row.error:.4f}"
    chance = "" if row.chance is None else f"{row.chance:.4f}"
    number = f"{row.score:.4f}" if abs(row.score) < 1e6 else f"{row.score:.4g}"
    name = row.task.replace("|", "\\|")
    return (name, str(row.shots), str(row.count), row.metric, number, error, chance, row.verdict)


def _line(cells: Sequence[str], widths: Sequence[int]) -> str:
    padded = [
        cell.rjust(width) if column in NUMBERS else cell.ljust(width)
        for column, (cell, width) in enumerate(zip(cells, widths, strict=True))
    ]
    return "| " + " | ".join(padded) + " |"

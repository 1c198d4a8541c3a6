"""The report's section on evaluations during training, from evaluations.jsonl."""

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from gristmill.evaluation.results.curve import curve_svg
from gristmill.evaluation.results.noise import HEADINGS, LAST, noise_cells, score_noise
from gristmill.evaluation.tasks.language_names import LANGUAGE_AND_SCRIPT
from gristmill.pipelines.report.blocks import Block, Figure, Heading, Paragraph, Table

EVALUATIONS_NAME = "evaluations.jsonl"
STDERR = "_stderr"

Chances = Mapping[tuple[str, str], float]  # (task, metric) -> score at chance


def evaluation_blocks(train: Path, evaluate: Path) -> list[Block]:
    """A curve per task and metric and a table; empty if the recipe has no evaluation during training."""
    path = train / EVALUATIONS_NAME
    lines = [json.loads(line) for line in path.read_text("utf-8").splitlines()] if path.is_file() else []
    points = curve_points(lines, table_chances((evaluate / "table.md").read_text("utf-8")))
    points = [point for point in points if not is_language(point["task"])]  # those have a section of their own
    if not points:
        return []
    columns = ("step", "million tokens", "task", "metric", "score", "± s.e.")
    rows = tuple(
        (
            f"{point['step']:,}",
            f"{point['tokens'] / 1e6:.2f}",
            point["task"],
            point["metric"],
            f"{point['score']:.4f}",
            "" if point["error"] is None else f"{point['error']:.4f}",
        )
        for point in points
    )
    return [
        Heading("Evaluation during training"),
        Paragraph(
            "Evaluated without saving a checkpoint, on the number of documents set in train.evaluation; dashed: chance."
        ),
        Figure("evaluations", curve_svg(points).encode(), "Scores against tokens seen, one panel per task and metric"),
        Table(columns, rows, 2),
        Paragraph(
            f"Noise: the standard deviation of the last {LAST} scores. Detectable: the smallest difference between two "
            "runs that such scores show with a power of 80 %."
        ),
        Table(HEADINGS, tuple(noise_cells(score_noise(points))), 5),
    ]


def is_language(task: str) -> bool:
    return LANGUAGE_AND_SCRIPT.fullmatch(task.replace(" ", "_", 1)) is not None


def curve_points(lines: list[dict[str, Any]], chances: Chances) -> list[dict[str, Any]]:
    """{"step": 10, "tokens": 640, "scores": {"cloze": {"acc": 0.5, "acc_stderr": 0.1}}} -> one point, acc of cloze."""
    points = []
    for line in lines:
        for task, found in line["scores"].items():
            for metric, score in found.items():
                if metric.endswith(STDERR) or not math.isfinite(score):
                    continue
                error = found.get(metric + STDERR)
                points.append(
                    {
                        "step": line["step"],
                        "tokens": line["tokens"],
                        "task": task,
                        "metric": metric,
                        "score": score,
                        "error": error if error is not None and math.isfinite(error) else None,
                        "chance": chances.get((task, metric)),
                    }
                )
    return points


def table_chances(table: str) -> Chances:
    """Chance scores from the final score table, which has the same task names."""
    lines = [line.strip().strip("|").split("|") for line in table.splitlines() if line.startswith("| ")]
    cells = [[cell.strip() for cell in line] for line in lines]
    if not cells or not {"task", "metric", "chance"} <= set(cells[0]):
        return {}
    task, metric, chance = (cells[0].index(name) for name in ("task", "metric", "chance"))
    return {
        (row[task], row[metric]): float(row[chance])
        for row in cells[1:]
        if len(row) == len(cells[0]) and row[chance].replace(".", "", 1).isdigit()
    }

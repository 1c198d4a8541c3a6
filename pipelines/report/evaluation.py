"""The report's section on languages: bits per byte by language and script, at the end and during training."""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gristmill.evaluation.results.compare import LAST, NOISE_HEADINGS, curve_svg, noise_cells, score_noise
from gristmill.evaluation.tasks.corpus_tasks import LANGUAGE_AND_SCRIPT, english_name, task_alias
from gristmill.pipelines.report.figures import small_multiples, sorted_bars
from gristmill.pipelines.report.render import Block, Figure, Heading, Paragraph, Table

METRIC = "bits_per_byte"


@dataclass(frozen=True)
class LanguageScore:
    """Bits per byte of one language; chance: of the unigram model. tag: language and script, ar_Arab."""

    tag: str
    script: str
    bits: float
    error: float | None
    chance: float | None
    documents: int

    @property
    def name(self) -> str:
        return f"{english_name(self.tag)} ({self.tag})"


def language_blocks(train: Path, evaluate: Path) -> list[Block]:
    """Empty unless bits per byte was measured by language."""
    results = evaluate / "results.json"
    scores = language_scores(json.loads(results.read_bytes())) if results.is_file() else []
    if not scores:
        return _with_heading(_transfer(evaluate / "transfer.md"))
    rows = tuple(
        (
            score.name,
            score.script,
            str(score.documents),
            f"{score.bits:.3f}",
            _number(score.error),
            _number(score.chance),
        )
        for score in scores
    )
    bars = [(score.name, score.script, score.bits, score.chance) for score in scores]
    return [
        Heading("Languages"),
        Paragraph(
            "Bits per byte of held-out text; lower is better. A byte is a whole character in Latin script and half "
            "or a third of one in others, so compare a language with its chance (the unigram model), not with another "
            "script."
        ),
        Figure("languages", sorted_bars(bars, "bits per byte"), "Bits per byte by language, sorted, with chance"),
        Table(("language", "script", "documents", "bits per byte", "± s.e.", "chance"), rows, 4),
        *_curves(train / "evaluations.jsonl", scores),
        *_transfer(evaluate / "transfer.md"),
    ]


def _with_heading(blocks: list[Block]) -> list[Block]:
    return [Heading("Languages"), *blocks] if blocks else []


def _transfer(path: Path) -> list[Block]:
    """The table of benchmarks by language that the stage `evaluate` wrote."""
    lines = path.read_text("utf-8").splitlines() if path.is_file() else []
    cells = [tuple(line.strip("| ").split(" | ")) for line in lines if line.startswith("| ")]
    if not cells:
        return []
    caption = "The same benchmark in several languages; in brackets the difference to English."
    return [Table(cells[0], tuple(cells[1:]), len(cells[0]) - 1, caption)]


def language_scores(results: dict[str, Any]) -> list[LanguageScore]:
    """Sorted from the lowest bits per byte. results: of results.json."""
    language_rows = []
    for task, scores in results["results"].items():
        matched = LANGUAGE_AND_SCRIPT.fullmatch(task)
        if matched is None or task not in results["configs"]:
            continue
        verdict = results["verdicts"][task_alias(task)][METRIC]
        error = scores.get(f"{METRIC}_stderr,none")
        language_rows.append(
            LanguageScore(
                tag=f"{matched['language']}_{matched['script']}",
                script=matched["script"],
                bits=scores[f"{METRIC},none"],
                error=error if isinstance(error, float) else None,
                chance=verdict["chance"],
                documents=verdict["n"],
            )
        )
    return sorted(language_rows, key=lambda score: (score.bits, score.tag))


def _curves(path: Path, scores: Sequence[LanguageScore]) -> list[Block]:
    """A small panel for each language, from the evaluations during training."""
    lines = [json.loads(line) for line in path.read_text("utf-8").splitlines()] if path.is_file() else []
    panels = []
    for score in scores:
        task = task_alias(f"{METRIC}_{score.tag}")
        points = [(line["tokens"] / 1e6, line["scores"][task][METRIC]) for line in lines if task in line["scores"]]
        panels.append((score.name, [x for x, _ in points], [y for _, y in points]))
    if not any(x for _, x, _ in panels):
        return []
    drawn = small_multiples(panels, "million tokens", "bits per byte")
    return [Figure("languages_over_training", drawn, "Bits per byte of each language against tokens seen")]


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.3f}"


# The report's section on evaluations during training, from evaluations.jsonl.

EVALUATIONS_NAME = "evaluations.jsonl"
STDERR = "_stderr"

Chances = Mapping[tuple[str, str], float]  # (task, metric) -> score at chance


def evaluation_blocks(train: Path, evaluate: Path | None) -> list[Block]:
    """A curve per task and metric and a table; empty if the recipe has no evaluation during training."""
    path = train / EVALUATIONS_NAME
    lines = [json.loads(line) for line in path.read_text("utf-8").splitlines()] if path.is_file() else []
    table = "" if evaluate is None else (evaluate / "table.md").read_text("utf-8")
    points = curve_points(lines, table_chances(table))
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
        Table(NOISE_HEADINGS, tuple(noise_cells(score_noise(points))), 5),
    ]


def is_language(task: str) -> bool:
    return LANGUAGE_AND_SCRIPT.fullmatch(task.replace(" ", "_", 1)) is not None


def curve_points(lines: list[dict[str, Any]], chances: Chances) -> list[dict[str, Any]]:
    """{"step": 10, "tokens": 640, "scores": {"cloze": {"acc": 0.5, "acc_stderr": 0.1}}} -> one point, acc of cloze."""
    points = []
    for line in lines:
        for task, task_scores in line["scores"].items():
            for metric, score in task_scores.items():
                if metric.endswith(STDERR) or not math.isfinite(score):
                    continue
                error = task_scores.get(metric + STDERR)
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

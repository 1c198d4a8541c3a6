"""The verdicts of an ablation as a table for the terminal, and as ablation.json, ablation.md and ablation.html."""

import io
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table as TerminalTable

from gristmill.evaluation.results.ablation import LEVEL, what_it_takes
from gristmill.foundation.files import write_atomic
from gristmill.foundation.fingerprint import canonical_json
from gristmill.pipelines.ablate.compare_arms import ArmComparison
from gristmill.pipelines.ablate.experiment import AblationResult
from gristmill.pipelines.ablate.runs import COOLDOWN_SHARE
from gristmill.pipelines.report.figures import curves
from gristmill.pipelines.report.render import Block, Figure, Heading, Paragraph, Table, to_html, to_markdown

COLUMNS = (
    "arm",
    "held-out set",
    "verdict",
    "effect",
    "95 % interval",
    "p",
    "detectable",
    "at a tenth of the rate",
    "to decide",
)
SMOOTHED_STEPS = 20  # of a loss curve


def cells(row: ArmComparison, num_comparisons: int) -> tuple[str, ...]:
    """effect: bits per byte of the arm less those of the baseline, at the tuned rate; p: corrected, of both rates."""
    low, high = row.tuned.interval()
    needed = what_it_takes(row.tuned, num_comparisons) if row.decision == "no decision" else ""
    return (
        row.arm,
        row.set_name,
        row.decision,
        f"{row.tuned.effect:+.4f}",
        f"{low:+.4f} to {high:+.4f}",
        f"{row.p:.2g}",
        f"{row.tuned.detectable(LEVEL / num_comparisons):.4f}",
        f"{row.low.effect:+.4f}",
        needed,
    )


def terminal_table(outcome: AblationResult) -> str:
    table = TerminalTable(title="bits per byte against the baseline; below 0 is better")
    for column in COLUMNS:
        table.add_column(column)
    for row in outcome.rows:
        table.add_row(*cells(row, len(outcome.rows)))
    text = io.StringIO()
    Console(file=text, width=160).print(table)
    for arm in outcome.arms:
        text.write(f"{arm.name}: {described(arm.name, outcome)}\n")
    return text.getvalue() + "\n".join([cost(outcome), *outcome.notes])


def cost(outcome: AblationResult) -> str:
    runs = (
        f"one run to {1 - COOLDOWN_SHARE:.0%} of {outcome.tokens:,} tokens for each seed and rate, each arm only in "
        "the rest, while the rate falls: verdicts are on data of that phase"
        if outcome.plan.cooldown
        else f"{outcome.tokens:,} tokens each"
    )
    return (
        f"{len(outcome.arms)} arms, {outcome.plan.seeds} seeds, learning rates {outcome.rates[0]:g} and "
        f"{outcome.rates[1]:g}; models of {outcome.size.parameters:,} parameters, {runs}; {outcome.flops:.2e} "
        f"floating-point operations and {outcome.cpu_seconds:,.0f} s of CPU time together"
    )


def described(name: str, outcome: AblationResult) -> str:
    arm = next(arm for arm in outcome.arms if arm.name == name)
    return f"recipe {arm.recipe.name}" + (f", {arm.changes}" if arm.changes else "")


def blocks_of(outcome: AblationResult) -> list[Block]:
    rows = tuple(cells(row, len(outcome.rows)) for row in outcome.rows)
    arms = tuple((arm.name, described(arm.name, outcome)) for arm in outcome.arms)
    bits = tuple((name, f"{value:.4f}") for name, value in outcome.baseline_bits.items())
    documents = tuple(
        (document.arm, f"{document.effect:+.3f}", f"{document.error:.3f}", document.excerpt)
        for document in outcome.documents
    )
    return [
        Heading("Decisions"),
        Paragraph(
            "Effects are differences in bits per byte from the baseline: below 0 is better. A verdict needs a "
            f"significant effect of one sign at both learning rates, at a level of {LEVEL:.0%} over all rows (Holm). "
            "Intervals are over seeds and documents, before that correction. What is better for a small model on "
            "little text need not be for a large one."
        ),
        Table(COLUMNS, rows, 3, "Every arm against the baseline."),
        Heading("Arms"),
        Table(("arm", "data"), arms, 2, "What was compared."),
        Paragraph(f"{cost(outcome)}."),
        *(Paragraph(f"{note[0].upper()}{note[1:]}.") for note in outcome.notes),
        Heading("Baseline"),
        Table(("held-out set", "bits per byte"), bits, 1, "The baseline at the tuned rate."),
        Heading("Training"),
        Figure("loss", loss_curves(outcome), "Training loss at the tuned rate: mean, lowest and highest of the seeds."),
        Heading("Documents that differ most"),
        Table(
            ("arm", "effect", "standard error", "document"),
            documents,
            2,
            "Held-out documents that the arm's models read worse (above 0) and better, bits per byte, tuned rate.",
        ),
    ]


def loss_curves(outcome: AblationResult) -> bytes:
    series: dict[str, tuple[Any, Any]] = {}
    bands: dict[str, tuple[Any, Any]] = {}
    for name, runs in outcome.curves.items():
        steps = min(map(len, runs))
        width = min(SMOOTHED_STEPS, steps)
        smooth_SN = np.stack([np.convolve(run[:steps, 1], np.ones(width) / width, mode="valid") for run in runs])
        series[name] = (runs[0][width - 1 : steps, 0].tolist(), smooth_SN.mean(axis=0).tolist())
        bands[name] = (smooth_SN.min(axis=0).tolist(), smooth_SN.max(axis=0).tolist())
    return curves(series, "tokens", "loss (nats a token)", bands=bands)


def write_report(outcome: AblationResult, folder: Path) -> Path:
    """Writes ablation.json, ablation.md and ablation.html; returns the path of the last."""
    title, blocks = f"Ablation {outcome.arms[0].recipe.name}", blocks_of(outcome)
    content = {
        "arms": [{"name": arm.name, "data": described(arm.name, outcome)} for arm in outcome.arms],
        "rows": [
            asdict(row) | {"interval": row.tuned.interval(), "p_of_rates": [row.tuned.p, row.low.p]}
            for row in outcome.rows
        ],
        "model": outcome.size.fields,
        "parameters": outcome.size.parameters,
        "tokens": outcome.tokens,
        "rates": outcome.rates,
        "seeds": outcome.plan.seeds,
        "cooldown": outcome.plan.cooldown,
        "notes": outcome.notes,
        "baseline": outcome.baseline_bits,
        "flops": outcome.flops,
        "cpu_seconds": outcome.cpu_seconds,
        "documents": [asdict(document) for document in outcome.documents],
    }
    write_atomic(folder / "ablation.json", canonical_json(content) + b"\n")
    write_atomic(folder / "ablation.md", f"# {title}\n\n{to_markdown(blocks)}".encode())
    page = folder / "ablation.html"
    write_atomic(page, to_html(title, blocks).encode())
    return page

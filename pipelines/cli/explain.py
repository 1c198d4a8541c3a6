"""`gristmill explain`: where the time of a training run goes, beside its forecast."""

import json
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import rich.table
import typer
from rich.console import Group
from rich.text import Text

from gristmill.foundation.manifest import LOG_FOLDER
from gristmill.pipelines.cli.console import print_block
from gristmill.training.config.train import RUN_NAME
from gristmill.training.planner.explain import NAMED, Explanation, explain_run
from gristmill.training.planner.hardware import load_hardware


def explain(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="A work folder, or the folder of a training run.")],
    hardware: Annotated[
        str, typer.Option(help="h100 ..., or the profile of the machine: gristmill calibrate machine.yaml.")
    ] = "h100",
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")] = False,
) -> None:
    """Compare a finished or running training run with its forecast, and name what it loses most on."""
    explanation = explain_run(run_folder(run), load_hardware(hardware))
    if as_json:
        print(json.dumps(to_json(explanation), indent=2))
    else:
        print_block(block(explanation))


def run_folder(path: Path) -> Path:
    """The folder of the run that a work folder has: the one under way, else the finished one. Others are as given."""
    runs = [folder for folder in (*path.glob(".train-*"), path / "train") if (folder / LOG_FOLDER / RUN_NAME).is_file()]
    return max(runs, key=lambda folder: (folder / LOG_FOLDER / RUN_NAME).stat().st_mtime, default=path)


def to_json(explanation: Explanation) -> dict[str, object]:
    return {
        "steps": explanation.steps,
        "seconds": explanation.seconds,
        "own_seconds": explanation.own_seconds,
        "layout": explanation.forecast.layout.name(),
        "forecast_error": explanation.forecast.error,
        "terms": [asdict(term) for term in explanation.terms],
        "causes": [asdict(cause) for cause in explanation.causes],
        "notes": explanation.notes,
        "named": [cause.name for cause in explanation.named],
    }


def block(explanation: Explanation) -> Group:
    """The table of terms, and the causes that are named, with what to try."""
    title = f"{explanation.forecast.layout.name()}, {explanation.steps:,} steps; milliseconds of one"
    table = rich.table.Table(title=title)
    for name in ("term", "forecast", "run", "difference", "measured as"):
        table.add_column(name, justify="left" if name in ("term", "measured as") else "right")
    for term in explanation.terms:
        measured = "" if term.measured is None else f"{term.measured * 1e3:,.1f}"
        difference = "" if term.measured is None else f"{(term.measured - term.forecast) * 1e3:+,.1f}"
        table.add_row(term.name, f"{term.forecast * 1e3:,.1f}", measured, difference, term.source)
    return Group(table, *(Text(line) for line in sentences(explanation)))


def sentences(explanation: Explanation) -> list[str]:
    """The causes that are named, with what to try; or that none is."""
    if not explanation.named:
        return [f"No cause takes more than {NAMED:.0%} of a step.", *explanation.notes]
    shares = [cause.lost / explanation.own_seconds for cause in explanation.named]
    return [
        f"{number}. {cause.name}, {share:.0%} of a step: {cause.finding}. Try: {cause.advice}."
        for number, (cause, share) in enumerate(zip(explanation.named, shares, strict=True), 1)
    ] + list(explanation.notes)

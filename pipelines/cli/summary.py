"""`gristmill summary`: the papers about a corpus and its model, every number with the query that computes it again."""

from pathlib import Path
from typing import Annotated

import typer

from gristmill.foundation.errors import InputError
from gristmill.foundation.progress import Reporter
from gristmill.pipelines.cli.options import EngineOptions, with_option_groups


@with_option_groups
def summary(
    workdir: Annotated[Path, typer.Argument(metavar="WORKDIR", help="The work folder of a run.")],
    run: EngineOptions,
    answers: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Answers that only a person can give (default: OUTPUT/answers.yaml)."),
    ] = None,
    output: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Default: WORKDIR/summary; Croissant stands in WORKDIR.")
    ] = None,
    check: Annotated[
        bool, typer.Option("--check", help="Compute every number again and compare; exit code 1 if one differs.")
    ] = False,
) -> None:
    """Write the public summary of training content, cards of corpus and model, Croissant, CycloneDX and SPDX."""
    from gristmill.pipelines.provenance.summary.papers import check_summary, write_summary  # an optional extra

    folder = output or workdir / "summary"
    if check:
        lines = check_summary(workdir, folder, run.open(Reporter.to_terminal(), workdir))
        if lines:
            raise InputError("\n".join(lines))
        print(f"{folder}: raw files, stages, numbers and papers are as they were written")
        return
    content = write_summary(workdir, folder, answers)
    from gristmill.pipelines.provenance.summary.answers import open_questions

    questions = list(open_questions(content.answers, content.sources))
    print(f"{folder}: {len(content.facts)} tables of numbers, each with its query and digest")
    if questions:
        print(f"{len(questions)} open questions, which only a person can answer: {folder / 'answers.yaml'}")

"""`gristmill trace`: which documents a training step read, and which steps read a document."""

import re
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import rich.table
import typer

from gristmill.foundation.errors import RecipeError
from gristmill.pipelines.cli.console import print_block
from gristmill.pipelines.cli.options import RecipeArgument, SetOption, WorkdirOption, with_option_groups, workdir_of
from gristmill.pipelines.recipes.recipe_file import load_recipe

if TYPE_CHECKING:
    from gristmill.pipelines.provenance.document_losses import DocumentLoss
    from gristmill.pipelines.provenance.trace import DocumentSpan, Tracer

SPIKES = 5
SHOWN_CHARACTERS = 60
SHOWN_DOCUMENTS = 20


@dataclass(frozen=True)
class TraceSubject:
    """Subject of the trace: one of these."""

    step: Annotated[str | None, typer.Option(help="A step, or a range such as 100-120.")] = None
    document: Annotated[str | None, typer.Option(metavar="ID", help="A document of the train split.")] = None
    spike: Annotated[bool, typer.Option("--spike", help="The worst steps and what they have in common.")] = False


@dataclass(frozen=True)
class LossOptions:
    """How the documents of steps are judged."""

    by: Annotated[
        Literal["loss", "grad_norm"], typer.Option(help="--spike: what a step is worst by, over the running median.")
    ] = "loss"
    losses: Annotated[
        bool, typer.Option("--losses", help="Rank the steps' documents by their losses under a checkpoint.")
    ] = False
    checkpoint: Annotated[
        Path | None,
        typer.Option(metavar="DIR", help="--losses: the checkpoint (default: the run's newest before the steps)."),
    ] = None


@with_option_groups
def trace(
    recipe: RecipeArgument,
    question: TraceSubject,
    judged: LossOptions,
    text: Annotated[bool, typer.Option("--text", help="Show the beginning of what was read of each document.")] = False,
    workdir: WorkdirOption = None,
    set_: SetOption = None,
) -> None:
    """Show which documents a training step read, or which steps read a document."""
    step, document = question.step, question.document
    if (step is not None) + (document is not None) + question.spike != 1:
        raise RecipeError("give one of --step N, --document ID and --spike")
    from gristmill.pipelines.provenance.step_log import StepLog, samples_of_steps, step_of, was_left_out
    from gristmill.pipelines.provenance.trace import Tracer, in_common, read_steps, spikes

    loaded = load_recipe(recipe, set_ or [])
    folder = workdir_of(loaded, workdir)
    tracer = Tracer(loaded, folder)
    length = tracer.sequence_length
    if document is not None:
        log = StepLog(folder / "train") if (folder / "train" / "metrics.jsonl").is_file() else None
        table = rich.table.Table("source", "epoch", "sample", "step")
        for source, sample, epoch in tracer.samples_of(document):
            done = None if log is None else step_of(log, sample, length)
            said = "not yet" if done is None else str(done)
            if log is not None and done is not None and was_left_out(log, sample, done):
                said += " (left out: its replica was lost)"
            table.add_row(source, str(epoch), str(sample), said)
        print_block(table) if table.rows else print(f"{document}: no step of the planned run reads it")
        return
    log = StepLog(folder / "train")
    if step is not None:
        first, last = parse_steps(step)
        numbers = samples_of_steps(log, first, last, length)
        show(tracer.documents_of(numbers), tracer if text else None)
        if judged.losses:
            show_losses(tracer, list(numbers), first, judged.checkpoint)
        return
    worst = spikes(read_steps(folder / "train"), judged.by, SPIKES)
    samples = {number: samples_of_steps(log, number, number, length) for number, _ in worst}
    read_by = {number: tracer.documents_of(numbers) for number, numbers in samples.items()}
    for number, ratio in worst:
        count = len(read_by[number])
        print(f"step {number}: {judged.by} {ratio:.3f} times the median around it, {count} pieces of documents")
    for doc_id, count in in_common(list(read_by.values())):
        print(f"{doc_id}: in {count} of these steps")
    if judged.losses:
        all_samples = sorted({k for numbers in samples.values() for k in numbers})
        show_losses(tracer, all_samples, min(samples), judged.checkpoint)


def show_losses(tracer: "Tracer", samples: list[int], step: int, checkpoint: Path | None) -> None:
    """Prints the documents that add most to the loss of these samples, by the checkpoint before the step."""
    from gristmill.pipelines.provenance.document_losses import (  # torch, for this alone
        checkpoint_before,
        document_losses,
    )

    folder = checkpoint or checkpoint_before(tracer.workdir / "train", step)
    table = rich.table.Table("document", "source", "tokens", "loss", "above the median document")
    losses: list[DocumentLoss] = document_losses(tracer, samples, folder)
    for loss in losses[:SHOWN_DOCUMENTS]:
        table.add_row(loss.doc_id, loss.source, str(loss.tokens), f"{loss.loss:.3f}", f"{loss.excess:+.1f}")
    print(f"losses of {len(losses)} documents by {folder.name}, in nats a token:")
    print_block(table)


def parse_steps(text: str) -> tuple[int, int]:
    """ "100" -> (100, 100); "100-120" -> (100, 120)."""
    match = re.fullmatch(r"([0-9]{1,15})(?:-([0-9]{1,15}))?", text)
    if match is None:
        raise RecipeError(f"--step {text}: write a step such as 100, or a range such as 100-120")
    return int(match[1]), int(match[2] or match[1])


def show(spans: "list[DocumentSpan]", tracer: "Tracer | None") -> None:
    """tracer: None shows no text."""
    table = rich.table.Table("sample", "source", "epoch", "document", "tokens", *(["url", "text"] if tracer else []))
    for span in spans:
        record = tracer.record_of(span) if tracer else {}
        beginning = [record["url"] or "", record["text"][:SHOWN_CHARACTERS].replace("\n", " ")] if tracer else []
        table.add_row(
            str(span.sample), span.source, str(span.epoch), span.doc_id, f"{span.start}-{span.stop}", *beginning
        )
    print_block(table)
    shares: dict[str, int] = {}
    for span in spans:
        shares[span.source] = shares.get(span.source, 0) + span.stop - span.start
    total = sum(shares.values())
    print(", ".join(f"{source} {tokens / total:.1%}" for source, tokens in sorted(shares.items())))

"""The commands on the origin of a model: `gristmill trace`, `forget` and `summary`.

`trace`: which documents a training step read, and which steps read a document."""

import re
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import rich.table
import typer

from gristmill.foundation.errors import InputError, RecipeError
from gristmill.foundation.progress import Reporter, print_block
from gristmill.pipelines.cli.options import (
    EngineOptions,
    RecipeArgument,
    SetOption,
    StageOptions,
    WorkdirOption,
    make_runner,
    parse_workdir,
    read_text,
    with_option_groups,
    workdir_of,
)
from gristmill.pipelines.recipes.recipe_file import load_recipe
from gristmill.pipelines.stages.stage_list import stages_of, stages_up_to
from gristmill.pipelines.workdir.remote import RemoteWork

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
    from gristmill.pipelines.provenance.trace import (
        StepLog,
        Tracer,
        in_common,
        read_steps,
        samples_of_steps,
        spikes,
        step_of,
        was_left_out,
    )

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
    from gristmill.pipelines.provenance.document_losses import checkpoint_before, document_losses

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


# `gristmill forget`: take documents and their copies out of a work folder, and prove it.

if TYPE_CHECKING:
    from gristmill.pipelines.provenance.forget.removal import ForgetPlan
    from gristmill.pipelines.provenance.forget.selection import Selector

SHOWN_SHARDS = 8


@dataclass(frozen=True)
class ForgetSubject:
    """Documents to take out: one of these."""

    ids: Annotated[Path | None, typer.Option(metavar="FILE", help="Document ids, one a line; - is standard input.")] = (
        None
    )
    host: Annotated[str | None, typer.Option(help="Documents of a host and the hosts below it.")] = None
    text: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Documents with this text; - is standard input.")
    ] = None
    rule: Annotated[
        str | None, typer.Option(metavar="SQL", help="Documents that a query selects, in its column doc_id.")
    ] = None

    def selector(self) -> "Selector":
        from gristmill.pipelines.provenance.forget.selection import Selector, parse_ids

        if sum(value is not None for value in (self.ids, self.host, self.text, self.rule)) != 1:
            raise RecipeError("give one of --ids FILE, --host HOST, --text FILE and --rule SQL, or --resume")
        if self.ids is not None:
            return Selector(ids=parse_ids(read_text(self.ids), str(self.ids)))
        if self.text is not None:
            text = read_text(self.text)
            if not text.strip():
                raise RecipeError(f"{self.text}: holds no text")
            return Selector(text=text)
        return Selector(host=self.host, rule=self.rule)


@dataclass(frozen=True)
class ForgetOptions:
    """Settings of a removal."""

    similarity: Annotated[
        float | None, typer.Option(min=0.3, max=1.0, help="Of near copies (default: the recipe's, else 0.8).")
    ] = None
    plan: Annotated[bool, typer.Option("--plan", help="Show what would be taken out and what it costs.")] = False
    resume: Annotated[bool, typer.Option("--resume", help="End a removal that was interrupted.")] = False
    retrain: Annotated[
        bool, typer.Option("--retrain", help="Train again from the last checkpoint that has not seen them.")
    ] = False


@with_option_groups
def forget(
    workdir: Annotated[
        Path, typer.Argument(metavar="WORKDIR", parser=parse_workdir, help="The work folder of a recipe.")
    ],
    subject: ForgetSubject,
    engine: EngineOptions,
    settings: ForgetOptions,
) -> None:
    """Take documents and all their copies out of a work folder, keep them out, and state it."""
    from gristmill.pipelines.provenance.forget.removal import begin, finish, make_plan, read_pending, recipe_of

    if RemoteWork.of_mirror(workdir) is not None:
        raise RecipeError("gristmill forget works on a local work folder; copy it here, then publish it again")
    recipe = recipe_of(workdir)
    options = StageOptions(engine.workers, engine.engine, engine.address, workdir)
    pending = read_pending(workdir)
    if settings.resume:
        if pending is None:
            raise InputError(f"{workdir}: no removal was interrupted")
    else:
        if pending is not None:
            raise InputError(f"{workdir}: a removal was interrupted; run `gristmill forget {workdir} --resume` first")
        reporter = options.reporter()
        planned = make_plan(workdir, recipe, subject.selector(), settings.similarity, engine.open(reporter, workdir))
        show_plan(planned, settings.retrain)
        if settings.plan:
            return
        begin(workdir, planned, settings.retrain)
        pending = read_pending(workdir)
        assert pending is not None
    stages = stages_of(recipe)
    path = finish(
        workdir, recipe, pending, lambda last: make_runner(recipe, stages_up_to(recipe, stages, last), replace(options))
    )
    print(f"statement: {path}")


def show_plan(plan: "ForgetPlan", retrain: bool) -> None:
    """Prints what is taken out, where it stands, and what each remedy costs."""
    from gristmill.pipelines.provenance.forget.selection import ids_by_reason

    reasons = ids_by_reason(plan.documents)
    print(f"{len(plan.documents)} documents: {', '.join(f'{count} {reason}' for reason, count in reasons.items())}")
    places = plan.places
    table = rich.table.Table("place", "documents", "remedy")
    for (outcome, at), count in sorted(places.outcomes.items()):
        table.add_row(f"{outcome}, {at}", str(count), "curate again, without them")
    for name, rows in sorted(places.shards.items())[:SHOWN_SHARDS]:
        table.add_row(name, str(rows), "written again")
    if len(places.shards) > SHOWN_SHARDS:
        table.add_row(f"and {len(places.shards) - SHOWN_SHARDS} more shards", "", "written again")
    if places.sharing:
        table.add_row("documents that lost a span to them", str(places.sharing), "the span may come back")
    if places.ranges:
        tokens = sum(index_range.last - index_range.first for index_range in places.ranges)
        table.add_row(
            f"index, {tokens} tokens", str(len(places.ranges)), "indexed again: its order is of all documents"
        )
    if places.in_sample is not None:
        remedy = "trained again" if places.in_sample else "trained again, on the same documents"
        table.add_row("sample of the tokenizer", str(places.in_sample), remedy)
    print_block(table)
    for line in plan.statistics:
        print(f"statistics that change: {line}")
    print(training_line(plan, retrain))


def training_line(plan: "ForgetPlan", retrain: bool) -> str:
    training = plan.places.training
    if training.note:
        return f"training: {training.note}"
    if training.first_step is None:
        return "training: no step has read them"
    start = "step 0" if training.clean is None else f"the checkpoint of step {training.clean}"
    repeated = training.steps - (training.clean or 0)
    said = (
        f"training: step {training.first_step} read one first; {len(training.seen)} checkpoints have seen them; "
        f"from {start}, {repeated} of {training.steps} steps are trained again"
    )
    return said if retrain else f"{said} with --retrain; a model does not forget otherwise"


# `gristmill summary`: the papers about a corpus and its model, every number with the query that computes it again.


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
    from gristmill.pipelines.provenance.summary.summary_content import open_questions

    questions = list(open_questions(content.answers, content.sources))
    print(f"{folder}: {len(content.facts)} tables of numbers, each with its query and digest")
    if questions:
        print(f"{len(questions)} open questions, which only a person can answer: {folder / 'answers.yaml'}")

"""`gristmill forget`: take documents and their copies out of a work folder, and prove it."""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import rich.table
import typer

from gristmill.foundation.errors import InputError, RecipeError
from gristmill.pipelines.cli.console import print_block
from gristmill.pipelines.cli.corpus import read_text
from gristmill.pipelines.cli.options import EngineOptions, StageOptions, make_runner, parse_workdir, with_option_groups
from gristmill.pipelines.stages.stage_list import stages_of, stages_up_to
from gristmill.pipelines.workdir.remote import RemoteWork

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

    if RemoteWork.behind(workdir) is not None:
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
        show(planned, settings.retrain)
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


def show(plan: "ForgetPlan", retrain: bool) -> None:
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

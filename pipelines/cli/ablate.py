"""Comparisons by small models: `gristmill ablate` and `mix`.

`ablate`: which data makes the better model, and how sure that is."""

import re
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.table import Table

from gristmill.foundation.config import write_yaml
from gristmill.foundation.errors import RecipeError
from gristmill.foundation.files import write_atomic
from gristmill.foundation.progress import print_block
from gristmill.pipelines.ablate.corpora import mixed_sources
from gristmill.pipelines.cli.checkpoint import data_folder
from gristmill.pipelines.cli.options import (
    EngineOptions,
    SetOption,
    StageOptions,
    make_runner,
    output_file,
    with_option_groups,
)
from gristmill.pipelines.recipes.recipe_file import RECIPES, find_recipe, load_recipe, read_fields
from gristmill.pipelines.stages.stage_list import stages_of, stages_up_to

UNITS = {"s": 1.0, "m": 60.0, "h": 3600.0}


@dataclass(frozen=True)
class AblateOptions(EngineOptions):
    """How large the experiment is, and where."""

    vary: Annotated[
        list[str] | None, typer.Option("--vary", help="FIELD=VALUE,VALUE: an arm for each value; none switches off.")
    ] = None
    seeds: Annotated[int, typer.Option(min=3, max=64, help="Models of each arm and learning rate.")] = 5
    budget: Annotated[str, typer.Option(help="Of all runs together: 30m, 2h, or FLOPs such as 1e16.")] = "30m"
    target: Annotated[
        list[Path] | None, typer.Option(help="Texts the models should be good at: .jsonl with `text`, or plain text.")
    ] = None
    task: Annotated[list[str] | None, typer.Option(help="Tasks whose right answers are scored, such as arc_easy.")] = (
        None
    )
    questions: Annotated[int, typer.Option(min=30, help="Questions of each task, at most.")] = 200
    data: Annotated[Path | None, typer.Option(help="Folder of the tasks' files (default: GRISTMILL_SHARED_DATA).")] = (
        None
    )
    documents: Annotated[int, typer.Option(min=30, help="Held-out documents of each arm, at most.")] = 400
    targets_alone: Annotated[
        bool, typer.Option("--targets-alone", help="Score the targets, not what each arm holds out: fewer comparisons.")
    ] = False
    cooldown: Annotated[
        bool, typer.Option("--cooldown", help="One run to 80 %; the arms differ in the decay phase alone.")
    ] = False
    workdir: Annotated[Path | None, typer.Option(metavar="DIR", help="Default: work/ablate-NAME.")] = None
    set_: SetOption = None


@with_option_groups
def ablate(
    recipes: Annotated[list[str], typer.Argument(metavar="RECIPE...", help="The baseline first; or one, with --vary.")],
    options: AblateOptions,
) -> None:
    """Train small models on each recipe's data and say which data is better, worse, or not to tell apart."""
    from gristmill.pipelines.ablate.corpora import arms_of

    seconds, flops = parse_budget(options.budget)
    arms = arms_of(recipes, options.vary or [], options.set_ or [])
    folder = options.workdir or Path("work") / f"ablate-{arms[0].recipe.name}"
    questions = task_questions(options)
    check_targets(options.target or [])
    if options.targets_alone and not options.target:
        raise RecipeError("--targets-alone: no --target is named; name texts that the models should be good at")
    curated: list[Path] = []
    done: dict[str, Path] = {}
    for arm in arms:
        workdir = folder / "arms" / arm.name
        stage_options = StageOptions(options.workers, options.engine, options.address, workdir=workdir)
        runner = make_runner(arm.recipe, stages_up_to(arm.recipe, stages_of(arm.recipe), "curate"), stage_options)
        identity = runner.plan()[0].fingerprint
        if identity not in done:
            runner.run(only="curate")
            done[identity] = workdir / "curate"
        curated.append(done[identity])
    from gristmill.pipelines.ablate.ablation_report import terminal_table, write_report
    from gristmill.pipelines.ablate.experiment import Plan, experiment  # torch takes seconds to load

    plan = Plan(
        folder,
        options.seeds,
        seconds=seconds,
        flops=flops,
        documents=options.documents,
        targets=tuple(options.target or ()),
        questions=questions,
        cooldown=options.cooldown,
        targets_alone=options.targets_alone,
    )
    reporter = StageOptions().reporter()
    engine = options.open(reporter, folder)
    try:
        outcome = experiment(arms, curated, plan, engine)
    finally:
        engine.close()
    print(terminal_table(outcome))
    print(f"{write_report(outcome, folder)}")


def check_targets(paths: list[Path]) -> None:
    """Raises InputError for a file of texts that cannot be read, before anything is curated."""
    if paths:
        from gristmill.pipelines.ablate.corpora import target_texts  # torch takes seconds to load

        for path in paths:
            target_texts(path)


def task_questions(options: AblateOptions) -> dict[str, list[tuple[str, str]]]:
    """Task -> (context, right answer); read before anything is curated, so that a missing file is known first."""
    if not options.task:
        return {}
    from gristmill.evaluation.tasks.harness import right_answers  # lm-eval takes seconds to load
    from gristmill.evaluation.tasks.task_index import TaskSources

    return right_answers(options.task, options.questions, TaskSources(data_folder(options.data)))


def parse_budget(text: str) -> tuple[float | None, float | None]:
    """(seconds, FLOPs), one of them None. "30m" -> (1800, None); "1e16" -> (None, 1e16)."""
    match = re.fullmatch(r"([0-9.]+)([smh])", text)
    try:
        if match:
            return float(match[1]) * UNITS[match[2]], None
        flops = float(text)
    except ValueError:
        raise RecipeError(f"--budget {text}: write a time such as 30m or 2h, or FLOPs such as 1e16") from None
    if not 1e9 <= flops < float("inf"):
        raise RecipeError(f"--budget {text}: {flops:g} FLOPs train nothing; write a time such as 30m, or 1e15 and more")
    return None, flops


# `gristmill mix`: which mixture of its sources a recipe should train on.

if TYPE_CHECKING:
    from gristmill.pipelines.ablate.mixing import MixResult

FIRST_LINE = "# Weights proposed by `gristmill mix`:"


@dataclass(frozen=True)
class MixOptions(EngineOptions):
    """How many runs of what size, and what the mixture must keep to."""

    runs: Annotated[int | None, typer.Option(min=4, help="Mixtures to try; default: five for each source.")] = None
    budget: Annotated[str, typer.Option(help="Of all runs together: 30m, 2h, or FLOPs such as 1e16.")] = "30m"
    tokens: Annotated[int | None, typer.Option(min=1, help="Of the run that it is for; default: train.tokens.")] = None
    max_epochs: Annotated[float, typer.Option(min=0.01, help="How often that run may read a source.")] = 4.0
    floor: Annotated[list[str] | None, typer.Option(help="SOURCE=WEIGHT: the least weight of a source.")] = None
    target: Annotated[
        list[Path] | None, typer.Option(help="Texts the model should be good at: .jsonl with `text`, or plain text.")
    ] = None
    documents: Annotated[int, typer.Option(min=30, help="Held-out documents of each source, at most.")] = 200
    confirm: Annotated[
        str | None, typer.Option(help="Budget of an ablation against natural, uniform and tempered mixtures.")
    ] = None
    seeds: Annotated[int, typer.Option(min=3, max=64, help="Of that ablation, for each mixture and rate.")] = 5
    output: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE", callback=output_file, help="The recipe with the weights. Default: RECIPE-mixed.yaml."
        ),
    ] = None
    workdir: Annotated[Path | None, typer.Option(metavar="DIR", help="Default: work/mix-NAME.")] = None
    set_: SetOption = None


@with_option_groups
def mix(recipe: Annotated[str, typer.Argument(metavar="RECIPE")], options: MixOptions) -> None:
    """Train small models on many mixtures of the recipe's sources and propose the weights of the best one."""
    seconds, flops = parse_budget(options.budget)
    floors = parse_floors(options.floor or [])
    loaded = load_recipe(recipe, options.set_ or [])
    fields = read_fields(recipe, options.set_ or [])[1].value  # as it stands now: it may be edited before the end
    mixed_sources(loaded, floors)
    target_tokens = options.tokens or (loaded.train.tokens if loaded.train is not None else None)
    if target_tokens is None:
        raise RecipeError(
            f"{recipe} has no section train; say with --tokens how long the run is that the mixture is for"
        )
    check_targets(options.target or [])
    confirmation = parse_budget(options.confirm) if options.confirm is not None else None
    output = output_path(recipe, options.output)
    folder = options.workdir or Path("work") / f"mix-{loaded.name}"
    stage_options = StageOptions(options.workers, options.engine, options.address, workdir=folder / "curated")
    runner = make_runner(loaded, stages_up_to(loaded, stages_of(loaded), "curate"), stage_options)
    runner.run(only="curate")
    from gristmill.pipelines.ablate import mixing  # torch takes seconds to load
    from gristmill.pipelines.ablate.ablation_report import terminal_table, write_report
    from gristmill.pipelines.ablate.experiment import Plan

    targets = tuple(options.target or ())
    plan = mixing.MixPlan(
        folder, options.runs, seconds, flops, target_tokens, options.max_epochs, floors, targets, options.documents
    )
    engine = options.open(StageOptions().reporter(), folder)
    try:
        result = mixing.mix(loaded, folder / "curated" / "curate", plan, engine)
        print_block(proposal_table(result))
        print(
            f"predicted {result.proposal.loss:.4f} bits a byte, mean of {', '.join(result.sets)}; "
            f"{len(result.mixtures)} runs"
        )
        write_mixed(fields, options.max_epochs, result, output)
        if confirmation is not None:
            of_ablation = Plan(folder, options.seeds, seconds=confirmation[0], flops=confirmation[1])
            confirmed = mixing.confirm(result, of_ablation, engine)
            print(terminal_table(confirmed))
            print(f"{write_report(confirmed, folder)}")
    finally:
        engine.close()
    print(f"{output}; train with: gristmill run {output}")


def proposal_table(result: "MixResult") -> Table:
    proposal = result.proposal
    table = Table("source", "natural", "proposed", "90 % range", "cap")
    rows = zip(result.names, result.natural, proposal.weights, proposal.low, proposal.high, result.caps, strict=True)
    for name, natural, weight, low, high, cap in rows:
        table.add_row(name, f"{natural:.3f}", f"{weight:.3f}", f"{low:.3f} to {high:.3f}", f"{cap:.3f}")
    return table


def output_path(recipe: str, given: Path | None) -> Path:
    """Where the proposal is written. Raises RecipeError if a file stands there that this command did not write."""
    path = find_recipe(recipe)
    beside = Path(".") if path.parent == RECIPES else path.parent  # paths of Python files are relative to it
    output = given or beside / f"{path.stem}-mixed.yaml"
    if output.exists() and not output.read_text("utf-8", "replace").startswith(FIRST_LINE):
        raise RecipeError(f"{output} stands there already and is not of this command; name another file with --output")
    return output


def write_mixed(fields: dict[str, Any], max_epochs: float, result: "MixResult", output: Path) -> None:
    """Writes the recipe's fields with the proposed weights of its sources and, of a recipe with cells, of those."""
    from gristmill.pipelines.ablate import mixing

    weights, repeats = mixing.mixed_fields(result)
    for source in fields["sources"]:
        if source.get("held_out") is None:  # a source without training text is read as good as never
            source["weight"] = weights.get(source["name"], mixing.LEAST_WEIGHT)
    if repeats:
        cut = {name: value for name, value in fields["index"]["mix"].items() if name not in ("power", "drop", "topics")}
        fields["index"]["mix"] = cut | {"repeats": repeats, "max_epochs": max_epochs}
    write_atomic(output, f"{FIRST_LINE} {len(result.mixtures)} runs.\n{write_yaml(fields)}".encode())


def parse_floors(values: list[str]) -> dict[str, float]:
    floors: dict[str, float] = {}
    for value in values:
        name, equals, weight = value.partition("=")
        try:
            floors[name] = float(weight)
        except ValueError:
            floors[name] = -1.0
        if not equals or not 0 <= floors[name] <= 1:
            raise RecipeError(f"--floor {value}: write SOURCE=WEIGHT with a weight from 0 to 1, such as books=0.1")
    return floors

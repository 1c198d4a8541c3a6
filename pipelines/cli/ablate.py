"""Comparisons by small models: `gristmill ablate`, `ladder` and `mix`.

`ablate`: which data makes the better model, and how sure that is."""

import json
import math
import re
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import rich.table
import typer
from rich.table import Table

from gristmill.data_pipeline.indexed.dataset import read_dataset
from gristmill.data_pipeline.indexed.draws import epochs_by_source
from gristmill.foundation.config import write_yaml
from gristmill.foundation.errors import InputError, RecipeError
from gristmill.foundation.files import write_atomic
from gristmill.pipelines.ablate.corpora import mixed_sources
from gristmill.pipelines.ablate.ladder import (
    Extrapolation,
    IsoflopProfile,
    LadderBase,
    Rung,
    RungLosses,
    extrapolate,
    final_loss,
    isoflop_rungs,
    profile,
    rungs,
    to_json,
    untrained_loss,
)
from gristmill.pipelines.cli.checkpoint import data_folder
from gristmill.pipelines.cli.console import print_block
from gristmill.pipelines.cli.options import EngineOptions, SetOption, StageOptions, make_runner, with_option_groups
from gristmill.pipelines.recipes.config import Recipe
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


# `gristmill ladder`: the scaling curve of a recipe, and how well it foretells a larger size.
RESULT = "ladder.json"


@dataclass(frozen=True)
class LadderOptions(EngineOptions):
    """The sizes, and where they are trained."""

    sizes: Annotated[int, typer.Option(help="Sizes to fit, each of twice the compute; 4 or more.")] = 5
    seeds: Annotated[int, typer.Option(min=1, max=64, help="Runs of each fitted size; the held-back one has one.")] = 3
    tokens_per_parameter: Annotated[
        float, typer.Option(min=0.1, help="Tokens of each run over its active parameters.")
    ] = 20.0
    isoflop: Annotated[
        int,
        typer.Option(
            min=0,
            help="Sizes, of one run each, at the FLOPs of the largest fitted one, for the best tokens per parameter.",
        ),
    ] = 0
    reference: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help=f"{RESULT} of another kind of model on the same text: one floor."),
    ] = None
    workdir: Annotated[Path | None, typer.Option(metavar="DIR", help="Default: work/ladder-NAME.")] = None
    set_: SetOption = None


@with_option_groups
def ladder(
    recipe: Annotated[str, typer.Argument(metavar="RECIPE", help="Its model is the size that is held back.")],
    options: LadderOptions,
) -> None:
    """Train smaller sizes of a recipe, fit loss against compute, and compare with the recipe's own size."""
    loaded = load_recipe(recipe, options.set_ or [])
    base = LadderBase.of(loaded)
    if loaded.curate.splits.validation == 0:
        raise RecipeError("curate.splits.validation is 0: sizes are compared by their loss on it; hold out 0.05")
    per_parameter = options.tokens_per_parameter
    reference = read_reference(options.reference, per_parameter) if options.reference else None
    steps = rungs(base, per_parameter, options.sizes)
    equal = isoflop_rungs(base, steps[-2].flops, per_parameter, options.isoflop) if options.isoflop else ()
    runs = LadderRuns(recipe, options.workdir or Path("work") / f"ladder-{loaded.name}", options)
    losses = [runs.train(rung, options.seeds) for rung in steps[:-1]] + [runs.train(steps[-1], 1)]
    dataset = read_dataset(runs.folder / "index")
    start, shared = untrained_loss(dataset), []
    if reference and options.reference:
        check_same_text(options.reference, reference[1], start)
        shared = [f"The floor is shared with the {len(reference[0].losses)} sizes of {options.reference}."]
    measured = RungLosses([rung.flops for rung in steps], losses)
    outcome = extrapolate(measured, start, reference[0] if reference else None)
    print_block(table(steps, losses, outcome))
    tokens = {source.name: source.splits["train"].tokens for source in dataset.sources}
    print("\n".join([*repeats(tokens, loaded, steps[-1]), *shared, *sentences(outcome)]))
    isoflop = None
    if equal:
        own = [runs.train(rung, 1)[0] for rung in equal]
        isoflop = (equal, own, profile(equal, own, outcome.seed_noise))
        print_block(profile_table(equal, own))
        print(profile_sentence(isoflop[2]))
    write_atomic(runs.folder / RESULT, json.dumps(to_json(steps, losses, outcome, isoflop), indent=2).encode() + b"\n")


def read_reference(path: Path, per_parameter: float) -> tuple[RungLosses, float]:
    """All sizes of an earlier ladder, of as many tokens a parameter to a tenth, and its `untrained_loss`."""
    try:
        earlier = json.loads(path.read_text("utf-8"))
        flops, losses = zip(*((size["flops"], size["losses"]) for size in earlier["sizes"]), strict=True)
        measured, start = RungLosses(flops, losses), float(earlier["curve"]["start"])
        own = float(earlier["sizes"][-1]["tokens"] / earlier["sizes"][-1]["active"])
    except (OSError, ValueError, KeyError, TypeError, ArithmeticError) as error:
        raise InputError(f"{path}: no result of `gristmill ladder`: {error}") from None
    if not math.isclose(own, per_parameter, rel_tol=0.1):
        raise InputError(f"{path}: of {own:.3g} tokens a parameter, here {per_parameter:g}; take a ladder of as many")
    return measured, start


def check_same_text(path: Path, of_reference: float, start: float) -> None:
    if not math.isclose(start, of_reference, rel_tol=1e-9):
        raise InputError(
            f"{path}: an untrained model has {of_reference:.4f} there and {start:.4f} here: other text or another "
            "tokenizer has another floor; name a ladder of the same corpus"
        )


@dataclass(frozen=True)
class LadderRuns:
    """reference: of the recipe. folder: of all sizes."""

    reference: str
    folder: Path
    options: LadderOptions

    def train(self, rung: Rung, seeds: int) -> list[float]:
        """The held-out losses of one size, by seed. A run that was made before is taken back, not made again."""
        given = self.options.set_ or []
        first = load_recipe(self.reference, given).train_seed
        return [self._loss([*given, *rung.seeded(first + number)]) for number in range(seeds)]

    def _loss(self, overrides: list[str]) -> float:
        recipe = load_recipe(self.reference, overrides)
        stages = stages_up_to(recipe, stages_of(recipe), "train")
        options = StageOptions(self.options.workers, self.options.engine, self.options.address, workdir=self.folder)
        make_runner(recipe, stages, options, several_recipes=True).run(to="train")
        return final_loss(self.folder / "train")


def repeats(tokens: dict[str, int], recipe: Recipe, held_back: Rung) -> list[str]:
    """A line for each source that the held-back size reads more than once. tokens: training tokens by source."""
    epochs = epochs_by_source(tokens, recipe.training_weights, held_back.tokens, recipe.index.phases)
    return [
        f"warning: the held-back size reads source {name!r} {times:.1f} times, smaller ones less often: repeated text "
        "teaches less, so it may end above the forecast; take fewer tokens a parameter, a smaller model, or more text"
        for name, times in epochs.items()
        if times > 1
    ]


def table(steps: tuple[Rung, ...], losses: list[list[float]], outcome: Extrapolation) -> rich.table.Table:
    names = ("layers", "width", "heads", "parameters", "tokens", "FLOPs", "loss", "over seeds", "curve", "off by")
    rows = rich.table.Table(*names)
    for rung, seeds in zip(steps, losses, strict=True):
        curve, loss = outcome.curve(rung.flops), sum(seeds) / len(seeds)
        ends = f"{min(seeds):.4f} to {max(seeds):.4f}" if len(seeds) > 1 else ""
        rows.add_row(*_size_cells(rung), f"{loss:.4f}", ends, f"{curve:.4f}", f"{curve / loss - 1:+.2%}")
    return rows


def sentences(outcome: Extrapolation) -> list[str]:
    curve, (low, high) = outcome.curve, outcome.forecast_range
    inside = "inside" if low <= outcome.measured <= high else "outside"
    exponents = "{:.3f} to {:.3f}".format(*outcome.exponent_range)
    noise = "one seed each" if outcome.seed_noise is None else f"seeds differ by {outcome.seed_noise:.2%} (1 sd)"
    return [
        f"(loss - {curve.floor:.3f}) / ({curve.start:.3f} - loss) = {curve.scale:.3g} / FLOPs^{curve.exponent:.3f} "
        f"({curve.start:.3f}: of an untrained model); 95 % of exponents: {exponents}; "
        f"{noise}; at most {max(map(abs, outcome.residuals)):.2%} off the curve.",
        f"The last size was held back: forecast {outcome.forecast:.4f} ({low:.4f} to {high:.4f}), measured "
        f"{outcome.measured:.4f}, off by {outcome.error:+.2%}, {inside} the interval.",
    ]


def profile_table(steps: tuple[Rung, ...], losses: list[float]) -> rich.table.Table:
    rows = rich.table.Table("layers", "width", "heads", "parameters", "tokens", "FLOPs", "tokens a parameter", "loss")
    for rung, loss in zip(steps, losses, strict=True):
        rows.add_row(*_size_cells(rung), f"{rung.tokens / rung.active:.1f}", f"{loss:.4f}")
    return rows


def _size_cells(rung: Rung) -> tuple[str, ...]:
    shape = (str(rung.layers), str(rung.width), str(rung.heads))
    active = f" ({rung.active:,} active)" if rung.active < rung.parameters else ""
    return (*shape, f"{rung.parameters:,}{active}", f"{rung.tokens:,}", f"{rung.flops:.2e}")


def profile_sentence(fitted: IsoflopProfile) -> str:
    if fitted.tokens_per_parameter is None:
        return f"At {fitted.flops:.2e} FLOPs the loss has no least inside these sizes: take more, or other sizes."
    ends = (
        "no interval: most refits have no least"
        if fitted.interval is None
        else "{:.1f} to {:.1f}".format(*fitted.interval)
    )
    return (
        f"At {fitted.flops:.2e} FLOPs the loss is least at {fitted.best:,.0f} parameters and "
        f"{fitted.tokens_per_parameter:.1f} tokens a parameter ({ends})."
    )


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
        Path | None, typer.Option(metavar="FILE", help="The recipe with the weights. Default: RECIPE-mixed.yaml.")
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

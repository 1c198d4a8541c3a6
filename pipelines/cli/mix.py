"""`gristmill mix`: which mixture of its sources a recipe should train on."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer
from rich.table import Table

from gristmill.foundation.errors import RecipeError
from gristmill.foundation.files import write_atomic
from gristmill.pipelines.ablate.arms import mixed_sources
from gristmill.pipelines.cli.ablate import check_targets, parse_budget
from gristmill.pipelines.cli.console import print_block
from gristmill.pipelines.cli.options import EngineOptions, SetOption, StageOptions, make_runner, with_option_groups
from gristmill.pipelines.recipes.recipe_file import load_recipe
from gristmill.pipelines.stage_list import stages_of, stages_up_to


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
    workdir: Annotated[Path | None, typer.Option(metavar="DIR", help="Default: work/mix-NAME.")] = None
    set_: SetOption = None


@with_option_groups
def mix(recipe: Annotated[str, typer.Argument(metavar="RECIPE")], options: MixOptions) -> None:
    """Train small models on many mixtures of the recipe's sources and propose the weights of the best one."""
    seconds, flops = parse_budget(options.budget)
    floors = parse_floors(options.floor or [])
    loaded = load_recipe(recipe, options.set_ or [])
    mixed_sources(loaded, floors)
    target_tokens = options.tokens or (loaded.train.tokens if loaded.train is not None else None)
    if target_tokens is None:
        raise RecipeError(
            f"{recipe} has no section train; say with --tokens how long the run is that the mixture is for"
        )
    check_targets(options.target or [])
    folder = options.workdir or Path("work") / f"mix-{loaded.name}"
    stage_options = StageOptions(options.workers, options.engine, options.address, workdir=folder / "curated")
    runner = make_runner(loaded, stages_up_to(loaded, stages_of(loaded), "curate"), stage_options)
    runner.run(only="curate")
    from gristmill.pipelines.ablate.mixing import MixPlan  # torch takes seconds to load
    from gristmill.pipelines.ablate.mixing import mix as mix_sources

    targets = tuple(options.target or ())
    plan = MixPlan(
        folder, options.runs, seconds, flops, target_tokens, options.max_epochs, floors, targets, options.documents
    )
    engine = options.open(StageOptions().reporter(), folder)
    try:
        result = mix_sources(loaded, folder / "curated" / "curate", plan, engine)
    finally:
        engine.close()
    weights = result.proposal.weights
    table = Table("source", "natural", "proposed", "90 % range", "cap")
    rows = zip(
        result.names, result.natural, weights, result.proposal.low, result.proposal.high, result.caps, strict=True
    )
    for name, natural, weight, low, high, cap in rows:
        table.add_row(name, f"{natural:.3f}", f"{weight:.3f}", f"{low:.3f} to {high:.3f}", f"{cap:.3f}")
    print_block(table)
    print(
        f"predicted {result.proposal.loss:.4f} bits a byte, mean of {', '.join(result.sets)}; "
        f"{len(result.mixtures)} runs"
    )
    lines = [f"sources.{name}.weight={weight:.4f}" for name, weight in zip(result.names, weights, strict=True)]
    path = folder / "weights.txt"
    write_atomic(path, ("\n".join(lines) + "\n").encode())
    overrides = " ".join(f"--set {line}" for line in lines)
    print(f"{path}; train with: gristmill run {recipe} {overrides}")


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

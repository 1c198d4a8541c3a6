"""`gristmill ladder`: the scaling curve of a recipe, and how well it foretells a larger size."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import rich.table
import typer

from gristmill.foundation.errors import RecipeError
from gristmill.foundation.files import write_atomic
from gristmill.pipelines.ablate.ladder import (
    Extrapolation,
    IsoflopProfile,
    Rung,
    extrapolate,
    final_loss,
    isoflop_rungs,
    profile,
    rungs,
    to_json,
)
from gristmill.pipelines.cli.console import print_block
from gristmill.pipelines.cli.options import EngineOptions, SetOption, StageOptions, make_runner, with_option_groups
from gristmill.pipelines.recipes.recipe_file import load_recipe
from gristmill.pipelines.stages.stage_list import stages_of, stages_up_to

RESULT = "ladder.json"


@dataclass(frozen=True)
class LadderOptions(EngineOptions):
    """The sizes, and where they are trained."""

    sizes: Annotated[int, typer.Option(help="Sizes to fit, each of twice the compute; 4 or more.")] = 4
    tokens_per_parameter: Annotated[
        float, typer.Option(min=0.1, help="Tokens of each run over its active parameters.")
    ] = 20.0
    isoflop: Annotated[
        int,
        typer.Option(
            min=0,
            help="Sizes trained at the FLOPs of the largest fitted one, for the best tokens per parameter; 0: none.",
        ),
    ] = 0
    workdir: Annotated[Path | None, typer.Option(metavar="DIR", help="Default: work/ladder-NAME.")] = None
    set_: SetOption = None


@with_option_groups
def ladder(
    recipe: Annotated[str, typer.Argument(metavar="RECIPE", help="Its model is the size that is held back.")],
    options: LadderOptions,
) -> None:
    """Train smaller sizes of a recipe, fit loss against compute, and compare with the recipe's own size."""
    loaded = load_recipe(recipe, options.set_ or [])
    model, train = loaded.training()
    if loaded.curate.splits.validation == 0:
        raise RecipeError(
            "curate.splits.validation is 0: sizes are compared by their loss on it; hold out 0.05 or more"
        )
    settings = {"batch_tokens": train.batch_tokens, "optimizer": train.optimizer.model_dump(exclude_unset=True)}
    vocabulary = loaded.tokenizer.vocab_size
    steps = rungs(model, settings, vocabulary, options.tokens_per_parameter, options.sizes)
    equal: tuple[Rung, ...] = ()
    if options.isoflop:
        middle, largest = options.tokens_per_parameter, steps[-2].flops
        equal = isoflop_rungs(model, settings, vocabulary, largest, middle, options.isoflop)
    folder = options.workdir or Path("work") / f"ladder-{loaded.name}"
    losses = [_train(recipe, rung, folder, options) for rung in steps]
    outcome = extrapolate([rung.flops for rung in steps], losses)
    print_block(table(steps, losses, outcome))
    print("\n".join(sentences(outcome)))
    isoflop = None
    if equal:
        own = [_train(recipe, rung, folder, options) for rung in equal]
        isoflop = (equal, own, profile(equal, own))
        print_block(profile_table(equal, own))
        print(profile_sentence(isoflop[2]))
    write_atomic(folder / RESULT, json.dumps(to_json(steps, losses, outcome, isoflop), indent=2).encode() + b"\n")


def _train(reference: str, rung: Rung, folder: Path, options: LadderOptions) -> float:
    """The held-out loss of one size. A size that was trained before is taken back, not trained again."""
    recipe = load_recipe(reference, [*(options.set_ or []), *rung.overrides])
    stages = stages_up_to(recipe, stages_of(recipe), "train")
    stage_options = StageOptions(options.workers, options.engine, options.address, workdir=folder)
    make_runner(recipe, stages, stage_options, several_recipes=True).run(to="train")
    return final_loss(folder / "train")


def table(steps: tuple[Rung, ...], losses: list[float], outcome: Extrapolation) -> rich.table.Table:
    rows = rich.table.Table("layers", "width", "heads", "parameters", "tokens", "FLOPs", "loss", "curve", "off by")
    for rung, loss in zip(steps, losses, strict=True):
        curve = outcome.curve(rung.flops)
        rows.add_row(*_size_cells(rung), f"{loss:.4f}", f"{curve:.4f}", f"{curve / loss - 1:+.2%}")
    return rows


def sentences(outcome: Extrapolation) -> list[str]:
    curve, (low, high) = outcome.curve, outcome.forecast_range
    inside = "inside" if low <= outcome.measured <= high else "outside"
    exponents = "{:.3f} to {:.3f}".format(*outcome.exponent_range)
    return [
        f"loss = {curve.floor:.3f} + {curve.scale:.3g} / FLOPs^{curve.exponent:.3f}; 95 % of exponents: {exponents}.",
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

"""The scaling curve of a recipe, and how well it foretells a larger size: `gristmill ladder`."""

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import rich.table
import typer

from gristmill.data_pipeline.indexed.dataset import Dataset, read_dataset
from gristmill.data_pipeline.indexed.draws import epochs_by_source
from gristmill.foundation.errors import InputError, RecipeError
from gristmill.foundation.files import write_atomic
from gristmill.foundation.fingerprint import differing_fields
from gristmill.foundation.progress import print_block
from gristmill.foundation.startup import rank_and_world_size
from gristmill.pipelines.ablate.ladder import (
    EXPONENTS,
    MIN_RUNGS,
    NOISE,
    Extrapolation,
    IsoflopProfile,
    LadderBase,
    Rung,
    RungLosses,
    check_learned,
    extrapolate,
    isoflop_rungs,
    profile,
    rungs,
)
from gristmill.pipelines.cli.options import EngineOptions, SetOption, StageOptions, make_runner, with_option_groups
from gristmill.pipelines.recipes.config import Recipe
from gristmill.pipelines.recipes.recipe_file import load_recipe
from gristmill.pipelines.stages.preflight import check_workdir, preflight, raise_issues
from gristmill.pipelines.stages.stage_list import stages_of, stages_up_to

RESULT = "ladder.json"
# Else each run says what the stage `evaluate`, which a ladder does not run, would leave out.
NO_EVALUATION = ("evaluate.tasks=[]", "evaluate.num_continuations=1")


@dataclass(frozen=True)
class LadderOptions(EngineOptions):
    """The sizes, and where they are trained."""

    sizes: Annotated[int, typer.Option(help="Sizes to fit, each of twice the compute; 4 or more.")] = 5
    seeds: Annotated[int, typer.Option(min=1, max=64, help="Runs of each fitted size.")] = 3
    held_back_seeds: Annotated[
        int, typer.Option(min=1, max=64, help="Runs of the held-back size; the forecast is compared with their mean.")
    ] = 1
    tokens_per_parameter: Annotated[
        float, typer.Option(min=0.1, max=1e5, help="Tokens of each run over its active parameters.")
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
    check_recipe(loaded)
    base, per_parameter = LadderBase.of(loaded), options.tokens_per_parameter
    reference = read_reference(options.reference, per_parameter) if options.reference else None
    steps = rungs(base, per_parameter, options.sizes)
    equal = isoflop_rungs(base, steps[-2].flops, per_parameter, options.isoflop) if options.isoflop else ()
    runs = LadderRuns(recipe, options.workdir or Path("work") / f"ladder-{loaded.name}", options)
    runs.check([*steps, *equal])
    dataset = runs.index(steps[-1])
    text, start, shared = text_of(dataset, base), untrained_loss(dataset), []
    if reference and options.reference:
        check_same_text(options.reference, reference.text, text)
        check_learned(float(reference.measured.means.max()), start)
        shared = [f"The floor is shared with the {len(reference.measured.losses)} sizes of {options.reference}."]
    tokens = {source.name: source.splits["train"].tokens for source in dataset.sources if "train" in source.splits}
    print("".join(f"{line}\n" for line in repeats(tokens, loaded, steps[-1])), end="", flush=True)
    losses = [runs.train(rung, options.seeds, start) for rung in steps[:-1]]
    losses.append(runs.train(steps[-1], options.held_back_seeds, start))
    measured = RungLosses([rung.flops for rung in steps], losses)
    outcome = extrapolate(measured, start, reference.measured if reference else None)
    print_block(table(steps, losses, outcome))
    print("\n".join([*shared, *sentences(outcome, losses[-1])]))
    isoflop = None
    if equal:
        own = [runs.train(rung, 1, start)[0] for rung in equal]
        isoflop = (equal, own, profile(equal, own, outcome.seed_noise))
        print_block(profile_table(equal, own))
        print(profile_sentence(isoflop[2]))
    answer = {"text": text, **to_json(steps, losses, outcome, isoflop)}
    write_atomic(runs.folder / RESULT, json.dumps(answer, indent=2).encode() + b"\n")


def check_recipe(recipe: Recipe) -> None:
    """Raises RecipeError where the losses of sizes cannot be compared."""
    _, train = recipe.training()
    if not recipe.sources:
        raise RecipeError(f"recipe {recipe.name} has no sources; sizes are compared by their loss on text held out")
    if train.objective not in ("causal", "distillation"):
        raise RecipeError(
            f"train.objective is {train.objective}: sizes are compared with a model for which all next tokens are "
            "equally likely; set train.objective=causal"
        )
    if train.init_from is not None:
        raise RecipeError("train.init_from has weights of one size; a ladder trains each size from the start: unset it")
    if train.lr_schedule.over_tokens is not None:
        raise RecipeError("train.lr_schedule.over_tokens is of one size; unset it, so that each size has its own")
    if recipe.curate.splits.validation == 0:
        raise RecipeError("curate.splits.validation is 0: sizes are compared by their loss on it; hold out 0.05")


def final_loss(folder: Path) -> float:
    """Held-out bits per byte after the last step, the mean over the sources; nats a token where bytes are unknown."""
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text("utf-8").splitlines()]
    validation = lines[-1].get("validation") if lines else None
    if validation is None:
        raise InputError(f"{folder}: no validation loss; hold out more text (curate.splits.validation)")
    sources = validation["sources"].values()
    if all("bits_per_byte" in source for source in sources):
        return float(sum(source["bits_per_byte"] for source in sources) / len(sources))
    return float(validation["loss"])


def untrained_loss(dataset: Dataset) -> float:
    """The loss of a model for which all tokens are equally likely, in the unit of `final_loss`: of 1,024 tokens and
    2.5 bytes a token, 4 bits per byte."""
    held_out = [source.splits["validation"] for source in dataset.sources if "validation" in source.splits]
    ratios = [split.tokens / split.bytes for split in held_out if split.tokens and split.bytes]
    if not ratios or len(ratios) < sum(split.tokens > 0 for split in held_out):
        return math.log(dataset.vocab_size)
    return math.log2(dataset.vocab_size) * sum(ratios) / len(ratios)


# What a result says of its text. The floor of a curve belongs to the text, so `--reference` asks for the same.


class Reference(NamedTuple):
    """All sizes of an earlier ladder, and its `text_of`."""

    measured: RungLosses
    text: dict[str, Any]


def text_of(dataset: Dataset, base: LadderBase) -> dict[str, Any]:
    """Tokenizer, length of samples, and the tokens of each source by digest. Raises InputError where less than a sample
    is held out."""
    held_out = [source.splits["validation"].tokens for source in dataset.sources if "validation" in source.splits]
    length = base.model.sequence_length
    if max(held_out, default=0) <= length:
        raise InputError(
            f"no source holds out {length + 1} tokens, which a sample has (at most {max(held_out, default=0)}); hold "
            "out more text (curate.splits.validation) or set a smaller model.sequence_length"
        )
    sources = {
        source.name: {"weight": source.weight} | {name: counts.sha256 for name, counts in source.splits.items()}
        for source in dataset.sources
    }
    return {"tokenizer": dataset.sources[0].tokenizer, "sequence_length": length, "sources": sources}


def read_reference(path: Path, per_parameter: float) -> Reference:
    """A ladder of as many tokens a parameter, to a tenth."""
    try:
        earlier = json.loads(path.read_text("utf-8"))
        if len(earlier["sizes"]) < MIN_RUNGS:
            raise ValueError(f"{len(earlier['sizes'])} sizes")
        flops, losses = zip(*((float(size["flops"]), floats(size["losses"])) for size in earlier["sizes"]), strict=True)
        own = float(earlier["sizes"][-1]["tokens"] / earlier["sizes"][-1]["active"])
        reference = Reference(RungLosses(flops, losses), earlier["text"])
    except (OSError, ValueError, LookupError, TypeError, ArithmeticError, RecursionError) as error:
        reason = f"no field {error}" if isinstance(error, KeyError) else error
        raise InputError(f"{path}: no result of `gristmill ladder`: {reason}") from None
    if not math.isclose(own, per_parameter, rel_tol=0.1):
        raise InputError(f"{path}: of {own:.3g} tokens a parameter, here {per_parameter:g}; take a ladder of as many")
    return reference


def floats(losses: Sequence[Any]) -> list[float]:
    """Raises ValueError where they are none."""
    values = [float(loss) for loss in losses]
    if not values or not all(math.isfinite(value) and value > 0 for value in values):
        raise ValueError(f"losses {losses}")
    return values


def check_same_text(path: Path, of_reference: dict[str, Any], text: dict[str, Any]) -> None:
    differences = differing_fields(of_reference, text)
    if differences:
        raise InputError(
            f"{path}: its text differs ({'; '.join(differences[:3])}), and other text or another tokenizer has another "
            "floor; name a ladder of the same corpus"
        )


@dataclass(frozen=True)
class LadderRuns:
    """reference: of the recipe. folder: of all sizes."""

    reference: str
    folder: Path
    options: LadderOptions

    def check(self, steps: Sequence[Rung]) -> None:
        """Raises RecipeError or InputError for what would stop any size's training, before the first one's."""
        check_workdir(self.folder)
        _, world_size = rank_and_world_size()
        for rung in steps:
            recipe = load_recipe(self.reference, self.overrides(rung))
            try:
                raise_issues(preflight(recipe, [stages_up_to(recipe, stages_of(recipe), "train")[-1]], world_size))
            except (RecipeError, InputError) as error:
                raise type(error)(f"at width {rung.width} with {rung.heads} heads: {error}") from None

    def index(self, rung: Rung) -> Dataset:
        """The text of all sizes."""
        self._run(self.overrides(rung), "index")
        return read_dataset(self.folder / "index")

    def train(self, rung: Rung, seeds: int, start: float) -> list[float]:
        """The held-out losses of one size, by seed. A run that was made before is taken back, not made again. Raises
        InputError where the loss stays above an untrained model's, `start`."""
        return [self._loss(self.overrides(rung, number), start) for number in range(seeds)]

    def overrides(self, rung: Rung, number: int = 0) -> list[str]:
        given = self.options.set_ or []
        return [*given, *NO_EVALUATION, *rung.seeded(load_recipe(self.reference, given).train_seed + number)]

    def _loss(self, overrides: list[str], start: float) -> float:
        self._run(overrides, "train")
        loss = final_loss(self.folder / "train")
        check_learned(loss, start)
        return loss

    def _run(self, overrides: list[str], to: str) -> None:
        recipe = load_recipe(self.reference, overrides)
        stages = stages_up_to(recipe, stages_of(recipe), to)
        options = StageOptions(self.options.workers, self.options.engine, self.options.address, workdir=self.folder)
        make_runner(recipe, stages, options, several_recipes=True).run(to=to)


def repeats(tokens: dict[str, int], recipe: Recipe, held_back: Rung) -> list[str]:
    """A line for each source that the held-back size reads more than once. tokens: training tokens by source."""
    epochs = epochs_by_source(tokens, recipe.training_weights, held_back.tokens, recipe.index.phases)
    return [
        f"warning: the held-back size reads source {name!r} {times:.1f} times, smaller ones less often: repeated text "
        "teaches less, so it may end above the forecast; take fewer tokens a parameter, a smaller model, or more text"
        for name, times in epochs.items()
        if times > 1
    ]


def table(steps: Sequence[Rung], losses: list[list[float]], outcome: Extrapolation) -> rich.table.Table:
    names = ("layers", "width", "heads", "parameters", "tokens", "FLOPs", "loss", "over seeds", "curve", "off by")
    rows = rich.table.Table(*names)
    for rung, seeds in zip(steps, losses, strict=True):
        curve, loss = outcome.curve(rung.flops), sum(seeds) / len(seeds)
        ends = f"{min(seeds):.4f} to {max(seeds):.4f}" if len(seeds) > 1 else ""
        rows.add_row(*_size_cells(rung), f"{loss:.4f}", ends, f"{curve:.4f}", f"{curve / loss - 1:+.2%}")
    return rows


def sentences(outcome: Extrapolation, held_back: Sequence[float]) -> list[str]:
    """held_back: losses of the held-back size, by seed."""
    curve, (low, high) = outcome.curve, outcome.forecast_range
    inside = "inside" if low <= outcome.measured <= high else "outside"
    exponents = "{:.3f} to {:.3f}".format(*outcome.exponent_range)
    last = outcome.last_noise
    several = f"the mean of {len(held_back)}, {min(held_back):.4f} to {max(held_back):.4f}"
    several = f" ({several}; seeds differ by {last:.2%})" if last is not None else ""
    noise = "one seed each" if outcome.seed_noise is None else f"seeds differ by {outcome.seed_noise:.2%} (1 sd)"
    edge = (
        "warning: the exponent is at the edge of what is fitted, so the forecast says little: the smallest sizes have "
        "hardly learned; take more tokens a parameter, or a larger model"
    )
    begins = (
        "warning: seeds of the held-back size differ more than three times as much as those of the smaller ones: what "
        "it learns in one run and not in another they may not learn at all, and no curve through them foresees that"
    )
    return [
        *[edge] * (curve.exponent in EXPONENTS),
        *[begins] * (last is not None and last > 3 * (NOISE if outcome.seed_noise is None else outcome.seed_noise)),
        f"(loss - {curve.floor:.3f}) / ({curve.start:.3f} - loss) = {curve.scale:.3g} / FLOPs^{curve.exponent:.3f} "
        f"({curve.start:.3f}: of an untrained model); 95 % of exponents: {exponents}; "
        f"{noise}; at most {max(map(abs, outcome.residuals)):.2%} off the curve.",
        f"The last size was held back: forecast {outcome.forecast:.4f} ({low:.4f} to {high:.4f}), measured "
        f"{outcome.measured:.4f}{several}, off by {outcome.error:+.2%}, {inside} the interval.",
    ]


def profile_table(steps: Sequence[Rung], losses: list[float]) -> rich.table.Table:
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


def to_json(
    steps: Sequence[Rung],
    losses: Sequence[Sequence[float]],
    outcome: Extrapolation,
    isoflop: tuple[Sequence[Rung], Sequence[float], IsoflopProfile] | None = None,
) -> dict[str, Any]:
    """losses: of each size, by seed."""

    def sizes(steps: Sequence[Rung], losses: Sequence[Sequence[float]]) -> list[dict[str, Any]]:
        return [{**vars(rung), "losses": list(seeds)} for rung, seeds in zip(steps, losses, strict=True)]

    answer = {"sizes": sizes(steps, losses), **vars(outcome), "curve": vars(outcome.curve), "error": outcome.error}
    if isoflop is not None:
        profiled, own, fitted = isoflop
        answer["isoflop"] = vars(fitted) | {"sizes": sizes(profiled, [[loss] for loss in own])}
    return answer

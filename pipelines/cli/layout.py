"""The commands of the planner: `gristmill layout`, `gristmill calibrate` and `gristmill explain`."""

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

import rich.table
import typer
from rich.console import Group
from rich.text import Text

from gristmill.foundation.config import SIZE_SUFFIXES, parse_size
from gristmill.foundation.errors import RecipeError
from gristmill.foundation.manifest import LOG_FOLDER
from gristmill.foundation.progress import Reporter, print_block
from gristmill.pipelines.cli.options import with_option_groups
from gristmill.pipelines.recipes.recipe_file import load_recipe
from gristmill.training.config.layers import MAX_PROCESSES
from gristmill.training.config.layout import OffloadConfig
from gristmill.training.config.train import RUN_NAME
from gristmill.training.planner.command import (
    PlanOptions,
    compare_recipe,
    plan_model,
    plan_recipe,
    recipe_text,
    write_plot,
)
from gristmill.training.planner.costs.model_shape import shape_of
from gristmill.training.planner.explain import NAMED, Explanation, explain_run
from gristmill.training.planner.hardware import load_hardware
from gristmill.training.planner.plan_report import tables, to_json
from gristmill.training.planner.plan_request import MEMORY_MARGIN, FixedChoices, load_shape
from gristmill.training.planner.search import SearchResult


@dataclass(frozen=True)
class ModelOptions:
    """The model of a plan without a recipe."""

    model: Annotated[str | None, typer.Option(metavar="FILE|NAME", help="A model file, or gpt-1t, llama3-8b ...")] = (
        None
    )
    sequence_length: Annotated[int | None, typer.Option(min=1, help="Tokens of a sample.")] = None
    vocab: Annotated[int | None, typer.Option(min=1, help="Ids of the vocabulary.")] = None


@dataclass(frozen=True)
class TrainingOptions:
    """The machine, the batch and the framework."""

    gpus: Annotated[
        int | None, typer.Option(max=MAX_PROCESSES, help="Number of GPUs; default: the recipe's layout.")
    ] = None
    hardware: Annotated[str, typer.Option(help="a100-80g, h100, h100-500w, h200, b200, or a profile file.")] = "h100"
    batch_tokens: Annotated[str, typer.Option(metavar="NUMBER", help="Tokens of one step, such as 4M or 512Ki.")] = "4M"
    tokens: Annotated[
        str | None, typer.Option(metavar="NUMBER", help="Tokens of the training, to forecast its days and cost.")
    ] = None
    framework: Annotated[
        str | None, typer.Option(help="gristmill (compiled where it can be), gristmill-eager, megatron-core ...")
    ] = None
    offload: Annotated[bool, typer.Option(help="Keep the optimizer state on the host.")] = False
    float8: Annotated[bool, typer.Option(help="Run linear layers in 8 bits.")] = False
    imbalance: Annotated[float, typer.Option(help="Tokens of the busiest rank's experts over the mean, 1 or more.")] = (
        1.0
    )
    memory_margin: Annotated[float, typer.Option(help="Share of each GPU's memory to leave free.")] = MEMORY_MARGIN


@dataclass(frozen=True)
class FixedOptions:
    """Choices that the search must keep."""

    tensor: Annotated[int | None, typer.Option(min=1, help="Fix the tensor axis.")] = None
    pipeline: Annotated[int | None, typer.Option(min=1, help="Fix the pipeline axis.")] = None
    replicate: Annotated[int | None, typer.Option(min=1, help="Fix the replicate axis.")] = None
    shard: Annotated[int | None, typer.Option(min=1, help="Fix the shard axis.")] = None
    context_axis: Annotated[int | None, typer.Option(min=1, help="Fix the context axis.")] = None
    expert: Annotated[int | None, typer.Option(min=1, help="Fix the expert axis.")] = None
    expert_tensor: Annotated[int | None, typer.Option(min=1, help="Fix the ranks that share an expert's width.")] = None
    virtual_stages: Annotated[int | None, typer.Option(min=1, help="Fix the stages per pipeline rank.")] = None
    micro_batch: Annotated[int | None, typer.Option(min=1, help="Fix the samples of a micro-batch.")] = None
    schedule: Annotated[
        str | None, typer.Option(help="Fix the pipeline_schedule: gpipe, 1f1b, interleaved, zbv or dualpipev.")
    ] = None
    recompute: Annotated[
        str | None, typer.Option(help="Fix the recomputation: none, operators, attention, full, swap or tokens.")
    ] = None
    wide: Annotated[bool, typer.Option(help="Try every size of shard and micro-batch.")] = False

    def choices(self) -> FixedChoices:
        """Raises RecipeError for an unknown schedule or recomputation."""
        return FixedChoices(
            tensor=self.tensor,
            pipeline=self.pipeline,
            replicate=self.replicate,
            shard=self.shard,
            context=self.context_axis,
            expert=self.expert,
            expert_tensor=self.expert_tensor,
            virtual=self.virtual_stages,
            micro_batch=self.micro_batch,
            schedule=_one_of(self.schedule, "schedule", ("gpipe", "1f1b", "interleaved", "zbv", "dualpipev")),
            recompute=_one_of(
                self.recompute, "recompute", ("none", "operators", "attention", "full", "swap", "tokens")
            ),
            wide=self.wide,
        )


@dataclass(frozen=True)
class OutputOptions:
    """Options of the output."""

    top: Annotated[int, typer.Option(min=1, help="Number of layouts to show.")] = 10
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of tables.")] = False
    plot: Annotated[Path | None, typer.Option(help="Plot throughput against GPUs: .png, .svg or .pdf.")] = None


@with_option_groups
def layout(
    model: ModelOptions,
    training: TrainingOptions,
    fixed: FixedOptions,
    output: OutputOptions,
    recipe: Annotated[
        str | None, typer.Argument(metavar="[RECIPE]", help="Compare the recipe's layout with the best.")
    ] = None,
) -> None:
    """Rank the legal layouts of a model on a machine by forecast time, with their memory."""
    choices = fixed.choices()
    if (recipe is None) == (model.model is None):
        raise RecipeError("gristmill layout takes a RECIPE or --model FILE|NAME, one of them")
    comparison = ""
    if recipe is not None:
        plan, comparison = _plan_recipe(recipe, training, choices)
    else:
        plan = _plan_model(model, training, choices)
    _show(plan, comparison, output)
    if output.plot is not None:
        write_plot(plan.request, output.plot)


def _plan_recipe(recipe: str, training: TrainingOptions, choices: FixedChoices) -> tuple[SearchResult, str]:
    """The search for a recipe's model, and a sentence that compares its own layout if it is for as many GPUs."""
    loaded = load_recipe(recipe)
    vocabulary, (model, train) = loaded.tokenizer.vocab_size, loaded.training()
    if train.layout.auto and training.gpus is None:
        raise RecipeError("the recipe's layout is auto; give the number of GPUs: --gpus")
    gpus = train.layout.world_size if training.gpus is None else training.gpus
    plan = plan_recipe(shape_of(model, vocabulary), train, gpus, training.hardware, choices, training.memory_margin)
    same_gpus = train.layout.world_size == gpus and not train.layout.auto
    return plan, compare_recipe(plan, model, train) if same_gpus else ""


def _plan_model(model: ModelOptions, training: TrainingOptions, choices: FixedChoices) -> SearchResult:
    if training.gpus is None:
        raise RecipeError("--model needs the number of GPUs; give --gpus N")
    options = PlanOptions(
        hardware=training.hardware,
        batch_tokens=_size(training.batch_tokens),
        tokens=None if training.tokens is None else _size(training.tokens),
        framework=training.framework,
        offload=OffloadConfig(optimizer="auto" if training.offload else "none"),
        float8=training.float8,
        memory_margin=training.memory_margin,
        imbalance=training.imbalance,
    )
    shape = load_shape(str(model.model), model.sequence_length, model.vocab)
    return plan_model(shape, training.gpus, options, choices)


def calibrate(
    output: Annotated[Path, typer.Argument(metavar="PROFILE.yaml", help="The hardware profile to write.")],
    base: Annotated[str | None, typer.Option(help="A profile for what cannot be measured here: h100 ...")] = None,
    repeats: Annotated[int, typer.Option(min=1)] = 10,
) -> None:
    """Measure matmuls, copies and, under torchrun, collectives of this machine; write its hardware profile."""
    # The one command here that loads torch.
    from gristmill.training.calibrate.measure_hardware import write_profile

    profile = write_profile(output, base, Reporter.to_terminal(), repeats)
    device = profile.device
    print(
        f"{output}: {device.matmul_tflops * device.matmul_efficiency:.2f} TFLOP/s, "
        f"{device.memory_tb_per_second * device.memory_efficiency * 1000:.1f} GB/s, {device.memory_gib:.1f} GiB"
    )


def _show(plan: SearchResult, comparison: str, output: OutputOptions) -> None:
    if output.as_json:
        print(json.dumps(to_json(plan, output.top) | ({"recipe": comparison} if comparison else {}), indent=2))
        plan.best  # noqa: B018 (raises where nothing fits)
        return
    print_block(tables(plan, output.top))
    if comparison:
        print(f"\n{comparison}")
    print(f"\n{recipe_text(plan)}")


def _size(text: str) -> int:
    """'4M' -> 4000000, '4096' -> 4096."""
    try:
        return parse_size(text) if text.endswith(tuple(SIZE_SUFFIXES)) else int(text)
    except ValueError as error:
        raise RecipeError(f"{text}: not a number; write 4000000, 4M or 512Ki") from error


def _one_of(value: str | None, name: str, known: tuple[str, ...]) -> Any:
    if value is not None and value not in known:
        raise RecipeError(f"--{name} {value}: it is one of {', '.join(known)}")
    return value


# `gristmill explain`: where the time of a training run goes, beside its forecast.


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
        print(json.dumps(explanation_json(explanation), indent=2))
    else:
        print_block(block(explanation))


def run_folder(path: Path) -> Path:
    """The folder of the run that a work folder has: the one under way, else the finished one. Others are as given."""
    runs = [folder for folder in (*path.glob(".train-*"), path / "train") if (folder / LOG_FOLDER / RUN_NAME).is_file()]
    return max(runs, key=lambda folder: (folder / LOG_FOLDER / RUN_NAME).stat().st_mtime, default=path)


def explanation_json(explanation: Explanation) -> dict[str, object]:
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

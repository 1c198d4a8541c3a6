"""The commands of the planner: `gristmill layout` and `gristmill calibrate`."""

import json
from pathlib import Path
from typing import Annotated, Any

import typer

from gristmill.foundation.errors import RecipeError
from gristmill.foundation.progress import Reporter
from gristmill.foundation.strict_yaml import SIZE_SUFFIXES, parse_size
from gristmill.pipelines.console import print_block
from gristmill.pipelines.recipe_file import load_recipe
from gristmill.training.config import MAX_PROCESSES
from gristmill.training.planner.command import compare_recipe, make_request, plan_recipe, recipe_text, write_plot
from gristmill.training.planner.known_models import load_shape
from gristmill.training.planner.plan_request import MEMORY_MARGIN, FixedChoices
from gristmill.training.planner.report import tables, to_json
from gristmill.training.planner.search import SearchResult, search

Size = Annotated[str | None, typer.Option(metavar="NUMBER", help="A number, or 4M, 512Ki (k, M, G are powers of ten).")]


def layout(
    recipe: Annotated[str | None, typer.Argument(metavar="[RECIPE]", help="Compares its layout with the best.")] = None,
    model: Annotated[
        str | None, typer.Option(metavar="FILE|NAME", help="A model file, or gpt-1t, llama3-8b ...")
    ] = None,
    gpus: Annotated[
        int | None, typer.Option(max=MAX_PROCESSES, help="How many; for a recipe, what its layout takes.")
    ] = None,
    hardware: Annotated[str, typer.Option(help="a100-80g, h100, h100-500w, h200, or a profile's file.")] = "h100",
    batch_tokens: Size = None,
    tokens: Size = None,
    sequence_length: Annotated[int | None, typer.Option(min=1, help="Tokens of a sample.")] = None,
    vocab: Annotated[int | None, typer.Option(min=1)] = None,
    framework: Annotated[
        str, typer.Option(help="gristmill, gristmill-eager, megatron-core, torchtitan ...")
    ] = "gristmill",
    tensor: Annotated[int | None, typer.Option(min=1, help="Fix this axis.")] = None,
    pipeline: Annotated[int | None, typer.Option(min=1, help="Fix this axis.")] = None,
    replicate: Annotated[int | None, typer.Option(min=1, help="Fix this axis.")] = None,
    shard: Annotated[int | None, typer.Option(min=1, help="Fix this axis.")] = None,
    context_axis: Annotated[
        int | None, typer.Option(min=1, help="Fix the ranks that share a sequence (forecast only where not built).")
    ] = None,
    virtual_stages: Annotated[int | None, typer.Option(min=1, help="Fix the stages a pipeline rank holds.")] = None,
    micro_batch: Annotated[int | None, typer.Option(min=1, help="Fix the samples of a micro-batch.")] = None,
    schedule: Annotated[str | None, typer.Option(help="gpipe, 1f1b, interleaved, zbv or dualpipev.")] = None,
    recompute: Annotated[str | None, typer.Option(help="none, operators, attention or full.")] = None,
    wide: Annotated[bool, typer.Option(help="Try every size of shard and micro-batch.")] = False,
    offload: Annotated[bool, typer.Option(help="The optimizer's state on the host.")] = False,
    float8: Annotated[bool, typer.Option(help="Linear layers in 8 bits.")] = False,
    memory_margin: Annotated[
        float, typer.Option(help="Share of each GPU's memory that no layout may fill.")
    ] = MEMORY_MARGIN,
    top: Annotated[int, typer.Option(min=1, help="Layouts shown.")] = 10,
    as_json: Annotated[bool, typer.Option("--json", help="JSON in place of tables.")] = False,
    plot: Annotated[Path | None, typer.Option(help="Writes throughput against GPUs: .png, .svg or .pdf.")] = None,
) -> None:
    """Rank the legal layouts of a model on a machine, with memory and time, before a GPU is rented."""
    fixed = FixedChoices(
        tensor=tensor,
        pipeline=pipeline,
        replicate=replicate,
        shard=shard,
        context=context_axis,
        virtual=virtual_stages,
        micro_batch=micro_batch,
        schedule=_one_of(schedule, "schedule", ("gpipe", "1f1b", "interleaved", "zbv", "dualpipev")),
        recompute=_one_of(recompute, "recompute", ("none", "operators", "attention", "full")),
        wide=wide,
    )
    if (recipe is None) == (model is None):
        raise RecipeError("gristmill layout takes a RECIPE or --model FILE|NAME, one of them")
    said = ""
    if recipe is not None:
        loaded = load_recipe(recipe)
        vocabulary, (shape_config, train) = loaded.tokenizer.vocab_size, loaded.training()
        if train.layout.auto and gpus is None:
            raise RecipeError("the recipe leaves its layout to the planner; say how many GPUs there are: --gpus")
        count = train.layout.world_size if gpus is None else gpus
        plan = plan_recipe(shape_config, vocabulary, train, count, hardware, fixed, memory_margin)
        if train.layout.world_size == count and not train.layout.auto:
            said = compare_recipe(plan, shape_config, train)
    else:
        if gpus is None:
            raise RecipeError("--gpus is needed beside --model")
        shape = load_shape(str(model), sequence_length, vocab)
        request = make_request(
            shape,
            gpus,
            hardware,
            _size(batch_tokens),
            _size(tokens),
            framework,
            fixed,
            offload=offload,
            float8=float8,
            memory_margin=memory_margin,
        )
        plan = search(request)
    _show(plan, said, top, as_json)
    if plot is not None:
        write_plot(plan.request, plot)


def calibrate(
    output: Annotated[Path, typer.Argument(metavar="PROFILE.yaml", help="The hardware profile to write.")],
    base: Annotated[str | None, typer.Option(help="A profile for what cannot be measured here: h100 ...")] = None,
    repeats: Annotated[int, typer.Option(min=1)] = 10,
) -> None:
    """Measure matmuls, copies and, under torchrun, collectives of this machine; write its hardware profile."""
    # The one command here that loads torch.
    from gristmill.training.measure_hardware import calibrate as measure_machine

    profile = measure_machine(output, base, Reporter.to_terminal(), repeats)
    device = profile.device
    print(
        f"{output}: {device.matmul_tflops * device.matmul_efficiency:.2f} TFLOP/s, "
        f"{device.memory_tb_per_second * device.memory_efficiency * 1000:.1f} GB/s, {device.memory_gib:.1f} GiB"
    )


def _show(plan: SearchResult, said: str, top: int, as_json: bool) -> None:
    if as_json:
        print(json.dumps(to_json(plan, top) | ({"recipe": said} if said else {}), indent=2))
        plan.best  # noqa: B018 (nothing fits: the sentence and the exit code)
        return
    print_block(tables(plan, top))
    if said:
        print(f"\n{said}")
    print(f"\n{recipe_text(plan)}")


def _size(text: str | None) -> int | None:
    """'4M' -> 4000000, '4096' -> 4096."""
    if text is None:
        return None
    try:
        return parse_size(text) if text.endswith(tuple(SIZE_SUFFIXES)) else int(text)
    except ValueError as error:
        raise RecipeError(f"{text}: not a number; write 4000000, 4M or 512Ki") from error


def _one_of(value: str | None, name: str, known: tuple[str, ...]) -> Any:
    if value is not None and value not in known:
        raise RecipeError(f"--{name} {value}: it is one of {', '.join(known)}")
    return value

"""Checks that a layout is valid for a model and a batch, before a process group is made.

torch checks almost none of this. Every problem is reported with the nearest valid value."""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

from pydantic import ValidationError

from gristmill.foundation.errors import RecipeError
from gristmill.training.config.layers import divisors
from gristmill.training.config.layout import SWAPS, LayoutConfig
from gristmill.training.config.mixer import Mixer
from gristmill.training.config.model import ModelConfig
from gristmill.training.config.train import TrainConfig


def check_layout(model: ModelConfig, train: TrainConfig, vocab_size: int, world_size: int) -> None:
    """Raises RecipeError with all problems of the layout."""
    reasons = list(validation_errors(model, train, vocab_size, world_size))
    if reasons:
        raise RecipeError("this layout cannot be right:\n" + "\n".join(f"- {reason}" for reason in reasons))


def validation_errors(model: ModelConfig, train: TrainConfig, vocab_size: int, world_size: int) -> Iterator[str]:
    """Every reason why the engine cannot run this training, each with a fix. The one function that decides: for the
    planner's candidates, for `gristmill check` and before training starts."""
    return CheckedModel(model, vocab_size).validation_errors(train, world_size)


@dataclass(frozen=True)
class CheckedModel:
    """A model with what the checks ask of its layers, which are listed once for all the layouts of a search."""

    config: ModelConfig
    vocab_size: int

    @cached_property
    def mixers(self) -> dict[str, Mixer]:
        return {name: self.config.mixer_named(name) for name in self.config.used_mixers}

    @cached_property
    def stateful_mixers(self) -> tuple[str, ...]:
        return self.config.stateful_mixers

    @cached_property
    def hidden_widths(self) -> list[int]:
        """Widths of the MLPs, without those of experts; sorted."""
        return sorted({layer.ffn_hidden_size for layer in self.config.layer_list})

    @cached_property
    def mixtures(self) -> list[tuple[int, int]]:
        """(experts, their hidden width) of each kind of mixture; sorted."""
        return sorted(
            {(layer.experts, layer.expert_ffn_hidden_size) for layer in self.config.layer_list if layer.experts}
        )

    def validation_errors(self, train: TrainConfig, world_size: int) -> Iterator[str]:
        model, layout = self.config, train.layout
        yield from _world(layout, world_size)
        yield from _tensor(self, layout)
        yield from _context(model, layout)
        yield from _pipeline(model, layout)
        yield from _experts(self, train)
        yield from _mixers(self, train)
        yield from _batches(model, train)
        if train.float8:
            yield from _float8(self, train)
        yield from _swap(self, train)
        yield from _overlap(model, train)
        if train.cuda_graphs:
            yield from _graphs(self, train)
        if layout.offload.streams_weights:
            yield from _streamed(model, train)
        if layout.starts_processes:
            yield from _lost_replicas(self, train)


def reasons_of(error: ValidationError) -> str:
    """The sentences of the configuration's validators without pydantic's frame."""
    return "; ".join(detail["msg"].removeprefix("Value error, ") for detail in error.errors())


def micro_batch_size(model: ModelConfig, train: TrainConfig) -> int:
    """The layout's micro-batch, or the engine's choice: the most samples up to 8192 tokens on a rank that divide every
    batch evenly and leave a pipeline its micro-batches."""
    layout = train.layout
    if layout.micro_batch:
        return layout.micro_batch
    shares = [samples // layout.data for samples in batch_sizes(model, train)]
    fitting = [
        size
        for size in divisors(math.gcd(*shares) or 1)
        if size * model.sequence_length <= 8192 * layout.context and min(shares) // size >= min_micro_batches(layout)
    ]
    return max(fitting, default=1)


def min_micro_batches(layout: LayoutConfig) -> int:
    """A pipeline needs a micro-batch for each rank (dualpipev: for each stage) to be in flight."""
    if layout.pipeline == 1:
        return 1
    return layout.num_stages if layout.pipeline_schedule == "dualpipev" else layout.pipeline


def batch_sizes(model: ModelConfig, train: TrainConfig) -> list[int]:
    """Samples of every batch size the run passes through."""
    sizes = {train.batch_tokens}
    if train.batch_ramp is not None:
        sizes |= set(range(train.batch_ramp.start_tokens, train.batch_tokens, train.batch_ramp.increment_tokens))
    return sorted(size // model.sequence_length for size in sizes)


def _world(layout: LayoutConfig, world_size: int) -> Iterator[str]:
    if layout.starts_processes:
        if world_size > 1:
            yield (
                f"lost_replicas: continue starts its {layout.world_size} processes itself, but {world_size} run; start "
                "it without torchrun, Slurm and `gristmill launch`, or set lost_replicas: restart"
            )
    elif layout.world_size != world_size:
        rest = layout.world_size // layout.data
        fix = f"set data: {world_size // rest}" if world_size % rest == 0 else f"tensor x pipeline x context is {rest}"
        yield (
            f"data {layout.data} x tensor {layout.tensor} x pipeline {layout.pipeline} x context {layout.context} = "
            f"{layout.world_size} processes, but {world_size} run; start {layout.world_size} (torchrun "
            f"--nproc-per-node {layout.world_size}), or {fix}"
        )


def _tensor(checked: CheckedModel, layout: LayoutConfig) -> Iterator[str]:
    model, size = checked.config, layout.tensor
    if size == 1 or model.transformers is not None:  # a plan by rules replicates what does not split
        return
    for reason in _uneven(checked, size, layout):
        sizes = divisors(model.heads if model.has_attention else model.width)
        legal = [number for number in sizes if not any(_uneven(checked, number, layout))]
        yield f"tensor {size}: {reason}; legal for this model: {legal}"


def _uneven(checked: CheckedModel, size: int, layout: LayoutConfig) -> Iterator[str]:
    model, vocab_size = checked.config, checked.vocab_size
    for mixer in checked.mixers.values():
        problem = mixer.tensor_problem(model.width, size)
        if problem is not None:
            yield problem
    for hidden in checked.hidden_widths:
        if hidden % size:
            yield f"the hidden width {hidden} does not split evenly"
    if (size - 1) * math.ceil(vocab_size / size) >= vocab_size:
        yield f"a vocabulary of {vocab_size} leaves the last rank without a row"
    tokens = model.sequence_length // layout.context
    if layout.sequence_parallel and tokens % size:
        name = "sequence_length" if layout.context == 1 else "a context rank's share of the sequence,"
        yield f"{name} {tokens} does not split evenly; set sequence_parallel: false"


def _context(model: ModelConfig, layout: LayoutConfig) -> Iterator[str]:
    size = layout.context
    if size == 1:
        return
    if model.sequence_length % (unit := context_unit(layout)):
        nearest = max(1, round(model.sequence_length / unit)) * unit
        legal = [number for number in divisors(model.sequence_length) if context_splits(model, layout, number)]
        parts = "2 blocks for each rank of the ring" if layout.context_method == "ring" else "a share for each rank"
        yield (
            f"context {size}: sequence_length {model.sequence_length} does not split into {parts}; set "
            f"sequence_length: {nearest}, or context to one of {legal}"
        )
    heads = model.heads // layout.tensor
    if layout.context_method == "all_to_all" and heads % size:
        legal = [number for number in divisors(heads) if context_splits(model, layout, number)]
        yield (
            f"context {size} with context_method all_to_all: {heads} heads of a tensor rank do not split evenly; set "
            f"context to one of {legal}, or context_method: ring"
        )


def context_unit(layout: LayoutConfig) -> int:
    """Samples split into so many equal parts: the ring hands out two blocks to each rank."""
    return layout.context * (2 if layout.context_method == "ring" else 1)


def context_splits(model: ModelConfig, layout: LayoutConfig, context: int) -> bool:
    """Whether the sample splits over so many context ranks."""
    return context == 1 or model.sequence_length % context_unit(layout.model_copy(update={"context": context})) == 0


def _pipeline(model: ModelConfig, layout: LayoutConfig) -> Iterator[str]:
    if layout.pipeline == 1:
        return
    if layout.num_stages > model.layers:
        yield (
            f"{layout.num_stages} stages but {model.layers} layers; use at most "
            f"{model.layers // layout.stages_per_rank} pipeline ranks with {layout.stages_per_rank} stages each"
        )
    splits = model.pattern_splits
    if splits is not None and layout.split_points is None and len(splits) + 1 != layout.num_stages:
        yield (
            f"model.pattern has {len(splits) + 1} stages and the layout {layout.num_stages}; leave | out of the "
            "pattern, or set train.layout.split_points"
        )
    if layout.split_points and (layout.split_points[0] < 1 or layout.split_points[-1] >= model.layers):
        yield f"split_points {list(layout.split_points)} must lie between 1 and {model.layers - 1}"


def _mixers(checked: CheckedModel, train: TrainConfig) -> Iterator[str]:
    for name in checked.stateful_mixers:
        if train.float8:
            yield f"float8 is not built for the mixer {name} yet; set float8: false"
        if train.compile and not checked.mixers[name].compiles:
            yield f"compile is not built for the mixer {name} yet; set compile: false"


def _swap(checked: CheckedModel, train: TrainConfig) -> Iterator[str]:
    if train.layout.recompute != "tokens":
        return
    if train.compile:
        yield (
            "recompute: tokens computes a layer again around its attention, which is not built for compiled layers; "
            "set recompute: swap, or compile: false"
        )
    for name, mixer in checked.mixers.items():
        if not mixer.marks_mixing:
            yield (
                f"recompute: tokens computes some tokens of a layer again, and the mixer {name} does not say what it "
                "computes of all tokens together (Mixer.marks_mixing); set recompute: swap or full"
            )
    if train.float8:
        yield "recompute: tokens changes the scale that float8 finds over the tokens; set float8: false"


def _overlap(model: ModelConfig, train: TrainConfig) -> Iterator[str]:
    if not train.layout.async_tensor_parallel:
        return
    if model.transformers is not None:
        yield "async_tensor_parallel is not built for a model of transformers; leave it out"
    if train.compile:
        yield "async_tensor_parallel is not built for compiled layers; set compile: false, or leave it out"
    if train.float8:
        yield "async_tensor_parallel multiplies some tokens at a time, and float8 scales all at once; leave one out"


def _graphs(checked: CheckedModel, train: TrainConfig) -> Iterator[str]:
    """Reasons against graphs: what moves memory from step to step, or asks the device for a number within a pass."""
    model, layout, fix = checked.config, train.layout, "set cuda_graphs: false"
    if layout.world_size > 1:
        yield f"cuda_graphs is not built for {layout.world_size} processes, whose weights FSDP gathers anew; {fix}"
    if layout.offload.active or layout.offload.streams_weights or layout.recompute in SWAPS:
        yield f"cuda_graphs is not built for memory on the host (offload, recompute: {layout.recompute}); {fix}"
    if checked.mixtures and train.precision != "bf16":
        yield (
            f"cuda_graphs: in {train.precision} the host reads how many tokens each expert has; set precision: bf16, "
            "whose grouped matmul reads it on the device, or cuda_graphs: false"
        )
    if model.transformers is not None:
        yield f"cuda_graphs is not built for a model of transformers; {fix}"


def _streamed(model: ModelConfig, train: TrainConfig) -> Iterator[str]:
    """Reasons against what cannot run where the layers' weights are in host memory or on disk."""
    layout, name = train.layout, f"offload.parameters: {train.layout.offload.parameters}"
    if layout.pipeline > 1:
        yield (
            f"{name} brings in the layers in the order of one pass, and pipeline {layout.pipeline} runs several at a "
            "time; use data, tensor or context ranks, or offload.parameters: none"
        )
    if model.transformers is not None:
        yield f"{name} is not built for a model of transformers; set offload.parameters: none"
    if train.compile:
        yield f"{name} is not built for compiled layers; set compile: false"
    if train.float8:
        yield f"{name} is not built for float8; set float8: false"
    if train.upcycle is not None:
        yield f"{name} is not built for upcycling; begin the run without it and resume it with it"
    if train.checkpoint.asynchronous and layout.offload.parameters == "disk":
        yield f"{name}: an asynchronous checkpoint copies all state into memory; set checkpoint.asynchronous: false"
    casts = train.precision in ("bf16", "fp16") and layout.world_size == 1
    if casts and (layout.recompute not in ("full", "operators") or layout.recompute_every > 1):
        yield (
            f"{name}: in one process each layer would keep the {train.precision} copy of its weights until its "
            "backward pass; set recompute: full, or precision: fp32"
        )


def _lost_replicas(checked: CheckedModel, train: TrainConfig) -> Iterator[str]:
    """Reasons against what is not built, or not tried, for replicas that may be lost."""
    model, layout = checked.config, train.layout
    unsupported = {
        "pipeline above 1": layout.pipeline > 1,
        "context above 1": layout.context > 1,
        "rank_order": layout.rank_order is not None,
        "offload": layout.offload.active or layout.offload.streams_weights,
        "a model with experts": bool(checked.mixtures),
        "a model of transformers": model.transformers is not None,
        "an objective other than causal": train.objective != "causal",
        "precision fp16, whose loss scale is one of all replicas": train.precision == "fp16",
        "compile": train.compile,
        "evaluation.every": train.evaluation.every > 0,
        "monitoring.noise_scale_every": train.monitoring.noise_scale_every > 0,
        "checkpoint.asynchronous": train.checkpoint.asynchronous,
    }
    for name, is_set in unsupported.items():
        if is_set:
            yield f"lost_replicas: continue is not built for {name}; leave it out, or set lost_replicas: restart"


def _experts(checked: CheckedModel, train: TrainConfig) -> Iterator[str]:
    layout = train.layout
    if not checked.mixtures:
        if layout.expert_ranks > 1:
            yield (
                f"expert {layout.expert} x expert_tensor {layout.expert_tensor}: the model has no experts; set both to "
                "1, or give the model some (model.moe)"
            )
        return
    shared = math.gcd(*(experts for experts, _ in checked.mixtures))
    if shared % layout.expert:
        counts = sorted({experts for experts, _ in checked.mixtures})
        yield f"expert {layout.expert}: layers with {counts} experts do not split evenly; try one of {divisors(shared)}"
    widths = math.gcd(*(width for _, width in checked.mixtures))
    if widths % layout.expert_tensor:
        yield f"expert_tensor {layout.expert_tensor}: the experts' width does not split evenly; try {divisors(widths)}"


def _batches(model: ModelConfig, train: TrainConfig) -> Iterator[str]:
    layout = train.layout
    sizes = [train.batch_tokens]
    if train.batch_ramp is not None:
        sizes += [train.batch_ramp.start_tokens, train.batch_ramp.increment_tokens]
    for tokens in sizes:
        if tokens % (model.sequence_length * layout.data):
            unit = model.sequence_length * layout.data
            nearest = max(unit, round(tokens / unit) * unit)
            yield (
                f"a batch of {tokens} tokens is not a whole number of samples of {model.sequence_length} tokens on "
                f"each of {layout.data} data ranks; try {nearest}"
            )
            return
    size = micro_batch_size(model, train)
    for samples in batch_sizes(model, train):
        share = samples // layout.data
        if share % size:
            yield f"{share} samples a data rank do not split into micro-batches of {size}; try one of {divisors(share)}"
        elif share // size < min_micro_batches(layout):
            yield (
                f"schedule {layout.pipeline_schedule} needs {min_micro_batches(layout)} micro-batches or more, a data "
                f"rank has {share // size}; lower micro_batch, raise batch_tokens, or use fewer pipeline ranks"
            )
        elif layout.pipeline > 1 and layout.pipeline_schedule == "interleaved" and share // size % layout.pipeline:
            yield (
                f"interleaved runs rounds of {layout.pipeline} micro-batches, {share // size} are no whole number of "
                "rounds; change micro_batch or batch_tokens"
            )


def _float8(checked: CheckedModel, train: TrainConfig) -> Iterator[str]:
    """torch's 8-bit matmuls need sizes that are multiples of 16, also of a rank's shards."""
    model, tensor = checked.config, train.layout.tensor
    sizes = {
        "width": model.width,
        "heads x head width on a tensor rank": model.heads * model.head_dim // tensor,
        "key/value heads x head width on a tensor rank": max(1, model.num_kv_heads // tensor) * model.head_dim,
        "tokens of a micro-batch on a rank": micro_batch_size(model, train)
        * model.sequence_length
        // train.layout.context,
    }
    named = [*sizes.items(), *(("hidden width on a tensor rank", width // tensor) for width in checked.hidden_widths)]
    name = "experts' hidden width on a rank"
    named += [(name, width // train.layout.expert_tensor) for _, width in checked.mixtures]
    for name, size in named:
        if size % 16:
            yield f"float8 wants {name} ({size}) to be a multiple of 16; change it, or set float8: false"


def config_of_replica(model: ModelConfig, train: TrainConfig) -> TrainConfig:
    """The training as one replica sees it: its processes alone, with micro-batches of the same size."""
    layout = train.layout
    alone = {"data": layout.shard, "replicate": 1, "lost_replicas": "restart"}
    alone["micro_batch"] = micro_batch_size(model, train)
    return train.model_copy(update={"layout": layout.model_copy(update=alone)})

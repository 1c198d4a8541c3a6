"""A layout as the planner evaluates it: every choice that costs memory or time; conversion from and to a recipe."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

from gristmill.training.config.layout import (
    STAGES_PER_RANK,
    SWAPS,
    ContextMethod,
    LayoutConfig,
    Recompute,
    Schedule,
    StageSpec,
)
from gristmill.training.planner.costs.model_shape import ModelShape
from gristmill.training.planner.costs.parameters import (
    ExpertSharding,
    block_weights,
    embedding_weights,
    head_weights,
    rank_count,
)
from gristmill.training.planner.costs.stage_splitting import rank_of_stage


@dataclass(frozen=True)
class Layout:
    """How `gpus` processes share the work. A plain value, since a search evaluates thousands per second."""

    tensor: int = 1
    pipeline: int = 1
    replicate: int = 1
    shard: int = 1
    context: int = 1
    virtual: int = 1
    micro_batch: int = 1
    pipeline_schedule: Schedule = "1f1b"
    recompute: Recompute = "none"
    sequence_parallel: bool = False
    reshard: bool = False
    reduce_each: bool = False
    async_tensor: bool = False
    expert: int = 1
    expert_tensor: int = 1
    context_method: ContextMethod = "ring"
    offloaded_token_fraction: float | None = None
    num_layers_on_device: int = 2

    @property
    def expert_ranks(self) -> int:
        """Ranks that hold all experts of a layer once and exchange tokens."""
        return self.expert * self.expert_tensor

    @property
    def expert_replicate(self) -> int:
        """Copies of the experts' sharded state, as LayoutConfig has it."""
        shard_ranks = self.tensor * self.context * self.shard
        return self.replicate if shard_ranks % self.expert_ranks == 0 else 1

    @property
    def expert_sharding(self) -> ExpertSharding:
        ranks = self.tensor * self.context * self.data
        return ExpertSharding(
            self.expert, self.expert_tensor, max(1, ranks // self.expert_ranks // self.expert_replicate)
        )

    @property
    def data(self) -> int:
        return self.replicate * self.shard

    @property
    def gpus(self) -> int:
        return self.tensor * self.pipeline * self.data * self.context

    @property
    def stages(self) -> int:
        return self.pipeline * self.virtual

    def microbatches(self, batch_samples: int) -> int:
        """A step's micro-batches on each pipeline: 1536 samples, data 32, micro-batch 4 -> 12."""
        return batch_samples // (self.data * self.micro_batch)

    def config(
        self, split_points: tuple[int, ...] | None = None, rank_order: tuple[int, ...] | None = None
    ) -> LayoutConfig:
        """The recipe's `train.layout`; choices without effect keep their defaults."""
        default = STAGES_PER_RANK.get(self.pipeline_schedule)
        return LayoutConfig(
            data=self.data,
            replicate=self.replicate,
            tensor=self.tensor,
            pipeline=self.pipeline,
            context=self.context,
            context_method=self.context_method,
            expert=self.expert,
            expert_tensor=self.expert_tensor,
            sequence_parallel=self.sequence_parallel or self.tensor == 1,
            async_tensor_parallel=self.async_tensor,
            pipeline_schedule=self.pipeline_schedule,
            virtual_stages=0 if default or self.pipeline == 1 else self.virtual,
            split_points=split_points,
            rank_order=rank_order,
            micro_batch=self.micro_batch,
            fsdp_reshard_after_forward=self._reshard_after_forward,
            reduce_each_micro_batch=self.reduce_each,
            recompute=self.recompute,
            offloaded_token_fraction=self.offloaded_token_fraction if self.recompute == "tokens" else None,
            num_layers_on_device=self.num_layers_on_device,
        )

    @property
    def _reshard_after_forward(self) -> Literal["default", "always", "never"]:
        if self.reshard == (self.pipeline == 1):
            return "default"
        return "always" if self.reshard else "never"

    @property
    def token_share(self) -> float:
        """Share of the tokens whose activations go to host memory."""
        if self.recompute not in SWAPS:
            return 0.0
        return 1.0 if self.recompute == "swap" else self.offloaded_token_fraction or 0.0

    def name(self) -> str:
        """tensor 8 x pipeline 8 (2 stages each, interleaved) x data 24, micro-batch 2, full recomputation."""
        axes = [f"tensor {self.tensor}"] if self.tensor > 1 else []
        if self.context > 1:
            axes.append(f"context {self.context} ({self.context_method})")
        if self.pipeline > 1:
            stages = f"{self.virtual} stages each, " if self.virtual > 1 else ""
            axes.append(f"pipeline {self.pipeline} ({stages}{self.pipeline_schedule})")
        if self.data > 1:
            copies = f" ({self.replicate} copies x shard {self.shard})" if self.replicate > 1 and self.shard > 1 else ""
            axes.append(f"data {self.data}{copies}")
        extras = [f"micro-batch {self.micro_batch}"]
        if self.expert_ranks > 1:
            shares = f" of {self.expert_tensor} shares" if self.expert_tensor > 1 else ""
            extras.insert(0, f"expert {self.expert}{shares}")
        if self.tensor > 1 and self.sequence_parallel:
            extras.append("sequence parallel" + ", asynchronous" * self.async_tensor)
        if self.pipeline == 1 and self.shard > 1:
            extras.append("resharded" if self.reshard else "not resharded")
        if self.pipeline > 1 and self.reshard:
            extras.append("resharded after each pass")
        if self.reduce_each:
            extras.append("gradients reduced with each micro-batch")
        if self.recompute in SWAPS:
            extras.append(f"activations of {self.token_share:.0%} of the tokens in host memory")
        elif self.recompute != "none":
            extras.append(f"{self.recompute} recomputation")
        return f"{' x '.join(axes) or 'one GPU'}, {', '.join(extras)}"


def from_config(config: LayoutConfig, micro_batch: int) -> Layout:
    """The planner's view of a recipe's layout; micro_batch is used where the recipe sets none."""
    return Layout(
        tensor=config.tensor,
        pipeline=config.pipeline,
        replicate=config.replicate,
        shard=config.shard,
        context=config.context,
        context_method=config.context_method if config.context > 1 else "ring",
        virtual=config.stages_per_rank,
        micro_batch=config.micro_batch or micro_batch,
        pipeline_schedule=config.pipeline_schedule,
        recompute=config.recompute,
        sequence_parallel=config.sequence_parallel and config.tensor > 1,
        reshard=config.reshards,
        reduce_each=config.reduce_each_micro_batch,
        async_tensor=config.async_tensor_parallel,
        expert=config.expert,
        expert_tensor=config.expert_tensor,
        offloaded_token_fraction=config.offloaded_token_fraction,
        num_layers_on_device=config.num_layers_on_device,
    )


# Bubble of a pipeline schedule, and the number of micro-batches whose activations are in memory at its peak.
#
# p ranks, m micro-batches, v stages a rank. Sources: GPipe (arXiv 1811.06965), 1F1B and interleaved (arXiv
# 2104.04473, section 2.2), zero bubble (arXiv 2401.10241, table 1 and section 5), DualPipe (arXiv 2412.19437, table
# 2).


def bubble_share(schedule: Schedule, pipeline: int, virtual: int, microbatches: int) -> float:
    """Idle time over ideal time, for a backward pass of two forward passes, each of its halves one.

    1F1B, p = 4, m = 8: 3/8. Interleaved with v = 2: 3/16. zbv: 1/16."""
    if pipeline == 1:
        return 0.0
    return bubble_seconds(schedule, pipeline, virtual, 1.0, 2.0, microbatches) / (3.0 * microbatches)


def bubble_seconds(
    schedule: Schedule, pipeline: int, virtual: int, forward: float, backward: float, microbatches: int
) -> float:
    """Idle seconds of a rank in one step. forward and backward: of one micro-batch through all the rank's stages.

    gpipe and 1f1b (p-1)(F+B); interleaved that over v. zbv fills all but the first wave's way down the V, (p-1) half
    passes, from m = 2p on, and twice that at m = p (by simulation of torch's order). DualPipeV (p-1)(F + 2B - 3W) / 2,
    with B whole and W its weights' half."""
    if pipeline == 1:
        return 0.0
    hops, weights = pipeline - 1, min(forward, backward / 2)
    if schedule == "zbv":
        short = max(0.0, (2 * pipeline - microbatches) / pipeline)
        return hops / 2 * max(forward, backward - weights) * (1 + short)
    if schedule == "dualpipev":
        return hops / 2 * max(0.0, forward + 2 * backward - 3 * weights)
    return hops * (forward + backward) / virtual


def live_chunks(schedule: Schedule, pipeline: int, virtual: int, microbatches: int, rank: int) -> int:
    """Maximum number of stage-sized activations in memory on a pipeline rank (a rank's whole work is `virtual` of
    them).

    gpipe: all m. 1f1b: p - rank. Interleaved: 2 (p - rank - 1) + (v-1) p + 1, which on rank 0 is the
    p v + p - 1 of arXiv 2205.05198, section 4.2.3: 1 + (p-1)/(p v) of the model. zbv and dualpipev: 2p, as 1f1b."""
    total = microbatches * virtual
    if pipeline == 1:
        return 1
    if schedule == "gpipe":
        return total
    if schedule == "1f1b":
        return min(total, pipeline - rank)
    if schedule == "interleaved":
        return min(total, 2 * (pipeline - rank - 1) + (virtual - 1) * pipeline + 1)
    return min(total, 2 * pipeline + (schedule == "dualpipev"))


# The layers of each pipeline rank, counted by kind: what the cost of a rank depends on.


class RankLayers(NamedTuple):
    """kinds: how many layers of each kind in `ModelShape.distinct`."""

    kinds: tuple[int, ...]
    has_embedding: bool
    has_head: bool


def layers_by_rank(kinds: Sequence[int], stages: Sequence[StageSpec], layout: Layout) -> list[RankLayers]:
    """For each pipeline rank. kinds: of each layer of the model, as `ModelShape.kinds`."""
    stages_by_rank: list[list[StageSpec]] = [[] for _ in range(layout.pipeline)]
    for index, stage in enumerate(stages):
        stages_by_rank[rank_of_stage(index, layout.pipeline, layout.pipeline_schedule)].append(stage)
    return [_count_layers(kinds, of_rank) for of_rank in stages_by_rank]


def _count_layers(kinds: Sequence[int], stages: Sequence[StageSpec]) -> RankLayers:
    counts = Counter(kind for stage in stages for kind in kinds[stage.first : stage.last])
    return RankLayers(
        tuple(counts[kind] for kind in range(max(kinds) + 1)),
        any(stage.has_embedding for stage in stages),
        any(stage.has_head for stage in stages),
    )


# Parameters that a rank holds, before the data axis shards them.


class RankParameters:
    """Counts on tensor rank 0 of a pipeline rank. They are cached, so that a search is fast."""

    def __init__(self, shape: ModelShape) -> None:
        self.shape = shape
        self._counts: dict[tuple[int, RankLayers], int] = {}

    def all(self, layout: Layout, rank_layers: RankLayers) -> int:
        return self.dense(layout.tensor, rank_layers) + self.experts(layout, rank_layers)

    def experts(self, layout: Layout, rank_layers: RankLayers) -> int:
        """Those of experts."""
        if not self.shape.has_experts:
            return 0
        sharding = layout.expert_sharding
        return sum(
            count * sharding.count(block_weights(block))
            for block, count in zip(self.shape.distinct, rank_layers.kinds, strict=True)
            if block.experts
        )

    def dense(self, tensor: int, rank_layers: RankLayers) -> int:
        """Those of all else."""
        key = (tensor, rank_layers)
        if key not in self._counts:
            shape, kv_heads = self.shape, self.shape.model.num_kv_heads
            total = sum(
                count * rank_count(block_weights(block), tensor, 0, kv_heads)
                for block, count in zip(shape.distinct, rank_layers.kinds, strict=True)
            )
            if rank_layers.has_embedding:
                total += rank_count(embedding_weights(shape), tensor, 0, kv_heads)
            if rank_layers.has_head:
                total += rank_count(
                    head_weights(shape, not (shape.tied and rank_layers.has_embedding)), tensor, 0, kv_heads
                )
            self._counts[key] = total
        return self._counts[key]

"""A layout as the planner evaluates it: every choice that costs memory or time; conversion from and to a recipe."""

from dataclasses import dataclass
from typing import Literal

from gristmill.training.costs.parameters import ExpertSharding
from gristmill.training.layout_config import STAGES_PER_RANK, SWAPS, ContextMethod, LayoutConfig, Recompute, Schedule


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
    schedule: Schedule = "1f1b"
    recompute: Recompute = "none"
    sequence_parallel: bool = False
    reshard: bool = False
    reduce_each: bool = False
    async_tensor: bool = False
    expert: int = 1
    expert_tensor: int = 1
    context_method: ContextMethod = "ring"
    swapped_tokens: float | None = None
    unswapped_layers: int = 2

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
        default = STAGES_PER_RANK.get(self.schedule)
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
            schedule=self.schedule,
            virtual_stages=0 if default or self.pipeline == 1 else self.virtual,
            split_points=split_points,
            rank_order=rank_order,
            micro_batch=self.micro_batch,
            fsdp_reshard_after_forward=self._reshard_after_forward,
            reduce_each_micro_batch=self.reduce_each,
            recompute=self.recompute,
            swapped_tokens=self.swapped_tokens if self.recompute == "tokens" else None,
            unswapped_layers=self.unswapped_layers,
        )

    @property
    def _reshard_after_forward(self) -> Literal["default", "always", "never"]:
        if self.reshard == (self.pipeline == 1):
            return "default"
        return "always" if self.reshard else "never"

    @property
    def token_share(self) -> float:
        """Of the tokens, whose activations go to host memory."""
        if self.recompute not in SWAPS:
            return 0.0
        return 1.0 if self.recompute == "swap" else self.swapped_tokens or 0.0

    def name(self) -> str:
        """tensor 8 x pipeline 8 (2 stages each, interleaved) x data 24, micro-batch 2, full recomputation."""
        axes = [f"tensor {self.tensor}"] if self.tensor > 1 else []
        if self.context > 1:
            axes.append(f"context {self.context} ({self.context_method})")
        if self.pipeline > 1:
            stages = f"{self.virtual} stages each, " if self.virtual > 1 else ""
            axes.append(f"pipeline {self.pipeline} ({stages}{self.schedule})")
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
        schedule=config.schedule,
        recompute=config.recompute,
        sequence_parallel=config.sequence_parallel and config.tensor > 1,
        reshard=config.reshards,
        reduce_each=config.reduce_each_micro_batch,
        async_tensor=config.async_tensor_parallel,
        expert=config.expert,
        expert_tensor=config.expert_tensor,
        swapped_tokens=config.swapped_tokens,
        unswapped_layers=config.unswapped_layers,
    )

"""Configuration of the layout: how the processes share the model and the batch. Without torch."""

from typing import Literal, NamedTuple, Self

from pydantic import Field, model_validator

from gristmill.foundation.config import Config
from gristmill.training.config.layers import MAX_BATCH_TOKENS, MAX_LAYERS, MAX_PROCESSES, divisors

# Configuration of what lies in host memory instead of the device's. Without torch.

OptimizerPlacement = Literal["none", "cpu", "static", "interleaved", "auto"]
ParameterPlacement = Literal["none", "host", "disk"]


class OffloadConfig(Config):
    """optimizer: where the optimizer's state lies and is updated. none: on the device. All others keep it in host
    memory, in subgroups. cpu: the host updates all of them (ZeRO-Offload, arXiv 2101.06840). static: the device updates
    the first device_share of them (Twin-Flow). interleaved: the device updates every stride-th one while the host
    updates those between (Deep Optimizer States, arXiv 2410.21316). auto: interleaved or cpu, whichever the profile
    `hardware` of the layout forecasts as faster.

    parameters: where the weights of the layers lie, with their gradients and optimizer state. none: on the device.
    host, disk: they are on the device only while their layer computes, and the host updates all (ZeRO-Infinity,
    arXiv 2104.07857); optimizer is then none, cpu or auto, which mean the same."""

    optimizer: OptimizerPlacement = "none"
    parameters: ParameterPlacement = "none"
    folder: str | None = Field(
        None,
        min_length=1,
        description="parameters: disk: the folder on whose disk the weights lie, in a file without a name; null: the "
        "run's own",
    )
    subgroup_parameters: int = Field(
        100_000_000, ge=1, description="parameters that are updated and copied together, of one process's shard"
    )
    device_share: float | None = Field(
        None, ge=0, le=1, description="static: the share of the subgroups that the device updates"
    )
    stride: int | None = Field(
        None, ge=1, description="interleaved: the device updates every stride-th subgroup; 1 is all of them"
    )

    @model_validator(mode="after")
    def settings_belong_to_the_strategy(self) -> Self:
        for field, strategy in (("device_share", "static"), ("stride", "interleaved")):
            value = getattr(self, field)
            if value is None and self.optimizer == strategy:
                raise ValueError(f"optimizer: {strategy} needs {field}; set it, or optimizer: auto")
            if value is not None and self.optimizer != strategy:
                raise ValueError(
                    f"{field} is of optimizer: {strategy}, not {self.optimizer}; leave it out, or set "
                    f"optimizer: {strategy}"
                )
        return self

    @model_validator(mode="after")
    def the_host_updates_streamed_weights(self) -> Self:
        if self.parameters != "none" and self.optimizer in ("static", "interleaved"):
            raise ValueError(
                f"optimizer: {self.optimizer} updates weights on the device, where parameters: {self.parameters} keeps "
                "none of the layers'; set optimizer: auto, or parameters: none"
            )
        if self.folder is not None and self.parameters != "disk":
            raise ValueError("folder is of parameters: disk; set that, or leave folder out")
        return self

    @property
    def streams_weights(self) -> bool:
        return self.parameters != "none"

    @property
    def active(self) -> bool:
        return self.optimizer != "none"


ON_DEVICE = OffloadConfig()


Schedule = Literal["gpipe", "1f1b", "interleaved", "zbv", "dualpipev"]
STAGES_PER_RANK = {"gpipe": 1, "1f1b": 1, "zbv": 2, "dualpipev": 2}  # interleaved has as many as one asks for
ContextMethod = Literal["ring", "all_to_all"]
Recompute = Literal["none", "full", "attention", "operators", "swap", "tokens"]
SWAPS: tuple[Recompute, ...] = ("swap", "tokens")

# The most logits of the loss in memory at once, by device and bytes of a logit; the planner counts them too.
# CPU: 64 MB of float32; fewer rows slow its matmuls (64 rows: by a third). In 16 bits 128 MB, because the gradient of
# the table is then summed outside of the products, a pass for each chunk.
# GPU: 512 MB in 16 bits: large enough to fill the device, small beside its memory.
CHUNK_LOGITS = {
    "cpu": {2: 2**26, 4: 2**24, 8: 2**24},
    "cuda": {2: 2**28, 4: 2**28, 8: 2**28},
}


class LayoutConfig(Config):
    """Degree of each parallelism. data x tensor x pipeline x context is the number of processes; experts lie on the
    same ones, divided over expert x expert_tensor of them.

    data is all data-parallel processes; of these, groups of data / replicate shard the state (FSDP), and the
    `replicate` groups hold copies (HSDP). tensor ranks are neighbours, pipeline ranks the farthest apart."""

    auto: bool = Field(False, description="`layout: auto`: the planner chooses, when the number of processes is known")
    hardware: str = Field("h100", description="the profile it plans for: a100-80g, h100, h200 or a file")
    data: int = Field(1, ge=1, le=MAX_PROCESSES)
    replicate: int = Field(1, ge=1, le=MAX_PROCESSES)
    tensor: int = Field(1, ge=1, le=MAX_PROCESSES)
    pipeline: int = Field(1, ge=1, le=MAX_PROCESSES)
    context: int = Field(1, ge=1, le=MAX_PROCESSES)
    context_method: ContextMethod = Field(
        "ring",
        description="how attention sees the tokens of other context ranks. ring: keys and values travel; all_to_all: "
        "each rank has all tokens of a share of the heads",
    )
    expert: int = Field(
        1,
        ge=1,
        le=MAX_PROCESSES,
        description="ranks that experts are divided over, taken from those of data x context x tensor",
    )
    expert_tensor: int = Field(
        1, ge=1, le=MAX_PROCESSES, description="ranks that one expert's hidden width is divided over, likewise"
    )
    sequence_parallel: bool = Field(True, description="norms and residuals on sequence shards; matters if tensor > 1")
    async_tensor_parallel: bool = Field(
        False,
        description="products of attention and MLPs run beside the gathers and scatters of their tokens, rank by rank",
    )
    pipeline_schedule: Schedule = "1f1b"
    virtual_stages: int = Field(
        0, ge=0, le=MAX_LAYERS, description="stages a pipeline rank holds; 0 means the schedule's usual number"
    )
    split_points: tuple[int, ...] | None = Field(
        None, description="first layer of each stage but the first; None balances the stages by cost"
    )
    rank_order: tuple[int, ...] | None = Field(
        None,
        description="torchrun's ranks in the order pipeline, replicate, shard, context, tensor (the last fastest), "
        "beginning with rank 0; None: as they come",
    )
    micro_batch: int = Field(
        0, ge=0, le=MAX_BATCH_TOKENS, description="samples in a micro-batch; 0 lets the engine choose"
    )
    fsdp_reshard_after_forward: Literal["default", "always", "never"] = Field(
        "default",
        description="always: a layer's gathered weights are given up between its forward and its backward pass "
        "(ZeRO-3); never: kept (ZeRO-2); default: always without a pipeline, never with one, which would gather them "
        "for each micro-batch",
    )
    reduce_each_micro_batch: bool = Field(
        False,
        description="gradients are reduced over the data ranks with each micro-batch instead of once a step: no sums "
        "of unsharded gradients are in memory, and as many times the bytes are sent",
    )
    recompute: Recompute = "none"
    recompute_every: int = Field(1, ge=1, description="1 recomputes in every layer, n in every n-th")
    offloaded_token_fraction: float | None = Field(
        None,
        ge=0,
        le=1,
        description="recompute: tokens: the share of the tokens whose activations go to host memory, beside each "
        "layer's input and attention output; the others are recomputed. null: the planner chooses",
    )
    num_layers_on_device: int = Field(
        2, ge=0, description="recompute: swap, tokens: the model's last layers, whose activations stay on the device"
    )
    offload: OffloadConfig = OffloadConfig()
    lost_replicas: Literal["restart", "continue"] = Field(
        "restart",
        description="what the death of a process ends. restart: the run, which torchrun or the same command starts "
        "again; continue: its replica, of `replicate`, without which the others go on until it is back; the command "
        "then starts all processes itself, on one machine",
    )

    @model_validator(mode="after")
    def replicas_can_be_lost(self) -> Self:
        if self.lost_replicas == "continue" and self.auto:
            raise ValueError(
                "lost_replicas: continue needs a layout with replicas, and auto leaves it open; set data and "
                "replicate, or lost_replicas: restart"
            )
        if self.lost_replicas == "continue" and self.replicate == 1:
            raise ValueError(
                "lost_replicas: continue needs other replicas that go on; set data and replicate to 2 or more, or "
                "lost_replicas: restart"
            )
        return self

    @model_validator(mode="after")
    def axes_are_legal(self) -> Self:
        if self.data % self.replicate:
            raise ValueError(
                f"data={self.data} is not a multiple of replicate={self.replicate}; try one of {divisors(self.data)}"
            )
        if self.stage_ranks % self.expert_ranks:
            raise ValueError(
                f"expert={self.expert} x expert_tensor={self.expert_tensor} does not divide the {self.stage_ranks} "
                f"ranks of data x context x tensor that hold experts; try one of {divisors(self.stage_ranks)}"
            )
        return self

    @model_validator(mode="after")
    def rank_order_names_each_rank_once(self) -> Self:
        if self.rank_order is not None and sorted(self.rank_order) != list(range(self.world_size)):
            raise ValueError(
                f"rank_order must name each of the {self.world_size} ranks 0 to {self.world_size - 1} once; "
                "leave it out for the launcher's own order"
            )
        if self.rank_order is not None and self.rank_order[0] != 0:
            raise ValueError(
                f"rank_order begins with rank {self.rank_order[0]}, but rank 0, which writes the checkpoints, must "
                "come first; begin with the pipeline stage that holds it"
            )
        return self

    def position_of(self, rank: int) -> int:
        """Position of the launcher's rank in the mesh, which is its rank in torch's process group.

        torch sorts the ranks of each group, so the ranks are reordered and not the mesh."""
        return rank if self.rank_order is None else self.rank_order.index(rank)

    @model_validator(mode="after")
    def schedule_is_legal(self) -> Self:
        if self.pipeline == 1:
            return self
        usual = STAGES_PER_RANK.get(self.pipeline_schedule)
        if usual and self.virtual_stages not in (0, usual):
            raise ValueError(f"schedule {self.pipeline_schedule} holds {usual} stages a rank; leave virtual_stages out")
        if self.pipeline_schedule == "interleaved" and self.virtual_stages == 1:
            raise ValueError(
                "one stage a rank is not interleaved: set virtual_stages to 2 or more, or pipeline_schedule: 1f1b"
            )
        if self.pipeline_schedule in ("zbv", "dualpipev") and self.recompute == "operators":
            raise ValueError(
                f"{self.pipeline_schedule} splits the backward pass, which torch's operator-wise recomputation "
                "forbids; set recompute: full"
            )
        if self.split_points is not None and (
            len(self.split_points) != self.num_stages - 1 or list(self.split_points) != sorted(set(self.split_points))
        ):
            raise ValueError(
                f"split_points must be {self.num_stages - 1} rising layer numbers, one for each stage but the first"
            )
        return self

    @model_validator(mode="after")
    def overlaps_a_ring(self) -> Self:
        if self.async_tensor_parallel and (self.tensor == 1 or not self.sequence_parallel):
            raise ValueError(
                "async_tensor_parallel overlaps the gathers and scatters of sequence parallelism, which this layout "
                "does not have; set tensor: 2 or more with sequence_parallel: true, or leave it out"
            )
        return self

    @model_validator(mode="after")
    def split_backward_keeps_weights(self) -> Self:
        if (
            self.pipeline > 1
            and self.pipeline_schedule in ("zbv", "dualpipev")
            and self.fsdp_reshard_after_forward == "always"
        ):
            raise ValueError(
                f"{self.pipeline_schedule} splits the backward pass, between whose halves the weights stay; leave "
                "fsdp_reshard_after_forward out, or set pipeline_schedule: 1f1b or interleaved"
            )
        return self

    @model_validator(mode="after")
    def swap_is_legal(self) -> Self:
        if self.offloaded_token_fraction is not None and self.recompute != "tokens":
            raise ValueError(
                "offloaded_token_fraction is of recompute: tokens; set that, or leave offloaded_token_fraction out"
            )
        if self.recompute != "tokens":
            return self
        if self.pipeline > 1 and self.pipeline_schedule in ("zbv", "dualpipev"):
            raise ValueError(
                f"recompute: tokens recomputes once for a whole backward pass, which {self.pipeline_schedule} splits; "
                "set pipeline_schedule: 1f1b or interleaved, or recompute: swap"
            )
        return self

    @property
    def reshards(self) -> bool:
        """Whether weights are given up between the forward and the backward pass."""
        if self.fsdp_reshard_after_forward == "default":
            return self.pipeline == 1
        return self.fsdp_reshard_after_forward == "always"

    @property
    def starts_processes(self) -> bool:
        """Whether the command starts the processes itself, without torchrun."""
        return self.lost_replicas == "continue"

    @property
    def shard(self) -> int:
        return self.data // self.replicate

    @property
    def world_size(self) -> int:
        return self.data * self.tensor * self.pipeline * self.context

    @property
    def stage_ranks(self) -> int:
        """Ranks of one pipeline rank."""
        return self.data * self.context * self.tensor

    @property
    def expert_ranks(self) -> int:
        """Ranks that together hold all experts of a layer once; tokens are exchanged among them."""
        return self.expert * self.expert_tensor

    @property
    def expert_replicate(self) -> int:
        """Copies of the experts' sharded state: those of HSDP where its shard groups hold whole sets of experts, else
        one, sharded over all ranks with the same experts."""
        return self.replicate if self.stage_ranks // self.replicate % self.expert_ranks == 0 else 1

    @property
    def stages_per_rank(self) -> int:
        if self.pipeline == 1:
            return 1
        return self.virtual_stages or STAGES_PER_RANK.get(self.pipeline_schedule, 2)

    @property
    def num_stages(self) -> int:
        return self.pipeline * self.stages_per_rank


class StageSpec(NamedTuple):
    """Layers first to last - 1. The first stage has the embedding, the last one the head."""

    first: int
    last: int
    has_embedding: bool
    has_head: bool

    @property
    def num_layers(self) -> int:
        return self.last - self.first

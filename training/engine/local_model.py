"""The model of one process: one stage, or several where a pipeline rank has several."""

import tempfile
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from gristmill.training.config.layout import LayoutConfig
from gristmill.training.config.mixer import mixer_class
from gristmill.training.config.model import ModelConfig
from gristmill.training.config.train import TrainConfig
from gristmill.training.engine.fsdp import gathers_inside, parameter_groups, shard_over_data
from gristmill.training.model.attention.metadata import NO_HOOK
from gristmill.training.model.init import empty_values, fill, first_values, initialize, place_joint_weights, stored_name
from gristmill.training.model.layer_hook import CompiledOperators, RecomputedOperators
from gristmill.training.model.moe.router import saved_buffers
from gristmill.training.model.transformer import ComputeOptions, Transformer, run_layers
from gristmill.training.optim.optimizer import local_gradient
from gristmill.training.parallel.linear import Float8Copy, Float8Weight, float8_copy
from gristmill.training.parallel.mesh import Mesh, local, stored_like
from gristmill.training.parallel.offload.weight_stream import WeightStream, make_store
from gristmill.training.parallel.tensor import ColumnParallelLinear, RowParallelLinear
from gristmill.training.planner.costs.stage_splitting import split_model, stages_of_rank

# Initial weights of a model whose layers' weights are streamed: one layer at a time is in memory.


def initialize_streamed(
    model: Transformer, stream: WeightStream, seed: int, device: torch.device, dtype: torch.dtype
) -> None:
    """As `initialize`; the values of the layers are in the stream's store afterwards. model: on the meta device, maybe
    sharded by FSDP."""
    value = first_values(model.config, seed, device, dtype)
    for place, (index, layer) in enumerate(model.layers.items()):
        prefix = f"layers.{index}."
        fill(layer, partial(_value_below, value, prefix))
        _pad_shards(layer)
        for name, parameter in layer.named_parameters():
            stream.take(place, prefix + name, local(parameter.detach()))
    fill(model, lambda name, parameter: parameter if name.startswith("layers.") else value(name, parameter))
    stream.attach(list(model.layers.values()))


def _value_below(value: Callable[[str, Tensor], Tensor], prefix: str, name: str, parameter: Tensor) -> Tensor:
    return value(prefix + name, parameter)


def _pad_shards(layer: nn.Module) -> None:
    """FSDP copies shards into padded memory of its own at the first pass; this does so while the shards have values."""
    for module in layer.modules():
        if not isinstance(module, FSDPModule):
            continue
        for group in parameter_groups(module._get_fsdp_state()):
            for parameter in group.fsdp_params:
                parameter.reset_sharded_param()
                parameter._init_extensions()
            group._reset_sharded_params = True


# The weights of float8 layers in 8 bits: cast once after each update, and gathered so by FSDP.


class Float8Weights:
    """Casts before a forward pass, where `stale` was set since the last one. Without FSDP each layer gets the copy of
    its weight; under FSDP each rank casts its shard, by the largest element of all shards, and gathers carry 8 bits."""

    def __init__(self, model: nn.Module, mesh: Mesh, compute: torch.dtype):
        self.mesh, self.compute = mesh, compute
        self.layers = [
            module for module in model.modules() if isinstance(module, ColumnParallelLinear | RowParallelLinear)
        ]
        self.parameters: list[nn.Parameter] = [layer.weight for layer in self.layers]
        self.stale = True
        self._copies: list[Float8Copy] = []
        model.register_forward_pre_hook(self._before_forward, prepend=True)

    def _before_forward(self, model: nn.Module, inputs: Any) -> None:
        self.cast(model)

    @torch.no_grad()
    def cast(self, model: nn.Module) -> None:
        """Casts what is stale. model: the stage."""
        if not self.stale:
            return
        if isinstance(model, FSDPModule) and not self._copies:
            self._gather_in_float8(model)
        self.stale = False
        cast = [local(parameter.detach()).to(self.compute) for parameter in self.parameters]
        made = [float8_copy(shard, largest) for shard, largest in zip(cast, self._largest(cast).unbind(), strict=True)]
        if self._copies:  # into the same memory, for which layers were compiled
            for copy, new in zip(self._copies, made, strict=True):
                copy.values.copy_(new.values)
                copy.scale.copy_(new.scale)
            return
        self._copies = made
        if not isinstance(model, FSDPModule):
            for layer, copy in zip(self.layers, self._copies, strict=True):
                layer.float8_copy = copy

    def _largest(self, shards: Sequence[Tensor]) -> Tensor:
        """Largest element of each weight, over all its data and context shards: one collective."""
        zero = torch.zeros((), dtype=self.compute, device=self.mesh.device)
        maxima = torch.stack([shard.abs().amax() if shard.numel() else zero for shard in shards])
        grid = self.mesh.data_grid
        if grid is not None and grid.size(grid.ndim - 1) > 1:
            dist.all_reduce(maxima, dist.ReduceOp.MAX, group=grid.get_group(grid.ndim - 1))
        return maxima

    def _gather_in_float8(self, model: FSDPModule) -> None:
        """FSDP asks the local tensor of a shard for what it gathers. Its own preparation, which may replace that
        tensor, comes first."""
        state = model._get_fsdp_state()
        state._lazy_init()
        place_of = {id(parameter): place for place, parameter in enumerate(self.parameters)}
        for unit in state._state_ctx.all_states:
            for group in parameter_groups(unit):
                for fsdp_parameter in group.fsdp_params:
                    place = place_of.get(id(fsdp_parameter.sharded_param))
                    if place is not None:
                        shard: Any = fsdp_parameter.sharded_param._local_tensor
                        rows = fsdp_parameter.padded_sharded_param_size[0]
                        shard.fsdp_pre_all_gather = partial(_before_gather, self._copies_now, place, rows)
                        shard.fsdp_post_all_gather = _after_gather
                        fsdp_parameter._init_extensions()

    def _copies_now(self) -> Sequence[Float8Copy]:
        return self._copies


def _before_gather(copies: Any, place: int, rows: int, mesh: Any) -> tuple[tuple[Tensor, ...], Any]:
    """This rank's shard, with as many rows as the longest shard has, and what the others need not send."""
    copy = copies()[place]
    values = copy.values
    if len(values) < rows:
        padded = values.new_zeros((rows, *values.shape[1:]), dtype=torch.uint8)
        padded[: len(values)] = values.view(torch.uint8)
        values = padded.view(values.dtype)
    return (values.contiguous(),), copy.scale


def _after_gather(
    gathered: tuple[Tensor, ...], scale: Tensor, dtype: torch.dtype, *, out: Tensor | None = None
) -> tuple[Tensor, tuple[Tensor, ...]] | None:
    """The weight; out: the one of an earlier gather, into whose memory FSDP has gathered again."""
    if out is not None:
        weight: Any = getattr(out, "_local_tensor", out)  # not a detached copy, which FSDP would not see
        weight.copy = Float8Copy(weight.copy.values, scale)
        return None
    return Float8Weight(Float8Copy(gathered[0], scale), dtype), ()


Weights = Literal["drawn", "empty", "meta"]


@dataclass
class LocalModel:
    """stages: by stage number. parameters: what the optimizer updates and a checkpoint saves, by name.

    A tied table on both ends of a pipeline is two parameters with one name. On two ranks, `tie` is the group of both:
    their gradients are summed and both get the same update. On one rank (V-shaped schedules) `tied_copy` is added to
    the first and takes its value after the update.

    stream: brings in the weights of the layers where they lie in host memory or on disk. float8: those in 8 bits, of
    each stage. keeps_gradients: their memory stays where it is from step to step, for recorded passes."""

    stages: dict[int, Transformer]
    parameters: dict[str, nn.Parameter]
    tied_copy: nn.Parameter | None = None
    tied_peer: "TiedPeer | None" = None
    excluded_from_norm: frozenset[str] = field(default_factory=frozenset)
    stream: WeightStream | None = None
    float8: list[Float8Weights] = field(default_factory=list)
    keeps_gradients: bool = False

    @property
    def sequence_length(self) -> int:
        return next(iter(self.stages.values())).config.sequence_length

    @property
    def config(self) -> ModelConfig:
        return next(iter(self.stages.values())).config

    @property
    def weights(self) -> dict[str, Tensor]:
        """Tensors that a checkpoint saves and loads, by name: the parameters, or their values in the store where they
        are streamed."""
        stored = {} if self.stream is None else self.stream.stored
        return {
            name: stored_like(stored[name], parameter) if name in stored else parameter.detach()
            for name, parameter in self.parameters.items()
        }

    def release_pages(self) -> None:
        """After a checkpoint was saved or loaded: gives back the memory of what was read of a file of weights."""
        if self.stream is not None:
            self.stream.store.release_pages()

    @property
    def norm_names(self) -> list[str]:
        """Names of the parameters whose gradients this process adds to the global norm, so that a tied table is counted
        once."""
        return [name for name in self.parameters if name not in self.excluded_from_norm]

    @property
    def norm_parameters(self) -> list[nn.Parameter]:
        return [self.parameters[name] for name in self.norm_names]

    @property
    def tied_names(self) -> frozenset[str]:
        """Parameters whose gradients are summed with those of another after the backward pass."""
        return frozenset() if self.tied_copy is None and self.tied_peer is None else frozenset({"embedding.weight"})

    @property
    def has_experts(self) -> bool:
        return any(part.config.has_experts for part in self.stages.values())

    @property
    def buffers(self) -> dict[str, Tensor]:
        """Tensors of a checkpoint that no optimizer updates, by name."""
        return {name: value for part in self.stages.values() for name, value in saved_buffers(part).items()}

    @torch.no_grad()
    def fill_missing_gradients(self, except_for: Collection[str] = ()) -> None:
        """Zeros for parameters that the objective does not use, such as the head's in a classification."""
        own = [parameter for name, parameter in self.parameters.items() if name not in except_for]
        for parameter in [*own, *([] if self.tied_copy is None else [self.tied_copy])]:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)

    @torch.no_grad()
    def sum_tied_gradients(self) -> None:
        table = self.parameters.get("embedding.weight")
        if table is None:
            return
        if self.tied_copy is not None:
            local_gradient(table).add_(local_gradient(self.tied_copy))
        elif self.tied_peer is not None:
            self.tied_peer.add_gradient(local_gradient(table))

    @torch.no_grad()
    def update_copies(self) -> None:
        """After an update or a load: copies the embedding to the tied head of the same rank; weights in 8 bits are cast
        before the next pass."""
        for weights in self.float8:
            weights.stale = True
        if self.tied_copy is not None:
            local(self.tied_copy.detach()).copy_(local(self.parameters["embedding.weight"].detach()))

    @torch.no_grad()
    def clear_gradients(self) -> None:
        """For the next step: none, or zeros where their memory is kept."""
        copies = () if self.tied_copy is None else (self.tied_copy,)
        gradients = [parameter.grad for parameter in (*self.parameters.values(), *copies)]
        if self.keeps_gradients:
            torch._foreach_zero_([gradient for gradient in gradients if gradient is not None])
            return
        for parameter in (*self.parameters.values(), *copies):
            parameter.grad = None


def build_local_model(
    config: ModelConfig,
    vocab_size: int,
    train: TrainConfig,
    mesh: Mesh,
    seed: int,
    weights: Weights = "drawn",
) -> LocalModel:
    """Builds, initializes, compiles (by layer) and shards the stages of this process.

    seed: of the initial weights and of dropout. weights: drawn; empty, for a checkpoint that fills them; or meta: they
    stay on the meta device. Each process makes its own shards only."""
    layout, precision = train.layout, PRECISIONS[train.precision]
    streams = layout.offload.streams_weights and weights != "meta"
    if mesh.device.type == "cuda":
        # In 16 bits what is computed in float32 (router, scan) has TF32 products: 10 bits, more than their inputs have.
        torch.backends.cuda.matmul.allow_tf32 = precision.compute.itemsize == 2
    options = ComputeOptions(precision.compute, seed, train.z_loss, train.float8)
    stage_specs = split_model(config, vocab_size, layout)
    stages, float8 = {}, []
    for stage in stages_of_rank(layout, mesh.pipeline.rank):
        model = Transformer(config, vocab_size, mesh, layout, stage_specs[stage], options)
        if train.compile:
            compile_layers(model, mesh)
        if mesh.distributed:
            shard_over_data(model, layout, mesh, precision.compute, precision.reduce)
        if weights == "drawn" and not streams:
            initialize(model, seed, mesh.device, precision.store)
        elif weights == "empty" and not streams:
            fill(model, empty_values(mesh.device, precision.store))
        if weights != "meta" and not streams and not mesh.distributed:  # FSDP lays out its own
            place_joint_weights(model)
        # Compiled layers take no tensors of a class of our own: under FSDP they cast what was gathered in 16 bits.
        if train.float8 and weights != "meta" and not (train.compile and mesh.distributed):
            float8.append(Float8Weights(model, mesh, precision.compute))
        stages[stage] = model
    stream = None
    if streams:
        folder = Path(layout.offload.folder or tempfile.gettempdir())
        (only,) = stages.values()
        stream = WeightStream(make_store(layout.offload.parameters, folder, mesh.device), mesh.device)
        initialize_streamed(only, stream, seed, mesh.device, precision.store)
    local_model = _with_one_name_each(stages, config, layout, mesh)
    local_model.stream, local_model.float8 = stream, float8
    return local_model


# Layers: a step of 12 took 12.3, 10.9 and 9.8 ms of a host with groups of 1, 4 and 12, compiling 4, 10 and 26 s.
COMPILED_TOGETHER = 4


def compile_layers(model: Transformer, mesh: Mesh) -> None:
    """Compiles the layers, several as one function where nothing stands between them: a process alone starts fewer
    functions, each of which costs its host 0.3 ms a pass (an H200's, 2026-11-28). FSDP and recomputation take each
    layer for itself; a layer inside which FSDP gathers (experts, scans) is several functions, of which recompute:
    operators keeps nothing.

    One function serves all groups; those that differ (by windows, or by number for dropout) need a graph each."""
    torch._dynamo.config.recompile_limit = max(torch._dynamo.config.recompile_limit, 2 * model.config.layers)
    dynamic = False if any(mixer_class(name).static_shapes for name in model.config.used_mixers) else None
    if mesh.distributed or any(layer.hook is not NO_HOOK for layer in model.layers.values()):
        for layer in model.layers.values():
            if isinstance(layer.hook, RecomputedOperators) and not (mesh.distributed and gathers_inside(model, layer)):
                layer.hook = CompiledOperators(dynamic)
            else:
                layer.compute = torch.compile(layer.compute, dynamic=dynamic)  # type: ignore[method-assign]
        return
    groups = -(-len(model.layers) // COMPILED_TOGETHER)
    model.layers_at_once = -(-len(model.layers) // groups)  # of one size, where that is possible
    model.run_layers = torch.compile(run_layers, dynamic=dynamic)


def _with_one_name_each(
    stages: dict[int, Transformer], config: ModelConfig, layout: LayoutConfig, mesh: Mesh
) -> LocalModel:
    parameters: dict[str, nn.Parameter] = {}
    tied_copy = None
    for model in stages.values():
        for name, parameter in model.named_parameters():
            name = stored_name(name, config)
            if name in parameters:
                tied_copy = parameter
            else:
                parameters[name] = parameter
    tied_apart = config.tied_embeddings and layout.pipeline > 1 and tied_copy is None
    if not (tied_apart and stages_of_rank(layout, 0)[-1] != layout.num_stages - 1):
        return LocalModel(stages, parameters, tied_copy)
    peer = _tied_peer(mesh)
    is_last = layout.num_stages - 1 in stages
    return LocalModel(stages, parameters, None, peer, frozenset({"embedding.weight"} if is_last else ()))


@dataclass(frozen=True)
class TiedPeer:
    """The rank of the pipeline group that holds the other copy of a tied table."""

    group: dist.ProcessGroup | None
    rank: int

    def add_gradient(self, gradient: Tensor) -> None:
        """Both ranks have the sum afterwards. An exchange in the pipeline's group, which exists already: a group for
        each pair would be made by every process, hundreds of them in a large run."""
        sent, received = gradient.contiguous(), torch.empty_like(gradient, memory_format=torch.contiguous_format)
        works = dist.batch_isend_irecv(
            [
                dist.P2POp(dist.isend, sent, group=self.group, group_peer=self.rank),
                dist.P2POp(dist.irecv, received, group=self.group, group_peer=self.rank),
            ]
        )
        for work in works:
            work.wait()
        gradient.add_(received)


def _tied_peer(mesh: Mesh) -> TiedPeer | None:
    """The first and the last pipeline rank hold the tied table; None on the ranks between them."""
    last = mesh.pipeline.size - 1
    if mesh.pipeline.rank not in (0, last):
        return None
    return TiedPeer(mesh.pipeline.group, last - mesh.pipeline.rank)


# Mixed precision: the dtypes of stored parameters, of the computation and of gradient reduction.


@dataclass(frozen=True)
class Precision:
    store: torch.dtype
    compute: torch.dtype
    reduce: torch.dtype


PRECISIONS = {
    "fp64": Precision(torch.float64, torch.float64, torch.float64),
    "fp32": Precision(torch.float32, torch.float32, torch.float32),
    "bf16": Precision(torch.float32, torch.bfloat16, torch.float32),
    "fp16": Precision(torch.float32, torch.float16, torch.float32),
}

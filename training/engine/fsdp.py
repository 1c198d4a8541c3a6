"""Data parallelism: every block's parameters sharded over the data ranks with FSDP2, also where there is only one."""

from collections.abc import Sequence
from itertools import pairwise
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import (
    FSDPModule,
    MixedPrecisionPolicy,
    fully_shard,
    register_fsdp_forward_method,
)
from torch.distributed.fsdp._fully_shard._fsdp_api import ReduceScatter
from torch.distributed.tensor import Shard

from gristmill.training.config.layout import LayoutConfig
from gristmill.training.config.mixer import NO_MIXER, Mixer
from gristmill.training.model.layer import Layer
from gristmill.training.model.moe.mixture import MixtureOfExperts
from gristmill.training.model.transformer import Transformer
from gristmill.training.parallel.collectives import reduce_scatter
from gristmill.training.parallel.mesh import Mesh, local
from gristmill.training.planner.costs.parameters import expert_shard_dim


def _shard_mixture(mixture: MixtureOfExperts, mesh: Mesh, policy: MixedPrecisionPolicy, reshard: bool) -> None:
    """Experts over the ranks that hold the same ones; the router by itself, so that its weight is not cast."""
    grid = mesh.expert_data_grid
    assert grid is not None and mesh.data_grid is not None, "there are process groups"
    ranks = grid.size(grid.ndim - 1)

    def place(parameter: nn.Parameter) -> Shard:
        return Shard(expert_shard_dim(local(parameter).shape, ranks))

    fully_shard(mixture.experts, mesh=grid, shard_placement_fn=place, mp_policy=policy, reshard_after_forward=reshard)
    router_policy = MixedPrecisionPolicy(reduce_dtype=policy.reduce_dtype, cast_forward_inputs=False)
    fully_shard(mixture.router, mesh=mesh.data_grid, mp_policy=router_policy, reshard_after_forward=reshard)


def _shard_fp32_parts(layer: Layer, mixer: Mixer, width: int, mesh: Mesh, policy: MixedPrecisionPolicy) -> None:
    """The modules whose parameters the mixer declares fp32, by themselves, so that they are not cast."""
    assert layer.mixer is not None
    exact = MixedPrecisionPolicy(reduce_dtype=policy.reduce_dtype, cast_forward_inputs=False)
    for path in sorted({parameter.name.rpartition(".")[0] for parameter in mixer.parameters(width) if parameter.fp32}):
        fully_shard(layer.mixer.get_submodule(path), mesh=mesh.data_grid, mp_policy=exact, reshard_after_forward=False)


def gathers_inside(model: Transformer, layer: Layer) -> bool:
    """Whether modules inside the layer are FSDP units of their own."""
    name = model.config.mixer_of(layer.index)
    if layer.has_experts or name == NO_MIXER:
        return layer.has_experts
    return any(parameter.fp32 for parameter in model.config.mixer_named(name).parameters(model.config.width))


def shard_over_data(
    model: Transformer, layout: LayoutConfig, mesh: Mesh, compute: torch.dtype, reduce: torch.dtype
) -> None:
    """Applies FSDP2 to each layer and to the head, and to embedding and final norm as one unit (with the head where
    they share the table, which is one parameter). So the head's gradients are reduced while the layers' are computed.

    Gradients are summed, not averaged: the loss is already divided by the tokens of all ranks."""
    policy = MixedPrecisionPolicy(param_dtype=compute, reduce_dtype=reduce, cast_forward_inputs=False)
    for index, layer in model.layers.items():
        name = model.config.mixer_of(int(index))
        if name != NO_MIXER:
            _shard_fp32_parts(layer, model.config.mixer_named(name), model.config.width, mesh, policy)
        if isinstance(layer.mlp, MixtureOfExperts):
            _shard_mixture(layer.mlp, mesh, policy, layout.reshards)
        fully_shard(layer, mesh=mesh.data_grid, mp_policy=policy, reshard_after_forward=layout.reshards)
    shares_table = model.config.tied_embeddings and model.embedding is not None
    if model.head is not None and not shares_table:
        fully_shard(model.head, mesh=mesh.data_grid, mp_policy=policy, reshard_after_forward=False)
        register_fsdp_forward_method(model.head, "inputs")
    fully_shard(model, mesh=mesh.data_grid, mp_policy=policy, reshard_after_forward=False)
    sum_gradients(model)
    _prefetch(model, layout.offload.streams_weights)


def _prefetch(model: Transformer, streams: bool) -> None:
    """Each layer's weights are gathered while the layer before it in the pass computes. streams: they arrive from the
    host only when the layer begins, so none is gathered before."""
    layers: list[list[Any]] = [
        [module for module in layer.modules() if isinstance(module, FSDPModule)] for layer in model.layers.values()
    ]
    if streams:
        for units in layers:
            for unit in units:
                unit.set_modules_to_backward_prefetch([unit])  # an empty list leaves it to torch's own order
        return
    for units, following in pairwise(layers):
        units[0].set_modules_to_forward_prefetch(following)
        following[0].set_modules_to_backward_prefetch(units)
    if layers:
        cast(FSDPModule, model).set_modules_to_forward_prefetch(layers[0])
        if isinstance(model.head, FSDPModule):
            model.head.set_modules_to_backward_prefetch(layers[-1])


def sum_gradients(model: nn.Module) -> None:
    """Makes FSDP sum gradients over the data ranks. The plain sum is forced: a factor of 1 would be a scaled sum, which
    gloo lacks and NCCL computes in slower kernels. On one rank torch divides by any factor, also 1, but not by none."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_force_sum_reduction_for_comms(True)
            for group in parameter_groups(module._get_fsdp_state()):
                if group.mesh_info.mesh.size() > 1:
                    module.set_gradient_divide_factor(1.0)
                if group.device.type == "cpu":
                    module.set_custom_reduce_scatter(_Exchanged())


def parameter_groups(state: Any) -> list[Any]:
    """FSDP's groups of the parameters of one module; torch 2.11 has one or none."""
    if hasattr(state, "_fsdp_param_groups"):
        return list(state._fsdp_param_groups)
    return [] if state._fsdp_param_group is None else [state._fsdp_param_group]


class _Exchanged(ReduceScatter):
    """`collectives.reduce_scatter` as FSDP calls it, always with a sum."""

    def allocate(self, size: Sequence[int | torch.SymInt], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, op: Any, async_op: bool = False
    ) -> None:
        reduce_scatter(output_tensor, input_tensor, group)

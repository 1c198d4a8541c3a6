"""Data parallelism: every block's parameters sharded over the data ranks with FSDP2, also where there is only one."""

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import Shard

from gristmill.training.costs.parameters import expert_shard_dim
from gristmill.training.layout_config import LayoutConfig
from gristmill.training.mixer import Mixer
from gristmill.training.mixer_registry import NO_MIXER
from gristmill.training.model.layer import Layer
from gristmill.training.model.mixture import MixtureOfExperts
from gristmill.training.model.transformer import Transformer
from gristmill.training.parallel.mesh import Mesh


def _shard_mixture(mixture: MixtureOfExperts, mesh: Mesh, policy: MixedPrecisionPolicy, reshard: bool) -> None:
    """Experts over the ranks that hold the same ones; the router by itself, so that its weight is not cast."""
    grid = mesh.expert_data_grid
    options = {"mp_policy": policy, "reshard_after_forward": reshard}
    ranks = grid.size(grid.ndim - 1)

    def place(parameter: nn.Parameter) -> Shard:
        return Shard(expert_shard_dim(parameter.to_local().shape, ranks))

    fully_shard(mixture.experts, mesh=grid, shard_placement_fn=place, **options)
    router_policy = MixedPrecisionPolicy(reduce_dtype=policy.reduce_dtype, cast_forward_inputs=False)
    fully_shard(mixture.router, mesh=mesh.data_grid, mp_policy=router_policy, reshard_after_forward=reshard)


def _shard_fp32_parts(layer: Layer, mixer: Mixer, width: int, mesh: Mesh, policy: MixedPrecisionPolicy) -> None:
    """The modules whose parameters the mixer declares fp32, by themselves, so that they are not cast."""
    exact = MixedPrecisionPolicy(reduce_dtype=policy.reduce_dtype, cast_forward_inputs=False)
    for path in sorted({each.name.rpartition(".")[0] for each in mixer.parameters(width) if each.fp32}):
        fully_shard(layer.mixer.get_submodule(path), mesh=mesh.data_grid, mp_policy=exact, reshard_after_forward=False)


def shard_over_data(
    model: Transformer, layout: LayoutConfig, mesh: Mesh, compute: torch.dtype, reduce: torch.dtype
) -> None:
    """Applies FSDP2 to each layer, and to embedding, final norm and head as one unit (a tied table is one parameter).

    Gradients are summed, not averaged: the loss is already divided by the tokens of all ranks. With a pipeline nothing
    is gathered anew by micro-batch."""
    policy = MixedPrecisionPolicy(param_dtype=compute, reduce_dtype=reduce, cast_forward_inputs=False)
    reshard = layout.reshard_after_forward and layout.pipeline == 1
    for index, layer in model.layers.items():
        name = model.config.mixer_of(int(index))
        if name != NO_MIXER:
            _shard_fp32_parts(layer, model.config.mixer_named(name), model.config.width, mesh, policy)
        if layer.has_experts:
            _shard_mixture(layer.mlp, mesh, policy, reshard)
        fully_shard(layer, mesh=mesh.data_grid, mp_policy=policy, reshard_after_forward=reshard)
    fully_shard(model, mesh=mesh.data_grid, mp_policy=policy, reshard_after_forward=False)
    sum_gradients(model)


def sum_gradients(model: nn.Module) -> None:
    """Makes FSDP sum gradients over the data ranks. The plain sum is forced: a factor of 1 would be a scaled sum, which
    gloo lacks and NCCL computes in slower kernels."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)

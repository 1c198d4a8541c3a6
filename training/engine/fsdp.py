"""Data parallelism: every block's parameters sharded over the data ranks with FSDP2, also where there is only one."""

import torch
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

from gristmill.training.layout_config import LayoutConfig
from gristmill.training.model.transformer import Transformer
from gristmill.training.parallel.mesh import Mesh


def shard_over_data(
    model: Transformer, layout: LayoutConfig, mesh: Mesh, compute: torch.dtype, reduce: torch.dtype
) -> None:
    """Applies FSDP2 to each layer, and to embedding, final norm and head as one unit (a tied table is one parameter).

    Gradients are summed, not averaged: the loss is already divided by the tokens of all ranks. Their sum is forced on
    gloo, which lacks the scaled sum that a factor of 1 would need. With a pipeline nothing is gathered anew by
    micro-batch."""
    policy = MixedPrecisionPolicy(param_dtype=compute, reduce_dtype=reduce, cast_forward_inputs=False)
    reshard = layout.reshard_after_forward and layout.pipeline == 1
    for layer in model.layers.values():
        fully_shard(layer, mesh=mesh.data_grid, mp_policy=policy, reshard_after_forward=reshard)
    fully_shard(model, mesh=mesh.data_grid, mp_policy=policy, reshard_after_forward=False)
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(mesh.device.type == "cpu")

"""The weights of float8 layers in 8 bits: cast once after each update, and gathered so by FSDP."""

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from gristmill.training.parallel.float8 import Float8Copy, Float8Weight, float8_copy
from gristmill.training.parallel.local import local
from gristmill.training.parallel.mesh import Mesh
from gristmill.training.parallel.tensor import ColumnParallelLinear, RowParallelLinear


class Float8Weights:
    """Casts before a forward pass, where `stale` was set since the last one. Without FSDP each layer gets the copy of
    its weight; under FSDP each rank casts its shard, by the largest element of all shards, and gathers carry 8 bits."""

    def __init__(self, model: nn.Module, mesh: Mesh, compute: torch.dtype):
        self.mesh, self.compute = mesh, compute
        self.layers = [each for each in model.modules() if isinstance(each, ColumnParallelLinear | RowParallelLinear)]
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
        """Of each weight, over all its data and context shards: one collective."""
        zero = torch.zeros((), dtype=self.compute, device=self.mesh.device)
        found = torch.stack([shard.abs().amax() if shard.numel() else zero for shard in shards])
        grid = self.mesh.data_grid
        if grid is not None and grid.size(grid.ndim - 1) > 1:
            dist.all_reduce(found, dist.ReduceOp.MAX, group=grid.get_group(grid.ndim - 1))
        return found

    def _gather_in_float8(self, model: FSDPModule) -> None:
        """FSDP asks the local tensor of a shard for what it gathers. Its own preparation, which may replace that
        tensor, comes first."""
        state = model._get_fsdp_state()
        state._lazy_init()
        place_of = {id(parameter): place for place, parameter in enumerate(self.parameters)}
        for unit in state._state_ctx.all_states:
            for group in unit._fsdp_param_groups:
                for each in group.fsdp_params:
                    place = place_of.get(id(each.sharded_param))
                    if place is not None:
                        shard: Any = each.sharded_param._local_tensor
                        rows = each.padded_sharded_param_size[0]
                        shard.fsdp_pre_all_gather = partial(_before_gather, self._copies_now, place, rows)
                        shard.fsdp_post_all_gather = _after_gather
                        each._init_extensions()

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

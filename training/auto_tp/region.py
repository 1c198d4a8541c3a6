"""What runs between a layer sharded by outputs and the next one sharded by inputs, on DTensors."""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves, tree_map

# B samples, H heads, T tokens, K head width; Ht = this tensor rank's share

WHOLE = "_auto_tp_whole"  # attribute of a tensor: itself as a DTensor


def as_whole(x: Tensor, grid: DeviceMesh) -> DTensor:
    """A tensor that is whole and equal on all ranks as a DTensor; the same one in every call, so that the gradients of
    all its uses are summed on this rank before they are summed over the ranks."""
    found: DTensor | None = getattr(x, WHOLE, None)
    if found is None or (torch.is_grad_enabled() and x.requires_grad and not found.requires_grad):
        found = DTensor.from_local(x, grid, [Replicate()], run_check=False)
        if not isinstance(x, torch.nn.Parameter):
            setattr(x, WHOLE, found)
    return found


class ShardedRegion(TorchFunctionMode):
    """While it is active, operations on DTensors take plain tensors (masks, rotary tables, norm weights) as whole ones,
    and attention runs on each rank's heads without DTensor, whose rules do not cover all kernels."""

    def __init__(self, grid: DeviceMesh):
        super().__init__()
        self.grid = grid

    def __torch_function__(self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if not any(isinstance(leaf, DTensor) for leaf in tree_leaves((args, kwargs))):
            return func(*args, **kwargs)
        if func is F.scaled_dot_product_attention:
            return self._attention(*args, **kwargs)
        if func is torch.cat:  # transformers' caches begin with empty tensors of one dimension
            args = [each for each in args[0] if each.ndim > 1 or each.numel()], *args[1:]
        args, kwargs = tree_map(self._whole, (args, kwargs))
        return func(*args, **kwargs)

    def _whole(self, leaf: Any) -> Any:
        if isinstance(leaf, Tensor) and not isinstance(leaf, DTensor) and leaf.ndim:
            return as_whole(leaf, self.grid)
        return leaf

    def _attention(
        self, q_BHTK: Tensor, k_BHTK: Tensor, v_BHTK: Tensor, attn_mask: Tensor | None = None, *rest: Any, **named: Any
    ) -> DTensor:
        heads = q_BHTK.shape[1]
        q_BHtTK, k_BHtTK, v_BHtTK = (self._own_heads(each, heads) for each in (q_BHTK, k_BHTK, v_BHTK))
        if attn_mask is not None and attn_mask.ndim == 4 and attn_mask.shape[1] > 1:
            attn_mask = self._own_heads(attn_mask, heads)
        elif isinstance(attn_mask, DTensor):
            attn_mask = attn_mask.full_tensor()
        y_BHtTK = F.scaled_dot_product_attention(q_BHtTK, k_BHtTK, v_BHtTK, attn_mask, *rest, **named)
        return DTensor.from_local(y_BHtTK, self.grid, [Shard(1)], run_check=False)

    def _own_heads(self, x_BHTK: Tensor, heads: int) -> Tensor:
        """This rank's share of the heads. Key/value heads that are too few to split are repeated first."""
        whole = x_BHTK if isinstance(x_BHTK, DTensor) else as_whole(x_BHTK, self.grid)
        if whole.shape[1] != heads and not whole.placements[0].is_shard(1):
            whole = whole.repeat_interleave(heads // whole.shape[1], dim=1)
        return whole.redistribute(placements=[Shard(1)]).to_local()

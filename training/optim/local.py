"""Local shards of parameters and gradients as plain tensors. Dispatching each small operation through
DTensor costs more than the operation, and every optimizer but Muon works element by element."""

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor


def local(tensor: Tensor) -> Tensor:
    """This process's shard, sharing memory with the DTensor."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


@torch.no_grad()
def stored_like(piece: Tensor, parameter: Tensor) -> Tensor:
    """A shard of optimizer state as a DTensor placed like its parameter, sharing memory with the shard."""
    if not isinstance(parameter, DTensor):
        return piece
    return DTensor.from_local(
        piece,
        parameter.device_mesh,
        parameter.placements,
        run_check=False,
        shape=parameter.shape,
        stride=parameter.stride(),
    )


def local_shard(whole: Tensor, parameter: Tensor) -> Tensor:
    """This process's shard of a full tensor, sharded like the parameter: over tensor ranks first, then over data
    ranks."""
    if not isinstance(parameter, DTensor):
        return whole
    grid = parameter.device_mesh
    for axis, placement in reversed(list(enumerate(parameter.placements))):
        if not placement.is_replicate():  # Shard, or the strided kind FSDP makes of a dimension cut twice
            whole = _chunk(whole, grid.size(axis), grid.get_local_rank(axis), placement.dim)
    return whole


def _chunk(tensor: Tensor, parts: int, index: int, dim: int) -> Tensor:
    """The index-th of `parts` equal runs, rounded up, so that the last may be shorter or empty."""
    length = tensor.shape[dim]
    size = -(-length // parts)
    start = min(index * size, length)
    return tensor.narrow(dim, start, min(size, length - start))

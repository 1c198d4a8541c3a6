"""Local shards of parameters and gradients as plain tensors. Dispatching each small operation through
DTensor costs more than the operation, and every optimizer but Muon works element by element."""

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor


def local(tensor: Tensor) -> Tensor:
    """This process's shard, sharing memory with the DTensor."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


@torch.no_grad()
def stored_like(shard: Tensor, parameter: Tensor) -> Tensor:
    """A shard of optimizer state, maybe in host memory, as a DTensor placed like its parameter, sharing memory with the
    shard."""
    if not isinstance(parameter, DTensor):
        return shard
    if shard.device.type != parameter.device.type:  # from_local would copy it to the mesh's device; FSDP2 does so too
        return DTensor(shard, parameter._spec, requires_grad=False)  # type: ignore[call-arg]
    return DTensor.from_local(
        shard,
        parameter.device_mesh,
        parameter.placements,
        run_check=False,
        shape=parameter.shape,
        stride=parameter.stride(),
    )


def local_shard(full: Tensor, parameter: Tensor) -> Tensor:
    """This process's shard of a full tensor, sharded like the parameter: over tensor ranks first, then over data
    ranks."""
    if not isinstance(parameter, DTensor):
        return full
    grid = parameter.device_mesh
    for axis, placement in reversed(list(enumerate(parameter.placements))):
        if not placement.is_replicate():  # Shard, or the strided kind that FSDP makes of a dimension sharded twice
            full = _chunk(full, grid.size(axis), grid.get_local_rank(axis), placement.dim)
    return full


def _chunk(tensor: Tensor, parts: int, index: int, dim: int) -> Tensor:
    """The index-th of `parts` chunks of equal size, rounded up: the last may be shorter or empty."""
    length = tensor.shape[dim]
    size = -(-length // parts)
    start = min(index * size, length)
    return tensor.narrow(dim, start, min(size, length - start))

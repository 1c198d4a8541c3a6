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
    if parameter.device.type not in (
        "meta",
        shard.device.type,
    ):  # from_local would copy it to the mesh's device; FSDP2 does so too
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
    for dim, parts, index in _cuts(parameter):
        full = _chunk(full, parts, index, dim)
    return full


def own_rows(parameter: Tensor) -> range:
    """The rows (dimension 0) of the full tensor that this process's shard is in."""
    rows = range(parameter.shape[0])
    for dim, parts, index in _cuts(parameter):
        if dim == 0:
            size = -(-len(rows) // parts)
            rows = rows[min(index * size, len(rows)) : min((index + 1) * size, len(rows))]
    return rows


def other_dims_of_shard(rows: Tensor, parameter: Tensor) -> Tensor:
    """This process's shard, from its `own_rows`."""
    for dim, parts, index in _cuts(parameter):
        if dim:
            rows = _chunk(rows, parts, index, dim)
    return rows


def _cuts(parameter: Tensor) -> list[tuple[int, int, int]]:
    """(dimension, number of chunks, this process's chunk) in the order in which they are taken."""
    if not isinstance(parameter, DTensor):
        return []
    grid, placed = parameter.device_mesh, list(enumerate(parameter.placements))
    return [
        (placement.dim, grid.size(axis), grid.get_local_rank(axis))
        for axis, placement in reversed(placed)
        if not placement.is_replicate()  # Shard, or the strided kind that FSDP makes of a dimension sharded twice
    ]


def _chunk(tensor: Tensor, parts: int, index: int, dim: int) -> Tensor:
    """The index-th of `parts` chunks of equal size, rounded up: the last may be shorter or empty."""
    length = tensor.shape[dim]
    size = -(-length // parts)
    start = min(index * size, length)
    return tensor.narrow(dim, start, min(size, length - start))

"""Local shards of parameters and gradients as plain tensors. Dispatching each small operation through
DTensor costs more than the operation, and every optimizer but Muon works element by element."""

from collections.abc import Sequence

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
    for dim, part in enumerate(ranges_of_shard(parameter)):
        full = full.narrow(dim, part.start, len(part))
    return full


def own_rows(parameter: Tensor) -> range:
    """The rows (dimension 0) of the full tensor that this process's shard is in."""
    return ranges_of_shard(parameter)[0]


def other_dims_of_shard(rows: Tensor, parameter: Tensor) -> Tensor:
    """This process's shard, from its `own_rows`."""
    for dim, part in enumerate(ranges_of_shard(parameter)[1:], start=1):
        rows = rows.narrow(dim, part.start, len(part))
    return rows


def ranges_of_shard(parameter: Tensor, coordinates: Sequence[int] | None = None) -> list[range]:
    """The part of the full tensor, by dimension, that the process at these coordinates of the parameter's mesh holds
    (by default this process). Of [5, 4], its rows over 2 ranks, the second holds rows 3 to 5 and columns 0 to 4.

    Chunks of equal size, rounded up, are taken over the tensor ranks first: the last may be shorter or empty."""
    ranges = [range(length) for length in parameter.shape]
    if not isinstance(parameter, DTensor):
        return ranges
    grid = parameter.device_mesh
    own = grid.get_coordinate() if coordinates is None else coordinates
    assert own is not None, "this process is in the parameter's mesh"
    for axis, placement in reversed(list(enumerate(parameter.placements))):
        if placement.is_replicate():
            continue  # else Shard, or the strided kind that FSDP makes of a dimension sharded twice
        dim = placement.dim  # type: ignore[attr-defined]
        size = -(-len(ranges[dim]) // grid.size(axis))
        ranges[dim] = ranges[dim][own[axis] * size : (own[axis] + 1) * size]
    return ranges

"""The device mesh: processes as a grid with named axes, passed as a value."""

import logging
import math
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from gristmill.foundation.errors import InputError
from gristmill.training.config.layout import LayoutConfig


@dataclass(frozen=True)
class Axis:
    """Size of one axis, this process's rank on it and its process group (None on an axis of size 1)."""

    size: int = 1
    rank: int = 0
    group: dist.ProcessGroup | None = None


ALONE = Axis()


@dataclass(frozen=True)
class Mesh:
    """data is replicate x shard (the axis over which batches differ). context ranks have the same samples and other
    tokens of them.

    tensor_grid, key_value_grid and data_grid are the meshes of stored parameters: sharded over the tensor ranks; over
    as many of them as there are key/value heads, replicated over the rest; and sharded over the data and context ranks,
    over which gradients are summed. All three are None in a single process without a process group, where parameters
    are plain tensors. stage: the processes of this pipeline rank. ranks: int64[pipeline, the rest]."""

    device: torch.device
    pipeline: Axis = ALONE
    data: Axis = ALONE
    tensor: Axis = ALONE
    context: Axis = ALONE
    world: Axis = ALONE
    tensor_grid: DeviceMesh | None = None
    key_value_grid: DeviceMesh | None = None
    data_grid: DeviceMesh | None = None
    ranks: torch.Tensor | None = None
    expert: Axis = ALONE
    stage: Axis = ALONE
    expert_grid: DeviceMesh | None = None
    expert_data_grid: DeviceMesh | None = None

    @property
    def distributed(self) -> bool:
        return self.tensor_grid is not None

    @property
    def is_first(self) -> bool:
        """True on rank 0, which writes the files."""
        return self.world.rank == 0


def single_process(device: torch.device | str = "cpu") -> Mesh:
    return Mesh(torch.device(device))


def build_mesh(layout: LayoutConfig, num_kv_heads: int, device: torch.device, experts: bool = False) -> Mesh:
    """The mesh of the default process group: pipeline, replicate, shard, context, tensor, the last changing fastest, so
    that tensor ranks are neighbours. layout.rank_order was applied when the processes joined the group. experts: the
    model has some, so the groups for them are made.

    With fewer key/value heads than tensor ranks, consecutive ranks share one head: kv_shard x kv_copy = tensor."""
    kv_shard = math.gcd(num_kv_heads, layout.tensor)
    sizes = (layout.pipeline, layout.replicate, layout.shard, layout.context, kv_shard, layout.tensor // kv_shard)
    names = ("pipeline", "replicate", "shard", "context", "kv_shard", "kv_copy")
    ranks = torch.arange(math.prod(sizes)).reshape(sizes)
    grid = DeviceMesh(device.type, ranks, mesh_dim_names=names)
    world = Axis(dist.get_world_size(), dist.get_rank(), dist.group.WORLD)
    tensor_grid = grid["kv_shard", "kv_copy"]._flatten("tensor")
    sharded = grid["shard", "context"]._flatten("fsdp")
    batches = grid["replicate", "shard"]._flatten("data")
    return Mesh(
        device=device,
        pipeline=_axis(grid["pipeline"]),
        data=_axis(batches),
        tensor=_axis(tensor_grid),
        context=_axis(grid["context"]),
        world=world,
        stage=world if layout.pipeline == 1 else _axis(grid[names[1:]]._flatten("stage")),
        tensor_grid=tensor_grid,
        key_value_grid=grid["kv_shard", "kv_copy"],
        data_grid=grid["replicate", "fsdp"] if layout.replicate > 1 else sharded,
        ranks=ranks.flatten(1),
        **(_expert_mesh(layout, device) if experts else {}),
    )


def _expert_mesh(layout: LayoutConfig, device: torch.device) -> dict[str, Any]:
    """The ranks of a pipeline rank as expert_replicate x expert_shard x expert x expert_tensor, the last fastest."""
    shard = layout.stage_ranks // layout.expert_ranks // layout.expert_replicate
    sizes = (layout.pipeline, layout.expert_replicate, shard, layout.expert, layout.expert_tensor)
    names = ("expert_pipeline", "expert_replicate", "expert_shard", "expert", "expert_tensor")
    ranks = torch.arange(math.prod(sizes)).reshape(sizes)
    grid = DeviceMesh(device.type, ranks, mesh_dim_names=names)
    copied = layout.expert_replicate > 1
    return {
        "expert": _axis(grid["expert", "expert_tensor"]._flatten("expert_ranks")),
        "expert_grid": grid["expert", "expert_tensor"],
        "expert_data_grid": grid["expert_replicate", "expert_shard"] if copied else grid["expert_shard"],
    }


def silence_redistribution() -> None:
    """Silences torch's warnings about gathers of a dimension that is sharded twice, views of flattened axes, old names
    of collectives that its own FSDP uses, and views that the head returns, which nothing changes in place."""
    logging.getLogger("torch.distributed.tensor._redistribute").setLevel(logging.ERROR)
    warnings.filterwarnings("ignore", message=r"`torch\.distributed\.\w+` is deprecated", category=FutureWarning)
    warnings.filterwarnings("ignore", message="FSDP2-wrapped module .* returned a view", category=UserWarning)
    warnings.filterwarnings("ignore", message=".*flatten.*mesh", category=UserWarning)


def _axis(grid: DeviceMesh) -> Axis:
    return Axis(grid.size(), grid.get_local_rank(), grid.get_group())


# Local shards of parameters and gradients as plain tensors. Dispatching each small operation through DTensor costs
# more than the operation, and every optimizer but Muon works element by element.


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


# What rank 0 reads from disk, and all ranks must agree on.

Value = TypeVar("Value")


def broadcast_from_first(mesh: Mesh, value: Value) -> Value:
    """Rank 0's value on every rank. It must be picklable."""
    values = [value]
    if mesh.distributed:
        dist.broadcast_object_list(values, src=0)
    return values[0]


def check_on_first(mesh: Mesh, check: Callable[[], object]) -> None:
    """Runs a check of files on rank 0; if it fails, every rank raises the same InputError."""
    error = None
    if mesh.is_first:
        try:
            check()
        except InputError as found:
            error = str(found)
    error = broadcast_from_first(mesh, error)
    if error is not None:
        raise InputError(error)


# Float64 sums over all processes, so that all take the same decisions.


def sum_over_world(values: Sequence[Tensor | float], mesh: Mesh) -> Tensor:
    """Each value summed over all processes: float64[len(values)] on the device, which nothing waits for."""
    sums = torch.stack([_float64(value, mesh.device) for value in values])
    if mesh.distributed:
        dist.all_reduce(sums, group=mesh.world.group)
    return sums


def _float64(value: Tensor | float, device: torch.device) -> Tensor:
    """On the device. A number is filled in there: the copy that torch.tensor makes would wait for the GPU."""
    if isinstance(value, Tensor):
        return value.to(device, torch.float64)
    return torch.full((), value, dtype=torch.float64, device=device)

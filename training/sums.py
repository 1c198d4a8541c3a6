"""Float64 sums over all processes, so that all take the same decisions."""

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from gristmill.training.parallel.mesh import Mesh


def sum_over_world(values: Sequence[Tensor | float], mesh: Mesh) -> Tensor:
    """Each value summed over all processes: float64[len(values)] on the device, which nothing waits for."""
    sums = torch.stack([torch.as_tensor(value, dtype=torch.float64, device=mesh.device) for value in values])
    if mesh.distributed:
        dist.all_reduce(sums, group=mesh.world.group)
    return sums

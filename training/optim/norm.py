"""Global gradient norm over all processes, each element counted once, and gradient clipping."""

from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from gristmill.training.loss import upcast_dtype
from gristmill.training.optim.local import local
from gristmill.training.parallel.mesh import Mesh


@torch.no_grad()
def global_norm(parameters: Iterable[nn.Parameter], mesh: Mesh) -> Tensor:
    """Square root of the sum of squares. Parameters may lie on different meshes: each process adds its shards, divided
    by the number of processes that hold the same shard, and one all-reduce over the world sums them."""
    return norm_of_squares([square_sum(parameter) for parameter in parameters], mesh)


@torch.no_grad()
def square_sum(parameter: nn.Parameter) -> Tensor:
    """This process's share of the sum of squares of a parameter's gradient, float64."""
    gradient = local(parameter.grad)
    # By rows: a float32 norm of 50 million elements in one go is off by 0.4 % on CPU (torch 2.13).
    rows = torch.linalg.vector_norm(gradient, dim=-1, dtype=upcast_dtype(gradient))
    return rows.to(torch.float64).square().sum() / copies(parameter)


@torch.no_grad()
def norm_of_squares(squares: Iterable[Tensor], mesh: Mesh) -> Tensor:
    """The norm from each parameter's `square_sum`, in the parameters' order."""
    total = torch.zeros((), device=mesh.device, dtype=torch.float64)
    for each in squares:
        total += each
    if mesh.distributed:
        dist.all_reduce(total, group=mesh.world.group)
    return total.sqrt()


def clip(parameters: Iterable[nn.Parameter], norm: float, max_norm: float | None) -> None:
    """Scales all gradients so that their norm is at most `max_norm`."""
    if max_norm is not None and norm > max_norm:
        scale_gradients(parameters, max_norm / norm)


@torch.no_grad()
def scale_gradients(parameters: Iterable[nn.Parameter], factor: float) -> None:
    gradients = [local(parameter.grad) for parameter in parameters]
    if factor != 1 and gradients:
        torch._foreach_mul_(gradients, factor)


def copies(parameter: Tensor) -> int:
    """Number of processes that hold the same shard of the parameter."""
    if not isinstance(parameter, DTensor):
        return 1
    number = 1
    for axis, placement in enumerate(parameter.placements):
        if placement.is_replicate():
            number *= parameter.device_mesh.size(axis)
    return number

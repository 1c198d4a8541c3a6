"""What rank 0 reads from disk, and all ranks must agree on."""

from collections.abc import Callable
from typing import TypeVar

import torch.distributed as dist

from gristmill.foundation.errors import InputError
from gristmill.training.parallel.mesh import Mesh

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

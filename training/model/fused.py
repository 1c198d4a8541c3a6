"""Functions that a compiler makes into few kernels, on GPUs where each kernel reads and writes memory anew."""

from collections.abc import Callable
from functools import cache
from typing import Any

import torch


def fused(function: Callable[..., Any], tuned: bool = False) -> Callable[..., Any]:
    """The function compiled; within a compiled layer as it is, for there it is compiled with the layer.

    tuned: the compiler measures block sizes. For what reads all logits: as torch chooses them, its kernels reach a
    quarter of the bandwidth of an H200."""
    return function if torch.compiler.is_compiling() else compiled(function, tuned)


@cache
def compiled(function: Callable[..., Any], tuned: bool) -> Callable[..., Any]:
    return torch.compile(function, options={"coordinate_descent_tuning": True} if tuned else None)

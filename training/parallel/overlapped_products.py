"""Products of tensor-parallel layers that overlap with their collectives under sequence parallelism: the collective is
a ring, and while one rank's tokens travel, the product of those at hand is computed (Wang et al., ASPLOS 2023, "Overlap
Communication with Dependent Computation via Decomposition"; torch's async tensor parallelism).

A ring sends the bytes of the all-gather or reduce-scatter that it replaces, in n - 1 messages of one rank's tokens."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from gristmill.training.parallel.context import around_the_ring, pass_on
from gristmill.training.parallel.linear import matmul, product
from gristmill.training.parallel.mesh import Axis

# B batch, T tokens, D inputs, F outputs; a small t after a letter = this tensor rank's share


def gathered_products(x_BTtD: Tensor, weights: tuple[Tensor, ...], axis: Axis) -> tuple[Tensor, ...]:
    """x W^T [B, T, F] of all tokens with each weight [F, D], from this rank's tokens."""
    return _GatheredProducts.apply(x_BTtD, axis, *weights)


def scattered_product(x_BTFt: Tensor, weight_DFt: Tensor, axis: Axis) -> Tensor:
    """This rank's tokens [B, Tt, D] of the sum over the ranks of x W^T."""
    return _ScatteredProduct.apply(x_BTFt, weight_DFt, axis)


class _GatheredProducts(torch.autograd.Function):
    """Keeps the gathered input, as the layers do that it replaces."""

    @staticmethod
    def forward(ctx: Any, x_BTtD: Tensor, axis: Axis, *weights: Tensor) -> tuple[Tensor, ...]:
        x_BTD, made = _products_around(x_BTtD, weights, axis)
        ctx.save_for_backward(x_BTD, *weights)
        ctx.axis = axis
        return made

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        x_BTD, *weights = ctx.saved_tensors
        share = x_BTD.shape[1] // ctx.axis.size

        def of_rank(rank: int) -> Tensor:
            parts = [
                product(gradient[:, rank * share : (rank + 1) * share].contiguous(), weight.T)
                for gradient, weight in zip(gradients, weights, strict=True)
            ]
            return torch.stack(parts).sum(dim=0) if len(parts) > 1 else parts[0]

        by_x = _summed_around(of_rank, ctx.axis)
        return by_x, None, *(_by_weight(gradient, x_BTD) for gradient in gradients)


class _ScatteredProduct(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_BTFt: Tensor, weight_DFt: Tensor, axis: Axis) -> Tensor:
        ctx.save_for_backward(x_BTFt, weight_DFt)
        ctx.axis, share = axis, x_BTFt.shape[1] // axis.size
        return _summed_around(
            lambda rank: product(x_BTFt[:, rank * share : (rank + 1) * share].contiguous(), weight_DFt), axis
        )

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient_BTtD: Tensor) -> tuple[Tensor, Tensor, None]:
        x_BTFt, weight_DFt = ctx.saved_tensors
        gradient_BTD, (by_x,) = _products_around(gradient_BTtD, (weight_DFt.T,), ctx.axis)
        return by_x, _by_weight(gradient_BTD, x_BTFt), None


def _products_around(own_BTtD: Tensor, weights: tuple[Tensor, ...], axis: Axis) -> tuple[Tensor, tuple[Tensor, ...]]:
    """(the tensor of all tokens, its product with each weight); each rank's tokens are multiplied while the next
    travel."""
    own_BTtD = own_BTtD.contiguous()
    share = own_BTtD.shape[1]
    whole_BTD = own_BTtD.new_empty(len(own_BTtD), share * axis.size, own_BTtD.shape[2])
    made = [own_BTtD.new_empty(*whole_BTD.shape[:2], len(weight)) for weight in weights]
    for rank, part in around_the_ring(own_BTtD, axis):
        place = slice(rank * share, (rank + 1) * share)
        whole_BTD[:, place] = part
        for target, weight in zip(made, weights, strict=True):
            target[:, place] = product(part, weight)
    return whole_BTD, tuple(made)


def _summed_around(of_rank: Callable[[int], Tensor], axis: Axis) -> Tensor:
    """The sum over the ranks of what each computes for this one. What is for a rank begins at the rank after it and
    goes once around the ring; each rank adds its share, which it computes while the sum travels."""
    total = of_rank((axis.rank - 1) % axis.size)
    for step in range(2, axis.size + 1):
        waiting = pass_on(total, axis)
        own = of_rank((axis.rank - step) % axis.size)
        total = waiting.wait() + own
    return total


def _by_weight(gradient_BTF: Tensor, x_BTD: Tensor) -> Tensor:
    return matmul(gradient_BTF.flatten(0, 1).T, x_BTD.flatten(0, 1))

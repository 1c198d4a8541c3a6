"""Products beside the ring of their tokens: values and gradients of the synchronous layers, messages and bytes."""

from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from gristmill.training.parallel import context, tensor
from gristmill.training.parallel.collectives import gather_tokens, scatter_tokens
from gristmill.training.parallel.linear import product
from gristmill.training.parallel.mesh import Axis
from gristmill.training.parallel.tensor import gathered_products, scattered_product
from tests.support.forked_pool import ForkedPool

B, SHARE, D, F = 2, 3, 5, 4


def drawn(*shape: int, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed + dist.get_rank())
    return torch.randn(shape, generator=generator, dtype=torch.float64, requires_grad=True)


def synchronous(x: Tensor, weights: list[Tensor], down: Tensor) -> Tensor:
    x_BTD = gather_tokens(x, dist.group.WORLD)
    first, second = (product(x_BTD, weight) for weight in weights)
    return scatter_tokens(product(first * second, down), dist.group.WORLD)


def overlapped(x: Tensor, weights: list[Tensor], down: Tensor) -> Tensor:
    axis = Axis(dist.get_world_size(), dist.get_rank(), dist.group.WORLD)
    first, second = gathered_products(x, tuple(weights), axis)
    return scattered_product(first * second, down, axis)


def values_and_gradients(layers: Any) -> list[Tensor]:
    leaves = [drawn(B, SHARE, D), drawn(F, D, seed=10), drawn(F, D, seed=20), drawn(D, F, seed=30)]
    y = layers(leaves[0], leaves[1:3], leaves[3])
    y.backward(drawn(B, SHARE, D, seed=40).detach())
    return [y.detach(), *(leaf.grad for leaf in leaves)]


def both() -> tuple[list[Tensor], list[Tensor]]:
    return values_and_gradients(synchronous), values_and_gradients(overlapped)


@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_values_and_gradients_are_those_of_the_synchronous_layers(ranks: int, pool: ForkedPool) -> None:
    for expected, found in pool.run(ranks, both):
        for one, other in zip(expected, found, strict=True):
            torch.testing.assert_close(other, one, rtol=0, atol=1e-12)


def events() -> list[str]:
    """Of the layers' forward and backward pass: a message begins (">" with its bytes), arrives ("<"), a product ("*")
    with its tokens)."""
    found: list[str] = []

    def pass_on(sent: Tensor, axis: Axis, tag: int = 0) -> Any:
        found.append(f">{sent.nbytes}")
        waiting = context.Passing.wait
        passing = passed_on(sent, axis, tag)
        return mock.Mock(wait=lambda: (found.append("<"), waiting(passing))[1])

    def multiplied(x: Tensor, weight: Tensor) -> Tensor:
        found.append(f"*{x.shape[1]}")
        return product(x, weight)

    passed_on = context.pass_on
    with (
        mock.patch.object(context, "pass_on", pass_on),
        mock.patch.object(tensor, "pass_on", pass_on),
        mock.patch.object(tensor, "product", multiplied),
    ):
        values_and_gradients(overlapped)
    return found


def test_a_product_runs_while_each_message_travels(pool: ForkedPool) -> None:
    """Three ranks: two messages of a rank's tokens in each of four rings, as many bytes as a gather or a scatter
    sends, and the products of those tokens between the begin and the arrival of each."""
    share = f">{B * SHARE * D * 8}"
    gathered = [share, "*3", "*3", "<", share, "*3", "*3", "<", "*3", "*3"]
    scattered = ["*3", share, "*3", "<", share, "*3", "<"]
    gathered_back = [share, "*3", "<", share, "*3", "<", "*3"]
    scattered_back = ["*3", "*3", share, "*3", "*3", "<", share, "*3", "*3", "<"]
    for found in pool.run(3, events):
        assert found == gathered + scattered + gathered_back + scattered_back

"""The four collectives of tensor parallelism on two ranks, forward and backward, by hand.

Rank 0 holds tokens (1, 2), rank 1 holds (10, 20); the gradient that comes back is (1, 2) on rank 0, (3, 4) on rank 1
(with all four tokens (1, 2, 3, 4) and (10, 20, 30, 40))."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from gristmill.training.parallel.collectives import copy_to_ranks, gather_tokens, scatter_tokens, sum_over_ranks

SHARE = ([1.0, 2.0], [10.0, 20.0])
ALL = ([1.0, 2.0, 3.0, 4.0], [10.0, 20.0, 30.0, 40.0])


def tokens(values: list[float]) -> Tensor:
    """[1 sample, tokens, width 1]."""
    return torch.tensor(values).view(1, -1, 1)


def forward_and_backward(
    collective: Callable[..., Tensor], inputs: tuple[list[float], ...], upstream: tuple[list[float], ...]
) -> tuple[list[float], list[float]]:
    rank = dist.get_rank()
    x = tokens(inputs[rank]).requires_grad_()
    y = collective(x, dist.group.WORLD)
    y.backward(tokens(upstream[rank]))
    return y.detach().flatten().tolist(), x.grad.flatten().tolist()


@pytest.mark.parametrize(
    ("collective", "inputs", "upstream", "outputs", "gradients"),
    [
        (copy_to_ranks, SHARE, SHARE, SHARE, ([11, 22], [11, 22])),
        (sum_over_ranks, SHARE, SHARE, ([11, 22], [11, 22]), SHARE),
        (gather_tokens, SHARE, ALL, ([1, 2, 10, 20], [1, 2, 10, 20]), ([11, 22], [33, 44])),
        (scatter_tokens, ALL, SHARE, ([11, 22], [33, 44]), ([1, 2, 10, 20], [1, 2, 10, 20])),
    ],
    ids=["copy", "sum", "gather", "scatter"],
)
def test_forward_and_its_conjugate_backward(
    pool: Any, collective: Any, inputs: Any, upstream: Any, outputs: Any, gradients: Any
) -> None:
    ranks = pool.run(2, forward_and_backward, collective, inputs, upstream)
    assert [output for output, _ in ranks] == list(outputs)
    assert [gradient for _, gradient in ranks] == list(gradients)


def results_are_contiguous() -> list[bool]:
    x = tokens(ALL[dist.get_rank()]).transpose(0, 1)  # tokens first: what gloo cannot send as it is
    group = dist.group.WORLD
    found = (copy_to_ranks(x, group), sum_over_ranks(x, group), gather_tokens(x.transpose(0, 1), group))
    return [each.is_contiguous() for each in found]


def test_results_are_contiguous(pool: Any) -> None:
    assert pool.run(2, results_are_contiguous) == [[True] * 3] * 2

"""The four collectives of tensor parallelism on two ranks, forward and backward, by hand.

Rank 0 holds tokens (1, 2), rank 1 holds (10, 20); the gradient that comes back is (1, 2) on rank 0, (3, 4) on rank 1
(with all four tokens (1, 2, 3, 4) and (10, 20, 30, 40))."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from gristmill.training.parallel.collectives import (
    copy_to_ranks,
    gather_tokens,
    reduce_scatter,
    scatter_tokens,
    sum_over_ranks,
)

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


def summed_parts(dtype: torch.dtype) -> tuple[bool, int]:
    """(whether the sum is torch's own, copies of what is handed in) for integers, which every dtype sums exactly."""
    ranks, rank = dist.get_world_size(), dist.get_rank()
    parts = (torch.arange(ranks * 12).reshape(ranks * 3, 4) % 7 + rank).to(dtype)
    own, expected = (torch.empty(3, 4, dtype=dtype) for _ in range(2))
    dist.reduce_scatter_tensor(expected, parts)
    with torch.profiler.profile() as profiled:
        reduce_scatter(own, parts, dist.group.WORLD)
    copies = sum(each.count for each in profiled.key_averages() if each.key in ("aten::copy_", "aten::clone"))
    return torch.equal(own, expected), copies


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_a_reduce_scatter_is_torchs_without_its_copies(pool: Any, ranks: int, dtype: torch.dtype) -> None:
    assert pool.run(ranks, summed_parts, dtype) == [(True, 0)] * ranks


def copies_of_a_gather_and_a_scatter(samples: int) -> int:
    x = torch.ones(samples, 4, 2)
    group = dist.group.WORLD
    with torch.profiler.profile() as profiled:
        scatter_tokens(gather_tokens(x, group), group)
    return next((each.count for each in profiled.key_averages() if each.key == "aten::clone"), 0)


def test_tokens_are_copied_once_in_each_direction_and_of_one_sample_never(pool: Any) -> None:
    assert pool.run(2, copies_of_a_gather_and_a_scatter, 1) == [0, 0]
    assert pool.run(2, copies_of_a_gather_and_a_scatter, 3) == [2, 2]

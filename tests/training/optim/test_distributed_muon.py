"""Muon on sharded matrices: each is made orthogonal on one rank, whatever the mesh, and the update is that of one
process."""

from math import prod
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.distributed.tensor.debug import CommDebugMode

from gristmill.training.config.model import ModelConfig
from gristmill.training.config.train import OptimizerConfig
from gristmill.training.optim import muon
from gristmill.training.optim.muon import Muon, balanced, orthogonal
from gristmill.training.optim.offload import OffloadedOptimizer, split_into_subgroups
from gristmill.training.parallel.mesh import local
from gristmill.training.parallel.offload.swap import host_zeros_like
from tests.support.forked_pool import ForkedPool

MODEL = ModelConfig(layers=2, width=8, heads=2, moe={"experts": 3, "top_k": 1, "ffn_hidden_size": 4})
# 4 rows over 3 ranks are 2, 2 and none; experts are matrices of their own
SHAPES = {
    "layers.0.mixer.query.weight": (4, 8),
    "layers.0.mixer.key.weight": (4, 8),
    "layers.0.mixer.output.weight": (8, 8),
    "layers.0.mlp.experts.up": (3, 6, 4),
    "layers.0.mlp_norm.weight": (8,),
}
MATRICES, ELEMENTS = 3 + 3, 32 + 32 + 64 + 72
MESHES: dict[str, tuple[tuple[int, ...], tuple[Any, ...]]] = {
    "rows over 3": ((3,), (Shard(0),)),
    "rows over 2 copies of 2": ((2, 2), (Replicate(), Shard(0))),
    "rows over 2, columns over 2": ((2, 2), (Shard(0), Shard(1))),
}


def drawn(seed: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {name: torch.randn(shape, generator=generator, dtype=torch.float64) for name, shape in SHAPES.items()}


def two_steps(parameters: dict[str, nn.Parameter], optimizer: Any, spread: Any) -> dict[str, Tensor]:
    for step in (1, 2):
        for (name, parameter), gradient in zip(parameters.items(), drawn(step).values(), strict=True):
            parameter.grad = spread(gradient)
            host = getattr(optimizer, "host_gradients", {})
            if name in host:
                host[name].copy_(local(parameter.grad))
        optimizer.step(1.0)
    return {name: parameter.detach() for name, parameter in parameters.items()}


def alone() -> dict[str, Tensor]:
    parameters = {name: nn.Parameter(value) for name, value in drawn(0).items()}
    return two_steps(parameters, Muon(parameters, OptimizerConfig(), MODEL), lambda gradient: gradient)


def on_mesh(name: str, offloaded: bool = False) -> tuple[dict[str, Tensor], int, dict[str, int], int]:
    """(parameters, matrices made orthogonal here, calls of collectives, elements sent to others)."""
    sizes, placements = MESHES[name]
    mesh = DeviceMesh("cpu", torch.arange(dist.get_world_size()).reshape(sizes))

    def spread(value: Tensor) -> Tensor:
        fitting = [Shard(0) if value.ndim == 1 and placed == Shard(1) else placed for placed in placements]
        return distribute_tensor(
            value, mesh, fitting if value.ndim > 1 else [Replicate()] * len(placements), src_data_rank=None
        )

    parameters = {each: nn.Parameter(spread(value)) for each, value in drawn(0).items()}
    zeros_like = host_zeros_like if offloaded else torch.zeros_like
    optimizer: Any = Muon(parameters, OptimizerConfig(), MODEL, zeros_like, dist.group.WORLD)
    if offloaded:
        groups = split_into_subgroups(parameters, 1, optimizer.is_whole)
        optimizer = OffloadedOptimizer(parameters, optimizer, groups, [True, False] * (len(groups) // 2) + [True])
    made: list[int] = []
    sent: list[int] = []

    def counted(matrix: Tensor) -> Tensor:
        made.append(matrix.shape[0] if matrix.ndim == 3 else 1)
        return orthogonal(matrix)

    def all_to_all(target: Tensor, source: Tensor, into: list[int], out: list[int], group: Any) -> None:
        sent.append(sum(out) - out[dist.get_rank(group)])
        dist.all_to_all_single(target, source, into, out, group=group)

    recorder = mock.Mock(wraps=dist, all_to_all_single=all_to_all)
    with (
        mock.patch.object(muon, "orthogonal", counted),
        mock.patch.object(muon, "dist", recorder),
        CommDebugMode() as others,
    ):
        found = two_steps(parameters, optimizer, spread)
    calls = {str(each): count for each, count in others.get_comm_counts().items()}
    whole = {each: value.full_tensor() for each, value in found.items()}
    return whole, sum(made), calls, sum(sent)


@pytest.mark.parametrize("name", list(MESHES))
def test_each_matrix_is_made_orthogonal_once(name: str, pool: ForkedPool) -> None:
    expected, sizes = alone(), MESHES[name][0]
    ranks = pool.run(prod(sizes), on_mesh, name)
    assert sum(made for _, made, _, _ in ranks) == 2 * MATRICES
    assert max(made for _, made, _, _ in ranks) < 2 * MATRICES
    copies = 2 if "copies" in name else 1
    # once to the owner, and back to each copy of the shards; gathered on all, each would be sent to all others
    assert sum(sent for *_, sent in ranks) <= 2 * (1 + copies) * ELEMENTS
    for found, _, calls, _ in ranks:
        assert calls == {"c10d.alltoall_base_": 2 * 2}  # there and back, each step
        for each, value in expected.items():
            torch.testing.assert_close(found[each], value, rtol=0, atol=1e-12)


def test_ranks_without_rows_meet_the_others_in_each_subgroup(pool: ForkedPool) -> None:
    expected = alone()
    for found, *_ in pool.run(3, on_mesh, "rows over 3", True):
        for each, value in expected.items():
            torch.testing.assert_close(found[each], value, rtol=0, atol=1e-12)


def test_owners_by_hand() -> None:
    assert balanced([3, 3, 4, 2], 2) == [1, 1, 0, 0]  # 4, then 3 and 3 to the other, then 2
    assert balanced([1, 1], 3) == [0, 1]

"""Process groups of large runs, counted without processes: rank by rank in torch's fake process group."""

from collections.abc import Iterator
from contextlib import contextmanager
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch.distributed import device_mesh
from torch.testing._internal.distributed.fake_pg import FakeStore

from gristmill.training.config.layout import LayoutConfig
from gristmill.training.engine.local_model import _tied_peer
from gristmill.training.parallel.mesh import build_mesh

RANKS = 1024
DENSE = {"data": 16, "tensor": 8, "pipeline": 8}
EXPERTS = {"data": 16, "tensor": 8, "pipeline": 8, "expert": 16}
CONTEXT = {"data": 4, "tensor": 8, "pipeline": 8, "context": 4}


@contextmanager
def fake_rank(rank: int) -> Iterator[None]:
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=RANKS)
    try:
        yield
    finally:
        dist.destroy_process_group()


def groups_made(layout: LayoutConfig, rank: int, experts: bool) -> list[tuple[int, ...]]:
    """The ranks of each group, in the order in which this rank makes them."""
    made: list[tuple[int, ...]] = []
    new_group = device_mesh.new_group

    def noted(ranks: list[int], **options: object) -> dist.ProcessGroup:
        made.append(tuple(ranks))
        return new_group(ranks=ranks, **options)

    with fake_rank(rank), mock.patch.object(device_mesh, "new_group", noted):
        mesh = build_mesh(layout, 8, torch.device("cpu"), experts)
        _tied_peer(mesh)
    return made


@pytest.mark.parametrize(
    ("settings", "experts", "own", "distinct"),
    [(DENSE, False, 10, 4), (EXPERTS, True, 16, 6), (CONTEXT, False, 10, 6)],
    ids=["dense", "experts", "context"],
)
def test_groups_of_1024_ranks(settings: dict[str, int], experts: bool, own: int, distinct: int) -> None:
    """All ranks make the same groups in the same order, else NCCL hangs. own: groups that a rank is in; distinct: of
    them those of several ranks with different members. Tied tables add none."""
    layout = LayoutConfig(**settings)
    assert layout.world_size == RANKS
    first, *others = (groups_made(layout, rank, experts) for rank in (0, 1, 511, 1023))
    assert all(groups == first for groups in others)
    for rank in (0, 1023):
        groups = [ranks for ranks in first if rank in ranks]
        assert len(groups) == own
        assert len({ranks for ranks in groups if len(ranks) > 1}) == distinct

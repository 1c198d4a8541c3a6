"""Fixtures of the planner's tests: a machine, and one process of the real engine on any layout, on the meta device."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest
import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

from gristmill.training.config.layout import LayoutConfig
from gristmill.training.config.model import ModelConfig
from gristmill.training.config.train import TrainConfig
from gristmill.training.engine.local_model import LocalModel, build_local_model
from gristmill.training.parallel.mesh import build_mesh, local
from gristmill.training.planner.hardware import Hardware, load_hardware


@contextmanager
def process(world_size: int, rank: int) -> Iterator[None]:
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world_size)
    try:
        yield
    finally:
        dist.destroy_process_group()


def parts_of_rank(model: ModelConfig, vocab: int, layout: LayoutConfig, rank: int) -> LocalModel:
    with process(layout.world_size, rank):
        mesh = build_mesh(layout, model.num_kv_heads, torch.device("cpu"), model.has_experts)
        train = TrainConfig(tokens=1, batch_tokens=1, layout=layout)
        return build_local_model(model, vocab, train, mesh, 0, weights="meta")


@pytest.fixture
def engine_shapes() -> Callable[[ModelConfig, int, LayoutConfig, int], dict[str, tuple[int, ...]]]:
    """(model, vocab, layout, rank) -> what that rank keeps of each parameter; "" is the second copy of a tied table."""

    def shapes(model: ModelConfig, vocab: int, layout: LayoutConfig, rank: int) -> dict[str, tuple[int, ...]]:
        parts = parts_of_rank(model, vocab, layout, rank)
        found = {name: tuple(local(p).shape) for name, p in parts.parameters.items()}
        return found if parts.tied_copy is None else found | {"": tuple(local(parts.tied_copy).shape)}

    return shapes


@pytest.fixture
def fake_process():
    """(world size, rank) -> a context in which this process is that rank, and its collectives do nothing."""
    return process


@pytest.fixture
def hardware() -> Hardware:
    return load_hardware("a100-80g")

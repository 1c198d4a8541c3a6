"""The optimizer of a recipe."""

from collections.abc import Callable, Mapping
from typing import Protocol

import torch
from torch import Tensor, nn

from gristmill.training.config import TrainConfig
from gristmill.training.costs.host_update import on_device
from gristmill.training.memory.host_copies import host_zeros_like
from gristmill.training.memory.weight_stream import WeightStream
from gristmill.training.model_config import ModelConfig
from gristmill.training.optim.adamw import AdamW
from gristmill.training.optim.muon import Muon
from gristmill.training.optim.offload import OffloadedOptimizer
from gristmill.training.optim.streamed import StreamedOptimizer
from gristmill.training.optim.subgroups import split_into_subgroups
from gristmill.training.parallel.mesh import Mesh
from gristmill.training.planner.host import planned_stride


class Optimizer(Protocol):
    """updates counts the steps taken; state gives the tensors to save, by flat names that no layout changes."""

    updates: int

    def step(self, rate_share: float) -> None: ...

    def state(self) -> dict[str, Tensor]: ...


def build_optimizer(
    parameters: Mapping[str, nn.Parameter],
    train: TrainConfig,
    model: ModelConfig,
    mesh: Mesh,
    stream: WeightStream | None = None,
) -> Optimizer:
    """On the parameters' device, or with its state in host memory or on disk as the layout says. stream: of the layers'
    weights."""
    config, offload = train.optimizer, train.layout.offload

    def make(zeros_like: Callable[[Tensor], Tensor]) -> AdamW | Muon:
        if config.name == "adamw":
            return AdamW(parameters, config, model, zeros_like)
        return Muon(parameters, config, model, zeros_like, mesh.stage.group)

    if stream is not None:
        return StreamedOptimizer(parameters, make, stream, offload.subgroup_parameters)
    if not offload.active:
        return make(torch.zeros_like)
    optimizer = make(host_zeros_like)
    subgroups = split_into_subgroups(parameters, offload.subgroup_parameters, optimizer.is_whole)
    sizes = [sum(piece.longest for piece in group) for group in subgroups]
    stride = planned_stride(train.layout.hardware, sizes) if offload.optimizer == "auto" else None
    return OffloadedOptimizer(parameters, optimizer, subgroups, on_device(len(subgroups), offload, stride))

"""The optimizer of a recipe."""

from collections.abc import Mapping
from typing import Protocol

from torch import Tensor, nn

from gristmill.training.model_config import ModelConfig
from gristmill.training.optim.adamw import AdamW
from gristmill.training.optim.muon import Muon
from gristmill.training.optimizer_config import OptimizerConfig


class Optimizer(Protocol):
    """updates counts the steps taken; state gives the tensors to save, by flat names that no layout changes."""

    updates: int

    def step(self, rate_share: float) -> None: ...

    def state(self) -> dict[str, Tensor]: ...


OPTIMIZERS = {"adamw": AdamW, "muon": Muon}


def build_optimizer(parameters: Mapping[str, nn.Parameter], config: OptimizerConfig, model: ModelConfig) -> Optimizer:
    return OPTIMIZERS[config.name](parameters, config, model)

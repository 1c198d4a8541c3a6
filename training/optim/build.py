"""The optimizer of a recipe."""

from collections.abc import Mapping

from torch import nn

from gristmill.training.config import ModelConfig, OptimizerConfig
from gristmill.training.optim.adamw import AdamW


def build_optimizer(parameters: Mapping[str, nn.Parameter], config: OptimizerConfig, model: ModelConfig) -> AdamW:
    return AdamW(parameters, config, model)

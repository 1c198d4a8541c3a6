"""One layer: a mixer over tokens, then a channel block, each on the residual stream."""

from typing import Any

from torch import Tensor, nn

from gristmill.training.config import LayerConfig, ModelConfig
from gristmill.training.model.attention import Attention
from gristmill.training.model.attention_mask import AttentionMetadata
from gristmill.training.model.mlp import CHANNELS
from gristmill.training.model.norm import Norm
from gristmill.training.parallel.activation_checkpointing import ActivationCheckpointing
from gristmill.training.parallel.tensor import TensorAxis

MIXERS = {"attention": Attention}

# B batch, T tokens (this tensor rank's, under sequence parallelism), D width


class Layer(nn.Module):
    """x + mixer(norm(x)), then x + channel(norm(x)); with norm_order "post" the norm stands after the addition."""

    def __init__(self, config: ModelConfig, index: int, tensor: TensorAxis, retention: ActivationCheckpointing):
        super().__init__()
        layer: LayerConfig = config.layer_list[index]
        self.index, self.pre, self.retention = index, layer.norm_order == "pre", retention
        self.mixer_norm = Norm(config, tensor, config.width)
        self.mixer = MIXERS[layer.mixer](config, layer, tensor)
        self.channel_norm = Norm(config, tensor, config.width)
        self.channel = CHANNELS[layer.channel](config, tensor)

    def forward(self, x_BTD: Tensor, plan: AttentionMetadata, state: Any = None) -> tuple[Tensor, Any]:
        """The stream after this layer, and the mixer's state if the plan keeps it."""
        return self.retention.layer(self.compute, x_BTD, plan, state)

    def compute(self, x_BTD: Tensor, plan: AttentionMetadata, state: Any = None) -> tuple[Tensor, Any]:
        mixed_BTD, state = self.retention.mixer(self._mix, x_BTD, plan, state)
        x_BTD = self._add(x_BTD, plan.drop(mixed_BTD, self.index, site=0), self.mixer_norm)
        channel_BTD = self.channel(self.channel_norm(x_BTD) if self.pre else x_BTD)
        return self._add(x_BTD, plan.drop(channel_BTD, self.index, site=1), self.channel_norm), state

    def _mix(self, x_BTD: Tensor, plan: AttentionMetadata, state: Any) -> tuple[Tensor, Any]:
        return self.mixer(self.mixer_norm(x_BTD) if self.pre else x_BTD, plan, state)

    def _add(self, x_BTD: Tensor, change_BTD: Tensor, norm: Norm) -> Tensor:
        return x_BTD + change_BTD if self.pre else norm(x_BTD + change_BTD)

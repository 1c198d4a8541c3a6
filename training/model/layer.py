"""One layer: a mixer over tokens, then an MLP, each on the residual stream."""

from typing import Any

from torch import Tensor, nn

from gristmill.training.model.attention import Attention
from gristmill.training.model.attention_metadata import AttentionMetadata
from gristmill.training.model.mlp import MLPS
from gristmill.training.model.norm import Norm
from gristmill.training.model_config import LayerConfig, ModelConfig
from gristmill.training.parallel.activation_checkpointing import ActivationCheckpointing
from gristmill.training.parallel.tensor import TensorAxis

MIXERS = {"attention": Attention}

# B batch, T tokens (this tensor rank's, under sequence parallelism), D width


class Layer(nn.Module):
    """x + mixer(norm(x)), then x + mlp(norm(x)); with norm_order "post" the norm follows the addition."""

    def __init__(self, config: ModelConfig, index: int, tensor: TensorAxis, checkpointing: ActivationCheckpointing):
        super().__init__()
        layer: LayerConfig = config.layer_list[index]
        self.index, self.pre, self.checkpointing = index, layer.norm_order == "pre", checkpointing
        self.mixer_norm = Norm(config, tensor, config.width)
        self.mixer = MIXERS[layer.mixer](config, layer, tensor)
        self.mlp_norm = Norm(config, tensor, config.width)
        self.mlp = MLPS[layer.mlp](config, tensor)

    def forward(self, x_BTD: Tensor, metadata: AttentionMetadata, state: Any = None) -> tuple[Tensor, Any]:
        """The stream after this layer, and the mixer's state if the metadata keeps it."""
        return self.checkpointing.layer(self.compute, x_BTD, metadata, state)

    def compute(self, x_BTD: Tensor, metadata: AttentionMetadata, state: Any = None) -> tuple[Tensor, Any]:
        mixed_BTD, state = self.checkpointing.mixer(self._mix, x_BTD, metadata, state)
        x_BTD = self._add(x_BTD, metadata.drop(mixed_BTD, self.index, site=0), self.mixer_norm)
        mlp_BTD = self.mlp(self.mlp_norm(x_BTD) if self.pre else x_BTD)
        return self._add(x_BTD, metadata.drop(mlp_BTD, self.index, site=1), self.mlp_norm), state

    def _mix(self, x_BTD: Tensor, metadata: AttentionMetadata, state: Any) -> tuple[Tensor, Any]:
        return self.mixer(self.mixer_norm(x_BTD) if self.pre else x_BTD, metadata, state)

    def _add(self, x_BTD: Tensor, change_BTD: Tensor, norm: Norm) -> Tensor:
        return x_BTD + change_BTD if self.pre else norm(x_BTD + change_BTD)

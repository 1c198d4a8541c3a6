"""One layer: a mixer over tokens, then an MLP, each on the residual stream."""

from typing import Any

import torch
from torch import Tensor, nn

from gristmill.training.model.attention_metadata import AttentionMetadata
from gristmill.training.model.build_mixer import build_mixer
from gristmill.training.model.mixture import MixtureOfExperts
from gristmill.training.model.mlp import MLPS
from gristmill.training.model.norm import Norm
from gristmill.training.model_config import LayerConfig, ModelConfig
from gristmill.training.parallel.activation_checkpointing import ActivationCheckpointing
from gristmill.training.parallel.tensor import TensorAxis

# B batch, T tokens (this tensor rank's, under sequence parallelism), D width


class Layer(nn.Module):
    """x + mixer(norm(x)), then x + mlp(norm(x)), or one of them alone; with norm_order "post" the norm follows the
    addition.

    expert_tensor: ranks that share an expert's hidden width, where the MLP is a mixture."""

    def __init__(
        self,
        config: ModelConfig,
        index: int,
        tensor: TensorAxis,
        checkpointing: ActivationCheckpointing,
        expert_tensor: int = 1,
    ):
        super().__init__()
        layer: LayerConfig = config.layer_list[index]
        self.index, self.pre, self.checkpointing = index, layer.norm_order == "pre", checkpointing
        self.mixer_norm = self.mixer = self.mlp_norm = self.mlp = None
        if layer.mixer != "none":
            self.mixer_norm = Norm(config, tensor, config.width)
            self.mixer = build_mixer(config, layer, tensor)
        self.has_experts = layer.experts > 0
        if layer.mlp == "none":
            return
        self.mlp_norm = Norm(config, tensor, config.width)
        if self.has_experts:
            self.mlp = MixtureOfExperts(config, index, tensor, expert_tensor)
        else:
            self.mlp = MLPS[layer.mlp](config, tensor, layer.hidden)

    def forward(self, x_BTD: Tensor, metadata: AttentionMetadata, state: Any = None) -> tuple[Tensor, Any]:
        """The stream after this layer, and the mixer's state if the metadata keeps it."""
        x_BTD, state, counts_E = self.checkpointing.layer(self.compute, x_BTD, metadata, state)
        if counts_E is not None and torch.is_grad_enabled():  # here, where recomputation does not count twice
            self.mlp.router.step_counts += counts_E
        return x_BTD, state

    def compute(
        self, x_BTD: Tensor, metadata: AttentionMetadata, state: Any = None
    ) -> tuple[Tensor, Any, Tensor | None]:
        """The third value: number of tokens routed to each expert, int64[E]; None without experts."""
        if self.mixer is not None:
            mixed_BTD, state = self.checkpointing.mixer(self._mix, x_BTD, metadata, state)
            x_BTD = self._add(x_BTD, metadata.drop(mixed_BTD, self.index, site=0), self.mixer_norm)
        if self.mlp is None:
            return x_BTD, state, None
        normed_BTD, counts_E = self.mlp_norm(x_BTD) if self.pre else x_BTD, None
        if self.has_experts:
            mlp_BTD, counts_E = self.mlp(normed_BTD, metadata.routing)
        else:
            mlp_BTD = self.mlp(normed_BTD)
        return self._add(x_BTD, metadata.drop(mlp_BTD, self.index, site=1), self.mlp_norm), state, counts_E

    def _mix(self, x_BTD: Tensor, metadata: AttentionMetadata, state: Any) -> tuple[Tensor, Any]:
        return self.mixer(self.mixer_norm(x_BTD) if self.pre else x_BTD, metadata, state)

    def _add(self, x_BTD: Tensor, change_BTD: Tensor, norm: Norm) -> Tensor:
        return x_BTD + change_BTD if self.pre else norm(x_BTD + change_BTD)

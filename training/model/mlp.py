"""The MLPs: the position-wise blocks of a layer."""

import torch.nn.functional as F
from torch import Tensor, nn

from gristmill.training.model_config import ModelConfig
from gristmill.training.parallel.tensor import ColumnParallelLinear, RowParallelLinear, TensorAxis

# B batch, T tokens, D width, Ft = this tensor rank's share of the hidden width


class SwiGLU(nn.Module):
    """down(silu(gate x) * up x) (arXiv 2002.05202)."""

    def __init__(self, config: ModelConfig, tensor: TensorAxis, hidden: int):
        super().__init__()
        self.tensor = tensor
        self.gate = ColumnParallelLinear(tensor, config.width, hidden, config.mlp_biases)
        self.up = ColumnParallelLinear(tensor, config.width, hidden, config.mlp_biases)
        self.down = RowParallelLinear(tensor, hidden, config.width, config.mlp_biases)

    def forward(self, x_BTD: Tensor) -> Tensor:
        x_BTD = self.tensor.enter(x_BTD)
        hidden_BTFt = F.silu(self.gate(x_BTD)) * self.up(x_BTD)
        return self.down(hidden_BTFt)


class GELU(nn.Module):
    """down(gelu(up x))."""

    def __init__(self, config: ModelConfig, tensor: TensorAxis, hidden: int):
        super().__init__()
        self.tensor, self.approximate = tensor, gelu_approximation(config)
        self.up = ColumnParallelLinear(tensor, config.width, hidden, config.mlp_biases)
        self.down = RowParallelLinear(tensor, hidden, config.width, config.mlp_biases)

    def forward(self, x_BTD: Tensor) -> Tensor:
        x_BTD = self.tensor.enter(x_BTD)
        return self.down(F.gelu(self.up(x_BTD), approximate=self.approximate))


def gelu_approximation(config: ModelConfig) -> str:
    """torch's name for the form of gelu."""
    return "tanh" if config.gelu == "tanh" else "none"


MLPS = {"swiglu": SwiGLU, "gelu": GELU}

"""The MLPs: the position-wise blocks of a layer."""

import torch.nn.functional as F
from torch import Tensor, nn

from gristmill.training.model_config import ModelConfig
from gristmill.training.parallel.tensor import ColumnParallelLinear, RowParallelLinear, TensorAxis, column_parallel

# B batch, T tokens, D width, Ft = this tensor rank's share of the hidden width


class GatedMlp(nn.Module):
    """down(f(gate x) * up x) for an element-wise function f (arXiv 2002.05202)."""

    def __init__(self, config: ModelConfig, tensor: TensorAxis, hidden: int):
        super().__init__()
        self.tensor = tensor
        self.gate = ColumnParallelLinear(tensor, config.width, hidden, config.mlp_biases)
        self.up = ColumnParallelLinear(tensor, config.width, hidden, config.mlp_biases)
        self.down = RowParallelLinear(tensor, hidden, config.width, config.mlp_biases)

    def activation(self, hidden_BTFt: Tensor) -> Tensor:
        raise NotImplementedError

    def forward(self, x_BTD: Tensor) -> Tensor:
        # In training a joint product would cost copies: of the weights under FSDP, and of its parts' gradients.
        gate_BTFt, up_BTFt = column_parallel(self.tensor, x_BTD, [self.gate, self.up], joint=not self.training)
        return self.down(self.activation(gate_BTFt) * up_BTFt)


class SwiGLU(GatedMlp):
    """down(silu(gate x) * up x)."""

    def activation(self, hidden_BTFt: Tensor) -> Tensor:
        return F.silu(hidden_BTFt)


class GeGLU(GatedMlp):
    """down(gelu(gate x) * up x)."""

    def __init__(self, config: ModelConfig, tensor: TensorAxis, hidden: int):
        super().__init__(config, tensor, hidden)
        self.approximate = gelu_approximation(config)

    def activation(self, hidden_BTFt: Tensor) -> Tensor:
        return F.gelu(hidden_BTFt, approximate=self.approximate)


class PlainMlp(nn.Module):
    """down(f(up x)) for an element-wise function f."""

    def __init__(self, config: ModelConfig, tensor: TensorAxis, hidden: int):
        super().__init__()
        self.tensor = tensor
        self.up = ColumnParallelLinear(tensor, config.width, hidden, config.mlp_biases)
        self.down = RowParallelLinear(tensor, hidden, config.width, config.mlp_biases)

    def activation(self, hidden_BTFt: Tensor) -> Tensor:
        raise NotImplementedError

    def forward(self, x_BTD: Tensor) -> Tensor:
        (up_BTFt,) = column_parallel(self.tensor, x_BTD, [self.up])
        return self.down(self.activation(up_BTFt))


class GELU(PlainMlp):
    """down(gelu(up x))."""

    def __init__(self, config: ModelConfig, tensor: TensorAxis, hidden: int):
        super().__init__(config, tensor, hidden)
        self.approximate = gelu_approximation(config)

    def activation(self, hidden_BTFt: Tensor) -> Tensor:
        return F.gelu(hidden_BTFt, approximate=self.approximate)


class ReLU(PlainMlp):
    """down(relu(up x))."""

    def activation(self, hidden_BTFt: Tensor) -> Tensor:
        return F.relu(hidden_BTFt)


class ReLU2(PlainMlp):
    """down(relu(up x)^2) (Primer, arXiv 2109.08668)."""

    def activation(self, hidden_BTFt: Tensor) -> Tensor:
        return F.relu(hidden_BTFt).square()


def gelu_approximation(config: ModelConfig) -> str:
    """torch's name for the form of gelu."""
    return "tanh" if config.gelu == "tanh" else "none"


MLPS = {"swiglu": SwiGLU, "geglu": GeGLU, "gelu": GELU, "relu": ReLU, "relu2": ReLU2}

"""The two norms. Statistics are taken in float32 (or float64), whatever the dtype of the stream."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gristmill.training.config import ModelConfig
from gristmill.training.parallel.tensor import Cut, TensorAxis


class Norm(nn.Module):
    """RMSNorm (arXiv 1910.07467) or LayerNorm over the last dimension, which is never cut."""

    def __init__(self, config: ModelConfig, tensor: TensorAxis, width: int, cut: Cut = Cut.WHOLE):
        super().__init__()
        self.tensor, self.cut, self.epsilon = tensor, cut, config.norm_epsilon
        self.centred = config.norm == "layernorm"
        self.weight = tensor.parameter((width,), cut)
        self.bias = tensor.parameter((width,), cut) if self.centred else None

    def forward(self, x: Tensor) -> Tensor:
        exact = torch.float64 if x.dtype == torch.float64 else torch.float32
        weight = self.tensor.local(self.weight, self.cut, exact)
        if self.centred:
            bias = self.tensor.local(self.bias, self.cut, exact)
            return F.layer_norm(x.to(exact), weight.shape, weight, bias, self.epsilon).to(x.dtype)
        return F.rms_norm(x.to(exact), weight.shape, weight, self.epsilon).to(x.dtype)

"""Named linear outputs beside the vocabulary's (`model.outputs`): classes of a sample, labels of its tokens."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gristmill.training.model_config import ModelConfig
from gristmill.training.parallel.tensor import Sharding, TensorAxis

# T tokens, D width, S size of an output


class WholeLinear(nn.Module):
    """x W^T + b, computed by every tensor rank on all tokens."""

    def __init__(self, tensor: TensorAxis, inputs: int, outputs: int):
        super().__init__()
        self.tensor = tensor
        self.weight = tensor.parameter((outputs, inputs), Sharding.WHOLE)
        self.bias = tensor.parameter((outputs,), Sharding.WHOLE)

    def forward(self, x: Tensor) -> Tensor:
        weight = self.tensor.local(self.weight, Sharding.WHOLE, x.dtype)
        return F.linear(x, weight, self.tensor.local(self.bias, Sharding.WHOLE, x.dtype))


class NamedOutputs(nn.Module):
    """The pooler is tanh(W x + b) of the first token (BERT, arXiv 1810.04805); all pooled outputs share it."""

    def __init__(self, config: ModelConfig, tensor: TensorAxis):
        super().__init__()
        self.over = {output.name: output.over for output in config.outputs}
        self.pooler = WholeLinear(tensor, config.width, config.width) if config.has_pooler else None
        self.linear = nn.ModuleDict(
            {output.name: WholeLinear(tensor, config.width, output.size) for output in config.outputs}
        )

    def forward(self, name: str, hidden: Tensor) -> Tensor:
        """hidden [..., T, D] -> [..., S] of the pooled first token, or [..., T, S]."""
        if self.pooler is None or self.over[name] == "tokens":
            return self.linear[name](hidden)
        return self.linear[name](torch.tanh(self.pooler(hidden[..., 0, :])))

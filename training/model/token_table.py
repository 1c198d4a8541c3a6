"""Learned positions and segments."""

import torch
from torch import Tensor, nn

from gristmill.training.parallel.tensor import Sharding, TensorAxis

# B batch, T tokens, R rows, D width


class TokenTable(nn.Module):
    """A table of learned positions or segments, added to this rank's tokens."""

    def __init__(self, tensor: TensorAxis, rows: int, width: int):
        super().__init__()
        self.tensor = tensor
        self.weight = tensor.parameter((rows, width), Sharding.REPLICATED)

    def forward(self, rows_BT: Tensor, dtype: torch.dtype) -> Tensor:
        table_RD = self.tensor.local(self.weight, Sharding.REPLICATED, dtype)
        return nn.functional.embedding(self.tensor.local_tokens(rows_BT), table_RD)

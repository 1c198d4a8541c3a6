"""Causal depthwise convolution: each channel's weighted sum of its last few tokens."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gristmill.training.parallel.tensor import Sharding, TensorAxis

# B rows, T tokens, Ct channels of this tensor rank, K taps


class CausalConvolution(nn.Module):
    """y_t = b + sum over k of w_k x_(t - K + 1 + k), for each channel; tokens of other documents count as zero."""

    def __init__(self, tensor: TensorAxis, channels: int, kernel: int):
        super().__init__()
        self.tensor, self.kernel = tensor, kernel
        self.weight = tensor.parameter((channels, kernel), Sharding.OUTPUT)
        self.bias = tensor.parameter((channels,), Sharding.OUTPUT)

    def forward(self, x_BTC: Tensor, documents_BT: Tensor | None, before_BKC: Tensor | None) -> Tensor:
        """before_BKC: the K - 1 inputs before, of the document of the first token; None: there are none."""
        weight_CK = self.tensor.local(self.weight, Sharding.OUTPUT, x_BTC.dtype)
        bias_C = self.tensor.local(self.bias, Sharding.OUTPUT, x_BTC.dtype)
        tokens, all_BSC = x_BTC.shape[1], _with_tokens_before(x_BTC, before_BKC, self.kernel - 1)
        y_BTC = bias_C
        for tap in range(self.kernel):
            term_BTC = all_BSC[:, tap : tap + tokens] * weight_CK[:, tap]
            back = self.kernel - 1 - tap
            if documents_BT is not None and back:
                same_BT = _same_document(documents_BT, back)
                term_BTC = term_BTC * same_BT.unsqueeze(-1).to(term_BTC.dtype)
            y_BTC = y_BTC + term_BTC
        return y_BTC


def last_inputs(x_BTC: Tensor, documents_BT: Tensor | None, before_BKC: Tensor | None, count: int) -> Tensor:
    """The last `count` inputs for the next call; those that are not of the last token's document are zero."""
    all_BSC = _with_tokens_before(x_BTC, before_BKC, count)
    if documents_BT is not None:
        same_BT = documents_BT == documents_BT[:, -1:]
        same_BS = torch.cat([same_BT[:, :1].expand(-1, count), same_BT], dim=1)
        all_BSC = all_BSC * same_BS.unsqueeze(-1).to(all_BSC.dtype)
    return all_BSC[:, all_BSC.shape[1] - count :]


def _with_tokens_before(x_BTC: Tensor, before_BKC: Tensor | None, count: int) -> Tensor:
    return F.pad(x_BTC, (0, 0, count, 0)) if before_BKC is None else torch.cat([before_BKC, x_BTC], dim=1)


def _same_document(documents_BT: Tensor, back: int) -> Tensor:
    """bool[B, T]: is the token `back` places before one of the same document? Those before the first token are of
    its."""
    earlier_BT = torch.cat([documents_BT[:, :1].expand(-1, back), documents_BT], dim=1)[:, : documents_BT.shape[1]]
    return earlier_BT == documents_BT

"""Causal depthwise convolution: each channel's weighted sum of tokens before it, `dilation` tokens apart."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gristmill.training.model.fused import fused
from gristmill.training.model.loss import upcast
from gristmill.training.parallel.tensor import Sharding, TensorAxis

# B rows, T tokens, C channels of this tensor rank, K taps, d dilation, L = (K - 1) d tokens before the first


class CausalConvolution(nn.Module):
    """y_t = b + sum over k of w_k x_(t - (K - 1 - k) d), for each channel; tokens of other documents count as zero."""

    def __init__(self, tensor: TensorAxis, channels: int, kernel: int, dilation: int = 1):
        super().__init__()
        self.tensor, self.kernel, self.dilation = tensor, kernel, dilation
        self.weight = tensor.parameter((channels, kernel), Sharding.OUTPUT)
        self.bias = tensor.parameter((channels,), Sharding.OUTPUT)

    @property
    def reach(self) -> int:
        """L: how many tokens before its own a token sees."""
        return (self.kernel - 1) * self.dilation

    def forward(self, x_BTC: Tensor, documents_BT: Tensor | None, before_BLC: Tensor | None) -> Tensor:
        """before_BLC: the L inputs before, of the document of the first token; None: there are none."""
        weight_CK, bias_C = self._local(x_BTC.dtype)
        all_BSC = _with_tokens_before(x_BTC, before_BLC, self.reach)
        if all_BSC.device.type == "cuda":
            return fused(sum_of_taps)(all_BSC, weight_CK, bias_C, self.dilation, documents_BT)
        if documents_BT is None:
            return _convolve(all_BSC, weight_CK, bias_C, self.dilation)
        return sum_of_taps(all_BSC, weight_CK, bias_C, self.dilation, documents_BT)

    def step(self, taps_BKC: Tensor) -> Tensor:
        """[B, 1, C]: the result of one token, from the inputs that its taps read, its own last."""
        weight_CK, bias_C = self._local(taps_BKC.dtype)
        return torch.einsum("bkc,ck->bc", taps_BKC, weight_CK).add(bias_C).unsqueeze(1)

    def _local(self, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        weight_CK = self.tensor.local(self.weight, Sharding.OUTPUT, dtype)
        return weight_CK, self.tensor.local(self.bias, Sharding.OUTPUT, dtype)


def sum_of_taps(
    all_BSC: Tensor, weight_CK: Tensor, bias_C: Tensor, dilation: int, documents_BT: Tensor | None
) -> Tensor:
    """Tap after tap, summed in float32 or better. A compiler makes one kernel of it."""
    reach = (weight_CK.shape[1] - 1) * dilation
    tokens, y_BTC = all_BSC.shape[1] - reach, upcast(bias_C)
    for tap in range(weight_CK.shape[1]):
        first = tap * dilation
        term_BTC = upcast(all_BSC[:, first : first + tokens]) * upcast(weight_CK[:, tap])
        back = reach - first
        if back and documents_BT is not None:
            same_BT = _same_document(documents_BT, back)
            term_BTC = term_BTC * same_BT.unsqueeze(-1).to(term_BTC.dtype)
        y_BTC = y_BTC + term_BTC
    return y_BTC.to(all_BSC.dtype)


def _convolve(all_BSC: Tensor, weight_CK: Tensor, bias_C: Tensor, dilation: int) -> Tensor:
    """As a convolution down the columns of an image d tokens wide, which needs neither dilation nor a transposition.

    16,384 tokens of 64 channels, 17 taps, on one core of an EPYC 9004 (2026-11-22): forward 1.5 to 2.2 ms and backward
    3 to 8 ms, where conv1d takes 3 to 4 ms and 30 to 46 ms."""
    spare = -all_BSC.shape[1] % dilation
    padded_BSC = F.pad(all_BSC, (0, 0, spare, 0)) if spare else all_BSC
    image_BCRd = padded_BSC.unflatten(1, (-1, dilation)).permute(0, 3, 1, 2)
    y_BCRd = F.conv2d(image_BCRd, weight_CK[:, None, :, None], bias_C, groups=len(weight_CK))
    return y_BCRd.permute(0, 2, 3, 1).flatten(1, 2)[:, spare:]


def last_inputs(x_BTC: Tensor, documents_BT: Tensor | None, before_BLC: Tensor | None, count: int) -> Tensor:
    """The last `count` inputs for the next call; those that are not of the last token's document are zero."""
    all_BSC = _with_tokens_before(x_BTC, before_BLC, count)
    if documents_BT is not None:
        same_BT = documents_BT == documents_BT[:, -1:]
        same_BS = torch.cat([same_BT[:, :1].expand(-1, count), same_BT], dim=1)
        all_BSC = all_BSC * same_BS.unsqueeze(-1).to(all_BSC.dtype)
    return all_BSC[:, all_BSC.shape[1] - count :]


def _with_tokens_before(x_BTC: Tensor, before_BLC: Tensor | None, count: int) -> Tensor:
    return F.pad(x_BTC, (0, 0, count, 0)) if before_BLC is None else torch.cat([before_BLC, x_BTC], dim=1)


def _same_document(documents_BT: Tensor, back: int) -> Tensor:
    """bool[B, T]: is the token `back` places before one of the same document? Those before the first token are of
    its."""
    earlier_BT = torch.cat([documents_BT[:, :1].expand(-1, back), documents_BT], dim=1)[:, : documents_BT.shape[1]]
    return earlier_BT == documents_BT

"""Cross entropy straight from the hidden states, over a vocabulary that may be cut, without ever holding all logits.

Tokens go through in chunks; each chunk's logits live only until its loss and its gradient are taken. On a cut
vocabulary two small all-reduces a chunk (the maximum; the sum of exponentials with the target's logit) stand for the
gather."""

import math
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from gristmill.training.parallel.tensor import TensorAxis, local_ids

# B batch, T tokens, N tokens of a chunk, D width, V vocabulary; Vt = this tensor rank's share of it

CHUNK_LOGITS = 2**21  # logits of one chunk on CPU: 8 MB of float32, near the last-level cache
CHUNK_LOGITS_GPU = 2**27  # 512 MB: large enough to fill the device, small beside its memory


@dataclass(frozen=True)
class Scoring:
    """How hidden states become a loss. scale multiplies the logits (muP), softcap bounds them, z_loss weighs
    log(Z)^2."""

    tensor: TensorAxis
    vocab_size: int
    scale: float = 1.0
    softcap: float | None = None
    z_loss: float = 0.0

    def logits(self, hidden_D: Tensor, head_VtD: Tensor) -> Tensor:
        """[..., D] -> this rank's [..., Vt], in float32 or better."""
        raw = exact(hidden_D @ head_VtD.T) * self.scale
        return raw if self.softcap is None else self.softcap * torch.tanh(raw / self.softcap)


def losses(scoring: Scoring, hidden_BTD: Tensor, head_VtD: Tensor, targets_BT: Tensor, weights_BT: Tensor) -> Tensor:
    """[B, 2]: column 0 the loss of each sample summed over its tokens by weight, with the z-loss; column 1 the negative
    log-likelihood alone, for show. Only column 0 has a gradient, and it is meant to be summed over the samples."""
    return _LinearCrossEntropy.apply(hidden_BTD, head_VtD, targets_BT, weights_BT, scoring)


class _LinearCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, hidden_BTD: Tensor, head_VtD: Tensor, targets_BT: Tensor, weights_BT: Tensor, scoring: Scoring
    ) -> Tensor:
        wanted = any(ctx.needs_input_grad[:2])
        hidden, targets, weights = hidden_BTD.flatten(0, 1), targets_BT.flatten(), weights_BT.flatten()
        hidden_gradient = torch.empty_like(hidden) if wanted else None
        head_gradient = torch.zeros_like(head_VtD, dtype=exact_dtype(head_VtD)) if wanted else None
        terms_N2 = []
        for chunk in _chunks(len(targets), head_VtD):
            terms, logits_gradient = _chunk_loss(scoring, hidden[chunk], head_VtD, targets[chunk], weights[chunk])
            terms_N2.append(terms)
            if wanted:
                logits_gradient = logits_gradient.to(hidden.dtype)
                hidden_gradient[chunk] = logits_gradient @ head_VtD
                head_gradient += logits_gradient.T @ hidden[chunk]
        if wanted:
            ctx.save_for_backward(hidden_gradient.view_as(hidden_BTD), head_gradient.to(head_VtD.dtype))
        return torch.cat(terms_N2).unflatten(0, targets_BT.shape).sum(dim=1)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient_B2: Tensor) -> tuple[Tensor | None, ...]:
        hidden_gradient, head_gradient = ctx.saved_tensors
        factor = gradient_B2[0, 0]  # the samples are summed, so each has the same
        return (
            hidden_gradient * factor.to(hidden_gradient.dtype),
            head_gradient * factor.to(head_gradient.dtype),
            *[None] * 3,
        )


def _chunk_loss(
    scoring: Scoring, hidden_ND: Tensor, head_VtD: Tensor, targets_N: Tensor, weights_N: Tensor
) -> tuple[Tensor, Tensor]:
    """The chunk's terms [N, 2] and the gradient of their column 0 by the raw logits [N, Vt]."""
    logits_NVt = scoring.logits(hidden_ND, head_VtD)
    index_N, mine_N = local_ids(targets_N, scoring.vocab_size, scoring.tensor, len(head_VtD))
    highest_N = _over_ranks(logits_NVt.amax(dim=1), scoring.tensor, dist.ReduceOp.MAX)
    exponentials_NVt = (logits_NVt - highest_N.unsqueeze(1)).exp_()
    target_N = logits_NVt.gather(1, index_N.unsqueeze(1)).squeeze(1) * mine_N
    total_N, target_N = _over_ranks(
        torch.stack([exponentials_NVt.sum(dim=1), target_N]), scoring.tensor, dist.ReduceOp.SUM
    )
    log_z_N = total_N.log() + highest_N
    weights_N = weights_N.to(log_z_N.dtype)
    likelihood_N = weights_N * (log_z_N - target_N)
    loss_N = likelihood_N + scoring.z_loss * weights_N * log_z_N.square()
    slope_N = weights_N * (1 + 2 * scoring.z_loss * log_z_N) / total_N
    gradient_NVt = exponentials_NVt.mul_(slope_N.unsqueeze(1))
    gradient_NVt.scatter_add_(1, index_N.unsqueeze(1), -(weights_N * mine_N).unsqueeze(1))
    if scoring.softcap is not None:
        gradient_NVt *= 1 - (logits_NVt / scoring.softcap).square()
    return torch.stack([loss_N, likelihood_N], dim=1), gradient_NVt.mul_(scoring.scale)


def _over_ranks(x: Tensor, tensor: TensorAxis, operation: Any) -> Tensor:
    if tensor.size > 1:
        dist.all_reduce(x, operation, group=tensor.mesh.tensor.group)
    return x


def _chunks(tokens: int, head_VtD: Tensor) -> list[slice]:
    limit = CHUNK_LOGITS if head_VtD.device.type == "cpu" else CHUNK_LOGITS_GPU
    size = max(1, min(tokens, limit // len(head_VtD)))
    number = math.ceil(tokens / size)
    return [slice(tokens * i // number, tokens * (i + 1) // number) for i in range(number)]


def exact_dtype(x: Tensor) -> torch.dtype:
    """The dtype of statistics: float64 stays, all else is float32."""
    return torch.float64 if x.dtype == torch.float64 else torch.float32


def exact(x: Tensor) -> Tensor:
    return x.to(exact_dtype(x))

"""Fused linear cross entropy: losses from hidden states over a vocabulary that may be sharded, without all logits.

Tokens go through in chunks; each chunk's logits live only until its loss and its gradient are taken. On a sharded
vocabulary two small all-reduces a chunk (the maximum; the sum of exponentials with the target's logit) replace the
gather."""

import math
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from gristmill.training.config.layout import CHUNK_LOGITS
from gristmill.training.model.cpu_kernels import exponentials_of_rows
from gristmill.training.model.fused import fused
from gristmill.training.parallel.linear import linear, matmul
from gristmill.training.parallel.tensor import TensorAxis, local_ids

# B batch, T tokens, N tokens of a chunk, D width, V vocabulary; Vt = this tensor rank's share of it

TILE_LOGITS = 2**18  # on CPU what is done element by element goes in pieces of 1 MB, which stay in the cache
HALF_UNIT = 1024.0  # see _chunk_loss


@dataclass(frozen=True)
class Scoring:
    """Computes logits and loss of hidden states. scale: factor of the logits (muP). softcap: bound of the logits.
    z_loss: weight of log(Z)^2."""

    tensor: TensorAxis
    vocab_size: int
    scale: float = 1.0
    softcap: float | None = None
    z_loss: float = 0.0

    def logits(self, hidden_D: Tensor, head_VtD: Tensor) -> Tensor:
        """[..., D] -> this rank's [..., Vt], in float32 or better."""
        return self.shaped(upcast(linear(hidden_D, head_VtD, None)))

    def shaped(self, raw: Tensor) -> Tensor:
        """Logits of the matmul's result: scaled and soft-capped. Monotonic, so the maximum keeps its place."""
        return shaped_logits(raw, self.scale, self.softcap)

    def best(self, logits_BTVt: Tensor) -> Tensor:
        """The id of the largest logit, int64[B, T]; of equal ones the lowest."""
        highest_BT, index_BT = logits_BTVt.max(dim=-1)
        if self.tensor.size == 1:
            return index_BT
        ids_BT = index_BT + self.tensor.rank * math.ceil(self.vocab_size / self.tensor.size)
        best_BT = over_ranks(highest_BT.clone(), self.tensor, dist.ReduceOp.MAX)
        return over_ranks(ids_BT.where(highest_BT == best_BT, self.vocab_size), self.tensor, dist.ReduceOp.MIN)


def shaped_logits(raw: Tensor, scale: float, softcap: float | None) -> Tensor:
    """`Scoring.shaped`, of numbers alone."""
    scaled = raw if scale == 1 else raw * scale
    return scaled if softcap is None else softcap * torch.tanh(scaled / softcap)


def losses(scoring: Scoring, hidden_BTD: Tensor, head_VtD: Tensor, targets_BT: Tensor, weights_BT: Tensor) -> Tensor:
    """[B, 2]: the negative log-likelihood of each sample and its z-loss, summed over the tokens by weight.

    Callers sum both columns over the samples with one factor: the gradient is taken for that sum."""
    return _LinearCrossEntropy.apply(hidden_BTD, head_VtD, targets_BT, weights_BT, scoring)


class _LinearCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, hidden_BTD: Tensor, head_VtD: Tensor, targets_BT: Tensor, weights_BT: Tensor, scoring: Scoring
    ) -> Tensor:
        wanted, stored = any(ctx.needs_input_grad[:2]), head_VtD.dtype
        hidden, targets, weights = hidden_BTD.flatten(0, 1), targets_BT.flatten(), weights_BT.flatten()
        head_VtD = head_VtD.to(hidden.dtype)
        hidden_gradient, head_gradient = torch.empty_like(hidden), None
        chunks, terms_N2 = token_chunks(len(targets), head_VtD), []
        for chunk in chunks:
            raw_NVt = matmul(hidden[chunk], head_VtD.T)
            terms, slope_N1 = _chunk_loss(scoring, raw_NVt, targets[chunk], weights[chunk], wanted)
            terms_N2.append(terms)
            if wanted:
                hidden_gradient[chunk] = matmul(raw_NVt, head_VtD) * slope_N1
                sloped_ND = (hidden[chunk] * slope_N1).to(hidden.dtype)
                head_gradient = _plus_product(head_gradient, raw_NVt.T, sloped_ND)
            del raw_NVt  # before those of the next chunk are made
        if head_gradient is not None:
            ctx.save_for_backward(hidden_gradient.view_as(hidden_BTD), head_gradient.to(stored))
            ctx.multiplied = False
        return torch.cat(terms_N2).unflatten(0, targets_BT.shape).sum(dim=1)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient_B2: Tensor) -> tuple[Tensor | None, ...]:
        gradients = ctx.saved_tensors
        if not ctx.multiplied:  # in place, and once: schedules that split the backward pass come here twice
            factor = gradient_B2[0, 0]  # of all samples and of both columns
            for gradient in gradients:
                gradient.data.mul_(factor.to(gradient.dtype))
            ctx.multiplied = True
        return *gradients, None, None, None


def _chunk_loss(
    scoring: Scoring, raw_NVt: Tensor, targets_N: Tensor, weights_N: Tensor, wanted: bool
) -> tuple[Tensor, Tensor]:
    """The chunk's terms [N, 2], and slope [N, 1]: where a gradient is wanted, raw times slope is that of their sum.

    The gradient by a logit is weight x (p (1 + 2 z log Z) - [it is the target]), and p = e / total. What is left in raw
    is that times total / weight, e - total at the target, so that dividing by the total costs one number a token and no
    pass over all logits. float16 cannot hold a total: there it is times 1024 / weight."""
    index_N, mine_N = local_ids(targets_N, scoring.vocab_size, scoring.tensor, raw_NVt.shape[1])
    target_N = scoring.shaped(upcast(raw_NVt.gather(1, index_N.unsqueeze(1)).squeeze(1))) * mine_N
    highest_N, total_N, bent_NVt = _softmax_sums(scoring, raw_NVt, wanted)
    total_N, target_N = over_ranks(torch.stack([total_N, target_N]), scoring.tensor, dist.ReduceOp.SUM)
    log_z_N = total_N.log() + highest_N
    weights_N = weights_N.to(log_z_N.dtype)
    nll_N = weights_N * (log_z_N - target_N)
    z_loss_N = scoring.z_loss * weights_N * log_z_N.square()
    half = raw_NVt.dtype == torch.float16
    unit_N = torch.full_like(total_N, HALF_UNIT) if half else total_N
    if wanted:
        factor_N = (1 + 2 * scoring.z_loss * log_z_N) * unit_N / total_N
        target = index_N, unit_N * mine_N
        if fuses(raw_NVt):
            fused(to_gradient, tuned=True)(raw_NVt, highest_N, factor_N, target, scoring.scale, scoring.softcap)
        else:
            _to_gradient(raw_NVt, factor_N if half or scoring.z_loss else None, *target, bent_NVt)
    return torch.stack([nll_N, z_loss_N], dim=1), (scoring.scale * weights_N / unit_N).unsqueeze(1)


def _softmax_sums(scoring: Scoring, raw_NVt: Tensor, wanted: bool) -> tuple[Tensor, Tensor, Tensor | None]:
    """(highest logit of all ranks, this rank's sum of exponentials, slope of the soft cap). Where nothing is fused, raw
    becomes the exponentials."""
    if not fuses(raw_NVt):
        if _is_one_kernel(scoring, raw_NVt):
            return *exponentials_of_rows(raw_NVt), None
        highest_N = over_ranks(scoring.shaped(upcast(raw_NVt.amax(dim=1))), scoring.tensor, dist.ReduceOp.MAX)
        return highest_N, *_exponentials(scoring, raw_NVt, highest_N, wanted)
    own_highest_N, own_total_N = fused(softmax_sums, tuned=True)(raw_NVt, scoring.scale, scoring.softcap)
    highest_N = over_ranks(own_highest_N.clone(), scoring.tensor, dist.ReduceOp.MAX)
    return highest_N, own_total_N * (own_highest_N - highest_N).exp(), None


def _is_one_kernel(scoring: Scoring, raw_NVt: Tensor) -> bool:
    """Whether a kernel of the CPU makes the exponentials."""
    is_plain = scoring.tensor.size == 1 and scoring.scale == 1 and scoring.softcap is None
    return is_plain and raw_NVt.dtype == torch.bfloat16 and raw_NVt.device.type == "cpu" and raw_NVt.is_contiguous()


def _to_gradient(
    raw_NVt: Tensor, factor_N: Tensor | None, index_N: Tensor, subtracted_N: Tensor, bent_NVt: Tensor | None
) -> None:
    if factor_N is not None:
        raw_NVt *= factor_N.unsqueeze(1)
    # Set by index: torch's scatters copy all of a bfloat16 tensor to change a few of its elements.
    row_N = torch.arange(len(index_N), device=index_N.device)
    raw_NVt[row_N, index_N] = (raw_NVt[row_N, index_N] - subtracted_N).to(raw_NVt.dtype)
    if bent_NVt is not None:
        raw_NVt *= bent_NVt


# On a GPU the work on all logits is two kernels that a compiler makes of these functions: one reads them for the sums,
# one reads them and writes the gradient in their place.


def fuses(raw_NVt: Tensor) -> bool:
    """Whether the work is done by these kernels."""
    return raw_NVt.device.type == "cuda"


def softmax_sums(raw_NVt: Tensor, scale: float, softcap: float | None) -> tuple[Tensor, Tensor]:
    """(highest logit [N], sum of exp(logit - highest) [N]), in float32 or better."""
    logits_NVt = shaped_logits(upcast(raw_NVt), scale, softcap)
    highest_N = logits_NVt.amax(dim=1)
    return highest_N, (logits_NVt - highest_N.unsqueeze(1)).exp().sum(dim=1)


def to_gradient(
    raw_NVt: Tensor,
    highest_N: Tensor,
    factor_N: Tensor,
    target: tuple[Tensor, Tensor],
    scale: float,
    softcap: float | None,
) -> None:
    """raw becomes factor x exp(logit - highest), less what is subtracted at the target, times the slope of the soft
    cap. target: its index and what is subtracted, [N] each."""
    index_N, subtracted_N = target
    logits_NVt = shaped_logits(upcast(raw_NVt), scale, softcap)
    slope_NVt = (logits_NVt - highest_N.unsqueeze(1)).exp() * factor_N.unsqueeze(1)
    is_target_NVt = torch.arange(raw_NVt.shape[1], device=raw_NVt.device) == index_N.unsqueeze(1)
    slope_NVt = slope_NVt - torch.where(is_target_NVt, subtracted_N.unsqueeze(1), 0)
    if softcap is not None:
        slope_NVt = slope_NVt * (1 - (logits_NVt / softcap).square())
    raw_NVt.copy_(slope_NVt)


def _exponentials(scoring: Scoring, raw_NVt: Tensor, highest_N: Tensor, wanted: bool) -> tuple[Tensor, Tensor | None]:
    """raw becomes exp(logit - highest); their sums [N] in float32 or better, and the slope of the soft cap."""
    total_N = torch.empty_like(highest_N)
    bent_NVt = torch.empty_like(raw_NVt) if wanted and scoring.softcap is not None else None
    rows = len(raw_NVt) if raw_NVt.device.type != "cpu" else max(1, TILE_LOGITS // raw_NVt.shape[1])
    for start in range(0, len(raw_NVt), rows):
        tile = slice(start, start + rows)
        raw = raw_NVt[tile]
        logits = scoring.shaped(upcast(raw))
        if bent_NVt is not None and scoring.softcap is not None:
            bent_NVt[tile] = 1 - (logits / scoring.softcap).square()
        total_N[tile] = logits.sub_(highest_N[tile].unsqueeze(1)).exp_().sum(dim=1)
        if logits is not raw:
            raw.copy_(logits)
    return total_N, bent_NVt


def _plus_product(total: Tensor | None, left: Tensor, right: Tensor) -> Tensor:
    """total + left @ right, summed in float32 or better, in place."""
    wide = upcast_dtype(left)
    if wide == left.dtype:
        return matmul(left, right) if total is None else total.add_(matmul(left, right))
    product = matmul(left, right)
    if total is None:
        return product.to(wide)
    rows = len(product) if product.device.type != "cpu" else max(1, TILE_LOGITS // product.shape[1])
    for part, sum_of_part in zip(product.split(rows), total.split(rows), strict=True):
        sum_of_part.add_(part)  # converts in the cache
    return total


def token_log_probs(scoring: Scoring, logits_BTVt: Tensor, targets_BT: Tensor) -> Tensor:
    """log p(target), [B, T], of this rank's logits; the gradient may differ from token to token."""
    return _TokenLogProbs.apply(logits_BTVt, targets_BT, scoring)


class _TokenLogProbs(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits_BTVt: Tensor, targets_BT: Tensor, scoring: Scoring) -> Tensor:
        index_BT, mine_BT = local_ids(targets_BT, scoring.vocab_size, scoring.tensor, logits_BTVt.shape[-1])
        highest_BT = over_ranks(logits_BTVt.amax(dim=-1), scoring.tensor, dist.ReduceOp.MAX)
        target_BT = logits_BTVt.gather(-1, index_BT.unsqueeze(-1)).squeeze(-1) * mine_BT
        exponentials_BTVt = (logits_BTVt - highest_BT.unsqueeze(-1)).exp()
        sums = torch.stack([exponentials_BTVt.sum(dim=-1), target_BT])
        total_BT, target_BT = over_ranks(sums, scoring.tensor, dist.ReduceOp.SUM)
        ctx.save_for_backward(exponentials_BTVt / total_BT.unsqueeze(-1), index_BT, mine_BT)
        return target_BT - total_BT.log() - highest_BT

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient_BT: Tensor) -> tuple[Tensor, None, None]:
        chance_BTVt, index_BT, mine_BT = ctx.saved_tensors
        slope_BTVt = chance_BTVt * -gradient_BT.unsqueeze(-1)
        slope_BTVt.scatter_add_(-1, index_BT.unsqueeze(-1), (gradient_BT * mine_BT).unsqueeze(-1))
        return slope_BTVt, None, None


def over_ranks(x: Tensor, tensor: TensorAxis, operation: Any) -> Tensor:
    if tensor.size > 1:
        dist.all_reduce(x, operation, group=tensor.mesh.tensor.group)
    return x


def token_chunks(tokens: int, head_VtD: Tensor) -> list[slice]:
    limit = CHUNK_LOGITS["cuda" if head_VtD.is_cuda else "cpu"][head_VtD.element_size()]
    size = max(1, min(tokens, limit // len(head_VtD)))
    number = math.ceil(tokens / size)
    if head_VtD.device.type == "cuda":  # chunks of one size, where there are, are compiled for it
        number = next((more for more in range(number, 2 * number) if tokens % more == 0), number)
    return [slice(tokens * i // number, tokens * (i + 1) // number) for i in range(number)]


def upcast_dtype(x: Tensor) -> torch.dtype:
    """The dtype of statistics: float64 stays, all else is float32."""
    return torch.float64 if x.dtype == torch.float64 else torch.float32


def upcast(x: Tensor) -> Tensor:
    return x.to(upcast_dtype(x))

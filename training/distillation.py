"""Distillation: the KL divergence of the student's next tokens from a teacher's, over a vocabulary that may be sharded.

Like the cross entropy (loss.py) it goes in chunks, so that the logits of all tokens are never in memory at once, and on
a sharded vocabulary exchanges a few numbers a token: the two maxima, the two sums of exponentials, the divergence."""

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from gristmill.training.loss import Scoring, over_ranks, token_chunks, upcast

# B batch, T tokens, N tokens of a chunk, D width, V vocabulary; Vt = this tensor rank's share of it


@dataclass(frozen=True)
class Distillation:
    """The teacher's head [Vt, D] and how it scores; the loss is temperature^2 x KL (Hinton et al., arXiv 1503.02531,
    section 2.1)."""

    scoring: Scoring
    head_VtD: Tensor
    temperature: float


def distillation_losses(
    student: Scoring,
    hidden_BTD: Tensor,
    head_VtD: Tensor,
    teacher_BTD: Tensor,
    weights_BT: Tensor,
    distillation: Distillation,
) -> Tensor:
    """[B]: the divergence of each sample, summed over its tokens by weight; callers sum it with one factor."""
    return _Divergence.apply(hidden_BTD, head_VtD, teacher_BTD, weights_BT, (student, distillation))


class _Divergence(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden_BTD: Tensor,
        head_VtD: Tensor,
        teacher_BTD: Tensor,
        weights_BT: Tensor,
        models: tuple[Scoring, Distillation],
    ) -> Tensor:
        student, distillation = models
        hidden_ND, teacher_ND, weights_N = hidden_BTD.flatten(0, 1), teacher_BTD.flatten(0, 1), weights_BT.flatten()
        computed_VtD = head_VtD.to(hidden_ND.dtype)
        hidden_gradient = torch.empty_like(hidden_ND)
        head_gradient = torch.zeros_like(computed_VtD, dtype=upcast(computed_VtD).dtype)
        losses_N = []
        for chunk in token_chunks(len(hidden_ND), computed_VtD):
            raw_NVt = upcast(hidden_ND[chunk] @ computed_VtD.T)
            theirs_NVt = distillation.scoring.logits(teacher_ND[chunk], distillation.head_VtD)
            loss_N, slope_NVt = _chunk(student, raw_NVt, theirs_NVt, weights_N[chunk], distillation)
            losses_N.append(loss_N)
            slope_NVt = slope_NVt.to(hidden_ND.dtype)
            hidden_gradient[chunk] = slope_NVt @ computed_VtD
            head_gradient += slope_NVt.T @ hidden_ND[chunk]
        ctx.save_for_backward(hidden_gradient.view_as(hidden_BTD), head_gradient.to(head_VtD.dtype))
        return torch.cat(losses_N).unflatten(0, weights_BT.shape).sum(dim=1)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient_B: Tensor) -> tuple[Tensor | None, ...]:
        hidden_gradient, head_gradient = ctx.saved_tensors
        factor = gradient_B[0]  # the samples are summed, so each has the same
        return hidden_gradient * factor.to(hidden_gradient.dtype), head_gradient * factor, None, None, None


def _chunk(
    student: Scoring, raw_NVt: Tensor, theirs_NVt: Tensor, weights_N: Tensor, distillation: Distillation
) -> tuple[Tensor, Tensor]:
    """The chunk's losses [N], and their gradient by the raw products of the student's head.

    By a logit divided by the temperature it is p_student - p_teacher; temperature^2 / temperature is left."""
    temperature = distillation.temperature
    shaped_NVt = student.shaped(raw_NVt)
    ours_NVt = _log_softmax(shaped_NVt / temperature, student)
    theirs_NVt = _log_softmax(theirs_NVt / temperature, student)
    chance_NVt = theirs_NVt.exp()
    divergence_N = over_ranks((chance_NVt * (theirs_NVt - ours_NVt)).sum(dim=1), student.tensor, dist.ReduceOp.SUM)
    weights_N = weights_N.to(raw_NVt.dtype)
    slope_NVt = (ours_NVt.exp() - chance_NVt) * (weights_N * temperature * student.scale).unsqueeze(1)
    if student.softcap is not None:
        slope_NVt = slope_NVt * (1 - (shaped_NVt / student.softcap).square())
    return weights_N * temperature**2 * divergence_N, slope_NVt


def _log_softmax(logits_NVt: Tensor, scoring: Scoring) -> Tensor:
    highest_N = over_ranks(logits_NVt.amax(dim=1), scoring.tensor, dist.ReduceOp.MAX)
    shifted_NVt = logits_NVt - highest_N.unsqueeze(1)
    total_N = over_ranks(shifted_NVt.exp().sum(dim=1), scoring.tensor, dist.ReduceOp.SUM)
    return shifted_NVt - total_N.log().unsqueeze(1)

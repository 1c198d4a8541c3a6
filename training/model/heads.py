"""The head: final hidden states to logits over the vocabulary."""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Protocol

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from gristmill.training.config.model import ModelConfig
from gristmill.training.model.loss import (
    Scoring,
    losses,
    over_ranks,
    token_chunks,
    token_log_probs,
    upcast,
    upcast_dtype,
)
from gristmill.training.model.modules import Norm, gelu_approximation
from gristmill.training.parallel.context import TokenShares
from gristmill.training.parallel.tensor import Sharding, TensorAxis

# B rows, T tokens, D width, V vocabulary; Tt, Vt = this tensor rank's share
# E columns of the product: D, or D and those of the bias

BIAS_COLUMNS = 8  # the bias is a column of the matrix; the other seven keep its rows a multiple of 16 bytes


class Head(nn.Module):
    """norm(gelu(x W + b)) where the model has a transform (BERT), then the product with the output table. Tied, its
    weight is the embedding's."""

    def __init__(self, config: ModelConfig, vocab_size: int, tensor: TensorAxis, z_loss: float):
        super().__init__()
        self.tensor = tensor
        self.weight = tensor.parameter((vocab_size, config.width), Sharding.OUTPUT)
        scale = config.mup_base_width / config.width if config.init_method == "mup" else 1.0
        scale /= config.scales.logit_divisor
        self.scoring = Scoring(tensor, vocab_size, scale, config.logit_softcap, z_loss)
        self.transform = HeadTransform(config, tensor) if config.head_transform else None
        self.bias = tensor.parameter((vocab_size,), Sharding.OUTPUT) if config.head_bias else None

    def forward(self, hidden_BTtD: Tensor) -> Tensor:
        """This rank's logits [B, T, Vt], in float32 or better."""
        return self.scoring.logits(*self._factors(hidden_BTtD, hidden_BTtD.dtype))

    def inputs(self, hidden_BTtD: Tensor) -> tuple[Tensor, Tensor]:
        """The factors of the logits: hidden states [B, T, E] and this rank's rows of the table [Vt, E], in the table's
        own dtype, so that their gradient is summed in it. FSDP's hooks run before and after, as they do for `forward`,
        so neither calls the other."""
        return self._factors(hidden_BTtD, None)

    def _factors(self, hidden_BTtD: Tensor, dtype: torch.dtype | None) -> tuple[Tensor, Tensor]:
        if self.transform is not None:
            hidden_BTtD = self.transform(hidden_BTtD)
        hidden_BTD = self.tensor.enter(hidden_BTtD)
        matrix_VtD = self.tensor.local(self.weight, Sharding.OUTPUT, dtype or self.weight.dtype)
        if self.bias is None:
            return hidden_BTD, matrix_VtD
        bias_Vt = self.tensor.local(self.bias, Sharding.OUTPUT, matrix_VtD.dtype)
        ones = F.pad(hidden_BTD.new_ones(*hidden_BTD.shape[:-1], 1), (0, BIAS_COLUMNS - 1))
        columns = F.pad(bias_Vt.unsqueeze(1), (0, BIAS_COLUMNS - 1))
        return torch.cat([hidden_BTD, ones], dim=-1), torch.cat([matrix_VtD, columns], dim=1)


class HeadTransform(nn.Module):
    """norm(gelu(x W + b)) before the output table (BERT, arXiv 1810.04805), on this rank's tokens."""

    def __init__(self, config: ModelConfig, tensor: TensorAxis):
        super().__init__()
        self.tensor, self.approximate = tensor, gelu_approximation(config)
        self.weight = tensor.parameter((config.width, config.width), Sharding.REPLICATED)
        self.bias = tensor.parameter((config.width,), Sharding.REPLICATED)
        self.norm = Norm(config, tensor, config.width)

    def forward(self, x_BTtD: Tensor) -> Tensor:
        weight_DD = self.tensor.local(self.weight, Sharding.REPLICATED, x_BTtD.dtype)
        bias_D = self.tensor.local(self.bias, Sharding.REPLICATED, x_BTtD.dtype)
        return self.norm(F.gelu(F.linear(x_BTtD, weight_DD, bias_D), approximate=self.approximate))


class FrozenHead:
    """The head of a frozen model: this tensor rank's rows of its table, gathered over the data ranks."""

    def __init__(self, scoring: Scoring, matrix_VtD: Tensor):
        self.scoring, self.matrix_VtD = scoring, matrix_VtD

    def __call__(self, hidden_BTtD: Tensor) -> Tensor:
        return self.scoring.logits(*self.inputs(hidden_BTtD))

    def inputs(self, hidden_BTtD: Tensor) -> tuple[Tensor, Tensor]:
        return self.scoring.tensor.enter(hidden_BTtD), self.matrix_VtD


# Named linear outputs beside the vocabulary's (`model.outputs`): classes of a sample, labels of its tokens.

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


# The model after its forward pass on a batch: what an objective computes its loss and its predictions from.

# B samples, R rows of a sample (one sequence of tokens each), T tokens, D width
# N = B x R rows of the forward pass; a small t after a letter = this tensor rank's share, c this context rank's


class ScoringStage(Protocol):
    """The parts of the model's last stage that an output uses."""

    @property
    def tensor(self) -> TensorAxis: ...

    @property
    def head(self) -> Head | FrozenHead: ...

    @property
    def outputs(self) -> NamedOutputs | None: ...

    @property
    def teacher(self) -> "TeacherStage | None": ...


@dataclass(frozen=True)
class TeacherStage:
    """The end of the frozen model of train.teacher."""

    tensor: TensorAxis
    head: FrozenHead
    outputs: None = None
    teacher: None = None


class ModelOutput:
    """Results have the dimensions of the batch's `tokens`: [B, T], or [B, R, T] where a sample has several rows.

    Results are whole and equal on all tensor and context ranks, whatever the layout, and so are their gradients."""

    def __init__(
        self,
        stage: ScoringStage,
        hidden_NTtD: Tensor,
        batch: Mapping[str, Tensor],
        shares: TokenShares | None = None,
    ):
        self._stage, self._hidden_NTtD, self._batch, self._shares = stage, hidden_NTtD, batch, shares
        self._rows = batch["tokens"].shape[:-1]

    @cached_property
    def hidden_states(self) -> Tensor:
        """[B, T, D] or [B, R, T, D], after the final norm."""
        return self._by_token(self._stage.tensor.whole_tokens(self._hidden_NTtD))

    def token_losses(self, targets: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
        """(negative log-likelihood of the targets, z-loss): float[B] or [B, R], each summed over the tokens by weight.

        Never holds the logits of all tokens. Both go into the loss as plain sums over the samples, with one factor; for
        any other function of the likelihoods take `log_probs`."""
        found_N2 = losses(self._stage.head.scoring, *self._factors, self._own(targets), self._own(weights))
        nll, z_loss = self._summed(found_N2).unbind(dim=-1)
        return nll, z_loss

    def log_probs(self, targets: Tensor) -> Tensor:
        """log p(target), [B, T] or [B, R, T]. Holds the logits of all tokens."""
        return self._by_token(token_log_probs(self._stage.head.scoring, self._logits_NTVt, self._own(targets)))

    def best_tokens(self) -> Tensor:
        """The most probable token of each place, int64[B, T] or [B, R, T]."""
        return self._by_token(self._stage.head.scoring.best(self._logits_NTVt))

    def output(self, name: str) -> Tensor:
        """The linear output NAME of `model.outputs` in the recipe: [B, size] (or [B, R, size]) of the pooled first
        token, or [B, T, size] of every token."""
        outputs = self._stage.outputs
        if outputs is None or name not in outputs.linear:
            there = sorted(outputs.linear) if outputs is not None else []
            raise KeyError(f"the model has no output {name!r}, only {there}; add it to model.outputs in the recipe")
        return outputs(name, self.hidden_states)

    @property
    def loss_dtype(self) -> torch.dtype:
        """float64 in a float64 run, float32 otherwise."""
        return upcast_dtype(self._hidden_NTtD)

    @property
    def has_z_loss(self) -> bool:
        return self._stage.head.scoring.z_loss > 0

    @property
    def has_teacher(self) -> bool:
        """False after the share `train.teacher.stop_at_fraction` of the run."""
        return "teacher" in self._batch and self._stage.teacher is not None

    @property
    def teacher(self) -> "ModelOutput":
        """The frozen model of `train.teacher` on the same batch, without gradients."""
        if self._stage.teacher is None or "teacher" not in self._batch:
            raise KeyError("there is no teacher for this batch; set train.teacher in the recipe, ask has_teacher first")
        return ModelOutput(self._stage.teacher, self._batch["teacher"].flatten(0, -3), self._batch, self._shares)

    def divergence_from_teacher(self, weights: Tensor, temperature: float) -> Tensor:
        """temperature^2 x KL(teacher || model), float[B] or [B, R], summed over the tokens by weight; goes into the
        loss as a plain sum, as `token_losses` do."""
        teacher = self.teacher
        head = teacher._stage.head
        assert isinstance(head, FrozenHead)
        distillation = DistillationTeacher(head.scoring, head.matrix_VtD, temperature)
        teacher_NTD = self._stage.tensor.enter(teacher._hidden_NTtD)
        scoring, weights_NT = self._stage.head.scoring, self._own(weights)
        return self._summed(distillation_losses(scoring, *self._factors, teacher_NTD, weights_NT, distillation))

    @cached_property
    def _factors(self) -> tuple[Tensor, Tensor]:
        """Hidden states and output table, whose product are the logits. Taken once a pass: the table is gathered over
        the data ranks until its first backward pass is done."""
        return self._stage.head.inputs(self._hidden_NTtD)

    @property
    def _logits_NTVt(self) -> Tensor:
        hidden_NTE, matrix_VtE = self._factors
        return self._stage.head.scoring.logits(hidden_NTE, matrix_VtE.to(hidden_NTE.dtype))

    def _own(self, per_token: Tensor) -> Tensor:
        """[B, T] or [B, R, T] -> [N, Tc]."""
        per_token_NT = per_token.flatten(0, -2)
        return per_token_NT if self._shares is None else self._shares.own(per_token_NT)

    def _summed(self, sums_N: Tensor) -> Tensor:
        """Sums over this rank's tokens -> over all tokens, by sample."""
        return (sums_N if self._shares is None else self._shares.sum(sums_N)).unflatten(0, self._rows)

    def _by_token(self, per_token_NTc: Tensor) -> Tensor:
        """Values of this rank's tokens -> of all tokens, by sample."""
        every_NT = per_token_NTc if self._shares is None else self._shares.all(per_token_NTc)
        return every_NT.unflatten(0, self._rows)


# Distillation: the KL divergence of the student's next tokens from a teacher's, over a vocabulary that may be
# sharded.
#
# Like the cross entropy (loss.py) it goes in chunks, so that the logits of all tokens are never in memory at once,
# and on a sharded vocabulary exchanges a few numbers a token: the two maxima, the two sums of exponentials, the
# divergence.

# B batch, T tokens, N tokens of a chunk, D width, V vocabulary; Vt = this tensor rank's share of it


@dataclass(frozen=True)
class DistillationTeacher:
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
    distillation: DistillationTeacher,
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
        models: tuple[Scoring, DistillationTeacher],
    ) -> Tensor:
        student, distillation = models
        hidden_ND, teacher_ND, weights_N = hidden_BTD.flatten(0, 1), teacher_BTD.flatten(0, 1), weights_BT.flatten()
        computed_VtD = head_VtD.to(hidden_ND.dtype)
        hidden_gradient = torch.empty_like(hidden_ND)
        head_gradient = torch.zeros_like(computed_VtD, dtype=upcast(computed_VtD).dtype)
        losses_N = []
        for chunk in token_chunks(len(hidden_ND), computed_VtD):
            raw_NVt = upcast(hidden_ND[chunk] @ computed_VtD.T)
            teacher_NVt = distillation.scoring.logits(teacher_ND[chunk], distillation.head_VtD)
            loss_N, slope_NVt = _chunk(student, raw_NVt, teacher_NVt, weights_N[chunk], distillation)
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
    student: Scoring, raw_NVt: Tensor, teacher_NVt: Tensor, weights_N: Tensor, distillation: DistillationTeacher
) -> tuple[Tensor, Tensor]:
    """The chunk's losses [N], and their gradient by the raw products of the student's head.

    By a logit divided by the temperature it is p_student - p_teacher; temperature^2 / temperature is left."""
    temperature = distillation.temperature
    shaped_NVt = student.shaped(raw_NVt)
    student_NVt = _log_softmax(shaped_NVt / temperature, student)
    teacher_NVt = _log_softmax(teacher_NVt / temperature, student)
    chance_NVt = teacher_NVt.exp()
    divergence_N = over_ranks((chance_NVt * (teacher_NVt - student_NVt)).sum(dim=1), student.tensor, dist.ReduceOp.SUM)
    weights_N = weights_N.to(raw_NVt.dtype)
    slope_NVt = (student_NVt.exp() - chance_NVt) * (weights_N * temperature * student.scale).unsqueeze(1)
    if student.softcap is not None:
        slope_NVt = slope_NVt * (1 - (shaped_NVt / student.softcap).square())
    return weights_N * temperature**2 * divergence_N, slope_NVt


def _log_softmax(logits_NVt: Tensor, scoring: Scoring) -> Tensor:
    highest_N = over_ranks(logits_NVt.amax(dim=1), scoring.tensor, dist.ReduceOp.MAX)
    shifted_NVt = logits_NVt - highest_N.unsqueeze(1)
    total_N = over_ranks(shifted_NVt.exp().sum(dim=1), scoring.tensor, dist.ReduceOp.SUM)
    return shifted_NVt - total_N.log().unsqueeze(1)

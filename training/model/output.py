"""The model after its forward pass on a batch: what an objective computes its loss and its predictions from."""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Protocol

import torch
from torch import Tensor

from gristmill.training.distillation import Distillation, distillation_losses
from gristmill.training.loss import losses, token_log_probs, upcast_dtype
from gristmill.training.model.head import FrozenHead, Head
from gristmill.training.model.named_outputs import NamedOutputs
from gristmill.training.parallel.context import TokenShares
from gristmill.training.parallel.tensor import TensorAxis

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
        """False after the share `train.teacher.until` of the run."""
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
        theirs = self.teacher
        distillation = Distillation(theirs._stage.head.scoring, theirs._stage.head.matrix_VtD, temperature)
        teacher_NTD = self._stage.tensor.enter(theirs._hidden_NTtD)
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

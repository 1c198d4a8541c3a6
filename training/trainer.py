"""One training step: batch, forward and backward, gradient norm, update."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from gristmill.training.batches import Batches
from gristmill.training.config import TrainConfig
from gristmill.training.engine.expert_balance import ExpertBalance
from gristmill.training.engine.forward_backward import ForwardBackward
from gristmill.training.engine.gradients import gradients_of
from gristmill.training.engine.local_model import LocalModel
from gristmill.training.guard import Guard
from gristmill.training.metrics import Clock
from gristmill.training.objectives.objective import TermSpec
from gristmill.training.optim.build import Optimizer
from gristmill.training.optim.loss_scale import LossScale
from gristmill.training.optim.schedule import batch_tokens_at, learning_rate_factor
from gristmill.training.parallel.mesh import Mesh
from gristmill.training.sums import sum_over_world
from gristmill.training.teacher import Teacher


@dataclass(frozen=True)
class Progress:
    """Number of steps done, tokens trained on, and index of the next sample."""

    step: int = 0
    tokens: int = 0
    samples: int = 0


@dataclass(frozen=True)
class StepReport:
    """progress: after the step. samples: those it took. means: of each term over the batch. loss: that of the first
    term, in nats a valid token for a language model. objective: the minimised loss, the weighted sum of the means.
    valid_tokens: the count of the first term.

    skipped: why the update was skipped, or None. stop: some process received a stop request. seconds by phase: data
    (waiting for the batch), token_count_allreduce, forward, backward, pipeline, optimizer (with norm, clipping).
    expert_load: the tokens of the busiest expert over the mean of its layer, in the worst layer; None without experts.
    """

    progress: Progress
    samples: range
    loss: float
    objective: float
    means: dict[str, float]
    grad_norm: float
    learning_rate: float
    valid_tokens: float
    skipped: str | None
    stop: bool
    seconds: dict[str, float]
    tokens: int
    expert_load: float | None = None


class Trainer:
    """Trains on this process. All processes make the same calls in the same order."""

    def __init__(
        self,
        config: TrainConfig,
        model: LocalModel,
        forward_backward: ForwardBackward,
        optimizer: Optimizer,
        batches: Batches,
        mesh: Mesh,
    ):
        assert forward_backward.loss is not None
        self.terms: Sequence[TermSpec] = forward_backward.loss.terms
        self.config, self.model, self.forward_backward = config, model, forward_backward
        self.optimizer, self.batches, self.mesh = optimizer, batches, mesh
        self.gradients = gradients_of(optimizer, forward_backward, model, mesh)
        self.guard = Guard(config.guard)
        self.teacher: Teacher | None = None
        self.balance = ExpertBalance(model.stages.values(), mesh) if model.has_experts else None
        self.scale = LossScale(dynamic=config.precision == "fp16")
        self.progress = Progress()

    @property
    def finished(self) -> bool:
        return self.progress.tokens >= self.config.tokens

    def step(self, stop_wanted: bool = False, on_phase: Callable[[str], None] = lambda phase: None) -> StepReport:
        """One training step on all processes. on_phase is called at the begin of each phase (for the watchdog)."""
        clock = Clock(self.mesh.device, lambda phase: on_phase(f"step {self.progress.step + 1}, {phase}"))
        clock.begin("data")
        batch = self._next_batch()
        clock.begin("token_count_allreduce")
        counts = self._count_terms(batch, stop_wanted)
        if self.teacher is not None:
            clock.begin("teacher")
            batch |= self.teacher.outputs(batch, self.progress.tokens)
        factors = self._factors(counts)
        self.gradients.begin(1 / self.scale.value)
        losses = self.forward_backward.train(batch, factors, clock.begin)
        clock.begin("optimizer")
        expert_counts = self.balance.take_counts() if self.balance is not None else []
        self.gradients.ready()
        means, norm, valid_tokens, stop = self._results(counts, losses)
        objective = sum(term.weight * means[term.name] for term in self.terms)
        before, self.progress = self.progress, self._progress_after_batch()
        skipped = self.scale.skip_reason(norm) or self.guard.skip_reason(self.progress.step, objective, norm)
        rate_factor = learning_rate_factor(self.config.schedule, self.progress.tokens, self.config.tokens)
        if skipped is None:
            self._update(norm, rate_factor)
            if self.balance is not None:
                self.balance.update(expert_counts)
        self.gradients.clear()
        return StepReport(
            progress=self.progress,
            samples=range(before.samples, self.progress.samples),
            tokens=self.progress.tokens - before.tokens,
            loss=means[self.terms[0].name],
            objective=objective,
            means=means,
            grad_norm=norm,
            learning_rate=rate_factor * self.config.optimizer.learning_rate,
            valid_tokens=valid_tokens,
            skipped=skipped,
            stop=stop,
            seconds=clock.end(),
            expert_load=None if self.balance is None else self.balance.worst_load(expert_counts),
        )

    def _update(self, norm: float, rate_factor: float) -> None:
        self.gradients.clip(norm, self.config.optimizer.clip_norm)
        self.optimizer.step(rate_factor)
        self.model.update_copies()

    def batch_samples(self, tokens: int) -> int:
        """Number of samples of the batch drawn after `tokens` tokens."""
        return batch_tokens_at(self.config.batch_ramp, self.config.batch_tokens, tokens) // self.model.sequence_length

    def state(self) -> dict[str, Any]:
        """State of the run besides the tensors, as JSON; independent of the layout."""
        progress = {"step": self.progress.step, "tokens": self.progress.tokens, "samples": self.progress.samples}
        return {
            "progress": progress,
            "updates": self.optimizer.updates,
            "guard": self.guard.state(),
            "scale": self.scale.state(),
        }

    def restore(self, state: dict[str, Any]) -> None:
        """Restores `state` after the tensors were loaded."""
        self.progress = Progress(**state["progress"])
        self.optimizer.updates = state["updates"]
        self.guard.restore(state["guard"])
        self.scale.restore(state["scale"])
        self.model.update_copies()

    def _next_batch(self) -> dict[str, Tensor]:
        batch = self.batches.take(self.progress.samples, self.batch_samples(self.progress.tokens))
        after = self._progress_after_batch()
        self.batches.prepare(after.samples, self.batch_samples(after.tokens))
        return batch

    def _progress_after_batch(self) -> Progress:
        now, samples = self.progress, self.batch_samples(self.progress.tokens)
        return Progress(now.step + 1, now.tokens + samples * self.model.sequence_length, now.samples + samples)

    @property
    def _counted(self) -> list[str | None]:
        """The fields whose counts divide terms, each once."""
        return list(dict.fromkeys(term.count for term in self.terms))

    def _count_terms(self, batch: dict[str, Tensor], stop_wanted: bool) -> Tensor:
        """The counts over the global batch, and the number of processes that want to stop: float64[counted + 1].

        Counts divide the terms, so they are needed before the first backward pass; it reads them on the device."""
        own = {term.count: term.counts(batch).sum() for term in self.terms}
        sums = sum_over_world([*own.values(), float(stop_wanted)], self.mesh)
        sums[:-1] = (sums[:-1] / (self.mesh.world.size / self.mesh.data.size)).clamp(min=1.0)
        return sums

    def _factors(self, counts: Tensor) -> Tensor:
        """Of each term of the loss, float64[terms] on the device."""
        weights = counts.new_tensor([self.scale.value * term.weight for term in self.terms])
        return weights / torch.stack([counts[self._counted.index(term.count)] for term in self.terms])

    def _results(self, counts: Tensor, losses_bn: Tensor | None) -> tuple[dict[str, float], float, float, bool]:
        """(mean of each term over the global batch, gradient norm, count of the first term, whether to stop): the one
        place of a step that waits for the device. Only processes with the last stage have losses."""
        own = [0.0] * len(self.terms) if losses_bn is None else list(losses_bn.sum(dim=0, dtype=torch.float64))
        sums = sum_over_world([*own, self.gradients.square_sum()], self.mesh)
        *values, square, stop = torch.cat([sums[:-1], counts[:-1], sums[-1:], counts[-1:]]).tolist()
        totals, numbers = values[: len(self.terms)], dict(zip(self._counted, values[len(self.terms) :], strict=True))
        copies = self.mesh.tensor.size * self.mesh.context.size
        means = {
            term.name: total / copies / numbers[term.count] for term, total in zip(self.terms, totals, strict=True)
        }
        return means, math.sqrt(square), numbers[self.terms[0].count], stop > 0

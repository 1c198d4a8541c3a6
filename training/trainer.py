"""What happens in a step."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from gristmill.training.batches import Batches
from gristmill.training.config import TrainConfig
from gristmill.training.engine.forward_backward import ForwardBackward
from gristmill.training.engine.local_model import LocalModel
from gristmill.training.guard import Guard
from gristmill.training.metrics import Clock
from gristmill.training.optim.build import Optimizer
from gristmill.training.optim.loss_scale import LossScale
from gristmill.training.optim.norm import clip, global_norm, scale_gradients
from gristmill.training.optim.schedule import batch_tokens_at, learning_rate_factor
from gristmill.training.parallel.mesh import Mesh
from gristmill.training.sums import sum_over_world


@dataclass(frozen=True)
class Progress:
    """How far a run is: steps taken, tokens in them, and the number of the next sample."""

    step: int = 0
    tokens: int = 0
    samples: int = 0


@dataclass(frozen=True)
class StepReport:
    """progress: after the step. samples: those it took. loss: negative log-likelihood a valid token, in nats.
    objective: what was minimised, the z-loss included.

    skipped: why the step was not taken, or None. stop: some process was asked to stop. seconds: by phase: data (waiting
    for it), agreement (counting valid tokens together), forward, backward, pipeline, optimizer (norm and clipping
    too)."""

    progress: Progress
    samples: range
    loss: float
    objective: float
    grad_norm: float
    learning_rate: float
    valid_tokens: float
    skipped: str | None
    stop: bool
    seconds: dict[str, float]
    tokens: int


class Trainer:
    """One process's side of a run: every process makes the same calls in the same order."""

    def __init__(
        self,
        config: TrainConfig,
        sequence_length: int,
        model: LocalModel,
        passes: ForwardBackward,
        optimizer: Optimizer,
        batches: Batches,
        guard: Guard,
        mesh: Mesh,
    ):
        self.config, self.sequence_length, self.model, self.passes = config, sequence_length, model, passes
        self.optimizer, self.batches, self.guard, self.mesh = optimizer, batches, guard, mesh
        self.scale = LossScale(dynamic=config.precision == "fp16")
        self.progress = Progress()

    @property
    def finished(self) -> bool:
        return self.progress.tokens >= self.config.tokens

    def step(self, stop_wanted: bool = False, tell: Callable[[str], None] = lambda where: None) -> StepReport:
        """One step on all processes. tell hears what is begun, for the watchdog."""
        clock = Clock(self.mesh.device, lambda phase: tell(f"step {self.progress.step + 1}, {phase}"))
        clock.begin("data")
        batch = self._next_batch()
        clock.begin("agreement")
        valid_tokens, stop = self._agree(batch, stop_wanted)
        losses = self.passes.train(batch, self.scale.value / valid_tokens, clock.begin)
        clock.begin("optimizer")
        self.model.sum_tied_gradients()
        scale_gradients(self.model.parameters.values(), 1 / self.scale.value)
        loss, objective = self._mean_over_all(losses, valid_tokens)
        norm = global_norm(self.model.counted, self.mesh).item()
        before, self.progress = self.progress, self._after_this_batch()
        skipped = self.scale.overflowed(norm) or self.guard.refuses(self.progress.step, objective, norm)
        rate = learning_rate_factor(self.config.schedule, self.progress.tokens, self.config.tokens)
        if skipped is None:
            clip(self.model.parameters.values(), norm, self.config.optimizer.clip_norm)
            self.optimizer.step(rate)
            self.model.publish()
        self.model.clear_gradients()
        return StepReport(
            progress=self.progress,
            samples=range(before.samples, self.progress.samples),
            tokens=self.progress.tokens - before.tokens,
            loss=loss,
            objective=objective,
            grad_norm=norm,
            learning_rate=rate * self.config.optimizer.learning_rate,
            valid_tokens=valid_tokens,
            skipped=skipped,
            stop=stop,
            seconds=clock.end(),
        )

    def batch_samples(self, tokens: int) -> int:
        """Samples of the batch that is drawn after so many tokens."""
        return batch_tokens_at(self.config.batch_ramp, self.config.batch_tokens, tokens) // self.sequence_length

    def state(self) -> dict[str, Any]:
        """All that a continued run needs beside the tensors, as JSON. It does not depend on the layout."""
        progress = {"step": self.progress.step, "tokens": self.progress.tokens, "samples": self.progress.samples}
        return {
            "progress": progress,
            "updates": self.optimizer.updates,
            "guard": self.guard.state(),
            "scale": self.scale.state(),
        }

    def restore(self, state: dict[str, Any]) -> None:
        """After the tensors were loaded."""
        self.progress = Progress(**state["progress"])
        self.optimizer.updates = state["updates"]
        self.guard.restore(state["guard"])
        self.scale.restore(state["scale"])
        self.model.publish()

    def _next_batch(self) -> dict[str, Tensor]:
        batch = self.batches.take(self.progress.samples, self.batch_samples(self.progress.tokens))
        after = self._after_this_batch()
        self.batches.prepare(after.samples, self.batch_samples(after.tokens))
        return batch

    def _after_this_batch(self) -> Progress:
        now, samples = self.progress, self.batch_samples(self.progress.tokens)
        return Progress(now.step + 1, now.tokens + samples * self.sequence_length, now.samples + samples)

    def _agree(self, batch: dict[str, Tensor], stop_wanted: bool) -> tuple[float, bool]:
        """The weight of all valid tokens of the whole batch, known before the first backward pass, and whether any
        process wants to stop."""
        weight, stop = sum_over_world([batch["weights"].sum(dtype=torch.float64), float(stop_wanted)], self.mesh)
        return max(1.0, weight * self.mesh.data.size / self.mesh.world.size), stop > 0

    def _mean_over_all(self, losses_b2: Tensor | None, valid_tokens: float) -> tuple[float, float]:
        """(negative log-likelihood, objective) a valid token; only processes with the head have losses."""
        own = [0.0, 0.0] if losses_b2 is None else list(losses_b2.sum(dim=0, dtype=torch.float64))
        objective, likelihood = sum_over_world(own, self.mesh)
        return likelihood / self.mesh.tensor.size / valid_tokens, objective / self.mesh.tensor.size / valid_tokens

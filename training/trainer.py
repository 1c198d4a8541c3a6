"""One training step: batch, forward and backward, gradient norm, update."""

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from gristmill.training.checkpoint.init_from import Teacher
from gristmill.training.config.train import TrainConfig
from gristmill.training.engine.gradients import gradients_of, scale_gradients
from gristmill.training.engine.local_model import LocalModel
from gristmill.training.engine.passes import ForwardBackward
from gristmill.training.launch.processes import Guard
from gristmill.training.model.moe.router import ExpertBalance
from gristmill.training.objectives.objective import Batches, SampleSource, TermSpec, collate, on_device
from gristmill.training.optim.optimizer import (
    LossScale,
    Optimizer,
    batch_tokens_at,
    learning_rate_factor,
    local_gradient,
)
from gristmill.training.parallel.mesh import Mesh, sum_over_world
from gristmill.training.parallel.replicas import Replicas
from gristmill.training.planner.noise_scale import GradientNoise


@dataclass(frozen=True)
class Progress:
    """Number of steps done, tokens trained on, and index of the next sample."""

    step: int = 0
    tokens: int = 0
    samples: int = 0


@dataclass(frozen=True)
class StepReport:
    """progress: after the step. samples: those of the step. left_out: those of them that nobody took, because their
    replica was lost; replicas: then those that took part. tokens: of the samples that were taken. means: of each term
    over the batch. loss: that of the first term, in nats a valid token for a language model. objective: the minimized
    loss, the weighted sum of the means. valid_tokens: the count of the first term.

    skipped: why the update was skipped, or None. stop: some process received a stop request. seconds by phase: data
    (waiting for the batch), token_count_allreduce, forward, backward, pipeline, optimizer (with norm, clipping); on a
    GPU of the step before.
    expert_load: the tokens of the busiest expert over the mean of its layer, in the worst layer; None without experts.
    rank_load: the tokens of the layers' busiest expert ranks over the mean; None without an expert axis.
    gradient_noise: None in steps that do not measure it.
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
    rank_load: float | None = None
    gradient_noise: GradientNoise | None = None
    left_out: tuple[range, ...] = ()
    replicas: tuple[int, ...] = ()


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
        self.replicas: Replicas | None = None
        self._clock: Clock | None = None  # of the step before
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
        small = self._small_batch_norm(batch, clock) if self._measures_noise() else None
        # What the sums of replicas are divided by is known once it is known who is left.
        factors = self._factors(counts if self.replicas is None else torch.ones_like(counts))
        self.gradients.begin(1 / self.scale.value)
        losses = self.forward_backward.train(batch, factors, clock.begin)
        clock.begin("optimizer")
        expert_counts = self.balance.take_counts() if self.balance is not None else []
        device_loads = self.balance.loads(expert_counts) if self.balance is not None else {}
        self.gradients.ready()
        members: tuple[int, ...] = ()
        if self.replicas is not None:
            clock.begin("replicas")
            counts, losses, members = self._sum_over_replicas(self.replicas, counts, losses)
            clock.begin("optimizer")
        means, norm, valid_tokens, stop, loads = self._results(counts, losses, device_loads)
        objective = sum(term.weight * means[term.name] for term in self.terms)
        before, self.progress = self.progress, self._progress_after_batch()
        skipped = self.scale.skip_reason(norm) or self.guard.skip_reason(self.progress.step, objective, norm)
        rate_factor = learning_rate_factor(self.config.lr_schedule, self.progress.tokens, self.config.tokens)
        if skipped is None:
            self._update(norm, rate_factor)
            if self.balance is not None:
                self.balance.update(expert_counts)
        self.gradients.clear()
        samples = range(before.samples, self.progress.samples)
        left_out = self.replicas.left_out(samples, members) if self.replicas is not None else []
        return StepReport(
            progress=self.progress,
            samples=samples,
            left_out=tuple(left_out),
            replicas=members if left_out else (),
            tokens=(len(samples) - sum(map(len, left_out))) * self.model.sequence_length,
            loss=means[self.terms[0].name],
            objective=objective,
            means=means,
            grad_norm=norm,
            learning_rate=rate_factor * self.config.optimizer.learning_rate,
            valid_tokens=valid_tokens,
            skipped=skipped,
            stop=stop,
            seconds=self._seconds(clock),
            expert_load=loads.get("expert"),
            rank_load=loads.get("rank"),
            gradient_noise=self._gradient_noise(small, norm, valid_tokens),
        )

    def _measures_noise(self) -> bool:
        """Whether the step measures the gradient noise; its samples must have weights that count its tokens."""
        every = self.config.monitoring.noise_scale_every
        return bool(every) and (self.progress.step + 1) % every == 0 and self.terms[0].count == "weights"

    def _small_batch_norm(self, batch: dict[str, Tensor], clock: "Clock") -> tuple[float, float]:
        """(gradient norm, valid tokens) of a part of the batch. Leaves no gradients, and counts no experts' tokens."""
        clock.begin("noise_scale")
        whole = self.config.compile or self.config.cuda_graphs or self.config.layout.pipeline > 1
        part = small_batch(batch, masked=whole)
        counts = self._count_terms(part, False)
        self.gradients.begin(1 / self.scale.value)
        losses = self.forward_backward.train(part, self._factors(counts))
        if self.balance is not None:
            self.balance.take_counts()
        self.gradients.ready()
        _, norm, valid_tokens, _, _ = self._results(counts, losses, {})
        self.gradients.clear()
        return norm, valid_tokens

    def _gradient_noise(self, small: tuple[float, float] | None, norm: float, tokens: float) -> GradientNoise | None:
        if small is None or tokens <= small[1] or not math.isfinite(norm + small[0]):
            return None
        return GradientNoise.of_norms(*small, norm, tokens)

    def _seconds(self, clock: "Clock") -> dict[str, float]:
        """Seconds by phase of this step. On a GPU those of the step before, which has ended: the host does not wait for
        this one and prepares the next in the meantime. The first step waits."""
        clock.close()
        ended = clock if self._clock is None or self.mesh.device.type == "cpu" else self._clock
        self._clock = clock
        return ended.seconds()

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
        sums[:-1] /= self.mesh.world.size / self.mesh.data.size
        if self.replicas is None:
            sums[:-1].clamp_(min=1.0)
        return sums

    def _sum_over_replicas(
        self, replicas: Replicas, counts: Tensor, losses_bn: Tensor | None
    ) -> tuple[Tensor, Tensor, tuple[int, ...]]:
        """(counts over the replicas that take part, this rank's losses summed over them, as of one sample; these
        replicas). The gradients become those of the mean over their tokens."""
        assert losses_bn is not None and len(self._counted) == 1, "check_layout refuses pipelines and several counts"
        gradients = [local_gradient(parameter) for parameter in self.model.parameters.values()]
        own = torch.cat([counts, losses_bn.sum(dim=0, dtype=torch.float64)])
        sums, members = replicas.sum_gradients(gradients, own)
        counts, losses_n = sums.split([len(counts), len(self.terms)])
        counts[:-1].clamp_(min=1.0)
        scale_gradients(self.model.parameters.values(), 1 / float(counts[0]))
        return counts, losses_n.unsqueeze(0), members

    def _factors(self, counts: Tensor) -> Tensor:
        """Factor of each term of the loss, float64[terms] on the device."""
        divisors = [counts[self._counted.index(term.count)] for term in self.terms]
        weights = [self.scale.value * term.weight for term in self.terms]
        return torch.stack([weight / divisor for weight, divisor in zip(weights, divisors, strict=True)])

    def _results(
        self, counts: Tensor, losses_bn: Tensor | None, loads: Mapping[str, Tensor]
    ) -> tuple[dict[str, float], float, float, bool, dict[str, float]]:
        """(mean of each term over the global batch, gradient norm, count of the first term, whether to stop, loads of
        experts): the one place of a step that waits for the device. Only processes with the last stage have losses."""
        own = [0.0] * len(self.terms) if losses_bn is None else list(losses_bn.sum(dim=0, dtype=torch.float64))
        sums = sum_over_world([*own, self.gradients.square_sum()], self.mesh)
        device_loads = [load.reshape(1) for load in loads.values()]
        numbers = torch.cat([*device_loads, sums[:-1], counts[:-1], sums[-1:], counts[-1:]]).tolist()
        *values, square, stop = numbers[len(loads) :]
        totals, divisors = values[: len(self.terms)], dict(zip(self._counted, values[len(self.terms) :], strict=True))
        copies = self.mesh.tensor.size * self.mesh.context.size
        means = {
            term.name: total / copies / divisors[term.count] for term, total in zip(self.terms, totals, strict=True)
        }
        return (
            means,
            math.sqrt(square),
            divisors[self.terms[0].count],
            stop > 0,
            dict(zip(loads, numbers, strict=False)),
        )


# Seconds of a step by phase.


class Clock:
    """Seconds by phase of a step; tell is called at the begin of each. GPU phases are timed with CUDA events."""

    def __init__(self, device: torch.device, tell: Callable[[str], None] = lambda phase: None):
        self._tell, self._on_gpu = tell, device.type == "cuda"
        self._marks: list[tuple[str, Any]] = []

    def begin(self, phase: str) -> None:
        self._tell(phase)
        self._marks.append((phase, self._now()))

    def close(self) -> None:
        """Ends the last phase."""
        self._marks.append(("", self._now()))

    def seconds(self) -> dict[str, float]:
        """Seconds of each phase. Waits for the end of the last one on a GPU."""
        if self._on_gpu:
            self._marks[-1][1].synchronize()
        seconds: dict[str, float] = {}
        for (phase, since), (_, until) in pairwise(self._marks):
            passed = since.elapsed_time(until) / 1000 if self._on_gpu else until - since
            seconds[phase] = seconds.get(phase, 0.0) + passed
        return seconds

    def _now(self) -> Any:
        if not self._on_gpu:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event


SMALL_BATCHES = 4  # in the batch of a step, one of which measures the gradient noise


def small_batch(batch: Mapping[str, Tensor], masked: bool) -> dict[str, Tensor]:
    """Every fourth sample by its number, the same on all layouts: alone, or (masked) with the others at weight zero,
    where passes take batches of one shape or ranks would have different numbers of samples."""
    chosen = batch["samples"] % SMALL_BATCHES == 0
    if masked or len(chosen) % SMALL_BATCHES:
        weights = batch["weights"]
        return {**batch, "weights": weights * chosen.to(weights).view(-1, *(1,) * (weights.dim() - 1))}
    return {name: values[chosen] for name, values in batch.items()}


# Validation: loss and bits per byte of held-out samples, by source.


class Validation:
    """Evaluates samples 0 to count - 1 of the held-out split, distributed over the data ranks.

    bytes_per_token by source converts nats per token to bits per byte; sources without it have no bits per byte."""

    def __init__(
        self,
        source: SampleSource,
        count: int,
        bytes_per_token: Mapping[str, float],
        forward_backward: ForwardBackward,
        mesh: Mesh,
    ):
        self.forward_backward, self.mesh, self.bytes_per_token = forward_backward, mesh, dict(bytes_per_token)
        self.terms: Sequence[TermSpec] = forward_backward.loss.terms if forward_backward.loss is not None else ()
        share = -(-count // mesh.data.size)
        first = mesh.data.rank * share
        batch = collate(source, range(first, first + share))  # all ranks make equally many forward passes
        self._sources = [source.source_of(k) for k in range(first, min(first + share, count))]
        self._names = sorted({source.source_of(k) for k in range(count)})
        self._counts = {term.name: term.counts(batch).tolist() for term in self.terms}
        del batch["samples"]  # without them there is no dropout
        self._batch = on_device(batch, mesh.device, on_host=mesh.context.size > 1)
        self.teacher: Teacher | None = None

    def run(self) -> dict[str, Any]:
        """{"loss": the first term's mean over all, "sources": {name: {"loss", "bits_per_byte"}}}, and with several
        terms {"terms": {name: mean}}."""
        taught = {} if self.teacher is None else self.teacher.outputs(self._batch, tokens=0)
        losses_bn = self.forward_backward.evaluate(self._batch | taught)
        losses_nb = None if losses_bn is None else losses_bn.double().T.tolist()
        own = []
        for number, term in enumerate(self.terms):
            for name in self._names:
                rows = [row for row, source in enumerate(self._sources) if source == name]
                own.append(sum(losses_nb[number][row] for row in rows) if losses_nb else 0.0)
                own.append(sum(self._counts[term.name][row] for row in rows))
        sums = sum_over_world(own, self.mesh).tolist()
        mesh = self.mesh
        copies = mesh.world.size / mesh.data.size
        totals = [value / (mesh.tensor.size * mesh.context.size) for value in sums[::2]]
        counts = [value / copies for value in sums[1::2]]
        width = len(self._names)
        by_term = {
            term.name: (totals[width * number : width * (number + 1)], counts[width * number : width * (number + 1)])
            for number, term in enumerate(self.terms)
        }
        of_sources, counts = by_term[self.terms[0].name]
        result = {
            "loss": _mean(sum(of_sources), sum(counts)),
            "sources": {
                name: self._scores(name, _mean(total, count))
                for name, total, count in zip(self._names, of_sources, counts, strict=True)
            },
        }
        if len(self.terms) > 1:
            result["terms"] = {name: _mean(sum(total), sum(count)) for name, (total, count) in by_term.items()}
        return result

    def _scores(self, source: str, loss: float) -> dict[str, float]:
        if source not in self.bytes_per_token:
            return {"loss": loss}
        return {"loss": loss, "bits_per_byte": loss / math.log(2) / self.bytes_per_token[source]}


def _mean(total: float, count: float) -> float:
    return total / max(count, 1.0)

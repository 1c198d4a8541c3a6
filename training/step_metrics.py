"""What metrics.jsonl and timing.jsonl say of a step."""

import math
from dataclasses import dataclass, field
from typing import Any

import torch

from gristmill.training.device_peak import device_peak
from gristmill.training.metrics import Observation, peak_memory
from gristmill.training.trainer import StepReport
from gristmill.training.training_data import TrainingData


@dataclass
class StepMetrics:
    """bits_per_byte: whether the loss is one of text. flops_per_token: of the model, forward and backward. processes:
    of the whole run. peak_flops: of one device, None where unknown. seconds, seconds_waiting: of all steps so far, and
    of them without data."""

    data: TrainingData
    bits_per_byte: bool
    flops_per_token: float
    processes: int
    device: torch.device
    peak_flops: float | None = field(init=False)
    seconds: float = field(default=0.0, init=False)
    seconds_waiting: float = field(default=0.0, init=False)

    def __post_init__(self) -> None:
        self.peak_flops = device_peak(self.device)

    def metrics(self, report: StepReport) -> dict[str, Any]:
        """A line of metrics.jsonl without validation; equal for equal runs on the same layout."""
        metrics: dict[str, Any] = {
            "step": report.progress.step,
            "tokens": report.progress.tokens,
            "loss": _finite(report.loss),
            "grad_norm": _finite(report.grad_norm),
            "learning_rate": report.learning_rate,
            "valid_tokens": report.valid_tokens,
        }
        if (per_token := self._bytes_per_token(report)) is not None:
            metrics["bits_per_byte"] = _finite(report.loss / math.log(2) / per_token)
        if report.expert_load is not None:
            metrics["expert_load"] = report.expert_load
        if len(report.means) > 1:
            metrics["objective"] = _finite(report.objective)
            metrics["terms"] = {name: _finite(mean) for name, mean in report.means.items()}
        if report.skipped is not None:
            metrics |= {"skipped": report.skipped, "samples": list(report.samples)}
        return metrics

    def timing(self, report: StepReport, observation: Observation) -> dict[str, Any]:
        """A line of timing.jsonl: rates over all processes in the seconds of this step, without validation and
        saving."""
        seconds, waiting = sum(report.seconds.values()), report.seconds["data"]
        self.seconds, self.seconds_waiting = self.seconds + seconds, self.seconds_waiting + waiting
        flops = report.tokens * self.flops_per_token / seconds / self.processes
        timing = {
            "step": report.progress.step,
            "seconds": report.seconds,
            "data_share": waiting / seconds,
            "tokens_per_second": report.tokens / seconds,
            "tflops_per_process": flops / 1e12,
            "memory_bytes": peak_memory(self.device),
        }
        if self.peak_flops is not None:
            timing["mfu"] = flops / self.peak_flops
        if observation.communication_seconds is not None:
            timing["communication_seconds"] = observation.communication_seconds
        return timing

    @property
    def waiting_share(self) -> float:
        return self.seconds_waiting / max(self.seconds, 1e-9)

    def _bytes_per_token(self, report: StepReport) -> float | None:
        """Mean over the samples of this step of their source's bytes per token; None if a source has no figure, or the
        loss is not one of text."""
        if not self.bits_per_byte:
            return None
        found = [self.data.training_bytes_per_token.get(self.data.samples.source_of(k)) for k in report.samples]
        known = [value for value in found if value is not None]
        return sum(known) / len(known) if known and len(known) == len(found) else None


def _finite(value: float) -> float | None:
    """The value, or None where it is not finite: JSON has no NaN."""
    return value if math.isfinite(value) else None

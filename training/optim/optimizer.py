"""The optimizer of a recipe."""

import math
from collections.abc import Callable, Mapping
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from gristmill.training.config.model import ModelConfig
from gristmill.training.config.train import RampConfig, ScheduleConfig, TrainConfig
from gristmill.training.optim.adamw import AdamW
from gristmill.training.optim.muon import Muon
from gristmill.training.optim.offload import OffloadedOptimizer, StreamedOptimizer, split_into_subgroups
from gristmill.training.parallel.mesh import Mesh
from gristmill.training.parallel.offload.swap import host_zeros_like
from gristmill.training.parallel.offload.weight_stream import WeightStream
from gristmill.training.planner.costs.host_update import on_device, planned_stride


class Optimizer(Protocol):
    """updates counts the steps taken; state gives the tensors to save, by flat names that no layout changes."""

    updates: int

    def step(self, rate_share: float) -> None: ...

    def state(self) -> dict[str, Tensor]: ...


def build_optimizer(
    parameters: Mapping[str, nn.Parameter],
    train: TrainConfig,
    model: ModelConfig,
    mesh: Mesh,
    stream: WeightStream | None = None,
    threads: int | None = None,
) -> Optimizer:
    """On the parameters' device, or with its state in host memory or on disk as the layout says. stream: of the layers'
    weights. threads: of the host's updates; None: as many as torch uses."""
    config, offload = train.optimizer, train.layout.offload

    def make(zeros_like: Callable[[Tensor], Tensor]) -> AdamW | Muon:
        if config.name == "adamw":
            return AdamW(parameters, config, model, zeros_like)
        return Muon(parameters, config, model, zeros_like, mesh.stage.group)

    if stream is not None:
        return StreamedOptimizer(parameters, make, stream, offload.subgroup_parameters, threads)
    if not offload.active:
        return make(torch.zeros_like)
    optimizer = make(host_zeros_like)
    subgroups = split_into_subgroups(parameters, offload.subgroup_parameters, optimizer.is_whole)
    sizes = [sum(piece.longest for piece in group) for group in subgroups]
    stride = planned_stride(train.layout.hardware, sizes) if offload.optimizer == "auto" else None
    places = on_device(len(subgroups), offload, stride)
    return OffloadedOptimizer(parameters, optimizer, subgroups, places, threads=threads)


# The learning rate as a function of the tokens trained on, so that it does not depend on the batch size or on
# resumption.


def learning_rate_factor(schedule: ScheduleConfig, tokens: int, total_tokens: int) -> float:
    """The share of the peak rate for the step that ends at `tokens`. Warm-up is linear from 0, then:

    cosine, linear: down to final_ratio at the end. constant: 1. inverse_sqrt: sqrt(warm-up / tokens).
    wsd: 1 until the last decay_share of the run, then down to final_ratio in decay_shape (arXiv 2404.06395)."""
    total_tokens = schedule.over_tokens or total_tokens
    warmup = schedule.warmup_share * total_tokens
    if tokens < warmup:
        return tokens / warmup
    progress = min(1.0, (tokens - warmup) / max(1.0, total_tokens - warmup))
    if schedule.shape == "constant":
        return 1.0
    if schedule.shape == "inverse_sqrt":
        return math.sqrt(max(warmup, 1.0) / tokens)
    if schedule.shape == "wsd":
        left = (total_tokens - tokens) / (schedule.decay_share * total_tokens)
        return _fall(schedule.decay_shape, 1 - max(0.0, min(1.0, left)), schedule.final_ratio)
    return _fall(schedule.shape, progress, schedule.final_ratio)


def _fall(shape: str, progress: float, final: float) -> float:
    """From 1 at progress 0 to `final` at progress 1."""
    if shape == "exponential":
        return max(final, 1e-3) ** progress  # an exponential never reaches a final rate of 0: 1/1000 instead
    remaining = {
        "linear": 1 - progress,
        "cosine": (1 + math.cos(math.pi * progress)) / 2,
        "one_minus_sqrt": 1 - math.sqrt(progress),
    }[shape]
    return final + (1 - final) * remaining


def batch_tokens_at(ramp: RampConfig | None, full: int, tokens: int) -> int:
    """The size of the batch drawn after `tokens` of training.

    start 4, increment 4, over 90, full 16 -> 4 until 30 tokens, 8 until 60, 12 until 90, then 16."""
    if ramp is None or tokens >= ramp.over_tokens:
        return full
    rungs = math.ceil((full - ramp.start_tokens) / ramp.increment_tokens)
    return min(full, ramp.start_tokens + ramp.increment_tokens * (tokens * rungs // ramp.over_tokens))


# Dynamic loss scaling for fp16: the loss is multiplied before the backward pass, the gradients divided after it.

INITIAL_SCALE = 2.0**16  # Micikevicius et al., arXiv 1710.03740, section 3.2: as high as does not overflow
STEPS_BEFORE_DOUBLING = 2000


class LossScale:
    """Halved after an overflow, doubled after 2000 steps without one. Depends on the global norm only, so all processes
    have the same scale. In other precisions it is always 1."""

    def __init__(self, dynamic: bool):
        self.dynamic = dynamic
        self.value = INITIAL_SCALE if dynamic else 1.0
        self.good_steps = 0

    def skip_reason(self, norm: float) -> str | None:
        """Why the step is skipped, or None. At a scale of 1 a non-finite norm is left to the guard."""
        if not self.dynamic:
            return None
        if math.isfinite(norm):
            self.good_steps += 1
            if self.good_steps % STEPS_BEFORE_DOUBLING == 0:
                self.value *= 2
            return None
        if self.value <= 1:
            return None
        self.value, self.good_steps = self.value / 2, 0
        return f"fp16 overflow, the loss scale falls to {self.value:g}"

    def state(self) -> dict[str, Any]:
        return {"value": self.value, "good_steps": self.good_steps}

    def restore(self, state: dict[str, Any]) -> None:
        self.value, self.good_steps = state["value"], state["good_steps"]

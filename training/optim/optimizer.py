"""AdamW (arXiv 1711.05101), fused, on the local shards of the parameters; learning-rate schedule; loss scale."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.optim.adamw import adamw

from gristmill.training.config.model import ModelConfig
from gristmill.training.config.train import OptimizerConfig, RampConfig, ScheduleConfig
from gristmill.training.model.init import HEAD_TABLE, TOKEN_TABLE, Role, rate_factor, roles_of
from gristmill.training.parallel.mesh import local, stored_like


@dataclass(frozen=True)
class Operands:
    """Tensors that one update reads and writes of a parameter's shard, or of a piece of it: tensors of one shape on one
    device. state: in the order of the optimizer's `tensors_of`. The gradient is only read."""

    name: str
    parameter: Tensor
    gradient: Tensor
    state: tuple[Tensor, ...]


class AdamW:
    """Keeps two moments a parameter, by the parameter's name; so its state moves between layouts as parameters do.

    zeros_like: makes the moments, on the device or in host memory."""

    def __init__(
        self,
        parameters: Mapping[str, nn.Parameter],
        config: OptimizerConfig,
        model: ModelConfig,
        zeros_like: Callable[[Tensor], Tensor] = torch.zeros_like,
    ):
        self.parameters, self.config = parameters, config
        self.updates = 0
        self.first = {name: zeros_like(local(parameter.detach())) for name, parameter in parameters.items()}
        self.second = {name: zeros_like(local(parameter.detach())) for name, parameter in parameters.items()}
        self._rates = _rates(parameters, config, model)

    def tensors_of(self, name: str) -> tuple[Tensor, ...]:
        """The state of a parameter's shard."""
        return self.first[name], self.second[name]

    def is_whole(self, name: str) -> bool:
        """Whether an update needs the whole parameter. AdamW works element by element."""
        return False

    def step(self, rate_share: float) -> None:
        """One update with the current gradients; rate_share is the schedule's share of the learning rate."""
        self.update([operands_of(self, name, value) for name, value in self.parameters.items()], rate_share)
        self.updates += 1

    @torch.no_grad()
    def update(self, operands: Sequence[Operands], rate_share: float) -> None:
        """Updates these with the state they carry; all are on one device."""
        groups: dict[tuple[float, float], list[Operands]] = {}
        for operand in operands:
            if operand.parameter.numel():
                groups.setdefault(self._rates[operand.name], []).append(operand)
        for (decay, factor), members in groups.items():
            # One tensor cut up: a number each would be a copy to the GPU each.
            steps = torch.full((len(members),), float(self.updates), device=members[0].state[0].device)
            adamw(
                [operand.parameter for operand in members],
                [operand.gradient for operand in members],
                [operand.state[0] for operand in members],
                [operand.state[1] for operand in members],
                [],
                list(steps.unbind()),
                fused=True,
                amsgrad=False,
                maximize=False,
                beta1=self.config.betas[0],
                beta2=self.config.betas[1],
                lr=self.config.learning_rate * rate_share * factor,
                weight_decay=decay,
                eps=self.config.epsilon,
            )

    def state(self) -> dict[str, Tensor]:
        """The moments under flat names, sharing memory: saved from here and loaded into here."""
        return {
            f"{name}.{label}": stored_like(moments[name], self.parameters[name])
            for label, moments in (("first_moment", self.first), ("second_moment", self.second))
            for name in self.parameters
        }


class HasUpdates(Protocol):
    updates: int


class CountsWithinAnother:
    """An optimizer around another, `counted`, whose count of updates is its own."""

    counted: HasUpdates

    @property
    def updates(self) -> int:
        return self.counted.updates

    @updates.setter
    def updates(self, value: int) -> None:
        """Set when a checkpoint was loaded, also into the parameters."""
        self.counted.updates = value
        self.parameters_loaded()

    def parameters_loaded(self) -> None:
        """Forgets what was copied of the parameters."""


class _HasState(Protocol):
    def tensors_of(self, name: str) -> tuple[Tensor, ...]: ...


def local_gradient(parameter: nn.Parameter) -> Tensor:
    """This process's shard of the gradient, which a backward pass has left."""
    assert parameter.grad is not None
    return local(parameter.grad)


def operands_of(optimizer: _HasState, name: str, parameter: nn.Parameter) -> Operands:
    """Those of the whole shard, with the parameter's own gradient."""
    return Operands(name, local(parameter.detach()), local_gradient(parameter), optimizer.tensors_of(name))


def _rates(
    parameters: Mapping[str, nn.Parameter], config: OptimizerConfig, model: ModelConfig
) -> dict[str, tuple[float, float]]:
    """(weight decay, factor on the learning rate) by name."""
    return {
        name: (_decay(role, config), rate_factor(role, model) * _own_rate(name, config) / config.learning_rate)
        for name, role in roles_of(parameters, model).items()
    }


def _decay(role: Role, config: OptimizerConfig) -> float:
    decays = role.decays and (config.decay_tables or role not in (Role.EMBEDDING, Role.HEAD))
    return config.weight_decay if decays else 0.0


def _own_rate(name: str, config: OptimizerConfig) -> float:
    """The learning rate of a parameter: a tied head, which is the embedding, has the embedding's."""
    own = {TOKEN_TABLE: config.embedding_learning_rate, HEAD_TABLE: config.head_learning_rate}.get(name)
    return config.learning_rate if own is None else own


class Optimizer(Protocol):
    """updates counts the steps taken; state gives the tensors to save, by flat names that no layout changes."""

    updates: int

    def step(self, rate_share: float) -> None: ...

    def state(self) -> dict[str, Tensor]: ...


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

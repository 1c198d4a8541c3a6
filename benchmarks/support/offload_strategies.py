"""Step time with the optimizer's state in host memory, by who updates: measured, and forecast from the machine's
profile; and beside torch's FSDP2 with `CPUOffloadPolicy`."""

import statistics
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

from measure import Figure, wall_seconds
from rich.console import Console
from rich.table import Table
from support.fsdp_offload import FsdpOffload, process_group_of_one
from support.training_step import STATE_BYTES, VOCABULARY, Bench, TrainingStep, free, random_batch
from torch import Tensor

from gristmill.training.config.model import ModelConfig
from gristmill.training.config.train import TrainConfig
from gristmill.training.optim.offload import OffloadedOptimizer
from gristmill.training.parallel.collectives import finish
from gristmill.training.planner.costs.host_update import host_rates, planned_stride, update_seconds
from gristmill.training.planner.costs.model_shape import shape_of
from gristmill.training.planner.costs.parameters import parameter_count
from gristmill.training.planner.engine_profile import GRISTMILL
from gristmill.training.planner.hardware import Rates, Sustained, load_hardware

STRIDES = (1, 2, 3, 4)
STATE_SHARE = 1 / 2  # of the device's memory, at most, so that `none` fits
LAYERS_AND_WIDTHS = ((32, 2560), (24, 2048), (24, 1536), (24, 1024))  # 2.8, 1.4, 0.8 and 0.4 billion parameters
GRADIENT_BYTES = 4
SUBGROUP_PARAMETERS = 100_000_000  # updated together


@dataclass(frozen=True)
class StrategyBench(Bench):
    samples: int = 4
    subgroup_parameters: int = SUBGROUP_PARAMETERS
    rounds: int = 3

    def train(self, offload: dict[str, Any]) -> TrainConfig:
        tokens = self.samples * self.model.sequence_length
        layout = {
            "micro_batch": self.samples,
            "hardware": str(self.profile),
            "offload": offload | {"subgroup_parameters": self.subgroup_parameters},
        }
        optimizer = {"learning_rate": 1e-3, "clip_norm": None}
        return TrainConfig(
            tokens=tokens, batch_tokens=tokens, precision=self.precision, optimizer=optimizer, layout=layout
        )

    def batch(self) -> dict[str, Tensor]:
        return random_batch(self.vocab, self.samples, self.model.sequence_length, self.device)


@dataclass(frozen=True)
class StepTimes:
    """Of one strategy: median seconds of a step, their forecast, and the loss of each step from the first on."""

    measured: float
    forecast: float
    losses: tuple[float, ...]

    @property
    def error(self) -> float:
        return abs(self.forecast / self.measured - 1)


def model_for(device_bytes: float) -> ModelConfig:
    """The largest of these models whose state takes at most half of the device's memory, 1 to 3 billion parameters
    where it has 48 GB or more."""
    for layers, width in LAYERS_AND_WIDTHS:
        model = ModelConfig(layers=layers, width=width, heads=width // 128, sequence_length=1024)
        if STATE_BYTES * parameter_count(shape_of(model, VOCABULARY)) <= STATE_SHARE * device_bytes:
            return model
    return model


def strategies(bench: StrategyBench) -> tuple[dict[str, dict[str, Any]], str]:
    """(the settings of `layout.offload` by name, the name of the one that `auto` chooses on this profile)."""
    chosen = planned_stride(str(bench.profile), subgroup_sizes(bench))
    strides = sorted({*STRIDES, *([] if chosen is None else [chosen])})
    found: dict[str, dict[str, Any]] = {
        "none": {"optimizer": "none"},
        "cpu": {"optimizer": "cpu"},
        "static_half": {"optimizer": "static", "device_share": 0.5},
    }
    found |= {f"stride_{k}": {"optimizer": "interleaved", "stride": k} for k in strides}
    return found, "cpu" if chosen is None else f"stride_{chosen}"


def subgroup_sizes(bench: StrategyBench) -> list[float]:
    """Of whole subgroups and the rest, as the optimizer cuts the parameters up."""
    whole, rest = divmod(bench.parameters, bench.subgroup_parameters)
    return [float(bench.subgroup_parameters)] * whole + [float(rest)] * (rest > 0)


def measured_steps(bench: StrategyBench) -> tuple[dict[str, StepTimes], str]:
    """(times by strategy, the name of the strategy that `auto` chooses). The forecast of a step is that of its update
    and of what copying gradients to the host takes beyond the backward pass, added to the measured passes."""
    settings, chosen = strategies(bench)
    passes = pass_seconds(bench)
    free(bench.device)
    times = {}
    for name, offload in settings.items():
        train = bench.train(offload)
        step = TrainingStep(bench.model, bench.vocab, train, bench.device)
        forecast = passes + forecast_update(bench, step, passes)
        seconds, losses = timed(partial(step, bench.batch()), bench.rounds)
        times[name] = StepTimes(seconds, forecast, losses)
        print(f"{name}: {seconds:.4f} s a step, forecast {forecast:.4f}", flush=True)
        del step
        free(bench.device)
    return times, chosen


def pass_seconds(bench: StrategyBench) -> float:
    """Median seconds of forward and backward without an update."""
    step, batch = TrainingStep(bench.model, bench.vocab, bench.train({}), bench.device), bench.batch()

    def both() -> None:
        step.passes_alone(batch)
        finish(bench.device)

    both()
    return statistics.median(wall_seconds(both) for _ in range(bench.rounds))


def forecast_update(bench: StrategyBench, step: TrainingStep, passes: float) -> float:
    """Of one update with the subgroups as they are; the backward pass takes two thirds of both passes."""
    profile, optimizer = load_hardware(bench.profile), step.optimizer
    if not isinstance(optimizer, OffloadedOptimizer):
        return Rates(profile, Sustained()).memory(bench.parameters * GRISTMILL.optimizer_bytes)
    rates = host_rates(profile)
    sizes = [float(sum(piece.size for piece in group)) for group in optimizer.subgroups]
    on_host = sum(size for size, device in zip(sizes, optimizer.on_device, strict=True) if not device)
    flush = GRADIENT_BYTES * on_host / rates.bytes_per_second
    return max(0.0, flush - passes * 2 / 3) + update_seconds(sizes, optimizer.on_device, rates)


def timed(step: Callable[[], float], rounds: int) -> tuple[float, tuple[float, ...]]:
    """(median seconds of the steps after the first, the loss of each)."""
    losses: list[float] = []
    times = [wall_seconds(lambda: losses.append(step())) for _ in range(rounds + 1)]
    return statistics.median(times[1:]), tuple(losses)


def peer_seconds(bench: StrategyBench) -> tuple[float, tuple[float, ...]]:
    with process_group_of_one(bench.device):
        step = FsdpOffload(bench.model, bench.vocab, bench.train({}), bench.device)
        found = timed(partial(step, bench.batch()), bench.rounds)
        del step
        free(bench.device)
    return found


def strategy_figures(bench: StrategyBench) -> list[Figure]:
    free(bench.device)
    print(
        f"optimizer: {bench.model.layers} layers of width {bench.model.width}, {bench.parameters / 1e9:.2f} billion "
        f"parameters, {bench.precision} on {bench.device}, {bench.samples} samples of {bench.model.sequence_length} "
        "tokens a step",
        flush=True,
    )
    times, chosen = measured_steps(bench)
    return compared(times, chosen, peer_seconds(bench)[0], bench.samples * bench.model.sequence_length)


def compared(times: dict[str, StepTimes], chosen: str, peer: float, tokens: int) -> list[Figure]:
    """Figures of the strategies' steps of so many tokens; peer: seconds of FSDP2's."""
    table = Table("updates", "seconds", "forecast", title="step by strategy")
    for name, each in times.items():
        label = f"{name} (chosen)" if name == chosen else name
        table.add_row(label, f"{each.measured:.4f}", f"{each.forecast:.4f}")
    Console(width=120).print(table)
    by_stride = {name: each.measured for name, each in times.items() if name == "cpu" or name.startswith("stride_")}
    best = min(by_stride, key=lambda name: by_stride[name])
    seconds, host = by_stride[chosen], by_stride["cpu"]
    peer_name = "torch FSDP2, CPUOffloadPolicy"
    fastest = f"the fastest, {best}"
    error = 100 * max(each.error for each in times.values())
    return [
        *(
            Figure(f"offload_step_{name}", each.measured, "s", host, "all on the host", host / each.measured)
            for name, each in times.items()
        ),
        Figure("offload_forecast_error", error, "% largest (at most 15)"),
        Figure("offload_chosen_stride", seconds, "s", by_stride[best], fastest, by_stride[best] / seconds, goal=1),
        Figure("offload_against_fsdp2", tokens / seconds, "tokens/s", tokens / peer, peer_name, peer / seconds, goal=2),
    ]

"""What a layer's activations cost in memory and time by policy: keep, recompute, swap, and shares of the tokens.

Bytes are counted on the allocations of one real pass: held on the device at the end of its forward half (without
parameters and what goes to host memory), at the peak of the whole pass, gradients of the weights included, and in host
memory. memory_forecast_error is the largest difference to the planner's forecasts. Seconds are medians of forward and
backward in one process of this machine, where the copy to host memory is a copy in memory and does not overlap; their
forecast adds to the seconds of keep what the policy computes again and copies, at the measured rates of one layer's
forward pass, of attention alone and of copies (memory_time_forecast_error). memory_plan is the peak of planned
addresses of a layer's transient tensors against the segments of torch's caching allocator. The optimizer's strategies
are simulated at the rates of the Deep Optimizer States paper.

Where there is a GPU, it is calibrated first (or --profile was written by `gristmill calibrate`), and then measured:
tokens a second at 32K to 256K tokens and the longest sequence, of full recomputation, full swap and token-wise with the
planner's share; the step by who updates the parameters, against its forecast (offload_forecast_error), the chosen
stride against the fastest one, and the chosen strategy against torch's FSDP2 with CPUOffloadPolicy
(offload_against_fsdp2).

A step of 256K tokens of the 0.6 billion parameters that an H200 gets is 8e15 FLOPs, 20 seconds, and updates of 2.8
billion parameters on the host 4 seconds each, after pinning 34 GB; --short stays under two minutes: 32K and 64K tokens,
no search, 0.4 billion parameters. --quick runs both on any device at tiny size, with a built-in profile."""

import argparse
import statistics
import tempfile
import time
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from measure import Figure, arguments, print_figures
from rich.console import Console
from rich.table import Table
from support import longest_sequence, offload_strategies
from support.address_plan import best_plan, caching_peak, greedy_plan, layer_trace, live_peak, recorded, replay
from support.pass_peak import pass_peak
from support.training_step import VOCABULARY
from torch.utils._python_dispatch import _disable_current_modes

from gristmill.foundation.progress import Reporter
from gristmill.training.calibrate.measure_hardware import write_profile
from gristmill.training.calibrate.measure_layers import causal_loss
from gristmill.training.config.layout import OffloadConfig
from gristmill.training.config.model import ModelConfig
from gristmill.training.config.train import TrainConfig
from gristmill.training.engine.local_model import LocalModel, build_local_model
from gristmill.training.engine.passes import output_of, scaled_sum
from gristmill.training.parallel.mesh import single_process
from gristmill.training.parallel.offload.swap import InHostMemory
from gristmill.training.planner.activations import ElementSizes
from gristmill.training.planner.costs.host_update import HostRates, best_stride, equal_stride, on_device, update_seconds
from gristmill.training.planner.costs.model_shape import shape_of
from gristmill.training.planner.engine_profile import GRISTMILL
from gristmill.training.planner.hardware import load_hardware, profile_names
from gristmill.training.planner.layout import RankLayers, from_config
from gristmill.training.planner.memory import MemoryModel

VOCAB = 512
PARTS = ("policies", "lengths", "offload")
POLICIES: dict[str, dict[str, Any]] = {
    "keep": {},
    "recompute": {"recompute": "full"},
    "swap": {"recompute": "swap"},
    "tokens 0.5": {"recompute": "tokens", "offloaded_token_fraction": 0.5},
    "tokens 0": {"recompute": "tokens", "offloaded_token_fraction": 0.0},
}


def main() -> None:
    parser = arguments(__doc__ or "")
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument("--profile", type=Path, help="of this machine, as `gristmill calibrate` wrote it")
    parser.add_argument("--short", action="store_true", help="two minutes on a GPU")
    print_figures(measured(parser.parse_args()))


def measured(options: argparse.Namespace) -> Iterator[Figure]:
    if "policies" in options.parts:
        yield from policy_figures(options.quick)
    if not {"lengths", "offload"} & set(options.parts):
        return
    if torch.cuda.is_available():
        device = torch.device("cuda", torch.cuda.current_device())
        bounds = GpuBounds.of(torch.cuda.get_device_properties(device).total_memory, options.short)
    elif options.quick:
        device, bounds = torch.device("cpu"), TINY
    else:
        print("No GPU: sequence lengths, optimizer strategies and FSDP2's CPUOffloadPolicy are unmeasured.")
        return
    yield from gpu_figures(device, TINY if options.quick else bounds, options.profile, options.parts)


def policy_figures(quick: bool) -> Iterator[Figure]:
    model = ModelConfig(
        layers=6, width=128 if quick else 256, heads=8, sequence_length=512, mlp="gelu", norm="layernorm"
    )
    table = Table(title="one pass by policy")
    for name in ("policy", "held MB", "forecast", "peak MB", "forecast", "host MB", "forecast", "seconds", "forecast"):
        table.add_column(name, justify="left" if name == "policy" else "right")
    errors, seconds, rows = [], {}, {}
    for name, policy in POLICIES.items():
        train = config(model, policy)
        rows[name] = list(zip(measured_bytes(model, train), forecast_bytes(model, train), strict=True))
        errors += [abs(forecast / found - 1) for found, forecast in rows[name] if found]
        seconds[name] = pass_seconds(model, train, 3 if quick else 9)
    expected = forecast_seconds(model, seconds["keep"])
    for name, pairs in rows.items():
        sizes = [f"{number / 1e6:.2f}" for pair in pairs for number in pair]
        table.add_row(name, *sizes, f"{seconds[name]:.3f}", f"{expected[name]:.3f}")
    Console(width=120).print(table)
    yield Figure("memory_forecast_error", 100 * max(errors), "% largest (at most 5)")
    wrong = max(abs(expected[name] / seconds[name] - 1) for name in POLICIES)
    yield Figure("memory_time_forecast_error", 100 * wrong, "% largest")
    for name in list(POLICIES)[1:]:
        label = f"memory_time_{name.replace(' ', '_')}"
        yield Figure(label, seconds[name], "s", seconds["keep"], "keep", seconds["keep"] / seconds[name])
    yield memory_plan(model)
    yield from strides()


def config(model: ModelConfig, policy: dict[str, Any]) -> TrainConfig:
    tokens = 2 * model.sequence_length
    return TrainConfig(tokens=tokens, batch_tokens=tokens, precision="fp32", layout={"micro_batch": 2} | policy)


def one_pass(model: ModelConfig, train: TrainConfig) -> tuple[LocalModel, dict[str, torch.Tensor], Any]:
    parts = build_local_model(model, VOCAB, train, single_process(), seed=0)
    generator = torch.Generator().manual_seed(0)
    shape = 2, model.sequence_length
    tokens = torch.randint(0, VOCAB, shape, generator=generator)
    batch = {"tokens": tokens, "targets": tokens.roll(-1, 1), "weights": torch.ones(shape)}
    return parts, batch, causal_loss(z_loss=False)


def measured_bytes(model: ModelConfig, train: TrainConfig) -> tuple[int, int, int]:
    """(held on the device at the end of the forward pass of one micro-batch, at the peak of the whole pass, in host
    memory)."""
    parts, batch, loss = one_pass(model, train)
    stage = parts.stages[0]
    with recorded() as blocks, output_of([stage], loss), host_memory_apart() as host:
        losses_bn = stage(batch["tokens"], **batch)
        forward_end = max(block.end for block in blocks())
        scaled_sum(losses_bn, [1.0] * losses_bn.shape[1]).backward()
    held = sum(block.size for block in blocks() if block.start < forward_end <= block.end)
    return held, live_peak(blocks()), sum(host)


@contextmanager
def host_memory_apart() -> Iterator[list[int]]:
    """Sizes of what goes to host memory, whose allocations are not recorded."""
    sizes: list[int] = []
    make = InHostMemory.__init__

    def counted(self: Any, values: torch.Tensor, swap: Any) -> None:
        with _disable_current_modes():
            make(self, values, swap)
        sizes.append(self.host.nbytes)

    with mock.patch.object(InHostMemory, "__init__", counted):
        yield sizes


def forecast_bytes(model: ModelConfig, train: TrainConfig) -> tuple[float, float, float]:
    """The planner's (held on the device from a forward to its backward pass, peak, host)."""
    memory = MemoryModel(shape_of(model, VOCAB), GRISTMILL, ElementSizes(4, 4, cuda=False))
    layout = from_config(train.layout, 2)
    layers = RankLayers((model.layers,), has_embedding=True, has_head=True)
    return memory.held(layout, layers, 0, 1), pass_peak(memory, layout), memory.rank(layout, layers, 0, 1).host


def forecast_seconds(model: ModelConfig, keep: float) -> dict[str, float]:
    """Of a pass by policy. keep: of one that keeps all. What is recomputed costs a layer's forward pass, without
    attention under tokens; what goes to host memory one copy, and under tokens another where both parts of the swapped
    activations are put together."""
    layer, attention, bytes_per_second = rates(model)
    found = {}
    for name, policy in POLICIES.items():
        train = config(model, policy)
        layout = from_config(train.layout, 2)
        memory = MemoryModel(shape_of(model, VOCAB), GRISTMILL, ElementSizes(4, 4, cuda=False))
        swapped = model.layers - layout.num_layers_on_device
        host = forecast_bytes(model, train)[2]
        again = {"full": model.layers * layer, "tokens": swapped * (1 - layout.token_share) * (layer - attention)}
        joined = swapped * memory.swap_bytes(layout, 0).others if layout.recompute == "tokens" else 0.0
        found[name] = keep + again.get(layout.recompute, 0.0) + (host + joined) / bytes_per_second
    return found


def rates(model: ModelConfig) -> tuple[float, float, float]:
    """(seconds of a layer's forward pass, of its attention alone, bytes copied a second)."""
    parts, batch, _ = one_pass(model, config(model, {}))
    stage = parts.stages[0]
    metadata = stage.attention_metadata(batch["tokens"])
    x_BTD = torch.randn(2, model.sequence_length, model.width)
    heads = torch.randn(2, model.heads, model.sequence_length, model.head_dim)
    values = torch.randn(2**22)
    with torch.no_grad():
        layer = median_seconds(lambda: stage.layers["0"](x_BTD, metadata))
        attention = median_seconds(
            lambda: torch.nn.functional.scaled_dot_product_attention(heads, heads, heads, is_causal=True)
        )
        copy = median_seconds(lambda: torch.empty_like(values).copy_(values))
    return layer, attention, values.nbytes / copy


def median_seconds(function: Any, rounds: int = 15) -> float:
    times = []
    for _ in range(rounds + 1):
        started = time.perf_counter()
        function()
        times.append(time.perf_counter() - started)
    return statistics.median(times[1:])


def pass_seconds(model: ModelConfig, train: TrainConfig, rounds: int) -> float:
    parts, batch, loss = one_pass(model, train)
    stage, times = parts.stages[0], []
    with output_of([stage], loss):
        for _ in range(rounds + 1):
            started = time.perf_counter()
            losses_bn = stage(batch["tokens"], **batch)
            scaled_sum(losses_bn, [1.0] * losses_bn.shape[1]).backward()
            times.append(time.perf_counter() - started)
            stage.zero_grad()
    return statistics.median(times[1:])


def memory_plan(model: ModelConfig) -> Figure:
    """The transient tensors of one layer's forward pass."""
    parts, batch, _ = one_pass(model, config(model, {}))
    stage = parts.stages[0]
    metadata = stage.attention_metadata(batch["tokens"])
    x_BTD = torch.randn(2, model.sequence_length, model.width)
    blocks = layer_trace(lambda x: stage.layers["0"](x, metadata)[0], x_BTD)
    plan, caching = best_plan(blocks), caching_peak(blocks)
    assert replay(blocks, plan.addresses) == plan.peak <= greedy_plan(blocks).peak
    print(
        f"{len(blocks)} transient blocks: {live_peak(blocks) / 1e6:.2f} MB alive, {plan.peak / 1e6:.2f} planned, "
        f"{greedy_plan(blocks).peak / 1e6:.2f} greedy, {caching / 1e6:.2f} by the caching allocator"
    )
    return Figure("memory_plan", plan.peak / 1e6, "MB", caching / 1e6, "caching allocator", caching / plan.peak, goal=1)


def strides() -> list[Figure]:
    """The simulated step at the paper's rates (12 GB/s, 0.83e9 updates a second), by strategy."""
    rates, sizes = HostRates(12e9, 0.83e9, 50e9), [1e8] * 24
    chosen = best_stride(sizes, rates)
    host = update_seconds(sizes, [False] * 24, rates)
    strategies = {"static": OffloadConfig(optimizer="static", device_share=0.5)}
    strategies |= {f"stride_{k}": OffloadConfig(optimizer="interleaved", stride=k) for k in (2, 3, 4)}
    print(f"k* = {equal_stride(rates):.2f}, chosen {chosen}")
    return [
        Figure(f"simulated_step_{name}", seconds, "s", host, "all on the host", host / seconds)
        for name, offload in strategies.items()
        for seconds in [update_seconds(sizes, on_device(24, offload), rates)]
    ]


@dataclass(frozen=True)
class GpuBounds:
    """What is measured on a GPU. lengths: of one sample; limit: of the search for the longest, 0: none; strategies:
    the model whose optimizer's state goes to host memory, and how many parameters are updated together."""

    layers: ModelConfig
    lengths: tuple[int, ...]
    limit: int
    unit: int
    updated: ModelConfig
    subgroup_parameters: int
    vocab: int
    rounds: int
    precision: str = "bf16"

    @classmethod
    def of(cls, memory_bytes: float, short: bool) -> "GpuBounds":
        lengths = longest_sequence.LENGTHS[: 2 if short else None]
        return cls(
            longest_sequence.model_for(memory_bytes),
            lengths,
            0 if short else longest_sequence.LIMIT,
            longest_sequence.UNIT,
            offload_strategies.model_for(0.0 if short else memory_bytes),
            offload_strategies.SUBGROUP_PARAMETERS,
            VOCABULARY,
            1 if short else 3,
        )


SMALLEST = ModelConfig(layers=3, width=32, heads=2, sequence_length=32)
TINY = GpuBounds(SMALLEST, (64,), 128, 32, SMALLEST, 4096, 64, 1, "fp32")


def gpu_figures(
    device: torch.device, bounds: GpuBounds, profile: Path | None, parts: Collection[str]
) -> Iterator[Figure]:
    """device: a GPU; a CPU where this program itself is tested."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        if profile is None or not profile.exists():
            profile = folder / "machine.yaml"
            if bounds is TINY:
                profile.write_text(load_hardware("h100").model_dump_json())  # JSON is YAML
            else:
                write_profile(profile, base_profile(device), Reporter.silent())
        if "offload" in parts:
            offload = offload_strategies.StrategyBench(
                bounds.updated,
                bounds.vocab,
                device,
                profile,
                bounds.precision,
                subgroup_parameters=bounds.subgroup_parameters,
                rounds=bounds.rounds,
            )
            yield from offload_strategies.strategy_figures(offload)
        if "lengths" in parts:
            swaps = longest_sequence.profile_for_swaps(profile, folder, device)
            bench = longest_sequence.PolicyBench(
                bounds.layers, bounds.vocab, device, swaps, bounds.precision, rounds=bounds.rounds
            )
            yield from longest_sequence.length_figures(bench, bounds.lengths, bounds.limit, bounds.unit)


def base_profile(device: torch.device) -> str | None:
    """The built-in profile of this GPU, for the peak that its data sheet states."""
    name = torch.cuda.get_device_name(device).lower() if device.type == "cuda" else ""
    return next((each for each in profile_names() if each.partition("-")[0] in name), None)


if __name__ == "__main__":
    main()

"""The longest sequence that fits a device and tokens a second by length, for three policies of activations: full
recomputation, full swap, and the token-wise mixture of both with the planner's share."""

import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch
from measure import Figure, wall_seconds
from support.training_step import STATE_BYTES, VOCABULARY, Bench, TrainingStep, free, if_it_fits, random_batch

from gristmill.foundation.errors import RecipeError
from gristmill.training.config.model import ModelConfig
from gristmill.training.config.train import TrainConfig
from gristmill.training.planner.command import with_token_share
from gristmill.training.planner.costs.model_shape import shape_of
from gristmill.training.planner.costs.parameters import parameter_count
from gristmill.training.planner.hardware import GIB, load_hardware
from gristmill.training.planner.memory import stated_memory

Policy = Literal["full", "swap", "tokens"]
POLICIES: dict[Policy, str] = {"full": "full recomputation", "swap": "full swap", "tokens": "token-wise"}
LENGTHS = tuple(2**power for power in range(15, 19))  # 32K to 256K
LIMIT, UNIT = 2**19, 2**14  # of the search; a step of 512K tokens takes minutes
WIDTHS = (2048, 1536, 1024, 768, 512)
LAYERS, HEAD_WIDTH = 8, 128
STATE_SHARE = 1 / 8  # of the device's memory, at most
# torch's allocator of pinned memory rounds each tensor up to a power of two bytes.
PINNED_ROUNDING = 2


@dataclass(frozen=True)
class PolicyBench(Bench):
    rounds: int = 2

    def model_of(self, length: int) -> ModelConfig:
        return ModelConfig.model_validate(self.model.model_dump() | {"sequence_length": length})

    def train(self, policy: Policy, length: int) -> TrainConfig:
        """Raises RecipeError where host memory does not hold what token-wise always swaps."""
        layout: dict[str, Any] = {"micro_batch": 1, "recompute": policy, "hardware": str(self.profile)}
        train = TrainConfig(tokens=length, batch_tokens=length, precision=self.precision, layout=layout)
        return with_token_share(self.model_of(length), self.vocab, train)[0]

    def host_bytes(self, train: TrainConfig, length: int) -> float:
        """Forecast of what a pass keeps in host memory."""
        memory = stated_memory(self.model_of(length), train, self.vocab, self.device.type == "cuda")
        return memory.host * (PINNED_ROUNDING if self.device.type == "cuda" else 1)


def model_for(device_bytes: float) -> ModelConfig:
    """The widest of these models of eight layers whose state takes at most an eighth of the device's memory."""
    for width in WIDTHS:
        model = ModelConfig(layers=LAYERS, width=width, heads=width // HEAD_WIDTH, sequence_length=LENGTHS[0])
        if STATE_BYTES * parameter_count(shape_of(model, VOCABULARY)) <= STATE_SHARE * device_bytes:
            return model
    return model


def longest(fits: Callable[[int], bool], start: int, limit: int, unit: int) -> int:
    """The largest multiple of `unit` up to `limit` that fits, if all below it do: doubled from `start` until one does
    not, then bisected. 0: not even the unit fits. With 11 the most, start 4 and unit 1: 4, 8, 16, 12, 10, 11."""
    low, high = 0, start
    while high <= limit and fits(high):
        low, high = high, 2 * high
    high = min(high, limit + unit)
    while high - low > unit:
        middle = (low + high) // 2 // unit * unit
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low


def step_seconds(bench: PolicyBench, policy: Policy, length: int, rounds: int) -> tuple[float | None, str]:
    """(median seconds of a step after one to warm up, or None, with the reason). rounds 0: the first step alone."""
    try:
        train = bench.train(policy, length)
    except RecipeError as error:
        return None, str(error)
    needed, there = bench.host_bytes(train, length), available_bytes()
    if needed > there:
        return None, f"{needed / GIB:.0f} GiB of activations in {there / GIB:.0f} GiB of host memory"

    def run() -> float:
        step = TrainingStep(bench.model_of(length), bench.vocab, train, bench.device)
        batch = random_batch(bench.vocab, 1, length, bench.device)
        times = [wall_seconds(lambda: step(batch)) for _ in range(rounds + 1)]  # the loss is read, so each step ends
        return statistics.median(times[1:] or times)

    return if_it_fits(run, bench.device), "out of memory"


def fits(bench: PolicyBench, policy: Policy, length: int) -> bool:
    """Whether one step ends."""
    return step_seconds(bench, policy, length, 0)[0] is not None


def length_figures(bench: PolicyBench, lengths: Sequence[int], limit: int, unit: int) -> Iterator[Figure]:
    """Tokens a second by policy and length, and the longest length of each policy, beside full recomputation. limit: of
    the search for that; 0: there is none."""
    free(bench.device)
    print(
        f"activations: {bench.model.layers} layers of width {bench.model.width}, {bench.parameters / 1e6:.0f} M "
        f"parameters, {bench.precision} on {bench.device}, one sample a step",
        flush=True,
    )
    rates = dict[tuple[Policy, int], float]()
    for length in lengths:
        for policy, name in POLICIES.items():
            seconds, reason = step_seconds(bench, policy, length, bench.rounds)
            if seconds is None:
                print(f"{name}: {length:,} tokens are left out: they do not fit ({reason})", flush=True)
                continue
            rates[policy, length] = length / seconds
            peer = rates.get(("full", length))
            share = bench.train(policy, length).layout.offloaded_token_fraction
            stated = "" if share is None else f", {share:.0%} of the tokens swapped"
            print(f"{name}: {length:,} tokens in {seconds:.3g} s{stated}")
            yield _against_full(f"memory_{policy}_{length}_tokens", length / seconds, "tokens/s", peer)
    if not limit:
        return
    most = dict[Policy, int]()
    for policy, name in POLICIES.items():
        most[policy] = longest(partial(fits, bench, policy), max(unit, lengths[0] // 2), limit, unit)
        print(f"{name}: {most[policy]:,} tokens fit{' (the search ends there)' * (most[policy] >= limit)}")
        yield _against_full(f"memory_{policy}_longest", most[policy], "tokens", most["full"])


def _against_full(name: str, ours: float, unit: str, peer: float | None) -> Figure:
    if not peer or "_full_" in name:
        return Figure(name, ours, unit)
    return Figure(name, ours, unit, peer, "full recomputation", ours / peer)


def available_bytes() -> int:
    """Host memory that the system could give to this process."""
    lines = Path("/proc/meminfo").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("MemAvailable")) * 1024


def profile_for_swaps(profile: Path, folder: Path, device: torch.device) -> Path:
    """The profile with the host memory that is left to activations, as torch rounds them."""
    hardware = load_hardware(profile)
    rounding = PINNED_ROUNDING if device.type == "cuda" else 1
    left = hardware.model_copy(update={"host_memory_gib_per_gpu": available_bytes() / GIB / rounding})
    path = folder / "swaps.yaml"
    path.write_text(left.model_dump_json(), "utf-8")  # JSON is YAML
    return path

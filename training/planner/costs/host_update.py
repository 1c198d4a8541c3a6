"""The optimizer's step with its state in host memory: the order of updates and copies, its time, and the best split
between host and device (Deep Optimizer States, arXiv 2410.21316)."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import inf
from typing import Literal, NamedTuple

from gristmill.training.config.layout import OffloadConfig
from gristmill.training.config.train import TrainConfig
from gristmill.training.planner.hardware import Hardware, load_hardware

MAX_STRIDE = 8


@dataclass(frozen=True)
class CopiedBytes:
    """Bytes a parameter that cross the link. fetched and stored: to and from a device that updates it; published: the
    new weight of one that the host updates. Ours: the device holds the fp32 weights, so only the two moments move."""

    fetched: float = 8.0
    stored: float = 8.0
    published: float = 4.0


OURS = CopiedBytes()
PAPER = CopiedBytes(fetched=12.0, stored=12.0, published=2.0)  # fp32 weights on the host too, 16-bit ones published


@dataclass(frozen=True)
class HostRates:
    """bytes_per_second: of the link, in each direction. Updates in parameters a second. contention: by how much longer
    an update of the host takes while the link copies, as a share of it."""

    bytes_per_second: float
    host_updates: float
    device_updates: float
    contention: float = 0.0


class Operation(NamedTuple):
    """fetch and store copy the state of a subgroup, publish copies new weights to the device."""

    kind: Literal["fetch", "update", "store", "publish"]
    subgroup: int


def on_device(count: int, offload: OffloadConfig, stride: int | None = None) -> list[bool]:
    """Which of so many subgroups the device updates. stride: of the strategy auto; None: the host updates all.

    interleaved, stride 3: the third, the sixth and so on. static 0.5 of 4: the first two."""
    if offload.optimizer == "static":
        return [index < round((offload.device_share or 0.0) * count) for index in range(count)]
    stride = offload.stride if offload.optimizer == "interleaved" else stride
    return [stride is not None and (index + 1) % stride == 0 for index in range(count)]


def operations(placement: Sequence[bool], order: Sequence[int] | None = None) -> list[Operation]:
    """Operations of the step, in the order in which it is begun. Two buffers on the device: the state of the next
    subgroup but one is fetched once that of this one is stored."""
    order = range(len(placement)) if order is None else order
    fetches = [index for index in order if placement[index]]
    done = [Operation("fetch", index) for index in fetches[:2]]
    waiting = fetches[2:]
    for index in order:
        done.append(Operation("update", index))
        if not placement[index]:
            done.append(Operation("publish", index))
            continue
        done.append(Operation("store", index))
        if waiting:
            done.append(Operation("fetch", waiting.pop(0)))
    return done


def update_seconds(
    sizes: Sequence[float], placement: Sequence[bool], rates: HostRates, copied: CopiedBytes = OURS
) -> float:
    """Seconds of the step over subgroups of so many parameters, with one clock for the host, the device and each
    direction of the link."""
    works: list[QueuedWork] = []
    place: dict[Operation, int] = {}
    stored: list[int] = []  # places of the stores so far
    fetched = 0
    for operation in operations(placement):
        size, device = sizes[operation.subgroup], placement[operation.subgroup]
        stream, seconds, after = "device", size / rates.device_updates, []
        if operation.kind == "fetch":
            stream, seconds = "to_device", size * copied.fetched / rates.bytes_per_second
            after = stored[fetched - 2 : fetched - 1] if fetched >= 2 else []
            fetched += 1
        elif operation.kind == "store":
            stream, seconds = "to_host", size * copied.stored / rates.bytes_per_second
            after = [place[Operation("update", operation.subgroup)]]
            stored.append(len(works))
        elif operation.kind == "publish":
            stream, seconds = "to_device", size * copied.published / rates.bytes_per_second
            after = [place[Operation("update", operation.subgroup)]]
        elif device:
            after = [place[Operation("fetch", operation.subgroup)]]
        else:
            stream, seconds = "host", size / rates.host_updates
        place[operation] = len(works)
        works.append(QueuedWork(stream, seconds, tuple(after)))
    if not works:
        return 0.0
    return max(end_times(works, {"host": 1 / (1 + rates.contention)}, frozenset({"to_device", "to_host"})))


def equal_stride(rates: HostRates, copied: CopiedBytes = OURS) -> float:
    """The stride k at which the host's updates, (1 - 1/k) / U, take as long as the copies to the device,
    (fetched / k + published (1 - 1/k)) / B; infinite where the host is faster than it can publish.

    U = 0.83e9, B = 12e9, the paper's 12 and 2 bytes: 1 + (12 / B) / (1 / U - 2 / B) = 1.96."""
    host, link = 1 / rates.host_updates, 1 / rates.bytes_per_second
    host *= 1 + rates.contention
    left = host - copied.published * link
    return inf if left <= 0 else 1 + copied.fetched * link / left


def best_stride(sizes: Sequence[float], rates: HostRates, copied: CopiedBytes = OURS) -> int | None:
    """The stride with the shortest simulated step, up to 8; None: the host updates all subgroups."""
    interleaved = OffloadConfig(optimizer="auto")
    strides: list[int | None] = [None, *range(1, MAX_STRIDE + 1)]
    seconds = {
        stride: update_seconds(sizes, on_device(len(sizes), interleaved, stride), rates, copied) for stride in strides
    }
    return min(strides, key=lambda stride: seconds[stride])


def device_share(offload: OffloadConfig, stride: int | None) -> float:
    """The share of the parameters that the device updates, with many subgroups."""
    if offload.optimizer == "static":
        return offload.device_share or 0.0
    stride = offload.stride if offload.optimizer == "interleaved" else stride
    return 0.0 if stride is None else 1 / stride


# QueuedWork on streams, simulated with a clock each: when every piece ends, if streams run side by side.


@dataclass(frozen=True)
class QueuedWork:
    """seconds on one stream, which runs its work in the order of the list. after: places in the list of what must end
    before, on any stream."""

    stream: str
    seconds: float
    after: tuple[int, ...] = ()


def end_times(
    works: Sequence[QueuedWork], slowed: Mapping[str, float] | None = None, by: frozenset[str] = frozenset()
) -> list[float]:
    """The time at which each piece of work ends.

    slowed: by stream, the factor on its speed while any of the streams `by` is busy: two that share memory bandwidth.
    Raises ValueError where work waits for itself. [a: 2 s], [b: 3 s after a], [a: 1 s] -> 2, 5, 3."""
    slowed = slowed or {}
    queues: dict[str, list[int]] = {}
    for place, work in enumerate(works):
        queues.setdefault(work.stream, []).append(place)
    left = [work.seconds for work in works]
    ends: dict[int, float] = {}
    now = 0.0
    while len(ends) < len(works):
        running = {
            stream: queue[0]
            for stream, queue in queues.items()
            if queue and all(earlier in ends for earlier in works[queue[0]].after)
        }
        if not running:
            raise ValueError("work waits for work behind it; order each stream by what it waits for")
        speeds = {stream: slowed.get(stream, 1.0) if by & (running.keys() - {stream}) else 1.0 for stream in running}
        passed = min(left[place] / speeds[stream] for stream, place in running.items())
        now += passed
        for stream, place in running.items():
            left[place] -= passed * speeds[stream]
            if left[place] <= 1e-12 * works[place].seconds:
                ends[place] = now
                queues[stream].pop(0)
    return [ends[place] for place in range(len(works))]


# Rates of a host beside its device, from the hardware profile.

# Reads and writes of one update of AdamW in fp32: weight, gradient and two moments are read, all but the gradient
# written.
UPDATE_BYTES = 28


def host_rates(hardware: Hardware) -> HostRates:
    """Rates of one GPU and its share of the host."""
    device = hardware.device.memory_tb_per_second * 1e12 * hardware.device.memory_efficiency / UPDATE_BYTES
    return HostRates(
        hardware.host_link.bytes_per_second,
        hardware.host_update_gparams_per_second * 1e9,
        device,
        hardware.host_contention,
    )


def planned_stride(hardware: str, sizes: Sequence[float]) -> int | None:
    """The stride of `optimizer: auto` on this profile; None: the host updates all subgroups."""
    return best_stride(sizes, host_rates(load_hardware(hardware)))


def offloaded_update(offload: OffloadConfig, rates: HostRates) -> tuple[float, float]:
    """(share of the parameters that the device updates, seconds of a step for each parameter), with 24 subgroups: more
    change the placement no further."""
    if not offload.active:
        return 0.0, 0.0
    sizes = [1e8] * 24
    stride = best_stride(sizes, rates) if offload.optimizer == "auto" else None
    seconds = update_seconds(sizes, on_device(len(sizes), offload, stride), rates)
    return device_share(offload, stride), seconds / sum(sizes)


WEIGHT_BYTES = 4
PLANNED_SUBGROUPS = 24  # more change the placement no further


def host_bytes_per_parameter(train: TrainConfig, parameters: float) -> float:
    """Bytes in host memory of each of a process's parameters under `layout.offload`: the optimizer's state in fp32, and
    of what the host updates the weight and the gradient. AdamW on the host alone: 16."""
    offload = train.layout.offload
    if not offload.active:
        return 0.0
    stride = None
    if offload.optimizer == "auto":
        count = min(max(1, round(parameters / offload.subgroup_parameters)), PLANNED_SUBGROUPS)
        stride = planned_stride(train.layout.hardware, [parameters / count] * count)
    state = 4 if train.optimizer.name == "muon" else 8
    return state + 2 * WEIGHT_BYTES * (1 - device_share(offload, stride))

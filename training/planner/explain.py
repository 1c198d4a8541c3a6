"""A run beside its forecast: seconds of a step term by term, and the causes of what it loses, the largest first.

Each cause is read from what only it changes: a slow loader from the wait for the batch, a slow rank from the seconds
in which it alone had no message under way, a slow link from a collective timed while nothing else ran, experts from the
counts of their tokens, the micro-batch from the forecast of other sizes. A cause is named above a tenth of the step."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from math import log2
from pathlib import Path
from statistics import mean, median, median_low
from typing import Any

from gristmill.foundation.errors import InputError
from gristmill.foundation.manifest import LOG_FOLDER
from gristmill.training.config.layers import divisors
from gristmill.training.config.model import ModelConfig
from gristmill.training.config.train import RANKS_NAME, RUN_NAME, TIMING_NAME, TrainConfig
from gristmill.training.planner.costs.model_shape import shape_of
from gristmill.training.planner.engine_profile import CPU_FLOAT32, FRAMEWORKS
from gristmill.training.planner.hardware import FITTED, FLOAT32, Hardware, float32_machine
from gristmill.training.planner.layout import Layout, from_config
from gristmill.training.planner.layout_checks import micro_batch_size
from gristmill.training.planner.network import AxisLinks, GroupLink, gather_volume
from gristmill.training.planner.plan_request import PlanRequest
from gristmill.training.planner.search import Forecast, Planner
from gristmill.training.planner.step_time import StepTime

NAMED = 0.1  # share of the step from which a cause is named
SETTLED = 3  # steps that a run takes to settle, which do not count
SLOWER = 1.2  # times as busy as the other ranks' median, from which a rank is slow
COMPUTE = ("matmul", "attention", "memory", "recompute", "contention", "other")
AXES = ("tensor", "context", "expert", "pipeline", "data")
# The groups of the forecast that send over a probed axis.
GROUPS = {"data": ("shard", "replicate", "data", "expert_data")}


@dataclass(frozen=True)
class StepTerm:
    """Seconds of a step. measured: None where only its sum with other terms is measured."""

    name: str
    forecast: float
    measured: float | None
    source: str


@dataclass(frozen=True)
class Cause:
    """lost: seconds of a step. advice: what to try."""

    name: str
    lost: float
    finding: str
    advice: str


@dataclass(frozen=True)
class Explanation:
    """seconds: of a step, measured. own_seconds: without those that other programs took of a CPU. causes: all that were
    looked for, the most expensive first."""

    steps: int
    seconds: float
    own_seconds: float
    forecast: Forecast
    terms: tuple[StepTerm, ...]
    causes: tuple[Cause, ...]
    notes: tuple[str, ...]

    @property
    def named(self) -> list[Cause]:
        """The causes that take more than a tenth of the run's own seconds of a step."""
        return [cause for cause in self.causes if cause.lost > NAMED * self.own_seconds]


class RunLogs:
    """The logs of a run, finished or not. Raises InputError where they say too little."""

    def __init__(self, folder: Path):
        self.folder, logs = folder, folder / LOG_FOLDER
        if not (logs / RUN_NAME).is_file() or not (folder / "model.json").is_file():
            raise InputError(
                f"{folder}: no {LOG_FOLDER}/{RUN_NAME} and model.json, so it is not the folder of a training run; name "
                "one like work/demo/train, or a folder .train-... of a run that is not finished"
            )
        run, saved = (json.loads((path).read_bytes()) for path in (logs / RUN_NAME, folder / "model.json"))
        if saved["model"].get("transformers") is not None:
            raise InputError(f"{folder}: a model of transformers is not forecast; explain a run with a model of ours")
        self.device, self.processes = str(run["device"]), int(run["processes"])
        self.model, self.vocab = ModelConfig.model_validate(saved["model"]), int(saved["vocab_size"])
        self.train = TrainConfig.model_validate(run["train"])
        self.timing = [line for line in _lines(logs / TIMING_NAME) if "seconds" in line]
        self.records = _lines(logs / RANKS_NAME)
        if len(self.timing) <= SETTLED:
            raise InputError(f"{folder}: {len(self.timing)} steps; a run is explained after {SETTLED + 1}")

    @cached_property
    def seconds(self) -> float:
        """Median seconds of a step without the measured steps, which the profiler lengthens."""
        plain = [line for line in self._settled if line["step"] not in self._measured]
        return median(_total(line) for line in plain or self._settled)

    def phase(self, name: str) -> float:
        """Median seconds of a phase on rank 0."""
        return median(line["seconds"].get(name, 0.0) for line in self._settled)

    def by_rank(self, name: str) -> list[float]:
        """Median seconds of each rank over the measured steps, without what the profiler adds; rank 0's phases where
        no step was measured."""
        if not self.records:
            data, optimizer = self.phase("data"), self.phase("optimizer")
            busy = self.seconds - data
            alone = {"data": data, "optimizer": optimizer, "communication": 0.0, "busy": busy, "processor": busy}
            return [alone[name]]
        measured = [_total(line) for line in self.timing if line["step"] in self._measured]
        added = self.seconds / median(measured) if measured else 1.0
        ranks = zip(*(record["ranks"] for record in self.records), strict=True)
        return [added * median(rank[name] for rank in records) for records in ranks]

    def link(self, axis: str) -> dict[str, float] | None:
        """Median seconds of the probe's messages by bytes."""
        probes = [record["links"][axis] for record in self.records if axis in record["links"]]
        return {size: median(probe[size] for probe in probes) for size in probes[0]} if probes else None

    @property
    def rank_load(self) -> float:
        """Tokens of the busiest expert ranks over the mean."""
        return median([record["rank_load"] for record in self.records if "rank_load" in record] or [1.0])

    @property
    def _settled(self) -> list[dict[str, Any]]:
        return self.timing[SETTLED:]

    @cached_property
    def _measured(self) -> set[int]:
        return {record["step"] for record in self.records}


class RunComparison:
    """The forecast of a run on a machine, and what its logs say."""

    def __init__(self, logs: RunLogs, hardware: Hardware):
        self.logs, self.cpu = logs, logs.device == "cpu"
        model, train = logs.model, logs.train
        if self.cpu != (hardware.node_link.kind == "memory"):
            raise InputError(
                f"--hardware {hardware.name} is not a profile of the run's device ({logs.device}); measure one "
                f"where it "
                f"ran: torchrun --nproc-per-node {logs.processes} -m gristmill.pipelines.cli.main calibrate "
                "machine.yaml"
            )
        framework = CPU_FLOAT32 if self.cpu else FRAMEWORKS["gristmill" if train.compile else "gristmill-eager"]
        self.request = PlanRequest(
            shape=shape_of(model, logs.vocab),
            hardware=float32_machine(hardware, logs.processes) if self.cpu else hardware,
            gpus=logs.processes,
            samples=train.batch_tokens // model.sequence_length,
            framework=framework.with_optimizer(train.optimizer.name),
            sustained=FLOAT32 if self.cpu else FITTED,
            float8=train.float8,
            offload=train.layout.offload,
            train=train,
        )
        self.planner = Planner(self.request)
        self.layout = self.planner.with_share(from_config(train.layout, micro_batch_size(model, train)))
        self.forecast = self.planner.forecast(self.layout)

    def explanation(self) -> Explanation:
        causes = [self._loader(), self._experts(), self._rank(), *self._links(), self._micro_batch()]
        causes += [self._compute(), self._optimizer()]
        ordered = sorted(causes, key=lambda cause: -cause.lost)
        logs = self.logs
        terms, notes = tuple(self._terms()), tuple(self._notes())
        own_seconds = logs.seconds - max(self._other_programs)
        return Explanation(len(logs.timing), logs.seconds, own_seconds, self.forecast, terms, tuple(ordered), notes)

    def _notes(self) -> list[str]:
        """Sentences on what is no fault of the run, and on the error of the forecast."""
        notes, taken = [], max(self._other_programs)
        if taken > NAMED * self.logs.seconds:
            rank, share = self._other_programs.index(taken), taken / self.logs.seconds
            notes.append(f"Other programs took the processors for {share:.0%} of a step of rank {rank}.")
        if self._is_processor_unknown:
            notes.append("What other programs took of the processor was not measured; it counts as products.")
        return [*notes, f"The forecast may be {self.forecast.error:.0%} off."]

    def _terms(self) -> list[StepTerm]:
        time, logs = self.forecast.time, self.logs
        names = {"matmul": "products", "memory": "element-wise", "contention": "contention of links", "other": "host"}
        terms = [
            StepTerm(names.get(name, name), getattr(time, name), None, "") for name in COMPUTE if getattr(time, name)
        ]
        terms.append(StepTerm("all of these", _sum(time, COMPUTE), self._own_compute, "rank of median work"))
        probed = self._probed_time
        for axis in AXES:
            if getattr(time, axis) or logs.link(axis):
                source = "at the link's speed in the run" if logs.link(axis) else ""
                measured = getattr(probed, axis) if logs.link(axis) else None
                terms.append(StepTerm(f"communication, {axis}", getattr(time, axis), measured, source))
        waiting = max(0.0, median_low(logs.by_rank("communication")) - _sum(probed, AXES))
        terms.append(StepTerm("bubble and other ranks", time.bubble, waiting, "messages that wait"))
        if self.request.shape.has_experts:
            terms.append(StepTerm("routing, imbalance", 0.0, self._imbalance_seconds, f"load {logs.rank_load:.2f}"))
        terms.append(StepTerm("optimizer", time.optimizer, min(logs.by_rank("optimizer")), "the fastest rank"))
        taken = None if self._is_processor_unknown else max(self._other_programs)
        source = "" if taken is None else "the rank with the least of its processor"
        terms.append(StepTerm("other programs", 0.0, taken, source))
        terms.append(StepTerm("data wait", 0.0, max(logs.by_rank("data")), "the slowest rank"))
        return [*terms, StepTerm("step", time.total, logs.seconds, "median of rank 0")]

    @property
    def _own_compute(self) -> float:
        """Seconds of passes on the rank of median work."""
        return max(0.0, median_low(self._working) - min(self.logs.by_rank("optimizer")))

    @cached_property
    def _working(self) -> list[float]:
        """Seconds that each rank works: busy, on a CPU without those in which other programs had the processor."""
        busy, processor = self.logs.by_rank("busy"), self.logs.by_rank("processor")
        return [min(pair) for pair in zip(busy, processor, strict=True)] if self.cpu else busy

    @property
    def _is_processor_unknown(self) -> bool:
        """Whether the run is on a CPU and no step was measured, as of one process."""
        return self.cpu and not self.logs.records

    @cached_property
    def _other_programs(self) -> list[float]:
        """Seconds of each rank that other programs took; 0 on GPUs, where the host waits for the device."""
        return [wall - own for wall, own in zip(self.logs.by_rank("busy"), self._working, strict=True)]

    def _loader(self) -> Cause:
        waits = self.logs.by_rank("data")
        rank = waits.index(max(waits))
        finding = f"rank {rank} waits {max(waits):.3f} s of a step for its batch"
        advice = "read from a local disk, give the processes more cores, or make the samples cheaper (index, objective)"
        return Cause("slow loader", max(waits), finding, advice)

    def _rank(self) -> Cause:
        """The rank that is busy for longer than the others, by what the forecast gives it to do."""
        busy, stage_seconds = self._working, self._stage_seconds
        work = [stage_seconds[rank * len(stage_seconds) // len(busy)] for rank in range(len(busy))]
        ratios = [seconds / expected for seconds, expected in zip(busy, work, strict=True)]
        rank = ratios.index(max(ratios))
        others = median_low(ratios[:rank] + ratios[rank + 1 :]) if len(ratios) > 1 else ratios[0]
        lost = busy[rank] - others * work[rank] - self._imbalance_seconds
        slow = len(busy) > 1 and ratios[rank] > SLOWER * others
        finding = f"rank {rank} works {busy[rank]:.3f} s of a step, {ratios[rank] / others:.2f} times the others"
        advice = f"look at the machine of rank {rank} (temperature, clock; gristmill doctor --gpus), or leave it out"
        return Cause("slow rank", lost if slow else 0.0, finding, advice)

    def _links(self) -> list[Cause]:
        time, causes = self.forecast.time, []
        for axis in AXES:
            if self.logs.link(axis):
                slower = self._with_links({axis: self._measured_link(axis)})
                lost = slower.total - time.total
                profile, measured = self._profile_link(axis).bandwidth, self._measured_link(axis).bandwidth
                finding = f"the {axis} axis moves {measured / 1e9:.2f} GB/s where the profile has {profile / 1e9:.2f}"
                advice = f"test the links of the {axis} ranks (adapter, cable, NCCL_DEBUG=INFO), or give the axis fewer"
                causes.append(Cause(f"slow link, {axis}", lost, finding, f"{advice} ranks"))
        return causes

    def _experts(self) -> Cause:
        finding = f"the busiest expert ranks get {self.logs.rank_load:.2f} times the mean of tokens"
        advice = "raise moe.bias_update_rate or moe.balance_loss, or place busy experts on different ranks (expert)"
        return Cause("imbalance of experts", self._imbalance_seconds, finding, advice)

    @cached_property
    def _imbalance_seconds(self) -> float:
        """Seconds that the busiest experts add: by the forecast, times by how much passes are slower than that."""
        if self.logs.rank_load <= 1:
            return 0.0
        busiest = Planner(replace(self.request, imbalance=self.logs.rank_load)).forecast(self.layout).time.total
        slower = max(1.0, mean(self._working) / max(1e-9, _sum(self.forecast.time, COMPUTE)))
        return (busiest - self.forecast.time.total) * slower

    def _micro_batch(self) -> Cause:
        """The best other micro-batch that fits, by its forecast."""
        share = self.request.samples // self.layout.data
        layouts = [replace(self.layout, micro_batch=size) for size in divisors(share) if size * self.layout.data]
        forecasts = [self.planner.forecast(layout) for layout in layouts if self._runs(layout)]
        best = min(forecasts, key=lambda forecast: forecast.time.total, default=self.forecast)
        gain = max(0.0, 1 - best.time.total / self.forecast.time.total)
        size = best.layout.micro_batch
        finding = f"micro-batches of {self.layout.micro_batch} where {size} is forecast to take {gain:.0%} less time"
        return Cause(
            "micro-batch",
            gain * (self.logs.seconds - max(self._other_programs)),
            finding,
            f"set train.layout.micro_batch: {size}",
        )

    def _runs(self, layout: Layout) -> bool:
        fits = self.planner.memory(layout).total <= self.planner.capacity
        return fits and self.request.illegal_reason(layout) is None

    def _compute(self) -> Cause:
        """Seconds of passes beyond the forecast and the error that forecasts have. By as much as other programs take
        of a processor's time they may also slow what is left of it: its caches and its clock are theirs too."""
        forecast = _sum(self.forecast.time, COMPUTE)
        shared = 1 + max(self._other_programs) / self.logs.seconds
        lost = self._own_compute - forecast / (1 - self.forecast.error) * shared
        finding = f"passes take {self._own_compute:.3f} s of a step, forecast {forecast:.3f}"
        advice = "look at clocks and other programs on the machines; measure them anew (gristmill calibrate)"
        return Cause("products slower than the profile", lost, finding, advice)

    def _optimizer(self) -> Cause:
        own_share = 1 - max(self._other_programs) / self.logs.seconds
        measured, forecast = own_share * min(self.logs.by_rank("optimizer")), self.forecast.time.optimizer
        lost = measured - forecast / (1 - self.forecast.error)
        finding = f"the update takes {measured:.3f} s of a step, {forecast:.3f} in the forecast"
        return Cause("optimizer", lost, finding, "with offload, give the processes more threads (OMP_NUM_THREADS)")

    @cached_property
    def _stage_seconds(self) -> list[float]:
        return self.planner.steps.rank_seconds(self.layout, self.request.samples, self.forecast.split_points)

    @cached_property
    def _probed_time(self) -> StepTime:
        return self._with_links({axis: self._measured_link(axis) for axis in AXES if self.logs.link(axis)})

    def _with_links(self, measured: Mapping[str, GroupLink]) -> StepTime:
        """The forecast with these links of axes."""
        links: AxisLinks = self.forecast.placement.links
        changes = {group: link for axis, link in measured.items() for group in GROUPS.get(axis, (axis,))}
        return self.planner.steps.step(
            self.layout, self.request.samples, self.forecast.split_points, replace(links, **changes)
        )

    def _profile_link(self, axis: str) -> GroupLink:
        link: GroupLink = getattr(self.forecast.placement.links, axis)
        return link

    def _measured_link(self, axis: str) -> GroupLink:
        """Bandwidth and latency from the probe's two messages, in the units of the forecast: 2 bytes a number."""
        probe, ranks = self.logs.link(axis), self._ranks_of(axis)
        assert probe is not None
        (small, small_seconds), (large, large_seconds) = sorted((int(size), value) for size, value in probe.items())
        sent = [gather_volume(size, ranks) for size in (small, large)]
        moved = large_seconds - small_seconds
        bandwidth = (sent[1] - sent[0]) / moved if moved > 0 else sent[1] / large_seconds
        latency = max(0.0, small_seconds - sent[0] / bandwidth) / log2(ranks)
        numbers = 2 if self.cpu else 1
        known = self._profile_link(axis)
        return known._replace(bandwidth=bandwidth / numbers, latency=latency, adapter=bandwidth / numbers)

    def _ranks_of(self, axis: str) -> int:
        if axis == "expert":
            return self.layout.expert_ranks
        return int(getattr(self.layout, axis))


def explain_run(folder: Path, hardware: Hardware) -> Explanation:
    """Compare a run with its forecast on such machines."""
    return RunComparison(RunLogs(folder), hardware).explanation()


def _sum(time: StepTime, names: Sequence[str]) -> float:
    return float(sum(getattr(time, name) for name in names))


def _total(line: Mapping[str, Any]) -> float:
    return float(sum(line["seconds"].values()))


def _lines(path: Path) -> list[dict[str, Any]]:
    """JSON lines; the last one may not be whole while the run writes it."""
    if not path.is_file():
        return []
    lines = path.read_text("utf-8").split("\n")[:-1]
    return [json.loads(line) for line in lines if line]

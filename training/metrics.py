"""Logs of a run: metrics.jsonl and evaluations.jsonl, with equal bytes for equal runs, and logs/ with timing and
TensorBoard events. Each checkpoint holds a copy of the first two, from which a damaged one is restored. Seconds of all
ranks in the measured steps are in logs/ranks.jsonl."""

import importlib
import json
import math
import os
import resource
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol, TextIO

import torch
import torch.distributed as dist
from torch.profiler import profile
from torch.utils.tensorboard import SummaryWriter

from gristmill.foundation.errors import InputError, RecipeError
from gristmill.foundation.files import write_atomic
from gristmill.foundation.fingerprint import canonical_json
from gristmill.foundation.manifest import LOG_FOLDER
from gristmill.foundation.progress import Reporter
from gristmill.training.config.train import (
    GRADIENT_NOISE,
    LEFT_OUT,
    RANKS_NAME,
    RUN_NAME,
    TIMING_NAME,
    TRACKER_PACKAGES,
    MonitoringConfig,
    TrainConfig,
)
from gristmill.training.objectives.objective import TrainingData
from gristmill.training.parallel.collectives import probe_link
from gristmill.training.parallel.mesh import Mesh
from gristmill.training.trainer import StepReport

METRICS_NAME = "metrics.jsonl"
EVALUATIONS_NAME = "evaluations.jsonl"
COMMUNICATION = ("gloo:", "nccl:", "ncclDevKernel")  # first letters of the profiler's events


@dataclass(frozen=True)
class ResumePoint:
    """The step after which a run goes on. saved: its checkpoint, or None. takes_over: another replica wrote the files
    until now, which are whole up to the step."""

    step: int
    saved: Path | None = None
    takes_over: bool = False


class MetricsLog:
    """Writes one JSON line a step to each file. Lines of steps after the resume point are removed first; damaged lines
    are reported and restored from its checkpoint's copy."""

    def __init__(
        self, folder: Path, start: ResumePoint, monitoring: MonitoringConfig, evaluates: bool, reporter: Reporter
    ):
        step, saved = start.step, start.saved
        logs = folder / LOG_FOLDER
        logs.mkdir(parents=True, exist_ok=True)
        path = folder / METRICS_NAME
        self._metrics = _open_after(path, step, reporter) if start.takes_over else _open_restored(path, saved, reporter)
        self._timing = _open_after(logs / TIMING_NAME, step, reporter)
        self._evaluations = _open_restored(folder / EVALUATIONS_NAME, saved, reporter) if evaluates else None
        self._trackers = start_trackers(monitoring, logs, step)

    def write(self, metrics: Mapping[str, Any], timing: Mapping[str, Any]) -> None:
        """metrics: deterministic values; timing: measured times. Both contain "step"."""
        for file, record in ((self._metrics, metrics), (self._timing, timing)):
            if len(record) > 1:
                file.write(json.dumps(record) + "\n")
                file.flush()
        for tracker in self._trackers:
            tracker.log(dict(_scalars(metrics) | _scalars(timing)), metrics["step"])

    def write_evaluation(self, step: int, tokens: int, scores: Mapping[str, Mapping[str, float]]) -> None:
        """One line {"step", "tokens", "scores": {task: {metric: value}}}."""
        assert self._evaluations is not None  # opened where the recipe evaluates during training
        record = {"step": step, "tokens": tokens, "scores": {task: dict(values) for task, values in scores.items()}}
        self._evaluations.write(json.dumps(record) + "\n")
        self._evaluations.flush()
        for tracker in self._trackers:
            tracker.log(dict(_scalars(scores, "evaluation/")), step)

    def copies(self) -> dict[str, bytes]:
        """Contents of the files to store in a checkpoint, by name; flushed to disk first."""
        copies = {}
        for file in (self._metrics, self._evaluations):
            if file is not None:
                os.fsync(file.fileno())
                copies[Path(file.name).name] = Path(file.name).read_bytes()
        return copies

    def close(self) -> None:
        self._metrics.close()
        self._timing.close()
        if self._evaluations is not None:
            self._evaluations.close()
        for tracker in self._trackers:
            tracker.close()


@dataclass
class StepObservation:
    """communication_seconds: the time in which at least one collective or message was under way, waiting for other
    processes included; None where it was not measured. processor_seconds: that the step's thread ran on a processor."""

    communication_seconds: float | None = None
    processor_seconds: float = 0.0


@contextmanager
def observed(folder: Path, step: int, rank: int, traced: bool, measured: bool) -> Iterator[StepObservation]:
    """Runs a step under torch's profiler. traced: write a Chrome trace, logs/trace-00000010-rank0.json; measured: find
    the time in communication. The profiler does not change the results."""
    observation = StepObservation()
    if not (traced or measured):
        yield observation
        return
    with profile() as trace:
        started = time.thread_time()
        yield observation
        observation.processor_seconds = time.thread_time() - started
    if traced:
        trace.export_chrome_trace(str(folder / LOG_FOLDER / f"trace-{step:08d}-rank{rank}.json"))
    if measured:
        events = [(event.name(), event.start_ns(), event.end_ns()) for event in trace.profiler.kineto_results.events()]
        spans = [(since, until) for name, since, until in events if name.startswith(COMMUNICATION)]
        observation.communication_seconds = covered(spans) / 1e9


def covered(intervals: Iterable[tuple[int, int]]) -> int:
    """Total length of the union of intervals. [(0, 3), (2, 5), (7, 8)] -> 6."""
    length, reached = 0, 0
    for since, until in sorted(intervals):
        length += max(0, until - max(since, reached))
        reached = max(reached, until)
    return length


def peak_memory(device: torch.device) -> int:
    """Bytes: of the GPU's allocator, or resident in this process since it began."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024  # Linux counts in KiB


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """Raises InputError naming the first line that is no JSON object."""
    records, damaged = _parse(path.read_bytes())
    if damaged:
        raise InputError(
            f"{path}: line {damaged[0]} is no JSON object; remove the folder {path.parent} and run its stage again"
        )
    return [record for _, record in records]


def _open_restored(path: Path, saved: Path | None, reporter: Reporter) -> TextIO:
    """The file as it was when the checkpoint was saved; empty without one."""
    copy = b"" if saved is None or not (saved / path.name).is_file() else (saved / path.name).read_bytes()
    content = path.read_bytes() if path.exists() else b""
    if not content.startswith(copy):
        lines = zip(content.splitlines(), copy.splitlines(), strict=False)
        same = next((number for number, (here, there) in enumerate(lines) if here != there), len(content.splitlines()))
        reporter.info(f"{path}: damaged or missing from line {same + 1} on; restored from the copy in {saved}")
    write_atomic(path, copy)
    return path.open("a")


def _open_after(path: Path, step: int, reporter: Reporter) -> TextIO:
    """The file with its lines up to `step`. An incomplete last line is dropped; damaged lines are reported."""
    content = path.read_bytes() if path.exists() else b""
    records, damaged = _parse(content[: content.rfind(b"\n") + 1])
    if damaged:
        reporter.info(f"{path}: lines {damaged[:10]} are damaged and were removed; they contain times only")
    kept = [line + b"\n" for line, record in records if isinstance(at := record.get("step"), int) and at <= step]
    write_atomic(path, b"".join(kept))
    return path.open("a")


def _parse(content: bytes) -> tuple[list[tuple[bytes, dict[str, Any]]], list[int]]:
    """(each line that is a JSON object, and the object; numbers of the other lines, from 1)."""
    records, damaged = [], []
    for number, line in enumerate(content.removesuffix(b"\n").split(b"\n") if content else [], 1):
        try:
            record = json.loads(line)
        except (ValueError, RecursionError):
            record = None
        if isinstance(record, dict):
            records.append((line, record))
        else:
            damaged.append(number)
    return records, damaged


def _scalars(record: Mapping[str, Any], prefix: str = "") -> set[tuple[str, float]]:
    """{"a": 1, "b": {"c": 2}} -> {("a", 1), ("b/c", 2)}."""
    scalars: set[tuple[str, float]] = set()
    for name, value in record.items():
        if isinstance(value, Mapping):
            scalars |= _scalars(value, f"{prefix}{name}/")
        elif isinstance(value, int | float) and name != "step":
            scalars.add((prefix + name, value))
    return scalars


# Peak FLOP/s of a device: the denominator of model FLOP utilization (MFU).

# Dense bf16 matrix peaks in FLOP/s, from the vendors' data sheets (the sparse figures are twice these).
BF16_PEAKS = {"H100": 989e12, "H200": 989e12, "A100": 312e12, "L40S": 362e12, "V100": 125e12}


def device_peak(device: torch.device) -> float | None:
    """bf16 FLOP/s of one device; None for a device that is not in BF16_PEAKS."""
    if device.type != "cuda":
        return None
    name = torch.cuda.get_device_name(device)
    return next((peak for key, peak in BF16_PEAKS.items() if key in name), None)


# What metrics.jsonl and timing.jsonl say of a step.


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
        left_out = {k for samples in report.left_out for k in samples}
        sources = [self.data.samples.source_of(k) for k in report.samples if k not in left_out]
        if len(getattr(self.data.samples, "sources", ())) > 1:
            tokens = report.tokens // max(len(sources), 1)
            metrics["source_tokens"] = {name: count * tokens for name, count in sorted(Counter(sources).items())}
        if (per_token := self._bytes_per_token(sources)) is not None:
            metrics["bits_per_byte"] = _finite(report.loss / math.log(2) / per_token)
        if report.gradient_noise is not None:
            metrics[GRADIENT_NOISE] = vars(report.gradient_noise)
        if report.expert_load is not None:
            metrics["expert_load"] = report.expert_load
        if len(report.means) > 1:
            metrics["objective"] = _finite(report.objective)
            metrics["terms"] = {name: _finite(mean) for name, mean in report.means.items()}
        if report.left_out:
            metrics["replicas"] = list(report.replicas)
            metrics[LEFT_OUT] = [[samples.start, samples.stop] for samples in report.left_out]
        if report.skipped is not None:
            metrics |= {"skipped": report.skipped, "samples": list(report.samples)}
        return metrics

    def timing(self, report: StepReport, observation: StepObservation) -> dict[str, Any]:
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

    def _bytes_per_token(self, sources: Sequence[str]) -> float | None:
        """Mean bytes per token of these sources, of the samples of a step; None if a source has no figure, or the loss
        is not one of text."""
        if not self.bits_per_byte:
            return None
        figures = [self.data.training_bytes_per_token.get(source) for source in sources]
        known = [value for value in figures if value is not None]
        return sum(known) / len(known) if known and len(known) == len(figures) else None


def _finite(value: float) -> float | None:
    """The value, or None where it is not finite: JSON has no NaN."""
    return value if math.isfinite(value) else None


# Seconds of every rank and speed of every axis's link in the measured steps of a run: logs/ranks.jsonl, which
# `gristmill explain` compares with the forecast.

FIRST_MEASURED = 10  # a step by which a run has settled
PROBED = ("tensor", "context", "data", "pipeline", "expert")


def is_measured(step: int, every: int) -> bool:
    """True for every so many steps, and for step 10 of a run that measures less often: short runs are explained too."""
    return bool(every) and (step % every == 0 or (every > FIRST_MEASURED == step))


def write_run_file(folder: Path, train: TrainConfig, processes: int, device: torch.device) -> None:
    """Write what a run that is not finished is forecast from: its training, the processes, the device."""
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else device.type
    content = {"device": name, "processes": processes, "train": train.model_dump(mode="json")}
    write_atomic(folder / LOG_FOLDER / RUN_NAME, canonical_json(content) + b"\n")


class RankTimes:
    """Gathers what each rank measured and writes it on the first. All processes call `add` at the same steps."""

    def __init__(self, folder: Path, mesh: Mesh):
        self.path, self.mesh = folder / LOG_FOLDER / RANKS_NAME, mesh

    def add(self, report: StepReport, observation: StepObservation) -> None:
        """Gathers a step. busy: seconds with the batch at hand and no message under way. processor: of the step, those
        in which its thread ran; on a CPU the others, but for waiting, went to other programs."""
        seconds, communication = report.seconds, observation.communication_seconds or 0.0
        busy = sum(seconds.values()) - seconds["data"] - communication
        processor = observation.processor_seconds
        rows = self._gathered([busy, processor, seconds["data"], communication, seconds["optimizer"]])
        links = {name: probe_link(getattr(self.mesh, name).group, self.mesh.device) for name in self._axes}
        if self.mesh.is_first:
            names = ("busy", "processor", "data", "communication", "optimizer")
            ranks = [dict(zip(names, row, strict=True)) for row in rows]
            record: dict[str, Any] = {"step": report.progress.step, "ranks": ranks, "links": links}
            if report.rank_load is not None:
                record["rank_load"] = report.rank_load
            with self.path.open("a") as file:
                file.write(json.dumps(record) + "\n")

    @property
    def _axes(self) -> list[str]:
        return [name for name in PROBED if getattr(self.mesh, name).size > 1]

    def _gathered(self, own: list[float]) -> list[list[float]]:
        row = torch.tensor(own, dtype=torch.float64, device=self.mesh.device)
        rows = [torch.empty_like(row) for _ in range(self.mesh.world.size)]
        dist.all_gather(rows, row, group=self.mesh.world.group)
        return [gathered.tolist() for gathered in rows]


# Trackers of experiments: TensorBoard, Weights & Biases and MLflow, each by its own library.


class Tracker(Protocol):
    def log(self, values: Mapping[str, float], step: int) -> None: ...
    def close(self) -> None: ...


class TensorBoard:
    """Event files in logs/tensorboard; those of steps after `step` are hidden."""

    def __init__(self, logs: Path, step: int):
        self._writer = SummaryWriter(str(logs / "tensorboard"), purge_step=step + 1)

    def log(self, values: Mapping[str, float], step: int) -> None:
        for name, value in values.items():
            self._writer.add_scalar(name, value, step)

    def close(self) -> None:
        self._writer.close()


class WeightsAndBiases:
    """A run of the project; a resumed training goes on in it. Its own environment variables (WANDB_MODE ...) apply."""

    def __init__(self, project: str, logs: Path):
        wandb = _library("wandb")
        stored = logs / "wandb_run"
        run_id = stored.read_text("utf-8") if stored.is_file() else None
        self._run = wandb.init(project=project, dir=str(logs), id=run_id, resume="allow")
        stored.write_text(self._run.id, "utf-8")

    def log(self, values: Mapping[str, float], step: int) -> None:
        self._run.log(dict(values), step=step)

    def close(self) -> None:
        self._run.finish()


class MLflow:
    """A run of the experiment; a resumed training goes on in it. MLFLOW_TRACKING_URI says where; without it, as MLflow
    does."""

    def __init__(self, experiment: str, logs: Path):
        self._mlflow = _library("mlflow")
        self._mlflow.set_experiment(experiment)
        stored = logs / "mlflow_run"
        run_id = stored.read_text("utf-8") if stored.is_file() else None
        self._run_id = self._mlflow.start_run(run_id=run_id).info.run_id
        stored.write_text(self._run_id, "utf-8")

    def log(self, values: Mapping[str, float], step: int) -> None:
        # MLflow's names allow neither brackets nor other signs than these
        named = {"".join(c if c.isalnum() or c in "_-. /" else "_" for c in name): v for name, v in values.items()}
        self._mlflow.log_metrics(named, step=step, run_id=self._run_id)

    def close(self) -> None:
        self._mlflow.end_run()


def start_trackers(monitoring: MonitoringConfig, logs: Path, step: int) -> list[Tracker]:
    """The recipe's trackers, for a run that begins after `step`. Raises RecipeError if a package is absent."""
    trackers: list[Tracker] = []
    for name in monitoring.trackers:
        if name == "tensorboard":
            trackers.append(TensorBoard(logs, step))
        else:
            tracker = WeightsAndBiases if name == "wandb" else MLflow
            trackers.append(tracker(monitoring.project, logs))
    return trackers


def _library(name: str) -> Any:
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise RecipeError(
            f"train.monitoring.trackers names {name}, which is not installed; pip install {TRACKER_PACKAGES[name]}"
        ) from error

"""What a run writes down: metrics.jsonl, the same bytes for the same run, and logs/ with times and TensorBoard
events."""

import json
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TextIO

from torch.profiler import profile
from torch.utils.tensorboard import SummaryWriter

from gristmill.data_pipeline.errors import RecipeError
from gristmill.data_pipeline.provenance.files import write_atomic
from gristmill.data_pipeline.provenance.manifest import LOG_FOLDER
from gristmill.training.config import WatchConfig

METRICS_NAME = "metrics.jsonl"
TIMING_NAME = "timing.jsonl"


class MetricsLog:
    """One JSON line a step in each file. After a resume from `step`, lines of later steps are cut off first."""

    def __init__(self, folder: Path, step: int, watch: WatchConfig):
        logs = folder / LOG_FOLDER
        logs.mkdir(parents=True, exist_ok=True)
        self._metrics = _open_after(folder / METRICS_NAME, step)
        self._timing = _open_after(logs / TIMING_NAME, step)
        self._board = SummaryWriter(str(logs / "tensorboard"), purge_step=step + 1) if watch.tensorboard else None
        self._wandb = _start_wandb(watch.wandb_project, logs) if watch.wandb_project else None

    def write(self, metrics: Mapping[str, Any], timing: Mapping[str, Any]) -> None:
        """metrics: what depends on the run alone; timing: what depends on the day. Both hold "step"."""
        for file, record in ((self._metrics, metrics), (self._timing, timing)):
            if len(record) > 1:
                file.write(json.dumps(record) + "\n")
                file.flush()
        if self._board is not None:
            for name, value in _scalars(metrics) | _scalars(timing):
                self._board.add_scalar(name, value, metrics["step"])
        if self._wandb is not None:
            self._wandb.log(dict(_scalars(metrics) | _scalars(timing)), step=metrics["step"])

    def close(self) -> None:
        self._metrics.close()
        self._timing.close()
        if self._board is not None:
            self._board.close()
        if self._wandb is not None:
            self._wandb.finish()


class Clock:
    """Seconds by phase of a step; tell hears each phase as it begins."""

    def __init__(self, tell: Callable[[str], None] = lambda phase: None):
        self.seconds: dict[str, float] = {}
        self._tell, self._phase, self._since = tell, "", 0.0

    def begin(self, phase: str) -> None:
        self.end()
        self._tell(phase)
        self._phase, self._since = phase, time.perf_counter()

    def end(self) -> None:
        if self._phase:
            self.seconds[self._phase] = self.seconds.get(self._phase, 0.0) + time.perf_counter() - self._since
        self._phase = ""


@contextmanager
def profiled(folder: Path, step: int, rank: int, wanted: Sequence[int]) -> Iterator[None]:
    """A Chrome trace of the step, if it is among those wanted: logs/trace-00000010-rank0.json."""
    if step not in wanted:
        yield
        return
    with profile() as trace:
        yield
    trace.export_chrome_trace(str(folder / LOG_FOLDER / f"trace-{step:08d}-rank{rank}.json"))


def _start_wandb(project: str, logs: Path) -> Any:
    try:
        import wandb  # an optional extra, and slow to load
    except ImportError as error:
        raise RecipeError("train.watch.wandb_project is set, but wandb is not installed; pip install wandb") from error
    return wandb.init(project=project, dir=str(logs), resume="allow")


def read_metrics(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def _open_after(path: Path, step: int) -> TextIO:
    """The file with the lines up to `step` only; a line that a kill cut short is no line."""
    kept = []
    if path.exists():
        for line in path.read_text().splitlines(keepends=True):
            if not line.endswith("\n") or json.loads(line)["step"] > step:
                break
            kept.append(line)
    write_atomic(path, "".join(kept).encode())
    return path.open("a")


def _scalars(record: Mapping[str, Any], prefix: str = "") -> set[tuple[str, float]]:
    """{"a": 1, "b": {"c": 2}} -> {("a", 1), ("b/c", 2)}."""
    found: set[tuple[str, float]] = set()
    for name, value in record.items():
        if isinstance(value, Mapping):
            found |= _scalars(value, f"{prefix}{name}/")
        elif isinstance(value, int | float) and name != "step":
            found.add((prefix + name, value))
    return found

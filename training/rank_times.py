"""Seconds of every rank and speed of every axis's link in the measured steps of a run: logs/ranks.jsonl, which
`gristmill explain` compares with the forecast."""

import json
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from gristmill.foundation.files import write_atomic
from gristmill.foundation.fingerprint import canonical_json
from gristmill.foundation.manifest import LOG_FOLDER
from gristmill.training.config.train import RANKS_NAME, RUN_NAME, TrainConfig
from gristmill.training.metrics import StepObservation
from gristmill.training.parallel.collectives import reduce_scatter
from gristmill.training.parallel.mesh import Mesh
from gristmill.training.trainer import StepReport

FIRST_MEASURED = 10  # a step by which a run has settled
PROBE_REPEATS = 3
SMALL, LARGE = 2**12, 2**22  # bytes of the messages that tell latency and bandwidth
LARGE_ON_GPU = 2**26
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


def probe_link(group: Any, device: torch.device) -> dict[str, float]:
    """Seconds of one all-gather or reduce-scatter of few and of many bytes while nothing else runs: the fastest of
    three on the rank where it took longest, as calibration measures them. All ranks of the group call it."""
    large = LARGE_ON_GPU if device.type == "cuda" else LARGE
    return {str(size): _collective_seconds(size, group, device) for size in (SMALL, large)}


def _collective_seconds(size: int, group: Any, device: torch.device) -> float:
    ranks = dist.get_world_size(group)
    share = torch.zeros(max(1, size // 4 // ranks), device=device)
    whole = torch.zeros(len(share) * ranks, device=device)
    seconds = []
    for _ in range(PROBE_REPEATS + 1):  # the first warms up
        dist.barrier(group=group)
        _wait(device)
        started = time.perf_counter()
        dist.all_gather_into_tensor(whole, share, group=group)
        reduce_scatter(share, whole, group)
        _wait(device)
        seconds.append(time.perf_counter() - started)
    slowest = torch.tensor(min(seconds[1:]) / 2, dtype=torch.float64, device=device)
    dist.all_reduce(slowest, dist.ReduceOp.MAX, group=group)
    return float(slowest)


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)

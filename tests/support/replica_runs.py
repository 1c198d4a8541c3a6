"""Small runs whose replicas are killed at chosen moments, and the same training by a plain loop in one process."""

import multiprocessing
import os
import signal
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from gristmill.foundation.progress import Reporter
from gristmill.training.config.layout import LayoutConfig
from gristmill.training.config.train import LEFT_OUT, OptimizerConfig
from gristmill.training.engine.local_model import build_local_model
from gristmill.training.launch.processes import RankInfo, init_distributed
from gristmill.training.launch.replica_driver import ReplicaDriver
from gristmill.training.model.init import role_of
from gristmill.training.optim.muon import orthogonal
from gristmill.training.parallel.mesh import single_process
from gristmill.training.parallel.replicas import ReplicaProcess, Replicas
from gristmill.training.planner.layout_checks import config_of_replica
from gristmill.training.run import Run
from tests.support.training_runs import BATCH, MODEL, STEPS, Counting, new_run, train_config

RETURN_STEP = 6  # after which the others wait until all lost replicas are back
SETTINGS: dict[str, Any] = {
    "precision": "fp64",
    # At ten times this rate the loss oscillates, and a plain loop over the samples in another order differs by 4e-13.
    "optimizer": {"learning_rate": 1e-3, "clip_norm": None},
    "lr_schedule": {"shape": "constant", "warmup_share": 0.0},
    "checkpoint": {"every": 4},
    "validation": {"every": 0},
    "monitoring": {"timeout_seconds": 60, "trackers": []},
}
MUON: dict[str, Any] = SETTINGS | {
    "optimizer": {"name": "muon", "learning_rate": 1e-3, "muon_learning_rate": 2e-3, "clip_norm": None}
}


@dataclass(frozen=True)
class Fault:
    """A process that kills itself the first time it is there. moment: gradients (its own are ready, no other process
    has them), summed (it has all gradients, and has not told the driver), files (between two steps), logged (the line
    of the step is in the log, and nobody was told), saving (in the middle of a checkpoint)."""

    replica: int
    rank: int
    step: int
    moment: str


def start_server() -> Any:
    """How processes are started here: as forks of one that has torch loaded."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([__name__])
    first = context.Process(target=time.sleep, args=(0,))
    first.start()
    first.join()
    return context


def driver_of(
    folder: Path,
    layout: dict[str, Any],
    faults: Sequence[Fault],
    context: Any,
    settings: dict[str, Any] = SETTINGS,
) -> ReplicaDriver:
    """The driver of a run on a layout with replicas, of which the faults kill some."""
    config = LayoutConfig(lost_replicas="continue", **layout)
    return ReplicaDriver(config, train_replica, (folder, config, faults, settings), Reporter.silent(), context)


def train_replica(
    place: ReplicaProcess, folder: Path, layout: LayoutConfig, faults: Sequence[Fault], settings: dict[str, Any]
) -> dict[str, Any]:
    folder.mkdir(exist_ok=True)
    own = config_of_replica(MODEL, train_config(**settings, layout=layout))
    timeout = own.monitoring.timeout_seconds
    with init_distributed(RankInfo.from_environment(), own.layout, MODEL, "", timeout) as mesh:
        replicas = Replicas(place, timeout)
        run = new_run(folder, mesh, replicas=replicas, layout=own.layout, **settings)
        is_first_start = place.incarnation <= place.replicas
        for fault in faults if is_first_start else []:
            if (fault.replica, fault.rank) == (place.replica, place.rank):
                plant(run, fault)
        lost = {fault.replica for fault in faults}
        wait_for(run, [folder.parent / f"returned-{replica}" for replica in sorted(lost - {place.replica})])
        if not is_first_start:
            wait_until((folder.parent / "waiting").exists)
            (folder.parent / f"returned-{place.replica}").touch()
        return run.train()


def plant(run: Run, fault: Fault) -> None:
    """Has the process killed before or after the call that ends the moment."""
    assert run.replicas is not None
    places: dict[str, tuple[Any, str, bool]] = {
        "gradients": (run.replicas, "sum_gradients", True),
        "summed": (run.replicas, "_sum_all", False),
        "files": (run, "_write_step", True),
        "logged": (run, "_save_if_due", True),
        "saving": (run.saver, "prune", True),
    }
    owner, name, before = places[fault.moment]
    original = getattr(owner, name)

    def killed(*arguments: Any) -> Any:
        # Progress counts the steps that are done: within a step it is one behind.
        is_step = run.trainer.progress.step + (fault.moment in ("gradients", "summed")) == fault.step
        if is_step and before:
            os.kill(os.getpid(), signal.SIGKILL)
        result = original(*arguments)
        if is_step:
            os.kill(os.getpid(), signal.SIGKILL)
        return result

    setattr(owner, name, killed)


def wait_for(run: Run, marks: Sequence[Path]) -> None:
    """After RETURN_STEP the process waits for the marks of the lost replicas, which come back then."""
    original: Callable[..., None] = run._write_step

    def waits(*arguments: Any) -> None:
        if run.trainer.progress.step == RETURN_STEP and marks:
            (run.folder.parent / "waiting").touch()
            for mark in marks:
                wait_until(mark.exists)
            time.sleep(0.5)  # until they have asked to take part
        original(*arguments)

    run._write_step = waits  # type: ignore[method-assign]


def wait_until(happened: Callable[[], bool]) -> None:
    while not happened():
        time.sleep(0.02)


def plain_training(
    left_out: Sequence[Sequence[range]], settings: dict[str, Any] = SETTINGS
) -> tuple[list[float], list[float], dict[str, Tensor]]:
    """(losses, gradient norms, weights) of a loop in one process over the samples that were not left out, by step."""
    config = train_config(**settings)
    model = build_local_model(MODEL, Counting.vocab_size, config, single_process(), 7).stages[0]
    named = dict(model.named_parameters())
    update = plain_optimizer(named, config.optimizer)
    losses, norms, data = [], [], Counting()
    for step in range(STEPS):
        absent = {k for samples in left_out[step] for k in samples}
        rows = [data.sample(k) for k in range(step * BATCH, (step + 1) * BATCH) if k not in absent]
        tokens, targets, weights = (
            torch.stack([torch.from_numpy(row[name]) for row in rows]) for name in ("tokens", "targets", "weights")
        )
        nll = F.cross_entropy(model(tokens).flatten(0, 1), targets.flatten(), reduction="none")
        loss = (nll * weights.flatten().double()).sum() / weights.sum()
        model.zero_grad()
        loss.backward()
        norms.append(
            float(torch.cat([value.grad.flatten() for value in named.values() if value.grad is not None]).norm())
        )
        update()
        losses.append(float(loss.detach()))
    return losses, norms, {name: value.detach() for name, value in named.items()}


def plain_optimizer(named: Mapping[str, Tensor], settings: OptimizerConfig) -> Callable[[], None]:
    """torch's AdamW; with Muon for all but the matrices of layers, which are updated as Keller Jordan's code does."""
    of_muon = {name: value for name, value in named.items() if role_of(name, MODEL).is_matrix_of_layer}
    if settings.name != "muon":
        of_muon = {}
    rest = [value for name, value in named.items() if name not in of_muon]
    matrices, vectors = ([value for value in rest if (value.dim() > 1) == many] for many in (True, False))
    adamw = torch.optim.AdamW(
        [{"params": matrices, "weight_decay": settings.weight_decay}, {"params": vectors, "weight_decay": 0.0}],
        lr=settings.learning_rate,
        betas=settings.betas,
        eps=settings.epsilon,
    )
    momentum = {name: torch.zeros_like(value) for name, value in of_muon.items()}

    @torch.no_grad()
    def update() -> None:
        adamw.step()
        for name, value in of_muon.items():
            assert value.grad is not None
            momentum[name] = settings.muon_momentum * momentum[name] + value.grad
            direction = orthogonal(value.grad + settings.muon_momentum * momentum[name])
            direction *= max(1.0, value.shape[0] / value.shape[1]) ** 0.5
            value.mul_(1 - settings.muon_learning_rate * settings.weight_decay)
            value.sub_(settings.muon_learning_rate * direction)

    return update


def left_out_of(lines: Sequence[dict[str, Any]]) -> list[list[range]]:
    return [[range(*bounds) for bounds in line.get(LEFT_OUT, [])] for line in lines]

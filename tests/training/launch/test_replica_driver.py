"""Replicas killed within and between steps: the training is that of a plain loop over the samples that were taken."""

import multiprocessing
import os
import random
import signal
import threading
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch

from gristmill.foundation.errors import InputError
from gristmill.foundation.progress import Reporter
from gristmill.training.checkpoint.checkpoint import load, step_folder
from gristmill.training.config.layout import LayoutConfig
from gristmill.training.launch.replica_driver import ReplicaDriver
from gristmill.training.metrics import METRICS_NAME, read_metrics
from gristmill.training.parallel.mesh import single_process
from gristmill.training.parallel.replicas import ReplicaProcess
from tests.support.kills import number_of_kills, seed_of
from tests.support.replica_runs import (
    MUON,
    RETURN_STEP,
    SETTINGS,
    Fault,
    driver_of,
    left_out_of,
    plain_training,
    start_server,
)
from tests.support.training_runs import BATCH, STEPS

ONE = {"data": 2, "replicate": 2}
SHARDED = {"data": 4, "replicate": 2}
TENSOR = {"data": 2, "replicate": 2, "tensor": 2}


@pytest.fixture(scope="module")
def context() -> Any:
    return start_server()


def largest_gap(folder: Path, left_out: Any, settings: dict[str, Any] = SETTINGS) -> float:
    """The largest difference of losses, gradient norms and final weights from the plain loop's."""
    losses, norms, weights = plain_training(left_out, settings)
    lines = read_metrics(folder / METRICS_NAME)
    assert [line["step"] for line in lines] == list(range(1, STEPS + 1))
    saved = {f"model.{name}": torch.empty_like(value) for name, value in weights.items()}
    load(step_folder(folder / "checkpoints", STEPS), saved, single_process())
    gaps = [abs(line["loss"] - loss) for line, loss in zip(lines, losses, strict=True)]
    gaps += [abs(line["grad_norm"] - norm) for line, norm in zip(lines, norms, strict=True)]
    gaps += [float((saved[f"model.{name}"] - value).abs().max()) for name, value in weights.items()]
    return max(gaps)


@pytest.mark.parametrize(
    ("layout", "fault", "first_without"),
    [
        (ONE, Fault(replica=1, rank=0, step=3, moment="gradients"), 3),
        (ONE, Fault(replica=0, rank=0, step=3, moment="files"), 4),  # replica 0 leads: replica 1 writes on
        pytest.param(ONE, Fault(replica=0, rank=0, step=4, moment="saving"), 5, marks=pytest.mark.slow),
        pytest.param(ONE, Fault(replica=0, rank=0, step=3, moment="logged"), 4, marks=pytest.mark.slow),
        (SHARDED, Fault(replica=0, rank=1, step=3, moment="gradients"), 3),
        (TENSOR, Fault(replica=1, rank=0, step=3, moment="summed"), 3),
    ],
    ids=lambda value: f"{value.moment}-of-{value.replica}" if isinstance(value, Fault) else None,
)
def test_a_lost_replica_is_left_out_and_comes_back(
    tmp_path: Path, context: Any, layout: dict[str, Any], fault: Fault, first_without: int
) -> None:
    folder, others = tmp_path / "run", set(multiprocessing.active_children())
    summary = driver_of(folder, layout, [fault], context).run()
    lines = read_metrics(folder / METRICS_NAME)
    left_out = left_out_of(lines)
    without = [line["step"] for line, samples in zip(lines, left_out, strict=True) if samples]
    # Where a process died after it sent its gradients, the others may have them all, and then they count.
    assert without[0] - first_without in ((0, 1) if fault.moment == "summed" else (0,))
    assert without == list(range(without[0], without[-1] + 1)) and without[-1] in (RETURN_STEP, RETURN_STEP + 1)
    share = BATCH // 2
    for step in without:  # its half of the batch, and nothing else
        first = (step - 1) * BATCH + fault.replica * share
        assert left_out[step - 1] == [range(first, first + share)] and lines[step - 1]["replicas"] == [
            1 - fault.replica
        ]
    assert largest_gap(folder, left_out) < 1e-12
    assert largest_gap(folder, [[] for _ in lines]) > 1e-4  # of another history
    assert summary["step"] == STEPS and not list((folder / "checkpoints").glob(".step-*"))
    assert summary["steps_without_replicas"] == len(without)
    assert set(multiprocessing.active_children()) == others


@pytest.mark.parametrize(
    ("layout", "fault"),
    [
        (SHARDED, Fault(replica=0, rank=1, step=3, moment="gradients")),
        pytest.param(ONE, Fault(replica=0, rank=0, step=3, moment="files"), marks=pytest.mark.slow),
        pytest.param(SHARDED, Fault(replica=1, rank=0, step=3, moment="summed"), marks=pytest.mark.slow),
        pytest.param(TENSOR, Fault(replica=1, rank=1, step=3, moment="gradients"), marks=pytest.mark.slow),
    ],
    ids=lambda value: f"{value.moment}-of-{value.replica}" if isinstance(value, Fault) else None,
)
def test_muon_loses_a_replica_and_gets_its_momentum_back(
    tmp_path: Path, context: Any, layout: dict[str, Any], fault: Fault
) -> None:
    """What comes back has the momentum that the others kept: without it the steps after its return would differ."""
    folder = tmp_path / "run"
    summary = driver_of(folder, layout, [fault], context, MUON).run()
    left_out = left_out_of(read_metrics(folder / METRICS_NAME))
    without = [step for step, samples in enumerate(left_out, 1) if samples]
    assert without and summary["steps_without_replicas"] == len(without) and without[-1] < STEPS - 3
    assert largest_gap(folder, left_out, MUON) < 1e-12
    assert largest_gap(folder, [[] for _ in left_out], MUON) > 1e-4  # of another history
    assert largest_gap(folder, left_out) > 1e-4  # of AdamW alone


def test_of_four_replicas_two_are_lost(tmp_path: Path, context: Any) -> None:
    faults = [Fault(0, 0, step=3, moment="summed"), Fault(2, 0, step=5, moment="gradients")]
    driver_of(tmp_path / "run", {"data": 4, "replicate": 4}, faults, context).run()
    lines = read_metrics(tmp_path / "run" / METRICS_NAME)
    assert lines[3]["replicas"] == [1, 2, 3] and lines[4]["replicas"] == [1, 3] and "replicas" not in lines[-1]
    assert largest_gap(tmp_path / "run", left_out_of(lines)) < 1e-12


def test_when_all_are_lost_the_run_goes_on_from_its_last_checkpoint(tmp_path: Path, context: Any) -> None:
    faults = [Fault(replica, 0, step=RETURN_STEP, moment="gradients") for replica in range(2)]
    with pytest.raises(InputError, match="all replicas that had the state of the training were lost; run the same"):
        driver_of(tmp_path / "run", ONE, faults, context).run()
    summary = driver_of(tmp_path / "run", ONE, [], context).run()
    lines = read_metrics(tmp_path / "run" / METRICS_NAME)
    assert largest_gap(tmp_path / "run", [[] for _ in lines]) < 1e-12 and "steps_without_replicas" not in summary


def fail(place: ReplicaProcess) -> dict[str, Any]:
    if place.replica == 1:
        raise InputError("the disk is full")
    time.sleep(60)
    return {}


def die(place: ReplicaProcess) -> dict[str, Any]:
    os.kill(os.getpid(), signal.SIGKILL)
    return {}


def test_an_error_ends_the_run_and_a_replica_that_never_starts_is_given_up(context: Any) -> None:
    layout, others = LayoutConfig(lost_replicas="continue", **ONE), set(multiprocessing.active_children())
    with pytest.raises(InputError, match="the disk is full"):
        ReplicaDriver(layout, fail, (), Reporter.silent(), context).run()
    with pytest.raises(InputError, match="no replica could be started in 3 attempts"):
        ReplicaDriver(layout, die, (), Reporter.silent(), context).run()
    assert set(multiprocessing.active_children()) == others


@pytest.mark.slow
@pytest.mark.parametrize(
    ("layout", "settings"),
    [(ONE, SETTINGS), (SHARDED, SETTINGS), ({"data": 4, "replicate": 4}, SETTINGS), (SHARDED, MUON)],
    ids=["one", "sharded", "four", "muon"],
)
def test_killed_at_random_moments(
    tmp_path: Path, context: Any, layout: dict[str, Any], settings: dict[str, Any]
) -> None:
    rng, lost_steps = random.Random(seed_of(39)), 0
    for number in range(number_of_kills(10)):
        folder = tmp_path / str(number)
        for kills in (3, 2, 1, 0):  # again where all replicas were lost
            driver = driver_of(folder, layout, [], context, settings)
            killer = threading.Thread(target=kill_now_and_then, args=(driver, kills, rng))
            killer.start()
            try:
                driver.run()
                break
            except InputError as error:
                assert "were lost" in str(error) or "could be started" in str(error)
            finally:
                killer.join()
        left_out = left_out_of(read_metrics(folder / METRICS_NAME))
        lost_steps += sum(bool(samples) for samples in left_out)
        assert largest_gap(folder, left_out, settings) < 1e-12
    print(f"{lost_steps} steps without a replica")
    assert lost_steps > 0


def kill_now_and_then(driver: ReplicaDriver, kills: int, rng: random.Random) -> None:
    """Kills so many processes, each some time after the replicas have the state."""
    while driver.decision is None:
        time.sleep(0.01)
    for _ in range(kills):
        time.sleep(rng.uniform(0, 1.5))
        running = [process.process for replica in driver.replicas for process in list(replica.processes)]
        with suppress(ProcessLookupError, IndexError):
            os.kill(rng.choice([process.pid for process in running if process.is_alive()]), signal.SIGKILL)

"""Starts torch.distributed for a run, and checks that all ranks have the same recipe."""

import ctypes
import faulthandler
import math
import os
import platform
import signal
import statistics
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from types import FrameType
from typing import Any

import torch
import torch.distributed as dist

from gristmill.foundation.errors import InputError, RecipeError
from gristmill.foundation.progress import Terminated
from gristmill.foundation.startup import host_bytes, torchrun_variable, usable_cores
from gristmill.training.config.layout import LayoutConfig
from gristmill.training.config.model import ModelConfig
from gristmill.training.config.train import GuardConfig
from gristmill.training.parallel.mesh import Mesh, build_mesh, silence_redistribution, single_process

CPU = torch.device("cpu")
CONNECTION_ATTEMPTS = 5
SECONDS_BETWEEN_ATTEMPTS = 1.0  # times the number of the attempt: 10 s in all


@dataclass(frozen=True)
class RankInfo:
    """Rank, local rank, world size and restart count, read from torchrun's environment variables."""

    rank: int = 0
    local_rank: int = 0
    world_size: int = 1
    restarts: int = 0
    local_world_size: int = 1

    @classmethod
    def from_environment(cls) -> "RankInfo":
        return cls(*(torchrun_variable(name, default) for name, default in _TORCHRUN))


STDERR = 2  # the descriptor, which takes bytes while print or rich holds its lock

_TORCHRUN = (
    ("RANK", 0),
    ("LOCAL_RANK", 0),
    ("WORLD_SIZE", 1),
    ("TORCHELASTIC_RESTART_COUNT", 0),
    ("LOCAL_WORLD_SIZE", 1),
)


@contextmanager
def init_distributed(
    rank_info: RankInfo,
    layout: LayoutConfig,
    model: ModelConfig,
    recipe_digest: str,
    timeout_seconds: float,
) -> Iterator[Mesh]:
    """Yields the mesh of all processes; makes no process group if there is only one. Raises RecipeError if the ranks
    have different recipes."""
    device = local_device(rank_info)
    if rank_info.world_size == 1:
        yield single_process(device)
        return
    backend = backend_of(device, layout)
    store, _, _ = next(dist.rendezvous("env://"))
    store = dist.PrefixStore(
        f"start-{rank_info.restarts}", store
    )  # what the processes before a restart left is not read
    patience = timedelta(seconds=2 * timeout_seconds)  # the watchdog, which can name the rank_info, comes first
    connect(backend, store, layout.position_of(rank_info.rank), rank_info.world_size, patience, device)
    silence_redistribution()
    try:
        with first_failure_named(rank_info.rank, store):
            check_same_recipe(recipe_digest, rank_info)
            yield build_mesh(layout, model.num_kv_heads, device, model.has_experts)
    finally:
        dist.destroy_process_group()


def backend_of(device: torch.device, layout: LayoutConfig) -> str:
    """gloo beside NCCL only where the host computes updates: each group would have a gloo group too, in which every
    pair of ranks connects."""
    if device.type != "cuda":
        return "gloo"
    return "cpu:gloo,cuda:nccl" if layout.offload.active else "nccl"


def connect(
    backend: str, store: dist.Store, rank: int, world_size: int, patience: timedelta, device: torch.device = CPU
) -> None:
    """Initializes the process group on all ranks; `rank` is this one's position in the mesh. Raises InputError after
    CONNECTION_ATTEMPTS, or when a rank does not answer within the store's time-out (five minutes).

    gloo gives up when one connection is refused (`connectFullMesh failed`); each attempt is made by all ranks together,
    under names of its own in the store, and counts only if all of them connected."""
    for attempt in range(1, CONNECTION_ATTEMPTS + 1):
        names = dist.PrefixStore(f"attempt-{attempt}", store)
        error = _try_to_connect(backend, dist.PrefixStore("group", names), rank, world_size, patience, device)
        names.set(f"rank-{rank}", "" if error is None else f"rank {rank}: {error}")
        failures = [failure for failure in _outcomes(names, world_size) if failure]
        if not failures:
            return
        if error is None:
            dist.destroy_process_group()
        time.sleep(SECONDS_BETWEEN_ATTEMPTS * attempt)
    raise InputError(
        f"the processes could not connect in {CONNECTION_ATTEMPTS} attempts; {failures[0]}; check that the hosts reach "
        "each other on every port (GLOO_SOCKET_IFNAME or NCCL_SOCKET_IFNAME names the interface), then run the same "
        "command again"
    )


def _outcomes(names: dist.Store, world_size: int) -> list[str]:
    """The error of each rank in an attempt; empty where it connected."""
    try:
        return [names.get(f"rank-{rank}").decode() for rank in range(world_size)]
    except RuntimeError as error:
        raise InputError(
            f"another rank did not report whether it connected ({error}); start all processes again"
        ) from error


def _try_to_connect(
    backend: str, store: dist.Store, rank: int, world_size: int, patience: timedelta, device: torch.device
) -> str | None:
    """None, or the first line of the error. A GPU is named, so that NCCL connects now, not in the first collective, and
    the mesh's groups are split from this one."""
    device_id = device if device.type == "cuda" else None
    try:
        dist.init_process_group(
            backend, store=store, rank=rank, world_size=world_size, timeout=patience, device_id=device_id
        )
    except RuntimeError as error:  # of which torch's DistError is one
        return str(error).split("\n", 1)[0][:300]
    return None


def local_device(rank_info: RankInfo) -> torch.device:
    if not torch.cuda.is_available():
        return torch.device("cpu")
    device = torch.device("cuda", rank_info.local_rank)
    torch.cuda.set_device(device)
    return device


def device_of_task(number: int) -> torch.device:
    """For one of several independent tasks of this machine: its GPUs in turn, or the CPU."""
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    return local_device(RankInfo(local_rank=number % count if count else 0))


def device_bytes(rank_info: RankInfo) -> int:
    """Bytes of memory of this process's GPU, or of the machine without GPUs."""
    if not torch.cuda.is_available():
        return host_bytes()
    return torch.cuda.get_device_properties(rank_info.local_rank).total_memory


def check_same_recipe(digest: str, rank_info: RankInfo) -> None:
    digests: list[str] = [""] * rank_info.world_size
    dist.all_gather_object(digests, digest)
    others = [rank for rank, other in enumerate(digests) if other != digests[0]]
    if others:
        raise RecipeError(
            f"ranks {others} were given another recipe than rank 0 (digests {digests[others[0]][:8]} and "
            f"{digests[0][:8]}); start all processes with the same recipe, overrides and data"
        )


# Threads of what the host computes beside a GPU. torchrun sets OMP_NUM_THREADS=1 where it starts several processes.


def host_threads(local_ranks: int) -> int:
    """Threads of one process on the host: OMP_NUM_THREADS where it is above 1, else an equal share of the cores that
    this process may use. 96 cores, 8 ranks -> 12; never below 1."""
    wanted = torchrun_variable("OMP_NUM_THREADS", 0)
    return wanted if wanted > 1 else max(1, usable_cores() // local_ranks)


# The C library's allocator, set for training on a CPU.

# mallopt(3) of glibc: how many blocks may be mapped one by one, and how much free memory is kept at the heap's end.
M_MMAP_MAX, M_MMAP_THRESHOLD, M_TRIM_THRESHOLD = -4, -3, -1
UNLIMITED = 2**31 - 1


def keep_freed_memory() -> bool:
    """After the call this process keeps the memory of freed tensors for the next ones; whether that could be set.

    glibc returns every freed block of more than 32 MB to the system, which fills its pages with zeros again when the
    next step allocates it: a sixth of a step with 50,304 tokens, a quarter of one of a mixture of 64 experts
    (`benchmarks/moe.py`). The peak memory stays within some per cent, since it is needed again in each step. Does
    nothing where the C library is not glibc."""
    if platform.libc_ver()[0] != "glibc":
        return False
    libc = ctypes.CDLL("libc.so.6")
    return bool(libc.mallopt(M_MMAP_MAX, 0)) and bool(libc.mallopt(M_TRIM_THRESHOLD, UNLIMITED))


def return_freed_memory() -> bool:
    """After the call the memory of freed tensors goes back to the system at once; whether that could be set.

    glibc else keeps freed blocks of up to 32 MB, between which others come to lie: a process that holds two layers'
    weights at a time (`layout.offload.parameters: disk`) had four times their size after a step
    (`tests/training/test_streamed_memory.py`). Blocks from 64 KiB on are mapped one by one instead."""
    if platform.libc_ver()[0] != "glibc":
        return False
    return bool(ctypes.CDLL("libc.so.6").mallopt(M_MMAP_THRESHOLD, 64 << 10))


# Skips the update of a step whose loss or gradient norm is not finite, or is an outlier among recent steps.

MIN_HISTORY = 16  # steps needed for a meaningful standard deviation


class Guard:
    """Decides from values that are equal on all processes, so all take the same decision. Saved in the checkpoint."""

    def __init__(self, config: GuardConfig):
        self.config = config
        self.losses: list[float] = []
        self.norms: list[float] = []
        self.skipped: list[int] = []
        self.consecutive_skips = 0

    def skip_reason(self, step: int, loss: float, norm: float) -> str | None:
        """Why the update of this step is skipped, or None. Raises InputError after max_consecutive_skips in a row."""
        reason = self._reason(loss, norm)
        if reason is None:
            self.consecutive_skips = 0
            if self.config.sigmas is not None:
                self.losses = [*self.losses, loss][-self.config.window :]
                self.norms = [*self.norms, norm][-self.config.window :]
            return None
        self.skipped.append(step)
        self.consecutive_skips += 1
        if self.consecutive_skips > self.config.max_consecutive_skips:
            raise InputError(
                f"step {step}: {reason}; {self.consecutive_skips} steps in a row were skipped "
                "(train.guard.max_consecutive_skips), so training has diverged: lower train.optimizer.learning_rate or "
                "warm up longer"
            )
        return reason

    def state(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in ("losses", "norms", "skipped", "consecutive_skips")}

    def restore(self, state: Mapping[str, Any]) -> None:
        for name, value in state.items():
            setattr(self, name, value)

    def _reason(self, loss: float, norm: float) -> str | None:
        if not (math.isfinite(loss) and math.isfinite(norm)):
            return f"loss {loss}, gradient norm {norm}: not finite"
        if self.config.sigmas is None:
            return None
        for name, value, past in (("loss", loss, self.losses), ("gradient norm", norm, self.norms)):
            if _is_outlier(value, past, self.config.sigmas):
                return (
                    f"{name} {value:.4g} is {self.config.sigmas} standard deviations above the mean of the last "
                    f"{len(past)} steps"
                )
        return None


def _is_outlier(value: float, past: Sequence[float], sigmas: float) -> bool:
    if len(past) < MIN_HISTORY:
        return False
    return value > statistics.fmean(past) + sigmas * statistics.pstdev(past)


# Reports hangs and failures: rank, step, phase, stack traces, and the first error of all ranks.

HANGING = 75  # exit code: temporary failure (BSD's sysexits.h), so that torchrun starts the run again
FAILURE = "gristmill.failure"
BRIEF = 500


def end_process() -> None:
    os._exit(HANGING)  # the thread that hangs cannot be asked to leave


class Watchdog:
    """A thread that ends the process after `timeout_seconds` without progress, and prints where it hangs.

    The process group's own time-out must be longer, so that this error comes first."""

    def __init__(self, mesh: Mesh, timeout_seconds: float, end: Callable[[], None] = end_process):
        self.place = (
            f"rank {mesh.world.rank} (pipeline {mesh.pipeline.rank}, data {mesh.data.rank}, "
            f"context {mesh.context.rank}, tensor {mesh.tensor.rank})"
        )
        self.timeout_seconds, self._end = timeout_seconds, end
        self._where, self._since = "starting", time.monotonic()
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="watchdog", daemon=True)

    def __enter__(self) -> "Watchdog":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._closed.set()
        self._thread.join()

    def at(self, where: str) -> None:
        """Records progress: the process begins the phase `where`."""
        self._where, self._since = where, time.monotonic()

    def progress(self) -> None:
        """Records progress within the phase."""
        self._since = time.monotonic()

    def _watch(self) -> None:
        while not self._closed.wait(min(1.0, self.timeout_seconds / 4)):
            silent = time.monotonic() - self._since
            if silent > self.timeout_seconds:
                print(
                    f"{self.place} hangs: {self._where}, for {silent:.0f} s (train.monitoring.timeout_seconds: "
                    f"{self.timeout_seconds:g}). Its threads:",
                    file=sys.stderr,
                    flush=True,
                )
                faulthandler.dump_traceback(file=STDERR)
                self._end()
                return


@contextmanager
def first_failure_named(rank: int, store: dist.Store) -> Iterator[None]:
    """When one process fails, the others fail as well, at the broken connection. They then raise InputError with the
    cause that the first one left in the store, instead of the connection's error."""
    try:
        yield
    except BaseException as error:
        own = f"rank {rank} failed: {type(error).__name__}: {error}"[:BRIEF]
        first = store.compare_set(FAILURE, "", own).decode()
        if first == own or isinstance(error, InputError | KeyboardInterrupt):
            raise
        raise InputError(f"rank {rank} stopped, because {first}") from error


# Ctrl-C and SIGTERM during training: the current step is finished and saved, then the run ends.


class StopRequest:
    """signal: the signal that arrived, or None. A second Ctrl-C raises KeyboardInterrupt at once."""

    def __init__(self) -> None:
        self.signal: signal.Signals | None = None

    def receive(self, number: int, _: FrameType | None) -> None:
        if self.signal is not None and number == signal.SIGINT:
            raise KeyboardInterrupt("stopped at once; the same command goes on from the last checkpoint")
        self.signal = signal.Signals(number)
        os.write(STDERR, b"\ntrain: stopping after this step, then saving; Ctrl-C stops at once\n")

    def error(self, step: int, saved: Path) -> BaseException:
        """Error that ends the run: KeyboardInterrupt after Ctrl-C (exit code 130), Terminated after SIGTERM (143), else
        InputError (1): the recipe's time limit, or a signal to another rank alone."""
        message = (
            f"stopped after step {step} as requested, and saved; run the same command to go on. Kept: {saved} and the "
            f"metrics of {step} steps"
        )
        endings: dict[signal.Signals | None, type[BaseException]] = {
            signal.SIGINT: KeyboardInterrupt,
            signal.SIGTERM: Terminated,
        }
        return endings.get(self.signal, InputError)(message)


@contextmanager
def stop_requests() -> Iterator[StopRequest]:
    """Receives SIGTERM and SIGINT in the block, where this is the main thread (signals reach no other)."""
    request = StopRequest()
    if threading.current_thread() is not threading.main_thread():
        yield request
        return
    before = {number: signal.signal(number, request.receive) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield request
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)

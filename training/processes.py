"""Starts torch.distributed for a run, and checks that all ranks have the same recipe."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist

from gristmill.foundation.errors import InputError, RecipeError
from gristmill.foundation.torchrun_variables import torchrun_variable
from gristmill.training.layout_config import LayoutConfig
from gristmill.training.memory_check import host_bytes
from gristmill.training.model_config import ModelConfig
from gristmill.training.parallel.mesh import Mesh, build_mesh, silence_redistribution, single_process
from gristmill.training.watchdog import first_failure_named

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
    backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
    store, _, _ = next(dist.rendezvous("env://"))
    store = dist.PrefixStore(
        f"start-{rank_info.restarts}", store
    )  # what the processes before a restart left is not read
    patience = timedelta(seconds=2 * timeout_seconds)  # the watchdog, which can name the rank_info, comes first
    connect(backend, store, layout.position_of(rank_info.rank), rank_info.world_size, patience)
    silence_redistribution()
    try:
        with first_failure_named(rank_info.rank, store):
            check_same_recipe(recipe_digest, rank_info)
            yield build_mesh(layout, model.num_kv_heads, device, model.has_experts)
    finally:
        dist.destroy_process_group()


def connect(backend: str, store: dist.Store, rank: int, world_size: int, patience: timedelta) -> None:
    """Initialises the process group on all ranks; `rank` is this one's position in the mesh. Raises InputError after
    CONNECTION_ATTEMPTS, or when a rank does not answer within the store's time-out (five minutes).

    gloo gives up when one connection is refused (`connectFullMesh failed`); each attempt is made by all ranks together,
    under names of its own in the store, and counts only if all of them connected."""
    for attempt in range(1, CONNECTION_ATTEMPTS + 1):
        names = dist.PrefixStore(f"attempt-{attempt}", store)
        error = _try_to_connect(backend, dist.PrefixStore("group", names), rank, world_size, patience)
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
        return [names.get(f"rank-{each}").decode() for each in range(world_size)]
    except RuntimeError as error:
        raise InputError(
            f"another rank did not report whether it connected ({error}); start all processes again"
        ) from error


def _try_to_connect(backend: str, store: dist.Store, rank: int, world_size: int, patience: timedelta) -> str | None:
    """None, or the first line of the error."""
    try:
        dist.init_process_group(backend, store=store, rank=rank, world_size=world_size, timeout=patience)
    except RuntimeError as error:  # of which torch's DistError is one
        return str(error).split("\n", 1)[0][:300]
    return None


def local_device(rank_info: RankInfo) -> torch.device:
    if not torch.cuda.is_available():
        return torch.device("cpu")
    device = torch.device("cuda", rank_info.local_rank)
    torch.cuda.set_device(device)
    return device


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

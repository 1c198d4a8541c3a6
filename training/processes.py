"""The processes of a run: each joins the group, and all must have been given the same recipe."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist

from gristmill.data_pipeline.errors import RecipeError
from gristmill.training.config import LayoutConfig, ModelConfig
from gristmill.training.parallel.mesh import Mesh, build_mesh, silence_redistribution, single_process
from gristmill.training.watchdog import first_failure_named


@dataclass(frozen=True)
class Place:
    """Which process this is. Read from the environment at the edge, where torchrun writes it."""

    rank: int = 0
    local_rank: int = 0
    world_size: int = 1

    @classmethod
    def from_environment(cls) -> "Place":
        return cls(*(int(os.environ.get(name, default)) for name, default in _TORCHRUN))


_TORCHRUN = (("RANK", "0"), ("LOCAL_RANK", "0"), ("WORLD_SIZE", "1"))


@contextmanager
def joined(
    place: Place,
    layout: LayoutConfig,
    model: ModelConfig,
    recipe_digest: str,
    timeout_seconds: float,
) -> Iterator[Mesh]:
    """The mesh of all processes; without a process group if this is the only one. Raises RecipeError if the processes
    were given different recipes."""
    device = own_device(place)
    if place.world_size == 1:
        yield single_process(device)
        return
    backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
    store, _, _ = next(dist.rendezvous("env://"))
    patience = timedelta(seconds=2 * timeout_seconds)  # the watchdog, which can name the place, comes first
    dist.init_process_group(
        backend,
        store=dist.PrefixStore("group", store),
        rank=layout.position_of(place.rank),
        world_size=place.world_size,
        timeout=patience,
    )
    silence_redistribution()
    try:
        with first_failure_named(place.rank, store):
            check_same_recipe(recipe_digest, place)
            yield build_mesh(layout, model.num_kv_heads, device)
    finally:
        dist.destroy_process_group()


def own_device(place: Place) -> torch.device:
    if not torch.cuda.is_available():
        return torch.device("cpu")
    device = torch.device("cuda", place.local_rank)
    torch.cuda.set_device(device)
    return device


def check_same_recipe(digest: str, place: Place) -> None:
    digests: list[str] = [""] * place.world_size
    dist.all_gather_object(digests, digest)
    others = [rank for rank, other in enumerate(digests) if other != digests[0]]
    if others:
        raise RecipeError(
            f"ranks {others} were given another recipe than rank 0 (digests {digests[others[0]][:8]} and "
            f"{digests[0][:8]}); start all processes with the same recipe, overrides and data"
        )

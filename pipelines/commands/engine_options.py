"""The options that choose where the work of a command runs; they do not affect its output."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import typer

from gristmill.foundation.deferred_module import DeferredModule
from gristmill.foundation.engine.engine import Engine
from gristmill.foundation.engine.local import LocalEngine
from gristmill.foundation.errors import RecipeError
from gristmill.foundation.progress import Reporter
from gristmill.pipelines.remote_work import RemoteWork

slurm_engine = DeferredModule("gristmill.foundation.engine.slurm")  # for --engine slurm alone
ray_engine = DeferredModule("gristmill.foundation.engine.ray")  # for --engine ray alone

WorkersOption = Annotated[
    int,
    typer.Option(
        min=1, max=1024, help="Worker processes (slurm: array elements) at once; they do not affect the output."
    ),
]
EngineOption = Annotated[
    Literal["local", "ray", "slurm"],
    typer.Option(
        help="Where curation and indexing run: on this machine, on a Ray cluster or as Slurm array jobs; the bytes are "
        "the same."
    ),
]
AddressOption = Annotated[
    str | None, typer.Option(metavar="HOST:PORT", help="The Ray cluster (default: auto, the one of this machine).")
]


@dataclass(frozen=True)
class EngineOptions:
    """Options of a command that runs tasks."""

    workers: WorkersOption = 2
    engine: EngineOption = "local"
    address: AddressOption = None

    def open(self, reporter: Reporter, work_folder: Path | None = None) -> Engine:
        """The engine. Raises RecipeError or InputError if a cluster cannot be used; see RayEngine."""
        folder = work_folder or Path("work")
        remote = RemoteWork.behind(folder) if self.engine != "local" else None
        store = "" if remote is None else remote.store.address
        if self.engine == "ray":
            return ray_engine.RayEngine(self.address or "auto", reporter, folder, store=store)
        if self.engine == "slurm" and self.address is None:
            return slurm_engine.SlurmEngine(self.workers, reporter, folder, store=store)
        if self.address is not None:
            raise RecipeError(f"--address {self.address} belongs to --engine ray; add that, or leave the address out")
        return LocalEngine(self.workers, reporter)

"""What is to be planned: a model, a machine, a batch, and the choices that are made already."""

from dataclasses import dataclass, field

from gristmill.data_pipeline.errors import RecipeError
from gristmill.training.config import Recompute, Schedule
from gristmill.training.planner.hardware import Hardware
from gristmill.training.planner.rates import FITTED, Sustained
from gristmill.training.planner.shape import Shape
from gristmill.training.planner.software import GRISTMILL, Software


@dataclass(frozen=True)
class Pins:
    """Choices that are made already; None leaves one open. wide: try the settings that seldom win, too.

    context: while the engine has no context axis, sizes above 1 are forecast only where they are named here."""

    tensor: int | None = None
    pipeline: int | None = None
    replicate: int | None = None
    shard: int | None = None
    context: int | None = None
    virtual: int | None = None
    micro_batch: int | None = None
    schedule: Schedule | None = None
    recompute: Recompute | None = None
    sequence_parallel: bool | None = None
    wide: bool = False


@dataclass(frozen=True)
class Job:
    """What is to be planned. samples: of one step; tokens: of the whole training, for days and cost."""

    shape: Shape
    hardware: Hardware
    gpus: int
    samples: int
    tokens: int | None = None
    software: Software = GRISTMILL
    sustained: Sustained = FITTED
    float8: bool = False
    offload: bool = False
    pins: Pins = field(default_factory=Pins)


def check(job: Job) -> None:
    """Raises RecipeError where a job cannot be planned at all."""
    if job.gpus < 1:
        raise RecipeError(f"--gpus {job.gpus}: at least one GPU is needed")
    if job.samples < 1:
        raise RecipeError(
            f"a batch of {job.samples} samples; --batch-tokens must be at least the context, {job.shape.context}"
        )
    limit = job.hardware.gpus
    if limit is not None and job.gpus > limit:
        raise RecipeError(f"--gpus {job.gpus}, but the clusters of {job.hardware.name} have {limit} in all")

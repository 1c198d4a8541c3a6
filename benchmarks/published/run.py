"""One published training run to compare a forecast with."""

from dataclasses import dataclass

from gristmill.training.planner.costs.model_shape import ModelShape
from gristmill.training.planner.layout import Layout


@dataclass(frozen=True)
class PublishedRun:
    """Model, layout, samples per step, and the TFLOP/s per GPU that the source reports.

    recompute_counted: the reported figure includes the FLOPs of recomputation, as in arXiv 2104.04473."""

    name: str
    shape: ModelShape
    layout: Layout
    samples: int
    tflops: float
    source: str
    hardware: str = "a100-80g"
    framework: str = "megatron-2021"
    recompute_counted: bool = True
    float8: bool = False

"""Published runs that the constants are not fitted to, with the mean and maximum error allowed for each table.

The tolerances are the measured errors rounded up, so that a change that makes a forecast worse fails a test.
"""

from typing import NamedTuple

from published.experts import EXPERTS
from published.h100 import H100
from published.megatron import MEGATRON
from published.run import PublishedRun
from published.torch_fsdp import TORCH


class Tolerance(NamedTuple):
    """Bounds of |forecast / published - 1| over the runs of a table."""

    mean: float
    max: float


HELD_OUT: dict[str, tuple[PublishedRun, ...]] = {**MEGATRON, **TORCH, **H100, **EXPERTS}
TOLERANCES = {
    "Megatron-LM's tables of 2020, 1 to 1,024 A100 of 40 GB": Tolerance(0.04, 0.08),
    "table 1 of 2021, the other rows": Tolerance(0.03, 0.06),
    "table 2 of 2021, strong scaling": Tolerance(0.03, 0.05),
    "sequence parallelism and selective recomputation, 2022": Tolerance(0.05, 0.09),
    "MT-NLG, 2022": Tolerance(0.08, 0.10),
    "llm-foundry, 8 to 64 A100": Tolerance(0.07, 0.10),
    "torchtitan and fms-fsdp, 64 and 128 A100": Tolerance(0.08, 0.14),
    "torchtitan, 8 to 256 H100 at 500 W": Tolerance(0.06, 0.12),
    "llm-foundry, 8 to 64 H100": Tolerance(0.13, 0.23),  # torch of early 2023, new to Hopper
    "Megatron-Core and Llama 3, 96 to 16,384 H100": Tolerance(0.08, 0.14),
    "NeMo in float8, 8 to 1,024 H100": Tolerance(0.06, 0.11),
    "small models, second-hand, 8 H100": Tolerance(0.10, 0.15),
    "mixtures of experts, 16 to 1,024 H100": Tolerance(0.12, 0.20),
}

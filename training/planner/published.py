"""Published runs the planner is held against. Each row says where it comes from.

The layouts of table 1, its micro-batches and stages included, are those of Megatron-LM's examples/sc21/run_table_1.sh.
"""

from dataclasses import dataclass

from gristmill.training.planner.layout import Layout
from gristmill.training.planner.shape import Shape, gpt

TABLE_1 = "arXiv 2104.04473, table 1; layouts from Megatron-LM examples/sc21/run_table_1.sh"


@dataclass(frozen=True)
class Row:
    """A run: shape, layout, samples a step, and the TFLOP/s on each GPU that were reported.

    recompute_counted: whether recomputation counts as work in that figure, as the paper of 2021 has it."""

    name: str
    shape: Shape
    layout: Layout
    samples: int
    tflops: float
    source: str
    hardware: str = "a100-80g"
    software: str = "megatron-2021"
    recompute_counted: bool = True
    float8: bool = False


def _table_1(
    name: str,
    size: tuple[int, int, int],
    tensor: int,
    pipeline: int,
    gpus: int,
    samples: int,
    micro_batch: int,
    virtual: int,
    tflops: float,
) -> Row:
    layout = Layout(
        tensor=tensor,
        pipeline=pipeline,
        replicate=gpus // (tensor * pipeline),
        virtual=virtual,
        micro_batch=micro_batch,
        schedule="interleaved" if virtual > 1 else "1f1b",
        recompute="full",
    )
    return Row(name, gpt(*size), layout, samples, tflops, TABLE_1)


# The rows the constants are fitted to, and no others.
CALIBRATION = (
    _table_1("1.7B", (24, 2304, 24), 1, 1, 32, 512, 16, 1, 137.0),
    _table_1("7.5B", (36, 4096, 32), 4, 1, 128, 512, 16, 1, 142.0),
    _table_1("39.1B", (48, 8192, 64), 8, 2, 512, 1536, 4, 1, 138.0),
    _table_1("145.6B", (80, 12288, 96), 8, 8, 1536, 2304, 2, 2, 148.0),
    _table_1("529.6B", (105, 20480, 128), 8, 35, 2520, 2520, 1, 3, 163.0),
)

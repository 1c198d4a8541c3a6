"""Rates that training reaches on a machine: three constants fitted to published runs, and the time of a matmul.

A matmul is a roofline with tile quantization (NVIDIA, Matrix Multiplication Background User's Guide): tiles of the
result are distributed over the multiprocessors, a partly filled tile or wave costs as much as a full one, small tiles
reuse less of what they load, and a small K does not amortize the start and end of a tile. The fastest tile is used, as
in the library.
"""

from math import ceil

from pydantic import Field

from gristmill.foundation.config import Config
from gristmill.training.planner.hardware import Hardware, Link

# Tiles that cuBLAS and CUTLASS ship for tensor cores, rows x columns of the result.
TILES = ((256, 128), (128, 256), (128, 128), (256, 64), (64, 256), (128, 64), (64, 128), (64, 64))
# Share of the sum's length that one multiprocessor takes when a matmul has too few tiles to go round (split K).
SPLITS = (1, 2, 4)
# The K of the shape at which the table of achievable matmul rates was measured on the A100: 1024 x 10240 x 5120.
MEASURED_DEPTH = 5120


class Sustained(Config):
    """The three fitted constants: shares of the profile's best rates that long training runs reach.

    matmul: power and clocks under load, launches, imperfect kernels; memory: element-wise kernels against a plain copy;
    network: collectives among compute against nccl-tests. Fitted to five published runs
    (benchmarks/published/fit.py)."""

    matmul: float = Field(1.0, gt=0, le=1.2)
    memory: float = Field(1.0, gt=0, le=1.2)
    network: float = Field(1.0, gt=0, le=1.2)


# python benchmarks/planner.py --fit: the five runs of benchmarks/published/megatron.py, mean error 0.8 % (2026-11-20).
FITTED = Sustained(matmul=0.875, memory=0.763, network=1.0)
# Of short passes in float32, whose numbers take twice the bytes that are counted for 16 bits.
FLOAT32 = Sustained(memory=0.5)


class Rates:
    """Seconds of matmuls, memory traffic and transfers on one kind of hardware. Times of matmuls are cached."""

    def __init__(self, hardware: Hardware, sustained: Sustained, float8: bool = False) -> None:
        device = hardware.device
        self.hardware, self.sustained, self.float8 = hardware, sustained, float8
        self.sustained_share = sustained.matmul * device.sustained
        self.peak = device.matmul_tflops * 1e12
        best_tile = min(1 / rows + 1 / columns for rows, columns in TILES)
        best = (1 + device.tile_penalty * best_tile) * (1 + device.depth_penalty / MEASURED_DEPTH)
        self.matmul_rate = self.peak * min(1.0, device.matmul_efficiency * best) * self.sustained_share
        self.memory_rate = device.memory_tb_per_second * 1e12 * device.memory_efficiency * sustained.memory
        self.kernel_seconds = device.kernel_microseconds * 1e-6
        self.layer_seconds = device.layer_microseconds * 1e-6
        self.tensor_layer_seconds = device.tensor_layer_microseconds * 1e-6
        self.data_layer_seconds = device.data_layer_microseconds * 1e-6
        self.tile_costs = [(a, b, 1 + device.tile_penalty * (1 / a + 1 / b)) for a, b in TILES]
        self.depth_penalty, self.multiprocessors = device.depth_penalty, device.multiprocessors
        self._timed: dict[tuple[int, int, int, int], float] = {}

    def matmul(self, rows: int, depth: int, columns: int, batch: int = 1) -> float:
        """Seconds of `batch` products [rows, depth] @ [depth, columns] in 16 bits with sums in 32."""
        key = (rows, depth, columns, batch)
        if key not in self._timed:
            compute = self._tiles(rows, depth, columns, batch) / self.matmul_rate
            traffic = 2 * batch * (rows * depth + depth * columns + rows * columns) / self.memory_rate
            self._timed[key] = max(compute, traffic) + self.kernel_seconds
        return self._timed[key]

    def linear(self, rows: int, depth: int, columns: int, cast_bytes: float = 3) -> float:
        """Seconds of a linear layer's product; in 8 bits if float8 is on and the GPU has it. cast_bytes:
        traffic of casting one input number to 8 bits, scales included. At a power limit, half the energy per product
        allows twice the products."""
        seconds, device = self.matmul(rows, depth, columns), self.hardware.device
        if not self.float8 or not device.float8_tflops:
            return seconds
        gain = device.float8_tflops / device.matmul_tflops
        return seconds / gain + self.memory(cast_bytes * rows * depth)

    def _tiles(self, rows: int, depth: int, columns: int, batch: int) -> float:
        """FLOPs of whole waves of whole tiles, for the best tile and split."""
        return min(
            ceil(ceil(rows / a) * ceil(columns / b) * batch * split / self.multiprocessors)
            * self.multiprocessors * 2 * a * b * (depth / split + self.depth_penalty) * cost
            for a, b, cost in self.tile_costs
            for split in SPLITS
        )  # fmt: skip

    def memory(self, num_bytes: float) -> float:
        """Seconds of element-wise work that reads and writes so many bytes."""
        return num_bytes / self.memory_rate

    def flash(self, flops: float, keys: int, backward: bool = False, second: bool = False) -> float:
        """Seconds of fused attention over samples of so many keys, at its own share of the peak. second:
        FlashAttention-2, where a newer one is faster."""
        device = self.hardware.device
        share = device.flash_backward if backward else device.flash_forward
        if second:
            share = (device.flash2_backward if backward else device.flash2_forward) or share
        flops *= 1 + device.flash_extra_keys / keys
        return flops / (self.peak * share * self.sustained_share) + self.kernel_seconds if flops else 0.0

    def logits(self, count: float, num_bytes: float) -> float:
        """Seconds of the loss beside its products: as measured for a logit, else as it reads and writes so many
        bytes."""
        measured = self.hardware.device.logit_nanoseconds
        return self.memory(num_bytes) if measured is None else count * measured * 1e-9

    def link(self, link: Link) -> tuple[float, float]:
        """(bytes a second, seconds of latency) of a link during training."""
        return link.bytes_per_second * self.sustained.network, link.latency_microseconds * 1e-6

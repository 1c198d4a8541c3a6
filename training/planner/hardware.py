"""Hardware profiles: speed and memory of a GPU and of the links, one YAML file per kind of GPU, each number with
source.

Units: GB and TB are powers of ten, as vendors count bandwidth; GiB is 2**30 bytes, as allocators count memory. A
field says which. Bandwidths are for one direction and one GPU (NVIDIA's NVLink figures count both: halve them).
"""

from math import ceil
from pathlib import Path
from typing import Any, Literal, Self

from pydantic import Field, ValidationError, model_validator

from gristmill.foundation.config import Config, read_yaml
from gristmill.foundation.errors import RecipeError, nearest_name

GIB = 2**30
PROFILES = Path(__file__).parent / "profiles"


class Link(Config):
    """One kind of link. Time of a transfer of S bytes over it: latency + S / (bandwidth * efficiency)."""

    kind: Literal["nvlink", "infiniband", "roce", "ethernet", "pcie", "memory"]
    gb_per_second: float = Field(gt=0, description="one direction, one GPU, as the vendor states it")
    efficiency: float = Field(1.0, gt=0, le=1.2, description="share that a collective reaches when nothing else runs")
    latency_microseconds: float = Field(5.0, ge=0, description="of a send; a collective over n takes log2(n) of them")

    @property
    def bytes_per_second(self) -> float:
        return self.gb_per_second * 1e9 * self.efficiency


class Device(Config):
    """One GPU."""

    memory_gib: float = Field(gt=0, description="what the driver reports, not the figure on the box")
    memory_tb_per_second: float = Field(gt=0)
    memory_efficiency: float = Field(0.9, gt=0, le=1, description="share that a large copy reaches")
    matmul_tflops: float = Field(gt=0, description="dense 16-bit peak: the denominator of MFU")
    matmul_efficiency: float = Field(0.85, gt=0, le=1, description="share that the best shape reaches")
    float8_tflops: float | None = Field(None, gt=0, description="dense 8-bit peak")
    sustained: float = Field(
        1.0,
        gt=0,
        le=1.5,
        description="of the best matmul rate, what its power limit leaves in long runs, against an A100",
    )
    multiprocessors: int = Field(gt=0, description="units over which the tiles of a matmul are dealt")
    tile_penalty: float = Field(
        8.0, ge=0, description="elements; a tile of a x b runs at 1 / (1 + penalty (1/a + 1/b))"
    )
    depth_penalty: float = Field(128.0, ge=0, description="elements of K that filling and draining one tile costs")
    flash_forward: float = Field(0.6, gt=0, le=1, description="share of peak of fused attention, forward")
    flash_backward: float = Field(0.5, gt=0, le=1, description="share of peak of fused attention, backward")
    flash2_forward: float | None = Field(
        None, gt=0, le=1, description="the same of FlashAttention-2, where it is slower"
    )
    flash2_backward: float | None = Field(None, gt=0, le=1)
    flash_extra_keys: float = Field(
        0.0, ge=0, description="keys that a query's fixed work (copies, masked halves of blocks) takes as long as"
    )
    kernel_microseconds: float = Field(4.0, ge=0, description="least time of one kernel")
    layer_microseconds: float = Field(
        0.0, ge=0, description="what a micro-batch's two passes through a layer take on a CPU beside its arithmetic"
    )
    tensor_layer_microseconds: float = Field(0.0, ge=0, description="what tensor ranks add to it beside the transfers")
    data_layer_microseconds: float = Field(0.0, ge=0, description="what data ranks add to it beside the transfers")
    expert_microseconds: float | None = Field(
        None, ge=0, description="what one expert's products take both ways beyond their arithmetic; None: as fitted"
    )
    routed_copies: float | None = Field(
        None, gt=0, le=1, description="share of the memory rate that copies of routed rows reach; None: as fitted"
    )
    logit_nanoseconds: float | None = Field(
        None, ge=0, description="what the loss takes for a logit on a CPU beside its products; None: as its bytes take"
    )


class Cluster(Config):
    """Nodes connected by one network. speed: how fast its GPUs compute, relative to the profile's device."""

    name: str
    nodes: int = Field(gt=0)
    network: Link | None = None
    speed: float = Field(1.0, gt=0)
    node_numbers: tuple[int, ...] = Field((), description="its nodes in the launcher's order; empty: consecutive")


class Hardware(Config):
    """A kind of machine: the GPU, the links within a node and between nodes, and, if they are given, the clusters."""

    name: str
    device: Device
    node_gpus: int = Field(8, gt=0)
    node_link: Link
    network: Link
    host_link: Link = Link(kind="pcie", gb_per_second=32.0, efficiency=0.8)
    host_memory_gib_per_gpu: float = Field(128.0, ge=0)
    host_update_gparams_per_second: float = Field(
        0.83, gt=0, description="1e9 parameters a second that a GPU's share of the host updates with AdamW in fp32"
    )
    host_contention: float = Field(
        0.0, ge=0, description="by how much longer such an update takes while the link copies, as a share of it"
    )
    disk_gb_per_second: float = Field(
        2.0, gt=0, description="a GPU's share of what the host's disk reads or writes (an NVMe disk of 8 GB/s for 4)"
    )
    price_per_gpu_hour: float | None = Field(None, ge=0)
    currency: str = Field("USD", min_length=1)
    gpu_mttf_hours: float | None = Field(
        None, gt=0, description="mean hours until a GPU fails or, on a spot market, is taken away; null: not counted"
    )
    restart_minutes: float = Field(10.0, ge=0, description="from an interruption until training goes on")
    store_gb_per_second: float = Field(0.5, gt=0, description="a GPU's share of what the store of checkpoints writes")
    clusters: tuple[Cluster, ...] = Field((), description="empty: one cluster, as large as requested")
    between_clusters: Link | None = None
    sources: dict[str, str] = Field(default_factory=dict)

    @model_validator(mode="after")
    def clusters_are_connected(self) -> Self:
        if len(self.clusters) > 1 and self.between_clusters is None:
            raise ValueError(
                f"{len(self.clusters)} clusters, but between_clusters is not given; "
                "add between_clusters: {kind: ethernet, gb_per_second: 1.25}"
            )
        return self

    @model_validator(mode="after")
    def nodes_are_numbered_once(self) -> Self:
        numbered = [c for c in self.clusters if c.node_numbers]
        for cluster in numbered:
            if len(cluster.node_numbers) != cluster.nodes:
                raise ValueError(
                    f"cluster {cluster.name} has {cluster.nodes} nodes, but numbers {len(cluster.node_numbers)}"
                )
        numbers = sorted(n for c in numbered for n in c.node_numbers)
        if numbered and (len(numbered) < len(self.clusters) or numbers != list(range(len(numbers)))):
            raise ValueError("node_numbers must name each node 0 to N - 1 once over all clusters, or be left out")
        return self

    @property
    def gpus(self) -> int | None:
        """Number of GPUs of the machine; None where the profile sets no limit."""
        return sum(c.nodes for c in self.clusters) * self.node_gpus if self.clusters else None


def load_hardware(reference: str | Path) -> Hardware:
    """The profile of a bare name (a100-80g, h100, h200) or of a YAML file. Raises RecipeError with what to change."""
    path = Path(reference)
    if path.suffix not in (".yaml", ".yml"):
        path = PROFILES / f"{reference}.yaml"
    if not path.is_file():
        names = profile_names()
        near = nearest_name(str(reference), names, cutoff=0.4)
        hint = f"did you mean {near}? " if near else ""
        raise RecipeError(
            f"hardware {reference}: no such profile or file; {hint}profiles: {', '.join(names)}, or a .yaml file"
        )
    content = read_yaml(path.read_bytes(), str(path)).value
    if not isinstance(content, dict):
        raise RecipeError(
            f"{path}: holds {type(content).__name__}, not fields; begin with name, device, node_link, network"
        )
    return parse_hardware(content, str(path))


def profile_names() -> list[str]:
    return sorted(path.stem for path in PROFILES.glob("*.yaml"))


def parse_hardware(content: dict[str, Any], origin: str) -> Hardware:
    """A profile from plain values. Raises RecipeError naming the field, and the nearest one if it is unknown."""
    try:
        return Hardware(**content)
    except ValidationError as error:
        raise RecipeError(f"{origin}: " + "; ".join(_explain(e, content) for e in error.errors())) from error


def _explain(error: Any, content: dict[str, Any]) -> str:
    place = ".".join(str(part) for part in error["loc"])
    if error["type"] == "missing":
        return f"{place}: {error['msg']}"
    if error["type"] != "extra_forbidden":
        return f"{place or 'profile'}: {error['msg']} (got {error.get('input')!r})" if place else error["msg"]
    known = _fields_at(error["loc"][:-1])
    near = nearest_name(str(error["loc"][-1]), known, cutoff=0.3)
    hint = f"did you mean {near}?" if near else f"fields are {', '.join(known)}"
    return f"unknown field {place}; {hint}"


def _fields_at(location: tuple[Any, ...]) -> list[str]:
    by_name: dict[str, Any] = {"device": Device, "clusters": Cluster}
    by_name |= dict.fromkeys(("node_link", "network", "host_link", "between_clusters"), Link)
    config: Any = Hardware
    for part in location:
        config = by_name.get(part, config) if isinstance(part, str) else config
    return sorted(config.model_fields)


# Rates that training reaches on a machine: three constants fitted to published runs, and the time of a matmul.
#
# A matmul is a roofline with tile quantization (NVIDIA, Matrix Multiplication Background User's Guide): tiles of the
# result are distributed over the multiprocessors, a partly filled tile or wave costs as much as a full one, small
# tiles reuse less of what they load, and a small K does not amortize the start and end of a tile. The fastest tile is
# used, as in the library.

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


def float32_machine(hardware: Hardware, processes: int) -> Hardware:
    """The machine as forecasts of float32 on processors take it, which count 2 bytes a number: links of half the rate,
    and all processes on one node."""
    link = hardware.node_link.model_copy(update={"gb_per_second": hardware.node_link.gb_per_second / 2})
    return hardware.model_copy(update={"node_link": link, "node_gpus": max(2, processes)})


class Routed(Config):
    """Costs of a mixture of experts beside its products and its exchange of tokens.

    Rows in the order of their experts are read and written one by one, not as a stream; 8-bit casts and products are
    one small kernel for each expert. The two shares are fitted to three of the eight published rows of
    benchmarks/published/experts.py; the other five are blind. The launches are not fitted: three products forward and
    six backward at some 7 microseconds, as of any small kernel that the host starts."""

    copies: float = Field(1.0, gt=0, le=1, description="share of the memory rate that copies of routed rows reach")
    casts: float = Field(1.0, gt=0, le=1, description="the same of casting experts' rows to 8 bits")
    expert_microseconds: float = Field(0.0, ge=0, description="of launching one expert's products, both ways")
    imbalance: float = Field(1.0, ge=1, description="rows of the busiest rank over the mean of all ranks")


# python benchmarks/planner.py --fit (2026-11-24)
ROUTED = Routed(copies=0.386, casts=0.079, expert_microseconds=60.0)


def routed_on(device: Device, imbalance: float) -> Routed:
    """The fitted costs, with those that the profile has measured."""
    measured = {"expert_microseconds": device.expert_microseconds, "copies": device.routed_copies}
    known = {name: value for name, value in measured.items() if value is not None}
    return ROUTED.model_copy(update=known | {"imbalance": imbalance})


class Rates:
    """Seconds of matmuls, memory traffic and transfers on one kind of hardware. Times of matmuls are cached."""

    def __init__(
        self, hardware: Hardware, sustained: Sustained, float8: bool = False, routed: Routed | None = None
    ) -> None:
        device = hardware.device
        self.hardware, self.sustained, self.float8 = hardware, sustained, float8
        self.routed = ROUTED if routed is None else routed
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
        return seconds / self.product_gain + self.memory(cast_bytes * rows * depth)

    @property
    def product_gain(self) -> float:
        """How much faster products are in 8 bits, where float8 is on and the GPU has them."""
        device = self.hardware.device
        return device.float8_tflops / device.matmul_tflops if self.float8 and device.float8_tflops else 1.0

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

"""Work of a CPU around a layer's matmuls: attention, element-wise work, the loss, Python, autograd and FSDP.

Layers are measured in float32, as differences of models of some layers more, so that their ends do not count."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from math import exp, fsum, log
from statistics import median

import torch

from gristmill.training.calibrate.links import Work
from gristmill.training.config.layout import LayoutConfig
from gristmill.training.config.model import ModelConfig
from gristmill.training.config.train import TrainConfig
from gristmill.training.engine.local_model import build_local_model
from gristmill.training.engine.passes import GradientAccumulation
from gristmill.training.model.attention.attention import attend
from gristmill.training.model.loss import Scoring, losses
from gristmill.training.model.moe.dispatch import Runs, grouped_linear, uses_grouped
from gristmill.training.objectives.objective import (
    Causal,
    LossFunction,
    NoOptions,
    ObjectiveInputs,
    TermSpec,
)
from gristmill.training.parallel.mesh import ALONE, Mesh, build_mesh, single_process
from gristmill.training.parallel.tensor import TensorAxis
from gristmill.training.planner.block_time import flash_width_share, head_products
from gristmill.training.planner.costs.model_shape import attention_flops, shape_of
from gristmill.training.planner.engine_profile import CPU_FLOAT32
from gristmill.training.planner.hardware import FLOAT32, Device, Hardware, Link, Rates, Sustained
from gristmill.training.planner.layout import Layout
from gristmill.training.planner.step_time import StepModel

CPU = torch.device("cpu")
PASSES = 8  # through an empty layer, in one measurement: the clock of processor time may have ticks of 10 ms
LATENCIES = 4  # that the forecast counts of the tensor axis in a layer's two passes
SAMPLES, VOCABULARY = 4, 64
# Layers of small models as they are trained on a CPU.
WIDTHS, HEAD_DIM, TOKENS = (256, 512), 64, 256
LAYERS, EMPTY_LAYERS = (1, 3), (1, 5)
# Attention of so many heads over 1,024 tokens, in samples of these lengths.
HEADS, LENGTHS = 4, (128, 512)
LOSS_TOKENS, LOSS_VOCABULARY = 1024, 4096

Seconds = Mapping[str, float]


def layer_works(processes: int) -> dict[str, Work]:
    """Works that `fit_layers` needs the seconds of, by name."""
    works = {}
    for width in WIDTHS:
        for layers in LAYERS:
            works[f"layer {width} {layers}"] = both_passes(layer_of(width), layers, SAMPLES, single_process(CPU))
        works[f"loss {width}"] = _loss(width)
    for name, mesh in _meshes(processes).items():
        heads = max(2, processes)
        model = ModelConfig(layers=1, width=8 * heads, heads=heads, sequence_length=16)
        for layers in EMPTY_LAYERS:
            works[f"empty {name} {layers}"] = both_passes(model, layers, 1, mesh, PASSES)
    for length in LENGTHS:
        works[f"attention {length}"], works[f"attention and back {length}"] = _attention(length)
    return works


def layer_of(width: int) -> ModelConfig:
    return ModelConfig(layers=1, width=width, heads=width // HEAD_DIM, sequence_length=TOKENS)


def fit_layers(device: Device, seconds: Seconds, processes: int, latency: float) -> Device:
    """The device with what is measured around the matmuls: the shares of the peak that attention reaches, seconds of an
    empty layer and of a logit, and the share of a copy's bandwidth that element-wise work reaches. seconds: of the
    works of `layer_works`. latency: seconds of a collective of all processes."""
    empty = {name: _per_layer(seconds, f"empty {name}", EMPTY_LAYERS) / PASSES for name in _axes(processes)}
    device = _with_attention(device, seconds)
    layers = [layer_of(width) for width in WIDTHS]
    measured = [_per_layer(seconds, f"layer {width}", LAYERS) for width in WIDTHS]
    alone = device.model_copy(update={"layer_microseconds": empty["alone"] * 1e6})
    device = device.model_copy(update={"memory_efficiency": _memory_efficiency(alone, layers, measured)})
    update = {
        "layer_microseconds": empty["alone"] * 1e6,
        "logit_nanoseconds": _logit_seconds(device, seconds) * 1e9,
    }
    if processes > 1:
        # The forecast itself counts the latencies: of each gather, forward and, where weights are resharded, backward.
        gathers = 1 + LayoutConfig(data=processes).reshards
        shared = max(0.0, empty["data"] - empty["stage"] - gathers * latency)
        sharded = max(0.0, empty["tensor"] - empty["stage"] - LATENCIES * latency)
        update["layer_microseconds"] = empty["stage"] * 1e6
        update |= {"data_layer_microseconds": shared * 1e6, "tensor_layer_microseconds": sharded * 1e6}
    return device.model_copy(update=update)


def both_passes(model: ModelConfig, layers: int, samples: int, mesh: Mesh, passes: int = 1) -> Work:
    """`passes` times forward and backward through a model with so many of its layers, as one rank of the mesh."""
    model = ModelConfig.model_validate(model.model_dump(exclude_unset=True) | {"layers": layers})
    tokens = samples * mesh.data.size * model.sequence_length
    layout = {"micro_batch": samples, "data": mesh.data.size, "tensor": mesh.tensor.size}
    train = TrainConfig(tokens=tokens, batch_tokens=tokens, precision="fp32", layout=layout)
    parts = build_local_model(model, VOCABULARY, train, mesh, seed=0)
    accumulation = GradientAccumulation(parts.stages[0], samples, causal_loss())
    ids = torch.zeros(samples, model.sequence_length, dtype=torch.int64)
    batch = {"tokens": ids, "targets": ids, "weights": torch.ones(ids.shape)}

    def run() -> None:
        for _ in range(passes):
            accumulation.train(batch, [1.0])
            parts.clear_gradients()

    return Work(run)


def _axes(processes: int) -> dict[str, dict[str, int] | None]:
    """Layouts of an empty layer. alone: without a process group, which needs no FSDP. stage: of a pipeline, in which
    FSDP has one rank."""
    if processes == 1:
        return {"alone": None}
    return {
        "alone": None,
        "stage": {"pipeline": processes},
        "data": {"data": processes},
        "tensor": {"tensor": processes},
    }


def _meshes(processes: int) -> dict[str, Mesh]:
    """By the same names; each rank of a pipeline holds a whole model of its own."""
    heads = max(2, processes)
    return {
        name: replace(build_mesh(LayoutConfig(**axes), heads, CPU), pipeline=ALONE) if axes else single_process(CPU)
        for name, axes in _axes(processes).items()
    }


def _attention(length: int) -> tuple[Work, Work]:
    """(forward, forward and backward) over samples of so many tokens, of heads as a projection leaves them."""
    shape = (SAMPLES * TOKENS // length, length, HEADS, HEAD_DIM)
    query, key, value = heads = [torch.randn(shape).transpose(1, 2).requires_grad_() for _ in range(3)]
    gradient = torch.randn(shape).transpose(1, 2)

    def forward() -> torch.Tensor:
        return attend(query, key, value, None, HEAD_DIM**-0.5)

    return Work(forward), Work(lambda: torch.autograd.grad(forward(), heads, gradient))


def _loss(width: int) -> Work:
    """Both passes of head and loss. Logits are small, as an untrained model's: exp takes longer where it underflows."""
    scoring = Scoring(TensorAxis(single_process(CPU), sequence_parallel=False), LOSS_VOCABULARY)
    hidden = torch.randn(1, LOSS_TOKENS, width, requires_grad=True)
    head = (0.02 * torch.randn(LOSS_VOCABULARY, width)).requires_grad_()
    targets = torch.randint(0, LOSS_VOCABULARY, (1, LOSS_TOKENS))
    weights = torch.ones(targets.shape)
    return Work(lambda: torch.autograd.grad(losses(scoring, hidden, head, targets, weights).sum(), (hidden, head)))


def _per_layer(seconds: Seconds, name: str, layers: tuple[int, int]) -> float:
    few, many = layers
    return max(0.0, (seconds[f"{name} {many}"] - seconds[f"{name} {few}"]) / (many - few))


def _with_attention(device: Device, seconds: Seconds) -> Device:
    """Time of attention over T keys is that of T + extra keys at a share of the peak: a line through both lengths. The
    share is its FLOPs over those that matmuls at the peak would do meanwhile."""
    ahead = [seconds[f"attention {length}"] for length in LENGTHS]
    both = [seconds[f"attention and back {length}"] for length in LENGTHS]
    behind = [max(second - first, first) for first, second in zip(ahead, both, strict=True)]
    work = [_attention_flops(length) for length in LENGTHS]
    each_key = [flops / length for flops, length in zip(work, LENGTHS, strict=True)]
    # both ~ work + extra x each_key
    slope = both[1] * each_key[0] - both[0] * each_key[1]
    extra = (both[0] * work[1] - both[1] * work[0]) / slope if slope > 0 else 0.0
    extra = min(4.0 * LENGTHS[1], max(0.0, extra))
    at_peak = {"flash_forward": 1.0, "flash_backward": 1.0, "flash2_forward": None, "flash2_backward": None}
    device = device.model_copy(update=at_peak | {"flash_extra_keys": extra})
    rates = Rates(rested_machine(device), FLOAT32)
    shares = []
    for measured, products, backward in ((ahead, 1.0, False), (behind, 2.5, True)):
        seconds_at_peak = fsum(
            rates.flash(products * flops, length, backward) for flops, length in zip(work, LENGTHS, strict=True)
        )
        shares.append(min(1.0, seconds_at_peak / fsum(measured)))
    return device.model_copy(update={"flash_forward": shares[0], "flash_backward": shares[1]})


def _attention_flops(length: int) -> float:
    """FLOPs of the forward pass over all samples, as if heads were 128 wide."""
    model = ModelConfig(layers=1, width=HEADS * HEAD_DIM, heads=HEADS, sequence_length=length)
    flops = attention_flops(shape_of(model, VOCABULARY).blocks[0], length, causal=True)
    return SAMPLES * TOKENS // length * flops / flash_width_share(HEAD_DIM)


def _logit_seconds(device: Device, seconds: Seconds) -> float:
    """Seconds of the loss for a logit beside its three products."""
    rates = Rates(rested_machine(device), FLOAT32)
    beside = [
        seconds[f"loss {width}"] - fsum(head_products(LOSS_TOKENS, width, LOSS_VOCABULARY, rates)) for width in WIDTHS
    ]
    return max(0.0, fsum(beside)) / len(WIDTHS) / LOSS_TOKENS / LOSS_VOCABULARY


def _memory_efficiency(device: Device, layers: Sequence[ModelConfig], measured: Sequence[float]) -> float:
    """With which the forecast of the layers is right in the geometric mean, from 0.02 to 1."""

    def error(efficiency: float) -> float:
        fitted = device.model_copy(update={"memory_efficiency": efficiency})
        pairs = zip(layers, measured, strict=True)
        return fsum(log(_forecast(fitted, layer) / max(seconds, 1e-9)) for layer, seconds in pairs)

    low, high = log(0.02), 0.0
    for _ in range(30):  # the forecast falls as the efficiency rises
        middle = (low + high) / 2
        low, high = (middle, high) if error(exp(middle)) > 0 else (low, middle)
    return exp((low + high) / 2)


def _forecast(device: Device, layer: ModelConfig) -> float:
    """Seconds of a layer's two passes."""
    seconds = []
    for count in (1, 5):
        model = ModelConfig.model_validate(layer.model_dump(exclude_unset=True) | {"layers": count})
        step = StepModel(shape_of(model, VOCABULARY), Rates(rested_machine(device), FLOAT32), CPU_FLOAT32).step(
            Layout(micro_batch=SAMPLES), SAMPLES
        )
        seconds.append(step.total - step.optimizer)
    return (seconds[1] - seconds[0]) / 4


def rested_machine(device: Device) -> Hardware:
    """A machine without the effect of a power limit, as in a short measurement."""
    link = Link(kind="memory", gb_per_second=1.0)
    rested = device.model_copy(update={"sustained": 1.0})
    return Hardware(name="measured", device=rested, node_gpus=1, node_link=link, network=link)


# The causal loss without data, for calibration, benchmarks and tests of the engine, which make their own batches.


def causal_loss(z_loss: bool = False) -> LossFunction:
    """z_loss: the model has one."""
    names = ("nll", "z_loss") if z_loss else ("nll",)
    inputs = ObjectiveInputs(None, ModelConfig(layers=1, width=1, heads=1, positions="none"), 1, 0, 0)
    return LossFunction(Causal(inputs, NoOptions()), tuple(TermSpec(name, "weights", 1.0) for name in names))


# Work of a mixture of experts beside plain products: grouped products by number and size of the experts, and rows that
# are read in the order of their experts. Measured as the model runs them: by its own grouped linear layer.


# (experts, rows of each, inputs, outputs): many small products and few large ones.
CPU_GROUPS = ((4, 256, 256, 256), (16, 64, 256, 256), (64, 16, 256, 256))
CUDA_GROUPS = ((8, 2048, 2048, 1408), (32, 512, 2048, 1408), (128, 128, 2048, 1408), (128, 512, 2048, 768))
PRODUCTS = 9  # of an expert both ways: three forward (gate, up, down), each twice backward
ROWS_ON_CPU, ROWS_ON_GPU, ROW_WIDTH = 2**14, 2**18, 1024


def expert_works(device: torch.device) -> dict[str, Work]:
    """Works that `fit_experts` needs the seconds of, by name."""
    works = {f"grouped {group}": Work(_grouped(group, device)) for group in _groups(device)}
    rows = ROWS_ON_GPU if device.type == "cuda" else ROWS_ON_CPU
    table = torch.zeros(rows, ROW_WIDTH, device=device, dtype=_dtype(device))
    order = torch.randperm(rows, generator=torch.Generator().manual_seed(1)).to(device)
    return works | {"routed rows": Work(partial(table.index_select, 0, order))}


def fit_experts(seconds: Mapping[str, float], hardware: Hardware, device: torch.device) -> Hardware:
    """The profile with what an expert's products take beyond one product of as many rows, and the share of the memory
    rate at which routed rows are copied."""
    rates = Rates(hardware, Sustained())
    beyond = [
        (seconds[f"grouped {group}"] - rates.matmul(group[1], group[2], group[3], group[0])) / group[0]
        for group in _groups(device)
    ]
    rows = ROWS_ON_GPU if device.type == "cuda" else ROWS_ON_CPU
    copied = 2 * rows * ROW_WIDTH * torch.finfo(_dtype(device)).bits // 8
    measured = {
        "expert_microseconds": PRODUCTS * max(0.0, median(beyond)) * 1e6,
        "routed_copies": min(1.0, copied / seconds["routed rows"] / rates.memory_rate),
    }
    points = ", ".join(
        f"{'x'.join(map(str, group))} {seconds[f'grouped {group}'] * 1e6:.0f} us" for group in _groups(device)
    )
    source = (
        f"measured grouped products (experts x rows x inputs x outputs): {points}; routed rows {copied / 1e6:.0f} MB "
    )
    source += f"{seconds['routed rows'] * 1e6:.0f} us"
    fitted = hardware.device.model_copy(update=measured)
    return hardware.model_copy(update={"device": fitted, "sources": hardware.sources | {"experts": source}})


def _grouped(group: tuple[int, int, int, int], device: torch.device) -> "partial[torch.Tensor]":
    experts, rows, inputs, outputs = group
    x_ND = torch.zeros(experts * rows, inputs, device=device, dtype=_dtype(device))
    weight_EFD = torch.zeros(experts, outputs, inputs, device=device, dtype=_dtype(device))
    runs = Runs(sizes=(rows,) * experts)
    if uses_grouped(x_ND):
        runs = Runs(ends_E=torch.arange(1, experts + 1, device=device, dtype=torch.int32) * rows)
    return partial(grouped_linear, x_ND, weight_EFD, runs)


def _groups(device: torch.device) -> tuple[tuple[int, int, int, int], ...]:
    return CUDA_GROUPS if device.type == "cuda" else CPU_GROUPS


def _dtype(device: torch.device) -> torch.dtype:
    return torch.bfloat16 if device.type == "cuda" else torch.float32

"""What a CPU does around a layer's matmuls: attention, element-wise work, Python, autograd and FSDP.

Measured on single layers in float32, as differences of models of some layers more, so that their ends do not count."""

from collections.abc import Callable, Sequence
from math import exp, fsum, log

import torch
import torch.distributed as dist

from gristmill.training.config import TrainConfig
from gristmill.training.costs.flops import attention_flops
from gristmill.training.costs.model_shape import shape_of
from gristmill.training.engine.causal_loss import causal_loss
from gristmill.training.engine.forward_backward import GradientAccumulation
from gristmill.training.engine.local_model import build_local_model
from gristmill.training.median_seconds import median_seconds
from gristmill.training.model.attention import attend
from gristmill.training.model_config import ModelConfig
from gristmill.training.parallel.mesh import build_mesh, single_process
from gristmill.training.planner.block_time import flash_width_share
from gristmill.training.planner.framework import CPU_FLOAT32
from gristmill.training.planner.hardware import Device, Hardware, Link
from gristmill.training.planner.layout import Layout
from gristmill.training.planner.rates import FLOAT32, Rates
from gristmill.training.planner.step_time import StepModel

CPU = torch.device("cpu")
PASSES = 8  # through an empty layer, in one measurement
COLLECTIVES = 8  # of the tensor axis in a layer's two passes, under sequence parallelism
SAMPLES, VOCABULARY = 4, 64
# Layers of small models as they are trained on a CPU.
WIDTHS, HEAD_DIM, TOKENS = (256, 512), 64, 256


def fit_layers(device: Device, repeats: int, processes: int, latency: float) -> Device:
    """The device with what is measured around the matmuls: the shares of the peak that attention reaches, seconds of an
    empty layer, and the share of a copy's bandwidth that element-wise work reaches. latency: seconds of a collective
    of all processes."""
    empty = measure_empty_layer(repeats, {"data": processes})
    alone, sharded = empty, 0.0
    if processes > 1:
        alone = measure_empty_layer(repeats, None)
        sharded = max(0.0, measure_empty_layer(repeats, {"tensor": processes}) - empty - COLLECTIVES * latency)
    forward, backward = _attention_shares(device, repeats)
    device = device.model_copy(
        update={"flash_forward": forward, "flash_backward": backward, "flash2_forward": None, "flash2_backward": None}
    )
    layers = [layer_of(width) for width in WIDTHS]
    measured = [_layer_seconds(layer, SAMPLES, None, repeats) for layer in layers]
    efficiency = _memory_efficiency(device.model_copy(update={"layer_microseconds": alone * 1e6}), layers, measured)
    return device.model_copy(
        update={
            "memory_efficiency": efficiency,
            "layer_microseconds": empty * 1e6,
            "tensor_layer_microseconds": sharded * 1e6,
        }
    )


def layer_of(width: int) -> ModelConfig:
    return ModelConfig(layers=1, width=width, heads=width // HEAD_DIM, sequence_length=TOKENS)


def measure_empty_layer(repeats: int, axes: dict[str, int] | None) -> float:
    """Seconds of the two passes through a layer whose arithmetic is next to nothing, on a layout of all processes, or
    (axes None) of this one: Python, autograd, and FSDP where there is a process group."""
    heads = max(2, dist.get_world_size() if dist.is_initialized() else 1)
    model = ModelConfig(layers=1, width=8 * heads, heads=heads, sequence_length=16)
    return _layer_seconds(model, 1, axes, repeats, passes=PASSES)


def _layer_seconds(
    model: ModelConfig, samples: int, axes: dict[str, int] | None, repeats: int, passes: int = 1
) -> float:
    """Of the two passes through one layer, by `passes` passes at once: the clock of processor time may have ticks of
    10 ms."""
    seconds = [median_seconds(_both_passes(model, layers, samples, axes, passes), CPU, repeats) for layers in (1, 5)]
    return max(0.0, (seconds[1] - seconds[0]) / 4 / passes)


def _both_passes(
    model: ModelConfig, layers: int, samples: int, axes: dict[str, int] | None, passes: int
) -> Callable[[], None]:
    model = ModelConfig.model_validate(model.model_dump(exclude_unset=True) | {"layers": layers})
    processes = dist.get_world_size() if dist.is_initialized() and axes is not None else 1
    tokens = samples * processes * model.sequence_length
    train = TrainConfig(
        tokens=tokens, batch_tokens=tokens, precision="fp32", layout={"micro_batch": samples} | (axes or {})
    )
    grouped = axes is not None and dist.is_initialized()
    mesh = build_mesh(train.layout, model.heads, CPU) if grouped else single_process(CPU)
    parts = build_local_model(model, VOCABULARY, train, mesh, seed=0)
    accumulation = GradientAccumulation(parts.stages[0], samples, causal_loss())
    ids = torch.zeros(samples, model.sequence_length, dtype=torch.int64)
    batch = {"tokens": ids, "targets": ids, "weights": torch.ones(ids.shape)}

    def run() -> None:
        for _ in range(passes):
            accumulation.train(batch, [1.0])
            parts.clear_gradients()

    return run


def _attention_shares(device: Device, repeats: int) -> tuple[float, float]:
    """Of the peak, forward and backward: its FLOPs over those that matmuls at the peak would do meanwhile."""
    model = layer_of(WIDTHS[0])
    shape = (SAMPLES, model.heads, TOKENS, HEAD_DIM)
    heads = [torch.randn(shape, requires_grad=True) for _ in range(3)]
    gradient = torch.randn(shape)

    def forward() -> torch.Tensor:
        return attend(*heads, None, HEAD_DIM**-0.5)

    ahead = median_seconds(forward, CPU, repeats)
    both = median_seconds(lambda: torch.autograd.grad(forward(), heads, gradient), CPU, repeats)
    rates = Rates(rested_machine(device.model_copy(update={"flash_forward": 1.0, "flash_backward": 1.0})), FLOAT32)
    flops = SAMPLES * attention_flops(shape_of(model, VOCABULARY).blocks[0], TOKENS, causal=True)
    flops /= flash_width_share(HEAD_DIM)
    behind = max(both - ahead, ahead)
    return min(1.0, rates.flash(flops) / ahead), min(1.0, rates.flash(2.5 * flops, backward=True) / behind)


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

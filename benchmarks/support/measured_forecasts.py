"""Forward and backward passes of small models on this machine, beside the planner's forecast of them.

Passes and the works of a calibration take turns, so that both are of the same states of a machine whose clock varies;
or the forecast is from profiles that `gristmill calibrate` wrote before."""

from dataclasses import dataclass
from typing import Any

import torch
from measure import Figure

from gristmill.foundation.progress import Reporter
from gristmill.training.calibrate.links import Work, interleaved_seconds
from gristmill.training.calibrate.measure_hardware import measure_beside
from gristmill.training.calibrate.measure_layers import causal_loss
from gristmill.training.config.layout import LayoutConfig
from gristmill.training.config.model import ModelConfig
from gristmill.training.config.train import TrainConfig
from gristmill.training.engine.local_model import build_local_model
from gristmill.training.launch.processes import keep_freed_memory
from gristmill.training.parallel.mesh import build_mesh, single_process
from gristmill.training.planner.costs.model_shape import shape_of
from gristmill.training.planner.engine_profile import CPU_FLOAT32, GRISTMILL
from gristmill.training.planner.hardware import FLOAT32, Hardware, Rates, Sustained, float32_machine, load_hardware
from gristmill.training.planner.layout import from_config
from gristmill.training.planner.step_time import StepModel
from gristmill.training.run import RunConfig, build_forward_backward
from tests.support.forked_pool import ForkedPool

VOCABULARY = 4096
CPU = torch.device("cpu")


@dataclass(frozen=True)
class Passes:
    """Forward and backward of a model over so many samples, on a layout. figure: its name."""

    figure: str
    model: ModelConfig
    samples: int
    layout: LayoutConfig

    @property
    def processes(self) -> int:
        return self.layout.world_size


def _pass(name: str, **model: Any) -> Passes:
    return Passes(f"forecast_pass_{name}", ModelConfig(**model), 4, LayoutConfig(micro_batch=4))


def _step(name: str, **axes: int) -> Passes:
    model = ModelConfig(layers=4, width=256, heads=8, sequence_length=256)
    return Passes(f"forecast_step_{name}", model, 8, LayoutConfig(micro_batch=2, **axes))


MEASURED = (
    _step("one"),
    _step("data_2", data=2),
    _step("tensor_2", tensor=2),
    _step("pipeline_2", pipeline=2),
    _pass("4_x_256", layers=4, width=256, heads=4, sequence_length=256),
    _pass("2_x_512", layers=2, width=512, heads=8, sequence_length=256),
    _pass("6_x_320", layers=6, width=320, heads=5, sequence_length=512),
)
GPT = {"positions": "learned", "norm": "layernorm", "mlp": "gelu"}
# Models that no part of the forecast was fitted to: short samples, GPT-2's kind of layer, narrow and deep.
OTHERS = (
    _pass("3_x_384_of_128", layers=3, width=384, heads=6, sequence_length=128),
    _pass("4_x_256_gpt", layers=4, width=256, heads=4, sequence_length=256, **GPT),
    _pass("8_x_192", layers=8, width=192, heads=6, sequence_length=256),
)


def forecast_figures(rounds: int, profiles: dict[int, Hardware], others: bool) -> list[Figure]:
    """profiles: by the number of processes that measured them; those that are not given are measured here."""
    chosen = MEASURED + (OTHERS if others else ())
    figures = {}
    pool = ForkedPool(2)  # before torch computes anything here
    try:
        for processes in (1, 2):
            here = [each for each in chosen if each.processes == processes]
            answers = pool.run(processes, measured, here, rounds, profiles.get(processes), timeout_seconds=600)
            profile = answers[0][0]
            for each in here:  # of the busiest rank
                figures[each.figure] = figure(each, profile, max(seconds[each.figure] for _, seconds in answers))
    finally:
        pool.close()
    return [figures[each.figure] for each in chosen]


def measured(
    chosen: list[Passes], rounds: int, profile: Hardware | None, device: torch.device = CPU
) -> tuple[Hardware, dict[str, float]]:
    """(profile, seconds by figure that this rank is busy with the passes). On a CPU that is processor time, where a
    process has one thread, which neither the machine's other work nor waiting for the other rank lengthens."""
    keep_freed_memory()  # as training does
    if profile is not None:
        torch.set_num_threads(profile.device.multiprocessors)
    works = {each.figure: work_of(each, device) for each in chosen}
    if profile is not None:
        return profile, interleaved_seconds(works, device, rounds)
    base = load_hardware("h100") if device.type == "cuda" else None
    return measure_beside(device, base, Reporter.silent(), rounds, works)


def work_of(passes: Passes, device: torch.device) -> Work:
    model, length = passes.model, passes.model.sequence_length
    precision = "bf16" if device.type == "cuda" else "fp32"
    train = TrainConfig(
        tokens=passes.samples * length,
        batch_tokens=passes.samples * length,
        precision=precision,
        layout=passes.layout,
        compile=device.type == "cuda",
    )
    alone = passes.processes == 1
    mesh = single_process(device) if alone else build_mesh(train.layout, model.num_kv_heads, device)
    parts = build_local_model(model, VOCABULARY, train, mesh, seed=1)
    both = build_forward_backward(parts, RunConfig(model, train, 1), mesh, causal_loss())
    shape = passes.samples // train.layout.data, length
    tokens = torch.randint(0, VOCABULARY, shape, generator=torch.Generator().manual_seed(1)).to(device)
    batch = {"tokens": tokens, "targets": tokens, "weights": torch.ones(shape, device=device)}

    def run() -> None:
        both.train(batch, [1e-3])
        parts.clear_gradients()

    return Work(run)


def figure(passes: Passes, profile: Hardware, seconds: float) -> Figure:
    forecast = forecast_seconds(passes, profile)
    return Figure(passes.figure, forecast, "s", seconds, "measured, cpu", forecast / seconds)


def forecast_seconds(passes: Passes, profile: Hardware) -> float:
    """Of the busiest rank's passes, without waiting for other stages and without the optimizer."""
    machine = float32_machine(profile, 2)
    model = StepModel(shape_of(passes.model, VOCABULARY), Rates(machine, FLOAT32), CPU_FLOAT32)
    step = model.step(from_config(passes.layout, passes.processes), passes.samples)
    return step.total - step.optimizer - step.bubble


# On a GPU in bf16, with compiled layers: the host must not be what bounds a pass, so they are large.
ON_GPU = (
    Passes(
        "forecast_gpu_12_x_768",
        ModelConfig(layers=12, width=768, heads=12, sequence_length=1024, **GPT),
        16,
        LayoutConfig(micro_batch=16),
    ),
    Passes(
        "forecast_gpu_8_x_2048",
        ModelConfig(layers=8, width=2048, heads=16, sequence_length=4096),
        2,
        LayoutConfig(micro_batch=2),
    ),
)
TINY = Passes(
    "forecast_gpu_tiny",
    ModelConfig(layers=2, width=64, heads=2, sequence_length=64),
    2,
    LayoutConfig(micro_batch=2),
)


def cuda_figures(rounds: int, profile: Hardware | None, device: torch.device) -> list[Figure]:
    """Passes of one process on the GPU, beside the forecast of its profile, measured where it is not given. Elsewhere a
    tiny model, which shows that all of this runs."""
    chosen = list(ON_GPU) if device.type == "cuda" else [TINY]
    profile, seconds = measured(chosen, rounds, profile, device)
    return [gpu_figure(each, profile, seconds[each.figure]) for each in chosen]


def gpu_figure(passes: Passes, profile: Hardware, seconds: float) -> Figure:
    """The forecast is that of compiled layers in bf16, without the optimizer."""
    step = StepModel(shape_of(passes.model, VOCABULARY), Rates(profile, Sustained()), GRISTMILL).step(
        from_config(passes.layout, 1), passes.samples
    )
    forecast = step.total - step.optimizer
    return Figure(passes.figure, forecast, "s", seconds, f"measured, {profile.name}", forecast / seconds)

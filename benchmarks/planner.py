"""The planner's forecasts compared with published runs and with measurements on this machine; time of a search.

Published: the five rows the three constants are fitted to, tables they never saw, and what the paper of 2021 says of
its figures. Measured: forward and backward of small models, and steps of layouts on two processes of the engine, on
this machine, against the forecast from a profile that `gristmill calibrate`'s own functions measure in the same run.
`ratio` of a forecast is forecast over published (or measured): 1 is a perfect forecast."""

import statistics
from typing import Any

import torch
import torch.distributed as dist
from measure import Figure, arguments, cpu_seconds, print_figures, wall_seconds
from published.claims import claims
from published.fit import errors, leave_one_out, print_fit, refit_spread
from published.h100 import LLM_C_RUN
from published.held_out import HELD_OUT
from published.megatron import CALIBRATION
from rich.console import Console
from rich.table import Table

from gristmill.foundation.progress import Reporter
from gristmill.training.config import TrainConfig
from gristmill.training.costs.model_shape import shape_of
from gristmill.training.engine.causal_loss import causal_loss
from gristmill.training.engine.local_model import build_local_model
from gristmill.training.host_allocator import keep_freed_memory
from gristmill.training.layout_config import LayoutConfig
from gristmill.training.measure_hardware import measure
from gristmill.training.model_config import ModelConfig
from gristmill.training.parallel.mesh import build_mesh, single_process
from gristmill.training.planner.framework import CPU_FLOAT32
from gristmill.training.planner.hardware import Hardware, load_hardware
from gristmill.training.planner.known_models import named_shape
from gristmill.training.planner.layout import Layout, from_config
from gristmill.training.planner.plan_request import PlanRequest
from gristmill.training.planner.rates import FITTED, FLOAT32, Rates, Sustained
from gristmill.training.planner.search import THROUGHPUT_ERROR, search
from gristmill.training.planner.step_time import StepModel
from gristmill.training.run import RunConfig, build_forward_backward
from gristmill.training.testing.forked_pool import ForkedPool

MODELS = {
    "4 x 256": ModelConfig(layers=4, width=256, heads=4, sequence_length=256),
    "2 x 512": ModelConfig(layers=2, width=512, heads=8, sequence_length=256),
    "6 x 320": ModelConfig(layers=6, width=320, heads=5, sequence_length=512),
}
AXES: dict[str, dict[str, Any]] = {
    "one": {},
    "data 2": {"data": 2},
    "tensor 2": {"tensor": 2},
    "pipeline 2": {"pipeline": 2},
}
LAID_OUT = ModelConfig(layers=4, width=256, heads=8, sequence_length=256)
VOCABULARY, SAMPLES = 4096, 4


def main() -> None:
    parser = arguments(__doc__ or "")
    parser.add_argument("--fit", action="store_true", help="only fit the planner's three constants and print them")
    options = parser.parse_args()
    if options.fit:
        print_fit()
        return
    pool = ForkedPool(2)  # before torch computes anything here
    try:
        profiles = {processes: pool.run(processes, measured_profile)[0] for processes in (1, 2)}
        rounds = 2 if options.quick else 5
        steps = {name: max(pool.run(_processes(axes), measured_step, axes, rounds)) for name, axes in AXES.items()}
    finally:
        pool.close()
    figures = published_figures() + layout_figures(profiles, steps)
    figures += measured_figures(rounds)
    figures.append(search_figure())
    print_figures(figures)


def measured_profile() -> Hardware:
    """Hardware profile of one process with one thread, and of the link between two."""
    keep_freed_memory()  # as training does
    return measure(torch.device("cpu"), None, Reporter.silent(), repeats=7)


def measured_step(axes: dict[str, Any], rounds: int) -> float:
    """Median seconds that this rank is busy with a step's forward and backward passes: processor time, which neither
    the machine's other work nor waiting for the other rank lengthens."""
    keep_freed_memory()
    train = TrainConfig(
        tokens=10**6, batch_tokens=8 * LAID_OUT.sequence_length, precision="fp32", layout={"micro_batch": 2} | axes
    )
    mesh = build_mesh(train.layout, LAID_OUT.num_kv_heads, torch.device("cpu"))
    parts = build_local_model(LAID_OUT, VOCABULARY, train, mesh, seed=1)
    passes = build_forward_backward(parts, RunConfig(LAID_OUT, train, 1), mesh, causal_loss())
    tokens = torch.zeros(8 // train.layout.data, LAID_OUT.sequence_length, dtype=torch.int64)
    batch = {"tokens": tokens, "targets": tokens, "weights": torch.ones(tokens.shape)}
    times = []
    for _ in range(rounds + 1):
        dist.barrier()
        times.append(cpu_seconds(lambda: passes.train(batch, [1e-3])))
        parts.clear_gradients()
    return statistics.median(times[1:])


def layout_figures(profiles: dict[int, Hardware], steps: dict[str, float]) -> list[Figure]:
    """Layouts on processes of this machine: busy seconds of the busiest rank, measured and forecast. profiles: measured
    by so many processes."""
    figures = []
    for name, axes in AXES.items():
        profile = profiles[_processes(axes)]
        link = profile.node_link.model_dump() | {"gb_per_second": profile.node_link.gb_per_second / 2}
        machine = Hardware.model_validate(profile.model_dump() | {"node_link": link, "node_gpus": 2})
        model = StepModel(shape_of(LAID_OUT, VOCABULARY), Rates(machine, FLOAT32), CPU_FLOAT32)
        layout = from_config(LayoutConfig(**({"micro_batch": 2} | axes)), 2)
        step = model.step(layout, 8)
        forecast = step.total - step.optimizer - step.bubble
        figures.append(
            Figure(f"forecast_step_{_slug(name)}", forecast, "s", steps[name], "measured, cpu", forecast / steps[name])
        )
    return figures


def _processes(axes: dict[str, Any]) -> int:
    return LayoutConfig(**axes).world_size


def published_figures() -> list[Figure]:
    """Mean error of each table, in percent; the rows are printed."""
    table = Table("run", "published TFLOP/s", "forecast", "error", title="forecast beside published")
    figures = []
    fitted = {"calibration": CALIBRATION, "power of the H100": (LLM_C_RUN,)}
    for name, rows in (fitted | HELD_OUT).items():
        found = errors(rows, FITTED)
        table.add_row(f"[bold]{name}")
        for row, error in zip(rows, found, strict=True):
            table.add_row(row.name, f"{row.tflops:.0f}", f"{row.tflops * (1 + error):.0f}", f"{error:+.1%}")
        table.add_section()
        mean = 100 * statistics.fmean(abs(error) for error in found)
        figures.append(Figure(f"forecast_error_{_slug(name)}", mean, "% mean"))
    Console(width=120).print(table)
    fits = leave_one_out()
    figures.append(Figure("forecast_error_row_left_out", 100 * statistics.fmean(abs(f.error) for f in fits), "% mean"))
    for name, (low, high) in refit_spread(fits).items():
        figures.append(Figure(f"refit_spread_{name}", 100 * (high - low), "% of the profile's rate"))
    held_out = [abs(error) for rows in HELD_OUT.values() for error in errors(rows, FITTED)]
    inside = statistics.fmean(error <= THROUGHPUT_ERROR for error in held_out)
    figures.append(Figure("published_within_range", 100 * inside, "%"))
    said = Table("claim", "published", "forecast", title="what the paper of 2021 says of its figures 12 to 18")
    made = claims()
    for claim in made:
        said.add_row(claim.name, claim.published, claim.forecast + ("" if claim.holds else " (against it)"))
    Console(width=120).print(said)
    figures.append(Figure("claims_confirmed", 100 * sum(claim.holds for claim in made) / len(made), "%"))
    return figures


def measured_figures(rounds: int) -> list[Figure]:
    """Seconds of a forward and backward pass: measured here, and forecast from this machine's measured profile."""
    keep_freed_memory()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    base = load_hardware("h100") if device.type == "cuda" else None
    profile = measure(device, base, Reporter.silent(), repeats=5)
    figures = []
    for name, model in MODELS.items():
        measured = statistics.median(_pass_seconds(model, device) for _ in range(rounds + 1))
        forecast = forecast_seconds(model, profile)
        figures.append(
            Figure(
                f"forecast_pass_{_slug(name)}", forecast, "s", measured, f"measured, {device.type}", forecast / measured
            )
        )
    return figures


def forecast_seconds(model: ModelConfig, profile: Hardware) -> float:
    """Forecast of one process without optimizer."""
    sustained = FLOAT32 if profile.device.matmul_tflops < 50 else Sustained()
    step = StepModel(shape_of(model, VOCABULARY), Rates(profile, sustained), CPU_FLOAT32).step(
        Layout(micro_batch=SAMPLES), SAMPLES
    )
    return step.total - step.optimizer


def _pass_seconds(model: ModelConfig, device: torch.device) -> float:
    precision = "bf16" if device.type == "cuda" else "fp32"
    train = TrainConfig(tokens=1, batch_tokens=1, precision=precision, layout={"micro_batch": SAMPLES})
    parts = build_local_model(model, VOCABULARY, train, single_process(device), seed=1)
    passes = build_forward_backward(parts, RunConfig(model, train, 1), parts.stages[0].tensor.mesh, causal_loss())
    tokens = torch.randint(0, VOCABULARY, (SAMPLES, model.sequence_length), device=device)
    batch = {"tokens": tokens, "targets": tokens, "weights": torch.ones(tokens.shape, device=device)}

    def both() -> None:
        passes.train(batch, [1e-3])
        parts.clear_gradients()
        if device.type == "cuda":
            torch.cuda.synchronize()

    both()
    return wall_seconds(both) if device.type == "cuda" else cpu_seconds(both) / torch.get_num_threads()


def search_figure() -> Figure:
    """Seconds of a search for 3072 GPUs and a trillion parameters; the requirement is at most 2 seconds."""
    request = PlanRequest(named_shape("gpt-1t"), load_hardware("a100-80g"), 3072, 3072)
    return Figure(
        "search_3072_gpus_1t", statistics.median(wall_seconds(lambda: search(request)) for _ in range(3)), "s"
    )


def _slug(name: str) -> str:
    return "".join(c if c.isalnum() else "_" for c in name.lower()).strip("_").replace("__", "_")


if __name__ == "__main__":
    main()

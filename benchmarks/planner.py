"""The planner's forecasts beside published runs and beside what this machine measures; and how long a search takes.

Published: the five rows the three constants are fitted to, and rows they never saw. Measured: forward and backward of
small models on this machine, against the forecast from a profile that `gristmill calibrate` measures in the same run.
`ratio` of a forecast is forecast over published (or measured): 1 is a perfect forecast."""

import statistics
import time

import torch
from measure import Figure, arguments, cpu_seconds, print_figures
from rich.console import Console
from rich.table import Table

from gristmill.data_pipeline.engine.progress import Reporter
from gristmill.training.config import ModelConfig
from gristmill.training.measure import measure
from gristmill.training.model.transformer import Transformer
from gristmill.training.planner.calibrate import errors
from gristmill.training.planner.hardware import Hardware, load_hardware
from gristmill.training.planner.layout import Layout
from gristmill.training.planner.models import named_shape
from gristmill.training.planner.published import CALIBRATION, HELD_OUT
from gristmill.training.planner.rates import FITTED, Rates, Sustained
from gristmill.training.planner.search import Job, search
from gristmill.training.planner.shape import shape_of
from gristmill.training.planner.software import GRISTMILL, Software
from gristmill.training.planner.step_time import StepModel

MODELS = {
    "4 x 256": ModelConfig(layers=4, width=256, heads=4, context=256),
    "2 x 512": ModelConfig(layers=2, width=512, heads=8, context=256),
    "6 x 320": ModelConfig(layers=6, width=320, heads=5, context=512),
}
VOCABULARY, SAMPLES = 4096, 4


def main() -> None:
    options = arguments(__doc__ or "").parse_args()
    figures = published_figures()
    figures += measured_figures(rounds=2 if options.quick else 5)
    figures.append(search_figure())
    print_figures(figures)


def published_figures() -> list[Figure]:
    """Mean error of each table, in percent; the rows are printed."""
    table = Table("run", "published TFLOP/s", "forecast", "error", title="forecast beside published")
    figures = []
    for name, rows in {"calibration": CALIBRATION, **HELD_OUT}.items():
        found = errors(rows, FITTED)
        for row, error in zip(rows, found, strict=True):
            table.add_row(row.name, f"{row.tflops:.0f}", f"{row.tflops * (1 + error):.0f}", f"{error:+.1%}")
        table.add_section()
        mean = 100 * statistics.fmean(abs(error) for error in found)
        figures.append(Figure(f"forecast_error_{_slug(name)}", mean, "% mean"))
    Console(width=120).print(table)
    return figures


def measured_figures(rounds: int) -> list[Figure]:
    """Seconds of a forward and backward pass: measured here, and forecast from this machine's measured profile."""
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
    """One process, no optimizer. Eager fp32 on a CPU moves twice the bytes of the 16-bit passes that are counted."""
    eager = Software.model_validate(GRISTMILL.model_dump() | {"kernels": "eager", "loss": "whole"})
    sustained = Sustained(memory=0.5 if profile.device.matmul_tflops < 50 else 1.0)
    step = StepModel(shape_of(model, VOCABULARY), Rates(profile, sustained), eager).step(
        Layout(micro_batch=SAMPLES), SAMPLES
    )
    return step.total - step.optimizer


def _pass_seconds(model: ModelConfig, device: torch.device) -> float:
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    part = Transformer(model, VOCABULARY, dtype=dtype).to_empty(device=device).to(dtype)
    for parameter in part.parameters():
        torch.nn.init.normal_(parameter, std=0.02)
    tokens = torch.randint(0, VOCABULARY, (SAMPLES, model.context), device=device)
    weights = torch.ones(SAMPLES, model.context, device=device)
    part(tokens, tokens, weights)[:, 0].sum().backward()
    if device.type == "cpu":
        return cpu_seconds(lambda: part(tokens, tokens, weights)[:, 0].sum().backward()) / torch.get_num_threads()
    torch.cuda.synchronize()
    started = time.perf_counter()
    part(tokens, tokens, weights)[:, 0].sum().backward()
    torch.cuda.synchronize()
    return time.perf_counter() - started


def search_figure() -> Figure:
    """3072 GPUs, a trillion parameters: at most 2 seconds were asked for."""
    job = Job(named_shape("gpt-1t"), load_hardware("a100-80g"), 3072, 3072)
    return Figure("search_3072_gpus_1t", statistics.median(cpu_seconds(lambda: search(job)) for _ in range(3)), "s")


def _slug(name: str) -> str:
    return "".join(c if c.isalnum() else "_" for c in name.lower()).strip("_").replace("__", "_")


if __name__ == "__main__":
    main()

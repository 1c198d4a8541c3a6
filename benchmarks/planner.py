"""The planner's forecasts compared with published runs and with measurements on this machine; time of a search.

Published: the five rows the three constants are fitted to, tables they never saw, and what the paper of 2021 says of
its figures. Measured: forward and backward of small models, and steps of layouts on two processes of the engine, on
this machine, against the forecast from a profile that `gristmill calibrate`'s own functions measure in the same run, or
from one that the command wrote (--profile).
`ratio` of a forecast is forecast over published (or measured): 1 is a perfect forecast."""

import statistics
from pathlib import Path

import torch
from measure import Figure, arguments, print_figures, wall_seconds
from published.b200 import BLACKWELL
from published.claims import claims
from published.experts import EXPERTS_FITTED
from published.fit import errors, leave_one_out, print_fit, refit_spread
from published.h100 import LLM_C_RUN
from published.held_out import HELD_OUT
from published.megatron import CALIBRATION
from rich.console import Console
from rich.table import Table
from support.measured_forecasts import cuda_figures, forecast_figures

from gristmill.training.planner.hardware import FITTED, Hardware, load_hardware
from gristmill.training.planner.plan_request import PlanRequest, named_shape
from gristmill.training.planner.search import THROUGHPUT_ERROR, search


def main() -> None:
    parser = arguments(__doc__ or "")
    parser.add_argument("--fit", action="store_true", help="only fit the planner's three constants and print them")
    parser.add_argument("--measured", action="store_true", help="only forecasts beside measurements on this machine")
    parser.add_argument("--gpu", action="store_true", help="only forecasts beside measurements on the GPU")
    parser.add_argument("--others", action="store_true", help="measure other models besides")
    parser.add_argument(
        "--profile",
        type=Path,
        nargs="+",
        default=[],
        help="forecast from what `gristmill calibrate` wrote: with one process and, second, under torchrun with two",
    )
    options = parser.parse_args()
    if options.fit:
        print_fit()
        return
    if options.gpu:
        print_figures(device_figures(options.quick, load_hardware(options.profile[0]) if options.profile else None))
        return
    profiles = {processes: load_hardware(path) for processes, path in enumerate(options.profile[:2], start=1)}
    rounds = 3 if options.quick else 7
    figures = forecast_figures(rounds, profiles, options.others)
    if torch.cuda.is_available():
        figures += cuda_figures(rounds, None, torch.device("cuda"))
    if not options.measured:
        figures = published_figures() + figures + [search_figure()]
    print_figures(figures)


def device_figures(quick: bool, profile: Hardware | None) -> list[Figure]:
    """quick: on any device, and beside the forecast of an H100."""
    if quick:
        return cuda_figures(1, load_hardware("h100"), torch.device("cuda" if torch.cuda.is_available() else "cpu"))
    if not torch.cuda.is_available():
        raise SystemExit("planner: torch sees no GPU; --quick runs without one")
    return cuda_figures(5, profile, torch.device("cuda"))


def published_figures() -> list[Figure]:
    """Mean error of each table, in percent; the rows are printed."""
    table = Table("run", "published TFLOP/s", "forecast", "error", title="forecast beside published")
    figures = []
    fitted = {"calibration": CALIBRATION, "power of the H100": (LLM_C_RUN,), "routing": EXPERTS_FITTED}
    for name, rows in (fitted | HELD_OUT | BLACKWELL).items():
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

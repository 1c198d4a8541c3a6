"""Plot of throughput against the number of GPUs, with the best layout for each number."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from gristmill.foundation.errors import RecipeError
from gristmill.training.planner.plan_request import PlanRequest
from gristmill.training.planner.search import Forecast, search


def default_gpu_counts(gpus: int, node: int) -> list[int]:
    """Numbers of GPUs from one node up, doubling, up to gpus. 3072 of 8 -> 8, 16, ..., 2048, 3072."""
    counts, count = [], min(node, gpus)
    while count < gpus:
        counts.append(count)
        count *= 2
    return [*counts, gpus]


def throughput_by_gpus(request: PlanRequest, counts: Sequence[int]) -> list[tuple[int, Forecast | None]]:
    """(GPUs, best layout or None where nothing fits) for each number of GPUs, with the same batch."""
    curve: list[tuple[int, Forecast | None]] = []
    for count in counts:
        plan = search(replace(request, gpus=count))
        curve.append((count, plan.ranked[0] if plan.ranked else None))
    return curve


def plot_throughput(request: PlanRequest, curve: Sequence[tuple[int, Forecast | None]], path: Path) -> None:
    """Writes an image (png, svg or pdf, by the path's ending)."""
    # matplotlib is slow to load and used here only.
    from matplotlib.figure import Figure

    points = [(count, best) for count, best in curve if best is not None]
    if not points:
        raise RecipeError("the model fits on none of the numbers of GPUs, so there is nothing to plot")
    figure = Figure(figsize=(9, 6))
    axes = figure.subplots()
    axes.plot([c for c, _ in points], [b.tokens_per_second for _, b in points], marker="o")
    first = points[0]
    axes.plot(
        [c for c, _ in points],
        [first[1].tokens_per_second * c / first[0] for c, _ in points],
        linestyle=":",
        label="linear from the first",
    )
    for count, best in points:
        axes.annotate(
            _short(best), (count, best.tokens_per_second), textcoords="offset points", xytext=(6, -12), fontsize=7
        )
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.set_xlabel(f"GPUs ({request.hardware.name})")
    axes.set_ylabel("tokens per second")
    axes.legend()
    figure.savefig(path, metadata={"Date": None} if path.suffix == ".svg" else None)


def _short(best: Forecast) -> str:
    layout = best.layout
    return f"t{layout.tensor} p{layout.pipeline} d{layout.data} b{layout.micro_batch}\n{best.mfu:.0%} MFU"

"""Transfer: how far the best learning rate moves over three doublings of width and two of depth.

    python benchmarks/transfer.py [--results FOLDER] [--seeds 2] [--only muon adamw]

The recipe that `gristmill init` writes, and the same with AdamW for all parameters, at widths 24 to 192 of depth 2 and
depths 2 to 8 of width 48: heads of 24, a vocabulary of 2,048, 0.12 M tokens of books in steps of 1,024 (120 steps),
float32 on one thread. All rates of a size are multiplied by the best multiple of the size before (1 at first), half and
twice that, and on while the end of the grid is best with the first seed. More seeds take the best multiple and its two
neighbours. The best rate is the least of the parabola through these three losses over log2 of the multiple; rates that
transfer have the same at every size.

A figure is the largest distance between two sizes' best rates (means over the seeds) in grid steps, factors of 2; its
peer is the one step that was asked for. The unit has the slope per doubling of the line through all sizes and seeds,
with Student's interval of 95 %. About half an hour of one core. Runs are kept in --results, so that a stopped program
goes on."""

import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from measure import Figure, arguments, print_figures
from recipes import SHARED, Text, Written, kept, text, train_ours
from rich.console import Console
from rich.table import Table
from scipy.stats import linregress
from scipy.stats import t as student

from gristmill.pipelines.init.dial import ModelSize

HEAD_WIDTH, BATCH, SAMPLES = 24, 4, 480
WIDTHS, DEPTHS = (24, 48, 96, 192), (2, 4, 8)  # the MLP of each width is exactly 8/3 as wide
WIDTH_OF_DEPTHS, DEPTH_OF_WIDTHS = 48, 2
OPTIMIZERS = ("muon", "adamw")
MAX_RATES = 7


@dataclass(frozen=True)
class Shape(ModelSize):
    """A size whose width does not follow from its depth."""

    model_width: int

    @property
    def width(self) -> int:
        return self.model_width

    @property
    def fields(self) -> dict[str, Any]:
        return super().fields | {"heads": self.width // HEAD_WIDTH}


def shape(width: int, depth: int) -> Shape:
    return Shape(depth, 2048, 256, width)


def changes_of(optimizer: str, size: Shape) -> dict[str, dict[str, Any]]:
    """Changes of init's recipe, by section."""
    if optimizer == "muon":
        return {}
    return {"optimizer": {"name": "adamw", "learning_rate": 0.008 * (128 / size.width) ** 0.5}}


class Sweep:
    """Final held-out bits per byte by optimizer, size, multiple of the rates and seed, kept in a folder."""

    def __init__(self, data: Text, folder: Path, samples: int):
        self.data, self.folder, self.samples = data, folder, samples

    def loss(self, optimizer: str, size: Shape, rate: float, seed: int) -> float:
        name = f"{optimizer}-width-{size.width}-depth-{size.depth}-{rate:g}-{seed}-{self.samples}"
        recipe = Written(size, changes_of(optimizer, size), evaluations=1)
        steps = self.samples // BATCH
        return kept(self.folder, name, partial(train_ours, self.data, seed, rate, BATCH, steps, recipe=recipe)).bits[-1]


def grid_of_rates(loss: Callable[[float], float], center: float) -> dict[float, float]:
    """Loss by multiple of the rates, around `center`; the grid grows while its end is best."""
    losses = {rate: loss(rate) for rate in (center / 2, center, center * 2)}
    while (best := min(losses, key=losses.__getitem__)) in (min(losses), max(losses)) and len(losses) < MAX_RATES:
        rate = best / 2 if best == min(losses) else best * 2
        losses[rate] = loss(rate)
    return dict(sorted(losses.items()))


@dataclass(frozen=True)
class Measured:
    """grid: losses of the first seed by multiple. by_seed: those of its best multiple and the two neighbours."""

    size: Shape
    grid: dict[float, float]
    by_seed: list[dict[float, float]]

    @property
    def best_rates(self) -> list[float]:
        """log2 of the best multiple, by seed."""
        return [best_rate(losses) for losses in self.by_seed]


def measure(
    loss: Callable[[Shape, float, int], float], shapes: Sequence[Shape], seeds: Sequence[int]
) -> list[Measured]:
    """The sizes in order; the grid of each begins around the best multiple of the one before. loss: of a size,
    multiple and seed."""
    sizes: list[Measured] = []
    best = 1.0
    for size in shapes:

        def loss_of_rate(rate: float, size: Shape = size) -> float:
            return loss(size, rate, seeds[0])

        grid = grid_of_rates(loss_of_rate, best)
        best = min(grid, key=grid.__getitem__)
        by_seed = [{rate: loss(size, rate, seed) for rate in (best / 2, best, best * 2)} for seed in seeds]
        sizes.append(Measured(size, grid, by_seed))
    return sizes


def best_rate(losses: Mapping[float, float]) -> float:
    """log2 of the multiple at the least of the parabola through three losses, whose rates go by factors of 2.

    Losses 1.25, 1, 1.75 at 1/2, 1, 2: -0.25, as (1.25 - 1.75) / (2 x (1.25 + 1.75 - 2)). Where no parabola opens
    upwards, the multiple with the least loss."""
    (_, below), (middle, center), (_, above) = sorted(losses.items())
    curvature = below + above - 2 * center
    if curvature <= 0:
        return math.log2(min(losses, key=losses.__getitem__))
    return math.log2(middle) + (below - above) / (2 * curvature)


def slope_per_doubling(sizes: Sequence[float], best: Sequence[Sequence[float]]) -> tuple[float, float]:
    """(slope in grid steps, half of its interval of 95 %): least squares through the best rates of all sizes and seeds.
    Best rates [0, 0], [-0.5, -0.5], [-1, -1] at widths 32, 64, 128: (-0.5, 0)."""
    points = [(math.log2(size), rate) for size, rates in zip(sizes, best, strict=True) for rate in rates]
    fitted = linregress(*zip(*points, strict=True))
    return float(fitted.slope), float(fitted.stderr * student.ppf(0.975, len(points) - 2))


def figure(measured: Sequence[Measured], optimizer: str, axis: str) -> Figure:
    """Prints losses and best rates of the sizes. axis: width or depth, which the sizes differ in."""
    table = Table("optimizer", "width", "depth", "bits per byte by multiple of the rates", "best multiple", "by seed")
    for part in measured:
        means = {rate: statistics.mean(losses[rate] for losses in part.by_seed) for rate in part.by_seed[0]}
        losses = ", ".join(f"{rate:g}: {means.get(rate, loss):.4f}" for rate, loss in part.grid.items())
        best = f"{2 ** statistics.mean(part.best_rates):.2f}"
        seeds = ", ".join(f"{2**rate:.2f}" for rate in part.best_rates)
        table.add_row(optimizer, f"{part.size.width}", f"{part.size.depth}", losses, best, seeds)
    Console(width=140).print(table)
    rates = [part.best_rates for part in measured]
    slope, half = slope_per_doubling([getattr(part.size, axis) for part in measured], rates)
    means_of_sizes = [statistics.mean(values) for values in rates]
    distance = max(means_of_sizes) - min(means_of_sizes)
    unit = f"grid steps of 2, the farthest of {len(rates)} sizes; {slope:+.2f} +- {half:.2f} a doubling"
    return Figure(f"transfer_{axis}_{optimizer}", distance, unit, 1.0, "asked", 1.0 / distance, 1.0)


def main() -> None:
    parser = arguments(__doc__ or "")
    parser.add_argument("--results", type=Path, default=Path("work/transfer"), help="folder that keeps each run")
    parser.add_argument("--seeds", type=int, default=2, choices=(2, 3), help="how many")
    parser.add_argument("--only", nargs="*", choices=OPTIMIZERS, default=OPTIMIZERS, help="optimizers")
    options = parser.parse_args()
    torch.set_num_threads(1)
    options.results.mkdir(parents=True, exist_ok=True)
    data = text(options.data or SHARED)
    sweep = Sweep(data, options.results, 160 if options.quick else SAMPLES)
    widths, depths = (WIDTHS[:2], DEPTHS[:2]) if options.quick else (WIDTHS, DEPTHS)
    axes = {
        "width": [shape(width, DEPTH_OF_WIDTHS) for width in widths],
        "depth": [shape(WIDTH_OF_DEPTHS, depth) for depth in depths],
    }
    seeds = range(1, 1 + (2 if options.quick else options.seeds))
    lines = [
        figure(measure(partial(sweep.loss, optimizer), shapes, seeds), optimizer, axis)
        for optimizer in options.only
        for axis, shapes in axes.items()
    ]
    print_figures(lines)


if __name__ == "__main__":
    main()

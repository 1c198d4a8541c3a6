"""The report's figures: matplotlib to deterministic SVG.

matplotlib is imported when the first figure is drawn, so that the command line starts quickly."""

import io
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from gristmill.data_pipeline.corpus.document_history import REWRITING
from gristmill.pipelines.report.flow import themed
from gristmill.pipelines.report.render import Block, Figure

SIZE_INCHES = (8.0, 3.4)
MIN_LOG_RATIO = 200.0
MAX_SERIES_INSIDE = 5  # a longer legend is beside the plot
RC: dict[Any, Any] = {
    "svg.hashsalt": "gristmill",
    "svg.fonttype": "path",
    "font.size": 9,
    "axes.spines.top": False,
    "axes.spines.right": False,
}


def curves(
    series: Mapping[str, tuple[Sequence[float], Sequence[float]]],
    x_label: str,
    y_label: str,
    colors: Mapping[str, str] | None = None,
    bands: Mapping[str, tuple[Sequence[float], Sequence[float]]] | None = None,
) -> bytes:
    """A line plot. series: name -> (x values, y values). colors: of some of them. bands: name -> (lowest, highest y
    values), drawn around its line."""
    with _canvas() as (canvas, axes):
        for name, (x_values, y_values) in series.items():
            (line,) = axes.plot(
                x_values,
                y_values,
                label=name,
                linewidth=1.2,
                marker="o" if len(x_values) < 30 else None,
                markersize=3,
                color=(colors or {}).get(name),
            )
            if bands is not None and name in bands:
                axes.fill_between(x_values, *bands[name], color=line.get_color(), alpha=0.2, linewidth=0)
        axes.set_xlabel(x_label)
        axes.set_ylabel(y_label)
        axes.grid(alpha=0.25)
        if len(series) > MAX_SERIES_INSIDE:
            axes.legend(frameon=False, bbox_to_anchor=(1.0, 1.0), loc="upper left", fontsize=7)
        elif len(series) > 1:
            axes.legend(frameon=False)
        return _svg(canvas)


def histogram(
    kept: Sequence[float], failing: Sequence[float], threshold: float | None, x_label: str, bins: int = 60
) -> bytes:
    """A stacked histogram of a signal for kept and failing documents, with the threshold as a line.

    At least one of the two has values. The axis is logarithmic if all values are positive and span MIN_LOG_RATIO."""
    with _canvas(height=2.2) as (canvas, axes):
        edges, is_log = bin_edges([*kept, *failing], threshold, bins)
        drawn = [series for series in ((kept, "C0", "kept"), (failing, "C3", "failing")) if len(series[0])]
        values, colors, labels = (list(column) for column in zip(*drawn, strict=True))
        axes.hist(values, bins=edges, color=colors, alpha=0.85, stacked=True, label=labels)
        if threshold is not None:
            axes.axvline(threshold, color="black", linewidth=1.2, linestyle="--", label=f"threshold {threshold:g}")
        if is_log:
            axes.set_xscale("log")
        axes.set_xlabel(x_label)
        axes.set_ylabel("documents")
        axes.set_yscale("symlog")
        axes.legend(frameon=False, bbox_to_anchor=(1.0, 1.0), loc="upper left", fontsize=8)
        return _svg(canvas)


def sorted_bars(bars: Sequence[tuple[str, str, float, float | None]], x_label: str) -> bytes:
    """Horizontal bars from top to bottom in the given order, coloured by group, with a mark at the chance level.

    bars: (name, group, value, chance)."""
    groups = sorted({group for _, group, _, _ in bars})
    with _canvas(height=0.8 + 0.2 * len(bars)) as (canvas, axes):
        for group, color in zip(groups, _distinct_colors(len(groups)), strict=True):
            places = [place for place, bar in enumerate(bars) if bar[1] == group]
            axes.barh(places, [bars[place][2] for place in places], color=color, label=group, height=0.7)
        known = [(bar[3], place) for place, bar in enumerate(bars) if bar[3] is not None]
        if known:
            axes.plot(*zip(*known, strict=True), "|", color="black", markersize=9, label="chance")
        axes.set_yticks(range(len(bars)), [bar[0] for bar in bars])
        axes.invert_yaxis()
        axes.set_xlabel(x_label)
        axes.grid(axis="x", alpha=0.25)
        axes.legend(frameon=False, bbox_to_anchor=(1.0, 1.0), loc="upper left", fontsize=8)
        return _svg(canvas)


def small_multiples(
    panels: Sequence[tuple[str, Sequence[float], Sequence[float]]], x_label: str, y_label: str, columns: int = 5
) -> bytes:
    """A grid of small line plots with common axes. panels: (title, x values, y values)."""
    import matplotlib
    from matplotlib.figure import Figure as Canvas

    rows = -(-len(panels) // columns)
    with matplotlib.rc_context(RC):
        canvas = Canvas(figsize=(SIZE_INCHES[0], 0.5 + 1.3 * rows), layout="constrained")
        grid = canvas.subplots(rows, columns, sharex=True, sharey=True, squeeze=False).flatten()
        for axes, (title, x_values, y_values) in zip(grid, panels, strict=False):
            axes.plot(x_values, y_values, linewidth=1.2, marker="o", markersize=2)
            axes.set_title(title, fontsize=7)
            axes.grid(alpha=0.25)
        for axes in grid[len(panels) :]:
            axes.set_axis_off()
        canvas.supxlabel(x_label)
        canvas.supylabel(y_label)
        return _svg(canvas)


def bin_edges(values: Sequence[float], threshold: float | None, bins: int) -> tuple[list[float], bool]:
    """(edges, whether they are logarithmic). Integers in a small range get one bin each."""
    points = [*values, *([] if threshold is None else [threshold])]
    low, high = min(points), max(points)
    if all(value == int(value) for value in points) and high - low < bins:
        return [low - 0.5 + step for step in range(int(high - low) + 2)], False
    if low > 0 and high / low > MIN_LOG_RATIO:
        return [low * (high / low) ** (step / bins) for step in range(bins)] + [high], True
    if high == low:
        return [low - 0.5, low + 0.5], False
    return [low + (high - low) * step / bins for step in range(bins)] + [high], False


def _distinct_colors(number: int) -> list[Any]:
    import matplotlib

    for name, colors in (("tab10", 10), ("tab20", 20)):
        if number <= colors:
            return [matplotlib.colormaps[name](place) for place in range(number)]
    return [matplotlib.colormaps["turbo"](place / (number - 1)) for place in range(number)]


@contextmanager
def _canvas(height: float = SIZE_INCHES[1]) -> Iterator[tuple[Any, Any]]:
    """A matplotlib figure and its axes with the report's style."""
    import matplotlib
    from matplotlib.figure import Figure as Canvas

    with matplotlib.rc_context(RC):
        canvas = Canvas(figsize=(SIZE_INCHES[0], height), layout="constrained")
        yield canvas, canvas.add_subplot()


def _svg(canvas: Any) -> bytes:
    buffer = io.BytesIO()
    canvas.savefig(buffer, format="svg", metadata={"Date": None, "Creator": None}, transparent=True)
    return themed(buffer.getvalue())


# Histograms of each rule's signal for kept and failing documents, with the threshold.


def histogram_block(
    rule: str, rules: Mapping[str, list[dict[str, Any]]], ledger: pa.Table, folder: Path
) -> list[Block]:
    """The histogram of the rule's signal for kept and failing documents, with the threshold."""
    described = next((entry for group in rules.values() for entry in group if entry["rule"] == rule), None)
    if described is None:
        return step_histogram(rule, ledger, folder)
    sources = [source for source, group in rules.items() if any(entry["rule"] == rule for entry in group)]
    kept = signal_values(described["signal"], folder, sources)
    flat = pa.chunked_array(pc.list_flatten(ledger.column("failed")))
    fails = flat.filter(pc.equal(pc.struct_field(flat, "rule"), rule))
    thresholds = {entry["threshold"] for group in rules.values() for entry in group if entry["rule"] == rule}
    limits = " or ".join(f"{value:g}" for value in sorted(thresholds))
    label = f"{described['signal']} (kept if {described['keep']} {limits}; {described['source']})"
    failing = finite(pc.struct_field(fails, "value").to_numpy())
    return histogram_figure(rule, kept, failing, described["threshold"] if len(thresholds) == 1 else None, label)


def step_histogram(step: str, ledger: pa.Table, folder: Path) -> list[Block]:
    """For a step after the filters: similarity to the kept document, or the quality score."""
    removed = ledger.filter(pc.equal(ledger.column("step"), step))
    values = finite(removed.column("value").to_numpy())
    thresholds = np.unique(removed.column("threshold").to_numpy())
    if step in REWRITING or len(np.unique(values)) < 2:  # exact copies: each has similarity 1
        return []
    threshold = float(thresholds[0]) if len(thresholds) == 1 else None
    if step == "quality":
        scored = removed.column("source").unique().to_pylist()
        return histogram_figure(
            step, signal_values("quality_score", folder, scored), values, threshold, "quality_score"
        )
    return histogram_figure(step, np.empty(0), values, threshold, "similarity to the kept document")


def histogram_figure(
    name: str, kept: np.ndarray, failing: np.ndarray, threshold: float | None, label: str
) -> list[Block]:
    """The figure, clipped at the 0.999 quantile of the kept values or the threshold, whichever is larger."""
    if not len(kept) + len(failing):
        return []
    if len(kept):
        limit = max(np.quantile(kept, 0.999), -np.inf if threshold is None else threshold)
        kept = kept[kept <= limit]
    svg = histogram(kept.tolist(), failing.tolist(), threshold, label)
    return [Figure(f"rule-{name}", svg, f"{name}: {len(kept):,} kept, {len(failing):,} failing documents")]


def signal_values(signal: str, folder: Path, sources: Collection[str]) -> np.ndarray:
    """The signal of every kept document of these sources."""
    kept = [
        pq.read_table(path, columns=[signal]).column(0).to_numpy()
        for path in sorted((folder / "signals").rglob("*.parquet"))
        if path.stem.rpartition("-")[0] in sources and signal in pq.read_schema(path).names
    ]
    return finite(np.concatenate([np.empty(0), *kept]))


def finite(values: np.ndarray) -> np.ndarray:
    floats = values.astype(np.float64)
    return floats[np.isfinite(floats)]

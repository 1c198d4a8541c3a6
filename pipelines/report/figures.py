"""The report's figures, drawn by matplotlib to SVG with the same bytes every time."""

import io
from collections.abc import Mapping, Sequence
from typing import Any

import matplotlib
from matplotlib.figure import Figure as Canvas

SIZE_INCHES = (8.0, 3.4)
RC: dict[Any, Any] = {
    "svg.hashsalt": "gristmill",
    "svg.fonttype": "path",
    "font.size": 9,
    "axes.spines.top": False,
    "axes.spines.right": False,
}


def curves(series: Mapping[str, tuple[Sequence[float], Sequence[float]]], x_label: str, y_label: str) -> bytes:
    """One line a series: name -> (x values, y values)."""
    with matplotlib.rc_context(RC):
        canvas, axes = _canvas()
        for name, (x_values, y_values) in series.items():
            axes.plot(
                x_values, y_values, label=name, linewidth=1.2, marker="o" if len(x_values) < 30 else None, markersize=3
            )
        axes.set_xlabel(x_label)
        axes.set_ylabel(y_label)
        axes.grid(alpha=0.25)
        if len(series) > 1:
            axes.legend(frameon=False)
        return _svg(canvas)


def stacked_bars(labels: Sequence[str], parts: Mapping[str, Sequence[float]], x_label: str) -> bytes:
    """A bar a label, cut into parts: what became of each source's documents."""
    with matplotlib.rc_context(RC):
        canvas, axes = _canvas(height=0.9 + 0.45 * len(labels))
        start = [0.0] * len(labels)
        for index, (name, values) in enumerate(parts.items()):
            axes.barh(labels, values, left=start, label=name, color=f"C{index % 10}", height=0.62)
            start = [before + value for before, value in zip(start, values, strict=True)]
        axes.invert_yaxis()
        axes.set_xlabel(x_label)
        axes.legend(frameon=False, bbox_to_anchor=(1.0, 1.0), loc="upper left", fontsize=8)
        return _svg(canvas)


def histogram(values: Sequence[float], threshold: float | None, x_label: str, bins: int = 60) -> bytes:
    """How a signal is distributed, with the rule's threshold drawn in."""
    with matplotlib.rc_context(RC):
        canvas, axes = _canvas(height=2.2)
        axes.hist(values, bins=bins, color="C0", alpha=0.85)
        if threshold is not None:
            axes.axvline(threshold, color="C3", linewidth=1.4)
        axes.set_xlabel(x_label)
        axes.set_ylabel("documents")
        axes.set_yscale("symlog")
        return _svg(canvas)


def _canvas(height: float = SIZE_INCHES[1]) -> tuple[Canvas, matplotlib.axes.Axes]:
    canvas = Canvas(figsize=(SIZE_INCHES[0], height), layout="constrained")
    return canvas, canvas.add_subplot()


def _svg(canvas: Canvas) -> bytes:
    buffer = io.BytesIO()
    canvas.savefig(buffer, format="svg", metadata={"Date": None, "Creator": None})
    return buffer.getvalue()

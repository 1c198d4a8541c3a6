"""Plot of scores over a training run."""

import io
from collections.abc import Mapping, Sequence
from typing import Any

COLUMNS = 3


def curve_svg(points: Sequence[Mapping[str, Any]]) -> str:
    """One panel a task and metric: the score with its standard error by tokens seen (by step where they are not known),
    and chance as a dashed line. The same points give the same bytes."""
    import matplotlib  # imported here: it would slow down the command line
    from matplotlib.figure import Figure

    panels: dict[tuple[str, str], list[Mapping[str, Any]]] = {}
    for point in points:
        panels.setdefault((point["task"], point["metric"]), []).append(point)
    rows = -(-len(panels) // COLUMNS)
    with matplotlib.rc_context({"svg.hashsalt": "gristmill", "font.size": 8}):
        figure = Figure(figsize=(4 * min(COLUMNS, len(panels)), 2.6 * rows), layout="constrained")
        for index, ((task, metric), found) in enumerate(panels.items(), start=1):
            axes = figure.add_subplot(rows, min(COLUMNS, len(panels)), index)
            known = all(point["tokens"] is not None for point in found)
            places = [point["tokens"] / 1e6 if known else point["step"] for point in found]
            scores = [point["score"] for point in found]
            axes.errorbar(
                places, scores, [point["error"] or 0.0 for point in found], marker="o", markersize=3, capsize=2
            )
            if found[0]["chance"] is not None:
                axes.axhline(found[0]["chance"], linestyle="--", linewidth=0.8, color="gray")
            axes.set(title=f"{task}: {metric}", xlabel="million tokens" if known else "step")
        drawn = io.StringIO()
        figure.savefig(drawn, format="svg", metadata={"Date": None})
    return drawn.getvalue()

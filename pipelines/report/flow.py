"""A Sankey diagram of documents through the curation steps, as plain SVG.

Every source is a band from left to right whose height is its number of documents; removed documents leave downwards at
their step, kept ones end in a split. Equal numbers give equal bytes, and every name is escaped."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape
from typing import Any

from gristmill.data_pipeline.corpus.counts import rule_order
from gristmill.data_pipeline.corpus.splits import SPLITS
from gristmill.pipelines.report.render import visible

COLORS = ("#4477aa", "#ee8866", "#228833", "#aa3377", "#66ccee", "#ccbb44", "#999933", "#bbbbbb")  # Paul Tol, bright
INK, DIM = "var(--ink)", "var(--dim)"
WIDTH, LEFT, RIGHT, TOP, BAND, GAP, BOTTOM = 960.0, 12.0, 118.0, 64.0, 170.0, 56.0, 52.0
NODE = 7.0  # width of a node
MIN_HEIGHT = 1.0  # minimum height of a visible band


# Colours of text and lines in a figure, which follow the reader's light or dark mode, also inside <img>.
THEME = (
    b"<style>svg { --ink: #1d2327; --dim: #5b666e; fill: var(--ink); } "
    b"@media (prefers-color-scheme: dark) { svg { --ink: #e4e8ea; --dim: #9aa5ad; } }</style>"
)


def themed(svg: bytes) -> bytes:
    """The figure with its black (matplotlib's and the default) as the colour of text of the reader's mode."""
    svg = re.sub(rb"(?<=[ :\"])(?:#000000|black)(?=[;\"])", b"var(--ink)", svg)
    start = svg.index(b">", svg.index(b"<svg")) + 1
    return svg[:start] + b"\n" + THEME + svg[start:]


def source_colors(sources: Sequence[str]) -> dict[str, str]:
    """The colour of each source, the same in all figures."""
    return {source: COLORS[index % len(COLORS)] for index, source in enumerate(sources)}


@dataclass(frozen=True)
class Flow:
    """removed: step -> source -> documents removed, in the steps' order. ends: split -> source -> documents kept."""

    sources: tuple[str, ...]
    read: Mapping[str, int]
    removed: Mapping[str, Mapping[str, int]]
    ends: Mapping[str, Mapping[str, int]]


def flow_svg(flow: Flow) -> bytes:
    """The SVG. Raises ValueError unless read = removed + kept for every source."""
    for source in flow.sources:
        gone = sum(by_source.get(source, 0) for by_source in (*flow.removed.values(), *flow.ends.values()))
        if gone != flow.read[source]:
            raise ValueError(f"{source}: {flow.read[source]} documents read, {gone} removed or kept")
    total = max(sum(flow.read.values()), 1)
    scale = BAND / total
    names = list(flow.removed)
    step_width = (WIDTH - LEFT - RIGHT) / (len(names) + 1)
    sink_top = TOP + BAND + GAP
    shapes: list[str] = []
    texts = [_legend(flow.sources), _text(LEFT, TOP - 8, f"read {total:,}" if flow.read else "read 0")]
    remaining = dict(flow.read)
    lowest = sink_top
    for place, name in enumerate(names):
        x, removed = LEFT + place * step_width, flow.removed[name]
        shapes += _rects(x, _stack(flow.sources, remaining, TOP, scale))
        bottom, ribbons = _step_ribbons((x, sink_top), step_width, flow.sources, remaining, removed, scale)
        shapes += ribbons
        lowest = max(lowest, bottom)
        texts += _step_label(x + step_width / 2, bottom + 13, name, sum(removed.values()), total)
        remaining = {source: remaining[source] - removed.get(source, 0) for source in flow.sources}
    x = LEFT + len(names) * step_width
    shapes += _rects(x, _stack(flow.sources, remaining, TOP, scale))
    ends, labels, end_bottom = _ends(x, WIDTH - RIGHT, flow, scale)
    height = max(lowest + BOTTOM, end_bottom + 20)
    return themed(
        (
            f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH:.0f}" height="{height:.0f}" '
            f'viewBox="0 0 {WIDTH:.0f} {height:.0f}" font-family="sans-serif" font-size="11">\n'
            + "\n".join([*shapes, *ends, *texts, *labels])
            + "\n</svg>\n"
        ).encode()
    )


Point = tuple[float, float]  # x, y in pixels
Bands = dict[str, tuple[float, float]]  # source -> (top, height)


def _stack(sources: Sequence[str], documents: Mapping[str, int], top: float, scale: float) -> Bands:
    bands: Bands = {}
    for source in sources:
        height = documents.get(source, 0) * scale
        bands[source] = (top, height)
        top += height
    return bands


def _step_ribbons(
    corner: Point,
    step_width: float,
    sources: Sequence[str],
    remaining: Mapping[str, int],
    removed: Mapping[str, int],
    scale: float,
) -> tuple[float, list[str]]:
    """(bottom of the step's sink, ribbons): from the step to the next node, and from the step to its sink.

    corner: left edge of the step and top of its sink."""
    x, sink_top = corner
    before = _stack(sources, remaining, TOP, scale)
    after = _stack(sources, {source: remaining[source] - removed.get(source, 0) for source in sources}, TOP, scale)
    sink_x = x + step_width / 2
    at, shapes = sink_top, []
    for index, source in enumerate(sources):
        top, height = before[source]
        next_top, next_height = after[source]
        color = COLORS[index % len(COLORS)]
        shapes.append(_ribbon((x + NODE, top), (x + step_width, next_top), next_height, color, 0.45))
        if removed.get(source, 0):
            thick = height - next_height
            shapes.append(_ribbon((x + NODE, top + next_height), (sink_x, at), thick, color, 0.28))
            drawn_height = max(thick, MIN_HEIGHT)
            shapes.append(_rect(sink_x, at, drawn_height, color))
            at += drawn_height
    return at, shapes


def _ends(x: float, end_x: float, flow: Flow, scale: float) -> tuple[list[str], list[str], float]:
    """(ribbons and nodes of the splits, labels, bottom of the last node)."""
    shapes, labels = [], []
    left = _stack(
        flow.sources,
        {s: sum(by_source.get(s, 0) for by_source in flow.ends.values()) for s in flow.sources},
        TOP,
        scale,
    )
    start = {source: top for source, (top, _) in left.items()}
    at = TOP
    for split, documents in flow.ends.items():
        first = at
        for index, source in enumerate(flow.sources):
            height = documents.get(source, 0) * scale
            color = COLORS[index % len(COLORS)]
            if height:
                shapes.append(_ribbon((x + NODE, start[source]), (end_x, at), height, color, 0.45))
                shapes.append(_rect(end_x, at, max(height, MIN_HEIGHT), color))
            start[source] += height
            at += max(height, MIN_HEIGHT) if height else 0.0
        labels.append(
            _text(end_x + NODE + 5, max((first + at) / 2 + 4, first + 10), f"{split} {sum(documents.values()):,}")
        )
        at = max(at, first + 8) + 12
    return shapes, labels, at


def _legend(sources: Sequence[str]) -> str:
    pieces, x = [], LEFT
    for index, source in enumerate(sources):
        pieces.append(f'<rect x="{x:.1f}" y="12" width="10" height="10" fill="{COLORS[index % len(COLORS)]}"/>')
        pieces.append(_text(x + 15, 21, source))
        x += 30 + 6.6 * len(source)
    return "\n".join(pieces)


def _step_label(x: float, y: float, name: str, documents: int, total: int) -> list[str]:
    """The name, wrapped after an underscore if long, and the number and share of documents the step removed."""
    head, underscore, tail = name.partition("_")
    lines = [head + underscore, tail] if tail and len(name) > 12 else [name]
    lines.append(f"−{documents:,} ({100 * documents / total:.1f} %)")
    return [
        _text(x, y + 13 * row, line, DIM if row + 1 == len(lines) else INK, "middle") for row, line in enumerate(lines)
    ]


def _rects(x: float, bands: Bands) -> list[str]:
    return [
        _rect(x, top, height, COLORS[index % len(COLORS)])
        for index, (top, height) in enumerate(bands.values())
        if height
    ]


def _rect(x: float, y: float, height: float, color: str) -> str:
    return f'<rect x="{x:.1f}" y="{y:.1f}" width="{NODE:.1f}" height="{height:.1f}" fill="{color}"/>'


def _ribbon(start: Point, end: Point, height: float, color: str, opacity: float) -> str:
    if not height:
        return ""
    (x, y), (to_x, to_y) = start, end
    height, middle = max(height, MIN_HEIGHT), (x + to_x) / 2
    return (
        f'<path d="M{x:.1f},{y:.1f} C{middle:.1f},{y:.1f} {middle:.1f},{to_y:.1f} {to_x:.1f},{to_y:.1f} '
        f"L{to_x:.1f},{to_y + height:.1f} C{middle:.1f},{to_y + height:.1f} {middle:.1f},{y + height:.1f} "
        f'{x:.1f},{y + height:.1f} Z" fill="{color}" fill-opacity="{opacity}"/>'
    )


def _text(x: float, y: float, text: str, color: str = INK, anchor: str = "start") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" style="fill:{color}" text-anchor="{anchor}">{escape(visible(text))}</text>'


# The curation steps in order, and the documents of each source that each step removed.


def flow_of(counts: Mapping[str, Any]) -> Flow:
    """Quarantine first, then the filters in the recipe's order, then the steps after them."""
    sources = counts["sources"]
    removed: dict[str, dict[str, int]] = {}
    for source, entry in sources.items():
        for label, gone in entry["removed"].items():
            step = removed.setdefault(label.partition(".")[0], {})
            step[source] = step.get(source, 0) + gone["documents"]
    order = dict.fromkeys(rule.partition(".")[0] for rule in rule_order(counts))
    ends = {
        split: {source: entry["kept"].get(split, {"documents": 0})["documents"] for source, entry in sources.items()}
        for split in SPLITS
    }
    quarantined = {
        source: sum(count["documents"] for count in entry["quarantined"].values()) for source, entry in sources.items()
    }
    steps = {"quarantine": quarantined} if any(quarantined.values()) else {}
    steps |= {step: removed[step] for step in order if step in removed}
    # a split document counts once per piece, from the start of the diagram
    read = {source: sum(count.get(source, 0) for count in (*steps.values(), *ends.values())) for source in sources}
    return Flow(tuple(sources), read, steps, ends)

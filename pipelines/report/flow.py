"""Documents on their way through the steps, drawn as bands whose height is their number: a Sankey diagram in plain SVG.

Every source is a band that runs from left to right; what a step takes leaves it downwards, what stays ends in a split.
Our own drawing: equal numbers give equal bytes, and every name is escaped."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape

COLORS = ("#4477aa", "#ee8866", "#228833", "#aa3377", "#66ccee", "#ccbb44", "#999933", "#bbbbbb")  # Paul Tol, bright
INK, DIM = "#1d2327", "#5b666e"
WIDTH, LEFT, RIGHT, TOP, BAND, GAP, BOTTOM = 960.0, 12.0, 118.0, 64.0, 170.0, 56.0, 52.0
NODE = 7.0  # width of a node
LEAST = 1.0  # height of what would be too thin to see


@dataclass(frozen=True)
class Flow:
    """taken: step -> source -> documents it took, in the steps' order. ends: split -> source -> documents kept."""

    sources: tuple[str, ...]
    read: Mapping[str, int]
    taken: Mapping[str, Mapping[str, int]]
    ends: Mapping[str, Mapping[str, int]]


def flow_svg(flow: Flow) -> bytes:
    """The picture. Raises ValueError if what was read is not what was taken and kept: it would show a lie."""
    for source in flow.sources:
        gone = sum(each.get(source, 0) for each in (*flow.taken.values(), *flow.ends.values()))
        if gone != flow.read[source]:
            raise ValueError(f"{source}: {flow.read[source]} documents read, {gone} in the picture")
    total = max(sum(flow.read.values()), 1)
    scale = BAND / total
    names = list(flow.taken)
    step_width = (WIDTH - LEFT - RIGHT) / (len(names) + 1)
    sink_top = TOP + BAND + GAP
    shapes: list[str] = []
    texts = [_legend(flow.sources), _text(LEFT, TOP - 8, f"read {total:,}" if flow.read else "read 0")]
    alive = dict(flow.read)
    lowest = sink_top
    for place, name in enumerate(names):
        x, taken = LEFT + place * step_width, flow.taken[name]
        shapes += _rects(x, _stack(flow.sources, alive, TOP, scale))
        bottom, ribbons = _leave(x, step_width, flow.sources, alive, taken, scale, sink_top)
        shapes += ribbons
        lowest = max(lowest, bottom)
        texts += _step_label(x + step_width / 2, bottom + 13, name, sum(taken.values()), total)
        alive = {source: alive[source] - taken.get(source, 0) for source in flow.sources}
    x = LEFT + len(names) * step_width
    shapes += _rects(x, _stack(flow.sources, alive, TOP, scale))
    ends, labels, end_bottom = _ends(x, WIDTH - RIGHT, flow, scale)
    height = max(lowest + BOTTOM, end_bottom + 20)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH:.0f}" height="{height:.0f}" '
        f'viewBox="0 0 {WIDTH:.0f} {height:.0f}" font-family="sans-serif" font-size="11">\n'
        + "\n".join([*shapes, *ends, *texts, *labels])
        + "\n</svg>\n"
    ).encode()


Bands = dict[str, tuple[float, float]]  # source -> (top, height)


def _stack(sources: Sequence[str], documents: Mapping[str, int], top: float, scale: float) -> Bands:
    bands: Bands = {}
    for source in sources:
        height = documents.get(source, 0) * scale
        bands[source] = (top, height)
        top += height
    return bands


def _leave(
    x: float,
    step_width: float,
    sources: Sequence[str],
    alive: Mapping[str, int],
    taken: Mapping[str, int],
    scale: float,
    sink_top: float,
) -> tuple[float, list[str]]:
    """(where the step's sink ends, the ribbons): what goes on to the next node, and what is taken to the sink."""
    before = _stack(sources, alive, TOP, scale)
    after = _stack(sources, {source: alive[source] - taken.get(source, 0) for source in sources}, TOP, scale)
    sink_x = x + step_width / 2
    at, shapes = sink_top, []
    for index, source in enumerate(sources):
        top, height = before[source]
        next_top, goes_on = after[source]
        color = COLORS[index % len(COLORS)]
        shapes.append(_ribbon(x + NODE, top, x + step_width, next_top, goes_on, color, 0.45))
        if taken.get(source, 0):
            thick = height - goes_on
            shapes.append(_ribbon(x + NODE, top + goes_on, sink_x, at, thick, color, 0.28))
            shown = max(thick, LEAST)
            shapes.append(_rect(sink_x, at, shown, color))
            at += shown
    return at, shapes


def _ends(x: float, end_x: float, flow: Flow, scale: float) -> tuple[list[str], list[str], float]:
    """(ribbons and nodes of the splits, their labels, where the last one ends)."""
    shapes, labels = [], []
    left = _stack(
        flow.sources, {s: sum(each.get(s, 0) for each in flow.ends.values()) for s in flow.sources}, TOP, scale
    )
    start = {source: top for source, (top, _) in left.items()}
    at = TOP
    for split, documents in flow.ends.items():
        first = at
        for index, source in enumerate(flow.sources):
            height = documents.get(source, 0) * scale
            color = COLORS[index % len(COLORS)]
            if height:
                shapes.append(_ribbon(x + NODE, start[source], end_x, at, height, color, 0.45))
                shapes.append(_rect(end_x, at, max(height, LEAST), color))
            start[source] += height
            at += max(height, LEAST) if height else 0.0
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
    """The name, broken after an underscore where it is long, and how many documents it took, of all that were read."""
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


def _ribbon(x: float, y: float, to_x: float, to_y: float, height: float, color: str, opacity: float) -> str:
    if not height:
        return ""
    height, middle = max(height, LEAST), (x + to_x) / 2
    return (
        f'<path d="M{x:.1f},{y:.1f} C{middle:.1f},{y:.1f} {middle:.1f},{to_y:.1f} {to_x:.1f},{to_y:.1f} '
        f"L{to_x:.1f},{to_y + height:.1f} C{middle:.1f},{to_y + height:.1f} {middle:.1f},{y + height:.1f} "
        f'{x:.1f},{y + height:.1f} Z" fill="{color}" fill-opacity="{opacity}"/>'
    )


def _text(x: float, y: float, text: str, color: str = INK, anchor: str = "start") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" fill="{color}" text-anchor="{anchor}">{escape(text)}</text>'

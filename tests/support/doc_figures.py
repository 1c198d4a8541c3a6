"""Draws pictures of docs/ from the code: the stages, the ranks of a layout, pipeline schedules, a document's history.

python tests/support/doc_figures.py"""

import itertools
import tempfile
from collections.abc import Iterator, Sequence
from html import escape
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
from schedule_simulation import DURATIONS, actions, simulate

from gristmill.data_pipeline.corpus.document_history import why
from gristmill.pipelines.python_api import curate
from gristmill.pipelines.stages.stage_list import STAGES
from gristmill.training.config.layout import LayoutConfig, Schedule

DOCS = Path(__file__).parents[2] / "docs"
# Readable on white and on black: SVG in a page cannot see the page's own colours.
INK, LINE, PAPER = "#57606a", "#8c959f", "#ffffff"
COLOURS = ("#9ecae1", "#fdd0a2", "#c7e9c0", "#dadaeb", "#fcbba1", "#d9d9d9")
WRITES = {  # the main files of each stage's folder (docs/formats.md)
    "curate": "documents, signals, ledger",
    "tokenizer": "tokenizer.model, tokenizer.json",
    "index": ".bin and .idx",
    "train": "checkpoints, metrics",
    "evaluate": "results",
    "report": "report.html, report.md",
}
Shapes = Iterator[str]


def figures() -> dict[str, str]:
    """File name -> SVG."""
    return {
        "stages.svg": stages_figure(),
        "mesh.svg": mesh_figure(LayoutConfig(data=4, replicate=2, tensor=2, pipeline=2)),
        "schedules.svg": schedules_figure(("1f1b", "interleaved", "zbv"), ranks=4, micro_batches=8),
        "document_history.svg": history_figure(),
    }


def svg(width: float, height: float, title: str, shapes: Sequence[str]) -> str:
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:g} {height:g}" width="{width:g}" '
        f'font-family="sans-serif" font-size="12" fill="#1f2328" role="img"><title>{escape(title)}</title>'
    )
    paper = f'<rect width="{width:g}" height="{height:g}" fill="{PAPER}"/>'
    return "\n".join([head, paper, *shapes, "</svg>"]) + "\n"


def text(x: float, y: float, words: str, anchor: str = "middle", colour: str = "#1f2328", size: int = 12) -> str:
    return f'<text x="{x:g}" y="{y:g}" text-anchor="{anchor}" fill="{colour}" font-size="{size}">{escape(words)}</text>'


def box(x: float, y: float, width: float, height: float, colour: str, rounded: int = 3) -> str:
    return (
        f'<rect x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" rx="{rounded}" fill="{colour}" '
        f'stroke="{LINE}" stroke-width=".7"/>'
    )


def arrow(x1: float, y1: float, x2: float, y2: float) -> str:
    """A horizontal or vertical arrow whose tip is at (x2, y2)."""
    dx, dy = np.sign([x2 - x1, y2 - y1]) * 4
    head = f"{x2:g},{y2:g} {x2 - 2 * dx - dy:g},{y2 - 2 * dy - dx:g} {x2 - 2 * dx + dy:g},{y2 - 2 * dy + dx:g}"
    return (
        f'<line x1="{x1:g}" y1="{y1:g}" x2="{x2 - dx:g}" y2="{y2 - dy:g}" stroke="{INK}"/>'
        f'<polygon points="{head}" fill="{INK}"/>'
    )


def stages_figure() -> str:
    """Each stage below the ones it reads; an arrow for each folder that it reads."""
    width, row, left = 200, 64, 90
    shapes = [box(10, 18, 64, 28, COLOURS[5]), text(42, 36, "raw files"), arrow(74, 32, left, 32)]
    names = [stage.name for stage in STAGES]
    top = {name: 14 + number * row for number, name in enumerate(names)}
    for number, stage in enumerate(STAGES):
        shapes += [box(left, top[stage.name], width, 38, COLOURS[number % len(COLOURS)], 6)]
        shapes += [text(left + width / 2, top[stage.name] + 16, stage.name, size=13)]
        shapes += [text(left + width / 2, top[stage.name] + 31, WRITES[stage.name], colour=INK, size=11)]
        for row_of_arrow, name in enumerate(reversed(stage.inputs)):
            if STAGES[number - 1].name == name:
                shapes.append(arrow(left + width / 2, top[name] + 38, left + width / 2, top[stage.name]))
                continue
            lane = left + width + 20 + 18 * names.index(name)  # each folder has its own
            side, end = left + width, top[stage.name] + 2 + 8 * row_of_arrow
            shapes.append(f'<path d="M{side} {top[name] + 19} H{lane} V{end}" fill="none" stroke="{INK}"/>')
            shapes.append(arrow(lane, end, side, end))
    return svg(left + width + 20 + 18 * len(names), len(STAGES) * row + 10, "Stages and what they read", shapes)


def mesh_figure(layout: LayoutConfig) -> str:
    """Ranks of a layout: a block for each pipeline stage, in it a row for each replica and shard, and tensor ranks side
    by side. The order is that of training/parallel/mesh.py: tensor ranks are neighbours."""
    axes = (range(layout.pipeline), range(layout.replicate), range(layout.shard), range(layout.tensor))
    cell, gap, left = 54, 60, 150
    shapes = []
    for rank, (pipeline, replica, shard, tensor) in enumerate(itertools.product(*axes)):
        x = left + pipeline * (layout.tensor * cell + gap) + tensor * cell
        y = 46 + replica * (layout.shard * 34 + 16) + shard * 34
        shapes += [box(x, y, cell - 6, 28, COLOURS[2 * replica + shard]), text(x + 24, y + 19, f"rank {rank}", size=11)]
        if not pipeline and not tensor:
            shapes.append(text(left - 14, y + 19, f"replica {replica}, shard {shard}", "end", INK))
        if not replica and not shard:
            shapes.append(text(x + 24, 38, f"tensor {tensor}", colour=INK, size=11))
        if not replica and not shard and not tensor:
            shapes.append(text(x + layout.tensor * cell / 2 - 3, 18, f"pipeline stage {pipeline}"))
    height = 46 + layout.replicate * (layout.shard * 34 + 16)
    for stage in range(1, layout.pipeline):
        x = left + stage * (layout.tensor * cell + gap)
        shapes += [arrow(x - gap + 4, 60, x - 8, 60), text(x - gap / 2 - 3, 78, "activations", colour=INK, size=10)]
    shapes.append(text(left - 14, height + 8, "one colour: the ranks that see the same samples", "start", INK, 11))
    return svg(left + layout.pipeline * (layout.tensor * cell + gap), height + 20, "Ranks of a layout", shapes)


def schedules_figure(schedules: Sequence[Schedule], ranks: int, micro_batches: int) -> str:
    """What each rank does over time, as tests/support/schedule_simulation.py computes it."""
    unit, row, top = 15.0, 20, 26
    shapes: list[str] = []
    width = 0.0
    for schedule in schedules:
        works = actions(schedule, ranks, micro_batches)
        stages = ranks * (1 if schedule in ("gpipe", "1f1b") else 2)
        trace = simulate(works, ranks, stages, micro_batches)
        bubble = f"{schedule}: bubble {trace.bubble:.4g} of the useful time"
        shapes.append(text(50, top - 8, bubble, "start"))
        for rank in range(ranks):
            shapes.append(text(44, top + rank * row + 14, f"rank {rank}", "end", INK, 11))
            for work in works[rank]:
                length = DURATIONS[work.kind] * ranks / stages * unit
                end = 50 + trace.ends[work] * unit
                width = max(width, end)
                colour = {"F": 0, "B": 1, "I": 4, "W": 2}[work.kind]
                shapes.append(box(end - length, top + rank * row, length, row - 3, COLOURS[colour], 0))
                if length >= 11:
                    shapes.append(text(end - length / 2, top + rank * row + 12, str(work.micro_batch), size=9))
        top += ranks * row + 34
    legend = (("forward", 0), ("backward", 1), ("gradient of inputs", 4), ("gradient of weights", 2))
    for number, (words, colour) in enumerate(legend):
        x = 50 + 140 * number
        shapes += [box(x, top - 20, 12, 12, COLOURS[colour], 0), text(x + 18, top - 10, words, "start", INK, 11)]
    return svg(max(width, 620) + 10, top, "What the ranks of a pipeline do over time", shapes)


PAGE = "\n".join(
    f"In the year {year} the mill by the river ground the grain of the valley on {year % 90 + 100} days, and the "
    f"miller wrote that {year % 7 + 3} of the farmers had brought it to him in their carts, as they did every autumn."
    for year in range(1890, 1902)
)
RECIPE = """
name: figure
sources: [{name: pages, format: text, paths: [%s/*.txt]}]
curate: {filters: [gopher_quality], languages: [en], near_dedup: {threshold: 0.8}, splits: {validation: 0.0, test: 0.0}}
"""


def history_figure() -> str:
    """The steps of a page that is a near duplicate of another one."""
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        (root / "a.txt").write_text(PAGE)
        (root / "b.txt").write_text(PAGE.replace("1900", "1999"))
        (root / "recipe.yaml").write_text(RECIPE % root)
        curate(root / "recipe.yaml", workdir=root / "work", workers=1)
        ledger = pq.read_table(root / "work" / "curate" / "ledger", columns=["doc_id", "step"]).to_pylist()
        removed = next(row["doc_id"] for row in ledger if row["step"] == "near_dedup")
        events = why(removed, root / "work")
    shapes, y = [text(12, 22, f"document {removed}", "start")], 34
    for event in events:
        lines = [line if len(line) < 96 else f"{line[:93]}..." for line in event.lines][:4]
        lines = [line.replace(str(root), "...") for line in lines]
        height = 26 + 15 * len(lines)
        colour = COLOURS[4] if event.outcome.startswith("removed") else COLOURS[2]
        shapes += [box(12, y, 640, height, colour, 6), text(24, y + 18, f"{event.step}: {event.outcome}", "start")]
        shapes += [text(36, y + 34 + 15 * n, line, "start", INK, 11) for n, line in enumerate(lines)]
        if event is not events[-1]:
            shapes.append(arrow(40, y + height, 40, y + height + 14))
        y += height + 14
    return svg(664, y, "The history of one document", shapes)


if __name__ == "__main__":
    for name, content in figures().items():
        (DOCS / name).write_text(content, "utf-8")
        print(DOCS / name)

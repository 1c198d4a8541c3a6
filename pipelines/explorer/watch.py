"""The page of `gristmill watch`: curves, rate, time left and memory of runs that go on, laid over each other."""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from gristmill.foundation.errors import InputError
from gristmill.foundation.manifest import MANIFEST_NAME
from gristmill.pipelines.explorer import pages
from gristmill.pipelines.explorer.explorer_server import guarded, rendered
from gristmill.pipelines.report.content import moving_average
from gristmill.pipelines.report.figures import curves
from gristmill.pipelines.report.render import visible

STAGES = ("curate", "tokenizer", "index", "train", "evaluate", "report")
MAX_POINTS = 2_000  # of a curve
RATE_LINES = 20  # the last lines of timing.jsonl, over which the rate is taken
SAMPLE_CHARACTERS = 1_000
FIGURES = {
    "loss": ("Training loss", "nats per token"),
    "validation": ("Validation loss", "nats per token"),
    "learning_rate": ("Learning rate", "learning rate"),
    "valid_tokens": ("Tokens per step", "tokens"),
    "tokens_per_second": ("Rate", "tokens per second"),
}
# The page is read again every few seconds; what the reader scrolled to stays.
SCRIPT = """
const read = async () => {
  try {
    const answer = await fetch("/body");
    if (answer.ok) document.querySelector("main").innerHTML = await answer.text();
  } finally { setTimeout(read, 5000); }
};
setTimeout(read, 5000);
""".lstrip()
CSS = pages.CSS + "\nimg { width: 100%; max-width: 60rem; }\n"


@dataclass(frozen=True)
class WatchedRun:
    """A work folder. name: what distinguishes it from the others. tokens: that training takes; None if not known."""

    name: str
    folder: Path
    tokens: int | None = None

    @property
    def train(self) -> Path | None:
        """The folder of the training that goes on, or else of the complete one."""
        started = [path for path in self.folder.glob(".train-*") if path.is_dir()]
        if started:
            return max(started, key=lambda path: path.stat().st_mtime)
        return self.folder / "train" if (self.folder / "train").is_dir() else None

    def lines(self, name: str) -> list[dict[str, Any]]:
        """The whole lines of a log of training; a last one that is being written is left out."""
        if self.train is None or not (self.train / name).is_file():
            return []
        content = (self.train / name).read_bytes()
        complete = content[: content.rfind(b"\n") + 1].splitlines()
        return [line for line in map(_parsed, complete) if line is not None]

    def stages(self) -> str:
        """The stages that are complete, and the one that goes on."""
        complete = [name for name in STAGES if (self.folder / name / MANIFEST_NAME).is_file()]
        running = [name for name in STAGES if next(self.folder.glob(f".{name}-*"), None) is not None]
        return ", ".join([*complete, *(f"{name} (running)" for name in running)]) or "none yet"


def _parsed(line: bytes) -> dict[str, Any] | None:
    try:
        value = json.loads(line)
    except ValueError:
        return None
    return value if isinstance(value, dict) else None


def watched_runs(folders: Sequence[Path], tokens: int | None) -> list[WatchedRun]:
    """The runs in these work folders. Raises InputError for a folder that is not there."""
    for folder in folders:
        if not folder.is_dir():
            raise InputError(f"{folder}: no such folder; name the work folder of a run")
    ends = [folder.resolve().name for folder in folders]
    names = ends if len(set(ends)) == len(ends) else [str(folder) for folder in folders]
    return [WatchedRun(visible(name), folder, tokens) for name, folder in zip(names, folders, strict=True)]


def make_watch_app(runs: Sequence[WatchedRun], token: str | None = None) -> Starlette:
    """The page at /, its changing part at /body, its figures at /figure/NAME.svg."""

    def page(request: Request) -> Response:
        return rendered("Runs", lambda: body(runs), html)

    def figure(request: Request) -> Response:
        name = request.path_params["name"]
        if name not in FIGURES:
            return Response("no such figure", 404)
        return Response(drawn(name, runs), media_type="image/svg+xml")

    routes = [
        Route("/", page),
        Route("/body", lambda request: Response(f"<h1>Runs</h1>{body(runs)}", media_type="text/html")),
        Route("/figure/{name}.svg", figure),
        Route("/style.css", lambda request: Response(CSS, media_type="text/css")),
        Route("/watch.js", lambda request: Response(SCRIPT, media_type="text/javascript")),
    ]
    return guarded(routes, token)


def html(title: str, content: str) -> str:
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f'<title>{pages.html_text(title)}</title><link rel="stylesheet" href="/style.css">'
        f'<script src="/watch.js" defer></script></head><body><main><h1>{pages.html_text(title)}</h1>{content}'
        "</main></body></html>\n"
    )


def body(runs: Sequence[WatchedRun]) -> str:
    """The table of runs, the figures that have points, and the last samples of text."""
    rows = [row(run) for run in runs]
    columns = ("run", "stages", "step", "tokens", "loss", "tokens per second", "time left", "memory")
    parts = [pages.table(columns, rows, 6)]
    for name, (title, _) in FIGURES.items():
        series = points(name, runs)
        if series:
            version = sum(len(x) for x, _ in series.values())
            parts.append(f'<h2>{title}</h2><img alt="{title}" src="/figure/{name}.svg?version={version}">')
    for run in runs:
        parts += [f"<h2>Samples of {pages.html_text(run.name)}</h2>{text}" for text in [samples(run)] if text]
    return "".join(parts)


def row(run: WatchedRun) -> tuple[str, ...]:
    metrics, timing = run.lines("metrics.jsonl"), run.lines("logs/timing.jsonl")
    last: Mapping[str, Any] = metrics[-1] if metrics else {}
    losses = [line["loss"] for line in metrics if line.get("loss") is not None]
    rates = [line["tokens_per_second"] for line in timing[-RATE_LINES:] if line.get("tokens_per_second")]
    rate = sum(rates) / len(rates) if rates else None
    memory = timing[-1].get("memory_bytes") if timing else None
    is_past_end = run.tokens is not None and len(metrics) > 1 and metrics[-2].get("tokens", 0) >= run.tokens
    total = None if is_past_end else run.tokens  # a run of another recipe, which is longer
    cells = (
        run.name,
        run.stages(),
        f"{last['step']:,}" if "step" in last else "",
        f"{last['tokens']:,}{f' of {total:,}' if total else ''}" if "tokens" in last else "",
        f"{losses[-1]:.4f}" if losses else "",
        f"{rate:,.0f}" if rate else "",
        time_left(total, last.get("tokens"), rate),
        f"{memory / 1e9:.2f} GB" if memory else "",
    )
    return tuple(pages.html_text(cell) for cell in cells)


def time_left(total: int | None, tokens: int | None, rate: float | None) -> str:
    """The time that the tokens which are left take at this rate: (7_200_000, 0, 1000.0) -> "2 h 0 min"."""
    if total is None or tokens is None or not rate:
        return ""
    minutes = round(max(total - tokens, 0) / rate / 60)
    return f"{minutes // 60} h {minutes % 60} min" if minutes >= 60 else f"{minutes} min"


def samples(run: WatchedRun) -> str:
    """The last continuations that an evaluation wrote, as text."""
    path = run.folder / "evaluate" / "generations.json"
    if not path.is_file():
        return ""
    listed = json.loads(path.read_bytes())[:5]
    texts = (f"{item['prompt']} ⟩⟩⟩ {item['greedy']}"[:SAMPLE_CHARACTERS] for item in listed)
    return "".join(f'<pre dir="auto" tabindex="0">{pages.html_text(text)}</pre>' for text in texts)


def points(name: str, runs: Sequence[WatchedRun]) -> dict[str, tuple[list[float], list[float]]]:
    """Curve -> (million tokens, values); curves without a point are left out."""
    series: dict[str, tuple[list[float], list[float]]] = {}
    for run in runs:
        metrics = run.lines("metrics.jsonl")
        if name == "validation":
            for line in metrics:
                for source, score in line.get("validation", {}).get("sources", {}).items():
                    _add(series, f"{run.name}, {source}" if len(runs) > 1 else source, line["tokens"], score["loss"])
        elif name == "tokens_per_second":
            tokens = {line["step"]: line["tokens"] for line in metrics if "tokens" in line}
            for line in run.lines("logs/timing.jsonl"):
                if line.get("step") in tokens and line.get(name) is not None:
                    _add(series, run.name, tokens[line["step"]], line[name])
        else:
            for line in metrics:
                if line.get(name) is not None:
                    _add(series, run.name, line["tokens"], line[name])
    return series


def _add(series: dict[str, tuple[list[float], list[float]]], name: str, tokens: int, value: float) -> None:
    x, y = series.setdefault(name, ([], []))
    x.append(tokens / 1e6)
    y.append(value)


def drawn(name: str, runs: Sequence[WatchedRun]) -> bytes:
    """The figure's SVG, with every run in a colour of its own."""
    smooth: Callable[[list[float]], list[float]] = moving_average if name == "loss" else list
    thinned = {}
    for curve, (x, y) in points(name, runs).items():
        step = -(-len(x) // MAX_POINTS)
        thinned[curve] = (x[::step], smooth(y)[::step])
    return curves(thinned, "million tokens", FIGURES[name][1])

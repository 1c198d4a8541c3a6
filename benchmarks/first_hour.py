"""The time that `gristmill init` forecasts beside the time that `gristmill run` takes, by stage, for some budgets.

Each budget is a folder of Markdown files, `init --minutes N` and `run`, as a user types them. `ratio` is run over
forecast: 1 is a perfect forecast, and .8 to 1.2 are asked. Processor seconds beside the clock tell how busy the machine
was; forecast and run meet the same load only on a quiet one."""

import os
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import orjson
from measure import Figure, arguments, print_figures
from rich.console import Console
from rich.table import Table
from text import documents

from gristmill.pipelines.init.first_look import read_forecast

MINUTES = (2.0, 5.0, 10.0, 20.0)
FOLDER_BYTES = 12_000_000


@dataclass(frozen=True)
class TimedRun:
    """Seconds by stage, forecast and measured; cpu: processor seconds of the run; init: seconds of `init`."""

    minutes: float
    forecast: Mapping[str, float]
    measured: Mapping[str, float]
    cpu: float
    init: float
    load: float


def main() -> None:
    parser = arguments(__doc__ or "")
    parser.add_argument("--minutes", type=float, nargs="+", default=MINUTES, help="budgets")
    options = parser.parse_args()
    budgets = (1.0,) if options.quick else options.minutes
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary, "mine")
        write_folder(folder, options.data)
        runs = [timed_run(folder, minutes, Path(temporary, f"at_{minutes:g}")) for minutes in budgets]
    for run in runs:
        Console(width=100).print(table_of(run))
    print_figures([figure for run in runs for figure in figures_of(run)])


def write_folder(folder: Path, data: Path | None) -> None:
    folder.mkdir()
    for number, text in enumerate(documents(data, FOLDER_BYTES)):
        (folder / f"{number:05}.md").write_text(text, "utf-8")


def timed_run(folder: Path, minutes: float, work: Path) -> TimedRun:
    work.mkdir()
    init = seconds_of(["init", str(folder), "--minutes", f"{minutes:g}"], work)
    recipe = work / f"{folder.name}.yaml"
    before = _cpu()
    total = seconds_of(["run", recipe.name], work)
    lines = (work / "work" / folder.name / "logs" / "times.jsonl").read_bytes().splitlines()
    stages = {line["stage"]: line["seconds"] for line in map(orjson.loads, lines)}
    measured = {"start": total - sum(stages.values()), **stages}
    forecast = read_forecast(recipe.read_text("utf-8"))
    return TimedRun(minutes, forecast, measured, _cpu() - before, init, os.getloadavg()[0])


def seconds_of(arguments: Sequence[str], work: Path) -> float:
    started = time.monotonic()
    command = [sys.executable, "-m", "gristmill.pipelines.cli.main", *arguments]
    done = subprocess.run(command, cwd=work, capture_output=True, text=True)
    if done.returncode:
        sys.exit(done.stderr)
    return time.monotonic() - started


def _cpu() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def table_of(run: TimedRun) -> Table:
    title = f"{run.minutes:g} minutes: init {run.init:.0f} s, run {run.cpu:.0f} processor seconds, load {run.load:.1f}"
    table = Table("stage", "forecast s", "run s", title=title)
    for stage, seconds in run.measured.items():
        table.add_row(stage, f"{run.forecast.get(stage, 0.0):.1f}", f"{seconds:.1f}")
    return table


def figures_of(run: TimedRun) -> list[Figure]:
    took, forecast = sum(run.measured.values()), sum(run.forecast.values())
    name = f"first_hour_{run.minutes:g}_minutes"
    return [
        Figure(name, took, "s", forecast, "forecast", took / forecast),
        Figure(f"{name}_init", run.init, "s"),
        Figure(f"{name}_cpu", run.cpu, "s of the processor"),
    ]


if __name__ == "__main__":
    main()

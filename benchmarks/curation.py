"""Whole runs of curation, raw files to published corpus: `gristmill run` against datatrove's FineWeb example pipeline.

Inputs: `curate_short` (JSONL.zst, documents of 0.7 kB), `curate_long` (JSONL.zst, 4 kB), `curate_parquet` (2 kB),
`curate_warc` (HTML pages; we extract by `blocks`, datatrove by trafilatura), `curate_warc_trafilatura` (the same pages,
trafilatura in both), `curate_warc_resiliparse` (we extract by resiliparse), `curate_languages` (2 kB, in 14 languages).
Rules of both: language, Gopher repetition and quality, C4, FineWeb quality, MinHash, personal data.
`benchmarks/extract.py` measures the extractors' F1.

Of each: `NAME`, MB of raw text (of the WARC: of HTML) per CPU second, start-up included, us on the whole input and
datatrove on a few MB like it in turn, one core each (datatrove needs 15 s a MB); `_rate`, ours alone against its goal;
`_start_up`, the share of a run over 100 kB, whose seconds are `_start_up_seconds`; `_seconds_STEP`, ours by step;
`_workers`, two workers on two cores over one, `_workers_outside_tasks` and `_in_tasks` their seconds, `_workers_bound`
the most that Amdahl's law allows; `_peak`, peak memory and that at a quarter of the input; `_peak_slope`,
bytes a record in between; `_kept_by_...`, records of datatrove's input kept by both or by one, with a table of the
reasons.

datatrove 0.10.1 stands in .venv-peers, as shipped: words and sentences by spaCy, its default for English, which it
also uses for the 14 languages. Its lid.176.bin is a download, so its language filter loads lid.176.ftz, our model. Left
out of both: FineWeb's URL filter and token counter. Without .venv-peers, ours alone is measured."""

import os
import statistics
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from measure import Figure, arguments, print_figures
from rich.console import Console
from rich.table import Table
from support.curation_inputs import (
    html_pages,
    language_texts,
    made_texts,
    paragraphs,
    write_jsonl,
    write_parquet,
    write_warc,
)
from support.curation_runs import Run, recipe, run_datatrove, run_gristmill
from support.decision_differences import differences
from support.peers import PEER_PYTHON, ROOT, peers_there

PEER = "datatrove 0.10.1"
SHARED = Path(os.environ.get("GRISTMILL_SHARED_DATA") or ROOT / "../shared/data")
ENGLISH = ("en",)
FOURTEEN = ("ar", "de", "en", "es", "fr", "hi", "id", "it", "ja", "ko", "nl", "pt", "ru", "zh")
MEGABYTES, QUICK_MEGABYTES = 180.0, 0.6
QUICK_PAGES = 20
START_PAGES = 8
START_MEGABYTES = 0.1  # a few records, of which some are kept: curation without a kept record is an error


@dataclass(frozen=True)
class Case:
    """write: (folder, megabytes) -> bytes of raw text. rate: goal in MB/s/core; ratio: goal over datatrove.
    peer_megabytes: of datatrove's input, a quarter of ours at most. stop_words: whether Gopher's rule on English stop
    words is on, in both."""

    format: str
    write: Callable[[Path, float], int]
    ratio: float
    rate: float | None = None
    languages: Sequence[str] = ENGLISH
    stop_words: bool = True
    extractor: str | None = None
    peer_megabytes: float = 2.0


@dataclass(frozen=True)
class Input:
    """A case's raw files on disk."""

    name: str
    case: Case
    source: Path
    megabytes: float

    @property
    def settings(self) -> dict:
        return recipe(self.source, self.case.format, self.case.extractor, self.case.languages, self.case.stop_words)


def main() -> None:
    parser = arguments(__doc__ or "")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument(
        "--megabytes", type=float, default=MEGABYTES, help="of text; below 180, that share of the pages"
    )
    parser.add_argument("--only", nargs="*", help="names of inputs, such as short warc")
    parser.add_argument("--peer-python", type=Path, default=PEER_PYTHON, help="where datatrove stands")
    parser.add_argument("--without-peer", action="store_true", help="measure gristmill alone")
    options = parser.parse_args()
    megabytes = QUICK_MEGABYTES if options.quick else options.megabytes
    rounds = 1 if options.quick else options.rounds
    python = None if options.without_peer or not peers_there(options.peer_python) else options.peer_python
    figures: list[Figure] = []
    for name, case in cases(options.data, options.quick).items():
        if options.only and name not in options.only:
            continue
        with tempfile.TemporaryDirectory() as folder:
            figures += measure(f"curate_{name}", case, Path(folder), megabytes, rounds, python)
    print_figures(figures)


def cases(data: Path | None, quick: bool) -> dict[str, Case]:
    """The last four read shared data and are left out where it is absent."""
    pool = paragraphs(data)

    def texts(mean_bytes: int, write: Callable, folder: Path, megabytes: float) -> int:
        return write(folder, list(made_texts(pool, int(megabytes * 1e6), mean_bytes)))

    def pages(folder: Path, megabytes: float) -> int:
        found = html_pages(SHARED, QUICK_PAGES if quick else None)
        return write_warc(
            folder, found[: max(START_PAGES, int(len(found) * megabytes / full))] if megabytes < full else found
        )

    def languages(folder: Path, megabytes: float) -> int:
        return write_jsonl(folder, list(language_texts(SHARED / "corpora", FOURTEEN, int(megabytes * 1e6), 2000)))

    full = QUICK_MEGABYTES if quick else MEGABYTES
    found = {
        "short": Case("jsonl", partial(texts, 700, write_jsonl), 50, rate=12),
        "long": Case("jsonl", partial(texts, 4000, write_jsonl), 50, rate=25),
        "parquet": Case("parquet", partial(texts, 2000, write_parquet), 50),
    }
    if SHARED.is_dir():
        found["warc"] = Case("warc", pages, 10, extractor="blocks", peer_megabytes=45.0)
        found["warc_trafilatura"] = Case("warc", pages, 1, extractor="trafilatura_precision", peer_megabytes=45.0)
        found["warc_resiliparse"] = Case("warc", pages, 1, extractor="resiliparse", peer_megabytes=45.0)
        found["languages"] = Case("jsonl", languages, 50, languages=FOURTEEN, stop_words=False)
    return found


def measure(name: str, case: Case, folder: Path, megabytes: float, rounds: int, python: Path | None) -> list[Figure]:
    sizes = {"whole": megabytes, "quarter": megabytes / 4, "start": START_MEGABYTES}
    sizes["peer"] = min(case.peer_megabytes, sizes["quarter"])
    whole, quarter, few, shared = (make_input(name, case, folder / f"raw-{part}", size) for part, size in sizes.items())
    print(f"{name}: {whole.megabytes:.1f} MB", file=sys.stderr)
    start = run_gristmill(few.settings, folder / "ours", 1)  # compiles and warms the disk's cache
    start = run_gristmill(few.settings, folder / "ours", 1)
    ours, theirs = [], []
    for _ in range(rounds):
        ours.append(run_gristmill(whole.settings, folder / "ours", 1))
        if python is not None:
            theirs.append(run_datatrove(python, shared.source, shared.settings, folder / "theirs", 1, case.stop_words))
    small = run_gristmill(quarter.settings, folder / "ours", 1)
    figures = [*speed(whole, ours, shared, theirs), *steps(name, ours[-1], start), *memory(name, ours[-1], small)]
    if theirs:
        figures += agreement(name, run_gristmill(shared.settings, folder / "ours", 1), theirs[-1])
    return [*figures, *two_workers(whole, folder, ours, shared, python)]


def make_input(name: str, case: Case, folder: Path, megabytes: float) -> Input:
    folder.mkdir()
    return Input(name, case, folder, case.write(folder, megabytes) / 1e6)


def speed(whole: Input, ours: Sequence[Run], shared: Input, theirs: Sequence[Run]) -> list[Figure]:
    """Ours with its start-up, datatrove without its imports. Rates, because datatrove reads the smaller input only."""
    own = statistics.median(run.cpu_seconds for run in ours)
    rate = whole.megabytes / own
    figures = [Figure(f"{whole.name}_rate", rate, "MB/s/core", goal=whole.case.rate)]
    if theirs:
        other = shared.megabytes / statistics.median(run.cpu_seconds for run in theirs)
        figures.insert(
            0, Figure(whole.name, rate, "MB/s/core", other, peer_name(shared), rate / other, whole.case.ratio)
        )
    return figures


def peer_name(shared: Input) -> str:
    return f"{PEER}, {shared.megabytes:.1f} MB"


def steps(name: str, run: Run, start: Run) -> list[Figure]:
    share = Figure(f"{name}_start_up", 100 * start.cpu_seconds / run.cpu_seconds, "% of CPU time")
    seconds = Figure(f"{name}_start_up_seconds", start.seconds, "s, a few records")
    parts = [
        Figure(f"{name}_seconds_{step.replace(' ', '_')}", value, "s")
        for step, value in sorted(run.steps.items(), key=lambda item: -item[1])
        if value > 0
    ]
    return [share, seconds, *parts]


def memory(name: str, run: Run, small: Run) -> list[Figure]:
    records = len(run.kept) + len(run.removed) - len(small.kept) - len(small.removed)
    slope = (run.peak_megabytes - small.peak_megabytes) * 1e6 / records
    return [
        Figure(f"{name}_peak", run.peak_megabytes, "MB", small.peak_megabytes, "a quarter of the input"),
        Figure(f"{name}_peak_slope", slope, "bytes a record"),
    ]


def agreement(name: str, ours: Run, theirs: Run) -> list[Figure]:
    """Records kept by both and by one; prints which rule of the other took them. Records that neither names (a page
    without text, which datatrove drops silently) count as removed."""
    ids = sorted({*ours.kept, *ours.removed, *theirs.kept, *theirs.removed})
    own = {place: ours.removed.get(each, "not read") for place, each in enumerate(ids) if each not in ours.kept}
    other = {place: theirs.removed.get(each, "not read") for place, each in enumerate(ids) if each not in theirs.kept}
    table = Table("records", "ours", "datatrove", title=f"{name}: of {len(ids)} records, decisions that differ")
    for count, own_reason, reason, _ in differences([name] * len(ids), own, other):
        table.add_row(str(count), own_reason, reason)
    Console(width=140, stderr=True).print(table)
    counts = {
        "both": len(ours.kept & theirs.kept),
        "gristmill": len(ours.kept - theirs.kept),
        "datatrove": len(theirs.kept - ours.kept),
    }
    return [Figure(f"{name}_kept_by_{who}", count, f"of {len(ids)} records") for who, count in counts.items()]


def two_workers(whole: Input, folder: Path, ours: Sequence[Run], shared: Input, python: Path | None) -> list[Figure]:
    """Seconds of one worker on one core over those of two on two; what Amdahl's law allows for the driver's seconds
    outside of tasks; with datatrove, its rate with two tasks."""
    if len(os.sched_getaffinity(0)) < 2:
        print(f"{whole.name}_workers: this process may use one core only, so it is left out", file=sys.stderr)
        return []
    runs = [run_gristmill(whole.settings, folder / "two", 2) for _ in ours]
    if runs[-1].kept != ours[-1].kept or runs[-1].removed != ours[-1].removed:
        sys.exit(f"{whole.name}: two workers decide otherwise than one")
    one, two = (statistics.median(run.seconds for run in each) for each in (ours, runs))
    figures = [
        Figure(
            f"{whole.name}_workers", whole.megabytes / two, "MB/s", whole.megabytes / one, "one worker", one / two, 1.85
        ),
        *workers_bound(whole.name, ours, runs),
    ]
    if python is not None:
        pair = run_datatrove(python, shared.source, shared.settings, folder / "theirs", 2, whole.case.stop_words)
        rate, other = whole.megabytes / two, shared.megabytes / pair.seconds
        peer = f"{peer_name(shared)}, two tasks"
        figures.append(Figure(f"{whole.name}_two_workers", rate, "MB/s", other, peer, rate / other))
    return figures


def workers_bound(name: str, one: Sequence[Run], two: Sequence[Run]) -> list[Figure]:
    """Seconds outside of tasks, in which two workers wait for the driver, and those of all tasks; the ratio that two
    workers could reach at most (Amdahl 1967)."""

    def parts(runs: Sequence[Run]) -> tuple[float, float]:
        in_tasks = [sum(run.steps.values()) for run in runs]
        outside = [run.seconds - seconds for run, seconds in zip(runs, in_tasks, strict=True)]
        return statistics.median(outside), statistics.median(in_tasks)

    (serial, tasks), (serial_of_two, tasks_of_two) = parts(one), parts(two)
    bound = (serial + tasks) / (serial + tasks / 2)
    return [
        Figure(f"{name}_workers_outside_tasks", serial_of_two, "s", serial, "one worker"),
        Figure(f"{name}_workers_in_tasks", tasks_of_two, "s", tasks, "one worker", tasks / tasks_of_two),
        Figure(f"{name}_workers_bound", bound, "times one worker, by Amdahl's law"),
    ]


if __name__ == "__main__":
    main()

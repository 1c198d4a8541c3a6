"""How the driver's memory grows with the documents in curation with near duplicates, a quality classifier, duplicate
lines, repeated substrings and decontamination.

Short documents of made words, of which one in five repeats a sentence, one in three scores low and one in fifty quotes
a benchmark. Each size runs in a process of its own (the driver) with a pool of workers. Steps that the driver runs by
intention where there is little to do are given to the workers here, as they are for larger corpora.

What is measured is what the driver has allocated: Python's and NumPy's memory by tracemalloc, Arrow's by its pool. Its
resident memory varies by tens of megabytes from run to run with what libraries load. Each step has a peak of its own,
so that a large step does not hide one that grows; `curation_driver_bytes_per_document` is the largest slope of a step
between the two sizes. With --quick the sizes are too small for a slope that means anything."""

import json
import subprocess
import sys
import tempfile
import tracemalloc
from pathlib import Path

import numpy as np
import orjson
import pyarrow as pa
from measure import Figure, arguments, print_figures

from gristmill.data_pipeline.curate_config import CurateConfig
from gristmill.data_pipeline.decontamination import decontaminate as decontamination
from gristmill.data_pipeline.dedup import spans, substrings
from gristmill.data_pipeline.readers.resolve import resolve
from gristmill.data_pipeline.readers.source import SourceConfig
from gristmill.data_pipeline.run_curation import CurationInputs, curate
from gristmill.foundation.lock import Lock
from gristmill.foundation.progress import Reporter
from gristmill.foundation.runtime.tasks.local import LocalEngine
from gristmill.foundation.runtime.tasks.task_files import ranges_for

SIZES = (350_000, 700_000)  # in both the workers find near duplicates (of 50,000) and digest raw files (of 64 MB)
FILE_DOCUMENTS = 10_000
WORDS, QUESTIONS = 45, 200
INTERNED = 500_000
RANGE_RECORDS, MATCHES_OF_TASK = 20_000, 500  # so that there are several tasks


def main() -> None:
    parser = arguments(__doc__ or "")
    parser.add_argument("--documents", type=float, nargs=2, default=SIZES, help="two sizes")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--run", type=int, help="one size, in the folder --work; used by this program itself")
    parser.add_argument("--work", type=Path)
    options = parser.parse_args()
    if options.run:
        return print(json.dumps(measured(options.run, options.workers, options.work)))
    small, large = (2_000, 8_000) if options.quick else sorted(int(size) for size in options.documents)
    few, many = (in_own_process(size, options.workers) for size in (small, large))
    slopes = {step: (many[step] - few[step]) / (large - small) for step in few}
    for step, slope in slopes.items():
        print(f"{step:<25}{few[step]:>12}{many[step]:>12} bytes, {slope:.2f} a document", file=sys.stderr)
    figures = [
        Figure("curation_driver_bytes_per_document", max(slopes.values()), "bytes", 1, "most that was asked for"),
        Figure("curation_driver_megabytes", max(many.values()) / 1e6, "MB"),
    ]
    print_figures(figures)


class MeasuringEngine(LocalEngine):
    """peaks: the most bytes that Python and NumPy held in this process, by step; the driver's work between two steps
    counts for the later one."""

    def __init__(self, workers: int):
        super().__init__(workers, Reporter.silent())
        self.peaks: dict[str, int] = {}
        tracemalloc.start()

    def imap(self, function, tasks, description, sizes=None, unit="tasks"):  # type: ignore[no-untyped-def]
        try:
            yield from super().imap(function, tasks, description, sizes, unit)
        finally:
            self.note(description)

    def note(self, step: str) -> None:
        self.peaks[step] = max(self.peaks.get(step, 0), tracemalloc.get_traced_memory()[1])
        tracemalloc.reset_peak()


def in_own_process(documents: int, workers: int) -> dict[str, int]:
    with tempfile.TemporaryDirectory() as work:
        write_corpus(documents, Path(work))
        command = [sys.executable, __file__, "--run", str(documents), "--work", work, "--workers", str(workers)]
        return json.loads(subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout)


def measured(documents: int, workers: int, folder: Path) -> dict[str, int]:
    """The driver's peaks in bytes, by step, and that of Arrow's pool."""
    for module in (decontamination, spans, substrings):
        vars(module)["ranges_for"] = lambda records, most=RANGE_RECORDS: ranges_for(records, most)
    decontamination.MATCHES_OF_TASK = MATCHES_OF_TASK
    # Python's table of interned strings, which takes names of files too, doubles at some point: 2 MB in any step
    [sys.intern(f"interned {number}") for number in range(INTERNED)]
    engine = MeasuringEngine(workers)
    sources = [
        SourceConfig(name=name, format="jsonl", paths=(str(folder / f"{name}-*.jsonl"),)) for name in ("good", "web")
    ]
    config = CurateConfig(
        filters=(),
        language_id=None,
        exact_dedup=None,
        near_dedup={},
        quality={"positive": ["good"], "negative": ["web"], "keep": "quantile", "value": 0.7, "max_documents": 200},
        span_dedup=[{"unit": "line", "min_count": 5}],
        substring_dedup={"min_bytes": 60, "group_bytes": 4_000_000},
        decontaminate={"benchmarks": [{"name": "b", "paths": [str(folder / "held.jsonl")], "fields": ["text"]}]},
    )
    lock = Lock(sources=tuple(resolve(sources, engine)))
    found = curate(CurationInputs(sources, config, 1, lock, folder / "curate", folder / "cache", engine))
    counts = found["sources"]["web"]
    assert counts["removed"]["quality"]["documents"] > documents / 10 and counts["removed_spans"], counts
    engine.note("last")
    engine.close()
    return {**engine.peaks, "Arrow": pa.default_memory_pool().max_memory()}


def write_corpus(documents: int, folder: Path) -> None:
    """good-N.jsonl, a twentieth of the documents, web-N.jsonl and held.jsonl, the benchmark."""
    generator = np.random.default_rng(0)
    words = np.array([f"{first}{second}" for first in "bcdfghklmnprst" for second in generator.permutation(_ENDS)])
    questions = [" ".join(generator.choice(words, 20)) for _ in range(QUESTIONS)]
    (folder / "held.jsonl").write_bytes(b"".join(orjson.dumps({"text": text}) + b"\n" for text in questions))
    shared = [" ".join(generator.choice(words, 15)) for _ in range(documents // 50)]
    for name, size, first in (("good", documents // 20, 0), ("web", documents, len(words) // 3)):
        for number, start in enumerate(range(0, size, FILE_DOCUMENTS)):
            drawn = generator.choice(words[first:], (min(FILE_DOCUMENTS, size - start), WORDS))
            lines = []
            for place, row in enumerate(drawn):
                text = " ".join(row)
                if place % 5 == 0:
                    text += f"\n{shared[generator.integers(len(shared))]}"
                if place % 50 == 7:
                    text += f"\n{questions[generator.integers(QUESTIONS)]}"
                lines.append(orjson.dumps({"text": text}) + b"\n")
            (folder / f"{name}-{number:05d}.jsonl").write_bytes(b"".join(lines))


_ENDS = [f"{vowel}{letter}{last}" for vowel in "aeiou" for letter in "lmnrst" for last in ("", "a", "en", "ing")]


if __name__ == "__main__":
    main()

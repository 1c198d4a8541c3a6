"""One whole run of curation by `gristmill run` or datatrove's FineWeb example, with its outcome record by record."""

import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
from support.peers import ROOT

from gristmill.data_pipeline.signals.language import BUNDLED, model_path

STEP = re.compile(r"^(?P<step>[^:]+): .* in (?P<seconds>[\d.]+) s\b", re.M)


@dataclass(frozen=True)
class Run:
    """seconds: of the clock; cpu_seconds: of all its processes; peak_megabytes: of the largest of them; steps: name ->
    seconds. removed: id -> the rule or filter that took the record; the other ids are in kept."""

    seconds: float
    cpu_seconds: float
    peak_megabytes: float
    steps: Mapping[str, float]
    kept: frozenset[str]
    removed: Mapping[str, str]


def recipe(
    source: Path, file_format: str, extractor: str | None, languages: Sequence[str], stop_words: bool
) -> dict[str, Any]:
    """The rules of datatrove's examples/fineweb.py, as the recipe `fineweb` has them."""
    extraction = {} if extractor is None else {"extractor": extractor}
    paths = sorted(str(path) for path in source.iterdir())
    return {
        "name": "curation",
        "seed": 1,
        "sources": [{"name": "raw", "format": file_format, "paths": paths, **extraction}],
        "curate": {
            "languages": list(languages),
            "language_id": {"threshold": 0.65},
            "filters": [
                "gopher_repetition",
                "gopher_quality" if stop_words else {"gopher_quality": {"min_stop_words": None}},
                {"c4": {"line_terminal_punctuation": None}},
                "fineweb_quality",
            ],
            "exact_dedup": None,
            "near_dedup": {"ngram": 5, "bands": 14, "rows": 8, "threshold": 0.75},
            "pii": {"email": "replace", "ip": "replace"},
        },
    }


def run_gristmill(settings: Mapping[str, Any], work: Path, workers: int, engine: Sequence[str] = ()) -> Run:
    """`gristmill run RECIPE --to curate` in a new work folder, on as many cores as workers. engine: further options."""
    shutil.rmtree(work, ignore_errors=True)
    work.mkdir(parents=True)
    (work / "recipe.yaml").write_text(json.dumps(settings))
    program = Path(sys.executable).with_name("gristmill")
    arguments = ["--to", "curate", "--workers", str(workers), "--workdir", str(work / "run"), *engine]
    usage, log = timed([str(program), "run", str(work / "recipe.yaml"), *arguments], workers, work / "log")
    steps: dict[str, float] = {}
    for found in STEP.finditer(log):
        steps[found["step"]] = steps.get(found["step"], 0.0) + float(found["seconds"])
    kept, removed = outcome(work / "run" / "curate", settings["sources"][0]["paths"])
    return Run(usage.seconds, usage.cpu_seconds, usage.peak_megabytes, steps, kept, removed)


# Runs a command on some cores and reports how it ended. The peak memory that Linux reports of a process begins with
# that of the process it was forked from, here the benchmark with its texts: so a small process starts the command.
CHILD = """
import json, os, sys, time
report, cores, *command = sys.argv[1:]
os.sched_setaffinity(0, json.loads(cores))
started = time.perf_counter()
process = os.posix_spawnp(command[0], command, os.environ)
_, status, usage = os.wait4(process, 0)
seconds, code = time.perf_counter() - started, os.waitstatus_to_exitcode(status)
with open(report, "w") as file:
    json.dump([code, seconds, usage.ru_utime + usage.ru_stime, usage.ru_maxrss], file)
"""


@dataclass(frozen=True)
class Usage:
    """Of a process and its descendants. seconds: of the clock; peak_megabytes: of the largest of them."""

    seconds: float
    cpu_seconds: float
    peak_megabytes: float


def timed(command: Sequence[str], cores: int, log: Path) -> tuple[Usage, str]:
    """(usage, standard output and error). Exits if the command fails."""
    chosen = json.dumps(sorted(os.sched_getaffinity(0))[:cores])
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    report = log.with_suffix(".usage")
    with log.open("wb") as file:
        small = [sys.executable, "-c", CHILD, str(report), chosen]
        subprocess.run([*small, *command], stdout=file, stderr=file, env=environment, check=True)
    code, seconds, cpu_seconds, peak = json.loads(report.read_text())
    if code:
        sys.exit(f"{' '.join(command)} failed:\n{log.read_text()[-2000:]}")
    return Usage(seconds, cpu_seconds, peak * 1024 / 1e6), log.read_text()


def outcome(corpus: Path, paths: Sequence[str]) -> tuple[frozenset[str], dict[str, str]]:
    """(ids kept, id -> rule) from the ledger; an id is FILE/NUMBER, as in curation_inputs."""
    numbers = {hashlib.sha256(Path(path).read_bytes()).hexdigest(): place for place, path in enumerate(sorted(paths))}
    kept, removed = set(), {}
    for path in sorted((corpus / "ledger").glob("*.parquet")):
        for row in pq.read_table(path, columns=["raw_digest", "record", "outcome", "rule"]).to_pylist():
            name = f"{numbers[row['raw_digest']]}/{row['record']}"
            if row["outcome"] == "kept":
                kept.add(name)
            else:
                removed[name] = row["rule"] or row["outcome"]
    return frozenset(kept), removed


def run_datatrove(
    python: Path, source: Path, settings: Mapping[str, Any], work: Path, workers: int, stop_words: bool
) -> Run:
    """benchmarks/peers/datatrove_fineweb.py. Its seconds are without its imports and its reading of the results."""
    shutil.rmtree(work, ignore_errors=True)
    work.mkdir(parents=True)
    options = {
        "source": str(source),
        "work": str(work),
        "format": settings["sources"][0]["format"],
        "tasks": workers,
        "languages": settings["curate"]["languages"],
        "language_model": str(model_path(BUNDLED)),
        "stop_words": stop_words,
    }
    program = ROOT / "benchmarks" / "peers" / "datatrove_fineweb.py"
    usage, log = timed([str(python), str(program), json.dumps(options)], workers, work / "log")
    found = json.loads(log.strip().splitlines()[-1])
    of_process = found["seconds"], found["cpu_seconds"], usage.peak_megabytes
    return Run(*of_process, {}, frozenset(found["kept"]), found["removed"])

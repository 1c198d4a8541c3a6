"""Runs every benchmark and writes their figures, with hardware, versions and commit, as one Markdown page.

The figures of each program are kept under build/figures, so that one program can be run again alone."""

import argparse
import importlib.metadata
import json
import platform
import subprocess
import sys
from pathlib import Path

import torch

HERE = Path(__file__).parent
KEPT = HERE.parent / "build" / "figures"
NOT_PROGRAMS = {"copying.py", "measure.py", "run_all.py", "text.py"}
WHOLE_RUNS = (
    "curation",
    "pipeline",
    "first_hour",
)  # programs that measure what a user waits for; the others measure single parts
LIBRARIES = ("torch", "numpy", "numba", "pyarrow", "sentencepiece", "datasketch", "lm_eval", "transformers")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--only", nargs="*", help="names of programs, without .py; the others keep their last figures")
    options = parser.parse_args()
    found = (path for path in HERE.glob("*.py") if path.name not in NOT_PROGRAMS)
    programs = sorted(found, key=lambda path: (path.stem not in WHOLE_RUNS, path.stem))
    kept = KEPT / ("quick" if options.quick else "full")
    kept.mkdir(parents=True, exist_ok=True)
    chosen = [p for p in programs if not options.only or p.stem in options.only]
    failed = [p.name for p in chosen if not run(p, kept, options.quick)]
    records = [json.loads(file.read_bytes()) for p in programs if (file := kept / f"{p.stem}.json").exists()]
    options.output.write_text(page(records, options.quick))
    if failed:
        sys.exit(f"failed: {', '.join(failed)}")


def run(program: Path, kept: Path, quick: bool) -> bool:
    """Runs one program and keeps its figures, with the commit they belong to. False if it fails: nothing is kept."""
    command = [sys.executable, str(program), *(["--quick"] if quick else [])]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True)
    print(done.stdout, flush=True)
    if done.returncode:
        return False
    figures = [json.loads(line) for line in done.stdout.splitlines() if line.startswith('{"figure"')]
    record = {"program": program.name, "commit": commit(), "figures": figures}
    (kept / f"{program.stem}.json").write_text(json.dumps(record))
    return True


def page(records: list[dict], quick: bool) -> str:
    versions = ", ".join(f"{name} {importlib.metadata.version(name)}" for name in LIBRARIES if _installed(name))
    head = [
        "# Results",
        "",
        f"Written by `make bench`: Python {platform.python_version()}, {versions}.",
        f"Processor: {processor()}.{' Quick inputs.' if quick else ''} {graphics()}",
        "Each ratio is the median of paired ratios of one run, above 1 where gristmill is better.",
        "Rows of different commits may come from different processors: compare their ratios, not their rates.",
    ]
    whole = [record for record in records if Path(record["program"]).stem in WHOLE_RUNS]
    parts = [record for record in records if record not in whole]
    return "\n".join([*head, *section("Whole runs", whole), *section("Parts of a run", parts)]) + "\n"


def section(title: str, records: list[dict]) -> list[str]:
    """A heading and a table; nothing without records."""
    if not records:
        return []
    rows = [row(f"{r['program']} | {r['commit']}", figure) for r in records for figure in r["figures"]]
    columns = ["| program | commit | figure | ours | peer | unit | ratio | goal |", "|---|---|---|--:|--:|---|--:|--:|"]
    return ["", f"## {title}", "", *columns, *rows]


def commit() -> str:
    return subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True).stdout.strip()


def row(program: str, line: dict) -> str:
    peer = f"{line['peer']:.4g} ({line['peer_name']})" if "peer" in line else ""
    ratio = f"{line['ratio']:.2f}" if "ratio" in line else ""
    goal = f"{line['goal']:g}" if "goal" in line else ""
    return f"| {program} | {line['figure']} | {line['ours']:.4g} | {peer} | {line['unit']} | {ratio} | {goal} |"


def processor() -> str:
    info = Path("/proc/cpuinfo")
    names = [line.split(":")[1].strip() for line in info.read_text().splitlines() if line.startswith("model name")]
    return f"{names[0]}, {len(names)} cores" if names else platform.processor()


def graphics() -> str:
    if not torch.cuda.is_available():
        return "No GPU; what one H200 took is in [gpu.md](gpu.md)."
    return f"GPU: {torch.cuda.get_device_name(0)}."


def _installed(name: str) -> bool:
    try:
        importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return False
    return True


if __name__ == "__main__":
    main()

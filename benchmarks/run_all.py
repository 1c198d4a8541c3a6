"""Runs every benchmark and writes their figures, with hardware, versions and commit, as one Markdown page."""

import argparse
import importlib.metadata
import json
import platform
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).parent
NOT_PROGRAMS = {"measure.py", "run_all.py"}
LIBRARIES = ("torch", "numpy", "numba", "pyarrow", "sentencepiece", "datasketch", "lm_eval", "transformers")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--only", nargs="*", help="names of programs, without .py")
    options = parser.parse_args()
    programs = sorted(path for path in HERE.glob("*.py") if path.name not in NOT_PROGRAMS)
    lines, failed = [], []
    for program in programs:
        if options.only and program.stem not in options.only:
            continue
        command = [sys.executable, str(program), *(["--quick"] if options.quick else [])]
        done = subprocess.run(command, stdout=subprocess.PIPE, text=True)
        print(done.stdout, flush=True)
        if done.returncode:
            failed.append(program.name)
        found = [line for line in done.stdout.splitlines() if line.startswith('{"figure"')]
        lines += [(program.name, json.loads(line)) for line in found]
    options.output.write_text(page(lines, options.quick))
    if failed:
        sys.exit(f"failed: {', '.join(failed)}")


def page(lines: list[tuple[str, dict]], quick: bool) -> str:
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True).stdout.strip()
    versions = ", ".join(f"{name} {importlib.metadata.version(name)}" for name in LIBRARIES if _installed(name))
    head = [
        "# Results",
        "",
        f"Written by `make bench` at commit {commit}: Python {platform.python_version()}, {versions}.",
        f"Processor: {processor()}.{' Quick inputs.' if quick else ''}",
        "Each ratio is the median of paired ratios of one run, above 1 where gristmill is better.",
        "",
        "| program | figure | ours | peer | unit | ratio | goal |",
        "|---|---|--:|--:|---|--:|--:|",
    ]
    return "\n".join([*head, *(row(program, line) for program, line in lines)]) + "\n"


def row(program: str, line: dict) -> str:
    peer = f"{line['peer']:.4g} ({line['peer_name']})" if "peer" in line else ""
    ratio = f"{line['ratio']:.2f}" if "ratio" in line else ""
    goal = f"{line['goal']:g}" if "goal" in line else ""
    return f"| {program} | {line['figure']} | {line['ours']:.4g} | {peer} | {line['unit']} | {ratio} | {goal} |"


def processor() -> str:
    info = Path("/proc/cpuinfo")
    names = [line.split(":")[1].strip() for line in info.read_text().splitlines() if line.startswith("model name")]
    return f"{names[0]}, {len(names)} cores" if names else platform.processor()


def _installed(name: str) -> bool:
    try:
        importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return False
    return True


if __name__ == "__main__":
    main()

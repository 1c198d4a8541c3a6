"""Every benchmark that needs no other environment runs on its small input."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
PROGRAMS = (
    "curation_memory",
    "encode",
    "layouts",
    "mixers",
    "moe",
    "moe_quality",
    "read",
    "rehearsal",
    "scale",
    "train_step",
)


@pytest.mark.slow
@pytest.mark.parametrize("name", PROGRAMS)
def test_a_quick_run_prints_figures_or_a_table(name: str) -> None:
    command = [sys.executable, str(BENCHMARKS / f"{name}.py"), "--quick"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=BENCHMARKS.parent)
    assert done.returncode == 0, done.stderr
    figures = [json.loads(line) for line in done.stdout.splitlines() if line.startswith('{"figure"')]
    assert figures or "busiest expert over mean" in done.stdout
    assert all(figure["ours"] > 0 for figure in figures)

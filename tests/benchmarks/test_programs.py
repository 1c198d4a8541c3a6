"""Every program under benchmarks/ starts as its documentation says: `python benchmarks/NAME.py`."""

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
LIBRARIES = {"measure.py", "text.py"}  # imported by the others
PROGRAMS = sorted({path.name for path in (ROOT / "benchmarks").glob("*.py")} - LIBRARIES)


@pytest.mark.slow
@pytest.mark.parametrize("program", PROGRAMS)
def test_a_benchmark_says_how_to_use_it(program: str) -> None:
    done = subprocess.run(
        [sys.executable, f"benchmarks/{program}", "--help"], cwd=ROOT, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr[-500:]
    assert "usage:" in done.stdout

"""A run killed after any file-system call of saving, pruning and finishing resumes to the same bytes."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def killed_at_each_point(folder: Path, saving: str, which: str) -> dict:
    """What tests.support.kill_points found: {"calls", "failures", "differences"}."""
    command = [sys.executable, "-m", "tests.support.kill_points", str(folder / "points"), saving, which]
    done = subprocess.run(command, cwd=ROOT, env=os.environ | {"OMP_NUM_THREADS": "1"}, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


def check(found: dict) -> None:
    calls = " ".join(found["calls"])
    assert all(name in calls for name in ("open", "os.rename", "os.remove", "os.rmdir", "os.mkdir"))
    assert found["failures"] == []
    assert found["differences"] == []  # `reproduce` of a folder that was killed says identical


def test_killed_at_any_change_of_a_file(tmp_path: Path) -> None:
    check(killed_at_each_point(tmp_path, "in_step", "changes"))


@pytest.mark.slow
@pytest.mark.parametrize("saving", ["in_step", "asynchronous"])
def test_killed_at_any_call(tmp_path: Path, saving: str) -> None:
    check(killed_at_each_point(tmp_path, saving, "each"))

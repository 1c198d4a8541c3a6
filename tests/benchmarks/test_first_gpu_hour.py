"""The script of the first hour on a GPU, at tiny size: it goes on after a step that failed, and says which did."""

import contextlib
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import measure
import pytest
import torch

ROOT = Path(__file__).parents[2]


def ran(*arguments: str) -> subprocess.CompletedProcess[str]:
    environment = os.environ | {"PYTHON": sys.executable}
    command = ["bash", "benchmarks/first_gpu_hour.sh", *arguments]
    return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)


def test_a_step_out_of_time_does_not_stop_the_others(tmp_path: Path) -> None:
    run = ran("--dry", "--limit", "0.1", "--output", str(tmp_path), "device", "moe")
    assert run.returncode == 1
    steps = json.loads((tmp_path / "first_gpu_hour.json").read_text())
    assert [(step["step"], step["state"]) for step in steps] == [("device", "out of time"), ("moe", "out of time")]
    assert run.stdout.count("FAILED with 124") == 2 and (tmp_path / "moe.log").exists()


def test_figures_are_gathered(tmp_path: Path) -> None:
    run = ran("--dry", "--output", str(tmp_path), "device")
    assert run.returncode == 0, run.stdout + run.stderr
    (step,) = json.loads((tmp_path / "first_gpu_hour.json").read_text())
    assert (step["state"], step["error"], step["figures"]) == ("ran", None, [])
    assert "torch" in (tmp_path / "device.log").read_text()


def test_a_step_out_of_time_keeps_the_figures_that_it_printed(tmp_path: Path) -> None:
    output = tmp_path / "lengths.log"

    def until_killed() -> Iterator[measure.Figure]:
        yield measure.Figure("first", 1.0, "s")
        raise TimeoutError

    with output.open("w") as log, contextlib.redirect_stdout(log), pytest.raises(TimeoutError):
        measure.print_figures(until_killed())
    assert json.loads(output.read_text())["figure"] == "first"


def test_wrong_calls_say_what_is_right() -> None:
    unknown = ran("--dry", "no_such_step")
    assert unknown.returncode == 2 and "one of device parity calibrate" in unknown.stderr
    if not torch.cuda.is_available():
        without = ran()
        assert without.returncode == 2 and "--dry runs tiny sizes" in without.stderr


@pytest.mark.slow
def test_every_step_starts_at_tiny_size(tmp_path: Path) -> None:
    run = ran("--dry", "--output", str(tmp_path))
    assert run.returncode == 0, run.stdout + run.stderr
    steps = json.loads((tmp_path / "first_gpu_hour.json").read_text())
    measured = {step["step"] for step in steps if step["figures"]}
    assert measured == {"forecast", "step_124m", "offload", "lengths", "generation", "moe", "hybrid"}

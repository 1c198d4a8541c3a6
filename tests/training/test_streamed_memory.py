"""The memory of a process that trains with the layers' weights on disk is the stated one."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from gristmill.training.planner.memory import stated_memory
from tests.support.streamed_memory import MODEL, train_config

ROOT = Path(__file__).parents[2]


def measured(folder: Path, what: str) -> dict[str, int]:
    """peak: beyond what the libraries take."""
    command = [sys.executable, "-m", "tests.support.streamed_memory", str(folder), what]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    found = json.loads(done.stdout)
    return found | {"peak": found["peak"] - found["before"]}


@pytest.mark.parametrize("recompute", ["none", pytest.param("full", marks=pytest.mark.slow)])
def test_weights_on_disk_take_the_stated_memory(tmp_path: Path, recompute: str) -> None:
    """Two layers of 28.5 MB of weights and the largest gradient, of three layers with 16 bytes a parameter."""
    layout = {"offload": {"parameters": "disk"}, "recompute": recompute}
    stated = stated_memory(MODEL, train_config(layout), 50)
    assert stated.disk > 4 * stated.total
    assert measured(tmp_path, json.dumps(layout))["peak"] == pytest.approx(stated.total, rel=0.05)


@pytest.mark.slow
def test_inference_with_weights_on_disk_takes_two_layers(tmp_path: Path) -> None:
    found = measured(tmp_path, "inference")
    assert found["peak"] == pytest.approx(found["stated"], rel=0.05)

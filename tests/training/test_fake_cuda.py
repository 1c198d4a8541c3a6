"""The paths that only GPUs take, on fake tensors of a CUDA device that is not there (tests/support/fake_cuda.py)."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.support import fake_cuda

ROOT = Path(__file__).parents[2]
SOURCE = ROOT / "tests/support/fake_cuda.cpp"
QUICK = ["float8", "hybrid experts", fake_cuda.HOST]

pytestmark = pytest.mark.skipif(shutil.which("g++") is None, reason="compiles a device for fake tensors; install g++")


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    target, folder = tmp_path_factory.mktemp("fake_cuda") / "fake_cuda.so", Path(torch.__file__).parent
    libraries = [f"-L{folder}/lib", f"-Wl,-rpath,{folder}/lib", "-lc10", "-ltorch_cpu"]
    command = ["g++", "-std=c++20", "-O0", "-shared", "-fPIC", f"-I{folder}/include", str(SOURCE), "-o", str(target)]
    subprocess.run([*command, *libraries], check=True)
    return target


def errors_of(library: Path, cases: list[str]) -> dict[str, str | None]:
    """In a process of its own, which believes that there is a GPU."""
    command = [sys.executable, str(ROOT / "tests/support/fake_cuda.py"), str(library), *cases]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    lines = subprocess.run(command, check=True, capture_output=True, text=True, env=environment).stdout.splitlines()
    return {record["case"]: record["error"] for record in map(json.loads, lines)}


def test_steps_agree_on_devices_dtypes_and_shapes(library: Path) -> None:
    errors = errors_of(library, QUICK)
    assert "same device" in str(errors.pop(fake_cuda.HOST))
    assert errors == dict.fromkeys(QUICK[:-1])


@pytest.mark.slow
def test_every_path_of_gpus_agrees(library: Path) -> None:
    others = [case for case in fake_cuda.CASES if case not in QUICK]
    assert errors_of(library, others) == dict.fromkeys(others)

"""The paths that only GPUs take, on fake tensors of a CUDA device that is not there (tests/support/fake_cuda.py), and
the kernels that the compiler writes for one (tests/support/gpu_kernels.py)."""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support import fake_cuda

ROOT = Path(__file__).parents[2]
SOURCE = ROOT / "tests/support/fake_cuda.cpp"
QUICK = ["float8", "hybrid experts", fake_cuda.RING, fake_cuda.HOST]

pytestmark = pytest.mark.skipif(shutil.which("g++") is None, reason="compiles a device for fake tensors; install g++")


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    target, folder = tmp_path_factory.mktemp("fake_cuda") / "fake_cuda.so", Path(torch.__file__).parent
    libraries = [f"-L{folder}/lib", f"-Wl,-rpath,{folder}/lib", "-lc10", "-ltorch_cpu"]
    command = ["g++", "-std=c++20", "-O0", "-shared", "-fPIC", f"-I{folder}/include", str(SOURCE), "-o", str(target)]
    subprocess.run([*command, *libraries], check=True)
    return target


def records_of(program: str, library: Path, cases: Iterable[str]) -> list[dict[str, Any]]:
    """In a process of its own, which believes that there is a GPU."""
    command = [sys.executable, str(ROOT / "tests/support" / program), str(library), *cases]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    lines = subprocess.run(command, check=True, capture_output=True, text=True, env=environment).stdout.splitlines()
    return [json.loads(line) for line in lines]


def errors_of(library: Path, cases: list[str]) -> dict[str, str | None]:
    return {record["case"]: record["error"] for record in records_of("fake_cuda.py", library, cases)}


def test_steps_agree_on_devices_dtypes_and_shapes(library: Path) -> None:
    errors = errors_of(library, QUICK)
    assert "same device" in str(errors.pop(fake_cuda.HOST))
    assert errors == dict.fromkeys(QUICK[:-1])


@pytest.mark.slow
def test_every_path_of_gpus_agrees(library: Path) -> None:
    others = [case for case in fake_cuda.CASES if case not in QUICK]
    assert errors_of(library, others) == dict.fromkeys(others)


# Kernels of a layer, of two layers compiled together: forward and backward, (generated, library products).
BUDGETS = {
    "dense": [(12, 6), (12, 11)],
    "experts": [(22, 4), (19, 7)],
    "mamba2": [(26, 13), (39, 26)],
    "tcnca": [(29, 11), (36, 22)],
    "recomputed operators": [(12, 6), (20, 11)],
    "float8": [(12, 8), (33, 15)],
    "float8 experts": [(22, 6), (39, 11)],
}
LAYERS = {"recomputed operators": 1}  # compiled together


def kernels_of_a_layer(library: Path, case: str) -> list[tuple[float, float]]:
    (record,) = records_of("gpu_kernels.py", library, [case])
    layers = LAYERS.get(case, 2)
    return [(compiled["generated"] / layers, compiled["products"] / layers) for compiled in record["passes"]]


def are_within(counts: list[tuple[float, float]], budget: list[tuple[int, int]]) -> bool:
    return len(counts) == len(budget) and all(
        generated <= most_generated and products <= most_products
        for (generated, products), (most_generated, most_products) in zip(counts, budget, strict=True)
    )


@pytest.mark.parametrize("case", ["dense", *(pytest.param(case, marks=pytest.mark.slow) for case in [*BUDGETS][1:])])
def test_a_compiled_layer_is_few_kernels(library: Path, case: str) -> None:
    counts = kernels_of_a_layer(library, case)
    assert are_within(counts, BUDGETS[case]), counts


CASTS = 5  # of the compiled dense layer's kernels forward: of its fp32 weights, which liger is given in bf16


@pytest.mark.slow
def test_a_layer_of_liger_is_no_fewer_kernels(library: Path) -> None:
    pytest.importorskip("liger_kernel", reason="pip install --no-deps triton liger-kernel")
    (record,) = records_of("gpu_kernels.py", library, ["liger"])
    forward, backward = (passed["generated"] + passed["others"] for passed in record["passes"])
    assert forward >= BUDGETS["dense"][0][0] - CASTS and backward >= BUDGETS["dense"][1][0]


@pytest.mark.slow
def test_without_fusion_a_layer_is_more_kernels(library: Path) -> None:
    assert not are_within(kernels_of_a_layer(library, "apart"), BUDGETS["dense"])

"""A cached kernel is compiled again when a file that it can call was edited, and only then."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from gristmill.foundation.runtime.kernels.cached_njit import is_linked

ROOT = Path(__file__).parent.parent.parent.parent.parent
pytestmark = pytest.mark.skipif(not is_linked(), reason="another numba than the linked ones keeps kernels itself")

KERNEL = """
from gristmill.foundation.runtime.kernels.cached_njit import cached_njit
from tiny.callee import factor_of

@cached_njit()
def scaled(x):
    return x * factor_of()
"""
CALLEE = """
from gristmill.foundation.runtime.kernels.cached_njit import cached_njit
from tiny.numbers import FACTOR

@cached_njit(forceinline=True)
def factor_of():
    return FACTOR
"""
CALL = """
import sys
sys.path.insert(0, sys.argv[1])
from tiny.kernel import scaled
value = scaled(10)
print(value, int("numba" not in sys.modules))
"""


@pytest.fixture
def call(tmp_path):
    """Runs the kernel of a package in its own process: returns (its result,
    1 if it was called without importing numba)."""
    (tmp_path / "tiny").mkdir()
    (tmp_path / "tiny" / "kernel.py").write_text(KERNEL)
    (tmp_path / "tiny" / "callee.py").write_text(CALLEE)
    (tmp_path / "tiny" / "numbers.py").write_text("FACTOR = 2\n")
    (tmp_path / "call.py").write_text(CALL)
    environment = os.environ | {"GRISTMILL_KERNEL_CACHE": str(tmp_path / "cache")}

    def run() -> tuple[int, int]:
        command = [sys.executable, "-B", str(tmp_path / "call.py"), str(tmp_path)]
        printed = subprocess.run(command, env=environment, capture_output=True, text=True, check=True).stdout
        value, hits = printed.split()
        return int(value), int(hits)

    return run


def test_an_unchanged_kernel_comes_from_the_cache_and_an_edit_invalidates_it(call, tmp_path):
    """Of a callee, and of a constant two imports away."""
    assert call() == (20, 0)
    assert call() == (20, 1)
    callee = tmp_path / "tiny" / "callee.py"
    callee.write_text(callee.read_text().replace("return FACTOR", "return FACTOR + 1"))
    assert call() == (30, 0)
    (tmp_path / "tiny" / "numbers.py").write_text("FACTOR = 7\n")
    assert call() == (80, 0)


def test_every_cached_kernel_of_the_repository_is_guarded():
    """`numba.njit(cache=True)` would run a stale kernel after an edit of a callee."""
    folders = ("data_pipeline", "tokenizers", "training", "evaluation", "pipelines", "benchmarks")
    files = [path for folder in folders for path in (ROOT / folder).rglob("*.py")]
    unguarded = [str(path) for path in files if re.search(r"jit\([^)]*cache=True", path.read_text("utf-8"))]
    assert len(files) > 100 and unguarded == []


FORMS = """
import sys
sys.path.insert(0, sys.argv[1])
from typing import NamedTuple
import numpy as np
from gristmill.foundation.runtime.kernels.cached_njit import cached_njit

class Pair(NamedTuple):
    left: np.ndarray
    right: int

@cached_njit()
def summed(pair, factor, wanted):
    if pair.right < 0:
        raise ValueError("a negative number")
    total = np.zeros(2, np.float64)
    for value in pair.left:
        total[0] += value * factor
    total[1] = pair.right if wanted else 0
    return total, len(pair.left)

def written(values, *others):
    found, count = summed(Pair(values, 7), *others)
    return found.tolist(), count

array = np.arange(6, dtype=np.int64)
print(written(array, 2, True), written(array[::2], 0.5, False), written(array.astype(np.float32), np.int32(3), True))
frozen = array.copy(); frozen.flags.writeable = False
mapped = np.memmap(sys.argv[1] + "/mapped", np.uint8, "w+", shape=3); mapped[:] = 5
print(written(frozen, 1, True), written(mapped, 1, True), summed.py_func is not None)
print("numba" in sys.modules)
try:
    summed(Pair(array, -1), 2, True)
except ValueError as error:
    print(error)
import numba
print(numba.njit(lambda x: x + 1)(1), written(array, 2, True))
"""


def test_arguments_results_and_errors_are_numbas(tmp_path):
    """The first process calls the kernel through numba, the second without: both print the same."""
    (tmp_path / "forms.py").write_text(FORMS)
    environment = os.environ | {"GRISTMILL_KERNEL_CACHE": str(tmp_path / "cache")}
    command = [sys.executable, str(tmp_path / "forms.py"), str(tmp_path)]
    with_numba, without = (
        subprocess.run(command, env=environment, capture_output=True, text=True, check=True).stdout.splitlines()
        for _ in range(2)
    )
    assert with_numba[:2] == [
        "([30.0, 7.0], 6) ([3.0, 0.0], 3) ([45.0, 7.0], 6)",
        "([15.0, 7.0], 6) ([15.0, 7.0], 3) True",
    ]
    assert (with_numba.pop(2), without.pop(2)) == ("True", "False")
    assert with_numba == without
    assert with_numba[2:] == ["a negative number", "2 ([30.0, 7.0], 6)"]


CHAIN = """
import sys
sys.path.insert(0, sys.argv[1])
from gristmill.foundation.runtime.kernels.cached_njit import cached_njit

@cached_njit()
def root(x):
    if x < 0:
        raise ValueError("no root")
    return x**0.5

@cached_njit()
def distance(x, y):
    return root(x * x + y * y)

@cached_njit()
def nearest(x, y):
    return min(distance(x, y), root(-x))

for call in sys.argv[2:]:
    try:
        print(eval(call))
    except ValueError as error:
        print(error)
"""


def test_a_kernel_is_called_by_python_and_by_kernels(tmp_path):
    """Each process calls a kernel more, and reads what those before it kept of the others."""
    (tmp_path / "chain.py").write_text(CHAIN)
    environment = os.environ | {"GRISTMILL_KERNEL_CACHE": str(tmp_path / "cache")}
    calls = [("distance(3.0, 4.0)", "5.0"), ("root(9.0)", "3.0"), ("nearest(6.0, 4.0)", "no root")]
    for count in range(1, len(calls) + 1):
        code, expected = zip(*calls[:count], strict=True)
        command = [sys.executable, str(tmp_path / "chain.py"), str(tmp_path), *code]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
        assert done.stdout.splitlines() == list(expected)

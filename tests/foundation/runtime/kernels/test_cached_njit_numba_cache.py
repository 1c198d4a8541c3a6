"""Kernels by numba alone: kept between processes, and compiled again after an edit of any file they can call."""

import os
import subprocess
import sys

import pytest

KERNEL = """
from gristmill.foundation.runtime.kernels import cached_njit as kernels
kernels.LINKED_VERSIONS = ()
from gristmill.foundation.runtime.kernels.cached_njit import cached_njit
from tiny.numbers import FACTOR

@cached_njit()
def scaled(x):
    return x * FACTOR
"""
CALL = """
import sys
sys.path.insert(0, sys.argv[1])
from tiny.kernel import scaled
print(scaled(10), type(scaled).__name__, sum(scaled.dispatcher.stats.cache_hits.values()))
"""


@pytest.fixture
def call(tmp_path):
    """Calls the kernel in a process of its own: (its result, its class, how often it came from the cache)."""
    (tmp_path / "tiny").mkdir()
    (tmp_path / "tiny" / "kernel.py").write_text(KERNEL)
    (tmp_path / "tiny" / "numbers.py").write_text("FACTOR = 2\n")
    (tmp_path / "call.py").write_text(CALL)
    environment = os.environ | {"GRISTMILL_KERNEL_CACHE": str(tmp_path / "cache")}

    def run() -> tuple[str, ...]:
        command = [sys.executable, "-B", str(tmp_path / "call.py"), str(tmp_path)]
        return tuple(
            subprocess.run(command, env=environment, capture_output=True, text=True, check=True).stdout.split()
        )

    return run


def test_a_kernel_of_another_numba_is_kept_and_never_stale(call, tmp_path):
    assert call() == ("20", "NumbaKernel", "0")
    assert call() == ("20", "NumbaKernel", "1")
    (tmp_path / "tiny" / "numbers.py").write_text("FACTOR = 3\n")
    assert call() == ("30", "NumbaKernel", "0")

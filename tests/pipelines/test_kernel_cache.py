"""A damaged file of numba's cache gives one error message, not numba's traceback."""

import os
import subprocess
import sys

import pytest

from gristmill.pipelines.kernel_cache import damaged_kernels

KERNEL = """
import numba

@numba.njit(cache=True)
def add_one(x):
    return x + 1

"""
ASK = """
import sys
sys.path.insert(0, sys.argv[1])
from kernel import add_one
from gristmill.pipelines.kernel_cache import damaged_kernels
try:
    print(add_one(3))
except Exception as error:
    print(damaged_kernels(error))
"""


@pytest.mark.parametrize("suffix", ["nbi", "nbc"])
def test_a_damaged_kernel(tmp_path, suffix):
    (tmp_path / "kernel.py").write_text(KERNEL)
    (tmp_path / "ask.py").write_text(ASK)
    environment = os.environ | {"NUMBA_CACHE_DIR": str(tmp_path / "cache")}

    def ask():
        command = [sys.executable, str(tmp_path / "ask.py"), str(tmp_path)]
        return subprocess.run(command, env=environment, capture_output=True, text=True, check=True).stdout.strip()

    assert ask() == "4"
    for path in (tmp_path / "cache").rglob(f"*.{suffix}"):
        path.write_bytes(path.read_bytes()[:100])
    assert f"find {tmp_path / 'cache'} -name '*.nb[ic]' -delete" in ask()
    for path in (tmp_path / "cache").rglob("*.nb[ic]"):
        path.unlink()
    assert ask() == "4"


def test_other_errors_are_none_of_numbas():
    assert damaged_kernels(ValueError("of ours")) is None

"""A cached kernel is compiled again when a file that it can call was edited, and only then."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent.parent
KERNEL = """
from gristmill.foundation.cached_njit import cached_njit
from tiny.callee import factor_of

@cached_njit()
def scaled(x):
    return x * factor_of()
"""
CALLEE = """
from gristmill.foundation.cached_njit import cached_njit
from tiny.numbers import FACTOR

@cached_njit(forceinline=True)
def factor_of():
    return FACTOR
"""
CALL = """
import sys
sys.path.insert(0, sys.argv[1])
from tiny.kernel import scaled
print(scaled(10), len(scaled.stats.cache_hits))
"""


@pytest.fixture
def call(tmp_path):
    """Runs the kernel of a package in its own process: returns (its result, overloads that came from the cache)."""
    (tmp_path / "tiny").mkdir()
    (tmp_path / "tiny" / "kernel.py").write_text(KERNEL)
    (tmp_path / "tiny" / "callee.py").write_text(CALLEE)
    (tmp_path / "tiny" / "numbers.py").write_text("FACTOR = 2\n")
    (tmp_path / "call.py").write_text(CALL)
    environment = os.environ | {"GRISTMILL_KERNEL_CACHE": str(tmp_path / "cache")}

    def run() -> tuple[int, int]:
        command = [sys.executable, str(tmp_path / "call.py"), str(tmp_path)]
        printed = subprocess.run(command, env=environment, capture_output=True, text=True, check=True).stdout
        value, hits = printed.split()
        return int(value), int(hits)

    return run


def test_an_unchanged_kernel_comes_from_the_cache(call):
    assert call() == (20, 0)
    assert call() == (20, 1)


def test_an_edited_callee_invalidates_the_cache(call, tmp_path):
    assert call() == (20, 0)
    callee = tmp_path / "tiny" / "callee.py"
    callee.write_text(callee.read_text().replace("return FACTOR", "return FACTOR + 1"))
    assert call() == (30, 0)


def test_an_edited_constant_two_imports_away_invalidates_the_cache(call, tmp_path):
    assert call() == (20, 0)
    (tmp_path / "tiny" / "numbers.py").write_text("FACTOR = 7\n")
    assert call() == (70, 0)


def test_every_cached_kernel_of_the_repository_is_guarded():
    """`numba.njit(cache=True)` would run a stale kernel after an edit of a callee."""
    folders = ("data_pipeline", "tokenizers", "training", "evaluation", "pipelines", "benchmarks")
    files = [path for folder in folders for path in (ROOT / folder).rglob("*.py")]
    unguarded = [str(path) for path in files if re.search(r"jit\([^)]*cache=True", path.read_text("utf-8"))]
    assert len(files) > 100 and unguarded == []

"""Values kept on disk are those that the code computes, for every source and input."""

import os
import subprocess
import sys

import pytest

from gristmill.foundation.kept_values import kept_json
from gristmill.foundation.kernel_folder import kernel_folder

TABLE = """
import numpy as np
from gristmill.foundation.kept_values import kept_array

@kept_array
def squares(first):
    print("computed")
    return np.arange(first, 5, dtype=np.uint16) ** 2
"""
CALL = """
import sys
sys.path.insert(0, sys.argv[1])
from table import squares
print(squares(0), squares(3), squares(0).flags.writeable)
"""


@pytest.fixture
def cache(monkeypatch, tmp_path):
    monkeypatch.setenv("GRISTMILL_KERNEL_CACHE", str(tmp_path / "cache"))
    kernel_folder.cache_clear()
    yield tmp_path / "cache"
    kernel_folder.cache_clear()


def test_an_array_is_computed_once_per_machine_and_source(cache, tmp_path):
    def printed() -> list[str]:
        command = [sys.executable, "-c", CALL, str(tmp_path)]
        return subprocess.run(command, capture_output=True, text=True, check=True, env=os.environ).stdout.splitlines()

    (tmp_path / "table.py").write_text(TABLE)
    assert printed() == ["computed", "computed", "[ 0  1  4  9 16] [ 9 16] True"]
    assert printed() == ["[ 0  1  4  9 16] [ 9 16] True"]
    (tmp_path / "table.py").write_text(TABLE.replace("** 2", "** 3"))
    assert printed() == ["computed", "computed", "[ 0  1  8 27 64] [27 64] True"]
    for kept in cache.glob("*.array"):
        kept.write_bytes(kept.read_bytes()[:-1])
    assert printed() == ["computed", "computed", "[ 0  1  8 27 64] [27 64] True"]


def test_json_is_computed_once_for_each_digest(cache):
    computed = []

    def value():
        computed.append(1)
        return {"numbers": [46.6, None], "word": "é"}

    origin = test_json_is_computed_once_for_each_digest
    found = [kept_json(value, origin, digest) for digest in ("a", "a", "b", "a")]
    assert found == [{"numbers": [46.6, None], "word": "é"}] * 4
    assert len(computed) == 2

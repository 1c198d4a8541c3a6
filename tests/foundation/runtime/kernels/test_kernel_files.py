"""Values kept on disk are those that the code computes, for every source and input."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from gristmill.data_pipeline.signals import kernel
from gristmill.foundation.runtime.kernels.kernel_files import (
    _file_digest,
    _imported,
    kept_json,
    kernel_folder,
    source_digest,
    source_files,
)

TABLE = """
import numpy as np
from gristmill.foundation.runtime.kernels.kernel_files import cached_array

@cached_array
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
        # -B: Python itself takes a .pyc for that of an edited source of the same length and second.
        command = [sys.executable, "-B", "-c", CALL, str(tmp_path)]
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


# The digest of a module covers what it imports, at any depth, and nothing else.

FILES = {
    "top": '"""A docstring."""\nimport os\nfrom package.folder import (\n    left,\n    right,\n)\n',
    "folder/left": "from package.folder.leaf import VALUE  # a comment\n",
    "folder/right": 'def late():\n    import package.late\n\nlast = DeferredModule("package.deferred")\n',
    "folder/leaf": "VALUE = 1\n",
    "late": "",
    "deferred": "",
    "unrelated": "VALUE = 2\n",
}


@pytest.fixture
def package(tmp_path):
    (tmp_path / "folder").mkdir()
    for name, text in FILES.items():
        (tmp_path / f"{name}.py").write_text(text)
    return tmp_path


def digest(package):
    for cached in (_imported, _file_digest, source_digest):
        cached.cache_clear()
    return source_digest("package.top", package / "top.py")


def test_the_files_that_a_module_reaches(package):
    assert list(source_files("package.top", package / "top.py")) == [
        "package.deferred",
        "package.folder.leaf",
        "package.folder.left",
        "package.folder.right",
        "package.late",
        "package.top",
    ]


def test_an_edited_import_changes_the_digest(package):
    before = digest(package)
    (package / "folder" / "leaf.py").write_text("VALUE = 3\n")
    assert digest(package) != before


def test_an_edited_file_that_is_not_imported_does_not(package):
    before = digest(package)
    (package / "unrelated.py").write_text("VALUE = 3\n")
    assert digest(package) == before


def test_a_kernel_of_this_repository_reaches_the_files_it_calls():
    found = source_files(kernel.__name__, Path(kernel.__file__))
    assert {f"gristmill.data_pipeline.signals.{one}" for one in ("bits", "intrinsics", "words", "lines")} <= set(found)

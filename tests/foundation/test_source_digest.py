"""The digest of a module covers what it imports, at any depth, and nothing else."""

from pathlib import Path

import pytest

from gristmill.data_pipeline.signals import kernel
from gristmill.foundation.source_digest import _file_digest, _imported, source_digest, source_files

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

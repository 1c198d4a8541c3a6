"""The digest of a module covers what it imports, at any depth, and nothing else."""

from pathlib import Path

import pytest

from gristmill.data_pipeline.signals import kernel
from gristmill.foundation.source_digest import (
    _file_digest,
    _imported,
    _tree_digest,
    code_digest,
    source_digest,
    source_files,
)

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


def digests(package):
    for cached in (_imported, _file_digest, _tree_digest, source_digest):
        cached.cache_clear()
    return source_digest("package.top", package / "top.py"), code_digest(
        source_files("package.top", package / "top.py")
    )


def test_the_files_that_a_module_reaches(package):
    assert list(source_files("package.top", package / "top.py")) == [
        "package.deferred",
        "package.folder.leaf",
        "package.folder.left",
        "package.folder.right",
        "package.late",
        "package.top",
    ]


def test_a_module_left_out_is_not_followed(package):
    found = source_files("package.top", package / "top.py", without=["package.folder.left"])
    assert list(found) == ["package.deferred", "package.folder.right", "package.late", "package.top"]


def test_an_edited_import_changes_the_digests(package):
    before = digests(package)
    (package / "folder" / "leaf.py").write_text("VALUE = 3\n")
    after = digests(package)
    assert after[0] != before[0] and after[1] != before[1]


def test_an_edited_file_that_is_not_imported_does_not(package):
    before = digests(package)
    (package / "unrelated.py").write_text("VALUE = 3\n")
    assert digests(package) == before


def test_comments_and_docstrings_change_no_code_digest(package):
    before = digests(package)
    (package / "top.py").write_text(FILES["top"].replace("A docstring", "Another"))
    (package / "folder" / "left.py").write_text("from package.folder.leaf import VALUE\n")
    after = digests(package)
    assert after[0] != before[0] and after[1] == before[1]


def test_a_kernel_of_this_repository_reaches_the_files_it_calls():
    found = source_files(kernel.__name__, Path(kernel.__file__))
    assert {f"gristmill.data_pipeline.signals.{one}" for one in ("bits", "intrinsics", "words", "lines")} <= set(found)

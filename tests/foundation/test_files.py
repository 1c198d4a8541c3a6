"""A file is hashed once, until it changes."""

import hashlib
from pathlib import Path

import pytest

from gristmill.foundation import files
from gristmill.foundation.files import PROGRESS_BYTES, DigestCache, file_digest


def test_a_file_is_hashed_once_until_it_changes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hashed = []
    monkeypatch.setattr(files, "file_digest", lambda path, _: hashed.append(path.name) or file_digest(path))
    path, digests = tmp_path / "a", DigestCache()
    path.write_bytes(b"one")
    expected = hashlib.sha256(b"one").hexdigest()
    assert digests(path) == digests(path) == expected
    renamed = path.rename(tmp_path / "b")
    assert digests(renamed) == expected
    assert hashed == ["a"]
    renamed.write_bytes(b"other")
    assert digests(renamed) == hashlib.sha256(b"other").hexdigest()
    assert hashed == ["a", "b"]


def test_a_digest_that_another_process_computed_is_taken(tmp_path: Path) -> None:
    path, digests = tmp_path / "a", DigestCache()
    path.write_bytes(b"one")
    digests.add(path, "of the other process")
    assert digests(path) == "of the other process"


def test_hashing_reports_its_progress(tmp_path: Path) -> None:
    path, digests, calls = tmp_path / "a", DigestCache(), []
    path.write_bytes(bytes(2 * PROGRESS_BYTES + 1))
    digests.on_progress = lambda: calls.append(1)
    assert digests(path) == file_digest(path)
    assert len(calls) == 3

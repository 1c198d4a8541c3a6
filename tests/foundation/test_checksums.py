import os
import time
from hashlib import sha256
from types import SimpleNamespace

import pytest

from gristmill.foundation import checksums
from gristmill.foundation.checksums import (
    SMALL_BYTES,
    check_against,
    checksum_path,
    checksummed_path,
    drop_damaged,
    matches_checksum,
    read_cached,
    reading,
    remove_checksums,
)
from gristmill.foundation.errors import InputError
from gristmill.foundation.files import file_digest
from gristmill.foundation.manifest import Output


@pytest.fixture
def path(tmp_path):
    with checksummed_path(tmp_path / "deep/x") as temporary:
        temporary.write_bytes(b"content")
    return tmp_path / "deep/x"


def test_a_file_that_matches_its_checksum_stays(path, tmp_path):
    said = []
    drop_damaged(tmp_path, said.append)
    assert matches_checksum(path) and said == []


def test_a_copied_file_is_read_once_and_stays(tmp_path, monkeypatch):
    path = tmp_path / "x"
    with checksummed_path(path) as temporary:
        temporary.write_bytes(bytes(2 * SMALL_BYTES))
    read = []
    digest = checksums._digest
    monkeypatch.setattr(checksums, "_digest", lambda path: read.append(path) or digest(path))
    os.utime(path, (1, 1))
    assert matches_checksum(path) and matches_checksum(path) and read == [path]


def test_a_file_that_changes_while_it_is_read_is_read_again(tmp_path, monkeypatch):
    path = tmp_path / "x"
    with checksummed_path(path) as temporary:
        temporary.write_bytes(bytes(2 * SMALL_BYTES))
    os.utime(path, (1, 1))
    digest = checksums._digest

    def digest_then_change(path):
        read = digest(path)
        path.write_bytes(bytes(2 * SMALL_BYTES - 1) + b"x")
        return read

    monkeypatch.setattr(checksums, "_digest", digest_then_change)
    matches_checksum(path)
    monkeypatch.setattr(checksums, "_digest", digest)
    assert not matches_checksum(path)


@pytest.mark.parametrize("content", [b"cOntent", b"conten", b"", b"content and more"])
def test_a_damaged_file_is_named_and_removed_even_with_its_old_times(path, tmp_path, content):
    times = path.stat().st_atime_ns, path.stat().st_mtime_ns
    path.write_bytes(content)
    os.utime(path, ns=times)
    said = []
    drop_damaged(tmp_path, said.append)
    assert said == [f"{path}: damaged; it is written again"]
    assert not path.exists() and not checksum_path(path).exists()


@pytest.mark.parametrize("content", [b"", b"[1]", b'{"xxh3":"0"}', b"\xff"])
def test_a_damaged_seal_fits_no_file(path, tmp_path, content):
    checksum_path(path).write_bytes(content)
    assert not matches_checksum(path)


def test_a_kill_before_the_second_seal_loses_nothing(path):
    with checksummed_path(path) as temporary:
        temporary.write_bytes(bytes(2 * SMALL_BYTES))
    digest_only = checksum_path(path).read_bytes().split(b',"state"')[0] + b"}"
    assert digest_only != checksum_path(path).read_bytes()
    checksum_path(path).write_bytes(digest_only)
    assert matches_checksum(path)


def test_seals_are_removed_before_the_manifest_is_written(path, tmp_path):
    remove_checksums(tmp_path)
    assert [p.name for p in path.parent.iterdir()] == ["x"]


@pytest.fixture
def manifest(tmp_path):
    """Of two outputs, x and y."""
    for name in ("x", "y"):
        (tmp_path / name).write_bytes(b"content of " + name.encode())
    digests = {name: sha256((tmp_path / name).read_bytes()).hexdigest() for name in ("x", "y")}
    return SimpleNamespace(outputs=[Output(path=name, bytes=12, sha256=digest) for name, digest in digests.items()])


@pytest.fixture
def read_names(monkeypatch):
    """Names of the files whose bytes were read to be verified."""
    names = []

    def digest(path):
        names.append(path.name)
        return file_digest(path)

    monkeypatch.setattr(checksums, "file_digest", digest)
    return names


def an_hour_later(monkeypatch):
    later = time.time_ns() + 3600 * 10**9
    monkeypatch.setattr(checksums.time, "time_ns", lambda: later)


def test_outputs_that_are_unchanged_for_a_while_are_read_once(tmp_path, manifest, read_names, monkeypatch):
    an_hour_later(monkeypatch)
    check_against(tmp_path, manifest)
    check_against(tmp_path, manifest)
    assert read_names == ["x", "y"]
    os.utime(tmp_path / "x", (1, 1))
    check_against(tmp_path, manifest)
    assert read_names == ["x", "y", "x"]


def test_outputs_just_written_are_read_again(tmp_path, manifest, read_names):
    """Another write within the same tick of the clock would not show in their times."""
    check_against(tmp_path, manifest)
    check_against(tmp_path, manifest)
    assert read_names == ["x", "y", "x", "y"]


def test_only_the_wanted_outputs_are_verified(tmp_path, manifest, read_names, monkeypatch):
    an_hour_later(monkeypatch)
    check_against(tmp_path, manifest, lambda path: path == "y")
    assert read_names == ["y"]
    check_against(tmp_path, manifest)
    assert read_names == ["y", "x"]


def test_a_damaged_record_of_verified_outputs_is_made_anew(tmp_path, manifest, read_names, monkeypatch):
    an_hour_later(monkeypatch)
    check_against(tmp_path, manifest)
    for content in (b"", b"[1]", b"[" * 100_000):
        read_names.clear()
        (tmp_path / checksums.RECORD).write_bytes(content)
        check_against(tmp_path, manifest)
        assert read_names == ["x", "y"]
    assert sorted(read_cached(tmp_path / checksums.RECORD)) == ["x", "y"]


@pytest.mark.parametrize("content", [b"cOntent of x", b"shorter"])
def test_an_altered_output_is_named(tmp_path, manifest, content, monkeypatch):
    an_hour_later(monkeypatch)
    check_against(tmp_path, manifest)
    (tmp_path / "x").write_bytes(content)
    with pytest.raises(InputError, match=r"x: altered since it was written.*gristmill verify"):
        check_against(tmp_path, manifest)


def test_a_missing_output_is_named(tmp_path, manifest):
    (tmp_path / "y").unlink()
    with pytest.raises(InputError, match=r"y: cannot be read \(No such file"):
        check_against(tmp_path, manifest)


def test_an_error_while_reading_names_the_folder_and_its_remedy(tmp_path):
    with (
        pytest.raises(InputError, match=r"a file in it is damaged \(ValueError: two\); `gristmill verify"),
        reading(tmp_path),
    ):
        raise ValueError("two\nlines")

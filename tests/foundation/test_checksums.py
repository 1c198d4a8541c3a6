import os

import pytest

from gristmill.foundation.checksums import drop_damaged, is_sealed, remove_seals, seal_of, sealed_path


@pytest.fixture
def path(tmp_path):
    with sealed_path(tmp_path / "deep/x") as temporary:
        temporary.write_bytes(b"content")
    return tmp_path / "deep/x"


def test_a_file_that_is_as_it_was_sealed_stays(path, tmp_path):
    said = []
    drop_damaged(tmp_path, said.append)
    assert is_sealed(path) and said == []


def test_a_copied_file_is_read_and_stays(path, tmp_path):
    os.utime(path, (1, 1))
    assert is_sealed(path)


@pytest.mark.parametrize("content", [b"cOntent", b"conten", b"", b"content and more"])
def test_a_damaged_file_is_named_and_removed_even_with_its_old_times(path, tmp_path, content):
    times = path.stat().st_atime_ns, path.stat().st_mtime_ns
    path.write_bytes(content)
    os.utime(path, ns=times)
    said = []
    drop_damaged(tmp_path, said.append)
    assert said == [f"{path}: damaged; it is written again"]
    assert not path.exists() and not seal_of(path).exists()


@pytest.mark.parametrize("content", [b"", b"[1]", b'{"xxh3":"0"}', b"\xff"])
def test_a_damaged_seal_fits_no_file(path, tmp_path, content):
    seal_of(path).write_bytes(content)
    assert not is_sealed(path)


def test_a_kill_before_the_second_seal_loses_nothing(path):
    digest_only = seal_of(path).read_bytes().split(b',"state"')[0] + b"}"
    seal_of(path).write_bytes(digest_only)
    assert is_sealed(path)


def test_seals_are_removed_before_the_manifest_is_written(path, tmp_path):
    remove_seals(tmp_path)
    assert [p.name for p in path.parent.iterdir()] == ["x"]

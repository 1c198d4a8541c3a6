import pytest

from gristmill.foundation.errors import InputError
from gristmill.foundation.files import atomic_path, write_atomic
from gristmill.foundation.manifest import StageIdentity, differences, read_manifest, write_manifest


def whole_folder(folder):
    write_atomic(folder / "a.txt", b"alpha")
    write_atomic(folder / "deep/b.txt", b"beta")
    write_atomic(folder / "logs/times.jsonl", b"never the same")
    return write_manifest(folder, StageIdentity("curate", 1, {"x": 1}), {"read": 2}, {})


def test_a_whole_folder_agrees_with_its_manifest(tmp_path):
    manifest = whole_folder(tmp_path)
    assert [output.path for output in manifest.outputs] == ["a.txt", "deep/b.txt"]
    assert read_manifest(tmp_path) == manifest
    assert differences(tmp_path, manifest) == []


def test_each_difference_is_named(tmp_path):
    manifest = whole_folder(tmp_path)
    (tmp_path / "a.txt").write_bytes(b"alphA")
    (tmp_path / "deep/b.txt").unlink()
    (tmp_path / "c.txt").write_bytes(b"new")
    said = differences(tmp_path, manifest)
    assert [line.removeprefix(f"{tmp_path}/").split(":")[0] for line in said] == ["deep/b.txt", "c.txt", "a.txt"]
    (tmp_path / "a.txt").write_bytes(b"alpha and more")
    assert f"{tmp_path}/a.txt: 14 bytes, the manifest says 5" in differences(tmp_path, manifest)


def test_logs_and_rubble_are_outside(tmp_path):
    manifest = whole_folder(tmp_path)
    (tmp_path / "logs/times.jsonl").write_bytes(b"other")
    (tmp_path / ".a.txt.99.tmp").write_bytes(b"of a killed run")
    assert differences(tmp_path, manifest) == []


def test_no_manifest(tmp_path):
    with pytest.raises(InputError, match="is incomplete"):
        read_manifest(tmp_path)


def test_a_manifest_that_is_none(tmp_path):
    (tmp_path / "manifest.json").write_text("{}")
    with pytest.raises(InputError, match="not a manifest"):
        read_manifest(tmp_path)


def test_an_atomic_write_that_fails_leaves_the_old_file(tmp_path):
    path = tmp_path / "x"
    write_atomic(path, b"old")
    with pytest.raises(OSError, match="full"), atomic_path(path) as temporary:
        temporary.write_bytes(b"half")
        raise OSError("full")
    assert path.read_bytes() == b"old"
    assert [child.name for child in tmp_path.iterdir()] == ["x"]

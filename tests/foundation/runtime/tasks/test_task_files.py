"""Tasks on a machine that shares nothing with the driver but a store, here fsspec's in memory."""

import errno
import hashlib
import os
import uuid
from dataclasses import replace

import numpy as np
import pytest
import xxhash

from gristmill.foundation.checksums import (
    checksum_path,
    checksummed_path,
    content_digest,
    link_with_checksum,
    matches_checksum,
    read_cached,
)
from gristmill.foundation.errors import InputError
from gristmill.foundation.files import atomic_path, file_digest, locked_temp_dir, remove_abandoned, stubs_below
from gristmill.foundation.runtime.store.store import Store
from gristmill.foundation.runtime.tasks import task_files
from gristmill.foundation.runtime.tasks.task_files import PartitionedFiles, TransferError, fetch, fetch_folder
from gristmill.foundation.runtime.tasks.transport import DriverFiles, ThroughStore, run_in_view

RECORD = np.dtype("<u4")


@pytest.fixture
def files(tmp_path, monkeypatch):
    """The driver's files; nodes keep theirs below tmp_path / "node"."""
    monkeypatch.setenv("GRISTMILL_SCRATCH", str(tmp_path / "node"))
    (tmp_path / "work").mkdir()
    return DriverFiles(tmp_path / "work", f"memory://{uuid.uuid4().hex}")


def run(files, function, task):
    """The result of one task, as the engine gets it."""
    scratch = files.root / ".scratch"
    scratch.mkdir(exist_ok=True)
    carrier = ThroughStore(files, scratch, function, [task])
    ok, value = carrier.answer(run_in_view(carrier.order(task), carrier.scratch))
    carrier.finish()
    if not ok:
        raise value[0]
    return value


def copied(task):
    """Copies a file that it names, one of a folder and one that it derives; returns where the copy is."""
    named, folder, prefix, out = task
    parts = [named, fetch_folder(folder) / "b.txt", fetch(prefix.with_name(f"{prefix.name}-7.txt"))]
    assert not (folder.parent / "secret.txt").exists()  # which the task does not name
    with checksummed_path(out) as temporary:
        temporary.write_text("".join(part.read_text() for part in parts))
    return {"out": out, "large": np.arange(100_000)}


def test_a_task_gets_what_it_names_and_its_files_come_back(files, tmp_path):
    root = files.root
    for name in ("a.txt", "folder/b.txt", "pre-7.txt", "secret.txt"):
        (root / name).parent.mkdir(exist_ok=True)
        (root / name).write_text(name)
    task = (root / "a.txt", root / "folder", root / "pre", root / "new/out.txt")
    for _ in range(2):  # the second run finds all in the node's cache, and writes the same
        found = run(files, copied, task)
        assert found["out"] == root / "new/out.txt" and found["large"].sum() == 4_999_950_000
        assert found["out"].read_text() == "a.txtfolder/b.txtpre-7.txt" and matches_checksum(found["out"])
    (root / "a.txt").write_text("changed ")
    assert run(files, copied, task)["out"].read_text() == "changed folder/b.txtpre-7.txt"
    [view] = [path for path in (tmp_path / "node/nodes").glob("*/views/*") if path.is_dir()]
    assert list(view.iterdir()) == []
    files.clear()
    assert not files.objects.store.list("tasks")


def test_a_file_that_is_linked_after_it_arrived_is_not_uploaded(files, monkeypatch):
    """A link gives the file another state, and a second name: the store has its content already."""
    root, sent = files.root, []
    for name in ("a.txt", "folder/b.txt", "pre-7.txt"):
        (root / name).parent.mkdir(exist_ok=True)
        (root / name).write_text(name)
    out = run(files, copied, (root / "a.txt", root / "folder", root / "pre", root / "new/out.txt"))["out"]
    (root / "kept.txt").hardlink_to(out)
    monkeypatch.setattr(Store, "put", lambda self, name, path: sent.append(path.name))
    assert {file.name for file in files.listing([out, root / "kept.txt"]).files().values()} == {
        "new/out.txt",
        "kept.txt",
    }
    assert sent == []


def write_twice(task):
    """Two files with the text of the first, so often that they are worth a stub."""
    source, folder = task
    for name in ("sealed.txt", "plain.txt"):
        with (checksummed_path if name == "sealed.txt" else atomic_path)(folder / name) as temporary:
            temporary.write_text(source.read_text() * 2000)


def test_what_a_task_wrote_stays_in_the_store_until_the_driver_reads_it(files):
    root = files.root
    (root / "a.txt").write_text("abc ")
    run(files, write_twice, (root / "a.txt", root / "new"))
    sealed, plain, content = root / "new/sealed.txt", root / "new/plain.txt", b"abc " * 2000
    assert [path for path, _ in stubs_below(root)] == [plain, sealed]
    for path in (sealed, plain):
        assert path.stat().st_size == len(content) and path.read_bytes() != content
        assert file_digest(path) == hashlib.sha256(content).hexdigest()
        assert content_digest(path) == xxhash.xxh3_128_hexdigest(content)
    link_with_checksum(sealed, root / "linked.txt")
    (root / "new").rename(root / "old")
    sealed, plain = root / "old/sealed.txt", root / "old/plain.txt"
    assert matches_checksum(sealed) and matches_checksum(root / "linked.txt")
    assert run(files, read, root / "linked.txt") == content.decode()  # a node has it from the store
    assert task_files.read_range(plain, 4, 8) == b"abc "
    files.clear()  # all but what the stubs stand for
    assert len(files.objects.store.list("tasks")) == 1
    assert fetch(sealed).read_bytes() == content and matches_checksum(sealed)
    fetch_folder(root)
    assert not list(stubs_below(root)) and plain.read_bytes() == content
    files.clear()
    assert not files.objects.store.list("tasks")


class FailingFile:
    """A stored file whose second piece does not arrive."""

    def __init__(self, content, error):
        self.pieces = iter((content[:1000], error))

    def read(self, _):
        if isinstance(piece := next(self.pieces), BaseException):
            raise piece
        return piece

    def __enter__(self):
        return self

    def __exit__(self, *_):
        return None


@pytest.mark.parametrize("error", [OSError(errno.ENOSPC, "no space"), KeyboardInterrupt()], ids=["full", "stopped"])
def test_a_download_that_fails_in_the_middle_leaves_the_stub(files, monkeypatch, error):
    root, content = files.root, b"abc " * 2000
    (root / "a.txt").write_text("abc ")
    run(files, write_twice, (root / "a.txt", root / "new"))
    sealed, linked = root / "new/sealed.txt", root / "linked.txt"
    link_with_checksum(sealed, linked, note={"made_from": "abc"})
    before = sealed.read_bytes()
    with monkeypatch.context() as patch:
        patch.setattr(files.objects.store._files, "open", lambda *_, **__: FailingFile(content, error))
        with pytest.raises((InputError, KeyboardInterrupt)):
            fetch(sealed)
    assert sealed.read_bytes() == before and matches_checksum(sealed) and len(list(stubs_below(root))) == 3
    assert not list(root.rglob(".*.tmp"))
    fetch_folder(root)
    assert sealed.read_bytes() == linked.read_bytes() == content
    assert read_cached(checksum_path(linked))["made_from"] == "abc" and matches_checksum(linked)


def pieces(task):
    found, number = task
    return [(part, records.tolist()) for part, records in found.segments(number)]


@pytest.mark.parametrize("min_bytes", [0, 1 << 20])
def test_ranges_of_a_shuffle_are_read_from_the_store(files, monkeypatch, min_bytes):
    monkeypatch.setattr(task_files, "MIN_RANGED_BYTES", min_bytes)
    fetched = []
    plain = task_files.TaskObjects.get
    monkeypatch.setattr(task_files.TaskObjects, "get", lambda *a: fetched.append(a[1].name) or plain(*a))
    found = PartitionedFiles(files.root / "records", RECORD, 2, 3)
    found.write(0, np.array([1, 2, 3], RECORD), np.array([0, 1, 1, 3]))
    found.write(1, np.array([4, 5], RECORD), np.array([0, 0, 1, 2]))
    for number, expected in enumerate([[(0, [1])], [(1, [4])], [(0, [2, 3]), (1, [5])]]):
        assert run(files, pieces, (found, number)) == expected == pieces((found, number))
    assert len(fetched) == (0 if min_bytes == 0 else 2)  # whole files, each once


def refuse(path):
    path.with_name("half.txt").write_text("half")
    raise InputError(f"{path}: is broken")


def test_errors_name_the_drivers_file_and_leave_nothing(files):
    (files.root / "a.txt").write_text("a")
    with pytest.raises(InputError) as caught:
        run(files, refuse, files.root / "a.txt")
    assert str(caught.value) == f"{files.root}/a.txt: is broken"
    assert not (files.root / "half.txt").exists()


def read(path):
    return path.read_text()


def test_a_store_that_lost_an_object_is_an_error_of_the_transfer(files):
    (files.root / "a.txt").write_text("a")
    carrier = ThroughStore(files, files.root, read, [files.root / "a.txt"])
    for name in files.objects.store.list("tasks"):
        if files.objects.store.read(name) == b"a":
            files.objects.store.delete(name)
    with pytest.raises(TransferError, match="memory://"):
        run_in_view(carrier.order(files.root / "a.txt"), carrier.scratch)


def test_a_file_outside_of_the_work_folder_is_refused(files):
    found = task_files.TaskFile("../outside.txt", 1, "0" * 64)
    for name in ("../outside.txt", "/outside.txt"):
        with pytest.raises(InputError, match="outside of the work folder"):
            files.receive([replace(found, name=name)])


def test_the_cache_is_trimmed_when_the_disk_is_full(tmp_path, monkeypatch):
    for age, name in enumerate(["new", "old"]):
        (tmp_path / name).write_bytes(b"x" * 150)
        os.utime(tmp_path / name, (1000 - age, 1000 - age))
    usage = type("usage", (), {"total": 1000, "free": 110})
    monkeypatch.setattr(task_files.shutil, "disk_usage", lambda _: usage)
    task_files._free_disk(tmp_path)
    assert len(list(tmp_path.iterdir())) == 2
    usage.free = 99
    task_files._free_disk(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["new"]


def test_folders_of_ended_processes_are_removed(tmp_path):
    with locked_temp_dir(tmp_path) as held:
        (tmp_path / "killed").mkdir()  # as if its process had died: nobody holds its mark
        (tmp_path / "killed.held").touch()
        (tmp_path / "unmarked").mkdir()
        remove_abandoned(tmp_path)
        assert sorted(path.name for path in tmp_path.iterdir()) == [held.name, f"{held.name}.held"]
    assert list(tmp_path.iterdir()) == []

"""What a power failure may undo, by POSIX: data of a file until its fsync, a name in a folder until the folder's."""

import os
import shutil
import sys
import time
from pathlib import Path

import pytest

from gristmill.foundation import checksums
from gristmill.foundation.checksums import check_outputs, file_state, is_settled
from gristmill.foundation.errors import InputError
from gristmill.foundation.files import write_atomic
from gristmill.foundation.lock import Lock
from gristmill.foundation.manifest import read_manifest
from gristmill.foundation.progress import Reporter
from gristmill.pipelines.provenance.verify import verify
from gristmill.pipelines.recipes.config import Recipe
from gristmill.pipelines.stages.runner import Runner
from gristmill.pipelines.stages.stage import Stage

RECIPE = Recipe.model_validate(
    {
        "name": "letters",
        "sources": [{"name": "s", "format": "text", "paths": ["x"]}],
        "model": {"layers": 1, "width": 8, "heads": 2, "sequence_length": 8},
        "train": {"tokens": 64, "batch_tokens": 16},
    }
)


def write_outputs(context) -> dict:
    """Files that are renamed into place, one in a folder of its own, and one that a library writes as it likes."""
    write_atomic(context.folder / "first", b"1")
    write_atomic(context.folder / "inner/deep/second", b"2")
    (context.folder / "third").write_bytes(b"3" * 1000)
    return {}


def run(workdir: Path, code_version: int = 1) -> None:
    stages = [
        Stage("a", code_version, (), lambda recipe: {}, write_outputs),
        Stage("b", 1, ("a",), lambda recipe: {}, write_outputs),
    ]
    Runner(RECIPE, workdir, stages, Lock(sources=()), Reporter.silent()).run()


class Events:
    """Every rename below the folder, and every fsync with what it made durable, in their order."""

    def __init__(self, folder: Path, monkeypatch):
        self.folder, self.found = str(folder), list[tuple]()
        fsync = os.fsync

        def noted(descriptor: int) -> None:
            fsync(descriptor)
            state = os.fstat(descriptor)
            self.found.append(("fsync", state.st_ino, state.st_mtime_ns))

        monkeypatch.setattr(os, "fsync", noted)
        sys.addaudithook(self.audit)

    def audit(self, event: str, arguments: tuple) -> None:
        if event == "os.rename" and str(arguments[0]).startswith(self.folder):
            self.found.append(("rename", str(arguments[0]), str(arguments[1])))

    def last_rename_to(self, path: Path) -> int:
        return max(at for at, event in enumerate(self.found) if event[0] == "rename" and event[2] == str(path))


def named_in(event: tuple, stage: str, name: str) -> bool:
    """Whether the event renamed a file into the folder of the name, of the running stage."""
    if event[0] != "rename":
        return False
    folder = Path(event[2]).parent
    return (
        folder.name.startswith(f".{stage}-") if not name else str(folder).endswith(name) and f"/.{stage}-" in event[2]
    )


def inode(path: Path) -> int:
    return path.stat().st_ino


def test_when_a_stage_is_complete_all_its_bytes_and_names_are_on_disk(tmp_path, monkeypatch):
    workdir = tmp_path / "work"
    events = Events(workdir, monkeypatch)
    run(workdir)
    run(workdir, code_version=2)  # replaces both folders
    for stage in ("a", "b"):
        folder = workdir / stage
        complete = events.last_rename_to(folder)
        before = set(events.found[:complete])
        for output in read_manifest(folder).outputs:
            state = (folder / output.path).stat()
            assert ("fsync", state.st_ino, state.st_mtime_ns) in before, output.path
        for name in ("", "inner", "inner/deep"):
            renames = [at for at, event in enumerate(events.found[:complete]) if named_in(event, stage, name)]
            synced = [at for at, event in enumerate(events.found[:complete]) if event[1] == inode(folder / name)]
            assert max(synced) > max(renames, default=0), name
        after = [event[:2] for event in events.found[complete:]]
        assert ("fsync", workdir.stat().st_ino) in after


def test_the_manifest_is_named_after_the_outputs_are_on_disk(tmp_path, monkeypatch):
    events = Events(tmp_path, monkeypatch)
    run(tmp_path / "work")
    manifests = [
        at for at, event in enumerate(events.found) if event[0] == "rename" and event[2].endswith("manifest.json")
    ]
    names = [at for at, event in enumerate(events.found) if event[1] == inode(tmp_path / "work/a/inner/deep")]
    assert min(names) < manifests[0]


def test_a_reader_of_the_old_file_keeps_its_bytes_and_the_name_has_the_new(tmp_path):
    path, other = tmp_path / "file", tmp_path / "hard link"
    write_atomic(path, b"old")
    os.link(path, other)
    with path.open("rb") as reader:
        write_atomic(path, b"new, and longer")
        assert reader.read() == b"old"
    assert (path.read_bytes(), other.read_bytes()) == (b"new, and longer", b"old")


def test_a_file_is_renamed_over_a_link_and_what_it_points_to_stays(tmp_path):
    target, link = tmp_path / "target", tmp_path / "link"
    target.write_bytes(b"somebody's")
    link.symlink_to(target)
    write_atomic(link, b"ours")
    assert (target.read_bytes(), link.read_bytes(), link.is_symlink()) == (b"somebody's", b"ours", False)


def test_a_folder_in_the_place_of_a_file_is_named_and_kept(tmp_path):
    (tmp_path / "file/inner").mkdir(parents=True)
    with pytest.raises(IsADirectoryError):
        write_atomic(tmp_path / "file", b"content")
    assert [path.name for path in tmp_path.rglob("*")] == ["file", "inner"]


def outputs(workdir: Path) -> dict[str, bytes]:
    return {
        str(p.relative_to(workdir)): p.read_bytes() for p in workdir.rglob("*") if p.is_file() and "logs" not in p.parts
    }


@pytest.mark.parametrize("years", [-30, 30])
def test_a_clock_that_jumps_between_two_stages_changes_no_byte(years, tmp_path, monkeypatch):
    """A clock that goes back leaves files of the future, one that goes forward files of long ago."""
    run(tmp_path / "whole")
    run(tmp_path / "work")
    shutil.rmtree(tmp_path / "work/b")
    for path in (tmp_path / "work").rglob("*"):
        os.utime(path, ns=(0, path.stat().st_mtime_ns - years * 365 * 86400 * 10**9))
    run(tmp_path / "work")
    assert outputs(tmp_path / "work") == outputs(tmp_path / "whole")
    assert verify(tmp_path / "work").wrong == []


def test_a_change_is_found_though_the_clock_went_back_and_the_times_were_set(tmp_path):
    """Size and mtime are those of the file that was checked; the ctime is not."""
    run(tmp_path)
    check_outputs(tmp_path / "a")
    path = tmp_path / "a/third"
    before = path.stat()
    path.write_bytes(b"4" * 1000)
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    with pytest.raises(InputError, match="third"):
        check_outputs(tmp_path / "a")


def test_a_file_of_the_future_is_never_taken_for_settled(tmp_path, monkeypatch):
    """While the clock is behind a file's times, the next change may get the same: it is read again each time."""
    path = tmp_path / "file"
    path.write_bytes(b"1")
    now = time.time_ns()
    monkeypatch.setattr(checksums.time, "time_ns", lambda: now - 3600 * 10**9)
    assert not is_settled(file_state(path))
    monkeypatch.setattr(checksums.time, "time_ns", lambda: now + 3600 * 10**9)
    assert is_settled(file_state(path))

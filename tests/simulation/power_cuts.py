"""Runs a stage in which the power fails at one file-system call, and the stage once more.

What was not synced is lost: data of files since their fsync, and names since the fsync of their folder (as POSIX says).
As a program: FOLDER STAGE COUNT SEED, as `failing_calls.py`."""

import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from tests.simulation.failing_calls import FailingStages, Failure, report

State = tuple[int, int]  # bytes, time of modification in ns


@dataclass(frozen=True)
class Note:
    """Line of the journal of failing_calls.c. kind: C created, D mkdir, R rename, U unlink, X rmdir. folder, file,
    old_folder: inodes. backup: name of a link to what the name stood for before, "-" for none."""

    kind: str
    folder: int
    file: int
    backup: str
    name: str
    old_folder: int
    old_name: str


class Journal:
    """What a run changed and synced, in order."""

    def __init__(self, path: Path, backups: Path):
        self.backups = backups
        self.notes: list[tuple[int, Note]] = []
        self.synced: dict[int, State] = {}  # inode -> what the last sync made durable
        self._last_sync: dict[int, int] = {}
        for position, line in enumerate(path.read_text("utf-8", "surrogateescape").splitlines()):
            kind, *fields = line.split("\t")
            if kind == "S":
                inode, size, modified = map(int, fields)
                self.synced[inode], self._last_sync[inode] = (size, modified), position
            else:
                folder, file, backup, name, old_folder, old_name = fields
                note = Note(kind, int(folder), int(file), backup, name, int(old_folder), old_name)
                self.notes.append((position, note))

    def unsynced(self) -> list[Note]:
        """Changes of names that no later sync of their folder made durable, the last first."""
        return [note for position, note in reversed(self.notes) if self._last_sync.get(note.folder, -1) < position]


def states_of(folder: Path) -> dict[int, State]:
    """By inode, the state of each file below the folder."""
    statuses = [path.lstat() for path in folder.rglob("*") if path.is_file() and not path.is_symlink()]
    return {status.st_ino: (status.st_size, status.st_mtime_ns) for status in statuses}


def drop_names(folder: Path, journal: Journal) -> None:
    """Takes back the changes of names that may be lost."""
    for note in journal.unsynced():
        folders = {path.stat().st_ino: path for path in (folder, *folder.rglob("*")) if path.is_dir()}
        if note.folder not in folders:
            continue
        path = folders[note.folder] / note.name
        is_there = path.exists() and path.stat().st_ino == note.file
        if note.kind in ("C", "D") and is_there:
            shutil.rmtree(path) if path.is_dir() else path.unlink()
        if note.kind == "R" and is_there and note.old_folder in folders:
            path.rename(folders[note.old_folder] / note.old_name)
        if note.kind == "X" and not path.exists():
            path.mkdir()
        if note.backup != "-" and not path.exists():
            path.hardlink_to(journal.backups / note.backup)


def drop_data(folder: Path, journal: Journal, before: Mapping[int, State]) -> None:
    """Cuts each file to the bytes that its last sync had, or that it had before the run. Every second file that was
    never synced keeps its size and has zeros, as on XFS."""
    for number, path in enumerate(sorted(path for path in folder.rglob("*") if path.is_file())):
        status = path.stat()
        durable = journal.synced.get(status.st_ino, before.get(status.st_ino))
        if durable == (status.st_size, status.st_mtime_ns):
            continue
        size = 0 if durable is None else min(durable[0], status.st_size)
        with path.open("r+b") as file:
            file.truncate(size)
            if durable is None and number % 2:
                file.truncate(status.st_size)


class PowerCuts(FailingStages):
    """As FailingStages; the power fails at the call. Of three cuts one loses names, one data, and one both."""

    def problems(self, stage: str, fail_at: int, stays: bool = False) -> tuple[Failure, list[str]]:
        self.begin(stage)
        journal, backups = self.folder / "journal", self.folder / "backups"
        journal.unlink(missing_ok=True)
        shutil.rmtree(backups, ignore_errors=True)
        backups.mkdir()
        before = states_of(self.work)
        code, said, _ = self.run(stage, fail_at, journal=(journal, backups))
        _, _, name, path = self.counted()
        failure = Failure(fail_at, name, path.replace(str(self.folder), ""), 0)
        problems = [] if code in (-9, 0) else [f"exit code {code}: {said[-1500:]}"]
        noted = Journal(journal, backups)
        if fail_at % 3 != 1:
            drop_names(self.work, noted)
        if fail_at % 3 != 2:
            drop_data(self.work, noted, before)
        again, said, _ = self.run(stage, 0)
        if again or "Traceback" in said:
            problems.append(f"did not go on: {said[-1500:]}")
        elif different := self.different(self.work):
            problems.append(f"other files after the same command: {different}")
        return failure, problems


if __name__ == "__main__":
    report(PowerCuts)

"""The driver's side of `task_files.py`: uploads the files that tasks name, and downloads those that they wrote."""

import glob
from collections.abc import Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path, PurePosixPath

from gristmill.foundation.checksum_files import seal_with
from gristmill.foundation.errors import InputError
from gristmill.foundation.file_state_cache import file_state
from gristmill.foundation.task_files import Listing, TaskFile, TaskObjects

THREADS = 8


class DriverFiles:
    """root: the work folder. Not for two threads at once."""

    def __init__(self, root: Path, address: str):
        self.root, self.objects = root.absolute(), TaskObjects(address)
        self._known: dict[str, tuple[dict[str, int], TaskFile]] = {}  # name -> its state and the object like it
        self._threads = ThreadPoolExecutor(THREADS)
        self._arriving: list[Future[None]] = []

    def listing(self, named: Iterable[Path]) -> Listing:
        """Of the files that tasks may read which name these paths: a file itself, all files below a folder, and those
        whose paths begin so. They are uploaded."""
        paths = sorted({file for path in named for file in _files_at(path)})
        files = list(self._threads.map(self._uploaded, paths))
        return Listing.write(self.objects, files, self.root)

    def _uploaded(self, path: Path) -> TaskFile:
        name, state = path.relative_to(self.root).as_posix(), file_state(path)
        if name not in self._known or self._known[name][0] != state:
            file = TaskFile.of(path, self.root)
            self.objects.put(path, file.digest)
            self._known[name] = state, file
        return self._known[name][1]

    def receive(self, written: Sequence[TaskFile]) -> None:
        """Download what a task wrote; `wait` ends when all of it is there."""
        for file in written:
            if PurePosixPath(file.name).is_absolute() or ".." in PurePosixPath(file.name).parts:
                raise InputError(f"{file.name!r}: a task wrote it outside of the work folder")
            self._arriving.append(self._threads.submit(self._receive, file))

    def _receive(self, file: TaskFile) -> None:
        path = self.root / file.name
        known = self._known.get(file.name)
        if known is None or known[1] != file or not path.exists() or known[0] != file_state(path):
            self.objects.get(path, file.bytes, file.digest)
            if file.seal:
                seal_with(path, file.seal)
            self._known[file.name] = file_state(path), file

    def wait(self) -> None:
        arriving, self._arriving = self._arriving, []
        for one in arriving:
            one.result()

    def clear(self) -> None:
        """Remove all objects."""
        self._known = {}
        self.objects.delete_all()


def _files_at(path: Path) -> Iterable[Path]:
    if path.is_file():
        found: Iterable[Path] = [path]
    elif path.is_dir():
        found = path.rglob("*")
    else:
        found = path.parent.glob(f"{glob.escape(path.name)}*") if path.parent.is_dir() else []
    return [one for one in found if not one.name.startswith(".") and one.is_file()]

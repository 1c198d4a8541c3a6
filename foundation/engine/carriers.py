"""How tasks and answers travel between driver and nodes: over a shared folder, or through an object store."""

import errno
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Protocol

from gristmill.foundation.engine.driver_files import DriverFiles
from gristmill.foundation.engine.parcel import Parcel, packed, packed_below, unpacked, unpacked_below
from gristmill.foundation.engine.worker_pool import answer_of
from gristmill.foundation.files import file_digest
from gristmill.foundation.task_files import Listing, TaskObjects, TaskView, TransferError, node_scratch, task_view

# Errors of a network file system or a connection that another attempt may not meet.
TRANSIENT = {errno.EIO, errno.ESTALE, errno.ETIMEDOUT, errno.ECONNRESET, errno.ECONNREFUSED, errno.EHOSTUNREACH}


class Carrier(Protocol):
    """The driver's side of one map. scratch: what each node gets with an order."""

    scratch: Path | Listing

    def order(self, task: Any) -> Parcel:
        """The function and this task."""
        ...

    def answer(self, parcel: Parcel) -> tuple[bool, Any]:
        """(True, the result) or (False, (exception, its traceback))."""
        ...

    def finish(self) -> None:
        """Returns when all files that tasks wrote are in the work folder."""
        ...


class SharedFolder:
    """Large messages are files in a folder that all nodes share, as they share the work folder."""

    def __init__(self, folder: Path, function: Callable[[Any], Any]):
        self.scratch: Path | Listing = folder
        self.folder, self.function = folder, function

    def order(self, task: Any) -> Parcel:
        return packed((self.function, task), self.folder)

    def answer(self, parcel: Parcel) -> tuple[bool, Any]:
        return unpacked(parcel)

    def finish(self) -> None:
        """Nothing: they are written there."""


class ThroughStore:
    """Files and large messages are objects; nodes share nothing but the store. folder: of this machine, temporary."""

    def __init__(self, files: DriverFiles, folder: Path, function: Callable[[Any], Any], tasks: Sequence[Any]):
        self.files, self.folder, self.function = files, folder, function
        named: set[Path] = set()
        for task in tasks:
            named |= packed_below((function, task), folder, files.root)[1]
        self.scratch: Path | Listing = files.listing(named)

    def order(self, task: Any) -> Parcel:
        parcel, _ = packed_below((self.function, task), self.folder, self.files.root)
        return _uploaded(parcel, self.files.objects)

    def answer(self, parcel: Parcel) -> tuple[bool, Any]:
        with tempfile.TemporaryDirectory(dir=self.folder) as name:
            (answer, written), _ = unpacked_below(_downloaded(parcel, self.files.objects, Path(name)), self.files.root)
        self.files.receive(written)
        return answer

    def finish(self) -> None:
        self.files.wait()


def is_transient(exception: Exception) -> bool:
    """Whether another attempt at the task may succeed."""
    return isinstance(exception, TransferError) or (isinstance(exception, OSError) and exception.errno in TRANSIENT)


def run_in_view(order: Parcel, listing: Listing) -> Parcel:
    """One task on a node that shares nothing with the driver; the answer holds the files that it wrote.

    Raises TransferError if the store does not give or take a file."""
    with task_view(node_scratch(listing.objects.address), listing) as view, tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (function, task), named = unpacked_below(_downloaded(order, listing.objects, folder), view.root)
        for path in sorted(named):
            view.add(path)
        answer = answer_of(function, task)
        written = view.upload_written() if answer[0] else []
        answer = answer if answer[0] else (False, _with_driver_paths(answer[1], view, listing))
        parcel, _ = packed_below((answer, written), folder, view.root)
        return _uploaded(parcel, listing.objects)


def _with_driver_paths(failure: tuple[Exception, str], view: TaskView, listing: Listing) -> tuple[Exception, str]:
    """The failure, whose texts name files as the driver has them."""
    exception, text = failure
    here = str(view.root)
    exception.args = tuple(
        each.replace(here, listing.root) if isinstance(each, str) else each for each in exception.args
    )
    if isinstance(exception, OSError) and isinstance(exception.filename, str):
        exception.filename = exception.filename.replace(here, listing.root)
    return exception, text.replace(here, listing.root)


def _uploaded(parcel: Parcel, objects: TaskObjects) -> Parcel:
    """The parcel, whose file, if it has one, becomes an object."""
    if not parcel.path:
        return parcel
    path = Path(parcel.path)
    digest = file_digest(path)
    objects.put(path, digest)
    path.unlink()
    return replace(parcel, path=digest)


def _downloaded(parcel: Parcel, objects: TaskObjects, folder: Path) -> Parcel:
    if not parcel.path:
        return parcel
    objects.get(folder / parcel.path, parcel.num_bytes, parcel.path)
    return replace(parcel, path=str(folder / parcel.path))

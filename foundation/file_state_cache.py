"""What was found out about large files is remembered beside them, until they change: restarts need not read them again.

A file counts as unchanged while its size, times of change and inode are the same. What is remembered lies in the
folder `cache`, in no manifest, and may be removed at any time."""

import fcntl
import json
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from gristmill.foundation.canonical_json import canonical_json
from gristmill.foundation.files import write_atomic
from gristmill.foundation.manifest import CACHE_FOLDER

# A file written a moment ago may be written again within the same tick of the file system's clock (4 ms on ext4, 2 s on
# FAT, the coarsest), so nothing is remembered of it; git treats such files of its index alike.
SETTLED_SECONDS = 2.0
LOCK_NAME = ".lock"


def file_state(path: Path) -> dict[str, int]:
    """Size, inode, time of the last write and of the last change of either; the last cannot be set back by a program.

    Raises OSError if there is no such file."""
    found = path.stat()
    return {
        "bytes": found.st_size,
        "inode": found.st_ino,
        "mtime_ns": found.st_mtime_ns,
        "ctime_ns": found.st_ctime_ns,
    }


def is_settled(state: dict[str, int]) -> bool:
    """False if the file changed so lately that its next change might not show in its state."""
    return max(state["mtime_ns"], state["ctime_ns"]) < time.time_ns() - int(SETTLED_SECONDS * 1e9)


def read_remembered(path: Path) -> Any:
    """The JSON value, None if there is none or it is damaged."""
    try:
        return json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError):
        return None


def remember(path: Path, value: Any) -> None:
    """Writes the JSON value atomically; in a folder that cannot be written nothing happens."""
    remember_bytes(path, canonical_json(value) + b"\n")


def remember_bytes(path: Path, content: bytes) -> None:
    try:
        write_atomic(path, content)
    except OSError:
        return  # a read-only or full disk: the next start finds out again


@contextmanager
def one_at_a_time(folder: Path) -> Iterator[None]:
    """Processes that share the folder enter the block one after another; where no lock can be made, they all enter.

    The kernel frees the lock of a process that dies."""
    try:
        (folder / CACHE_FOLDER).mkdir(exist_ok=True)
        file = (folder / CACHE_FOLDER / LOCK_NAME).open("a")
    except OSError:
        yield
        return
    with file:
        with suppress(OSError):  # a file system without locks: work is done twice, and the results are equal
            fcntl.flock(file, fcntl.LOCK_EX)
        yield

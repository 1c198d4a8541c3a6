"""Cache of facts about large files, valid while the file is unchanged, so that restarts need not read it again.

A file counts as unchanged while its size, times and inode are the same. The cache is in the folder `cache`, in no
manifest, and may be deleted at any time."""

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

# A file may be written twice within one tick of the file system's clock (4 ms on ext4, 2 s on FAT, the coarsest), so a
# recently written file is not cached; git treats files in its index the same way.
SETTLED_SECONDS = 2.0
LOCK_NAME = ".lock"


def file_state(path: Path) -> dict[str, int]:
    """Size, inode, mtime and ctime; programs cannot set the ctime back.

    Raises OSError if there is no such file."""
    found = path.stat()
    return {
        "bytes": found.st_size,
        "inode": found.st_ino,
        "mtime_ns": found.st_mtime_ns,
        "ctime_ns": found.st_ctime_ns,
    }


def is_settled(state: dict[str, int]) -> bool:
    """False if the file changed so recently that another change might not alter its state."""
    return max(state["mtime_ns"], state["ctime_ns"]) < time.time_ns() - int(SETTLED_SECONDS * 1e9)


def read_cached(path: Path) -> Any:
    """The cached JSON value; None if it is missing or damaged."""
    try:
        return json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError):
        return None


def write_cached(path: Path, value: Any) -> None:
    """Write the JSON value atomically; errors of a read-only or full disk are ignored."""
    write_cached_bytes(path, canonical_json(value) + b"\n")


def write_cached_bytes(path: Path, content: bytes) -> None:
    try:
        write_atomic(path, content)
    except OSError:
        return  # a read-only or full disk: the next run computes the value again


@contextmanager
def one_at_a_time(folder: Path) -> Iterator[None]:
    """Lock the folder: processes enter the block one at a time, or all at once if no lock can be created.

    The kernel frees the lock of a process that dies."""
    try:
        (folder / CACHE_FOLDER).mkdir(exist_ok=True)
        file = (folder / CACHE_FOLDER / LOCK_NAME).open("a")
    except OSError:
        yield
        return
    with file:
        with suppress(OSError):  # a file system without locks: work is done twice with equal results
            fcntl.flock(file, fcntl.LOCK_EX)
        yield

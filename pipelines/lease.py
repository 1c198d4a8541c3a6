"""A file lock so that only one process writes to a work folder; the kernel releases it when the process ends."""

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from gristmill.foundation.errors import InputError

LEASE_NAME = ".lease"


@contextmanager
def lease(workdir: Path) -> Iterator[None]:
    """Raises InputError naming the process that holds the lease, if another one writes to this folder, and if the lease
    is not a file."""
    workdir.mkdir(parents=True, exist_ok=True)
    if (workdir / LEASE_NAME).exists() and not (workdir / LEASE_NAME).is_file():
        raise InputError(f"{workdir / LEASE_NAME}: not a file; move it away")
    with (workdir / LEASE_NAME).open("a+", encoding="utf-8", errors="replace") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            file.seek(0)
            holder = file.read().strip() or "unknown"
            raise InputError(
                f"{workdir}: another gristmill (process {holder}) writes here; wait for it, or use another --workdir"
            ) from error
        file.truncate(0)
        file.write(str(os.getpid()))
        file.flush()
        yield

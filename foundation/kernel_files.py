"""Files of compiled kernels: read only if they are whole and private, replaced in one step, and locked while a process
compiles.

A file is named by the digest of everything that determines its machine code: the kernel's sources, the types of its
arguments, the CPU, and the versions of Python, numba, llvmlite and numpy. So it is never stale, and two clones with
equal sources share it."""

import fcntl
import hashlib
import importlib.metadata
import os
import sys
import tempfile
import time
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import llvmlite
import numpy as np

from gristmill.foundation.kernel_folder import is_private, kernel_folder, report
from gristmill.foundation.source_digest import source_digest

MAGIC = b"gristmill kernel 1\n"
DIGEST_BYTES = hashlib.sha256().digest_size
MAX_WAIT_SECONDS = 300.0  # for another process that compiles the kernel; the slowest one takes 20 s on a free core
POLL_SECONDS = 0.02
UNUSED_SECONDS = 30 * 86400.0  # files that were not read for so long are removed
TOUCH_SECONDS = 86400.0
# Suffixes: what numba needs to call a kernel from others that it compiles, and what Python needs to call it.
KERNEL, ENTRY = "kernel", "entry"


def kernel_path(function: Callable[..., Any], argument_types: Any, processor: Any, suffix: str) -> Path | None:
    """The file of a kernel for these types of arguments and this processor; None if nothing can be kept."""
    folder = kernel_folder()
    if folder is None:
        return None
    key = repr((_identity(function), versions(), argument_types, processor))
    return folder / f"{function.__name__}-{hashlib.sha256(key.encode()).hexdigest()[:40]}.{suffix}"


@cache
def _identity(function: Callable[..., Any]) -> tuple[Any, ...]:
    path = sys.modules[function.__module__].__file__
    assert path is not None
    code = hashlib.sha256(function.__code__.co_code + _closure(function)).hexdigest()
    line = function.__code__.co_firstlineno
    return (function.__module__, function.__qualname__, line, code, source_digest(function.__module__, Path(path)))


def _closure(function: Callable[..., Any]) -> bytes:
    if not function.__closure__:
        return b""
    from numba.core.serialize import dumps  # 0.4 s; few kernels have variables of an enclosing function

    return dumps(tuple(cell.cell_contents for cell in function.__closure__))


@cache
def versions() -> tuple[Any, ...]:
    """What else determines machine code; of numba's settings, NUMBA_BOUNDSCHECK or NUMBA_OPT for example."""
    settings = sorted((name, os.environ[name]) for name in os.environ if name.startswith("NUMBA_"))
    return (sys.version, importlib.metadata.version("numba"), llvmlite.__version__, np.__version__, settings)


def read_kernel(path: Path) -> bytes | None:
    """The payload of a kernel file; None if there is none, or one that is damaged or that others can write to."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW)
    except OSError:
        return None
    with open(descriptor, "rb") as file:
        state = os.fstat(file.fileno())
        if not is_private(state):
            report(f"kernel cache: {path} can be written by others; it is compiled again")
            return None
        content = file.read()
        if time.time() - state.st_mtime > TOUCH_SECONDS:
            os.utime(file.fileno())
    head, payload = content[: len(MAGIC) + DIGEST_BYTES], content[len(MAGIC) + DIGEST_BYTES :]
    if head != MAGIC + hashlib.sha256(payload).digest():
        report(f"kernel cache: {path} is damaged; it is compiled again")
        return None
    return payload


def write_kernel(path: Path, payload: bytes) -> None:
    """Replace the file in one step. A full disk is reported, and the kernel stays in memory."""
    try:
        descriptor, temporary = tempfile.mkstemp(dir=path.parent, prefix=".", suffix=path.suffix)
        try:
            with open(descriptor, "wb") as file:
                file.write(MAGIC + hashlib.sha256(payload).digest() + payload)
            os.replace(temporary, path)
        except BaseException:
            os.unlink(temporary)
            raise
        _remove_unused(path.parent)
    except OSError as error:
        report(f"kernel cache: {path} cannot be written ({error.strerror}); it stays in memory")


@cache
def _remove_unused(folder: Path) -> None:
    """Once a process: remove what no process has read for UNUSED_SECONDS."""
    oldest = time.time() - UNUSED_SECONDS
    for path in folder.glob("*.*"):
        try:
            if path.stat().st_mtime < oldest:
                path.unlink()
        except FileNotFoundError:
            continue  # another process removed it


def acquire(path: Path) -> bool:
    """Wait until this process may compile the kernel of that file; whether another process may have compiled it
    meanwhile. The lock is one byte of the file `locks`: the system releases it when its owner dies."""
    deadline = time.monotonic() + MAX_WAIT_SECONDS
    waited = False
    while not _try_lock(path):
        if path.exists() or time.monotonic() > deadline:
            return True
        waited = True
        time.sleep(POLL_SECONDS)
    return waited or path.exists()


def release(path: Path) -> None:
    descriptor = _locks(path.parent, os.getpid())
    if descriptor is not None:
        fcntl.lockf(descriptor, fcntl.LOCK_UN, 1, _place(path))


def _try_lock(path: Path) -> bool:
    """Whether this process has the lock now. Without a file of locks it needs none."""
    descriptor = _locks(path.parent, os.getpid())
    if descriptor is None:
        return True
    try:
        fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, _place(path))
    except (BlockingIOError, PermissionError):
        return False
    except OSError:
        return True  # a file system without locks
    return True


@cache
def _locks(folder: Path, process: int) -> int | None:
    try:
        return os.open(folder / "locks", os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    except OSError:
        return None


def _place(path: Path) -> int:
    """The byte of the file `locks` that stands for this kernel."""
    return int(hashlib.sha256(path.name.encode()).hexdigest()[:10], 16)

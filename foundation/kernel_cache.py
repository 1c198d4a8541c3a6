"""Compiled kernels on disk, one file for each kernel and signature, for all clones and processes of a user.

A file is named by the digest of everything that determines its machine code: the kernel's sources, its signature, the
CPU, and the versions of Python, numba, llvmlite and numpy. So it is never stale, and two clones with equal sources
share it. A process that needs a kernel which another one is compiling waits for it."""

import fcntl
import hashlib
import os
import pickle
import sys
import tempfile
import time
from collections.abc import Callable
from functools import cache, cached_property
from pathlib import Path
from typing import Any

import llvmlite
import numba
import numpy as np
from numba.core.caching import _Cache
from numba.core.compiler import CompileResult
from numba.core.runtime import rtsys
from numba.core.serialize import dumps

from gristmill.foundation.kernel_folder import is_private, kernel_folder, report
from gristmill.foundation.source_digest import source_digest

MAGIC = b"gristmill kernel 1\n"
DIGEST_BYTES = hashlib.sha256().digest_size
MAX_WAIT_SECONDS = 300.0  # for another process that compiles the kernel; the slowest one takes 20 s on a free core
POLL_SECONDS = 0.02
UNUSED_SECONDS = 30 * 86400.0  # files that were not read for so long are removed
TOUCH_SECONDS = 86400.0


class KernelCache(_Cache):
    """The cache of one kernel, in the interface that numba's dispatcher calls while it holds its compiler lock."""

    def __init__(self, function: Callable[..., Any]):
        self._function = function
        self._enabled = True
        self._owned: set[Path] = set()

    @property
    def cache_path(self) -> str | None:
        folder = kernel_folder()
        return None if folder is None else str(folder)

    def load_overload(self, signature: Any, target_context: Any) -> Any:
        """The compiled kernel, or None; then this process has the lock of its file until `release`."""
        path = self._path(signature, target_context.codegen())
        payload = None if path is None else self._stored(path)
        if payload is None:
            return None
        # Of numba's set-up machine code needs this alone; declarations of functions, 0.1 s, are for compiling.
        rtsys.initialize(target_context)
        return CompileResult._rebuild(target_context, *pickle.loads(payload))

    def _stored(self, path: Path) -> bytes | None:
        payload = read_kernel(path)
        if payload is None:
            self._owned.add(path)
            payload = read_kernel(path) if acquire(path) else None
        return payload

    def save_overload(self, signature: Any, compiled: Any) -> None:
        path = self._path(signature, compiled.library.codegen)
        if path is not None and not compiled.lifted and not compiled.library.has_dynamic_globals:
            write_kernel(path, dumps(compiled._reduce()))

    def release(self) -> None:
        """Let other processes compile what this one has compiled, whether that was saved or not."""
        while self._owned:
            release(self._owned.pop())

    def enable(self) -> None:
        self._enabled = True

    def disable(self) -> None:
        self._enabled = False

    def flush(self) -> None:
        """Nothing is stale: a file's name is the digest of its sources."""

    def _path(self, signature: Any, codegen: Any) -> Path | None:
        folder = kernel_folder() if self._enabled else None
        if folder is None:
            return None
        key = repr((self._key, versions(), signature, codegen.magic_tuple()))
        return folder / f"{self._function.__name__}-{hashlib.sha256(key.encode()).hexdigest()[:40]}.kernel"

    @cached_property
    def _key(self) -> tuple[Any, ...]:
        function = self._function
        path = sys.modules[function.__module__].__file__
        assert path is not None
        cells = tuple(cell.cell_contents for cell in function.__closure__ or ())
        code = hashlib.sha256(function.__code__.co_code + dumps(cells)).hexdigest()
        line = function.__code__.co_firstlineno
        return (function.__module__, function.__qualname__, line, code, source_digest(function.__module__, Path(path)))


@cache
def versions() -> tuple[Any, ...]:
    """What else determines machine code; of numba's settings, NUMBA_BOUNDSCHECK or NUMBA_OPT for example."""
    settings = sorted((name, os.environ[name]) for name in os.environ if name.startswith("NUMBA_"))
    return (sys.version, numba.__version__, llvmlite.__version__, np.__version__, settings)


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
        descriptor, temporary = tempfile.mkstemp(dir=path.parent, prefix=".", suffix=".kernel")
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
    for path in folder.glob("*.kernel"):
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

"""numba's cache of one kernel on disk (kernel_files.py), for all clones and processes of a user.

A process that needs a kernel which another one is compiling waits for it."""

import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

from numba.core.caching import _Cache
from numba.core.compiler import CompileResult
from numba.core.runtime import rtsys
from numba.core.serialize import dumps

from gristmill.foundation.kernel_files import KERNEL, acquire, kernel_path, read_kernel, release, write_kernel
from gristmill.foundation.kernel_folder import kernel_folder


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
        path = self.path(signature, target_context.codegen())
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
        path = self.path(signature, compiled.library.codegen)
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

    def path(self, signature: Any, codegen: Any) -> Path | None:
        return kernel_path(self._function, signature, codegen.magic_tuple(), KERNEL) if self._enabled else None

"""numba's cache of one kernel on disk (kernel_files.py), for all clones and processes of a user.

A process that needs a kernel which another one is compiling waits for it."""

import pickle
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numba
from numba.core.caching import _Cache
from numba.core.compiler import CompileResult
from numba.core.compiler_lock import global_compiler_lock
from numba.core.registry import cpu_target
from numba.core.runtime import rtsys
from numba.core.serialize import dumps
from numba.core.types import unliteral
from numba.core.typing.typeof import Purpose, typeof
from numba.extending import intrinsic

from gristmill.foundation.runtime.kernels.kernel_files import (
    KERNEL,
    Entry,
    acquire,
    imported_names,
    kernel_folder,
    kernel_path,
    read_kernel,
    release,
    write_kernel,
)
from gristmill.foundation.startup import block_imports, without_garbage_collection


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


# A kernel compiled by numba (LINKED_VERSIONS of cached_njit.py), with the cache above. Importing this file imports
# numba.


def dispatcher_of(function: Callable[..., Any], options: Mapping[str, Any]) -> Any:
    """numba's dispatcher of the kernel, which keeps what it compiles on disk."""
    # A C wrapper is for kernels that are passed as values.
    dispatcher: Any = numba.njit(**({"no_cfunc_wrapper": True} | dict(options)))(function)
    cache = KernelCache(function)
    compile_or_load, call_template = dispatcher.compile, dispatcher.get_call_template

    def compile_once(signature: Any) -> Any:
        # Compiling makes millions of objects that live until its end: collections take a tenth of its time. And
        # numba asks for scipy's BLAS, which takes 0.15 s to import, and no kernel here calls numpy.dot.
        with global_compiler_lock, block_imports("scipy.linalg"), without_garbage_collection():
            try:
                return compile_or_load(signature)
            finally:
                cache.release()

    def one_template_for_all_literals(args: Any, kws: Any) -> Any:
        """Without this, f(x, 0) and f(x, 1) in a kernel compile f twice."""
        return call_template(tuple(map(unliteral, args)), {name: unliteral(value) for name, value in kws.items()})

    dispatcher._cache = cache
    dispatcher.compile = compile_once
    dispatcher.get_call_template = one_template_for_all_literals
    return dispatcher


def compiled_entry(dispatcher: Any, arguments: Sequence[Any]) -> Entry | None:
    """Compiles the kernel for these arguments, or reads it from the cache; returns what calls it without numba, or
    None if the cache does not hold it."""
    signature = tuple(typeof(argument, Purpose.argument) for argument in arguments)
    dispatcher.compile(signature)
    path = dispatcher._cache.path(signature, dispatcher.targetctx.codegen())
    payload = None if path is None else read_kernel(path)
    if payload is None:
        return None
    library, description, environment, *_, referenced = pickle.loads(payload)
    constants = {environment.env_name: (environment.globals["__name__"], list(environment.consts))}
    constants |= {
        linked.env_name: (linked.globals["__name__"], list(linked.consts)) for linked in referenced if linked.consts
    }
    code = library[2][0]
    return Entry(code, description.llvm_cpython_wrapper_name, imported_names(code), constants)


def intrinsic_type(define: Callable[..., Any]) -> Any:
    """numba's type of an intrinsic, by which it finds its code."""
    typing_context = cpu_target.typing_context
    intrinsic_function = intrinsic(define)
    typing_context.refresh()
    return typing_context.resolve_value_type(intrinsic_function)

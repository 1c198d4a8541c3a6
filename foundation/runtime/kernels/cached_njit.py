"""Kernels that numba compiles once per machine, and that later processes call without importing numba.

numba's own cache (0.68) keeps a compiled kernel as long as the text of the kernel's own file is the same, although the
machine code also holds the functions and constants of other files. Here a compiled kernel is valid for the digest of
the file and of all files of its package that it imports (kernel_files.py). It is read or compiled at its first call,
not at import. Other versions of numba than the linked ones compile and keep kernels themselves (NumbaKernel)."""

import importlib.metadata
import pickle
import threading
from collections.abc import Callable, Mapping
from functools import cache, cached_property, update_wrapper
from pathlib import Path
from typing import Any

import numpy as np

from gristmill.foundation.runtime.kernels.kernel_files import (
    CALLED,
    ENTRY,
    Entry,
    kernel_folder,
    kernel_path,
    linked,
    processor,
    read_kernel,
    report,
    sources_of_function,
    write_kernel,
)
from gristmill.foundation.startup import DeferredModule

numba = DeferredModule("numba")
compiled_kernel = DeferredModule("gristmill.foundation.runtime.kernels.compiled_kernel")  # imports numba
PLAIN = (bool, int, float, type(None), np.generic)
_lock = threading.RLock()


def cached_njit(**options: Any) -> Callable[[Callable[..., Any]], Any]:
    """Decorator: `numba.njit(cache=True, **options)` whose cache is invalid after an edit of any file it can call.

    Small functions that other kernels call take forceinline=True: LLVM inlines them. numba's inline="always" inlines in
    Python, which takes longer to equally fast code (all kernels of text and WARC curation, x86-64, November 2026: 82
    against 61 CPU s).

    Kernels must not use numpy.dot, numpy.linalg or the operator @, since they are compiled without scipy's BLAS. They
    cannot be passed to other kernels as values."""
    kind = Kernel if is_linked() else NumbaKernel
    return lambda function: kind(function, options)


class Kernel:
    """One kernel with its compiled forms, by the types of its arguments.

    To numba, which finds it among the globals of other kernels, it is a dispatcher of its own."""

    def __init__(self, function: Callable[..., Any], options: dict[str, Any]):
        update_wrapper(self, function)
        self.py_func = function
        self._options = options
        self._compiled: dict[Any, Callable[..., Any]] = {}

    def __call__(self, *arguments: Any, **named: Any) -> Any:
        try:
            types = None if named else tuple(map(_type_of, arguments))
        except TypeError:
            types = None
        if types is None:  # names, defaults and rare types are numba's
            return self.dispatcher(*arguments, **named)
        compiled = self._compiled.get(types)
        if compiled is None:
            with _lock:
                compiled = self._compiled[types] = self._load(types) or self._compile(types, arguments)
        return compiled(*arguments)

    @cached_property
    def dispatcher(self) -> Any:
        return compiled_kernel.dispatcher_of(self.py_func, self._options)

    @cached_property
    def _called(self) -> Any:
        return compiled_kernel.dispatcher_of(self.py_func, self._options, CALLED)

    @property
    def _numba_type_(self) -> Any:
        return self._called._numba_type_

    def _load(self, types: Any) -> Callable[..., Any] | None:
        path = kernel_path(self.py_func, types, processor(), ENTRY)
        payload = None if path is None else read_kernel(path)
        if payload is None:
            return None
        try:
            return linked(Entry(*pickle.loads(payload)), self.py_func)
        except (LookupError, RuntimeError) as error:
            report(f"kernel cache: {path} cannot be linked ({error}); numba reads it")
            return None

    def _compile(self, types: Any, arguments: tuple[Any, ...]) -> Callable[..., Any]:
        entry = compiled_kernel.compiled_entry(self.dispatcher, arguments)
        path = kernel_path(self.py_func, types, processor(), ENTRY)
        if entry is not None and path is not None:
            write_kernel(path, pickle.dumps(tuple(entry)))
        return self.dispatcher


class intrinsic:
    """`numba.extending.intrinsic` that imports numba when the first kernel that uses it is compiled."""

    def __init__(self, define: Callable[..., Any]):
        self.__name__, self.__doc__ = define.__name__, define.__doc__
        self._define = define

    @cached_property
    def _numba_type_(self) -> Any:
        return compiled_kernel.intrinsic_type(self._define)


def _type_of(value: Any) -> Any:
    """Key of numba's type of an argument. Raises TypeError for one that is left to numba."""
    kind = type(value)
    if kind is np.ndarray or kind is np.memmap:
        flags = value.flags
        layout = "C" if flags.c_contiguous else "F" if flags.f_contiguous else "A"
        return (value.dtype, value.ndim, layout, flags.writeable, flags.aligned)
    if issubclass(kind, tuple):
        return (kind, *map(_type_of, value))
    if issubclass(kind, PLAIN):
        return kind
    raise TypeError(kind)


# Kernels by numba alone, for versions of numba whose machine code kernel_files.py does not link. Every process imports
# numba, which takes 0.7 s, and reads what it compiled from numba's own cache.

# Versions whose internals compiled_kernel.py and kernel_files.py were written for and tested with.
LINKED_VERSIONS = ("0.68",)


@cache
def is_linked() -> bool:
    """Whether kernels of the installed numba are linked without importing it."""
    return ".".join(importlib.metadata.version("numba").split(".")[:2]) in LINKED_VERSIONS


class NumbaKernel:
    """A kernel that numba compiles, and keeps, at its first call.

    numba's index of a cache knows only the kernel's own file, so each digest of the sources has a folder."""

    def __init__(self, function: Callable[..., Any], options: Mapping[str, Any]):
        self.py_func = function
        self.__name__, self.__doc__, self.__module__ = function.__name__, function.__doc__, function.__module__
        self.__wrapped__ = function
        self._options = dict(options)
        self._dispatcher: Any = None

    def __call__(self, *arguments: Any, **named: Any) -> Any:
        return self.dispatcher(*arguments, **named)

    @property
    def dispatcher(self) -> Any:
        if self._dispatcher is None:
            folder = kernel_folder()
            if folder is not None:
                numba.config.CACHE_DIR = str(Path(folder) / "numba" / sources_of_function(self.py_func))
            self._dispatcher = numba.njit(**{"cache": folder is not None} | self._options)(self.py_func)
        return self._dispatcher

    @property
    def _numba_type_(self) -> Any:
        return self.dispatcher._numba_type_

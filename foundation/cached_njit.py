"""numba kernels that are cached on disk and compiled again when a source they can call has changed.

numba (0.68) keeps a compiled kernel as long as the text of the kernel's own file is the same, although the machine code
also holds the functions and constants of other files. Here the cache is valid for the digest of the file and of all
files of its package that it imports. A kernel is read or compiled at its first call, not when its file is imported."""

import sys
from collections.abc import Callable
from functools import cached_property
from pathlib import Path
from typing import Any

import numba
from numba.core.caching import FunctionCache

from gristmill.foundation.hidden_modules import hidden_modules
from gristmill.foundation.source_digest import source_digest


class SourceDigestCache(FunctionCache):
    """numba's cache of one function, stamped with the digest of all sources that the function can call."""

    def __init__(self, function: Callable[..., Any]):
        super().__init__(function)
        module = sys.modules[function.__module__]
        assert module.__file__ is not None
        # numba reads an index whose stamp differs as an empty one, and writes it anew after compiling.
        self._cache_file._source_stamp = source_digest(function.__module__, Path(module.__file__))


class DeferredCache:
    """The SourceDigestCache of a function, made at its first use: numba needs it when the kernel is first called."""

    def __init__(self, function: Callable[..., Any]):
        self._function = function

    @cached_property
    def _cache(self) -> SourceDigestCache:
        return SourceDigestCache(self._function)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._cache, name)

    def load_overload(self, signature: Any, target_context: Any) -> Any:
        # numba asks for scipy's BLAS before it reads its first kernel: 0.15 s, and no kernel here calls numpy.dot.
        with hidden_modules("scipy.linalg"):
            return self._cache.load_overload(signature, target_context)


def cached_njit(**options: Any) -> Callable[[Callable[..., Any]], Any]:
    """Decorator: `numba.njit(cache=True, **options)` whose cache is invalid after an edit of any file it can call.

    Kernels must not use numpy.dot, numpy.linalg or the operator @, since they are compiled without scipy's BLAS."""

    def compiled(function: Callable[..., Any]) -> Any:
        dispatcher = numba.njit(**options)(function)
        dispatcher._cache = DeferredCache(function)
        return dispatcher

    return compiled

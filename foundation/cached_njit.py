"""numba kernels that are cached on disk and compiled again when a source they can call has changed.

numba (0.68) keeps a compiled kernel as long as the text of the kernel's own file is the same, although the machine code
also holds the functions and constants of other files. Here the cache is valid for the digest of the file and of all
files of its package that it imports."""

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numba
from numba.core.caching import FunctionCache

from gristmill.foundation.source_digest import source_digest


class SourceDigestCache(FunctionCache):
    """numba's cache of one function, stamped with the digest of all sources that the function can call."""

    def __init__(self, function: Callable[..., Any]):
        super().__init__(function)
        module = sys.modules[function.__module__]
        assert module.__file__ is not None
        # numba reads an index whose stamp differs as an empty one, and writes it anew after compiling.
        self._cache_file._source_stamp = source_digest(function.__module__, Path(module.__file__))


def cached_njit(**options: Any) -> Callable[[Callable[..., Any]], Any]:
    """Decorator: `numba.njit(cache=True, **options)` whose cache is invalid after an edit of any file it can call."""

    def compiled(function: Callable[..., Any]) -> Any:
        dispatcher = numba.njit(**options)(function)
        dispatcher._cache = SourceDigestCache(function)
        return dispatcher

    return compiled

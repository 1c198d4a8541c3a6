"""Kernels by numba alone, for versions of numba whose machine code machine_code.py does not link.

Every process imports numba, which takes 0.7 s, and reads what it compiled from numba's own cache."""

import importlib.metadata
from collections.abc import Callable, Mapping
from functools import cache
from pathlib import Path
from typing import Any

from gristmill.foundation.deferred_module import DeferredModule
from gristmill.foundation.runtime.kernels.kernel_files import kernel_folder, sources_of_function

numba = DeferredModule("numba")

# Versions whose internals compiled_kernel.py and machine_code.py were written for and tested with.
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

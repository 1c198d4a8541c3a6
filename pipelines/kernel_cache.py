"""Detects damaged files in numba's cache of compiled kernels."""

import os
import traceback
from pathlib import Path

from gristmill.foundation.deferred_module import DeferredModule

numba = DeferredModule("numba")
CACHING_CODE = os.path.join("numba", "core", "caching.py")
UNREADABLE = ("UnpicklingError", "EOFError", "UnicodeDecodeError", "ValueError", "IndexError", "KeyError")


def damaged_kernels(error: Exception) -> str | None:
    """An error message if the error (of this process or a worker) comes from reading numba's cache, else None."""
    trace = "".join(traceback.format_exception(error))
    if CACHING_CODE not in trace or type(error).__name__ not in UNREADABLE:
        return None
    folder = vars(numba.config)["CACHE_DIR"] or Path(__file__).parent.parent
    return (
        f"numba's cache of compiled kernels is damaged ({type(error).__name__}: {error}); remove it and run the same "
        f"command again: find {folder} -name '*.nb[ic]' -delete"
    )

"""numba keeps compiled kernels in files of its own; one that is damaged is met in the middle of some step."""

import os
import traceback
from pathlib import Path

import numba

CACHING_CODE = os.path.join("numba", "core", "caching.py")
UNREADABLE = ("UnpicklingError", "EOFError", "UnicodeDecodeError", "ValueError", "IndexError", "KeyError")


def damaged_kernels(error: Exception) -> str | None:
    """What to do, if the error (of this process or of a worker) was raised as numba read its cache; else None."""
    said = "".join(traceback.format_exception(error))
    if CACHING_CODE not in said or type(error).__name__ not in UNREADABLE:
        return None
    folder = vars(numba.config)["CACHE_DIR"] or Path(__file__).parent.parent
    return (
        f"numba's compiled kernels are damaged ({type(error).__name__}: {error}); remove them, and the same command "
        f"compiles them again: find {folder} -name '*.nb[ic]' -delete"
    )

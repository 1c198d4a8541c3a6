"""Transparent huge pages of Linux, which data tasks run without.

Allocators (mimalloc of pyarrow, numpy) ask for them, and the kernel then clears 2 MB where a task writes a few kB: a
twelfth of the CPU time of curation."""

import ctypes
import sys
from collections.abc import Iterator
from contextlib import contextmanager

PR_SET_THP_DISABLE, PR_GET_THP_DISABLE = 41, 42  # linux/prctl.h


def set_huge_pages(allowed: bool) -> None:
    """For all memory that this process, and those that it starts, get from now on. Does nothing elsewhere."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_THP_DISABLE, int(not allowed), 0, 0, 0)


def are_huge_pages_allowed() -> bool:
    """Whether this process may get them; what the kernel's own setting says is not looked at."""
    return sys.platform != "linux" or ctypes.CDLL(None).prctl(PR_GET_THP_DISABLE, 0, 0, 0, 0) != 1


@contextmanager
def without_huge_pages() -> Iterator[None]:
    were_allowed = are_huge_pages_allowed()
    set_huge_pages(False)
    try:
        yield
    finally:
        set_huge_pages(were_allowed)

"""The C library's allocator, set for training on a CPU."""

import ctypes
import platform

# mallopt(3) of glibc: how many blocks may be mapped one by one, and how much free memory is kept at the heap's end.
M_MMAP_MAX, M_MMAP_THRESHOLD, M_TRIM_THRESHOLD = -4, -3, -1
UNLIMITED = 2**31 - 1


def keep_freed_memory() -> bool:
    """After the call this process keeps the memory of freed tensors for the next ones; whether that could be set.

    glibc returns every freed block of more than 32 MB to the system, which fills its pages with zeros again when the
    next step allocates it: a sixth of a step with 50,304 tokens, a quarter of one of a mixture of 64 experts
    (`benchmarks/moe.py`). The peak memory stays within some per cent, since it is needed again in each step. Does
    nothing where the C library is not glibc."""
    if platform.libc_ver()[0] != "glibc":
        return False
    libc = ctypes.CDLL("libc.so.6")
    return bool(libc.mallopt(M_MMAP_MAX, 0)) and bool(libc.mallopt(M_TRIM_THRESHOLD, UNLIMITED))


def return_freed_memory() -> bool:
    """After the call the memory of freed tensors goes back to the system at once; whether that could be set.

    glibc else keeps freed blocks of up to 32 MB, between which others come to lie: a process that holds two layers'
    weights at a time (`layout.offload.parameters: disk`) had four times their size after a step
    (`tests/training/test_streamed_memory.py`). Blocks from 64 KiB on are mapped one by one instead."""
    if platform.libc_ver()[0] != "glibc":
        return False
    return bool(ctypes.CDLL("libc.so.6").mallopt(M_MMAP_THRESHOLD, 64 << 10))

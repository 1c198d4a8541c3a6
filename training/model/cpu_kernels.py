"""Flags, threads and the exponential that the model's kernels for CPUs share; exponentials of bfloat16 logits."""

from concurrent.futures import ThreadPoolExecutor
from functools import cache

import numpy as np
import torch
from torch import Tensor

from gristmill.foundation.runtime.kernels.cached_njit import cached_njit

# N rows, V logits of a row

FAST = {"reassoc", "contract", "nsz"}  # sums in any order; NaN and infinity stay what they are
TILE = 2048  # logits, whose float32 numbers stay in the first cache
INFINITY, MINUS_INFINITY = 0x7F80, -0x7F81  # bits in the order of the numbers; those of NaN are beyond them


@cache
def thread_pool(threads: int) -> ThreadPoolExecutor:
    return ThreadPoolExecutor(threads, "cpu_kernels")


@cached_njit(nogil=True, fastmath=FAST, forceinline=True)
def exp_without_power(x: np.float32, n: np.float32) -> np.float32:
    """e^x / 2^n, where n is the whole number nearest to x / ln(2), by the polynomial of Cephes' expf (2 ulp): of a loop
    over it the compiler makes vectors."""
    r = x - n * np.float32(0.693359375) - n * np.float32(-2.12194440e-4)
    p = np.float32(1.9875691500e-4)
    p = p * r + np.float32(1.3981999507e-3)
    p = p * r + np.float32(8.3334519073e-3)
    p = p * r + np.float32(4.1665795894e-2)
    p = p * r + np.float32(1.6666665459e-1)
    p = p * r + np.float32(5.0000001201e-1)
    return p * r * r + r + np.float32(1)


def exponentials_of_rows(raw_NV: Tensor) -> tuple[Tensor, Tensor]:
    """(highest [N], sum of exp(raw - highest) [N]) in float32; raw, contiguous bfloat16, becomes these exponentials,
    rounded. A row becomes NaN where torch's operators make it so: with a NaN, with infinity, or of minus infinity
    alone.

    Each row is read from memory once and written once. As torch's operators the maximum, the difference, the
    exponential, the sum and both conversions are passes of their own, and the maximum of bfloat16 alone takes as long
    as the others."""
    rows, width = raw_NV.shape
    highest_N, total_N = (torch.empty(rows, dtype=torch.float32) for _ in range(2))
    arrays = raw_NV.detach().view(torch.int16).numpy().ravel(), width, highest_N.numpy(), total_N.numpy()
    threads = min(torch.get_num_threads(), rows)
    if threads == 1:
        _exponentials(*arrays, 0, rows)
    else:
        bounds = [(rows * n // threads, rows * (n + 1) // threads) for n in range(threads)]
        list(thread_pool(threads).map(lambda bound: _exponentials(*arrays, *bound), bounds))
    return highest_N, total_N


@cached_njit(nogil=True, fastmath=FAST)
def _exponentials(
    raw_M: np.ndarray, width: int, highest_N: np.ndarray, total_N: np.ndarray, first: int, last: int
) -> None:
    """raw: the bits of all rows, of which those from first to last - 1 are computed."""
    bits_K, powers_K = np.empty(TILE, dtype=np.int32), np.empty(TILE, dtype=np.int32)
    scores_K = bits_K.view(np.float32)
    for row in range(first, last):
        start = np.uint64(row * width)
        # The bits of positive numbers rise with them; those of negative ones, but for the sign, are turned around.
        largest, smallest = np.int16(-(2**15)), np.int16(2**15 - 1)
        for k in range(np.uint64(width)):
            bits = raw_M[start + k]
            ordered = np.int16(bits ^ ((bits >> np.int16(15)) & np.int16(0x7FFF)))
            smallest = ordered if ordered < smallest else smallest
            largest = ordered if ordered > largest else largest
        if largest >= INFINITY or smallest < MINUS_INFINITY or largest <= MINUS_INFINITY:
            highest_N[row] = total_N[row] = np.float32(np.nan)
            for k in range(np.uint64(width)):
                raw_M[start + k] = np.int16(0x7FC0)
            continue
        bits_K[0] = np.int32(largest ^ ((largest >> np.int16(15)) & np.int16(0x7FFF))) << np.int32(16)
        highest, total = scores_K[0], np.float32(0)
        for column in range(0, width, TILE):
            place, count = start + np.uint64(column), np.uint64(min(TILE, width - column))
            for k in range(count):
                bits_K[k] = np.int32(raw_M[place + k]) << np.int32(16)
            for k in range(count):
                x = max(scores_K[k] - highest, np.float32(-87))
                power = np.int32(x * np.float32(1.44269504088896341) - np.float32(0.5))  # rounded: x is not positive
                scores_K[k] = exp_without_power(x, np.float32(power))
                powers_K[k] = power
            for k in range(count):
                bits_K[k] += powers_K[k] << np.int32(23)
            for k in range(count):
                total += scores_K[k]
            for k in range(count):  # to the nearest, of two the even one
                odd = (bits_K[k] >> np.int32(16)) & np.int32(1)
                raw_M[place + k] = np.int16(np.int32(bits_K[k] + np.int32(0x7FFF) + odd) >> np.int32(16))
        highest_N[row], total_N[row] = highest, total

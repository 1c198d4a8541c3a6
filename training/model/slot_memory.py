"""Memory of keys or values by slot and column: paged on a CPU, grown as a whole on other devices.

In host memory every slot has the addresses of a whole context, and the operating system gives it pages as columns are
written (vAttention, arXiv 2405.04437): the cache is paged, and attention reads each slot as one array, without
gathering blocks by a table."""

import math
import mmap
import sys

import torch
from torch import Tensor

# N slots, C capacity in tokens, G key/value heads, K head width, B rows, T tokens

MIN_COLUMNS = 256  # the capacity of new device memory; it doubles when a sequence is longer
MAP_NORESERVE = 0x4000  # of Linux; addresses beyond the machine's memory are not refused

HAS_PAGES = sys.platform == "linux"  # elsewhere MADV_DONTNEED does not make pages zero


class PagedMemory:
    """Zeros [N + 1, C, G, K], of which only pages that were written take memory. Slot N takes what is written for
    padding. Columns of a slot that share a page with a column before the released ones stay."""

    def __init__(self, slots: int, columns: int, like_BTGK: Tensor):
        groups, width = like_BTGK.shape[2:]
        self._token_bytes = groups * width * like_BTGK.element_size()
        per_page = mmap.PAGESIZE // math.gcd(mmap.PAGESIZE, self._token_bytes)
        capacity = -(-columns // per_page) * per_page  # so that slots begin at pages
        self._slot_bytes = capacity * self._token_bytes
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | MAP_NORESERVE
        self._pages = mmap.mmap(-1, (slots + 1) * self._slot_bytes, flags=flags)
        self._pages.madvise(mmap.MADV_NOHUGEPAGE)  # a page of 2 MiB would hold columns that were not written
        numbers = torch.frombuffer(self._pages, dtype=like_BTGK.dtype)
        self.numbers_NCGK = numbers.view(slots + 1, capacity, groups, width)

    def with_columns(self, columns: int) -> "PagedMemory":
        return self

    def padding_places(self, slots_B1: Tensor, columns_BT: Tensor) -> tuple[Tensor, Tensor]:
        """Slots and columns to write to, where those of padding are -1."""
        padding_BT = columns_BT < 0
        slots_BT = slots_B1.expand_as(columns_BT).masked_fill(padding_BT, len(self.numbers_NCGK) - 1)
        return slots_BT, columns_BT.masked_fill(padding_BT, 0)

    def release(self, slot: int, columns: int) -> None:
        """Makes the columns behind the first ones zeros, and gives their pages back."""
        kept_bytes = -(-columns * self._token_bytes // mmap.PAGESIZE) * mmap.PAGESIZE
        if kept_bytes < self._slot_bytes:
            self._pages.madvise(mmap.MADV_DONTNEED, slot * self._slot_bytes + kept_bytes, self._slot_bytes - kept_bytes)


class GrownMemory:
    """[N, C + 1, G, K], as long as the longest slot has needed. Column C takes what is written for padding."""

    def __init__(self, slots: int, columns: int, like_BTGK: Tensor):
        capacity = MIN_COLUMNS
        while capacity < columns:
            capacity *= 2
        self.numbers_NCGK = like_BTGK.new_zeros(slots, capacity + 1, *like_BTGK.shape[2:])

    def with_columns(self, columns: int) -> "GrownMemory":
        numbers_NCGK = self.numbers_NCGK
        if numbers_NCGK.shape[1] > columns:
            return self
        grown = GrownMemory(len(numbers_NCGK), columns, numbers_NCGK)
        grown.numbers_NCGK[:, : numbers_NCGK.shape[1]] = numbers_NCGK
        return grown

    def padding_places(self, slots_B1: Tensor, columns_BT: Tensor) -> tuple[Tensor, Tensor]:
        return slots_B1, columns_BT.masked_fill(columns_BT < 0, self.numbers_NCGK.shape[1] - 1)

    def release(self, slot: int, columns: int) -> None:
        """Zeros where everything goes; the memory stays for the next sequence."""
        if not columns:
            self.numbers_NCGK[slot] = 0


SlotMemory = PagedMemory | GrownMemory


def pages_slots(device: torch.device) -> bool:
    """Whether memory of slots follows the tokens in them."""
    return device.type == "cpu" and HAS_PAGES


def slot_memory(slots: int, max_columns: int, columns: int, like_BTGK: Tensor) -> SlotMemory:
    """Memory for keys or values like these. max_columns: that a slot may ever need; columns: now."""
    if pages_slots(like_BTGK.device):
        return PagedMemory(slots, max_columns, like_BTGK)
    return GrownMemory(slots, columns, like_BTGK)

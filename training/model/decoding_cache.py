"""Slot KV caches of continuous batching: each sequence has a slot, and every layer its keys and values of all slots.

Their memory is paged on a CPU, grown as a whole on other devices. In host memory every slot has the addresses of a
whole context, and the operating system gives it pages as columns are written (vAttention, arXiv 2405.04437): the cache
is paged, and attention reads each slot as one array, without gathering blocks by a table."""

import math
import mmap
import sys
from collections.abc import Sequence
from dataclasses import dataclass, fields, is_dataclass
from typing import Any

import torch
from torch import Tensor

# B rows, T tokens, S columns looked at, N slots, G key/value heads, C capacity in tokens, K head width

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


@dataclass(frozen=True)
class SharedPrefix:
    """Rows of a pass whose slots hold the same tokens in their first columns."""

    rows: tuple[int, ...]
    columns: int


@dataclass(frozen=True)
class SlotRows:
    """Which tokens a forward pass reads, and where their keys and values go.

    slots_B: int64, the slot of each row. positions_BT: int64, of each token in its sequence, -1 for padding, which is
    on the left; the token of position p is written to column p of its slot. span: columns read, 1 + the largest
    position. fresh: no row has tokens in the cache yet. padded: there is padding. in_order: slots_B is 0, 1, 2, ...
    last_only: of each row the last token's hidden state is wanted, of none other. first: slots_B is first, first + 1,
    ...; None: it may be anything. prefixes: that may be read once for all of their rows; a row is in one at most."""

    slots_B: Tensor
    positions_BT: Tensor
    span: int
    fresh: bool
    padded: bool
    in_order: bool
    last_only: bool = False
    first: int | None = None
    prefixes: tuple[SharedPrefix, ...] = ()

    @staticmethod
    def of_batch(positions_BT: Tensor, device: torch.device, prefixes: tuple[SharedPrefix, ...] = ()) -> "SlotRows":
        """Rows of the first slots. positions_BT: in host memory."""
        padding_BT = positions_BT < 0
        first_B = positions_BT.masked_fill(padding_BT, positions_BT.max()).amin(dim=1)
        return SlotRows(
            torch.arange(len(positions_BT), device=device),
            positions_BT.to(device),
            span=int(positions_BT.max()) + 1,
            fresh=not first_B.any(),
            padded=bool(padding_BT.any()),
            in_order=True,
            prefixes=prefixes,
        )

    @property
    def reads_itself_only(self) -> bool:
        """Plainly causal attention among the tokens of the pass."""
        return self.fresh and not self.padded


@dataclass(frozen=True)
class CachedKeys:
    """Keys and values that the tokens of a pass attend to."""

    key_BGSK: Tensor
    value_BGSK: Tensor


class KVSlots:
    """Keys and values of one layer. All numbers are finite, also those that no token may see: zero times infinity would
    reach the sum. columns: that a slot may need at most."""

    def __init__(self, slots: int, columns: int):
        self.slots, self.columns = slots, columns
        self.key: SlotMemory | None = None
        self.value: SlotMemory | None = None

    def at(self, rows: SlotRows) -> "SlotView":
        return SlotView(self, rows)

    @property
    def _memories(self) -> list[SlotMemory]:
        return [memory for memory in (self.key, self.value) if memory is not None]

    def copy(self, source: int, target: int, tokens: int) -> None:
        """Copies the first columns of one slot to another."""
        for memory in self._memories:
            if tokens:
                memory.numbers_NCGK[target, :tokens] = memory.numbers_NCGK[source, :tokens]

    def release(self, slot: int, tokens: int) -> None:
        """Gives back the memory behind the first columns of a slot; without any left, its numbers are zeros."""
        for memory in self._memories:
            memory.release(slot, tokens)

    def swap(self, first: int, second: int, first_tokens: int, second_tokens: int) -> None:
        """Exchanges two slots, of which the first columns hold tokens; what is behind them is lost."""
        shared = min(first_tokens, second_tokens)
        longer, shorter = (first, second) if first_tokens > second_tokens else (second, first)
        tokens = max(first_tokens, second_tokens)
        for memory in self._memories:
            numbers_NCGK = memory.numbers_NCGK
            kept_CGK = numbers_NCGK[first, :shared].clone()
            numbers_NCGK[first, :shared] = numbers_NCGK[second, :shared]
            numbers_NCGK[second, :shared] = kept_CGK
            if tokens > shared:
                numbers_NCGK[shorter, shared:tokens] = numbers_NCGK[longer, shared:tokens]
                memory.release(longer, shared)

    def reserve(self, rows: SlotRows, key_BTGK: Tensor, value_BTGK: Tensor) -> tuple[Tensor, Tensor]:
        """Keys and values [N, C, G, K] of all slots, with the columns of a pass, for new ones like these."""
        self.key = self._with_columns(self.key, rows, key_BTGK)
        self.value = self._with_columns(self.value, rows, value_BTGK)
        return self.key.numbers_NCGK, self.value.numbers_NCGK

    def _with_columns(self, memory: SlotMemory | None, rows: SlotRows, new_BTGK: Tensor) -> SlotMemory:
        if memory is None:
            return slot_memory(self.slots, max(self.columns, rows.span), rows.span, new_BTGK)
        return memory.with_columns(rows.span)

    def write(self, rows: SlotRows, key_BTGK: Tensor, value_BTGK: Tensor) -> None:
        self.reserve(rows, key_BTGK, value_BTGK)
        for memory, new_BTGK in zip(self._memories, (key_BTGK, value_BTGK), strict=True):
            places = rows.slots_B.unsqueeze(1), rows.positions_BT
            memory.numbers_NCGK[memory.padding_places(*places) if rows.padded else places] = new_BTGK

    def read(self, rows: SlotRows) -> CachedKeys:
        """Columns 0 to span - 1 of the rows' slots, without a copy where the slots are in order."""
        assert self.key is not None and self.value is not None
        key_NCGK, value_NCGK = self.key.numbers_NCGK, self.value.numbers_NCGK
        first = 0 if rows.in_order else rows.first
        if first is not None:
            last = first + len(rows.slots_B)
            key_BSGK, value_BSGK = key_NCGK[first:last, : rows.span], value_NCGK[first:last, : rows.span]
        else:
            key_BSGK, value_BSGK = (memory[rows.slots_B, : rows.span] for memory in (key_NCGK, value_NCGK))
        return CachedKeys(key_BSGK.transpose(1, 2), value_BSGK.transpose(1, 2))


@dataclass(frozen=True)
class SlotView:
    """The slots of one layer as the decoding state of a forward pass."""

    memory: KVSlots
    rows: SlotRows

    def append(self, key_BTGK: Tensor, value_BTGK: Tensor) -> CachedKeys:
        """Writes the new tokens; returns what they attend to."""
        self.memory.write(self.rows, key_BTGK, value_BTGK)
        if self.rows.reads_itself_only:
            return CachedKeys(key_BTGK.transpose(1, 2), value_BTGK.transpose(1, 2))
        return self.memory.read(self.rows)


# Rows of decoding states: take some, join those of several batches. For every mixer but attention.


def take_rows(state: Any, rows: Tensor) -> Any:
    """The state of the given batch rows, in that order. A state is a tensor whose first dimension are the rows, a ring
    buffer, or a tuple or dataclass of them. Raises TypeError for another."""
    if isinstance(state, Tensor):
        return state[rows]
    if isinstance(state, RingBuffer):
        return state.take(rows)
    return _of_parts(state, [take_rows(part, rows) for part in _parts(state)])


def join_rows(states: Sequence[Any]) -> Any:
    """One state with the rows of all, in order. Raises TypeError as `take_rows` does."""
    if isinstance(states[0], Tensor):
        return torch.cat(list(states))
    if isinstance(states[0], RingBuffer):
        return RingBuffer.of(torch.cat([row_state.in_order() for row_state in states]))
    parts = zip(*(_parts(state) for state in states), strict=True)
    return _of_parts(states[0], [join_rows(row_state) for row_state in parts])


def _parts(state: Any) -> list[Any]:
    if is_dataclass(state):
        return [getattr(state, field.name) for field in fields(state)]
    if isinstance(state, tuple):
        return list(state)
    raise TypeError(
        f"a decoding state of type {type(state).__name__} has no rows; make it a tensor, a tuple or a dataclass of them"
    )


def _of_parts(like: Any, parts: list[Any]) -> Any:
    return tuple(parts) if type(like) is tuple else type(like)(*parts)


# Ring buffers of decoding: the last inputs of a layer, in memory that neither grows nor moves.

# B rows, L columns kept, C channels


class _Slots:
    """Column t is in slot t % L; `columns` were written so far."""

    def __init__(self, slots_BLC: Tensor, columns: int):
        self.slots_BLC, self.columns = slots_BLC, columns


@dataclass(frozen=True)
class RingBuffer:
    """The last L columns before column `end`. A new column takes the place of the oldest, so only the newest buffer can
    be read: raises RuntimeError for one that was appended to already; `take` copies it before."""

    memory: _Slots
    end: int

    @staticmethod
    def of(last_BLC: Tensor) -> "RingBuffer":
        """last_BLC: the columns, oldest first. Copied."""
        length = last_BLC.shape[1]
        return RingBuffer(_Slots(last_BLC.detach().clone(memory_format=torch.contiguous_format), length), length)

    @property
    def length(self) -> int:
        return self.memory.slots_BLC.shape[1]

    def at(self, back: Sequence[int]) -> Tensor:
        """[B, len(back), C]: the columns so many places before `end`, 1 to L; 1 is the newest."""
        slots_BLC = self._slots()
        places = [(self.end - offset) % self.length for offset in back]
        return slots_BLC[:, places]

    def in_order(self) -> Tensor:
        """[B, L, C], oldest first. A copy."""
        slots_BLC = self._slots()
        return slots_BLC.roll(-(self.end % self.length), dims=1) if self.length else slots_BLC

    def append(self, column_BC: Tensor) -> "RingBuffer":
        slots_BLC = self._slots()
        if self.length:
            slots_BLC[:, self.end % self.length] = column_BC
        self.memory.columns = self.end + 1
        return RingBuffer(self.memory, self.end + 1)

    def slots(self) -> tuple[Tensor, Tensor]:
        """([B, L, C] as they lie, int64[L]: how many places before `end` each is, the newest 1)."""
        slots_BLC = self._slots()
        places_L = torch.arange(self.length, device=slots_BLC.device)
        return slots_BLC, (self.end - 1 - places_L) % self.length + 1

    def take(self, rows: Tensor) -> "RingBuffer":
        """The buffer of the given batch rows, in that order. A copy."""
        return RingBuffer(_Slots(self._slots()[rows], self.end), self.end)

    def _slots(self) -> Tensor:
        if self.memory.columns != self.end:
            raise RuntimeError("this decoding state was continued already; keep a copy of it (take) to continue twice")
        return self.memory.slots_BLC

"""Slots of a decoding cache: which sequence is in which, which tokens are kept for later prompts, and the blocks of
memory that they hold."""

import operator
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from gristmill.evaluation.inference.causal_lm import DecodingCache
from gristmill.training.model.decoding_cache import SharedPrefix

MIN_SHARED_TOKENS = 16  # a shorter common prefix is read again: copying it saves less than a pass of its own costs
MIN_PREFIX_TOKENS = 64  # that sequences have in common whose attention to them is one product
MIN_SAVED_COLUMNS = 1024  # that it does not read again; one product takes as long as reading about so many
BLOCK_TOKENS = 16  # in which memory is taken and given back


FIRST_GUESSES = 4


def blocks_of(tokens: int) -> int:
    """Blocks that so many tokens take."""
    return -(-tokens // BLOCK_TOKENS)


@dataclass
class Slot:
    """tokens: of the sequence; the keys and values of the first `cached` are in the cache, and of the first `written`
    those of some layers. used: number of the last use, for the choice of what is overwritten. blocks: of memory, from
    the first token on. drafted: tokens in the draft model's cache, right up to `cached` at most. guesses: tokens to
    guess next."""

    tokens: np.ndarray
    cached: int = 0
    used: int = 0
    blocks: int = 0
    written: int = 0
    drafted: int = 0
    guesses: int = FIRST_GUESSES

    @property
    def columns(self) -> int:
        return max(self.cached, self.written)


@dataclass(frozen=True)
class CacheUse:
    """Blocks that sequences and kept prefixes hold, of `max_blocks` (None: no limit). evicted_blocks: of prefixes that
    made room so far. preemptions: sequences that lost their memory so far, to be read again."""

    used_blocks: int
    max_blocks: int | None
    evicted_blocks: int
    preemptions: int


class Slots:
    """The slots 0 to running - 1 are the running batch, in the order of `Slot`s; those behind keep the tokens of
    sequences that have ended, so that a prompt with the same beginning need not be read again.

    draft_cache: of a draft model, with the same slots. max_blocks: that all slots together hold; None: no limit. A
    sequence that needs more takes them from what is kept: the least recently used first, from its end."""

    def __init__(
        self,
        cache: DecodingCache,
        count: int,
        keeps_prefixes: bool,
        draft_cache: DecodingCache | None = None,
        max_blocks: int | None = None,
    ):
        self.cache, self.keeps_prefixes, self.max_blocks = cache, keeps_prefixes, max_blocks
        self._caches = [cache] if draft_cache is None else [cache, draft_cache]
        self.running = 0
        self.evicted_blocks = 0
        self._slots = [Slot(np.empty(0, dtype=np.int64)) for _ in range(count)]
        self._uses = 0
        self._compared: dict[int, Slot] = {}  # those of which the prefixes are
        self._prefixes: tuple[SharedPrefix, ...] = ()

    @property
    def free(self) -> int:
        return len(self._slots) - self.running

    @property
    def used_blocks(self) -> int:
        return sum(slot.blocks for slot in self._slots)

    def __getitem__(self, index: int) -> Slot:
        return self._slots[index]

    def fits(self, blocks: int) -> bool:
        """Whether sequences that join can have so many blocks, and each that runs another one soon."""
        if self.max_blocks is None:
            return True
        running_blocks = sum(slot.blocks for slot in self._slots[: self.running])
        return running_blocks + self.running + blocks <= self.max_blocks

    def reserve(self, index: int, columns: int) -> bool:
        """Takes the blocks of so many columns for a running slot. False where other running sequences hold them."""
        slot = self._slots[index]
        missing = blocks_of(columns) - slot.blocks
        if missing > 0:
            if not self._evict(missing):
                return False
            slot.blocks += missing
        return True

    def trim(self, index: int, columns: int) -> None:
        """Gives back the blocks behind the first columns."""
        slot, blocks = self._slots[index], blocks_of(columns)
        if blocks < slot.blocks:
            slot.blocks = blocks
            for cache in self._caches:
                cache.release(index, blocks * BLOCK_TOKENS)
        slot.cached, slot.written, slot.drafted = (
            min(count, columns) for count in (slot.cached, slot.written, slot.drafted)
        )

    def _evict(self, missing: int) -> bool:
        """Frees so many blocks, if what is kept has them."""
        if self.max_blocks is None:
            return True
        missing -= self.max_blocks - self.used_blocks
        kept = range(self.running, len(self._slots))
        if missing > sum(self._slots[index].blocks for index in kept):
            return False
        for index in sorted(kept, key=lambda index: self._slots[index].used):
            taken = min(missing, self._slots[index].blocks)
            if taken > 0:
                self.trim(index, (self._slots[index].blocks - taken) * BLOCK_TOKENS)
                self.evicted_blocks += taken
                missing -= taken
        return True

    def longest_prefix(self, prompt: np.ndarray) -> tuple[int, int]:
        """(slot, tokens) of the longest beginning of a prompt that is in the cache; its last token is always read.
        Below MIN_SHARED_TOKENS it is (0, 0)."""
        if not self.keeps_prefixes:
            return 0, 0
        lengths = [_shared_tokens(prompt, slot) for slot in self._slots]
        best = int(np.argmax(lengths))
        return (best, lengths[best]) if lengths[best] >= MIN_SHARED_TOKENS else (0, 0)

    def shared_prefixes(self, live: Sequence[int]) -> tuple[SharedPrefix, ...]:
        """Long beginnings that several of these running slots have in common."""
        slots = {index: self._slots[index] for index in live}
        if slots.keys() != self._compared.keys() or any(map(operator.is_not, slots.values(), self._compared.values())):
            self._compared, self._prefixes = slots, tuple(_shared_prefixes(slots))
        return self._prefixes

    def claim(self, tokens: np.ndarray, columns: int, shared_with: int, shared: int) -> int:
        """Takes the next slot of the running batch and blocks for so many columns, which `fits` allows, for a sequence,
        with the first `shared` tokens of another slot."""
        own, source = self.running, shared_with if shared else -1
        if source >= own and self.max_blocks is not None and blocks_of(columns) > self.max_blocks - self.used_blocks:
            self._swap(source, own)  # memory does not hold the beginning twice: the sequence goes on in its place
            source = own
        else:
            source = self._vacate(own, source)
        self.trim(own, columns)
        before = self._slots[own]
        drafted = min(shared, self._slots[source].drafted) if shared else 0
        self._slots[own] = Slot(tokens, shared, self._next_use(), before.blocks, drafted=drafted)
        self.running += 1
        if not self.reserve(own, columns):
            raise RuntimeError(f"the cache has no {blocks_of(columns)} blocks for a sequence that fits")
        if shared and source != own:
            self._copy(source, own, shared)
        return own

    def _vacate(self, own: int, source: int) -> int:
        """Moves what is kept in a slot to the place of what was used longest ago; returns where the source is then."""
        oldest = min(range(own, len(self._slots)), key=lambda index: (self._slots[index].used, -index))
        if oldest in (own, source) or not self._slots[own].cached:
            self.evicted_blocks += self._slots[own].blocks if source != own else 0
            return source
        self.evicted_blocks += self._slots[oldest].blocks
        self.trim(oldest, 0)
        self._swap(own, oldest)
        return oldest if source == own else source

    def clear(self, slot: int) -> None:
        """Forgets a slot whose keys and values may not be finite."""
        self.trim(slot, 0)

    def _copy(self, source: int, target: int, tokens: int) -> None:
        for cache in self._caches:
            cache.copy(source, target, tokens)

    def _swap(self, first: int, second: int) -> None:
        if first == second:
            return
        slots = self._slots
        for cache in self._caches:
            cache.swap(first, second, slots[first].columns, slots[second].columns)
        slots[first], slots[second] = slots[second], slots[first]

    def release(self, ended: list[int]) -> list[int]:
        """Takes slots out of the running batch; returns, for each slot that goes on, where it was."""
        order = list(range(self.running))
        for slot in sorted(ended, reverse=True):
            last = self.running - 1
            self._swap(slot, last)
            order[slot] = order[last]
            self._slots[last].used = self._next_use()
            self.running = last
            self.trim(last, self._slots[last].cached if self.keeps_prefixes else 0)
        order = order[: self.running]
        self.cache.select(order)
        return order

    def _next_use(self) -> int:
        self._uses += 1
        return self._uses


def _shared_tokens(prompt: np.ndarray, slot: Slot) -> int:
    """Tokens of a prompt that need not be read, or 0 where they are fewer than MIN_SHARED_TOKENS. One of them is
    compared first: this is asked for every slot and every prompt that waits."""
    last = MIN_SHARED_TOKENS - 1
    if min(slot.cached, len(prompt) - 1) <= last or slot.tokens[last] != prompt[last]:
        return 0
    return min(common_prefix(prompt, slot.tokens[: slot.cached]), len(prompt) - 1)


def _shared_prefixes(slots: Mapping[int, Slot]) -> Iterator[SharedPrefix]:
    """Among those that begin alike, as many as save the most columns, then the same of the others."""
    alike: dict[bytes, list[int]] = {}
    for index, slot in slots.items():
        if slot.cached >= MIN_PREFIX_TOKENS:
            alike.setdefault(slot.tokens[:MIN_PREFIX_TOKENS].tobytes(), []).append(index)
    for indices in alike.values():
        while len(indices) > 1:
            first, *others = (slots[index].tokens[: slots[index].cached] for index in indices)
            lengths = np.array([len(first), *(common_prefix(first, other) for other in others)])
            order = np.argsort(-lengths, kind="stable")
            saved = lengths[order] * np.arange(len(order))
            count = int(saved.argmax()) + 1
            if saved[count - 1] < MIN_SAVED_COLUMNS:
                break
            chosen = sorted(indices[number] for number in order[:count])
            yield SharedPrefix(tuple(chosen), int(lengths[order[count - 1]]))
            indices = [index for index in indices if index not in chosen]


def common_prefix(first: np.ndarray, second: np.ndarray) -> int:
    """Number of equal tokens at the beginning."""
    length = min(len(first), len(second))
    differ = np.flatnonzero(first[:length] != second[:length])
    return int(differ[0]) if len(differ) else length

"""Slots of a decoding cache: which sequence is in which, and which tokens are kept for later prompts."""

from dataclasses import dataclass

import numpy as np

from gristmill.evaluation.inference.causal_lm import DecodingCache

MIN_SHARED_TOKENS = 16  # a shorter common prefix is read again: copying it saves less than a pass of its own costs


FIRST_GUESSES = 4


@dataclass
class Slot:
    """tokens: of the sequence; the keys and values of the first `cached` are in the cache, and of the first `written`
    those of some layers. used: number of the last use, for the choice of the slot to overwrite. drafted: tokens in the
    draft model's cache, right up to `cached` at most. guesses: tokens to guess next."""

    tokens: np.ndarray
    cached: int = 0
    used: int = 0
    written: int = 0
    drafted: int = 0
    guesses: int = FIRST_GUESSES

    @property
    def columns(self) -> int:
        return max(self.cached, self.written)


class Slots:
    """The slots 0 to running - 1 are the running batch, in the order of `Slot`s; those behind keep the tokens of
    sequences that have ended, so that a prompt with the same beginning need not be read again. draft_cache: of a draft
    model, with the same slots."""

    def __init__(
        self, cache: DecodingCache, count: int, keeps_prefixes: bool, draft_cache: DecodingCache | None = None
    ):
        self.cache, self.keeps_prefixes = cache, keeps_prefixes
        self._caches = [cache] if draft_cache is None else [cache, draft_cache]
        self.running = 0
        self._slots = [Slot(np.empty(0, dtype=np.int64)) for _ in range(count)]
        self._uses = 0

    @property
    def free(self) -> int:
        return len(self._slots) - self.running

    def __getitem__(self, index: int) -> Slot:
        return self._slots[index]

    def longest_prefix(self, prompt: np.ndarray) -> tuple[int, int]:
        """(slot, tokens) of the longest beginning of a prompt that is in the cache; its last token is always read.
        Below MIN_SHARED_TOKENS it is (0, 0)."""
        if not self.keeps_prefixes:
            return 0, 0
        lengths = [min(common_prefix(prompt, slot.tokens[: slot.cached]), len(prompt) - 1) for slot in self._slots]
        best = int(np.argmax(lengths))
        return (best, lengths[best]) if lengths[best] >= MIN_SHARED_TOKENS else (0, 0)

    def claim(self, tokens: np.ndarray, shared_with: int, shared: int) -> int:
        """Takes the next slot of the running batch for a sequence, with the first `shared` tokens of another slot."""
        own = self.running
        kept = min(range(own, len(self._slots)), key=lambda index: (self._slots[index].used, -index))
        if shared and kept == shared_with:
            kept = own
        if kept != own and self._slots[own].cached:  # what is kept in the slot goes to the one used longest ago
            self._copy(own, kept, self._slots[own].cached)
            self._slots[kept] = self._slots[own]
            shared_with = kept if shared_with == own else shared_with
        if shared and shared_with != own:
            self._copy(shared_with, own, shared)
        drafted = min(shared, self._slots[shared_with].drafted) if shared else 0
        self._slots[own] = Slot(tokens, shared, self._next_use(), drafted=drafted)
        self.running += 1
        return own

    def clear(self, slot: int) -> None:
        """Forgets a slot whose keys and values may not be finite."""
        for cache in self._caches:
            cache.clear(slot)
        self._slots[slot].cached = self._slots[slot].drafted = 0

    def _copy(self, source: int, target: int, tokens: int) -> None:
        for cache in self._caches:
            cache.copy(source, target, tokens)

    def release(self, ended: list[int]) -> list[int]:
        """Takes slots out of the running batch; returns, for each slot that goes on, where it was."""
        order = list(range(self.running))
        for slot in sorted(ended, reverse=True):
            last = self.running - 1
            if slot != last:
                for cache in self._caches:
                    cache.swap(slot, last, max(self._slots[slot].columns, self._slots[last].columns))
                self._slots[slot], self._slots[last] = self._slots[last], self._slots[slot]
                order[slot] = order[last]
            self._slots[last].used = self._next_use()
            if not self.keeps_prefixes:
                self._slots[last].cached = 0
            self.running = last
        order = order[: self.running]
        self.cache.select(order)
        return order

    def _next_use(self) -> int:
        self._uses += 1
        return self._uses


def common_prefix(first: np.ndarray, second: np.ndarray) -> int:
    """Number of equal tokens at the beginning."""
    length = min(len(first), len(second))
    differ = np.flatnonzero(first[:length] != second[:length])
    return int(differ[0]) if len(differ) else length

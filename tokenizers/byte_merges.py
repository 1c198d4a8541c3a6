"""Trains the merges of a byte-level BPE on counted words (Sennrich et al. 2016).

The pair that occurs most often is merged until the vocabulary is full; of equal ones the pair of the smaller ids, as
Hugging Face's trainer does, so the merges are the same. Every pair has a list of the places where it began; a place
that no longer holds the pair is skipped when it is read. A heap holds the pairs by a count that may be too high; a pair
that comes up with an old count goes back with its present one.

S symbols of all words, P pairs, N nodes of the lists. words: symbols, previous, following, word: int32[S], counts:
int64[words]. pairs: keys (left << 32 | right), counts, heap counts (0 for a pair that is not in the heap), heads,
tails, list sizes: int64[P]. nodes: places, links: int32[N]."""

from collections.abc import Sequence

import numpy as np

from gristmill.foundation.runtime.kernels.cached_njit import cached_njit

NONE = -1
MULTIPLIER = np.uint64(0x9E3779B97F4A7C15)
U1, U29 = np.uint64(1), np.uint64(29)
PAIRS, NODES, FREE, HEAP, TOKENS, MERGES = range(6)  # entries of state: what is in use; FREE: first unused node
MERGE_FIELDS = 3


class MergeTrainer:
    """symbols: int32, ids of all words one after another; word i is symbols[starts[i] : starts[i + 1]] and occurs
    counts[i] times (int64). tokens: bytes of the ids that exist."""

    def __init__(self, symbols: np.ndarray, starts: np.ndarray, counts: np.ndarray, tokens: Sequence[bytes]):
        lengths = np.diff(starts)
        places = np.arange(len(symbols), dtype=np.int32)
        previous, following = places - 1, places + 1
        filled = lengths > 0
        previous[starts[:-1][filled]] = NONE
        following[starts[1:][filled] - 1] = NONE
        word = np.repeat(np.arange(len(counts), dtype=np.int32), lengths)
        self._words = (symbols.astype(np.int32), previous, following, word, counts.astype(np.int64))
        self._tokens = tokens
        pairs = min(len(symbols), len(tokens) ** 2) + 1024
        self._pairs = tuple(np.zeros(pairs, np.int64) for _ in range(6))
        self._nodes = tuple(np.zeros(len(symbols) + 1024, np.int32) for _ in range(2))
        self._heap = np.zeros(pairs, np.int64)
        self._state = np.zeros(6, np.int64)
        self._state[FREE] = NONE
        self._table = _empty_table(pairs)

    def train(self, num_tokens: int) -> list[tuple[int, int, int]]:
        """(left, right, merged) of each merge, ids of tokens, until there are num_tokens or no pair occurs.

        Merges whose bytes a token already has give its id, so there may be more merges than new tokens."""
        hashes, lengths = np.zeros(num_tokens, np.uint64), np.zeros(num_tokens, np.int64)
        for number, token in enumerate(self._tokens):
            hashes[number], lengths[number] = _hash_of(token), len(token)
        slots = np.full(1 << int(2 * num_tokens).bit_length(), NONE, np.int64)
        self._state[TOKENS] = len(self._tokens)
        _store_tokens(hashes, len(self._tokens), slots)
        merges = np.zeros((2 * num_tokens, MERGE_FIELDS), np.int64)
        _list_places(self._words, self._table, self._pairs, self._nodes, self._heap, self._state)
        arrays = self._words, (hashes, lengths, slots), merges
        while needed := _merge_all(*arrays, self._table, self._pairs, self._nodes, self._heap, self._state):
            self._grow(needed)
        return [(left, right, merged) for left, right, merged in merges[: self._state[MERGES]].tolist()]

    def _grow(self, needed: int) -> None:
        """Makes room for so many new pairs and nodes."""
        pairs, nodes = int(self._state[PAIRS]), int(self._state[NODES])
        if pairs + needed > len(self._heap):
            extra = max(needed, pairs)
            self._pairs = tuple(_extended(array, extra) for array in self._pairs)
            self._heap = _extended(self._heap, extra)
            self._table = _empty_table(len(self._heap))
            _store_pairs(self._pairs[0][:pairs], self._table)
        if nodes + needed > len(self._nodes[0]):
            self._nodes = tuple(_extended(array, max(needed, nodes // 2)) for array in self._nodes)


def _extended(array: np.ndarray, extra: int) -> np.ndarray:
    return np.concatenate([array, np.zeros(extra, array.dtype)])


def _empty_table(pairs: int) -> tuple[np.ndarray, np.ndarray]:
    """A hash table of keys and of the numbers of their pairs, at most half full."""
    slots = 1 << int(2 * pairs).bit_length()
    return np.full(slots, NONE, np.int64), np.zeros(slots, np.int32)


def _hash_of(token: bytes) -> int:
    value = 0
    for byte in token:
        value = (value * int(MULTIPLIER) + byte + 1) & 0xFFFFFFFFFFFFFFFF
    return value


@cached_njit()
def _store_tokens(hashes, count, slots):
    mask = np.uint64(len(slots) - 1)
    for token in range(count):
        slot = hashes[token] & mask
        while slots[slot] != NONE:
            slot = (slot + U1) & mask
        slots[slot] = token


@cached_njit()
def _store_pairs(pair_keys, table):
    keys, numbers = table
    for pair in range(len(pair_keys)):
        slot = _slot_of(pair_keys[pair], keys)
        keys[slot], numbers[slot] = pair_keys[pair], pair


@cached_njit()
def _slot_of(key, keys):
    """The slot of a pair, or the empty one where it belongs."""
    mask = np.uint64(len(keys) - 1)
    word = np.uint64(key) * MULTIPLIER
    slot = (word ^ (word >> U29)) & mask
    while keys[slot] != NONE and keys[slot] != key:
        slot = (slot + U1) & mask
    return slot


@cached_njit()
def _add_place(key, place, count, table, pairs, nodes, state):
    """Adds a place at the end of the list of a pair; returns the pair, which is new if no place had it."""
    keys, numbers = table
    pair_keys, pair_counts, heap_counts, heads, tails, list_sizes = pairs
    places, links = nodes
    slot = _slot_of(key, keys)
    if keys[slot] == NONE:
        pair = state[PAIRS]
        state[PAIRS] += 1
        keys[slot], numbers[slot] = key, pair
        pair_keys[pair], pair_counts[pair], heap_counts[pair] = key, 0, 0
        heads[pair], list_sizes[pair] = NONE, 0
    pair = np.int64(numbers[slot])
    node = state[FREE]
    if node == NONE:
        node = state[NODES]
        state[NODES] += 1
    else:
        state[FREE] = links[node]
    places[node], links[node] = place, NONE
    if heads[pair] == NONE:
        heads[pair] = node
    else:
        links[tails[pair]] = node
    tails[pair] = node
    pair_counts[pair] += count
    list_sizes[pair] += 1
    return pair


@cached_njit()
def _list_places(words, table, pairs, nodes, heap, state):
    """Fills the lists and the heap from the words."""
    symbols, following, word, counts = words[0], words[2], words[3], words[4]
    for at in range(len(symbols)):
        if following[at] != NONE:
            key = np.int64(symbols[at]) << 32 | np.int64(symbols[at + 1])
            _add_place(key, at, counts[word[at]], table, pairs, nodes, state)
    for pair in range(state[PAIRS]):
        _push(pair, pairs, heap, state)


@cached_njit()
def _is_before(first, second, pairs):
    """Whether pair `first` is merged before `second`, by the counts in the heap."""
    pair_keys, heap_counts = pairs[0], pairs[2]
    if heap_counts[first] != heap_counts[second]:
        return heap_counts[first] > heap_counts[second]
    return pair_keys[first] < pair_keys[second]


@cached_njit()
def _push(pair, pairs, heap, state):
    pairs[2][pair] = pairs[1][pair]
    at = state[HEAP]
    state[HEAP] += 1
    heap[at] = pair
    while at > 0 and _is_before(pair, heap[(at - 1) >> 1], pairs):
        parent = (at - 1) >> 1
        heap[at], heap[parent] = heap[parent], pair
        at = parent


@cached_njit()
def _sift_down(pairs, heap, state):
    """Moves the first entry of the heap to its place."""
    at = 0
    while True:
        best = at
        for child in range(2 * at + 1, min(2 * at + 3, state[HEAP])):
            if _is_before(heap[child], heap[best], pairs):
                best = child
        if best == at:
            return
        heap[at], heap[best] = heap[best], heap[at]
        at = best


@cached_njit()
def _bring_best_up(pairs, heap, state):
    """The most frequent pair, at the head of the heap with its present count; NONE if no pair occurs."""
    pair_counts, heap_counts = pairs[1], pairs[2]
    while state[HEAP] > 0:
        best = heap[0]
        if heap_counts[best] == pair_counts[best] and pair_counts[best] > 0:
            return best
        heap_counts[best] = max(pair_counts[best], 0)
        if pair_counts[best] <= 0:
            state[HEAP] -= 1
            heap[0] = heap[state[HEAP]]
        _sift_down(pairs, heap, state)
    return NONE


@cached_njit()
def _merged_token(left, right, tokens, state):
    """The token with the bytes of two; a new one where there is none. tokens: hashes and lengths of their bytes, and a
    hash table of them."""
    hashes, lengths, slots = tokens
    value, base, rest = hashes[left], MULTIPLIER, lengths[right]
    while rest > 0:
        if rest & 1:
            value *= base
        base *= base
        rest >>= 1
    value += hashes[right]
    mask = np.uint64(len(slots) - 1)
    slot = value & mask
    while slots[slot] != NONE and hashes[slots[slot]] != value:
        slot = (slot + U1) & mask
    if slots[slot] == NONE:
        slots[slot] = state[TOKENS]
        hashes[state[TOKENS]], lengths[state[TOKENS]] = value, lengths[left] + lengths[right]
        state[TOKENS] += 1
    return slots[slot]


@cached_njit()
def _merge_pair(best, merged, words, table, pairs, nodes, touched, state):
    """Merges a pair at all its places; returns how many pairs with the merged token it wrote to `touched`."""
    symbols, previous, following, word, counts = words
    keys, numbers = table
    pair_keys, pair_counts, heap_counts, heads, list_sizes = pairs[0], pairs[1], pairs[2], pairs[3], pairs[5]
    places, links = nodes
    left, right = pair_keys[best] >> 32, pair_keys[best] & 0xFFFFFFFF
    node, count_touched = heads[best], 0
    heads[best], list_sizes[best] = NONE, 0
    while node != NONE:
        at, link = places[node], links[node]
        links[node], state[FREE] = state[FREE], node
        node = link
        after = following[at]
        if symbols[at] != left or after == NONE or symbols[after] != right:
            continue
        count = counts[word[at]]
        before, beyond = previous[at], following[after]
        symbols[at], symbols[after], following[at] = merged, NONE, beyond
        if before != NONE:
            neighbour = np.int64(symbols[before]) << 32
            pair_counts[numbers[_slot_of(neighbour | left, keys)]] -= count
            touched[count_touched] = _add_place(neighbour | merged, before, count, table, pairs, nodes, state)
            count_touched += 1
        if beyond != NONE:
            previous[beyond] = at
            neighbour = np.int64(symbols[beyond])
            pair_counts[numbers[_slot_of(right << 32 | neighbour, keys)]] -= count
            touched[count_touched] = _add_place(merged << 32 | neighbour, at, count, table, pairs, nodes, state)
            count_touched += 1
    pair_counts[best] = heap_counts[best] = 0
    return count_touched


@cached_njit()
def _merge_all(words, tokens, merges, table, pairs, nodes, heap, state):
    """Merges until the vocabulary is full or no pair occurs, and returns 0; or returns for how many pairs and nodes the
    next merge needs room."""
    pair_keys, pair_counts, heap_counts, list_sizes = pairs[0], pairs[1], pairs[2], pairs[5]
    while state[TOKENS] < len(tokens[0]) and state[MERGES] < len(merges):
        best = _bring_best_up(pairs, heap, state)
        if best == NONE:
            return 0
        needed = 2 * list_sizes[best] + 2
        if state[PAIRS] + needed > len(heap) or state[NODES] + needed > len(nodes[0]):
            return needed
        state[HEAP] -= 1
        heap[0] = heap[state[HEAP]]
        heap_counts[best] = 0
        _sift_down(pairs, heap, state)
        left, right = pair_keys[best] >> 32, pair_keys[best] & 0xFFFFFFFF
        merged = _merged_token(left, right, tokens, state)
        merges[state[MERGES], 0], merges[state[MERGES], 1], merges[state[MERGES], 2] = left, right, merged
        state[MERGES] += 1
        touched = np.empty(needed, np.int64)
        for number in range(_merge_pair(best, merged, words, table, pairs, nodes, touched, state)):
            pair = touched[number]
            if heap_counts[pair] == 0 and pair_counts[pair] > 0:
                _push(pair, pairs, heap, state)
    return 0

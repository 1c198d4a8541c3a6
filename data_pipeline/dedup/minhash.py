"""MinHash signatures straight from UTF-8 bytes, value for value those of datasketch 2 in its default scheme; and the
exact Jaccard similarity that they estimate.

datasketch.MinHash(num_perm, seed, hashfunc=ShingleHash(unit)) over `shingles_of(folded text)` is the definition:
scheme "affine32" (datasketch/minhash.py, 2.0.0): value k is the minimum over all shingles of
a[k] * fmix32(hash) + b[k] modulo 2**32, where fmix32 is the finalizer of MurmurHash3; with no shingle, 2**32 - 1."""

from dataclasses import dataclass
from functools import cache
from itertools import pairwise
from typing import Literal

import numpy as np

from gristmill.data_pipeline.dedup.folding import fold_texts
from gristmill.data_pipeline.dedup.kernels import (
    BASE,
    LARGEST_HASH,
    MULTIPLY_GROUP,
    MULTIPLY_SHINGLE,
    MULTIPLY_UNIT,
    ONE,
    START,
    U6,
    U29,
    U32,
    U63,
    sign_all,
    text_shingles,
)
from gristmill.foundation.runtime.kernels.cached_njit import cached_njit

# Shingles of a folded text and their hashes: n words (or characters) in a row, as 64 bits each.
#
# The hash of a shingle, stated so that anyone can compute it (`ShingleHash` does, in Python): - unit (a word, or a
# character), as its UTF-8 bytes in little-endian groups of eight, the last padded with zeros: h = START; for each
# group g: h = (h ^ g) * MULTIPLY_GROUP; h ^= h >> 32; at last h *= MULTIPLY_UNIT; h ^= h >> 29; - shingle of units
# h1..hn: H = ((h1 * BASE + h2) * BASE + ...) + hn; H ^= H >> 32; H *= MULTIPLY_SHINGLE; H ^= H >> 29, all modulo
# 2**64. Constants are odd 64-bit values of high entropy (fractional digits of pi, e and sqrt 2, 3, 5). Sets of
# shingles are compared by these 64 bits: for two documents of 10,000 shingles each, the probability that any two
# different shingles agree is 1e-11.

Unit = Literal["word", "character"]

MASK = (1 << 64) - 1


class ShingleHash:
    """The hash of one shingle in plain Python: the `hashfunc` that makes datasketch give our signatures.

    Called with the shingle's UTF-8 bytes: words with one space between them, or characters. `bits` of the result:
    the upper 32 (datasketch's default scheme) or all 64 (what exact similarity compares)."""

    def __init__(self, unit: Unit = "word", bits: int = 32):
        self.unit, self.bits = unit, bits

    def __call__(self, shingle: bytes) -> int:
        units = shingle.split(b" ") if self.unit == "word" else [c.encode() for c in shingle.decode()]
        value = 0
        for unit in units:
            value = (value * int(BASE) + _unit_hash_in_python(unit)) & MASK
        value ^= value >> 32
        value = value * int(MULTIPLY_SHINGLE) & MASK
        value ^= value >> 29
        return value >> (64 - self.bits)


def _unit_hash_in_python(unit: bytes) -> int:
    value = int(START)
    for start in range(0, len(unit), 8):
        value = (value ^ int.from_bytes(unit[start : start + 8], "little")) * int(MULTIPLY_GROUP) & MASK
        value ^= value >> 32
    value = value * int(MULTIPLY_UNIT) & MASK
    return value ^ (value >> 29)


def shingles_of(folded: str, ngram: int, unit: Unit = "word") -> list[bytes]:
    """The shingles of a folded text as bytes, in order. A text of fewer units is one shingle; an empty text has none.

    "a b c", 2 -> [b"a b", b"b c"]; "a", 2 -> [b"a"]; "" -> []."""
    units = folded.split() if unit == "word" else list(folded)
    joint = " " if unit == "word" else ""
    count = max(len(units) - ngram + 1, 1 if units else 0)
    return [joint.join(units[i : i + ngram]).encode() for i in range(count)]


SCHEME = "affine32"


@cache
def permutations(hashes: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """The factors (odd) and summands of the permutations, uint32[hashes] each, as datasketch draws them."""
    generator = np.random.RandomState(seed)
    factors = generator.randint(0, 1 << 31, hashes, dtype=np.uint32) * np.uint32(2) + np.uint32(1)
    return factors, generator.randint(0, 1 << 32, hashes, dtype=np.uint32)


def sign(folded: np.ndarray, ends: np.ndarray, ngram: int, unit: Unit, hashes: int, seed: int):
    """(signatures uint32[texts, hashes], shingles int64[texts]) of folded texts, as `fold_texts` gives them.

    shingles counts them with repetition; 0 for a text without a word, whose signature means nothing."""
    factors, summands = permutations(hashes, seed)
    signatures = np.full((len(ends) - 1, hashes), LARGEST_HASH, np.uint32)
    shingles = np.zeros(len(ends) - 1, np.int64)
    capacity = _capacity(ends)
    units, keys = np.empty(capacity, np.uint64), np.empty(capacity, np.uint64)
    sign_all(folded, ends, ngram, unit == "word", factors, summands, units, keys, signatures, shingles)
    return signatures, shingles


def signatures_of(data: np.ndarray, offsets: np.ndarray, ngram: int, unit: Unit, hashes: int, seed: int):
    """As `sign`, from the raw UTF-8 of the texts."""
    folded, ends = fold_texts(data, offsets, unit)
    return sign(folded, ends, ngram, unit, hashes, seed)


def _capacity(ends: np.ndarray) -> int:
    """Units in the longest text at most, with padding for whole vectors."""
    return int(np.diff(ends).max(initial=0)) + 64


# Locality-sensitive hashing: documents that agree in a whole band of their signatures share a bucket.

LONG_RUN = 1000  # keys of a run from which on insertion would take longer than NumPy's sort
KEY_BITS = 8  # bits of the bit map of `repeated_keys` for each key


def candidate_probability(similarity: float, bands: int, rows: int) -> float:
    """The probability that two documents share a bucket: 1 - (1 - s**rows)**bands.

    s = 0.8 with 16 bands of 8 rows: 0.947 (Leskovec, Rajaraman, Ullman, Mining of Massive Datasets, 3.4.2)."""
    return 1.0 - (1.0 - similarity**rows) ** bands


@cached_njit(nogil=True)
def band_keys(signatures, bands, rows, salt):
    """uint64[bands, documents] of signatures uint32[documents, >= bands * rows]: a 64-bit hash of each band.

    Two bands with equal keys but other values are possible (2**-64 a pair) and harmless: candidates are verified.
    salt parts pools that must never meet."""
    keys = np.empty((bands, len(signatures)), np.uint64)
    for document in range(len(signatures)):
        for band in range(bands):
            keys[band, document] = band_key(signatures, document, band, rows, salt)
    return keys


@cached_njit(nogil=True, forceinline=True)
def band_key(signatures, document, band, rows, salt):
    """The key of one band of one document."""
    value = salt
    for row in range(band * rows, band * rows + rows):
        value = (value ^ np.uint64(signatures[document, row])) * MULTIPLY_GROUP
        value ^= value >> U32
    value *= MULTIPLY_UNIT
    return value ^ (value >> U29)


def key_order(keys: np.ndarray) -> np.ndarray:
    """int64[]: places of the keys in ascending order, of equals the first first. Keys are hashes.

    By their upper bits into runs of about eight, then by insertion: 20 ns a key, a quarter of NumPy's stable sort."""
    order, sorted_bits = np.empty(len(keys), np.int64), np.empty(len(keys), np.uint64)
    if _sort_runs(np.ascontiguousarray(keys), max((len(keys) // 8).bit_length(), 1), order, sorted_bits):
        return order
    return np.argsort(keys, kind="stable")


@cached_njit(nogil=True)
def _sort_runs(keys, bits, order, sorted_bits):
    """Whether all runs are short enough to be sorted by insertion."""
    shift = np.uint64(64 - bits)
    ends = np.zeros((1 << bits) + 1, np.int64)
    for key in keys:
        ends[np.int64(key >> shift) + 1] += 1
    for run in range(1, len(ends)):
        if ends[run] > LONG_RUN:
            return False
        ends[run] += ends[run - 1]
    filled = ends[:-1].copy()
    for place in range(len(keys)):
        bucket = np.int64(keys[place] >> shift)
        order[filled[bucket]], sorted_bits[filled[bucket]] = place, keys[place]
        filled[bucket] += 1
    for run in range(len(ends) - 1):
        _insertion_sort(sorted_bits, order, ends[run], ends[run + 1])
    return True


@cached_njit(nogil=True)
def _insertion_sort(keys, order, start, stop):
    for i in range(start + 1, stop):
        key, place = keys[i], order[i]
        j = i
        while j > start and keys[j - 1] > key:
            keys[j], order[j] = keys[j - 1], order[j - 1]
            j -= 1
        keys[j], order[j] = key, place


def repeated_keys(keys: np.ndarray) -> np.ndarray:
    """int64[]: ascending positions of all keys that occur more than once, and of one other key in eight at most.

    Keys are hashes. Memory: at most 4 bytes a key, and 8 for each that is found."""
    bits = 1 << max((KEY_BITS * len(keys) - 1).bit_length(), 6)
    once, twice = np.zeros(bits // 64, np.uint64), np.zeros(bits // 64, np.uint64)
    _count_bits(keys, once, twice)
    positions = np.empty(_count_repeated(keys, twice), np.int64)
    _fill_positions(keys, twice, positions)
    return positions


@cached_njit(nogil=True)
def _count_bits(keys, once, twice):
    mask = np.uint64(64 * len(once) - 1)
    for key in keys:
        bit = key & mask
        flag = ONE << (bit & U63)
        twice[bit >> U6] |= once[bit >> U6] & flag
        once[bit >> U6] |= flag


@cached_njit(nogil=True)
def _count_repeated(keys, twice):
    mask = np.uint64(64 * len(twice) - 1)
    count = np.int64(0)
    for key in keys:
        bit = key & mask
        count += np.int64((twice[bit >> U6] >> (bit & U63)) & ONE)
    return count


@cached_njit(nogil=True)
def _fill_positions(keys, twice, positions):
    mask = np.uint64(64 * len(twice) - 1)
    count = 0
    for at in range(len(keys)):
        bit = keys[at] & mask
        if (twice[bit >> U6] >> (bit & U63)) & ONE:
            positions[count] = at
            count += 1


def buckets(keys: np.ndarray, members: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """(bucket int64, member int64) of every member that shares its key with another, ordered by bucket and member.

    Keys [7, 5, 7, 9], members [0, 1, 2, 3] -> ([0, 0], [0, 2]). Memory: 12 bytes a key."""
    chosen = repeated_keys(keys)
    keys, members = keys[chosen], members[chosen]
    order = np.lexsort((members, keys))
    ordered = keys[order]
    same_as_next = ordered[1:] == ordered[:-1]
    shared = np.zeros(len(keys), bool)
    shared[1:] |= same_as_next
    shared[:-1] |= same_as_next
    positions = np.flatnonzero(shared)
    sorted_keys = ordered[positions]
    starts = np.ones(len(sorted_keys), bool)
    starts[1:] = sorted_keys[1:] != sorted_keys[:-1]
    return np.cumsum(starts) - 1, members[order[positions]]


@cached_njit(nogil=True)
def union_pairs(parents, lefts, rights):
    """Unites each pair in the forest `parents` int64[nodes]; the root of a tree is its lowest node."""
    for i in range(len(lefts)):
        left, right = find_root(parents, lefts[i]), find_root(parents, rights[i])
        if left < right:
            parents[right] = left
        elif right < left:
            parents[left] = right


@cached_njit(nogil=True)
def find_root(parents, node):
    """The root of a node's tree; halves the path to it."""
    while parents[node] != node:
        parents[node] = parents[parents[node]]
        node = parents[node]
    return node


@cached_njit(nogil=True)
def find_roots(parents):
    """The root of every node."""
    roots = np.empty_like(parents)
    for node in range(len(parents)):
        roots[node] = find_root(parents, node)
    return roots


# Exact Jaccard similarity of shingle sets, and the greedy choice of what is kept.


def shingle_sets(data: np.ndarray, offsets: np.ndarray, ngram: int, unit: Unit) -> list[np.ndarray]:
    """The set of each text's shingles as ascending 64-bit hashes. The texts are raw UTF-8, as `utf8_of` gives them."""
    values, bounds = joined_shingle_sets(data, offsets, ngram, unit)
    return [values[start:stop] for start, stop in pairwise(bounds.tolist())]


def joined_shingle_sets(data: np.ndarray, offsets: np.ndarray, ngram: int, unit: Unit) -> tuple[np.ndarray, np.ndarray]:
    """The sets one after the other, uint64[], and int64[texts + 1] bounds of each."""
    folded, ends = fold_texts(data, offsets, unit)
    longest = int(np.diff(ends).max(initial=0))
    most = int(ends[-1] - ends[0]) // (2 if unit == "word" else 1)  # a word and the space behind it are two bytes
    units, keys = np.empty(longest + 64, np.uint64), np.empty(most + longest + 64, np.uint64)
    bounds = np.zeros(len(ends), np.int64)
    _all_shingles(folded, ends, ngram, unit == "word", units, keys, bounds)
    for start, stop in pairwise(bounds.tolist()):
        keys[start:stop].sort()
    _drop_repeats(keys, bounds)
    return keys[: bounds[-1]].copy(), bounds


@cached_njit(nogil=True)
def _all_shingles(folded, ends, ngram, words, units, keys, bounds):
    for text in range(len(ends) - 1):
        start = bounds[text]
        bounds[text + 1] = start + text_shingles(folded, ends[text], ends[text + 1], ngram, words, units, keys[start:])


@cached_njit(nogil=True)
def _drop_repeats(keys, bounds):
    """Moves the distinct values of each ascending set to the front of `keys`, and the bounds with them."""
    start = at = 0
    for text in range(len(bounds) - 1):
        stop = bounds[text + 1]
        for place in range(start, stop):
            if place == start or keys[place] != keys[place - 1]:
                value = keys[place]
                keys[at] = value
                at += 1
        start = stop
        bounds[text + 1] = at


@cached_njit(nogil=True)
def overlap(left, right, needed):
    """How many values two ascending sets share, or -1 once fewer than `needed` are certain."""
    spare_left, spare_right = len(left) - needed, len(right) - needed
    i = j = both = 0
    while i < len(left) and j < len(right):
        if left[i] == right[j]:
            both += 1
            i += 1
            j += 1
        elif left[i] < right[j]:
            i += 1
            if i - both > spare_left:
                return -1
        else:
            j += 1
            if j - both > spare_right:
                return -1
    return both


def jaccard(left: np.ndarray, right: np.ndarray) -> float:
    """Shared values over all values of two ascending sets; 0 if both are empty. {1, 2, 3}, {2, 3, 4} -> 0.5."""
    both = overlap(left, right, 0)
    either = len(left) + len(right) - both
    return both / either if either else 0.0


# What is known of a document before a batch is decided. UNDECIDED ones are compared with all that are kept before them.
# PROTECTED ones are kept unasked. SETTLED ones were decided by an earlier run and hold against each other: they are
# compared with UNDECIDED ones alone.
UNDECIDED, PROTECTED, SETTLED_KEPT, SETTLED_REMOVED = range(4)


@dataclass(frozen=True)
class Decisions:
    """Decisions on the documents of a batch, which are in keep-order. bucket_of: int64[documents, bands], -1 for no
    bucket. states: int8, as above. newest, older: of each bucket the last kept document, of each kept document the one
    before it in its bucket. keepers: the most similar kept document, the earliest of equals, -1 while there is none;
    boths: the shingles the two share; best: similarity."""

    bucket_of: np.ndarray
    states: np.ndarray
    newest: np.ndarray
    older: np.ndarray
    compared_with: np.ndarray
    keepers: np.ndarray
    boths: np.ndarray
    best: np.ndarray

    @classmethod
    def of(cls, buckets: tuple[int, np.ndarray], states: np.ndarray) -> "Decisions":
        """buckets: how many there are, bucket_of."""
        num_buckets, bucket_of = buckets
        size = len(bucket_of)
        return cls(
            bucket_of,
            np.ascontiguousarray(states),
            newest=np.full(num_buckets, -1, np.int64),
            older=np.full(bucket_of.shape, -1, np.int64),
            compared_with=np.full(size, -1, np.int64),
            keepers=np.full(size, -1, np.int64),
            boths=np.zeros(size, np.int64),
            best=np.full(size, -1.0),
        )


def compare_blocks(
    decided: Decisions,
    block: tuple[int, int],
    block_sets: tuple[np.ndarray, np.ndarray],
    earlier_block: tuple[int, int],
    earlier_sets: tuple[np.ndarray, np.ndarray],
    threshold: float,
) -> None:
    """Compares the documents of a block with the kept ones of an earlier block, or of its own, which decides it. Sets:
    those of the documents, one after the other, and int64[documents of the batch, 2]: first and last + 1."""
    _compare(*vars(decided).values(), *block, *block_sets, *earlier_block, *earlier_sets, threshold)


@cached_njit(nogil=True)
def _compare(
    bucket_of, states, newest, older, compared_with, keepers, boths, best,
    start, stop, sets, places, first, last, other_sets, other_places, threshold,
):  # fmt: skip
    bands = bucket_of.shape[1]
    for document in range(start, stop):
        is_settled = states[document] >= SETTLED_KEPT
        if states[document] != PROTECTED:
            shingles = sets[places[document, 0] : places[document, 1]]
            for band in range(bands):
                bucket = bucket_of[document, band]
                other = newest[bucket] if bucket >= 0 else -1
                while other >= first:
                    holds = is_settled and states[other] >= SETTLED_KEPT
                    if other < last and compared_with[other] != document and not holds:
                        compared_with[other] = document
                        other_shingles = other_sets[other_places[other, 0] : other_places[other, 1]]
                        total = len(shingles) + len(other_shingles)
                        # both / (total - both) >= threshold; one less than needed, so that rounding never decides.
                        both = overlap(shingles, other_shingles, np.int64(threshold / (1.0 + threshold) * total) - 1)
                        similarity = both / (total - both) if both > 0 else 0.0
                        better = similarity > best[document] or (
                            similarity == best[document] and other < keepers[document]
                        )
                        if similarity >= threshold and better:
                            best[document], keepers[document], boths[document] = similarity, other, both
                    other = older[other, band]
        if keepers[document] < 0 and states[document] != SETTLED_REMOVED and first == start:
            for band in range(bands):
                bucket = bucket_of[document, band]
                if bucket >= 0:
                    older[document, band] = newest[bucket]
                    newest[bucket] = document

"""BPE merges of short segments in a compiled kernel, by the pieces and scores of a SentencePiece model.

SentencePiece (bpe_model.cc, SampleEncode without dropout) starts with the characters of a text and joins the adjacent
pair whose concatenation is the piece of the highest score, the leftmost of equal ones, until no pair is a piece. What
is no piece then is written as its bytes. Here a symbol is a piece's id, or for a character that is no piece but occurs
in one a number from the vocabulary size on; every pair of symbols that forms a piece is in a hash table."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from gristmill.foundation.runtime.kernels.cached_njit import cached_njit

NORMAL, UNKNOWN, CONTROL, BYTE = 1, 2, 3, 6  # SentencePiece.Type; the others change which pairs may be joined
SPACE_SIGN = "▁"
MAX_CODE_POINT = 0x10FFFF
MAX_MERGED_BYTES = 384  # of a segment: the kernel looks at all its pairs for each merge
NO_PAIR = -1
NO_COST = np.float32(np.inf)
FILTER_BYTES = 1 << 16
FILTER_SHIFT = np.uint64(64 - 16)
U1, U7, U32 = np.uint64(1), np.uint64(7), np.uint64(32)


@dataclass(frozen=True, eq=False)
class MergeTable:
    """symbols: int32[0x110000], of every character, NO_PAIR for those that occur in no piece. keys int64[slots] (left
    symbol << 32 | right symbol) and joined int32[slots]: the pairs. bits: uint8[FILTER_BYTES], a bit is set for each
    pair, so that most that form nothing are seen without a look into the larger table. scores: float32[vocabulary].
    byte_ids: int32[256]: ids of the pieces <0x00> to <0xFF>."""

    symbols: np.ndarray
    bits: np.ndarray
    keys: np.ndarray
    joined: np.ndarray
    scores: np.ndarray
    byte_ids: np.ndarray

    def encode(
        self, keys: np.ndarray, starts: np.ndarray, lengths: np.ndarray, ids: np.ndarray
    ) -> tuple[np.ndarray, int]:
        """Writes the ids of every segment keys[start : start + length] (UTF-8) one after another into `ids`.

        Returns (ids of each segment: int64, -1 for one over MAX_MERGED_BYTES, which is left out; ids written).
        `ids` has room for as many ids as the segments have bytes."""
        counts = np.empty(len(starts), dtype=np.int64)
        tables = (self.symbols, self.bits, self.keys, self.joined, self.scores, self.byte_ids)
        return counts, _encode_segments(keys, starts, lengths, tables, ids, counts)


def merge_table(proto: Any) -> MergeTable | None:
    """The table of a BPE model (its ModelProto); None for a model that needs more than merges and bytes: one with
    user-defined or unused pieces, or without a piece for every byte and for the space sign."""
    types = {piece.type for piece in proto.pieces}
    texts = [piece.piece if piece.type == NORMAL else "" for piece in proto.pieces]
    places = {text: place for place, text in enumerate(texts) if text}
    byte_places = {piece.piece: place for place, piece in enumerate(proto.pieces) if piece.type == BYTE}
    byte_ids = [byte_places.get(f"<0x{byte:02X}>") for byte in range(256)]
    if not types <= {NORMAL, UNKNOWN, CONTROL, BYTE} or None in byte_ids or SPACE_SIGN not in places:
        return None
    symbols = _symbols(texts, places)
    table = np.full(MAX_CODE_POINT + 1, NO_PAIR, dtype=np.int32)
    for text, symbol in symbols.items():
        if len(text) == 1:
            table[ord(text)] = symbol
    table[ord(" ")] = table[ord(SPACE_SIGN)]
    pairs = [
        (symbols[text[:end]], symbols[text[end:]], place)
        for text, place in places.items()
        for end in range(1, len(text))
        if text[:end] in symbols and text[end:] in symbols
    ]
    bits, keys, joined = _hash_table(np.array(pairs, dtype=np.int64).reshape(-1, 3))
    scores = np.array([piece.score for piece in proto.pieces], dtype=np.float32)
    return MergeTable(table, bits, keys, joined, scores, np.array(byte_ids, dtype=np.int32))


def _symbols(texts: Sequence[str], places: dict[str, int]) -> dict[str, int]:
    """Every piece and every character of a piece, with its symbol."""
    others = sorted({character for text in texts for character in text} - places.keys())
    return places | {character: len(texts) + number for number, character in enumerate(others)}


def _hash_table(pairs: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(bits, keys, joined) of pairs, int64[N, 3], columns left, right, joined. At most half of the slots are taken."""
    slots = 1 << max(4, int(2 * len(pairs)).bit_length())
    keys, joined = np.full(slots, NO_PAIR, dtype=np.int64), np.full(slots, NO_PAIR, dtype=np.int32)
    bits = np.zeros(FILTER_BYTES, dtype=np.uint8)
    _fill(pairs, bits, keys, joined)
    return bits, keys, joined


@cached_njit()
def _hashed(key):
    """As splitmix64 mixes."""
    word = np.uint64(key) * np.uint64(0x9E3779B97F4A7C15)
    return (word ^ (word >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)


@cached_njit()
def _fill(pairs, bits, keys, joined):
    mask = np.uint64(len(keys) - 1)
    for row in range(len(pairs)):
        key = pairs[row, 0] << 32 | pairs[row, 1]
        value = _hashed(key)
        bits[value >> FILTER_SHIFT] |= np.uint8(U1 << (value >> U32 & U7))
        slot = value & mask
        while keys[slot] != NO_PAIR:
            slot = (slot + U1) & mask
        keys[slot] = key
        joined[slot] = pairs[row, 2]


# Inlined: numba counts the references of its arrays at every call, which takes longer than the search.
@cached_njit(forceinline=True)
def _join(left, right, bits, keys, joined):
    """The piece that two symbols form, NO_PAIR if they form none."""
    rank = np.int32(NO_PAIR)
    if left >= 0 and right >= 0:
        key = np.int64(left) << 32 | np.int64(right)
        value = _hashed(key)
        if bits[value >> FILTER_SHIFT] >> (value >> U32 & U7) & U1:
            mask = np.uint64(len(keys) - 1)
            slot = value & mask
            while keys[slot] != NO_PAIR and keys[slot] != key:
                slot = (slot + U1) & mask
            if keys[slot] == key:
                rank = joined[slot]
    return rank


@cached_njit(forceinline=True)
def _characters(raw, start, stop, symbol_of, symbols, places):
    """Writes the symbol and the first byte of every character of raw[start:stop], and `stop`; returns their number."""
    count = 0
    at = start
    while at < stop:
        byte = np.int64(raw[at])
        size, code = 1, byte
        if byte >= 0xF0:
            size, code = 4, byte & 7
        elif byte >= 0xE0:
            size, code = 3, byte & 15
        elif byte >= 0xC0:
            size, code = 2, byte & 31
        for further in range(1, size):
            code = code << 6 | np.int64(raw[at + further]) & 63
        symbols[count], places[count] = symbol_of[code], at
        count += 1
        at += size
    places[count] = stop
    return count


@cached_njit(forceinline=True)
def _merge(symbols, count, places, pairs, costs, tables):
    """Joins the best pair of the symbols until there is none; returns the number of symbols left. places: of their
    first bytes and of the end. pairs, costs: room for what each symbol and the next one form, and minus its score."""
    bits, keys, joined, scores = tables
    for at in range(count - 1):
        pairs[at] = _join(symbols[at], symbols[at + 1], bits, keys, joined)
        costs[at] = -scores[pairs[at]] if pairs[at] >= 0 else NO_COST
    while True:
        best, lowest = 0, NO_COST
        for at in range(count - 1):
            if costs[at] < lowest:
                best, lowest = at, costs[at]
        if lowest == NO_COST:
            break
        symbols[best] = pairs[best]
        count -= 1
        for at in range(best + 1, count):
            symbols[at], places[at] = symbols[at + 1], places[at + 1]
            pairs[at], costs[at] = pairs[at + 1], costs[at + 1]
        places[count] = places[count + 1]
        for at in range(max(best - 1, 0), min(best + 1, count - 1)):
            pairs[at] = _join(symbols[at], symbols[at + 1], bits, keys, joined)
            costs[at] = -scores[pairs[at]] if pairs[at] >= 0 else NO_COST
    return count


@cached_njit()
def _encode_segments(raw, starts, lengths, tables, ids, counts):
    symbol_of, bits, keys, joined, scores, byte_ids = tables
    symbols, pairs = np.empty(MAX_MERGED_BYTES + 1, np.int32), np.empty(MAX_MERGED_BYTES + 1, np.int32)
    places, costs = np.empty(MAX_MERGED_BYTES + 2, np.int64), np.empty(MAX_MERGED_BYTES + 1, np.float32)
    used = 0
    for segment in range(len(starts)):
        if lengths[segment] > MAX_MERGED_BYTES:
            counts[segment] = -1
            continue
        before = used
        start = starts[segment]
        count = _characters(raw, start, start + lengths[segment], symbol_of, symbols, places)
        count = _merge(symbols, count, places, pairs, costs, (bits, keys, joined, scores))
        for at in range(count):
            if 0 <= symbols[at] < len(scores):
                ids[used] = symbols[at]
                used += 1
                continue
            for place in range(places[at], places[at + 1]):
                ids[used] = byte_ids[raw[place]]
                used += 1
        counts[segment] = used - before
    return used

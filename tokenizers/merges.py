"""BPE merges of short segments in a compiled kernel, by the pieces and scores of a SentencePiece model.

SentencePiece (bpe_model.cc, SampleEncode without dropout) starts with the characters of a text and joins the adjacent
pair whose concatenation is the piece of the highest score, the leftmost of equal ones, until no pair is a piece. What
is no piece then is written as its bytes. Here a symbol is a piece's id, or for a character that is no piece but occurs
in one a number from the vocabulary size on; every pair of symbols that forms a piece is in a hash table."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from gristmill.foundation.cached_njit import cached_njit

NORMAL, UNKNOWN, CONTROL, BYTE = 1, 2, 3, 6  # SentencePiece.Type; the others change which pairs may be joined
SPACE_SIGN = "▁"
MAX_CODE_POINT = 0x10FFFF
MAX_MERGED_BYTES = 384  # of a segment: the kernel looks at all its pairs for each merge
NO_PAIR = -1


@dataclass(frozen=True, eq=False)
class MergeTable:
    """symbols: int32[0x110000], of every character, NO_PAIR for those that occur in no piece. keys int64[slots] (left
    symbol << 32 | right symbol) and joined int32[slots]: the pairs. scores: float32[vocabulary]. byte_ids: int32[256]:
    ids of the pieces <0x00> to <0xFF>."""

    symbols: np.ndarray
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
        tables = (self.symbols, self.keys, self.joined, self.scores, self.byte_ids)
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
    keys, joined = _hash_table(np.array(pairs, dtype=np.int64).reshape(-1, 3))
    scores = np.array([piece.score for piece in proto.pieces], dtype=np.float32)
    return MergeTable(table, keys, joined, scores, np.array(byte_ids, dtype=np.int32))


def _symbols(texts: Sequence[str], places: dict[str, int]) -> dict[str, int]:
    """Every piece and every character of a piece, with its symbol."""
    others = sorted({character for text in texts for character in text} - places.keys())
    return places | {character: len(texts) + number for number, character in enumerate(others)}


def _hash_table(pairs: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """pairs: int64[N, 3], columns left, right, joined. At most half of the slots are taken."""
    slots = 1 << max(4, int(2 * len(pairs)).bit_length())
    keys, joined = np.full(slots, NO_PAIR, dtype=np.int64), np.full(slots, NO_PAIR, dtype=np.int32)
    _fill(pairs, keys, joined)
    return keys, joined


@cached_njit()
def _slot(key, mask):
    """splitmix64's finalizer."""
    word = np.uint64(key) * np.uint64(0x9E3779B97F4A7C15)
    word = (word ^ (word >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    return np.int64((word ^ (word >> np.uint64(27))) & np.uint64(mask))


@cached_njit()
def _fill(pairs, keys, joined):
    mask = len(keys) - 1
    for row in range(len(pairs)):
        key = pairs[row, 0] << 32 | pairs[row, 1]
        slot = _slot(key, mask)
        while keys[slot] != NO_PAIR:
            slot = (slot + 1) & mask
        keys[slot] = key
        joined[slot] = pairs[row, 2]


@cached_njit()
def _join(left, right, keys, joined):
    """The piece that two symbols form, NO_PAIR if they form none."""
    if left < 0 or right < 0:
        return np.int32(NO_PAIR)
    mask = len(keys) - 1
    key = np.int64(left) << 32 | np.int64(right)
    slot = _slot(key, mask)
    while keys[slot] != NO_PAIR:
        if keys[slot] == key:
            return joined[slot]
        slot = (slot + 1) & mask
    return np.int32(NO_PAIR)


@cached_njit()
def _characters(raw, start, stop, symbols, held, places):
    """Writes the symbol and the first byte of every character of raw[start:stop]; returns their number."""
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
        held[count], places[count] = symbols[code], at
        count += 1
        at += size
    places[count] = stop
    return count


@cached_njit()
def _merge(held, places, pairs, count, tables):
    """Joins the best pair until there is none; returns the number of symbols left. places has one entry more."""
    _, keys, joined, scores, _ = tables
    for at in range(count - 1):
        pairs[at] = _join(held[at], held[at + 1], keys, joined)
    while True:
        best = -1
        for at in range(count - 1):
            if pairs[at] >= 0 and (best < 0 or scores[pairs[at]] > scores[pairs[best]]):
                best = at
        if best < 0:
            return count
        held[best] = pairs[best]
        count -= 1
        for at in range(best + 1, count):
            held[at], places[at] = held[at + 1], places[at + 1]
        for at in range(best + 1, count - 1):
            pairs[at] = pairs[at + 1]
        places[count] = places[count + 1]
        if best > 0:
            pairs[best - 1] = _join(held[best - 1], held[best], keys, joined)
        if best < count - 1:
            pairs[best] = _join(held[best], held[best + 1], keys, joined)


@cached_njit()
def _encode_segments(raw, starts, lengths, tables, ids, counts):
    symbols, _, _, scores, byte_ids = tables
    held, pairs = np.empty(MAX_MERGED_BYTES, np.int32), np.empty(MAX_MERGED_BYTES, np.int32)
    places = np.empty(MAX_MERGED_BYTES + 1, np.int64)
    used = 0
    for segment in range(len(starts)):
        if lengths[segment] > MAX_MERGED_BYTES:
            counts[segment] = -1
            continue
        before = used
        start = starts[segment]
        count = _characters(raw, start, start + lengths[segment], symbols, held, places)
        count = _merge(held, places, pairs, count, tables)
        for at in range(count):
            if 0 <= held[at] < len(scores):
                ids[used] = held[at]
                used += 1
                continue
            for place in range(places[at], places[at + 1]):
                ids[used] = byte_ids[raw[place]]
                used += 1
        counts[segment] = used - before
    return used

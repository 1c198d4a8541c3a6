"""Caches the ids of text segments: text is split where no vocabulary piece can span the boundary.

Two adjacent characters that are adjacent in no piece of the vocabulary are never merged. So BPE (and unigram, whose
scores are additive) encodes the text before and after such a boundary independently: the ids of a text are the
concatenated ids of its segments. Segments are short (a word, a run of punctuation) and repeat by Zipf's law. Splitting,
lookup and output run in one pass over the UTF-8 bytes. New segments are encoded by merges.py where the model allows."""

import itertools
from collections.abc import Sequence
from typing import Any

import numpy as np

from gristmill.foundation.cached_njit import cached_njit
from gristmill.tokenizers.encoders import Encoder
from gristmill.tokenizers.merges import MergeTable

# What an encoder's name says, so that a worker process builds the one that was compared.
SEGMENTS, MERGES = "segments", "merges"
BPE = 2  # TrainerSpec.ModelType

# Longer segments (text without spaces, encoded data) hardly repeat; they are encoded each time.
MAX_KEY_BYTES = 48
# Bytes of text per step; the new segments of a step are encoded together.
WINDOW_BYTES = 1 << 18
# Slots of the hash table, a power of two. It is cleared when half full, or when keys or ids exceed POOL_BYTES.
NUM_SLOTS = 1 << 20
POOL_BYTES = 1 << 26


class SegmentEncoder(Encoder):
    """Encodes unseen segments by the merges, where they are given, or with `inner`, and caches them; the ids are
    exactly those of `inner`.

    Only for models for which `is_local` is true. Each process has its own cache; the ids do not depend on it."""

    def __init__(self, inner: Encoder, pieces: Sequence[str], merges: MergeTable | None = None):
        self.name = f"{SEGMENTS} of {inner.name}" if merges is None else f"{SEGMENTS} by {MERGES}, {inner.name}"
        self._inner, self._merges = inner, merges
        self._adjacent = adjacent_bytes(pieces)
        self._slots = np.full((NUM_SLOTS, 2), -1, dtype=np.int64)  # columns: first 8 bytes; length << 32 | entry
        self._keys = np.zeros(0, dtype=np.uint8)
        self._entries = np.zeros((0, 4), dtype=np.int32)  # columns: key start, key length, ids start, number of ids
        self._ids = np.zeros(1 << 16, dtype=np.int32)
        self._sizes = np.zeros(3, dtype=np.int64)  # entries, bytes of keys, ids in use

    def encode(self, text: str) -> list[int]:
        """The ids of one text."""
        return self.encode_flat([text])[0].tolist()

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        ids, lengths = self.encode_flat(texts)
        return [part.tolist() for part in np.split(ids, np.cumsum(lengths)[:-1])] if len(lengths) else []

    def encode_flat(self, texts: Sequence[str]) -> tuple[np.ndarray, np.ndarray]:
        """(ids: int32, those of all texts in a row; lengths: int64[len(texts)])."""
        raw = [text.encode() for text in texts]
        ends = np.cumsum([len(each) for each in raw], dtype=np.int64)
        return self.encode_utf8(np.frombuffer(b"".join(raw), dtype=np.uint8), ends)

    def encode_utf8(self, buffer: np.ndarray, ends: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """encode_flat, of texts that lie one after another in a buffer."""
        lengths = np.zeros(len(ends), dtype=np.int64)
        found: list[np.ndarray] = [np.zeros(0, np.int32)]
        position = document = 0
        while position < len(buffer):
            size = _window_bytes(buffer, ends, position, WINDOW_BYTES, self._adjacent)
            # At worst every byte of the window is a segment, and the last one is long.
            capacity = min(size, WINDOW_BYTES)
            self._reserve(capacity, size)
            known = int(self._sizes[0])
            segments, owners = np.empty(capacity, dtype=np.int32), np.empty(capacity, dtype=np.int32)
            tables = (self._adjacent, self._slots, self._entries, self._keys, self._sizes)
            count, position, document = _split_segments(
                buffer, ends, (position, document), WINDOW_BYTES, tables, (segments, owners)
            )
            self._encode_new_segments(known)
            found.append(_gather(segments[:count], owners[:count], self._entries, self._ids, lengths))
        return np.concatenate(found), lengths

    def _encode_new_segments(self, known: int) -> None:
        """Encodes the segments first seen in this window."""
        new = self._entries[known : self._sizes[0]]
        left = np.arange(len(new)) if self._merges is None else self._merge_segments(new, self._merges)
        if not len(left):
            return
        encoded = self._inner.encode_batch(
            [self._keys[start : start + length].tobytes().decode() for start, length in new[left, :2].tolist()]
        )
        counts = np.array([len(ids) for ids in encoded], dtype=np.int64)
        used, total = int(self._sizes[2]), int(counts.sum())
        self._reserve_ids(total)
        self._ids[used : used + total] = np.fromiter(itertools.chain.from_iterable(encoded), np.int32, total)
        new[left, 2] = used + np.cumsum(counts) - counts
        new[left, 3] = counts
        self._sizes[2] = used + total

    def _merge_segments(self, new: np.ndarray, merges: MergeTable) -> np.ndarray:
        """Encodes the new entries that are short enough for the kernel; returns the places of the others."""
        self._reserve_ids(int(new[:, 1].sum(dtype=np.int64)))
        used = int(self._sizes[2])
        starts, lengths = np.ascontiguousarray(new[:, 0]), np.ascontiguousarray(new[:, 1])
        counts, written = merges.encode(self._keys, starts, lengths, self._ids[used:])
        new[:, 3] = np.maximum(counts, 0)
        new[:, 2] = used + np.cumsum(new[:, 3]) - new[:, 3]
        self._sizes[2] = used + written
        return np.flatnonzero(counts < 0)

    def _reserve_ids(self, new_ids: int) -> None:
        used = int(self._sizes[2])
        if used + new_ids > len(self._ids):
            self._ids = np.concatenate([self._ids[:used], np.zeros(max(new_ids, len(self._ids)), np.int32)])

    def _reserve(self, new_entries: int, new_bytes: int) -> None:
        """Grows the arrays for so many new entries and key bytes; clears the table when it is full."""
        entries, key_bytes, num_ids = self._sizes.tolist()
        if entries > NUM_SLOTS // 2 or max(key_bytes, num_ids) > POOL_BYTES:
            self._slots.fill(-1)
            self._sizes[:] = entries = key_bytes = 0
        if entries + new_entries > len(self._entries):
            extra = max(new_entries, len(self._entries))
            self._entries = np.concatenate([self._entries[:entries], np.zeros((extra, 4), np.int32)])
        if key_bytes + new_bytes > len(self._keys):
            extra = max(new_bytes, len(self._keys))
            self._keys = np.concatenate([self._keys[:key_bytes], np.zeros(extra, np.uint8)])


def is_local(proto: Any) -> bool:
    """True if a SentencePiece model (its ModelProto) can be encoded segment by segment.

    That is BPE without a normaliser, a leading space or the removal of spaces. Unigram is excluded: sentencepiece sums
    its scores in float32, so on long texts the ids depend on the preceding text."""
    spec = proto.normalizer_spec
    changes_text = spec.precompiled_charsmap or spec.add_dummy_prefix or spec.remove_extra_whitespaces
    return proto.trainer_spec.model_type == BPE and spec.escape_whitespaces and not changes_text


def adjacent_bytes(pieces: Sequence[str]) -> np.ndarray:
    """bool[65536]: entry 256 * a + b says that byte b follows byte a somewhere inside a piece, "▁" read as a space.

    Characters are never cut: a byte that continues one follows any."""
    adjacent = np.zeros((256, 256), dtype=np.bool_)
    between = b"\xff"  # a byte that no UTF-8 holds
    raw = np.frombuffer(between.join(piece.replace("▁", " ").encode() for piece in pieces), dtype=np.uint8)
    adjacent[raw[:-1], raw[1:]] = True
    adjacent[0xFF, :] = adjacent[:, 0xFF] = False
    adjacent[:, 0x80:0xC0] = True
    return adjacent.reshape(-1)


@cached_njit()
def _is_space_sign(buffer, at, end):
    return at + 2 < end and buffer[at] == 0xE2 and buffer[at + 1] == 0x96 and buffer[at + 2] == 0x81


@cached_njit()
def _mixed(word):
    """Every bit of the result depends on every bit of the word (the multiplier is splitmix64's)."""
    word = (word ^ (word >> np.uint64(29))) * np.uint64(0xBF58476D1CE4E5B9)
    return word ^ (word >> np.uint64(32))


@cached_njit()
def _continues_segment(buffer, start, at, end, adjacent):
    """True if the byte at `at` belongs to the segment from `start`. Text is never split next to a literal "▁"."""
    before, here = buffer[at - 1], buffer[at]
    if adjacent[before * 256 + here]:
        return True
    if here == 0xE2 and _is_space_sign(buffer, at, end):
        return True
    return before == 0x81 and at - 3 >= start and _is_space_sign(buffer, at - 3, end)


@cached_njit()
def _window_bytes(buffer, ends, position, window, adjacent):
    """Bytes from `position` to the first boundary after the window. Boundaries depend on adjacent bytes only."""
    at = position + window
    if at >= len(buffer):
        return len(buffer) - position
    text = np.searchsorted(ends, at, side="right")
    start = ends[text - 1] if text else 0
    while at > start and at < ends[text] and _continues_segment(buffer, start, at, ends[text], adjacent):
        at += 1
    return at - position


@cached_njit()
def _split_segments(buffer, ends, place, window, tables, found):
    """Writes the entry of every segment of about a window of bytes, and adds entries for new segments.

    A slot holds the key's first 8 bytes, and its length and entry: short keys need one memory access.
    Returns the number of segments, and the position and document to continue with."""
    adjacent, slots, entries, keys, sizes = tables
    (position, document), (segments, owners) = place, found
    count = 0
    mask = np.uint64(len(slots) - 1)
    stop = min(position + window, len(buffer))
    while position < stop:
        while ends[document] <= position:
            document += 1
        end, at = ends[document], position
        value, first, word, shift = np.uint64(0), np.uint64(0), np.uint64(0), np.uint64(0)
        while True:
            word |= np.uint64(buffer[at]) << shift
            shift += np.uint64(8)
            at += 1
            if shift == np.uint64(64):
                if at - position == 8:
                    first = word
                value = _mixed(value ^ word)
                word, shift = np.uint64(0), np.uint64(0)
            if at >= end or not _continues_segment(buffer, position, at, end, adjacent):
                break
        length = at - position
        if length < 8:
            first = word
        value = _mixed(value ^ word ^ (np.uint64(length) << np.uint64(56)))
        key, named = np.int64(first), np.int64(length) << 32
        slot = np.int64(value & mask)
        entry = -1
        if length <= MAX_KEY_BYTES:
            while slots[slot, 1] >= 0:
                found = slots[slot, 1]
                alike = slots[slot, 0] == key and (found >> 32) << 32 == named
                found &= 0xFFFFFFFF
                if alike and (length <= 8 or _same(buffer, position, length, keys, entries[found, 0])):
                    entry = found
                    break
                slot = (slot + 1) & np.int64(mask)
        if entry < 0:
            entry = sizes[0]
            entries[entry, 0], entries[entry, 1] = sizes[1], length
            keys[sizes[1] : sizes[1] + length] = buffer[position:at]
            sizes[0] += 1
            sizes[1] += length
            if length <= MAX_KEY_BYTES:
                slots[slot, 0], slots[slot, 1] = key, named | entry
        segments[count] = entry
        owners[count] = document
        count += 1
        position = at
    return count, position, document


@cached_njit()
def _same(buffer, position, length, keys, start):
    at = 8
    while at < length and buffer[position + at] == keys[start + at]:
        at += 1
    return at == length


@cached_njit()
def _gather(segments, owners, entries, ids, lengths):
    """The concatenated ids of all segments; adds their counts to the lengths of their texts."""
    total = 0
    for segment in segments:
        total += entries[segment, 3]
    flat = np.empty(total, dtype=np.int32)
    filled = 0
    for place in range(len(segments)):
        start, count = entries[segments[place], 2], entries[segments[place], 3]
        for at in range(count):
            flat[filled + at] = ids[start + at]
        filled += count
        lengths[owners[place]] += count
    return flat

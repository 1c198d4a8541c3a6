"""Caches the ids of text segments: text is split where no vocabulary piece can span the boundary.

Two adjacent characters that are adjacent in no piece of the vocabulary are never merged. So BPE (and unigram, whose
scores are additive) encodes the text before and after such a boundary independently: the ids of a text are the
concatenated ids of its segments. Segments are short (a word, a run of punctuation) and repeat by Zipf's law. A
window of UTF-8 bytes is split, then its segments are looked up, then their ids are copied: each is a loop without
branches on the data, so that the processor waits for many memory accesses at once. New segments are encoded by
a kernel of BPE merges where the model allows."""

import itertools
from collections.abc import Sequence
from typing import Any

import numpy as np

from gristmill.data_pipeline.signals.intrinsics import load64, prefetch
from gristmill.foundation.runtime.kernels.cached_njit import cached_njit
from gristmill.tokenizers.encoders import SPACE_SIGN, Encoder, MergeTable, Utf8Encoder

# What an encoder's name says, so that a worker process builds the one that was compared.
SEGMENTS, MERGES = "segments", "merges"

# Longer segments (text without spaces, encoded data) hardly repeat; they are encoded each time.
MAX_KEY_BYTES = 48
# Bytes of text per step; the new segments of a step are encoded together.
WINDOW_BYTES = 1 << 16
# Slots of the hash table, a power of two. It is cleared when half full, or when keys or ids exceed POOL_BYTES.
NUM_SLOTS = 1 << 20
POOL_BYTES = 1 << 26
# Columns of an entry, int64[8], one cache line: the key's first 16 bytes; its place in the pool of keys << 32 | its
# length; the place of its ids in the pool of ids << 32 | their number; then its first ids, int32, zeros after the last.
FIRST_WORD, SECOND_WORD, KEY, IDS, FIRST_IDS = range(5)
ENTRY_COLUMNS = 8
COPIED_IDS = 4  # ids copied without a look at their number: few segments have more
BLOCK = 128  # segments whose memory accesses are started before the first one is waited for
NO_ENTRY = -1
LOW_32 = 0xFFFFFFFF
U1, U29, U32, U33 = (np.uint64(number) for number in (1, 29, 32, 33))
PADDING = MAX_KEY_BYTES
MASKS = tuple((1 << 8 * size) - 1 for size in range(9))  # of the first bytes of eight
MULTIPLIER = np.uint64(0xBF58476D1CE4E5B9)  # splitmix64's


class SegmentEncoder(Utf8Encoder):
    """Encodes unseen segments by the merges, where they are given, or with `inner`, and caches them; the ids are
    exactly those of `inner`.

    adjacent: bool[65536], as `adjacent_bytes` returns it, if no merge crosses its boundaries. Each process has its own
    cache; the ids do not depend on it."""

    def __init__(self, inner: Encoder, adjacent: np.ndarray, merges: MergeTable | None = None):
        self.name = f"{SEGMENTS} of {inner.name}" if merges is None else f"{SEGMENTS} by {MERGES}, {inner.name}"
        self._inner, self._merges = inner, merges
        self._adjacent = adjacent
        self._slots = np.full(NUM_SLOTS, NO_ENTRY, dtype=np.int64)  # 31 bits of the key's hash << 32 | entry
        self._keys = np.zeros(0, dtype=np.uint8)
        self._entries = np.zeros((0, ENTRY_COLUMNS), dtype=np.int64)
        self._ids = np.zeros(1 << 16, dtype=np.int32)
        self._sizes = np.zeros(3, dtype=np.int64)  # entries, bytes of keys, ids in use

    def encode_utf8(
        self, buffer: np.ndarray, ends: np.ndarray, end_of_document: int | None = None
    ) -> tuple[np.ndarray, np.ndarray]:
        """encode_flat, of texts that lie one after another in a buffer."""
        lengths, finished = np.zeros(len(ends), dtype=np.int64), np.empty(len(ends), dtype=np.int64)
        end_id = NO_ENTRY if end_of_document is None else end_of_document
        ids: list[np.ndarray] = [np.zeros(0, np.int32)]
        starts = np.empty(min(WINDOW_BYTES, len(buffer)) + 2, dtype=np.int64)
        padded = np.concatenate([buffer, np.zeros(PADDING, np.uint8)])
        marked, masks = marked_spaces(padded), np.array(MASKS, np.uint64)
        position = document = 0
        while document < len(ends):
            place = position, document
            count, position, document = split_segments(
                marked, ends, place, WINDOW_BYTES, self._adjacent, starts, finished
            )
            self._reserve(count, int(starts[count] - starts[0]))
            known = int(self._sizes[0])
            segments = np.empty(count, dtype=np.int32)
            look_up(padded, starts, masks, segments, (self._slots, self._entries, self._keys, self._sizes))
            self._encode_new_segments(known)
            documents = place[1], document, end_id
            ids.append(_gather(segments, finished, documents, (self._entries, self._ids), lengths))
        return np.concatenate(ids), lengths

    def _encode_new_segments(self, known: int) -> None:
        """Encodes the segments first seen in this window."""
        new = self._entries[known : self._sizes[0]]
        starts, lengths = new[:, KEY] >> 32, new[:, KEY] & LOW_32
        places, counts = np.zeros(len(new), np.int64), np.full(len(new), NO_ENTRY)
        if self._merges is not None:
            self._reserve_ids(int(lengths.sum()))
            used = int(self._sizes[2])
            counts, written = self._merges.encode(self._keys, starts, lengths, self._ids[used:])
            places = used + np.cumsum(np.maximum(counts, 0)) - counts
            self._sizes[2] += written
        left = np.flatnonzero(counts < 0)
        if len(left):
            places[left], counts[left] = self._encode_by_inner(starts[left].tolist(), lengths[left].tolist())
        new[:, IDS] = places << 32 | counts
        _store_first_ids(new, self._ids)

    def _encode_by_inner(self, starts: list[int], lengths: list[int]) -> tuple[np.ndarray, np.ndarray]:
        """(first place in the pool of ids, number of ids) of keys, which `inner` encodes."""
        keys = (self._keys[start : start + length] for start, length in zip(starts, lengths, strict=True))
        encoded = self._inner.encode_batch([key.tobytes().decode() for key in keys])
        counts = np.array([len(ids) for ids in encoded], dtype=np.int64)
        used, total = int(self._sizes[2]), int(counts.sum())
        self._reserve_ids(total)
        self._ids[used : used + total] = np.fromiter(itertools.chain.from_iterable(encoded), np.int32, total)
        self._sizes[2] = used + total
        return used + np.cumsum(counts) - counts, counts

    def _reserve_ids(self, new_ids: int) -> None:
        used = int(self._sizes[2])
        if used + new_ids > len(self._ids):
            self._ids = np.concatenate([self._ids[:used], np.zeros(max(new_ids, len(self._ids)), np.int32)])

    def _reserve(self, new_entries: int, new_bytes: int) -> None:
        """Grows the arrays for so many new entries and key bytes; clears the table when it is full."""
        entries, key_bytes, num_ids = self._sizes.tolist()
        if entries > NUM_SLOTS // 2 or max(key_bytes, num_ids) > POOL_BYTES:
            self._slots.fill(NO_ENTRY)
            self._sizes[:] = entries = key_bytes = 0
        if entries + new_entries > len(self._entries):
            extra = max(new_entries, len(self._entries))
            self._entries = np.concatenate([self._entries[:entries], np.zeros((extra, ENTRY_COLUMNS), np.int64)])
        if key_bytes + new_bytes > len(self._keys):
            extra = max(new_bytes, len(self._keys))
            self._keys = np.concatenate([self._keys[:key_bytes], np.zeros(extra, np.uint8)])


@cached_njit()
def _mixed(word):
    """Every bit of the result depends on every bit of the word."""
    word = (word ^ (word >> U29)) * MULTIPLIER
    return word ^ (word >> U32)


@cached_njit()
def _hash_block(buffer, starts, masks, words):
    """Fills words[k]: the first and the second 8 bytes of segment k, zeros after its end, and a hash of all bytes."""
    for segment in range(len(starts) - 1):
        position = starts[segment]
        length = starts[segment + 1] - position
        first = load64(buffer, position) & masks[min(length, 8)]
        second = load64(buffer, position + 8) & masks[min(max(length - 8, 0), 8)]
        value = _mixed((first ^ np.uint64(length) * MULTIPLIER) + _mixed(second))
        for at in range(16, min(length, MAX_KEY_BYTES), 8):
            value = _mixed(value ^ (load64(buffer, position + at) & masks[min(length - at, 8)]))
        words[segment, 0], words[segment, 1], words[segment, 2] = first, second, value


@cached_njit()
def look_up(buffer, starts, masks, segments, tables):
    """Writes the entry of every segment, and adds entries for new segments. Reads up to PADDING bytes past the end."""
    slots, entries, keys, sizes = tables
    words = np.empty((BLOCK, 3), np.uint64)
    mask = np.uint64(len(slots) - 1)
    for block in range(0, len(segments), BLOCK):
        stop = min(block + BLOCK, len(segments))
        _hash_block(buffer, starts[block : stop + 1], masks, words)
        for place in range(stop - block):
            prefetch(slots, np.int64(words[place, 2] & mask))
        for place in range(stop - block):
            prefetch(entries, (slots[words[place, 2] & mask] & LOW_32) * ENTRY_COLUMNS)
        for place in range(stop - block):
            position = starts[block + place]
            length = starts[block + place + 1] - position
            first, second = np.int64(words[place, 0]), np.int64(words[place, 1])
            slot = words[place, 2] & mask
            tag = np.int64(words[place, 2] >> U33)
            entry = np.int64(NO_ENTRY)
            while length <= MAX_KEY_BYTES and slots[slot] >= 0:
                stored = slots[slot] & LOW_32
                if slots[slot] >> 32 == tag and entries[stored, KEY] & LOW_32 == length:
                    differs = (entries[stored, FIRST_WORD] ^ first) | (entries[stored, SECOND_WORD] ^ second)
                    start = entries[stored, KEY] >> 32
                    for at in range(16, length):
                        differs |= np.int64(buffer[position + at]) ^ np.int64(keys[start + at])
                    if differs == 0:
                        entry = stored
                        break
                slot = (slot + U1) & mask
            if entry < 0:
                entry = sizes[0]
                entries[entry, FIRST_WORD], entries[entry, SECOND_WORD] = first, second
                entries[entry, KEY] = sizes[1] << 32 | length
                for at in range(length):  # an assignment of slices takes 3 s to compile
                    keys[sizes[1] + at] = buffer[position + at]
                sizes[0] += 1
                sizes[1] += length
                if length <= MAX_KEY_BYTES:
                    slots[slot] = tag << 32 | entry
            segments[block + place] = entry


@cached_njit()
def _store_first_ids(entries, ids):
    """Copies the first ids of each entry into it."""
    for entry in range(len(entries)):
        start, count = entries[entry, IDS] >> 32, entries[entry, IDS] & LOW_32
        for column in range(FIRST_IDS, ENTRY_COLUMNS):
            at = 2 * (column - FIRST_IDS)
            low = np.int64(ids[start + at]) if at < count else np.int64(0)
            high = np.int64(ids[start + at + 1]) if at + 1 < count else np.int64(0)
            entries[entry, column] = high << 32 | low


@cached_njit()
def _gather(segments, finished, documents, pools, lengths):
    """The concatenated ids of all segments, int32; adds their counts to the lengths of their texts.

    documents: the first text, the one to continue with, and the id that follows each finished text (NO_ENTRY: none)."""
    first_document, next_document, end_id = documents
    entries, ids = pools
    total = next_document - first_document if end_id >= 0 else 0
    for segment in segments:
        total += entries[segment, IDS] & LOW_32
    flat = np.empty(total + COPIED_IDS, dtype=np.int32)
    filled = segment = 0
    unfinished = len(segments) > 0 and (next_document == first_document or finished[next_document - 1] < len(segments))
    for document in range(first_document, next_document + unfinished):
        before = filled
        stop = finished[document] if document < next_document else len(segments)
        while segment < stop:
            entry = segments[segment]
            count = entries[entry, IDS] & LOW_32
            for column in range(COPIED_IDS // 2):
                pair = entries[entry, FIRST_IDS + column]
                flat[filled + 2 * column], flat[filled + 2 * column + 1] = pair & LOW_32, pair >> 32
            if count > COPIED_IDS:
                start = entries[entry, IDS] >> 32
                for at in range(COPIED_IDS, count):
                    flat[filled + at] = ids[start + at]
            filled += count
            segment += 1
        if document < next_document and end_id >= 0:
            flat[filled] = end_id
            filled += 1
        lengths[document] += filled - before
    return flat[:total]


# Where a text is split into segments: between characters that are adjacent in no piece of the vocabulary.

BPE = 2  # TrainerSpec.ModelType
MARK = 0xFF  # a byte that no UTF-8 holds


def is_local(proto: Any) -> bool:
    """True if a SentencePiece model (its ModelProto) can be encoded segment by segment.

    That is BPE without a normalizer, a leading space or the removal of spaces. Unigram is excluded: sentencepiece sums
    its scores in float32, so on long texts the ids depend on the preceding text."""
    spec = proto.normalizer_spec
    changes_text = spec.precompiled_charsmap or spec.add_dummy_prefix or spec.remove_extra_whitespaces
    return proto.trainer_spec.model_type == BPE and spec.escape_whitespaces and not changes_text


def adjacent_bytes(pieces: Sequence[str]) -> np.ndarray:
    """bool[65536]: entry 256 * a + b says that byte b follows byte a somewhere inside a piece, "▁" read as a space.

    Characters are never cut: a byte that continues one follows any. MARK follows any byte and any byte follows it."""
    adjacent = np.zeros((256, 256), dtype=np.bool_)
    between = bytes([MARK])
    raw = np.frombuffer(between.join(piece.replace("▁", " ").encode() for piece in pieces), dtype=np.uint8)
    adjacent[raw[:-1], raw[1:]] = True
    adjacent[:, 0x80:0xC0] = True
    adjacent[MARK, :] = adjacent[:, MARK] = True
    return adjacent.reshape(-1)


def marked_spaces(buffer: np.ndarray) -> np.ndarray:
    """The bytes of the texts, with every literal "▁" changed so that no segment begins or ends next to it: its first
    byte follows any byte, and any byte follows its last one."""
    raw = buffer.tobytes()
    if SPACE_SIGN.encode() not in raw:
        return buffer
    return np.frombuffer(raw.replace(SPACE_SIGN.encode(), bytes((0x80, 0x80, MARK))), np.uint8)


@cached_njit()
def split_segments(marked, ends, place, window, adjacent, starts, finished):
    """Writes the first byte of every segment of about a window of bytes, followed by the end of the last one, and for
    every text that ends there the number of segments up to its end. marked: the texts as `marked_spaces` returns them.

    Returns the number of segments, and the position and text to continue with."""
    position, document = place
    limit = position + window
    count = 0
    starts[0] = position
    while document < len(ends) and position < limit:
        end = ends[document]
        stop = min(end, limit)
        for at in range(position + 1, stop):
            starts[count + 1] = at  # written over by the next one if this is no boundary
            count += not adjacent[np.int64(marked[at - 1]) << 8 | np.int64(marked[at])]
        at = max(position + 1, stop)
        while at < end and adjacent[np.int64(marked[at - 1]) << 8 | np.int64(marked[at])]:
            at += 1
        if position < end:
            count += 1
            starts[count] = position = min(at, end)
        if position == end:
            finished[document] = count
            document += 1
    return count, position, document

"""A fastText model as arrays that compiled kernels read.

Source: fastText 0.9.2, dictionary.cc (words, n-grams and their hashes), loss.cc (the tree of the labels)."""

from typing import NamedTuple

import numpy as np

from gristmill.data_pipeline.signals.buffer import joined
from gristmill.data_pipeline.signals.fasttext_file import HIERARCHICAL_SOFTMAX, FastTextFile
from gristmill.foundation.cached_njit import cached_njit

END_OF_LINE = b"</s>"
FNV_START, FNV_FACTOR, MASK_32 = np.uint64(2166136261), np.uint64(16777619), np.uint64(0xFFFFFFFF)
SIGN_BITS = np.uint64(0xFFFFFF00)  # fastText hashes signed characters
UNBUILT_WEIGHT = 10**15  # of an inner node that has no children yet (loss.cc)

# Places in FastTextModel.settings. EOL: the row of </s>, -1 for none.
NUM_WORDS, NUM_LABELS, MIN_CHARS, MAX_CHARS, WORD_NGRAMS, BUCKETS, LOSS, WIDTH, EOL = range(9)


class FastTextModel(NamedTuple):
    """What the kernels read. entries: the dictionary's words, then labels, in one text with its offsets;
    entry_table: int32[2**b], open addressing by fastText's hash, -1 for a free slot.

    bucket_marks: uint64[buckets / 64, 2], which of 64 buckets were kept, and how many were kept before them; the kept
    buckets' rows stand in the order of the buckets. Empty: all have a row.
    left, right: int32[2 * labels - 1], the tree of the labels; empty without hierarchical softmax."""

    entry_text: np.ndarray
    entry_offsets: np.ndarray
    entry_table: np.ndarray
    bucket_marks: np.ndarray
    input_rows: np.ndarray
    output_rows: np.ndarray
    left: np.ndarray
    right: np.ndarray
    settings: np.ndarray  # int64[9]: NUM_WORDS ...


def prepare(file: FastTextFile) -> FastTextModel:
    """The model of the file. Raises ValueError for label counts that no training data has."""
    entry_text, entry_offsets = joined([*file.words, *(label.encode() for label in file.labels)])
    table = np.full(1 << max(4, (2 * len(entry_offsets)).bit_length()), -1, np.int32)
    _fill_table(entry_text, entry_offsets, table)
    input_rows, bucket_marks = np.ascontiguousarray(file.input_rows), np.zeros((0, 2), np.uint64)
    if file.kept_buckets is not None:
        buckets, rows = file.kept_buckets[np.argsort(file.kept_buckets[:, 0])].T.astype(np.int64)
        input_rows = np.concatenate([input_rows[: len(file.words)], input_rows[len(file.words) + rows]])
        bucket_marks = _bucket_marks(buckets, file.buckets)
    left, right = _tree(file.label_counts) if file.loss == HIERARCHICAL_SOFTMAX else (np.zeros(0, np.int32),) * 2
    end_of_line = file.words.index(END_OF_LINE) if END_OF_LINE in file.words else -1
    numbers = [len(file.words), len(file.labels), file.min_chars, file.max_chars, file.word_ngrams, file.buckets]
    return FastTextModel(
        entry_text=entry_text,
        entry_offsets=entry_offsets,
        entry_table=table,
        bucket_marks=bucket_marks,
        input_rows=input_rows,
        output_rows=np.ascontiguousarray(file.output_rows),
        left=left,
        right=right,
        settings=np.array([*numbers, file.loss, input_rows.shape[1], end_of_line], np.int64),
    )


def _bucket_marks(buckets: np.ndarray, num_buckets: int) -> np.ndarray:
    """bucket_marks of FastTextModel. A table of all rows would take 8 MB, which no CPU's cache of a core holds."""
    marks_B2 = np.zeros((num_buckets // 64 + 1, 2), np.uint64)
    np.bitwise_or.at(marks_B2[:, 0], buckets >> 6, np.uint64(1) << (buckets & 63).astype(np.uint64))
    kept = np.bincount(buckets >> 6, minlength=len(marks_B2))
    marks_B2[1:, 1] = np.cumsum(kept)[:-1]
    return marks_B2


def _tree(counts: list[int]) -> tuple[np.ndarray, np.ndarray]:
    """Children of every node: leaves 0 to L - 1, inner nodes L to 2L - 2, the root last (loss.cc, buildTree).

    Raises ValueError for counts that no training data has."""
    if max(counts) >= UNBUILT_WEIGHT:
        raise ValueError(f"a label count of {max(counts)} is damaged")
    total = len(counts)
    left, right = np.full(2 * total - 1, -1, np.int32), np.full(2 * total - 1, -1, np.int32)
    weights = [*counts, *([UNBUILT_WEIGHT] * (total - 1))]
    leaf, node = total - 1, total
    for parent in range(total, 2 * total - 1):
        children = []
        for _ in range(2):
            if leaf >= 0 and weights[leaf] < weights[node]:
                children.append(leaf)
                leaf -= 1
            else:
                children.append(node)
                node += 1
        left[parent], right[parent] = children
        weights[parent] = weights[children[0]] + weights[children[1]]
    return left, right


@cached_njit(nogil=True, forceinline=True)
def next_hash(value, byte):
    """fastText's hash, FNV-1a of 32 bits, after one more byte."""
    signed = np.uint64(byte) | (SIGN_BITS if byte & 0x80 else np.uint64(0))
    return ((value ^ signed) * FNV_FACTOR) & MASK_32


@cached_njit(nogil=True, forceinline=True)
def hash_token(text, first, stop):
    value = FNV_START
    for i in range(first, stop):
        value = next_hash(value, text[i])
    return value


@cached_njit(nogil=True)
def _fill_table(text, offsets, table):
    for entry in range(len(offsets) - 1):
        slot = np.int64(hash_token(text, offsets[entry], offsets[entry + 1] - 1)) & (len(table) - 1)
        while table[slot] >= 0:
            slot = (slot + 1) & (len(table) - 1)
        table[slot] = entry

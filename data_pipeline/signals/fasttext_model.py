"""A fastText model as arrays that compiled kernels read.

Source: fastText 0.9.2, dictionary.cc (words, n-grams and their hashes), loss.cc (the tree of the labels)."""

import os
import struct
from io import BufferedReader
from pathlib import Path
from typing import BinaryIO, NamedTuple

import numpy as np

from gristmill.data_pipeline.signals.bits import joined, read_only
from gristmill.foundation.runtime.kernels.cached_njit import cached_njit

# Reader of fastText's supervised models, .bin and .ftz, into arrays.
#
# The layout of the file is that of fastText 0.9.2: args.cc, dictionary.cc, densematrix.cc, quantmatrix.cc and
# productquantizer.cc (github.com/facebookresearch/fastText, src/).

MAGIC = 793712314  # fasttext.cc, FASTTEXT_FILEFORMAT_MAGIC_INT32
HIERARCHICAL_SOFTMAX, NEGATIVE_SAMPLING, SOFTMAX, ONE_VS_ALL = 1, 2, 3, 4
SUPERVISED = 3
MAX_ENTRY_BYTES = 1 << 20
CENTROIDS = 256
MAX_NGRAM = 64  # characters or words of an n-gram; fastText's defaults are 6 and 1


class FastTextFile(NamedTuple):
    """words: the dictionary's words (</s> among them), then labels. counts: of the labels in the training data.

    input_rows: float32[words + buckets that are kept, D]; output_rows: float32[labels (their tree's inner nodes), D].
    kept_buckets: int32[kept, 2], buckets with their rows behind the words; None if all buckets have a row."""

    words: list[bytes]
    labels: list[str]
    label_counts: list[int]
    min_chars: int
    max_chars: int
    word_ngrams: int
    buckets: int
    loss: int
    kept_buckets: np.ndarray | None
    input_rows: np.ndarray
    output_rows: np.ndarray


def read_fasttext(path: Path) -> FastTextFile:
    """Raises ValueError for a file that is damaged or no supervised model."""
    with path.open("rb") as file:
        magic, version = _read(file, "ii")
        if magic != MAGIC or version not in (11, 12):
            raise ValueError(f"version {version} of fastText's format; versions 11 and 12 are known")
        _, _, _, _, _, word_ngrams, loss, model, buckets, min_chars, max_chars, _ = _read(file, "12i")
        _read(file, "d")
        if model != SUPERVISED or not HIERARCHICAL_SOFTMAX <= loss <= ONE_VS_ALL:
            raise ValueError("a model of word vectors, which names no labels")
        size, num_words, num_labels, _, num_kept = _read(file, "iiiqq")
        entries = [(_entry(file), *_read(file, "qb")) for _ in range(size)]
        kept = np.frombuffer(_bytes(file, 8 * max(num_kept, 0)), np.int32).reshape(-1, 2)
        (is_quantized,) = _read(file, "?")
        input_rows = _matrix(file, is_quantized)
        (is_output_quantized,) = _read(file, "?")
        output_rows = _matrix(file, is_quantized and is_output_quantized)
    words, labels = entries[:num_words], entries[num_words:]
    if len(labels) != num_labels or not num_labels or any(kind != 1 for _, _, kind in labels):
        raise ValueError("its dictionary does not end with its labels")
    file_content = FastTextFile(
        words=[word for word, _, _ in words],
        labels=[label.decode("utf-8") for label, _, _ in labels],
        label_counts=[count for _, count, _ in labels],
        min_chars=min_chars,
        max_chars=0 if version == 11 else max_chars,  # older supervised models use no character n-grams
        word_ngrams=word_ngrams,
        buckets=buckets,
        loss=loss,
        kept_buckets=kept if num_kept >= 0 else None,
        input_rows=input_rows,
        output_rows=output_rows,
    )
    _check(file_content)
    return file_content


def _check(file_content: FastTextFile) -> None:
    """Every index that a prediction reads is inside its matrix, and every loop over n-grams is short."""
    rows, width = file_content.input_rows.shape
    if not (0 <= file_content.min_chars <= MAX_NGRAM and 0 <= file_content.max_chars <= MAX_NGRAM):
        raise ValueError(f"n-grams of {file_content.min_chars} to {file_content.max_chars} characters")
    if not 1 <= file_content.word_ngrams <= MAX_NGRAM:
        raise ValueError(f"n-grams of {file_content.word_ngrams} words")
    if (file_content.max_chars > 0 or file_content.word_ngrams > 1) and file_content.buckets < 1:
        raise ValueError(f"{file_content.buckets} buckets, and n-grams that need one")
    needed = len(file_content.words) + (
        file_content.buckets if file_content.max_chars > 0 or file_content.word_ngrams > 1 else 0
    )
    lowest = 0
    if file_content.kept_buckets is not None:
        buckets, kept_rows = file_content.kept_buckets.T
        if ((buckets < 0) | (buckets >= file_content.buckets)).any():
            raise ValueError("a bucket beyond the number of buckets")
        if (np.diff(np.sort(buckets)) == 0).any():
            raise ValueError("a bucket that has two rows")
        lowest = int(kept_rows.min(initial=0))
        needed = len(file_content.words) + 1 + int(kept_rows.max(initial=-1))
    if needed > rows or lowest < 0 or file_content.buckets < 0:
        raise ValueError(f"{rows} input rows; its dictionary needs {needed}")
    outputs = len(file_content.labels) - (file_content.loss == HIERARCHICAL_SOFTMAX)
    if len(file_content.output_rows) < outputs or file_content.output_rows.shape[1] != width:
        raise ValueError(
            f"an output matrix of shape {file_content.output_rows.shape} for {len(file_content.labels)} labels"
        )


def _matrix(file: BinaryIO, is_quantized: bool) -> np.ndarray:
    """float32[rows, D]; the rows of a quantized matrix are computed from its codes."""
    if not is_quantized:
        rows, width = _read(file, "qq")
        return np.frombuffer(_bytes(file, 4 * rows * width), np.float32).reshape(rows, width)
    has_norms, rows, width, code_bytes = _read(file, "?qqi")
    codes_RS = np.frombuffer(_bytes(file, code_bytes), np.uint8).reshape(rows, -1)
    matrix = _decoded(codes_RS, _quantizer(file))
    if has_norms:
        norm_codes = np.frombuffer(_bytes(file, rows), np.uint8).reshape(rows, 1)
        matrix *= _decoded(norm_codes, _quantizer(file))
    return matrix[:, :width]


class _Quantizer(NamedTuple):
    width: int
    sub_width: int
    last_sub_width: int
    centroids: np.ndarray  # float32[width * CENTROIDS]: those of the first sub-vector, of the second ...


def _quantizer(file: BinaryIO) -> _Quantizer:
    width, _, sub_width, last_sub_width = _read(file, "4i")
    return _Quantizer(width, sub_width, last_sub_width, np.frombuffer(_bytes(file, 4 * width * CENTROIDS), np.float32))


def _decoded(codes_RS: np.ndarray, quantizer: _Quantizer) -> np.ndarray:
    columns, start = [], 0
    for place, codes in enumerate(codes_RS.T):
        is_last = place + 1 == codes_RS.shape[1]
        width = quantizer.last_sub_width if is_last else quantizer.sub_width
        table = quantizer.centroids[start : start + CENTROIDS * width].reshape(CENTROIDS, width)
        columns.append(table.take(codes, axis=0))
        start += CENTROIDS * width
    return np.concatenate(columns, axis=1)


def _entry(file: BufferedReader) -> bytes:
    """The bytes before the next NUL."""
    entry = b""
    while (end := (ahead := file.peek()).find(b"\0")) < 0:
        if not ahead or len(entry) > MAX_ENTRY_BYTES:
            raise ValueError("its dictionary ends too early")
        entry += file.read(len(ahead))
    return entry + file.read(end + 1)[:-1]


def _read(file: BinaryIO, layout: str) -> tuple:
    return struct.unpack("<" + layout, _bytes(file, struct.calcsize("<" + layout)))


def _bytes(file: BinaryIO, size: int) -> bytes:
    """Raises ValueError where the file has no `size` more bytes, without asking for the memory of a damaged number."""
    has_them = 0 <= size <= os.fstat(file.fileno()).st_size - file.tell()
    content = file.read(size) if has_them else b""
    if len(content) != size:
        raise ValueError("the file ends too early")
    return content


END_OF_LINE = b"</s>"
FNV_START, FNV_FACTOR, MASK_32 = np.uint64(2166136261), np.uint64(16777619), np.uint64(0xFFFFFFFF)
SIGN_BITS = np.uint64(0xFFFFFF00)  # fastText hashes signed characters
PROJECTED_ROWS = 1 << 16  # at a time, in float64
UNBUILT_WEIGHT = 10**15  # of an inner node that has no children yet (loss.cc)

# Places in FastTextModel.settings. EOL: the row of </s>, -1 for none.
NUM_WORDS, NUM_LABELS, MIN_CHARS, MAX_CHARS, WORD_NGRAMS, BUCKETS, LOSS, WIDTH, EOL = range(9)


class FastTextModel(NamedTuple):
    """Model as the kernels read it. entries: the dictionary's words, then labels, in one text with its offsets;
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
        input_rows=read_only(input_rows),
        output_rows=read_only(np.ascontiguousarray(file.output_rows)),
        left=left,
        right=right,
        settings=np.array([*numbers, file.loss, input_rows.shape[1], end_of_line], np.int64),
    )


def projected(model: FastTextModel) -> FastTextModel:
    """The same model with each input row multiplied by the output rows beforehand, where labels are fewer than
    dimensions: a label's value is a mean of its products with the rows, so two numbers a row are read for two labels,
    not a hundred. Scores differ in the last digits."""
    outputs = len(model.output_rows)
    if outputs >= model.settings[WIDTH]:
        return model
    settings = model.settings.copy()
    settings[WIDTH] = outputs
    outputs_DL = model.output_rows.T.astype(np.float64)
    rows = np.empty((len(model.input_rows), outputs), np.float32)
    for first in range(0, len(rows), PROJECTED_ROWS):
        rows[first : first + PROJECTED_ROWS] = model.input_rows[first : first + PROJECTED_ROWS] @ outputs_DL
    own = np.eye(outputs, dtype=np.float32)
    return model._replace(input_rows=read_only(rows), output_rows=read_only(own), settings=settings)


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

"""Reader of fastText's supervised models, .bin and .ftz, into arrays.

The layout of the file is that of fastText 0.9.2: args.cc, dictionary.cc, densematrix.cc, quantmatrix.cc and
productquantizer.cc (github.com/facebookresearch/fastText, src/)."""

import struct
from io import BufferedReader
from pathlib import Path
from typing import BinaryIO, NamedTuple

import numpy as np

MAGIC = 793712314  # fasttext.cc, FASTTEXT_FILEFORMAT_MAGIC_INT32
HIERARCHICAL_SOFTMAX, NEGATIVE_SAMPLING, SOFTMAX, ONE_VS_ALL = 1, 2, 3, 4
SUPERVISED = 3
MAX_ENTRY_BYTES = 1 << 20
CENTROIDS = 256


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
    found = FastTextFile(
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
    _check(found)
    return found


def _check(found: FastTextFile) -> None:
    """Every index that a prediction reads is inside its matrix."""
    rows, width = found.input_rows.shape
    needed = len(found.words) + (found.buckets if found.max_chars > 0 or found.word_ngrams > 1 else 0)
    lowest = 0
    if found.kept_buckets is not None:
        buckets, kept_rows = found.kept_buckets.T
        if ((buckets < 0) | (buckets >= found.buckets)).any():
            raise ValueError("a bucket beyond the number of buckets")
        if (np.diff(np.sort(buckets)) == 0).any():
            raise ValueError("a bucket that has two rows")
        lowest = int(kept_rows.min(initial=0))
        needed = len(found.words) + 1 + int(kept_rows.max(initial=-1))
    if needed > rows or lowest < 0 or found.buckets < 0:
        raise ValueError(f"{rows} input rows; its dictionary needs {needed}")
    outputs = len(found.labels) - (found.loss == HIERARCHICAL_SOFTMAX)
    if len(found.output_rows) < outputs or found.output_rows.shape[1] != width:
        raise ValueError(f"an output matrix of shape {found.output_rows.shape} for {len(found.labels)} labels")


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
    found = b""
    while (end := (ahead := file.peek()).find(b"\0")) < 0:
        if not ahead or len(found) > MAX_ENTRY_BYTES:
            raise ValueError("its dictionary ends too early")
        found += file.read(len(ahead))
    return found + file.read(end + 1)[:-1]


def _read(file: BinaryIO, layout: str) -> tuple:
    return struct.unpack("<" + layout, _bytes(file, struct.calcsize("<" + layout)))


def _bytes(file: BinaryIO, size: int) -> bytes:
    found = file.read(size) if size >= 0 else b""
    if len(found) != size:
        raise ValueError("the file ends too early")
    return found

"""Writes a small fastText model file in fasttext.cc's format, with results that can be computed by hand."""

import struct
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

MAGIC, VERSION = 793712314, 12
SOFTMAX, SUPERVISED = 3, 3


def write_model(path: Path, words: Mapping[str, str], strength: float = 6.0) -> Path:
    """words: word -> the label it speaks for. A text's score of a label is the softmax of `strength` times the share of
    its words that speak for it; unknown words do not count."""
    labels = sorted(set(words.values()))
    vectors = np.zeros((len(words) + 1, len(labels)), np.float32)  # the first is that of the line's end
    for row, label in enumerate(words.values(), start=1):
        vectors[row, labels.index(label)] = 1
    entries = [("</s>", 0), *((word, 0) for word in words), *((f"__label__{label}", 1) for label in labels)]
    size = (len(entries), len(words) + 1, len(labels))
    header = (len(labels), 5, 5, 1, 5, 1, SOFTMAX, SUPERVISED, 0, 0, 0, 100)
    output = np.eye(len(labels), dtype=np.float32) * strength
    return _write(path, header, size, entries, [b"\0" + _plain(vectors), b"\0" + _plain(output)])


def write_random_model(
    path: Path, words: Sequence[str], labels: Sequence[str], loss: int, chars: tuple[int, int], word_ngrams: int
) -> Path:
    """A model of random vectors, of the words and of 50 buckets of n-grams. loss: 1 hierarchical softmax, 2 negative
    samples, 3 softmax, 4 one against all. chars: the shortest and the longest n-gram of characters."""
    rng, width, buckets = np.random.default_rng(len(words)), 6, 50
    entries = [*((word, 0) for word in words), *((f"__label__{label}", 1) for label in labels)]
    header = (width, 5, 5, 1, 5, word_ngrams, loss, SUPERVISED, buckets, *chars, 100)
    shapes = (len(words) + buckets, width), (len(labels), width)
    matrices = [b"\0" + _plain(rng.normal(size=shape).astype(np.float32) * 3) for shape in shapes]
    return _write(path, header, (len(entries), len(words), len(labels)), entries, matrices)


def write_random_quantized_model(
    path: Path, words: Sequence[str], labels: Sequence[str], loss: int, is_output_quantized: bool
) -> Path:
    """A .ftz of random codes: the words and 20 of 50 buckets of n-grams of two and three characters and of two words.
    A vector of six numbers is two codes, for four and two of them; its norm is another (fasttext.cc's
    productquantizer.cc and quantmatrix.cc)."""
    rng, width, buckets, num_kept = np.random.default_rng(len(words)), 6, 50, 20
    entries = [*((word, 0) for word in words), *((f"__label__{label}", 1) for label in labels)]
    header = (width, 5, 5, 1, 5, 2, loss, SUPERVISED, buckets, 2, 3, 100)
    kept = np.stack([np.sort(rng.choice(buckets, num_kept, replace=False)), rng.permutation(num_kept)], axis=1)

    def quantized(num_rows: int) -> bytes:
        codes = rng.integers(0, 256, (num_rows, 2), np.uint8)
        norms = rng.integers(0, 256, num_rows, np.uint8)
        return (
            struct.pack("<?qqi", True, num_rows, width, codes.size)
            + codes.tobytes()
            + struct.pack("<4i", width, 2, 4, 2)
            + rng.normal(size=256 * width).astype(np.float32).tobytes()
            + norms.tobytes()
            + struct.pack("<4i", 1, 1, 1, 1)
            + rng.uniform(1, 9, 256).astype(np.float32).tobytes()
        )

    output = rng.normal(size=(len(labels), width)).astype(np.float32)
    matrices = [
        b"\1" + quantized(len(words) + num_kept),
        b"\1" + quantized(len(labels)) if is_output_quantized else b"\0" + _plain(output),
    ]
    return _write(path, header, (len(entries), len(words), len(labels)), entries, matrices, kept.astype(np.int32))


def _plain(matrix: np.ndarray) -> bytes:
    return struct.pack("<qq", *matrix.shape) + matrix.tobytes()


def _write(
    path: Path,
    header: Sequence[int],
    size: tuple[int, int, int],
    entries: Sequence[tuple[str, int]],
    matrices: Sequence[bytes],
    kept: np.ndarray | None = None,
) -> Path:
    """matrices: of input and output, each behind its byte "is quantized". kept: (bucket, row) of the buckets left."""
    with path.open("wb") as file:
        file.write(struct.pack("<ii", MAGIC, VERSION))
        file.write(struct.pack("<12id", *header, 1e-4))
        file.write(struct.pack("<3iqq", *size, len(entries), -1 if kept is None else len(kept)))
        for place, (text, kind) in enumerate(entries):
            file.write(text.encode() + b"\0" + struct.pack("<qb", 1000 - place, kind))
        if kept is not None:
            file.write(kept.tobytes())
        file.writelines(matrices)
    return path

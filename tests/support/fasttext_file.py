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
    return _write(path, header, size, entries, [vectors, np.eye(len(labels), dtype=np.float32) * strength])


def write_random_model(
    path: Path, words: Sequence[str], labels: Sequence[str], loss: int, chars: tuple[int, int], word_ngrams: int
) -> Path:
    """A model of random vectors, of the words and of 50 buckets of n-grams. loss: 1 hierarchical softmax, 2 negative
    samples, 3 softmax, 4 one against all. chars: the shortest and the longest n-gram of characters."""
    rng, width, buckets = np.random.default_rng(len(words)), 6, 50
    entries = [*((word, 0) for word in words), *((f"__label__{label}", 1) for label in labels)]
    header = (width, 5, 5, 1, 5, word_ngrams, loss, SUPERVISED, buckets, *chars, 100)
    shapes = (len(words) + buckets, width), (len(labels), width)
    matrices = [rng.normal(size=shape).astype(np.float32) * 3 for shape in shapes]
    return _write(path, header, (len(entries), len(words), len(labels)), entries, matrices)


def _write(
    path: Path,
    header: Sequence[int],
    size: tuple[int, int, int],
    entries: Sequence[tuple[str, int]],
    matrices: Sequence[np.ndarray],
) -> Path:
    with path.open("wb") as file:
        file.write(struct.pack("<ii", MAGIC, VERSION))
        file.write(struct.pack("<12id", *header, 1e-4))
        file.write(struct.pack("<3iqq", *size, len(entries), -1))
        for place, (text, kind) in enumerate(entries):
            file.write(text.encode() + b"\0" + struct.pack("<qb", 1000 - place, kind))
        for matrix in matrices:
            file.write(struct.pack("<?qq", False, *matrix.shape) + matrix.tobytes())
    return path

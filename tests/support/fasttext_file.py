"""Writes a small fastText model file in fasttext.cc's format, with results that can be computed by hand."""

import struct
from collections.abc import Mapping
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
    with path.open("wb") as file:
        file.write(struct.pack("<ii", MAGIC, VERSION))
        file.write(struct.pack("<12id", len(labels), 5, 5, 1, 5, 1, SOFTMAX, SUPERVISED, 0, 0, 0, 100, 1e-4))
        file.write(struct.pack("<3iqq", *size, len(entries), -1))
        for text, kind in entries:
            file.write(text.encode() + b"\0" + struct.pack("<qb", 1, kind))
        for matrix in (vectors, np.eye(len(labels), dtype=np.float32) * strength):
            file.write(struct.pack("<?qq", False, *matrix.shape) + matrix.tobytes())
    return path

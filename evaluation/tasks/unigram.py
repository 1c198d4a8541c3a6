"""Unigram baseline: bits of a text under the token frequencies of the training data."""

from pathlib import Path

import numpy as np

from gristmill.data_pipeline.indexed.reader import IndexedReader
from gristmill.evaluation.results.statistics import unigram_bits_per_byte
from gristmill.evaluation.scoring.language_model import TextTokenizer
from gristmill.evaluation.tasks.corpus_tasks import HeldOutDocument
from gristmill.foundation.errors import InputError


def count_tokens(index: Path, vocab_size: int) -> np.ndarray:
    """int64[V]: frequency of each token in the training split of an `index` folder, over all sources."""
    prefixes = [path.with_suffix("") for path in sorted((index / "train").glob("*.idx"))]
    if not prefixes:
        raise InputError(f"{index / 'train'}: no .idx file; run the stage `index`")
    counts = np.zeros(vocab_size, dtype=np.int64)
    for prefix in prefixes:
        reader = IndexedReader(prefix)
        reader.check_ids(vocab_size, prefix.name)
        tokens = reader.tokens
        for part in np.array_split(tokens, 1 + len(tokens) // (1 << 24)):
            counts += np.bincount(part, minlength=vocab_size)
    return counts


def unigram_bits(counts: np.ndarray, text: HeldOutDocument, codec: TextTokenizer) -> float:
    """Bits of the text under the unigram model, in the model's own tokens."""
    return unigram_bits_per_byte(counts, codec.encode(text.text), num_bytes=1)

"""Runs of consecutive sentences of one document, from a sentence-split .idx (a sequence a sentence).

The rule is Megatron-LM's (core/datasets/helpers.cpp, build_mapping, with min_num_sent 2): a run ends when it has enough
tokens and two sentences, unless only one sentence of the document would be left, which then joins it."""

import numpy as np

from gristmill.data_pipeline.indexed.reader import IndexedReader
from gristmill.foundation.cached_njit import cached_njit
from gristmill.foundation.errors import InputError


def require_sentences(reader: IndexedReader) -> None:
    """Raises InputError if every document is one sequence, so that there are no sentences."""
    if reader.num_sequences <= reader.num_documents:
        raise InputError(
            f"{reader.prefix}: holds {reader.num_documents} documents of one sequence each, not split into sentences; "
            "set index.sentences: true and run `gristmill index` again"
        )


def sentence_runs(lengths: np.ndarray, bounds: np.ndarray, max_tokens: int) -> np.ndarray:
    """int64[runs, 2]: first sentence of each run, and the one behind its last. lengths: int32[S], tokens of a sentence;
    bounds: int64[D + 1], first sentence of each document. Documents of one sentence have no run.

    ([3, 4, 5, 2, 6], bounds [0, 4, 5], max_tokens 6) -> [[0, 2], [2, 4]]: 3 + 4 reaches 6; the last document is one
    sentence."""
    return _runs(np.ascontiguousarray(lengths), np.ascontiguousarray(bounds), max_tokens)


@cached_njit()
def _runs(lengths: np.ndarray, bounds: np.ndarray, max_tokens: int) -> np.ndarray:
    found = np.empty((len(lengths) // 2, 2), dtype=np.int64)
    count = 0
    for document in range(len(bounds) - 1):
        first, last = bounds[document], bounds[document + 1]
        if last - first < 2:
            continue
        start, tokens = first, 0
        for sentence in range(first, last):
            tokens += lengths[sentence]
            left = last - sentence - 1
            if (tokens >= max_tokens and left > 1 and sentence - start >= 1) or left == 0:
                found[count, 0], found[count, 1] = start, sentence + 1
                count += 1
                start, tokens = sentence + 1, 0
    return found[:count].copy()

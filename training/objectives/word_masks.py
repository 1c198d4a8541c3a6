"""Which tokens are masked: whole words and n-grams of words, up to a share of the tokens."""

from collections.abc import Sequence

import numpy as np


def word_starts(pieces: Sequence[str]) -> np.ndarray:
    """bool[vocabulary]: pieces that begin a word. WordPiece marks the others (##ing), SentencePiece (▁) and byte-level
    BPE (Ġ) the beginnings; without any mark every piece is a word.

    ["▁mask", "ing", "▁"] -> [True, False, True]."""
    if any(piece.startswith("##") for piece in pieces):
        return np.array([not piece.startswith("##") for piece in pieces])
    for mark in ("▁", "Ġ"):
        if any(piece.startswith(mark) for piece in pieces):
            return np.array([piece.startswith(mark) for piece in pieces])
    return np.ones(len(pieces), dtype=bool)


def words_of(begins: np.ndarray, special: np.ndarray) -> np.ndarray:
    """int64[words, 2]: first token of each word and the one behind its last. begins, special: bool[tokens]; special
    tokens are in no word and end one.

    begins [1, 1, 0, 1], special [1, 0, 0, 0] -> [[1, 3], [3, 4]]."""
    after_special = np.concatenate([[True], special[:-1]])
    firsts = np.flatnonzero((begins | after_special) & ~special)
    stops = np.flatnonzero(begins | special | after_special)
    behind = np.searchsorted(stops, firsts, side="right")
    lasts = np.concatenate([stops, [len(begins)]])[behind]
    return np.stack([firsts, lasts], axis=1).astype(np.int64)


def choose_masked(words: np.ndarray, budget: int, max_ngram: int, generator: np.random.Generator) -> np.ndarray:
    """Positions of the masked tokens, sorted; at most `budget`, and fewer only where no whole word fits any more.

    Words are visited in random order, each as the first of n words with p(n) proportional to 1 / n up to max_ngram
    (SpanBERT's and Megatron-LM's rule); n is lowered until the n-gram fits, and a word is masked once."""
    chances = 1 / np.arange(1, max_ngram + 1)
    sizes = generator.choice(max_ngram, size=len(words), p=chances / chances.sum()) + 1
    taken = np.zeros(len(words), dtype=bool)
    left = budget
    for first in generator.permutation(len(words)).tolist():
        if left == 0:
            break
        for size in range(min(int(sizes[first]), len(words) - first), 0, -1):
            tokens = int(words[first + size - 1, 1] - words[first, 0])
            adjacent = tokens == int((words[first : first + size, 1] - words[first : first + size, 0]).sum())
            if tokens <= left and adjacent and not taken[first : first + size].any():
                taken[first : first + size] = True
                left -= tokens
                break
    masked = [np.arange(start, stop) for start, stop in words[taken].tolist()]
    return np.concatenate(masked) if masked else np.zeros(0, dtype=np.int64)

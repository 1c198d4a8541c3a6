"""The words of texts as hashes, and the information of each word: what all searches for benchmark texts compare."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from gristmill.data_pipeline.dedup.folding import fold_texts
from gristmill.data_pipeline.dedup.kernels import hash_words
from gristmill.data_pipeline.signals.stop_words import stop_words
from gristmill.foundation.cached_njit import cached_njit

# How often a word stands in text: counted in the benchmarks, and where those are few, a stop word once in 100 words and
# any other once in 20,000 (the 32 most frequent words of English make up a third of a text, and a word of rank 2,000
# stands once in 20,000: Zipf's law), with the weight of 100,000 words.
STOP_WORD_SHARE, OTHER_WORD_SHARE = 1e-2, 5e-5
PRIOR_WORDS = 1e5


@dataclass(frozen=True)
class Words:
    """hashes uint64[words] of the folded words of texts; those of text t are hashes[ends[t]:ends[t + 1]]."""

    hashes: np.ndarray
    ends: np.ndarray

    @property
    def num_texts(self) -> int:
        return len(self.ends) - 1

    @property
    def counts(self) -> np.ndarray:
        """int64[texts]: words of each."""
        return np.diff(self.ends)

    @property
    def longest(self) -> int:
        return int(self.counts.max(initial=0))


def words_of_bytes(data: np.ndarray, offsets: np.ndarray) -> Words:
    """The words of the UTF-8 texts data[offsets[i]:offsets[i + 1]]."""
    folded, folded_ends = fold_texts(data, offsets)
    hashes = np.empty(int(folded_ends[-1]) // 2 + 1, np.uint64)  # a word and the space behind it are two bytes
    ends = np.zeros(len(offsets), np.int64)
    hash_words(folded, folded_ends, hashes, ends)
    return Words(hashes[: ends[-1]], ends)


def words_of(texts: Sequence[str]) -> Words:
    raw = [text.encode("utf-8", "replace") for text in texts]
    offsets = np.cumsum([0, *map(len, raw)]).astype(np.int64)
    return words_of_bytes(np.frombuffer(b"".join(raw) + b" ", np.uint8), offsets)


def information(words: Words) -> np.ndarray:
    """float64[words]: -ln of the share of each word in text, in nats: 3 or 4 for "the", 10 for a rare word."""
    slots = np.empty(len(words.hashes), np.int64)
    size = 1 << max((2 * len(words.hashes)).bit_length(), 6)
    keys, counts = np.zeros(size, np.uint64), np.zeros(size, np.int64)
    _count(words.hashes, keys, counts, slots)
    known = words_of([word for listed in stop_words().values() for word in listed]).hashes
    taken = np.flatnonzero(counts)
    prior = np.where(np.isin(keys[taken], known), STOP_WORD_SHARE, OTHER_WORD_SHARE)
    nats = np.empty(size)
    nats[taken] = -np.log((counts[taken] + PRIOR_WORDS * prior) / (len(words.hashes) + PRIOR_WORDS))
    return nats[slots]


@cached_njit(nogil=True)
def _count(hashes, keys, counts, slots):
    """Counts every hash by open addressing. slots: where each was put."""
    mask = np.uint64(len(keys) - 1)
    for word in range(len(hashes)):
        slot = (hashes[word] >> np.uint64(32)) & mask
        while counts[slot] > 0 and keys[slot] != hashes[word]:
            slot = (slot + np.uint64(1)) & mask
        keys[slot] = hashes[word]
        counts[slot] += 1
        slots[word] = slot

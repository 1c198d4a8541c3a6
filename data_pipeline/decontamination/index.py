"""The n-grams of all benchmark texts, and the search for them in documents."""

from dataclasses import dataclass

import numpy as np

from gristmill.data_pipeline.decontamination.words import Words
from gristmill.data_pipeline.dedup.kernels import EMPTY_SLOT, ONE, U6, all_ngrams, filter_bits, search_ngrams
from gristmill.foundation.cached_njit import cached_njit

# Bits of the filter for each distinct key.
FILTER_BITS = 16
# Slots of the table for each distinct key: at most half of them are taken, so probes stay short.
TABLE_SLOTS = 2


@dataclass(frozen=True)
class NgramIndex:
    """Every distinct n-gram of the benchmark texts has a number. n is the max_ngram, or all words of a shorter text.

    A document is searched for the first `min_ngram` words of the n-grams (the prefixes); the rest is compared where a
    prefix is met. lengths int64[n-grams], keys uint64[n-grams]: words and hash of each n-gram, ordered by prefix.
    filter uint64[]: a bit map of the prefixes. table int32[]: open addressing from prefix to its number p, whose
    n-grams are first[p]..first[p + 1]. texts of n-gram g: text_of[text_first[g]:text_first[g + 1]].
    ngrams_of int64[texts]: n-grams in each text; 0 for one too short to be searched."""

    max_ngram: int
    min_ngram: int
    lengths: np.ndarray
    keys: np.ndarray
    prefixes: np.ndarray
    first: np.ndarray
    filter: np.ndarray
    table: np.ndarray
    text_first: np.ndarray
    text_of: np.ndarray
    ngrams_of: np.ndarray


def build_index(words: Words, max_ngram: int, min_ngram: int) -> NgramIndex:
    """The index of the texts with these words. A text of fewer than `min_ngram` words is in no n-gram.

    Longest 13, min_ngram 8: a text of 15 words has three 13-grams, one of 9 words a single 9-gram
    (Megatron-LM tools/openwebtext/filter_ngrams.py, max_ngram_size and min_ngram_size)."""
    keys, prefixes, lengths, texts = _all_ngrams(words, max_ngram, min_ngram)
    order = _sorted_places(keys, prefixes)
    keys, prefixes, lengths, texts = keys[order], prefixes[order], lengths[order], texts[order]
    new = np.ones(len(keys), bool)
    new[1:] = (keys[1:] != keys[:-1]) | (prefixes[1:] != prefixes[:-1]) | (lengths[1:] != lengths[:-1])
    ngram_of = np.cumsum(new) - 1
    first_of_text = new.copy()  # sorted by n-gram and text, so that a repeat inside a text follows its first
    first_of_text[1:] |= texts[1:] != texts[:-1]
    ngram_of, texts = ngram_of[first_of_text], texts[first_of_text]
    distinct, first = np.unique(prefixes[new], return_index=True)
    return NgramIndex(
        max_ngram=max_ngram,
        min_ngram=min_ngram,
        lengths=lengths[new],
        keys=keys[new],
        prefixes=distinct,
        first=np.append(first, new.sum()),
        filter=bit_filter(distinct),
        table=slot_table(distinct),
        text_first=np.searchsorted(ngram_of, np.arange(new.sum() + 1)),
        text_of=texts,
        ngrams_of=np.bincount(texts, minlength=words.num_texts),
    )


def _all_ngrams(words: Words, max_ngram: int, min_ngram: int) -> tuple[np.ndarray, ...]:
    """keys, prefixes, lengths, text numbers of every n-gram of every text."""
    size = len(words.hashes) + 1  # a text has no more n-grams than words
    keys, prefixes = np.empty(size, np.uint64), np.empty(size, np.uint64)
    lengths, texts = np.empty(size, np.int64), np.empty(size, np.int64)
    count = all_ngrams(words.hashes, words.ends, max_ngram, min_ngram, keys, prefixes, lengths, texts)
    return keys[:count], prefixes[:count], lengths[:count], texts[:count]


def _size(keys: np.ndarray, factor: int) -> int:
    return 1 << max(int(len(keys) * factor - 1).bit_length(), 6)


def _sorted_places(keys: np.ndarray, prefixes: np.ndarray) -> np.ndarray:
    """np.lexsort((keys, prefixes)), with which only prefixes that stand several times are sorted by two keys. Stable:
    the texts of an n-gram stay in their order."""
    order = np.argsort(prefixes, kind="stable")
    ordered = prefixes[order]
    is_shared = np.zeros(len(order), bool)
    is_shared[1:] = ordered[1:] == ordered[:-1]
    is_shared[:-1] |= is_shared[1:]
    mine = order[is_shared]
    order[is_shared] = mine[np.lexsort((keys[mine], prefixes[mine]))]
    return order


def bit_filter(keys: np.ndarray) -> np.ndarray:
    """uint64[]: a bit map in which two bits of every key are set, both in the word that the key's low bits choose
    (`filter_bits`): a foreign key passes in 2 of 100 cases, and a look-up is one read."""
    words = np.zeros(_size(keys, FILTER_BITS) // 64, np.uint64)
    _set_bits(words, keys)
    return words


@cached_njit(nogil=True)
def _set_bits(words, keys):
    mask = np.uint64(64 * len(words) - 1)
    for key in keys:
        words[(key & mask) >> U6] |= filter_bits(key)


def slot_table(keys: np.ndarray) -> np.ndarray:
    """int32[]: open addressing from the distinct keys' high bits to their numbers."""
    table = np.full(_size(keys, TABLE_SLOTS), EMPTY_SLOT, np.int32)
    _fill(table, keys)
    return table


@cached_njit(nogil=True)
def _fill(table, keys):
    mask = np.uint64(len(table) - 1)
    for number in range(len(keys)):
        slot = (keys[number] >> np.uint64(32)) & mask
        while table[slot] != EMPTY_SLOT:
            slot = (slot + ONE) & mask
        table[slot] = number


def search(index: NgramIndex, words: Words) -> np.ndarray:
    """int64[3, matches] of the words of texts: text, n-gram, and the word of the text at which it begins, ascending."""
    prefixes = np.empty(words.longest + 1, np.uint64)
    found = np.empty((3, 4096), np.int64)
    tables = (index.lengths, index.keys, index.prefixes, index.first, index.filter, index.table)
    while (count := search_ngrams(words.hashes, words.ends, index.min_ngram, *tables, prefixes, found)) > found.shape[
        1
    ]:
        found = np.empty((3, count), np.int64)
    return found[:, :count]

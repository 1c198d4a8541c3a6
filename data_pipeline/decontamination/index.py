"""The n-grams of all benchmark texts, and the search for them in documents."""

from collections.abc import Sequence
from dataclasses import dataclass

import numba
import numpy as np

from gristmill.data_pipeline.decontamination.benchmark import Example
from gristmill.data_pipeline.dedup.folding import fold_texts
from gristmill.data_pipeline.dedup.kernels import EMPTY_SLOT, search_ngrams, shingle_hashes, word_hashes

# Bits of the filter for each distinct prefix: at 16, one foreign prefix in 16 passes on to the table.
FILTER_BITS = 16
# Slots of the table for each distinct prefix: at most half of them are taken, so probes stay short.
TABLE_SLOTS = 2
ONE = np.uint64(1)


@dataclass(frozen=True)
class NgramIndex:
    """Every distinct n-gram of the benchmark texts has a number. n is the longest, or all words of a shorter text.

    A document is searched for the first `shortest` words of the n-grams (the prefixes); the rest is compared where a
    prefix is met. lengths int64[n-grams], keys uint64[n-grams]: words and hash of each n-gram, ordered by prefix.
    filter uint64[]: a bit map of the prefixes. table int32[]: open addressing from prefix to its number p, whose
    n-grams are first[p]..first[p + 1]. texts of n-gram g: text_of[text_first[g]:text_first[g + 1]].
    ngrams_of int64[texts]: n-grams in each text; 0 for one too short to be searched."""

    longest: int
    shortest: int
    lengths: np.ndarray
    keys: np.ndarray
    prefixes: np.ndarray
    first: np.ndarray
    filter: np.ndarray
    table: np.ndarray
    text_first: np.ndarray
    text_of: np.ndarray
    ngrams_of: np.ndarray


def build_index(examples: Sequence[Example], longest: int, shortest: int) -> NgramIndex:
    """The index of the examples' texts. A text of fewer than `shortest` words is in no n-gram.

    Longest 13, shortest 8: a text of 15 words has three 13-grams, one of 9 words a single 9-gram
    (Megatron-LM tools/openwebtext/filter_ngrams.py, max_ngram_size and min_ngram_size)."""
    keys, prefixes, lengths, texts = _all_ngrams(examples, longest, shortest)
    order = np.lexsort((texts, lengths, keys, prefixes))
    keys, prefixes, lengths, texts = keys[order], prefixes[order], lengths[order], texts[order]
    new = np.ones(len(keys), bool)
    new[1:] = (keys[1:] != keys[:-1]) | (prefixes[1:] != prefixes[:-1]) | (lengths[1:] != lengths[:-1])
    ngram_of = np.cumsum(new) - 1
    first_of_text = new.copy()  # sorted by n-gram and text, so that a repeat inside a text follows its first
    first_of_text[1:] |= texts[1:] != texts[:-1]
    ngram_of, texts = ngram_of[first_of_text], texts[first_of_text]
    distinct, first = np.unique(prefixes[new], return_index=True)
    return NgramIndex(
        longest=longest,
        shortest=shortest,
        lengths=lengths[new],
        keys=keys[new],
        prefixes=distinct,
        first=np.append(first, new.sum()),
        filter=_filter(distinct),
        table=_table(distinct),
        text_first=np.searchsorted(ngram_of, np.arange(new.sum() + 1)),
        text_of=texts,
        ngrams_of=np.bincount(texts, minlength=len(examples)),
    )


def _all_ngrams(examples: Sequence[Example], longest: int, shortest: int) -> tuple[np.ndarray, ...]:
    """keys, prefixes, lengths, text numbers of every n-gram of every text."""
    raw = [example.text.encode("utf-8", "replace") for example in examples]
    offsets = np.cumsum([0, *map(len, raw)]).astype(np.int64)
    folded, ends = fold_texts(np.frombuffer(b"".join(raw) + b" ", np.uint8), offsets)
    room = int(np.diff(ends).max(initial=0)) + 64
    units, hashes = np.empty(room, np.uint64), np.empty(room, np.uint64)
    columns: list[list[np.ndarray]] = [[np.empty(0, np.uint64)], [np.empty(0, np.uint64)], [], []]
    for number in range(len(raw)):
        words = word_hashes(folded, ends[number], ends[number + 1], units)
        if words < shortest:
            continue
        count = shingle_hashes(units, words, longest, hashes)
        columns[0].append(hashes[:count].copy())
        shingle_hashes(units, words, shortest, hashes)
        columns[1].append(hashes[:count].copy())
        columns[2].append(np.full(count, min(longest, words)))
        columns[3].append(np.full(count, number))
    keys, prefixes = np.concatenate(columns[0]), np.concatenate(columns[1])
    lengths, texts = (np.concatenate([np.empty(0, np.int64), *column]) for column in columns[2:])
    return keys, prefixes, lengths, texts


def _size(prefixes: np.ndarray, factor: int) -> int:
    return 1 << max(int(len(prefixes) * factor - 1).bit_length(), 6)


def _filter(prefixes: np.ndarray) -> np.ndarray:
    bits = np.zeros(_size(prefixes, FILTER_BITS), np.uint8)
    bits[prefixes & np.uint64(len(bits) - 1)] = 1
    return np.packbits(bits, bitorder="little").view("<u8").astype(np.uint64)


def _table(prefixes: np.ndarray) -> np.ndarray:
    table = np.full(_size(prefixes, TABLE_SLOTS), EMPTY_SLOT, np.int32)
    _fill(table, prefixes)
    return table


@numba.njit(cache=True, nogil=True)
def _fill(table, prefixes):
    mask = np.uint64(len(table) - 1)
    for number in range(len(prefixes)):
        slot = (prefixes[number] >> np.uint64(32)) & mask
        while table[slot] != EMPTY_SLOT:
            slot = (slot + ONE) & mask
        table[slot] = number


def search(index: NgramIndex, data: np.ndarray, offsets: np.ndarray) -> np.ndarray:
    """int64[3, matches] of raw UTF-8 texts: text, n-gram, and the word of the text at which it begins, ascending."""
    folded, ends = fold_texts(data, offsets)
    room = int(np.diff(ends).max(initial=0)) + 64
    units, prefixes = np.empty(room, np.uint64), np.empty(room, np.uint64)
    found = np.empty((3, 4096), np.int64)
    tables = (index.lengths, index.keys, index.prefixes, index.first, index.filter, index.table)
    while (count := search_ngrams(folded, ends, index.shortest, *tables, units, prefixes, found)) > found.shape[1]:
        found = np.empty((3, count), np.int64)
    return found[:, :count]

"""The n-grams of all benchmark texts, and the search for them in documents."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from gristmill.data_pipeline.decontamination.config import DecontaminateConfig
from gristmill.data_pipeline.dedup.folding import fold_texts
from gristmill.data_pipeline.dedup.kernels import (
    EMPTY_SLOT,
    ONE,
    U6,
    all_ngrams,
    filter_bits,
    hash_words,
    search_ngrams,
)
from gristmill.data_pipeline.signals.stop_words import stop_words
from gristmill.foundation.runtime.kernels.cached_njit import cached_njit
from gristmill.foundation.runtime.tasks.task_files import range_of_keys

# The words of texts as hashes, and the information of each word: what all searches for benchmark texts compare.

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
    shared = order[is_shared]
    order[is_shared] = shared[np.lexsort((keys[shared], prefixes[shared]))]
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
    matches = np.empty((3, 4096), np.int64)
    tables = (index.lengths, index.keys, index.prefixes, index.first, index.filter, index.table)
    while (
        count := search_ngrams(words.hashes, words.ends, index.min_ngram, *tables, prefixes, matches)
    ) > matches.shape[1]:
        matches = np.empty((3, count), np.int64)
    return matches[:, :count]


# Common phrases: what stands in so many documents that it says nothing of one benchmark.


@dataclass(frozen=True)
class NgramMatches:
    """Matches in one document file, ordered by row. ngrams int64[3, matches]: row, n-gram, its first word.
    copies int64[6, copies], edited or short: row, text, first word, last + 1, words found, hash of which."""

    ngrams: np.ndarray
    copies: np.ndarray

    @property
    def rows(self) -> np.ndarray:
        """int64[documents]: where anything was found."""
        return np.union1d(self.ngrams[0], self.copies[0])


# How often a phrase stands in documents (or places). text NGRAM: phrase is an n-gram's number; else it is the hash of
# the words of a copy of that text.
PHRASE = np.dtype([("text", "<i8"), ("phrase", "<i8"), ("times", "<i8")])
NGRAM = -1
MIX = np.uint64(0x9E3779B97F4A7C15)  # odd: the golden ratio


def phrase_counts(matches: NgramMatches, config: DecontaminateConfig) -> np.ndarray:
    """PHRASE[distinct phrases] of one document file."""
    row, ngram = matches.ngrams[:2]
    rows = np.concatenate([np.stack([row, np.full(len(row), NGRAM), ngram]), matches.copies[[0, 1, 5]]], axis=1)
    if config.common_in == "documents":
        rows = np.unique(rows, axis=1)
    phrases, times = np.unique(rows[1:], axis=1, return_counts=True)
    records = np.empty(len(times), PHRASE)
    records["text"], records["phrase"], records["times"] = *phrases, times
    return records


def phrase_ranges(phrases: np.ndarray, ranges: int) -> np.ndarray:
    """int64[]: the range of each phrase in a shuffle."""
    return range_of_keys((phrases["phrase"] ^ phrases["text"]).astype(np.uint64) * MIX, ranges)


def common_phrases(counts: np.ndarray, config: DecontaminateConfig) -> np.ndarray:
    """PHRASE[]: those that stand in at least `common` documents (or places), from the counts of all document files."""
    counts = counts[np.lexsort((counts["text"], counts["phrase"]))]
    new = np.ones(len(counts), bool)
    new[1:] = (counts["phrase"][1:] != counts["phrase"][:-1]) | (counts["text"][1:] != counts["text"][:-1])
    firsts = np.flatnonzero(new)
    phrases = counts[firsts].copy()
    phrases["times"] = np.add.reduceat(counts["times"], firsts) if len(firsts) else 0
    return phrases[phrases["times"] >= config.common]


def common_ngrams(common: np.ndarray, num_ngrams: int) -> np.ndarray:
    """bool[n-grams]: which of them are among these phrases."""
    is_common = np.zeros(num_ngrams, bool)
    is_common[common["phrase"][common["text"] == NGRAM]] = True
    return is_common


def without_common(matches: NgramMatches, common: np.ndarray, index: NgramIndex) -> NgramMatches:
    """Matches that count: without the common n-grams, and without the copies that are common phrases as well: the same
    words of one text in at least `common` documents (or places), or a copy of which every n-gram is a common one."""
    copies = common[common["text"] != NGRAM]
    known = set(zip(copies["text"].tolist(), copies["phrase"].tolist(), strict=True))
    often = np.array([tuple(pair) in known for pair in matches.copies[[1, 5]].T.tolist()], bool) if known else None
    often = np.zeros(matches.copies.shape[1], bool) if often is None else often
    return _counting(matches, often, common_ngrams(common, len(index.keys)), index)


def _counting(matches: NgramMatches, often: np.ndarray, common: np.ndarray, index: NgramIndex) -> NgramMatches:
    is_common = common[matches.ngrams[1]]
    copies = matches.copies[:, ~often]
    if copies.shape[1] and is_common.any():
        counting, all_of_them = (_owners(matches.ngrams[:, rows], index) for rows in (~is_common, slice(None)))
        only_common = all_of_them - counting
        copies = copies[:, [(row, text) not in only_common for row, text in copies[:2].T.tolist()]]
    return NgramMatches(matches.ngrams[:, ~is_common], copies)


def _owners(ngrams: np.ndarray, index: NgramIndex) -> set[tuple[int, int]]:
    """(row, text) of every text that has one of the n-grams."""
    return {
        (row, text)
        for row, ngram in ngrams[:2].T.tolist()
        for text in index.text_of[index.text_first[ngram] : index.text_first[ngram + 1]].tolist()
    }

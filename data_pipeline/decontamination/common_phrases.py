"""Common phrases: what stands in so many documents that it says nothing of one benchmark."""

from dataclasses import dataclass

import numpy as np

from gristmill.data_pipeline.decontamination.config import DecontaminateConfig
from gristmill.data_pipeline.decontamination.index import NgramIndex
from gristmill.foundation.shuffle import range_of_keys


@dataclass(frozen=True)
class Found:
    """What was found in one document file, ordered by row. ngrams int64[3, matches]: row, n-gram, its first word.
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


def phrase_counts(found: Found, config: DecontaminateConfig) -> np.ndarray:
    """PHRASE[distinct phrases] of one document file."""
    row, ngram = found.ngrams[:2]
    rows = np.concatenate([np.stack([row, np.full(len(row), NGRAM), ngram]), found.copies[[0, 1, 5]]], axis=1)
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
    found = counts[firsts].copy()
    found["times"] = np.add.reduceat(counts["times"], firsts) if len(firsts) else 0
    return found[found["times"] >= config.common]


def common_ngrams(common: np.ndarray, num_ngrams: int) -> np.ndarray:
    """bool[n-grams]: which of them are among these phrases."""
    found = np.zeros(num_ngrams, bool)
    found[common["phrase"][common["text"] == NGRAM]] = True
    return found


def without_common(found: Found, common: np.ndarray, index: NgramIndex) -> Found:
    """What counts: without the common n-grams, and without the copies that are common phrases as well: the same words
    of one text in at least `common` documents (or places), or a copy of which every n-gram is a common one."""
    copies = common[common["text"] != NGRAM]
    known = set(zip(copies["text"].tolist(), copies["phrase"].tolist(), strict=True))
    often = np.array([tuple(pair) in known for pair in found.copies[[1, 5]].T.tolist()], bool) if known else None
    often = np.zeros(found.copies.shape[1], bool) if often is None else often
    return _counting(found, often, common_ngrams(common, len(index.keys)), index)


def _counting(found: Found, often: np.ndarray, common: np.ndarray, index: NgramIndex) -> Found:
    is_common = common[found.ngrams[1]]
    copies = found.copies[:, ~often]
    if copies.shape[1] and is_common.any():
        counting, all_of_them = (_owners(found.ngrams[:, rows], index) for rows in (~is_common, slice(None)))
        only_common = all_of_them - counting
        copies = copies[:, [(row, text) not in only_common for row, text in copies[:2].T.tolist()]]
    return Found(found.ngrams[:, ~is_common], copies)


def _owners(ngrams: np.ndarray, index: NgramIndex) -> set[tuple[int, int]]:
    """(row, text) of every text that has one of the n-grams."""
    return {
        (row, text)
        for row, ngram in ngrams[:2].T.tolist()
        for text in index.text_of[index.text_first[ngram] : index.text_first[ngram + 1]].tolist()
    }

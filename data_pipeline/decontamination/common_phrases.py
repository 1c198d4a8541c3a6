"""Common phrases: what stands in so many documents that it says nothing of one benchmark."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from gristmill.data_pipeline.decontamination.config import DecontaminateConfig
from gristmill.data_pipeline.decontamination.index import NgramIndex


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


def common_ngrams(found: Sequence[Found], num_ngrams: int, config: DecontaminateConfig) -> np.ndarray:
    """bool[n-grams]: those that stand in at least `common` documents (or places)."""
    times = np.zeros(num_ngrams, np.int64)
    for one in found:
        counted = np.unique(one.ngrams[:2], axis=1) if config.common_in == "documents" else one.ngrams
        times += np.bincount(counted[1], minlength=num_ngrams)
    return times >= config.common


def without_common(
    found: Sequence[Found], common: np.ndarray, index: NgramIndex, config: DecontaminateConfig
) -> list[Found]:
    """What counts: without the common n-grams, and without the copies that are common phrases as well: the same words
    of one text in at least `common` documents (or places), or a copy of which every n-gram is a common one."""
    often = _common_copies([one.copies for one in found], config)
    return [_counting(one, mine, common, index) for one, mine in zip(found, often, strict=True)]


def _common_copies(copies: Sequence[np.ndarray], config: DecontaminateConfig) -> list[np.ndarray]:
    """bool[copies] of each document file: those whose text and words (rows 1 and 5) stand in many documents."""
    whose = np.concatenate([np.empty((2, 0), np.int64), *(one[[1, 5]] for one in copies)], axis=1)
    _, phrase = np.unique(whose, axis=1, return_inverse=True)
    phrase = phrase.reshape(-1)
    file_of = np.repeat(np.arange(len(copies)), [one.shape[1] for one in copies])
    counted = np.stack([file_of, np.concatenate([np.empty(0, np.int64), *(one[0] for one in copies)]), phrase])
    if config.common_in == "documents":
        counted = np.unique(counted, axis=1)
    often = (np.bincount(counted[2]) >= config.common)[phrase]
    return np.split(often, np.cumsum([one.shape[1] for one in copies])[:-1])


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

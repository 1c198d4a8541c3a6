"""Fill-in-the-middle (Bavarian et al. 2022, arXiv:2207.14255) on the tokens of a window, deterministic by sample.

A document "a b c d e" cut at two random points becomes, prefix first, "<P> a b <S> d e <M> c" or, suffix first (the
paper's SPM variant 2), "<P> <S> d e <M> a b c". Three tokens come in, so the window's last ones give way."""

import itertools
from typing import Self

import numpy as np

from gristmill.data_pipeline.indexed.config import IndexConfig
from gristmill.data_pipeline.indexed.dataset import Dataset, FimIds
from gristmill.data_pipeline.indexed.packing import Window
from gristmill.data_pipeline.indexed.permutation import key_of
from gristmill.foundation.errors import RecipeError

_TWO_64 = 2.0**64


class FillInTheMiddle:
    def __init__(self, ids: FimIds, end_of_document: int, config: IndexConfig, seed: int):
        self._ids, self._end, self._seed = ids, end_of_document, seed
        self._rate, self._suffix_first, self._sources = config.fim_rate, config.fim_suffix_first, config.fim_sources

    @classmethod
    def for_dataset(cls, dataset: Dataset, config: IndexConfig, seed: int) -> Self | None:
        """None where the rate is 0. Raises RecipeError if the dataset's tokenizer lacks the control symbols."""
        if config.fim_rate == 0.0:
            return None
        if dataset.fim is None:
            raise RecipeError(
                "index.fim_rate is above 0, but the tokenizer has no control symbols for it; set tokenizer.fim"
            )
        return cls(dataset.fim, dataset.end_of_document, config, seed)

    def apply(self, window: Window, source: str, k: int) -> Window:
        """The window with some of its documents rearranged; its length stays."""
        if self._sources and source not in self._sources:
            return window
        edges = [*window.starts[window.starts < window.num_valid].tolist(), window.num_valid]
        parts = [
            self._rearranged(window.tokens[start:end], k, number)
            for number, (start, end) in enumerate(itertools.pairwise(edges))
        ]
        lengths = [len(part) for part in parts]
        size = len(window.tokens)
        padding = np.full(max(0, size - sum(lengths)), self._end, dtype=np.int64)
        starts = np.concatenate([[0], np.cumsum(lengths)]) if len(padding) else np.cumsum([0, *lengths[:-1]])
        num_valid = min(size, sum(lengths))
        return Window(np.concatenate([*parts, padding])[:size], starts[starts < size - 1], num_valid)

    def _rearranged(self, document: np.ndarray, k: int, number: int) -> np.ndarray:
        if self._uniform(k, number, "rate") >= self._rate or len(document) < 3:
            return document
        ends_here = document[-1] == self._end
        body = document[:-1] if ends_here else document
        first, second = sorted(int(self._uniform(k, number, cut) * (len(body) + 1)) for cut in ("first", "second"))
        prefix, middle, suffix = body[:first], body[first:second], body[second:]
        p, m, s = [self._ids.prefix], [self._ids.middle], [self._ids.suffix]
        if self._uniform(k, number, "order") < self._suffix_first:
            parts = [p, s, suffix, m, prefix, middle]
        else:
            parts = [p, prefix, s, suffix, m, middle]
        return np.concatenate([*parts, document[-1:] if ends_here else document[:0]]).astype(np.int64)

    def _uniform(self, k: int, number: int, purpose: str) -> float:
        """In [0, 1), a pure function of (seed, sample, document in it, purpose)."""
        return key_of(self._seed, "fim", k, number, purpose) / _TWO_64

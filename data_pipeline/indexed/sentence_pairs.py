"""Sentences of a text, and pair k of consecutive text segments, a pure function of (dataset, split, settings, seed, k),
for BERT.

k -> phase and block -> source and its how-many-th sample -> epoch and keyed permutation -> a run of sentences, split
into two segments that are swapped in half of the pairs. Learning which of the two orders it is, is the sentence order
prediction of ALBERT (arXiv 1909.11942, section 3.1); Megatron-LM names it next sentence prediction."""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import numpy as np

from gristmill.data_pipeline.indexed.config import IndexConfig
from gristmill.data_pipeline.indexed.dataset import Dataset, manifest_digests, open_checked, read_dataset
from gristmill.data_pipeline.indexed.draws import Draw, DrawForecast, Permutation, cap_of, key_of
from gristmill.data_pipeline.indexed.format import IndexedReader
from gristmill.data_pipeline.indexed.language_shares import language_of
from gristmill.data_pipeline.indexed.packing import DocumentPiece
from gristmill.data_pipeline.indexed.samples import LogLine, TooFewTokens, blend_schedule
from gristmill.foundation.errors import InputError
from gristmill.foundation.fingerprint import fingerprint
from gristmill.foundation.runtime.kernels.cached_njit import cached_njit

SHORT_SHARE = 0.1  # of the pairs are cut to a random length (BERT, arXiv 1810.04805, appendix A.2)


@dataclass(frozen=True)
class Pair:
    """first, second: int64 token ids as they stand in the sample. swapped: second precedes first in the document."""

    first: np.ndarray
    second: np.ndarray
    swapped: bool


@dataclass(frozen=True)
class PairCut:
    """How a pair was cut. sentences: the first of each segment. segments: their tokens, of which `kept` stay; swapped:
    the second precedes the first in the sample."""

    source: int
    epoch: int
    sentences: tuple[int, int]
    segments: tuple[np.ndarray, np.ndarray]
    kept: tuple[range, range]
    swapped: bool


class SentencePairs(DrawForecast):
    """Made by `open_pairs`. max_tokens: of both segments together."""

    def __init__(
        self,
        dataset: Dataset,
        readers: Mapping[str, IndexedReader],
        max_tokens: int,
        seed: int,
        config: IndexConfig,
        identity: str,
    ):
        self.vocab_size, self.end_of_document = dataset.vocab_size, dataset.end_of_document
        self.sources, self.max_tokens, self.fingerprint = tuple(readers), max_tokens, identity
        self._readers, self._seed, self._config = tuple(readers.values()), seed, config
        self._runs = [sentence_runs(reader.lengths, reader.bounds, max_tokens) for reader in self._readers]
        self._schedule = blend_schedule(dataset, self.sources, max_tokens, seed, config)
        self._order = lru_cache(maxsize=2 * len(self.sources))(self._epoch_order)

    def pair(self, k: int) -> Pair:
        cut = self._cut(k)
        (before, after), (first, second) = cut.segments, cut.kept
        parts = before[first.start : first.stop], after[second.start : second.stop]
        return Pair(parts[1], parts[0], True) if cut.swapped else Pair(parts[0], parts[1], False)

    def pieces_of(self, k: int) -> tuple[str, int, list[DocumentPiece]]:
        """(source, epoch, the two pieces of a document in sample k, as they follow each other in the document); the
        document is counted in the order of the source's .bin."""
        cut = self._cut(k)
        reader = self._readers[cut.source]
        document = int(np.searchsorted(reader.bounds, cut.sentences[0], side="right")) - 1
        begin = self._first_token(cut.source, int(reader.bounds[document]))
        pieces = []
        for sentence, kept in zip(cut.sentences, cut.kept, strict=True):
            start = self._first_token(cut.source, sentence) - begin
            pieces.append(DocumentPiece(document, start + kept.start, start + kept.stop))
        return self.sources[cut.source], cut.epoch, pieces

    def samples_with(self, source: str, document: int, num_samples: int) -> list[tuple[int, int]]:
        """(k, epoch) of the samples among the first num_samples that hold tokens of this document, ascending."""
        place = self.sources.index(source)
        runs, bounds = self._runs[place], self._readers[place].bounds
        first, last = (int(np.searchsorted(runs[:, 0], bounds[document + end])) for end in (0, 1))
        numbers = []
        for epoch in range(-(-int(self._schedule.drawn(num_samples)[place]) // len(runs))):
            for run in range(first, last):
                ordinal = epoch * len(runs) + self._order(place, epoch).inverse(run)
                k = self._schedule.number_of(place, ordinal)
                if k is not None and k < num_samples:
                    numbers.append((k, epoch))
        return sorted(numbers)

    def _cut(self, k: int) -> PairCut:
        source, ordinal = self._schedule.locate(k)
        epoch, index = divmod(ordinal, len(self._runs[source]))
        first, last = self._runs[source][self._order(source, epoch)(index)].tolist()
        generator = np.random.default_rng([self._seed, key_of("pair"), k])
        split = int(generator.integers(first + 1, last))
        segments = self._tokens(source, first, split), self._tokens(source, split, last)
        limit = self.max_tokens
        if generator.random() < SHORT_SHARE:
            limit = int(generator.integers(2, self.max_tokens + 1))
        sizes = trimmed_lengths(len(segments[0]), len(segments[1]), limit)
        before, after = (_kept(part, size, generator) for part, size in zip(segments, sizes, strict=True))
        swapped = bool(generator.random() < 0.5)
        return PairCut(source, epoch, (first, split), segments, (before, after), swapped)

    def source_of(self, k: int) -> str:
        return self.sources[self._schedule.locate(k)[0]]

    def drawn(self, num_samples: int) -> list[Draw]:
        """Pairs that a run of `num_samples` takes from each source, each pair counted with all tokens it may have."""
        counts = self._schedule.drawn(num_samples).tolist()
        return [
            Draw(name, count, len(runs), self.max_tokens, cap_of(self._config, name))
            for name, count, runs in zip(self.sources, counts, self._runs, strict=True)
        ]

    def _first_token(self, source: int, sentence: int) -> int:
        reader = self._readers[source]
        return int(reader.pointers[sentence]) // reader.dtype.itemsize

    def _tokens(self, source: int, first: int, last: int) -> np.ndarray:
        """Tokens of consecutive sentences of a document, without the end-of-document token."""
        reader = self._readers[source]
        start = self._first_token(source, first)
        end = int(reader.pointers[last - 1]) // reader.dtype.itemsize + int(reader.lengths[last - 1])
        tokens = reader.tokens[start:end].astype(np.int64)
        return tokens[:-1] if len(tokens) > 1 and tokens[-1] == self.end_of_document else tokens

    def _epoch_order(self, source: int, epoch: int) -> Permutation:
        return Permutation(len(self._runs[source]), key_of(self._seed, "pairs", self.sources[source], epoch))


def trimmed_lengths(first: int, second: int, limit: int) -> tuple[int, int]:
    """Lengths after the longer one is shortened until both fit: (7, 2, 6) -> (4, 2); (7, 5, 6) -> (3, 3)."""
    if first + second <= limit:
        return first, second
    half = limit // 2
    if second <= half:
        return limit - second, second
    return (first, limit - first) if first <= limit - half else (limit - half, half)


def _kept(tokens: np.ndarray, length: int, generator: np.random.Generator) -> range:
    """The tokens that stay: each that is too many is taken from the front or from the back with equal chance."""
    surplus = len(tokens) - length
    front = int(generator.binomial(surplus, 0.5)) if surplus else 0
    return range(front, front + length)


def open_pairs(
    folder: Path, split: str, max_tokens: int, seed: int, config: IndexConfig, info: LogLine = lambda message: None
) -> SentencePairs:
    """The pairs of one split of an `index` folder, whose files are checked first (verify.py).

    Raises InputError on damaged files and on data without sentences, TooFewTokens where a split has no two consecutive
    sentences; a source of a held-out split without them is left out."""
    dataset, digests = read_dataset(folder), manifest_digests(folder)
    readers: dict[str, IndexedReader] = {}
    for source in dataset.sources:
        counts = source.splits.get(split)
        if counts is None or not counts.documents:
            continue
        reader = open_checked(folder, split, source, dataset, digests, info).reader
        if split == "train":
            require_sentences(reader)
        if len(sentence_runs(reader.lengths, reader.bounds, max_tokens)):
            readers[source.name] = reader
        elif split == "train" and language_of(source.name) is None:
            raise TooFewTokens(f"{reader.prefix}: no document has two sentences; give the source longer documents")
        elif split == "train":
            info(f"not trained on: {reader.prefix}: no document has two sentences")
    if not readers:
        raise TooFewTokens(f"{folder / split}: no document has two sentences")
    identity = fingerprint(
        [dataset.model_dump(mode="json"), split, "pairs", max_tokens, seed, config.model_dump(mode="json")]
    )
    return SentencePairs(dataset, readers, max_tokens, seed, config, identity)


# Runs of consecutive sentences of one document, from a sentence-split .idx (a sequence a sentence).
#
# The rule is Megatron-LM's (core/datasets/helpers.cpp, build_mapping, with min_num_sent 2): a run ends when it has
# enough tokens and two sentences, unless only one sentence of the document would be left, which then joins it.


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
    runs = np.empty((len(lengths) // 2, 2), dtype=np.int64)
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
                runs[count, 0], runs[count, 1] = start, sentence + 1
                count += 1
                start, tokens = sentence + 1, 0
    return runs[:count].copy()


# Splits a text into sentences, by rules for any language: for indexed data in which a sequence is a sentence.
#
# A sentence ends at . ! ? or an ellipsis (with closing quotes and brackets) before white space, unless a lower-case
# letter follows or the dot ends an abbreviation or an initial; at 。！？ and their like anywhere; and at a blank line.

_ABBREVIATIONS = (
    "Mr Mrs Ms Dr Prof Sr Jr St Mt vs cf e.g i.e etc al Fig Figs No Nos Vol Inc Ltd Co Corp Jan Feb Mar Apr "
)
_ABBREVIATIONS += "Jun Jul Aug Sep Sept Oct Nov Dec approx resp ca"
_ENDS_IN_ABBREVIATION = re.compile(
    r"(?:^|[\s(\[\"'“‘])(?:" + "|".join(map(re.escape, _ABBREVIATIONS.split())) + r"|[^\W\d_])\.$"
)
# Linear in the text: a run of dots or of white space is entered at its first character only, and never twice.
_BREAK = re.compile(
    r"""(?<![.!?…؟।])(?P<dot>[.!?…؟।]++["'”’»)\]]*+)\s++(?=(?P<next>["'“‘«(\[]*\S))"""  # an end, space, what follows
    r"|(?P<wide>[。！？｡]+[」』”’）]*)\s*"
    r"|\n\s*\n\s*"
)


def split_sentences(text: str) -> list[str]:
    """The sentences without the white space around them, in order; [text] where there is none to split.

    "Dr. No came. He left!" -> ["Dr. No came.", "He left!"]."""
    sentences, start = [], 0
    for match in _BREAK.finditer(text):
        if match["dot"] is not None and not _ends_here(text, start, match):
            continue
        end = match.end("dot") if match["dot"] else match.end("wide") if match["wide"] else match.start()
        sentences.append(text[start:end].strip())
        start = match.end()
    sentences.append(text[start:].strip())
    return [sentence for sentence in sentences if sentence] or [text]


def _ends_here(text: str, start: int, match: re.Match[str]) -> bool:
    if match["next"][-1].islower():
        return False
    return not (
        match["dot"] == "." and _ENDS_IN_ABBREVIATION.search(text, max(start, match.end("dot") - 12), match.end("dot"))
    )

"""Sample k of a dataset: a pure function of (dataset, split, sequence length, seed, settings, k), in constant memory
and time.

Nothing is built before training and nothing is stored: resuming is the one integer k, on any number of ranks.
k -> phase and block -> source and its how-many-th sample -> epoch and keyed permutation of the epoch -> window."""

import itertools
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Self

import numpy as np

from gristmill.data_pipeline.indexed.config import IndexConfig
from gristmill.data_pipeline.indexed.dataset import (
    DATASET_NAME,
    CheckedSource,
    Dataset,
    FimIds,
    IndexedSource,
    manifest_digests,
    open_checked,
    read_dataset,
    source_prefix,
)
from gristmill.data_pipeline.indexed.draws import (
    Draw,
    DrawForecast,
    Schedule,
    cap_of,
    key_of,
    overdrawn,
    places_of_values,
)
from gristmill.data_pipeline.indexed.language_shares import language_of
from gristmill.data_pipeline.indexed.packing import (
    BestFit,
    Concat,
    DocumentPiece,
    Order,
    Packing,
    Window,
    WindowBatch,
    kept_first_windows,
)
from gristmill.foundation.errors import InputError, RecipeError
from gristmill.foundation.fingerprint import fingerprint

# Samples whose windows are looked up at once. A data rank that reads fewer in a row looks up some in vain, which costs
# less than the lookup itself.
BLOCK_SAMPLES = 128

Sample = dict[str, np.ndarray]
LogLine = Callable[[str], None]


class TooFewTokens(InputError):
    """A split has fewer tokens than one sample needs; its files are undamaged."""


class Samples(DrawForecast):
    """Made by `open_samples`. left_out names the sources of a held-out split that hold no whole sample."""

    def __init__(
        self,
        dataset: Dataset,
        packings: Mapping[str, Packing],
        sequence_length: int,
        seed: int,
        config: IndexConfig,
        identity: str,
    ):
        self.vocab_size, self.end_of_document = dataset.vocab_size, dataset.end_of_document
        self.sources = tuple(packings)
        self.left_out = tuple(source.name for source in dataset.sources if source.name not in packings)
        self.sequence_length, self.fingerprint = sequence_length, identity
        self._packings = tuple(packings.values())
        self._mask = config.mask_documents
        self._caps = [cap_of(config, name) for name in self.sources]
        self._seed = seed
        self._schedule = blend_schedule(dataset, self.sources, sequence_length, seed, config)
        self._fim = FillInTheMiddle.for_dataset(dataset, config, seed)
        self._order = lru_cache(maxsize=2 * len(self.sources))(self._epoch_order)
        self._running_positions = lru_cache(maxsize=4)(self._repeated_positions)
        self._located = lru_cache(maxsize=8)(self._located_block)
        self._positions = np.arange(sequence_length, dtype=np.int64)
        self._whole = np.array([0, sequence_length], dtype=np.int32)

    def sample(self, k: int) -> Sample:
        """tokens, targets, positions: int64[sequence_length]; weights: float32[sequence_length], 0 where nothing is
        learned; document_bounds: int32[n + 1] from 0 to sequence_length: attention stays between two of them.

        Without mask_documents the bounds are [0, sequence_length] and positions run through. Raises InputError if the
        source is drawn more often than its cap allows."""
        source, ordinal = self._schedule.locate(k)
        epoch, index = divmod(ordinal, self._packings[source].num_windows)
        self._check_cap(source, ordinal)
        window = self._packings[source].window(self._order(source, epoch)(index))
        if self._fim is not None:
            window = self._fim.apply(window, self.sources[source], k)
        weights = np.ones(self.sequence_length, dtype=np.float32)
        weights[max(0, window.num_valid - 1) :] = 0.0
        positions, bounds = self._positions.copy(), self._whole.copy()
        if self._mask:
            bounds = np.append(window.starts, self.sequence_length).astype(np.int32)
            positions -= np.repeat(bounds[:-1], np.diff(bounds))
            weights[bounds[1:-1] - 1] = 0.0  # the next document's first token cannot be told from this one
        return {
            "tokens": window.tokens[:-1],
            "targets": window.tokens[1:],
            "weights": weights,
            "positions": positions,
            "document_bounds": bounds,
        }

    def batch(self, numbers: Sequence[int]) -> Sample:
        """tokens, targets, weights and positions of many samples, each [N, sequence_length], and `documents`: int64,
        which document of its window each token is in (0 without mask_documents)."""
        if self._fim is not None:
            return _stacked([self.sample(k) for k in numbers])
        windows = self._windows(np.asarray(numbers, dtype=np.int64))
        if self._mask:
            positions, documents = windows.places()
        else:
            positions = self._running_positions(len(windows.tokens))
            documents = np.zeros(windows.tokens.shape, np.int64)
        return {
            "tokens": windows.tokens,
            "targets": windows.targets,
            "weights": windows.weights(self._mask),
            "positions": positions,
            "documents": documents,
        }

    def _windows(self, numbers_N: np.ndarray) -> WindowBatch:
        windows = WindowBatch.empty(len(numbers_N), self.sequence_length, self._mask)
        sources_N, ordinals_N, windows_N = self._located_many(numbers_N)
        for source, rows in places_of_values(sources_N):
            if self._caps[source] is not None:
                self._check_cap(source, int(ordinals_N[rows].max()))
            self._packings[source].fill(windows, rows, windows_N[rows])
        return windows

    def _repeated_positions(self, windows: int) -> np.ndarray:
        """int64[windows, T], which cannot be written to."""
        return np.broadcast_to(self._positions, (windows, self.sequence_length))

    def _located_many(self, numbers_N: np.ndarray) -> np.ndarray:
        """int64[3, N]: source, ordinal and window of each sample."""
        located_blocks = [
            (rows, self._located(block)[:, numbers_N[rows] - block * BLOCK_SAMPLES])
            for block, rows in places_of_values(numbers_N // BLOCK_SAMPLES)
        ]
        if len(located_blocks) == 1:
            return located_blocks[0][1]
        located_3N = np.empty((3, len(numbers_N)), np.int64)
        for rows, located in located_blocks:
            located_3N[:, rows] = located
        return located_3N

    def _located_block(self, block: int) -> np.ndarray:
        """int64[3, BLOCK_SAMPLES]: source, ordinal and window of the samples of a block."""
        numbers = np.arange(block * BLOCK_SAMPLES, (block + 1) * BLOCK_SAMPLES)
        sources, ordinals = self._schedule.locate_many(numbers)
        windows = np.empty_like(ordinals)
        for source, rows in places_of_values(sources):
            epochs, places = np.divmod(ordinals[rows], self._packings[source].num_windows)
            for epoch, chosen in places_of_values(epochs):
                windows[rows[chosen]] = self._order(source, epoch).many(places[chosen])
        return np.stack([sources, ordinals, windows])

    def pieces_of(self, k: int) -> tuple[str, int, list[DocumentPiece]]:
        """(source, epoch, the pieces of documents in sample k); each document is counted in the order of the source's
        .bin. Fill-in-the-middle moves tokens inside a document only."""
        source, ordinal = self._schedule.locate(k)
        epoch, index = divmod(ordinal, self._packings[source].num_windows)
        return self.sources[source], epoch, self._packings[source].pieces(self._order(source, epoch)(index))

    def samples_with(self, source: str, document: int, num_samples: int) -> list[tuple[int, int]]:
        """(k, epoch) of the samples among the first num_samples that hold tokens of this document, ascending."""
        place = self.sources.index(source)
        packing = self._packings[place]
        drawn = int(self._schedule.drawn(num_samples)[place])
        numbers = []
        for epoch in range(-(-drawn // packing.num_windows)):
            for window in packing.windows_of(document):
                ordinal = epoch * packing.num_windows + self._order(place, epoch).inverse(window)
                k = self._schedule.number_of(place, ordinal)
                if k is not None and k < num_samples:
                    numbers.append((k, epoch))
        return sorted(numbers)

    def source_of(self, k: int) -> str:
        return self.sources[self._schedule.locate(k)[0]]

    def samples_of(self, source: str) -> int:
        """How many samples one epoch of the source has."""
        return self._packings[self.sources.index(source)].num_windows

    def drawn(self, num_samples: int) -> list[Draw]:
        """Samples that a run of `num_samples` takes from each source, computed without drawing."""
        counts = self._schedule.drawn(num_samples).tolist()
        return [
            Draw(name, count, packing.num_windows, self.sequence_length, cap)
            for name, count, packing, cap in zip(self.sources, counts, self._packings, self._caps, strict=True)
        ]

    def _check_cap(self, source: int, ordinal: int) -> None:
        cap = self._caps[source]
        windows = self._packings[source].num_windows
        if cap is not None and ordinal + 1 > cap * windows:
            raise InputError(overdrawn(self.sources[source], (ordinal + 1) / windows, cap))

    def _epoch_order(self, source: int, epoch: int) -> Order:
        return self._packings[source].order(key_of(self._seed, "epoch", self.sources[source], epoch))


def open_samples(
    folder: Path, split: str, sequence_length: int, seed: int, config: IndexConfig, info: LogLine = lambda message: None
) -> Samples:
    """The samples of one split of an `index` folder, whose files are checked first (verify.py). info: of long work.

    What cannot fill one sample is left out, and said of the train split; a split in which nothing can is an error.
    Neither fill-in-the-middle nor caps apply to held-out text: it is measured as it stands, as often as one likes.
    Raises InputError on damaged files, TooFewTokens on too little data, RecipeError on settings that do not fit."""
    dataset = read_dataset(folder)
    digests = manifest_digests(folder)
    if split != "train":
        config = IndexConfig.model_validate({**config.model_dump(), "fim_rate": 0.0, "max_epochs": None})
    packings: dict[str, Packing] = {}
    too_short: list[str] = []
    cut = {source.name.partition(".")[0] for source in dataset.sources if "." in source.name}
    for source in dataset.sources:
        if not _is_trained_on(source, config):
            continue
        counts = source.splits.get(split)
        packing = None
        if counts is not None and counts.documents:
            checked = open_checked(folder, split, source, dataset, digests, info)
            packing = _open_packing(checked, folder, dataset, sequence_length, config, info)
        if packing is not None and packing.num_windows:
            packings[source.name] = packing
        elif split == "train" and _has_text_to_train(source, cut):
            too_short.append(_too_short(folder, split, source, sequence_length))
    if not packings:
        raise TooFewTokens(*too_short[:1] or [_too_short(folder, split, dataset.sources[0], sequence_length)])
    for line in too_short:
        info(f"NOT TRAINED ON: {line}")
    identity = fingerprint(
        [dataset.model_dump(mode="json"), split, sequence_length, seed, config.model_dump(mode="json")]
    )
    return Samples(dataset, packings, sequence_length, seed, config, identity)


def document_numbers(bounds: np.ndarray) -> np.ndarray:
    """Which document each token is in. [0, 3, 5] -> [0, 0, 0, 1, 1]."""
    return np.repeat(np.arange(len(bounds) - 1), np.diff(bounds))


def _stacked(samples: Sequence[Sample]) -> Sample:
    fields = {
        name: np.stack([sample[name] for sample in samples]) for name in ("tokens", "targets", "weights", "positions")
    }
    return {**fields, "documents": np.stack([document_numbers(sample["document_bounds"]) for sample in samples])}


def _has_text_to_train(source: IndexedSource, cut: Collection[str]) -> bool:
    """False for a language with held-out text alone, and for the held-out text of a source that is cut into others."""
    counts = source.splits.get("train")
    has_tokens = counts is not None and counts.tokens > 0
    return has_tokens or (language_of(source.name) is None and source.name not in cut)


def _is_trained_on(source: IndexedSource, config: IndexConfig) -> bool:
    """False for held-out sources and for languages of which there is held-out text alone."""
    named = source.weight > 0 or any(phase.weights.get(source.name) for phase in config.phases)
    train = source.splits.get("train")
    return named or (train is not None and train.documents > 0)


def _open_packing(
    checked: CheckedSource, folder: Path, dataset: Dataset, sequence_length: int, config: IndexConfig, info: LogLine
) -> Packing:
    end = dataset.end_of_document
    if config.packing == "concat":
        return Concat(checked.reader, sequence_length, end)
    return BestFit(
        checked.reader,
        sequence_length,
        end,
        kept_first_windows(folder, checked.reader, checked.identity, sequence_length, info),
    )


def _too_short(folder: Path, split: str, source: IndexedSource, sequence_length: int) -> str:
    counts = source.splits.get(split)
    tokens = counts.tokens if counts else 0
    return (
        f"{source_prefix(folder, split, source.name)}: {tokens} tokens, a sample of sequence length "
        f"{sequence_length} needs {sequence_length + 1}; set model.sequence_length to {max(1, tokens - 1)} or less, "
        "give the source more text, or drop it"
    )


def blend_schedule(
    dataset: Dataset, sources: tuple[str, ...], sample_tokens: int, seed: int, config: IndexConfig
) -> Schedule:
    """Which source each sample is drawn from, in the recipe's blend. sample_tokens: tokens that a sample takes."""
    phases = _phase_weights(dataset, sources, sample_tokens, config)
    return Schedule(sources, phases, config.block_samples, key_of(seed, "blend"))


def _phase_weights(
    dataset: Dataset, sources: tuple[str, ...], sequence_length: int, config: IndexConfig
) -> list[tuple[int, Mapping[str, float]]]:
    """(first sample, weights) of each phase; token counts are rounded up to whole samples."""
    weights = {source.name: source.weight for source in dataset.sources if source.name in sources}
    known = {source.name for source in dataset.sources}
    phases: list[tuple[int, Mapping[str, float]]] = []
    for number, phase in enumerate(config.phases):
        if unknown := sorted(phase.weights.keys() - known):
            raise RecipeError(
                f"index.phases.{number}.weights names {unknown}, the dataset holds {sorted(known)}; name one of these"
            )
        present = {name: weight for name, weight in phase.weights.items() if name in sources}
        if present:
            phases.append((-(-phase.from_tokens // sequence_length), present))
    if not config.phases and (idle := [name for name, weight in weights.items() if weight == 0]):
        raise InputError(
            f"{DATASET_NAME}: source {idle[0]!r} has weight 0 and no phase draws from it; drop the source, "
            "weigh it, or name it in index.phases"
        )
    return phases or [(0, weights)]


# Fill-in-the-middle (Bavarian et al. 2022, arXiv:2207.14255) on the tokens of a window, deterministic by sample.
#
# A document "a b c d e" cut at two random points becomes, prefix first, "<P> a b <S> d e <M> c" or, suffix first (the
# paper's SPM variant 2), "<P> <S> d e <M> a b c". Three tokens come in, so the window's last ones give way.

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

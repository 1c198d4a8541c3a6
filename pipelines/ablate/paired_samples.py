"""Training samples in an order that the arms of an ablation share, so that their noise is the same noise.

Two runs on equal text differ by their initial weights and by which documents they read, in which order. An ablation
compares arms, so both are drawn by seed and not by arm (common random numbers): a document has the same place in every
arm that keeps it, whatever curation did to its text and to the other documents.

Each seed reads documents of its own as far as there are enough: S seeds are S independent repetitions, and their spread
contains what another sample of raw documents would have changed."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import lru_cache
from pathlib import Path

import numpy as np

from gristmill.data_pipeline.indexed.config import IndexConfig
from gristmill.data_pipeline.indexed.dataset import read_dataset, source_prefix
from gristmill.data_pipeline.indexed.draws import Permutation, Schedule, key_of
from gristmill.data_pipeline.indexed.format import IndexedReader
from gristmill.data_pipeline.indexed.samples import TooFewTokens, blend_schedule
from gristmill.foundation.fingerprint import fingerprint
from gristmill.training.objectives.objective import stack_samples

KEYS_FOLDER = "keys"  # of an arm: SOURCE.npy, uint64[documents], a number of each document in the order of its text


@dataclass(frozen=True)
class DocumentDraw:
    """Which documents and which order.

    seed: of the order. Documents stand on a circle by their keys; those from `place` on (0 to 1) are drawn, at least a
    share of all, more where the tokens of the run need more. repetitions: source -> how often it is read, as in the run
    that the recipe describes; sources not named are read in part, or repeated where they have too little text."""

    seed: int
    place: float
    share: float
    tokens: int
    repetitions: Mapping[str, float] = field(default_factory=dict)


class PairedSamples:
    """Samples of an arm's index, in the form that training reads (indexed/samples.py), without document masks."""

    def __init__(self, index: Path, keys: Path, sequence_length: int, draw: DocumentDraw, config: IndexConfig):
        dataset = read_dataset(index)
        self.vocab_size, self.sequence_length = dataset.vocab_size, sequence_length
        self.sources = tuple(source.name for source in dataset.sources)
        self._schedule: Schedule = blend_schedule(dataset, self.sources, sequence_length, draw.seed, config)
        num_samples = -(-draw.tokens // sequence_length)
        drawn = self._schedule.drawn(num_samples).tolist()
        self._streams = [
            DocumentStream(
                IndexedReader(source_prefix(index, "train", name)),
                np.load(keys / f"{name}.npy"),
                sequence_length,
                draw,
                count * sequence_length / draw.repetitions.get(name, 1.0),
                draw.share if name not in draw.repetitions else 0.0,
            )
            for name, count in zip(self.sources, drawn, strict=True)
        ]
        self.fingerprint = fingerprint(
            [dataset.model_dump(mode="json"), sequence_length, asdict(draw), config.model_dump(mode="json")]
        )

    def batch(self, numbers: Sequence[int]) -> dict[str, np.ndarray]:
        """tokens, targets and weights of many samples, each [N, sequence_length]."""
        return stack_samples([self._sample(number) for number in numbers])

    def source_of(self, number: int) -> str:
        return self.sources[self._schedule.locate(number)[0]]

    def epochs(self, num_samples: int) -> dict[str, float]:
        """Source -> how often a run of num_samples reads each of the documents that it draws from."""
        drawn = self._schedule.drawn(num_samples).tolist()
        return {
            name: count / stream.num_windows
            for name, count, stream in zip(self.sources, drawn, self._streams, strict=True)
        }

    def _sample(self, number: int) -> dict[str, np.ndarray]:
        source, ordinal = self._schedule.locate(number)
        tokens = self._streams[source].window(ordinal).astype(np.int64)
        weights = np.ones(self.sequence_length, np.float32)
        return {"tokens": tokens[:-1], "targets": tokens[1:], "weights": weights}


class DocumentStream:
    """One source for one seed: pieces of sequence_length tokens of its documents, in an order that depends on the seed,
    the documents' keys and the pieces' numbers alone; windows are cut from them end to end, epoch after epoch.

    tokens, share: the fewest tokens of documents to draw from, by number and as a share of all; all of them where there
    are fewer. Raises TooFewTokens if the source has not enough for a window."""

    def __init__(
        self,
        reader: IndexedReader,
        keys_D: np.ndarray,
        sequence_length: int,
        draw: DocumentDraw,
        tokens: float,
        share: float,
    ):
        self._tokens, self._length, self._seed = reader.tokens, sequence_length, draw.seed
        starts_D, ends_D = reader.token_ranges(np.arange(len(reader)))
        circle_D = mix(keys_D)
        first = np.uint64(int(draw.place % 1 * 2**53) << 11)
        order_D = np.argsort(circle_D - first, kind="stable")  # of unsigned numbers: behind `first`, then around
        sizes_D = (ends_D - starts_D)[order_D]
        needed = max(tokens + sequence_length + 1, float(sizes_D.sum()) * share)
        chosen = order_D[: int(np.searchsorted(np.cumsum(sizes_D), needed)) + 1]
        self._pieces = pieces_of(starts_D[chosen], ends_D[chosen], keys_D[chosen], sequence_length)
        self.num_tokens = int((ends_D - starts_D)[chosen].sum())
        self.num_windows = (self.num_tokens - 1) // sequence_length
        if self.num_windows < 1:
            raise TooFewTokens(
                f"{reader.prefix}: {self.num_tokens} tokens, a sample needs {sequence_length + 1}; give the source "
                "more text, or drop it"
            )
        self._order = lru_cache(maxsize=2)(self._epoch_order)

    def window(self, ordinal: int) -> np.ndarray:
        """The tokens of the ordinal-th window, one more than a sequence."""
        epoch, window = divmod(ordinal, self.num_windows)
        starts_P, offsets_P = self._order(epoch)
        first, last = window * self._length, (window + 1) * self._length + 1
        piece = int(np.searchsorted(offsets_P, first, side="right")) - 1
        parts: list[np.ndarray] = []
        while first < last:
            end = min(last, int(offsets_P[piece + 1]))
            start = int(starts_P[piece]) + first - int(offsets_P[piece])
            parts.append(self._tokens[start : start + end - first])
            first, piece = end, piece + 1
        return np.concatenate(parts)

    def _epoch_order(self, epoch: int) -> tuple[np.ndarray, np.ndarray]:
        """(int64[pieces], first token of each piece in its order; int64[pieces + 1], its place in the stream)."""
        starts_P, sizes_P, keys_P = self._pieces
        order_P = np.argsort(mix(keys_P ^ np.uint64(key_of(self._seed, "pieces", epoch))), kind="stable")
        offsets_P = np.concatenate([[0], np.cumsum(sizes_P[order_P])])
        return starts_P[order_P], offsets_P


def pieces_of(
    starts_D: np.ndarray, ends_D: np.ndarray, keys_D: np.ndarray, size: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(first token, number of tokens and key of each piece of `size` tokens of these documents, the last ones shorter).
    A document of 5 tokens that begins at 10, size 2 -> starts 10, 12, 14, sizes 2, 2, 1."""
    counts_D = -(-(ends_D - starts_D) // size)
    document_P = np.repeat(np.arange(len(starts_D)), counts_D)
    number_P = np.arange(len(document_P)) - np.repeat(np.cumsum(counts_D) - counts_D, counts_D)
    starts_P = starts_D[document_P] + number_P * size
    sizes_P = np.minimum(size, ends_D[document_P] - starts_P)
    return starts_P, sizes_P, mix(keys_D[document_P] + mix(number_P.astype(np.uint64)))


def mix(values: np.ndarray) -> np.ndarray:
    """uint64 -> uint64, the finalizer of SplitMix64 (Steele, Lea, Flood 2014): neighbours get unrelated numbers."""
    mixed = values + np.uint64(0x9E3779B97F4A7C15)
    mixed = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return mixed ^ (mixed >> np.uint64(31))


def write_keys(doc_ids: Sequence[str], source: str, seed: int, folder: Path) -> None:
    """Writes FOLDER/SOURCE.npy: the documents' keys in the order of the source's index, whose documents are shuffled by
    the corpus's seed (tokenizers/index_corpus.py)."""
    keys = np.array([int(doc_id[:16], 16) for doc_id in doc_ids], np.uint64)
    order = Permutation(len(keys), key_of(seed, "documents", source, "train")).whole()
    folder.mkdir(parents=True, exist_ok=True)
    np.save(folder / f"{source}.npy", keys[order])

"""Which source does sample k come from, and which of the source's samples is it? Random access, exact shares, no index.

Time is cut into blocks of B samples and rounds of P blocks. Weights are rounded once, by largest remainder, to whole
samples of a round (B * P), so nothing drifts from round to round. Of its count c in a round a source has c // P samples
in every block; the c % P left over are spread evenly over the blocks by systematic sampling at bit-reversed offsets.
So a block differs from the exact share by less than one sample of each source, and a round by less than one as well.
Inside a block a keyed permutation places the samples."""

from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache

import numpy as np

from gristmill.data_pipeline.indexed.permutation import Permutation, key_of

# Blocks in a round: weights are resolved to 1 / (B * 1024), one in a million samples at the usual B of 1024.
ROUND_BLOCKS = 1024


def largest_remainder(weights: Sequence[float], total: int) -> list[int]:
    """Whole shares of `total`, each off the exact share by less than one; ties go to the earlier source.

    ([0.5, 0.3, 0.2], 4) -> [2, 1, 1]: exact shares 2.0, 1.2 and 0.8; the one sample left goes to 0.8."""
    exact = [weight / sum(weights) * total for weight in weights]
    shares = [int(share) for share in exact]
    by_remainder = sorted(range(len(weights)), key=lambda index: (shares[index] - exact[index], index))
    for index in by_remainder[: total - sum(shares)]:
        shares[index] += 1
    return shares


def round_counts(weights: Sequence[float], block_samples: int, num_blocks: int = ROUND_BLOCKS) -> np.ndarray:
    """int64[P, S]: samples of each source in each block of a round; every row sums to B.

    ([0.7, 0.3], B=1, P=4): the round holds 3 and 1 samples, in the blocks [[1, 0], [1, 0], [1, 0], [0, 1]].
    P is a power of two."""
    in_round = np.array(largest_remainder(weights, block_samples * num_blocks), dtype=np.int64)
    whole, left = np.divmod(in_round, num_blocks)
    edges = np.concatenate([[0], np.cumsum(left)])
    offsets = _bit_reversed(num_blocks)[:, None]
    # Multiples m * P + offset below an edge: a source gains one where such a point lies between its two edges.
    points_below = (edges[None, :] - offsets + num_blocks - 1) // num_blocks
    return whole[None, :] + np.diff(points_below, axis=1)


def _bit_reversed(size: int) -> np.ndarray:
    """int64[size], size a power of two: 8 -> [0, 4, 2, 6, 1, 5, 3, 7]; any run of it is spread evenly."""
    order = np.zeros(1, dtype=np.int64)
    while len(order) < size:
        order = np.concatenate([order * 2, order * 2 + 1])
    return order


def places_of_values(values: np.ndarray) -> Iterator[tuple[int, np.ndarray]]:
    """[5, 2, 5] -> (2, [1]), (5, [0, 2]): where each value stands."""
    distinct = sorted(set(values.tolist()))
    if len(distinct) == 1:
        yield distinct[0], np.arange(len(values))
        return
    for value in distinct:
        yield value, (values == value).nonzero()[0]


class Blend:
    """The stream of one phase: slot j (0, 1, 2 ...) -> (source index, how many of that source came before).

    Memory: one table of (P + 1) * S numbers and the last few blocks; a pure function of (weights, B, key)."""

    def __init__(self, weights: Sequence[float], block_samples: int, key: int):
        self.block_samples = block_samples
        self._key = key
        counts = round_counts(weights, block_samples)
        self._before = np.concatenate([np.zeros((1, len(weights)), np.int64), np.cumsum(counts, axis=0)])
        # Neighbouring samples share a block; 8 blocks hold whatever order a batch reads them in.
        self._placed = lru_cache(maxsize=8)(self._place)

    def locate(self, slot: int) -> tuple[int, int]:
        block, inside = divmod(slot, self.block_samples)
        sources, ordinals = self._placed(block)
        return int(sources[inside]), int(ordinals[inside])

    def locate_many(self, slots: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """int64 each: `locate` of all these slots."""
        blocks, inside = np.divmod(slots, self.block_samples)
        located = np.empty((2, len(slots)), np.int64)
        for block, chosen in places_of_values(blocks):
            for column, values in zip(located, self._placed(block), strict=True):
                column[chosen] = values[inside[chosen]]
        return located[0], located[1]

    def slot_of(self, source: int, ordinal: int) -> int | None:
        """The slot of the sample before which `ordinal` of the source came; None if the blend never draws it."""
        in_round = self._before[:, source]
        if not in_round[-1]:
            return None
        rounds, left = divmod(ordinal, int(in_round[-1]))
        block = rounds * (len(in_round) - 1) + int(np.searchsorted(in_round, left, side="right")) - 1
        sources, ordinals = self._placed(block)
        return block * self.block_samples + int(np.flatnonzero((sources == source) & (ordinals == ordinal))[0])

    def drawn(self, num_slots: int) -> np.ndarray:
        """int64[S]: samples of each source among the first `num_slots`."""
        block, inside = divmod(num_slots, self.block_samples)
        counts = self._before_block(block)
        if inside:
            sources, _ = self._placed(block)
            counts = counts + np.bincount(sources[:inside], minlength=len(counts))
        return counts

    def _before_block(self, block: int) -> np.ndarray:
        rounds, in_round = divmod(block, len(self._before) - 1)
        return rounds * self._before[-1] + self._before[in_round]

    def _place(self, block: int) -> tuple[np.ndarray, np.ndarray]:
        """Source of every slot of the block, and how many samples of that source stand before it in the blend."""
        before = self._before_block(block)
        counts = self._before_block(block + 1) - before
        edges = np.cumsum(counts)
        ranks = Permutation(self.block_samples, key_of(self._key, block)).whole()
        sources = np.searchsorted(edges, ranks, side="right")
        by_source = np.argsort(sources, kind="stable")
        ordinals = np.empty(self.block_samples, dtype=np.int64)
        ordinals[by_source] = np.arange(self.block_samples) + np.repeat(before - (edges - counts), counts)
        return sources, ordinals


class Schedule:
    """Phases one after another: sample k -> (source index, how many of that source came before in the whole run).

    phases: (first sample, weight by source name) in rising order, the first at 0."""

    def __init__(
        self, names: Sequence[str], phases: Sequence[tuple[int, Mapping[str, float]]], block_samples: int, key: int
    ):
        self._starts = [start for start, _ in phases]
        self._blends = [
            Blend([weights.get(name, 0.0) for name in names], block_samples, key_of(key, number))
            for number, (_, weights) in enumerate(phases)
        ]
        self._drawn_before = [np.zeros(len(names), np.int64)]
        for number in range(len(phases) - 1):
            length = self._starts[number + 1] - self._starts[number]
            self._drawn_before.append(self._drawn_before[-1] + self._blends[number].drawn(length))

    def locate(self, k: int) -> tuple[int, int]:
        phase = self.phase_of(k)
        source, ordinal = self._blends[phase].locate(k - self._starts[phase])
        return source, ordinal + int(self._drawn_before[phase][source])

    def locate_many(self, samples: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """int64 each: `locate` of all these samples."""
        phases = np.searchsorted(self._starts, samples, side="right") - 1
        sources, ordinals = np.empty((2, len(samples)), np.int64)
        for phase, chosen in places_of_values(phases):
            sources[chosen], ordinals[chosen] = self._blends[phase].locate_many(samples[chosen] - self._starts[phase])
            ordinals[chosen] += self._drawn_before[phase][sources[chosen]]
        return sources, ordinals

    def number_of(self, source: int, ordinal: int) -> int | None:
        """The sample k that `locate` maps to (source, ordinal); None if no phase draws so many of the source."""
        for phase, blend in enumerate(self._blends):
            before = int(self._drawn_before[phase][source])
            is_last = phase + 1 == len(self._blends)
            if is_last or ordinal < self._drawn_before[phase + 1][source]:
                slot = blend.slot_of(source, ordinal - before)
                return None if slot is None else slot + self._starts[phase]
        return None

    def phase_of(self, k: int) -> int:
        phase = len(self._starts) - 1
        while k < self._starts[phase]:
            phase -= 1
        return phase

    def drawn(self, num_samples: int) -> np.ndarray:
        """int64[S]: samples of each source among the first `num_samples`."""
        phase = self.phase_of(num_samples)
        return self._drawn_before[phase] + self._blends[phase].drawn(num_samples - self._starts[phase])

"""Draws of samples without an index: keyed permutations, the source of sample k, how often a run sees each source."""

import hashlib
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from gristmill.data_pipeline.indexed.config import IndexConfig, PhaseConfig
from gristmill.foundation.errors import InputError
from gristmill.foundation.fingerprint import INCREMENT, MULTIPLIER_1, MULTIPLIER_2, mix
from gristmill.foundation.runtime.kernels.cached_njit import cached_njit

# Keyed permutations computed in place: position i of a shuffled order, without the order.
#
# A generalized Feistel network with cycle walking (Black and Rogaway 2002, "Ciphers with Arbitrary Finite Domains",
# methods 2 and 3): numbers below `size` are written in two digits of base ceil(sqrt(size)); each round swaps the
# digits and adds a keyed hash of one to the other, which is a bijection of the square; a result outside [0, size) goes
# through the network again until it falls inside.


# Luby and Rackoff need 4 rounds for large domains; small ones (a few documents) mix well from 6 on.
ROUNDS = 6

_MASK = (1 << 64) - 1


def key_of(*purpose: int | str) -> int:
    """64 bits that depend on every word of the purpose: key_of(1234, "samples", "books", 0)."""
    words = "\x1f".join(f"{type(word).__name__}:{word}" for word in purpose)
    return int.from_bytes(hashlib.sha256(words.encode()).digest()[:8], "little")


class Permutation:
    """A bijection of range(size), a pure function of (size, key); constant memory, a few microseconds a value.

    Permutation(5, key_of("doc"))(i) for i in 0..4 gives each of 0..4 once."""

    def __init__(self, size: int, key: int):
        if size < 1:
            raise ValueError(f"a permutation of {size} things; the size is 1 or more")
        self.size = size
        self._side = math.isqrt(size - 1) + 1  # ceil(sqrt(size)), exact for any integer
        self._keys = [mix((key + (round_index + 1) * INCREMENT) & _MASK) for round_index in range(ROUNDS)]

    def __call__(self, index: int) -> int:
        if not 0 <= index < self.size:
            raise IndexError(f"position {index} of a permutation of {self.size}")
        side = self._side
        value = index
        while True:
            left, right = divmod(value, side)
            for key in self._keys:
                left, right = right, (left + mix(right ^ key)) % side
            value = left * side + right
            if value < self.size:
                return value

    def inverse(self, value: int) -> int:
        """The position of this value: the rounds backwards, with the same cycle walking."""
        if not 0 <= value < self.size:
            raise IndexError(f"value {value} of a permutation of {self.size}")
        side = self._side
        index = value
        while True:
            left, right = divmod(index, side)
            for key in reversed(self._keys):
                left, right = (right - mix(left ^ key)) % side, left
            index = left * side + right
            if index < self.size:
                return index

    def whole(self) -> np.ndarray:
        """int64[size]: every value in order."""
        return self.many(np.arange(self.size, dtype=np.int64))

    def many(self, indices: np.ndarray) -> np.ndarray:
        """int64 of the same shape: the values at these positions, by the same arithmetic on arrays."""
        values = np.empty(indices.shape, np.int64)
        _permute(indices, np.uint64(self.size), np.uint64(self._side), np.array(self._keys, np.uint64), values)
        return values


@cached_njit(forceinline=True)
def _mix_word(word):
    """splitmix64.mix of a uint64."""
    word = (word ^ (word >> np.uint64(30))) * np.uint64(MULTIPLIER_1)
    word = (word ^ (word >> np.uint64(27))) * np.uint64(MULTIPLIER_2)
    return word ^ (word >> np.uint64(31))


@cached_njit()
def _permute(indices, size, side, keys, values):
    for place in range(len(indices)):
        value = np.uint64(indices[place])
        while True:
            left, right = value // side, value % side
            for key in keys:
                left, right = right, (left + _mix_word(right ^ key) % side) % side
            value = left * side + right
            if value < size:
                break
        values[place] = value


# Which source does sample k come from, and which of the source's samples is it? Random access, exact shares, no index.
#
# Time is cut into blocks of B samples and rounds of P blocks. Weights are rounded once, by largest remainder, to whole
# samples of a round (B * P), so nothing drifts from round to round. Of its count c in a round a source has c // P
# samples in every block; the c % P left over are spread evenly over the blocks by systematic sampling at bit-reversed
# offsets. So a block differs from the exact share by less than one sample of each source, and a round by less than one
# as well. Inside a block a keyed permutation places the samples.

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


# How often a run sees each source, computed without drawing: from token counts, weights and the tokens of the run.

# Up to 4 epochs of repeated data change the loss little against as much new data; from there on its value falls
# (Muennighoff et al. 2023, "Scaling Data-Constrained Language Models", arXiv:2305.16264, abstract).
MAX_EPOCHS_UNWARNED = 4.0


def blend_weights(weights: Mapping[str, float | None], tokens: Mapping[str, int]) -> dict[str, float]:
    """The weights as they are given, or, where none is, each source's share of the tokens.

    ({"a": None, "b": None}, {"a": 300, "b": 100}) -> {"a": 0.75, "b": 0.25}. Raises ValueError if only some are
    given: whether a missing one means 1, a share of the tokens or what the others leave cannot be told."""
    check_all_or_none(weights)
    total = max(1, sum(tokens.values()))
    return {name: tokens[name] / total if weight is None else weight for name, weight in weights.items()}


def check_all_or_none(weights: Mapping[str, float | None]) -> None:
    given = [name for name, weight in weights.items() if weight is not None]
    missing = [name for name, weight in weights.items() if weight is None]
    if given and missing:
        raise ValueError(
            f"source {given[0]!r} has a weight and source {missing[0]!r} has none; give every source a weight, or "
            "none: then each is drawn in proportion to its tokens"
        )


def tokens_drawn(
    weights: Mapping[str, float], train_tokens: int, phases: Sequence[PhaseConfig] = ()
) -> dict[str, float]:
    """Tokens that a run of `train_tokens` takes from each source; phases replace the weights, as in a run.

    ({"a": 3.0, "b": 1.0}, 400) -> {"a": 300.0, "b": 100.0}."""
    drawn = dict.fromkeys(weights, 0.0)
    stretches: list[tuple[int, Mapping[str, float]]] = [(phase.from_tokens, phase.weights) for phase in phases]
    stretches = stretches or [(0, weights)]
    ends = [start for start, _ in stretches[1:]] + [train_tokens]
    for (start, shares), end in zip(stretches, ends, strict=True):
        present = {name: share for name, share in shares.items() if name in drawn}
        for name, share in present.items():
            drawn[name] += max(0, min(end, train_tokens) - start) * share / sum(present.values())
    return drawn


def epochs_by_source(
    tokens: Mapping[str, int],
    weights: Mapping[str, float | None],
    train_tokens: int,
    phases: Sequence[PhaseConfig] = (),
) -> dict[str, float]:
    """How often a run of `train_tokens` sees the tokens of each source; sources without tokens are left out.

    tokens {"a": 100, "b": 10}, weights 3 and 1, 400 tokens -> {"a": 3.0, "b": 10.0}."""
    drawn = tokens_drawn(blend_weights(weights, tokens), train_tokens, phases)
    return {name: drawn[name] / tokens[name] for name in tokens if tokens[name]}


def repeat_warnings(epochs: Mapping[str, float], tokens: Mapping[str, int], train_tokens: int) -> list[str]:
    """A line for each source that is seen more than 4 times, with the numbers and what to change."""
    return [
        f"warning: source {name!r} has {tokens[name]:,} tokens and is seen {times:.1f} times in a run of "
        f"{train_tokens:,}; text repeated more than {MAX_EPOCHS_UNWARNED:g} times teaches little: give it a share of "
        f"{MAX_EPOCHS_UNWARNED * tokens[name] / train_tokens:.2%} or less, train on fewer tokens, or add text"
        for name, times in epochs.items()
        if times > MAX_EPOCHS_UNWARNED
    ]


@dataclass(frozen=True)
class Draw:
    """Samples that a run takes from one source. epoch_samples: samples in one pass over it. cap: of the passes."""

    source: str
    samples: int
    epoch_samples: int
    sample_tokens: int
    cap: float | None

    @property
    def tokens(self) -> int:
        return self.samples * self.sample_tokens

    @property
    def epochs(self) -> float:
        """How often the run sees the source."""
        return self.samples / self.epoch_samples


class DrawForecast:
    """Forecasts for a run of `num_samples`, from what a subclass gives as `drawn`."""

    def drawn(self, num_samples: int) -> list[Draw]:
        raise NotImplementedError

    def budget(self, num_samples: int) -> str:
        """The draws of a run in a line: "books 75.0% (12,288 tokens, 0.41 epochs), notes 25.0% (...)"."""
        draws = self.drawn(num_samples)
        whole = max(1, sum(draw.tokens for draw in draws))
        return ", ".join(
            f"{draw.source} {draw.tokens / whole:.1%} ({draw.tokens:,} tokens, {draw.epochs:.2f} epochs)"
            for draw in draws
        )

    def repeat_warnings(self, num_samples: int) -> list[str]:
        """A line for each source that a run of `num_samples` sees more than 4 times."""
        draws = self.drawn(num_samples)
        epochs = {draw.source: draw.epochs for draw in draws}
        tokens = {draw.source: draw.epoch_samples * draw.sample_tokens for draw in draws}
        return repeat_warnings(epochs, tokens, sum(draw.tokens for draw in draws))

    def check_budget(self, num_samples: int) -> None:
        """Raises InputError, before training starts, if a run of `num_samples` would overdraw a capped source."""
        for draw in self.drawn(num_samples):
            if draw.cap is not None and draw.epochs > draw.cap:
                raise InputError(overdrawn(draw.source, draw.epochs, draw.cap))


def cap_of(config: IndexConfig, source: str) -> float | None:
    return config.max_epochs.get(source) if isinstance(config.max_epochs, dict) else config.max_epochs


def overdrawn(source: str, epochs: float, cap: float) -> str:
    return (
        f"source {source!r} would be seen {epochs:.2f} times, its cap is {cap}; train on fewer tokens, lower the "
        "source's weight, give it more text, or raise index.max_epochs"
    )

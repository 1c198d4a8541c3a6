"""The second stage: features of text blocks (those of the first stage, then what it says of the block's surroundings;
SECOND_FEATURES names them in the order in which the kernels write them), and the network that decides, together with
trees, from them and from the blocks around, of the same path and of the same items."""

from typing import NamedTuple

import numpy as np

from gristmill.data_pipeline.extraction.attributes import (
    ELEMENT,
    END,
    PARENT,
    PATH_HASH,
    START,
)
from gristmill.data_pipeline.extraction.block_features import (
    FIRST_FEATURES,
    G_BYTES,
    G_LIKELY,
    GROUP_SLOTS,
    NUM_FIRST,
    ratio,
)
from gristmill.data_pipeline.extraction.page_stats import (
    BYTES,
    I_BYTES,
    I_LIKELY,
    ITEM,
    ITEM_SLOTS,
    LIKELY_BYTES,
    P_BLOCKS,
    P_CARDS,
    P_ITEM_SLOT,
    P_LARGEST,
    P_READABLE_BEST,
    SECTION,
    WORDS,
    item_slot,
)
from gristmill.data_pipeline.signals.intrinsics import add_products_48
from gristmill.foundation.runtime.kernels.cached_njit import cached_njit

SECOND_FEATURES = (
    *FIRST_FEATURES,
    *(f"probability{offset:+d}" for offset in range(-4, 5)),
    *(
        f"{place}_probability"
        for place in ("element", "parent", "grandparent", "readable", "largest", "path", "page", "item", "item_group")
    ),
    "section_probability",
    "main_group_probability",
    "cards_probability",
    "blocks_since_likely",
    "blocks_to_likely",
    "bytes_since_likely",
    "bytes_to_likely",
    "likely_before",
    "likely_after",
    "run_blocks",
    "run_bytes",
    "place_in_run",
    "likely_bytes",
    "largest_probability",
)
NUM_SECOND = len(SECOND_FEATURES)
LIKELY = 0.5
# Columns of runs, float32[B, 10]. SECTION_LIKELY, SECTION_BYTES: in the row of a section's heading, and in the first
# row for the blocks before all headings.
SINCE, TO, BYTES_SINCE, BYTES_TO, BEFORE, RUN_BLOCKS, RUN_BYTES, PLACE, SECTION_LIKELY, SECTION_BYTES = range(10)
NUM_RUNS = 10


@cached_njit(nogil=True)
def sum_probabilities(p, elements, num_elements, blocks, num_blocks, counts, sums, groups, items, runs):
    """Fill LIKELY_BYTES of sums, groups and items (probability times bytes, by element, path and item) and the runs of
    likely blocks; returns (bytes of likely blocks, largest probability). p: float32[B], of the first stage."""
    sums[:num_elements, LIKELY_BYTES] = 0
    groups[:, G_LIKELY] = 0
    runs[:, SECTION_LIKELY:] = 0
    for k in range(num_blocks):
        e, size = blocks[k, ELEMENT], blocks[k, END] - blocks[k, START]
        heading = max(counts[k, SECTION], 0)
        runs[heading, SECTION_LIKELY] += p[k] * size
        runs[heading, SECTION_BYTES] += size
        sums[e, LIKELY_BYTES] += p[k] * size
        groups[elements[e, PATH_HASH] & (GROUP_SLOTS - 1), G_LIKELY] += p[k] * size
    for e in range(num_elements - 1, 0, -1):
        sums[elements[e, PARENT], LIKELY_BYTES] += sums[e, LIKELY_BYTES]
    items[:, I_LIKELY] = 0
    for e in range(1, num_elements):
        items[item_slot(elements, e), I_LIKELY] += sums[e, LIKELY_BYTES]
    since, size_since, before, highest = 1000, 0, 0.0, 0.0
    for k in range(num_blocks):
        size = blocks[k, END] - blocks[k, START]
        runs[k, SINCE], runs[k, BYTES_SINCE], runs[k, BEFORE] = since, size_since, before
        likely = p[k] >= LIKELY
        since, size_since = (0, 0) if likely else (min(since + 1, 1000), size_since + size)
        before += size if likely else 0
        joined = likely and k > 0 and p[k - 1] >= LIKELY
        runs[k, PLACE] = (runs[k - 1, PLACE] + 1 if joined else 1) if likely else 0
        runs[k, RUN_BYTES] = (runs[k - 1, RUN_BYTES] + size if joined else size) if likely else 0
        highest = max(highest, p[k])
    to, size_to = 1000, 0
    for k in range(num_blocks - 1, -1, -1):
        runs[k, TO], runs[k, BYTES_TO] = to, size_to
        likely = p[k] >= LIKELY
        joined = likely and k + 1 < num_blocks and p[k + 1] >= LIKELY
        runs[k, RUN_BLOCKS] = runs[k + 1, RUN_BLOCKS] if joined else runs[k, PLACE]
        runs[k, RUN_BYTES] = runs[k + 1, RUN_BYTES] if joined else runs[k, RUN_BYTES]
        to, size_to = (0, 0) if likely else (min(to + 1, 1000), size_to + blocks[k, END] - blocks[k, START])
    return before, highest


@cached_njit(nogil=True)
def _likely_share(sums, e):
    return ratio(sums[e, LIKELY_BYTES], sums[e, BYTES])


@cached_njit(nogil=True)
def second_features(k, p, totals, elements, blocks, counts, sums, groups, items, runs, page, row):
    """Add the second stage's features behind the NUM_FIRST that are in the row. totals: of sum_probabilities."""
    at, num_blocks = NUM_FIRST, np.int64(page[P_BLOCKS])
    for offset in range(-4, 5):
        j = k + offset
        row[at] = p[j] if 0 <= j < num_blocks else -1
        at += 1
    e = blocks[k, ELEMENT]
    parent = elements[e, PARENT]
    row[at] = _likely_share(sums, e)
    row[at + 1] = _likely_share(sums, parent)
    row[at + 2] = _likely_share(sums, elements[parent, PARENT])
    row[at + 3] = _likely_share(sums, np.int64(page[P_READABLE_BEST]))
    row[at + 4] = _likely_share(sums, np.int64(page[P_LARGEST]))
    at += 5
    slot = elements[e, PATH_HASH] & (GROUP_SLOTS - 1)
    row[at] = ratio(groups[slot, G_LIKELY], groups[slot, G_BYTES])
    row[at + 1] = ratio(sums[0, LIKELY_BYTES], sums[0, BYTES])
    item = np.int64(sums[e, ITEM])
    row[at + 2] = _likely_share(sums, item)
    slot = item_slot(elements, item)
    row[at + 3] = ratio(items[slot, I_LIKELY], items[slot, I_BYTES])
    heading, slot = max(counts[k, SECTION], 0), np.int64(page[P_ITEM_SLOT])
    row[at + 4] = ratio(runs[heading, SECTION_LIKELY], runs[heading, SECTION_BYTES])
    row[at + 5] = ratio(items[slot, I_LIKELY], items[slot, I_BYTES]) if slot >= 0 else -1
    cards = np.int64(page[P_CARDS])
    row[at + 6] = _likely_share(sums, cards) if cards else -1
    at += 5
    row[at + 2] = runs[k, SINCE]
    row[at + 3] = runs[k, TO]
    row[at + 4] = runs[k, BYTES_SINCE]
    row[at + 5] = runs[k, BYTES_TO]
    row[at + 6] = ratio(runs[k, BEFORE], totals[0])
    row[at + 7] = totals[0] - runs[k, BEFORE]
    row[at + 8] = runs[k, RUN_BLOCKS]
    row[at + 9] = runs[k, RUN_BYTES]
    row[at + 10] = runs[k, PLACE]
    row[at + 11] = totals[0]
    row[at + 12] = totals[1]


# Inputs of the network: the features of the second stage and the log-odds of the first, on a scale of logarithms.
NUM_INPUTS = NUM_SECOND + 1
WIDTH, LAYERS = 48, 2
# What a layer sees of each block: itself, the block before it and behind it, and the means over the GROUPINGS sets of
# blocks that it is in: of its path, its item, its group of items, and the page.
GROUPINGS = 4
NUM_PARTS = 3 + GROUPINGS
MAX_INPUT, MAX_ODDS = np.float32(4.0), np.float32(1e4)
ONE_BITS, BIT = np.int32(0x3F800000), np.float32(2.0**-23)
MIN_MEAN_WEIGHT = np.float32(0.1)


class Network(NamedTuple):
    """float32 arrays of NETWORK_SHAPES. means, scales: what is taken from each input, and what it is multiplied with.
    A block's state is relu(inputs first) at first; each layer adds relu([parts of the state] mixes) outs to it; the
    log-odds are state last. Each has its biases."""

    means: np.ndarray
    scales: np.ndarray
    first: np.ndarray
    first_bias: np.ndarray
    mixes: np.ndarray
    mix_bias: np.ndarray
    outs: np.ndarray
    out_bias: np.ndarray
    last: np.ndarray
    last_bias: np.ndarray


NETWORK_SHAPES = {
    "means": (NUM_INPUTS,), "scales": (NUM_INPUTS,), "first": (NUM_INPUTS, WIDTH), "first_bias": (WIDTH,),
    "mixes": (LAYERS, NUM_PARTS * WIDTH, WIDTH), "mix_bias": (LAYERS, WIDTH), "outs": (LAYERS, WIDTH, WIDTH),
    "out_bias": (LAYERS, WIDTH), "last": (WIDTH,), "last_bias": (1,),
}  # fmt: skip


@cached_njit(nogil=True)
def scale_inputs(rows, p):
    """Turn features into inputs: the sign and about the binary logarithm of 1 + |x|, which is linear between powers of
    two and the same on every machine; and in the last column that of the odds of p (float32[N], of the first stage)."""
    bits = rows.view(np.int32)
    for k in range(len(rows)):
        for column in range(NUM_SECOND):
            value = rows[k, column]
            rows[k, column] = np.float32(1) + abs(value)
            logarithm = np.float32(bits[k, column] - ONE_BITS) * BIT
            rows[k, column] = -logarithm if value < 0 else logarithm
        odds = min(p[k] / max(np.float32(1) - p[k], np.float32(1) / MAX_ODDS), MAX_ODDS)
        rows[k, NUM_SECOND] = max(odds, np.float32(1) / MAX_ODDS)
        rows[k, NUM_SECOND] = np.float32(bits[k, NUM_SECOND] - ONE_BITS) * BIT


@cached_njit(nogil=True)
def find_groups(chosen, elements, blocks, sums, groups):
    """Fill groups (int32[GROUPINGS, N]) with the number, from 0, of the chosen blocks' path, item, group of items and
    page; returns int64[GROUPINGS], how many there are of each."""
    numbers = np.full((GROUPINGS, max(GROUP_SLOTS, ITEM_SLOTS, len(elements))), -1, np.int32)
    counts, slots = np.zeros(GROUPINGS, np.int64), np.zeros(GROUPINGS, np.int64)
    for k in range(len(chosen)):
        e = blocks[chosen[k], ELEMENT]
        item = np.int64(sums[e, ITEM])
        slots[0] = elements[e, PATH_HASH] & (GROUP_SLOTS - 1)
        slots[1], slots[2] = item, item_slot(elements, item)
        for grouping in range(GROUPINGS):
            if numbers[grouping, slots[grouping]] < 0:
                numbers[grouping, slots[grouping]] = counts[grouping]
                counts[grouping] += 1
            groups[grouping, k] = numbers[grouping, slots[grouping]]
    return counts


@cached_njit(nogil=True)
def mean_weights(chosen, counts, weights):
    """Fill weights (float32[N]): what the chosen blocks count in the mean of a group, about the logarithm of their
    words."""
    bits = weights.view(np.int32)
    for k in range(len(chosen)):
        weights[k] = np.float32(1 + counts[chosen[k], WORDS])
        weights[k] = np.float32(bits[k] - ONE_BITS) * BIT + MIN_MEAN_WEIGHT


@cached_njit(nogil=True)
def _add_products(x, weights, result):
    """Add x weights to the result, float32[N, WIDTH]. Two blocks and four of their inputs together, for which weights
    and results are loaded once; a block's sums do not depend on the blocks beside it."""
    num_blocks, num_inputs = x.shape
    for k in range(0, num_blocks, 2):
        add_products_48(x, weights, result, k, min(k + 1, num_blocks - 1))  # an odd last block is computed twice
    for j in range(num_inputs // 4 * 4, num_inputs):
        for k in range(num_blocks):
            for o in range(WIDTH):
                result[k, o] += x[k, j] * weights[j, o]


@cached_njit(nogil=True)
def _add_means(state, weights, group, count, mix, result):
    """Add to the result (float32[N, WIDTH]) the mean of the state in each block's group, times mix."""
    means, totals = np.zeros((count, WIDTH), np.float32), np.zeros(count, np.float32)
    for k in range(len(state)):
        totals[group[k]] += weights[k]
        for o in range(WIDTH):
            means[group[k], o] += weights[k] * state[k, o]
    for g in range(count):
        for o in range(WIDTH):
            means[g, o] /= totals[g]
    mixed = np.zeros((count, WIDTH), np.float32)
    _add_products(means, mix, mixed)
    for k in range(len(state)):
        for o in range(WIDTH):
            result[k, o] += mixed[group[k], o]


@cached_njit(nogil=True)
def _relu(values):
    for k in range(len(values)):
        for o in range(WIDTH):
            values[k, o] = values[k, o] if values[k, o] > 0 else np.float32(0)


@cached_njit(nogil=True)
def predict_network(network, inputs, weights, groups, counts, result):
    """Fill result (float32[N]) with the log-odds of blocks. inputs: of scale_inputs; they are normalized in place.
    weights: of mean_weights; groups, counts: of find_groups."""
    num_blocks = len(inputs)
    state, mixed = np.empty((num_blocks, WIDTH), np.float32), np.empty((num_blocks, WIDTH), np.float32)
    for k in range(num_blocks):
        for column in range(NUM_INPUTS):
            value = (inputs[k, column] - network.means[column]) * network.scales[column]
            value = value if value < MAX_INPUT else MAX_INPUT
            inputs[k, column] = value if value > -MAX_INPUT else -MAX_INPUT
        state[k] = network.first_bias
    _add_products(inputs, network.first, state)
    _relu(state)
    for layer in range(LAYERS):
        mix = network.mixes[layer]
        mixed[:] = network.mix_bias[layer]
        _add_products(state, mix[:WIDTH], mixed)
        _add_products(state[:-1], mix[WIDTH : 2 * WIDTH], mixed[1:])
        _add_products(state[1:], mix[2 * WIDTH : 3 * WIDTH], mixed[:-1])
        for grouping in range(GROUPINGS):
            part = mix[(3 + grouping) * WIDTH : (4 + grouping) * WIDTH]
            _add_means(state, weights, groups[grouping], counts[grouping], part, mixed)
        _relu(mixed)
        state += network.out_bias[layer]
        _add_products(mixed, network.outs[layer], state)
    for k in range(num_blocks):
        total = np.float64(network.last_bias[0])
        for o in range(WIDTH):
            total += state[k, o] * network.last[o]
        result[k] = total

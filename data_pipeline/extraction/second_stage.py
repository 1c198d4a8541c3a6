"""Features of text blocks for the second stage of trees: those of the first stage, then what the first stage says of
the block's surroundings. SECOND_FEATURES names them in the order in which the kernels write them."""

import numpy as np

from gristmill.data_pipeline.extraction.first_stage import (
    FIRST_FEATURES,
    G_BYTES,
    G_LIKELY,
    GROUP_SLOTS,
    NUM_FIRST,
    ratio,
)
from gristmill.data_pipeline.extraction.page_arrays import ELEMENT, END, PARENT, PATH_HASH, START
from gristmill.data_pipeline.extraction.page_stats import BYTES, LIKELY_BYTES, P_BLOCKS, P_LARGEST, P_READABLE_BEST
from gristmill.foundation.cached_njit import cached_njit

SECOND_FEATURES = (
    *FIRST_FEATURES,
    *(f"probability{offset:+d}" for offset in range(-4, 5)),
    *(f"{place}_probability" for place in ("element", "parent", "grandparent", "readable", "largest", "path", "page")),
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
# Columns of runs, float32[B, 8].
SINCE, TO, BYTES_SINCE, BYTES_TO, BEFORE, RUN_BLOCKS, RUN_BYTES, PLACE = range(8)


@cached_njit(nogil=True)
def sum_probabilities(p, elements, num_elements, blocks, num_blocks, sums, groups, runs):
    """Fill LIKELY_BYTES of sums and groups (probability times bytes, by element and by path) and the runs of likely
    blocks; returns (bytes of likely blocks, largest probability). p: float32[B], of the first stage."""
    sums[:num_elements, LIKELY_BYTES] = 0
    groups[:, G_LIKELY] = 0
    for k in range(num_blocks):
        e, size = blocks[k, ELEMENT], blocks[k, END] - blocks[k, START]
        sums[e, LIKELY_BYTES] += p[k] * size
        groups[elements[e, PATH_HASH] & (GROUP_SLOTS - 1), G_LIKELY] += p[k] * size
    for e in range(num_elements - 1, 0, -1):
        sums[elements[e, PARENT], LIKELY_BYTES] += sums[e, LIKELY_BYTES]
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
def second_features(k, p, totals, elements, blocks, sums, groups, runs, page, row):
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

"""Features of text blocks for the second stage of trees: those of the first stage, then what the first stage says of
the block's surroundings. SECOND_FEATURES names them in the order in which the kernels write them."""

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
    LIKELY_BYTES,
    P_BLOCKS,
    P_CARDS,
    P_ITEM_SLOT,
    P_LARGEST,
    P_READABLE_BEST,
    SECTION,
    item_slot,
)
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

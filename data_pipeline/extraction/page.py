"""One page in flat arrays: tokenized, counted, and classified block by block."""

from typing import NamedTuple

import numpy as np

from gristmill.data_pipeline.extraction.attributes import (
    END,
    NUM_BLOCK_COLUMNS,
    NUM_BLOCKS,
    NUM_ELEMENTS,
    NUM_LINKS,
    NUM_PAIRS,
    NUM_STATES,
    OUT,
    PADDING,
    START,
    TABLE_SIZE,
    TITLE_END,
    TITLE_START,
    count_byte,
)
from gristmill.data_pipeline.extraction.block_features import (
    GROUP_SLOTS,
    NUM_FIRST,
    NUM_GROUP_SUMS,
    candidate_ranges,
    first_features,
    group_by_path,
)
from gristmill.data_pipeline.extraction.context_features import NUM_RUNS, NUM_SECOND, second_features, sum_probabilities
from gristmill.data_pipeline.extraction.page_stats import (
    ITEM_SLOTS,
    NUM_COUNTS,
    NUM_ITEM_SUMS,
    NUM_PAGE,
    NUM_SUMS,
    P_KINDS,
    WORDS,
    count_text,
    find_items,
    sum_elements,
)
from gristmill.data_pipeline.extraction.tokenizer import tokenize
from gristmill.data_pipeline.extraction.weights import Trees, predict
from gristmill.foundation.runtime.kernels.cached_njit import cached_njit

NO_TOKENS = np.zeros(TABLE_SIZE, np.float32)  # token weights of a page whose tokens do not count
NO_PAIRS = np.zeros((0, 2), np.int32)
MIN_FIRST = 0.02  # the second stage is fitted on blocks from this probability of the first on
MIN_SECOND = 0.05  # blocks below it skip the second stage
MIN_THRESHOLD, MAX_THRESHOLD, THRESHOLD_STEPS = 0.2, 0.55, 200
# Added to MIN_THRESHOLD by the probability of each page kind: all text of a listing may be in doubt, and that of a
# product stands among as much that is not. Chosen on WCXB's development pages in folds by site.
KIND_THRESHOLDS = np.array([0.2, 0.0, 0.1, -0.1, -0.1, 0.15, 0.0])
SURE_F1 = 0.8  # from this expected F1 on, a page has MAX_THRESHOLD


class Page(NamedTuple):
    """blocks, elements, counts, ...: the columns of attributes.py, page_stats.py and block_features.py."""

    text: np.ndarray
    elements: np.ndarray
    weights: np.ndarray
    blocks: np.ndarray
    counts: np.ndarray
    sums: np.ndarray
    groups: np.ndarray
    items: np.ndarray
    ranges: np.ndarray
    totals: np.ndarray
    source_bytes: int
    pairs: np.ndarray
    links: np.ndarray
    seen: np.ndarray
    label_words: np.ndarray


class PageBuffers:
    """Arrays for a page, kept between pages because fresh memory costs as much as the tokenizer."""

    def __init__(self) -> None:
        self.bytes = self.tags = -1

    def grow(self, num_bytes: int, num_tags: int) -> None:
        """Capacity for a page: no text is longer than 3 / 2 of it, no more elements or blocks than its tags."""
        if num_bytes > self.bytes:
            self.source, self.text = (
                np.zeros(num_bytes + PADDING, np.uint8),
                np.empty(num_bytes * 3 // 2 + 64, np.uint8),
            )
            self.bytes = num_bytes
            self.seen = np.zeros(TABLE_SIZE, np.bool_)
        if num_tags > self.tags:
            elements, blocks = num_tags + 1, num_tags + 2
            self.elements, self.weights = np.empty((elements, 6), np.int32), np.empty((elements, 6), np.float32)
            self.blocks, self.counts = (
                np.empty((blocks, NUM_BLOCK_COLUMNS), np.int32),
                np.empty((blocks, NUM_COUNTS), np.int32),
            )
            self.sums, self.runs = np.empty((elements, NUM_SUMS), np.float32), np.empty((blocks, NUM_RUNS), np.float32)
            self.links = np.empty((elements, 3), np.int32)
            self.groups = np.empty((GROUP_SLOTS, NUM_GROUP_SUMS), np.float32)
            self.items = np.empty((ITEM_SLOTS, NUM_ITEM_SUMS), np.float32)
            self.tags = num_tags


def read_page(
    html: bytes, token_weights: np.ndarray, space: PageBuffers | None = None, with_pairs: bool = False
) -> Page:
    """Tokenize and count. html: valid UTF-8. space: the page's arrays are views of it; without one they are new.
    with_pairs: return the (element, token) pairs and the words of short blocks, for fitting."""
    size, tags = len(html), count_byte(np.frombuffer(html, np.uint8), 60)
    space = space or PageBuffers()
    space.grow(size, tags)
    space.source[:size] = np.frombuffer(html, np.uint8)
    space.source[size : size + PADDING] = 0
    pairs, words = (np.empty((size // 2 + 1, 2), np.int32) if with_pairs else NO_PAIRS for _ in range(2))
    state, ranges, totals = np.zeros(NUM_STATES, np.int64), np.empty((3, 2), np.int32), np.empty(NUM_PAGE, np.float64)
    num_words = _read(
        space.source, size, token_weights, space.text, space.elements, space.weights, space.blocks, space.links,
        space.seen, pairs, state, space.counts, space.sums, space.groups, space.items, ranges, totals, words,
    )  # fmt: skip
    num_blocks, num_elements = int(state[NUM_BLOCKS]), int(state[NUM_ELEMENTS])
    return Page(
        space.text[: state[OUT]], space.elements[:num_elements], space.weights[:num_elements],
        space.blocks[:num_blocks], space.counts[:num_blocks], space.sums[:num_elements], space.groups, space.items,
        ranges, totals, size, pairs[: state[NUM_PAIRS]], space.links[: state[NUM_LINKS]], space.seen,
        words[:num_words],
    )  # fmt: skip


@cached_njit(nogil=True)
def _read(
    source,
    size,
    token_weights,
    text,
    elements,
    weights,
    blocks,
    links,
    seen,
    pairs,
    state,
    counts,
    sums,
    groups,
    items,
    ranges,
    totals,
    words,
):
    seen[:] = False
    tokenize(source, size, token_weights, text, elements, weights, blocks, links, seen, pairs, state)
    num_blocks, num_elements = state[NUM_BLOCKS], state[NUM_ELEMENTS]
    title = source[state[TITLE_START] : state[TITLE_END]]
    num_words = count_text(text, blocks, num_blocks, title, token_weights, seen, counts, words)
    sum_elements(elements, num_elements, blocks, num_blocks, counts, sums, totals)
    group_by_path(elements, blocks, num_blocks, counts, groups)
    find_items(elements, num_elements, sums, items, totals)
    candidate_ranges(elements, blocks, num_blocks, sums, totals, ranges)
    return num_words


def block_texts(page: Page) -> list[str]:
    text = page.text.tobytes()
    return [text[row[START] : row[END]].decode("utf-8", "replace") for row in page.blocks]


def classify(page: Page, first: Trees, second: Trees) -> np.ndarray:
    """float32[B]: the probability of each block to be main text."""
    probabilities = np.empty(len(page.blocks), np.float32)
    _classify(*page[:10], page.source_bytes, first, second, probabilities)
    return probabilities


def page_threshold(page: Page, probabilities: np.ndarray) -> float:
    """MAX_THRESHOLD, or on a page in doubt the probability from which the kept words have the largest expected F1, at
    least MIN_THRESHOLD and what KIND_THRESHOLDS adds. It is half of that F1 (Lipton, Elkan and Naryanaswamy 2014)."""
    return _threshold(probabilities, page.counts, MIN_THRESHOLD + page.totals[P_KINDS:] @ KIND_THRESHOLDS)


@cached_njit(nogil=True)
def _threshold(probabilities, counts, minimum):
    words, likely = np.zeros(THRESHOLD_STEPS + 1), np.zeros(THRESHOLD_STEPS + 1)
    for k in range(len(probabilities)):
        step = int(probabilities[k] * THRESHOLD_STEPS)
        words[step] += counts[k, WORDS]
        likely[step] += counts[k, WORDS] * probabilities[k]
    total, kept, right, best, highest = likely.sum(), 0.0, 0.0, THRESHOLD_STEPS, 0.0
    for step in range(THRESHOLD_STEPS, -1, -1):
        kept += words[step]
        right += likely[step]
        if words[step] > 0 and 2 * right > highest * (kept + total):
            best, highest = step, 2 * right / (kept + total)
    if highest >= SURE_F1:
        return MAX_THRESHOLD
    return min(max(best / THRESHOLD_STEPS, minimum), MAX_THRESHOLD)


@cached_njit(nogil=True)
def _classify(
    text, elements, weights, blocks, counts, sums, groups, items, ranges, totals, size, first, second, result
):  # fmt: skip
    num_blocks = len(blocks)
    p, row = np.empty(num_blocks, np.float32), np.zeros((1, NUM_SECOND), np.float32)
    for k in range(num_blocks):
        first_features(k, k + 1, elements, weights, blocks, counts, sums, groups, items, ranges, totals, size, row)
        p[k] = predict(first, row[0])
    runs = np.empty((num_blocks, NUM_RUNS), np.float32)
    likely = sum_probabilities(p, elements, len(elements), blocks, num_blocks, counts, sums, groups, items, runs)
    for k in range(num_blocks):
        if p[k] < MIN_SECOND:
            result[k] = p[k]
            continue
        first_features(k, k + 1, elements, weights, blocks, counts, sums, groups, items, ranges, totals, size, row)
        second_features(k, p, likely, elements, blocks, counts, sums, groups, items, runs, totals, row[0])
        result[k] = predict(second, row[0])


def first_rows(page: Page) -> np.ndarray:
    """float32[B, NUM_FIRST], for fitting."""
    rows = np.zeros((len(page.blocks), NUM_FIRST), np.float32)
    first_features(0, len(rows), *page[1:10], page.source_bytes, rows)
    return rows


def second_rows(page: Page, rows: np.ndarray, p: np.ndarray) -> np.ndarray:
    """float32[B, NUM_SECOND]. rows: of first_rows; p: float32[B], of a first stage that was not fitted on the page."""
    result = np.zeros((len(rows), NUM_SECOND), np.float32)
    result[:, :NUM_FIRST] = rows
    _second_rows(*page[1:10], p, result)
    return result


@cached_njit(nogil=True)
def _second_rows(elements, weights, blocks, counts, sums, groups, items, ranges, totals, p, result):
    runs = np.empty((len(blocks), NUM_RUNS), np.float32)
    likely = sum_probabilities(p, elements, len(elements), blocks, len(blocks), counts, sums, groups, items, runs)
    for k in range(len(blocks)):
        second_features(k, p, likely, elements, blocks, counts, sums, groups, items, runs, totals, result[k])

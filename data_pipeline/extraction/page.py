"""One page in flat arrays: tokenized, counted, and classified block by block."""

import re
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from gristmill.data_pipeline.extraction.attributes import (
    COUNT,
    END,
    HAS_PLAIN_MATH,
    LINK_BLOCK,
    MARK,
    NUM_BLOCK_COLUMNS,
    NUM_BLOCKS,
    NUM_CHILDREN,
    NUM_ELEMENTS,
    NUM_LINKS,
    NUM_PAIRS,
    ORDINAL,
    OUT,
    PADDING,
    PARENT,
    START,
    STATE_SIZE,
    TABLE_SIZE,
    TAG,
    TAG_START,
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
from gristmill.data_pipeline.extraction.context_features import (
    GROUPINGS,
    NUM_INPUTS,
    NUM_RUNS,
    Network,
    find_groups,
    mean_weights,
    predict_network,
    scale_inputs,
    second_features,
    sum_probabilities,
)
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
from gristmill.data_pipeline.extraction.tags import TAG_IDS
from gristmill.data_pipeline.extraction.text_blocks import drop_marks
from gristmill.data_pipeline.extraction.tokenizer import tokenize
from gristmill.data_pipeline.extraction.weights import Trees, borrowed_trees, fill_panel, probability, sum_trees
from gristmill.data_pipeline.signals.intrinsics import FLOAT_LANES, borrowed
from gristmill.foundation.runtime.kernels.cached_njit import cached_njit
from gristmill.foundation.startup import DeferredModule

formulas = DeferredModule("gristmill.data_pipeline.extraction.formulas")  # lxml, for few pages
NO_TOKENS = np.zeros(TABLE_SIZE, np.float32)  # token weights of a page whose tokens do not count
NO_PAIRS = np.zeros((0, 2), np.int32)
MAX_TAG_BYTES = 400  # of a start tag that is read again for its attributes
MIN_FIRST = 0.02  # blocks from this probability of the first stage on are inputs of the second
MIN_SECOND = 0.05  # those below this one keep it
# Share of the trees in the mean of the second stage's log-odds, chosen on WCXB's development pages in folds by site.
# Labelled pages are long: on shorter ones than MIN_NETWORK_BLOCKS the network keeps menus, and the trees decide alone.
TREES_SHARE, MIN_NETWORK_BLOCKS = 0.3, 6
MIN_THRESHOLD, MAX_THRESHOLD, THRESHOLD_STEPS = 0.2, 0.5, 200
# Added to MIN_THRESHOLD by the probability of each page kind: all text of a listing may be in doubt, and that of a
# product stands among as much that is not. Chosen on WCXB's development pages in folds by site.
KIND_THRESHOLDS = np.array([0.2, 0.0, 0.1, -0.1, -0.1, 0.15, 0.0])


class Page(NamedTuple):
    """blocks, elements, counts, ...: the columns of attributes.py, page_stats.py and block_features.py. source: the
    page's bytes."""

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
    source: np.ndarray
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
            self.elements, self.weights = np.empty((elements, 7), np.int32), np.empty((elements, 6), np.float32)
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
    html: bytes,
    token_weights: np.ndarray,
    space: PageBuffers | None = None,
    with_pairs: bool = False,
    num_tags: int | None = None,
) -> Page:
    """Tokenize and count, with TeX for formulas that have none (formulas.py). html: valid UTF-8. space: the page's
    arrays are views of it; without one they are new. with_pairs: return the (element, token) pairs and the words of
    short blocks, for fitting. num_tags: how often < stands in the page, if it is known."""
    size, tags = len(html), count_byte(np.frombuffer(html, np.uint8), 60) if num_tags is None else num_tags
    space = space or PageBuffers()
    space.grow(size, tags)
    space.source[:size] = np.frombuffer(html, np.uint8)
    space.source[size : size + PADDING] = 0
    pairs, words = (np.empty((size // 2 + 1, 2), np.int32) if with_pairs else NO_PAIRS for _ in range(2))
    state, ranges, totals = np.zeros(STATE_SIZE, np.int64), np.empty((3, 2), np.int32), np.empty(NUM_PAGE, np.float64)
    num_words = _read(
        space.source, size, token_weights, space.text, space.elements, space.weights, space.blocks, space.links,
        space.seen, pairs, state, space.counts, space.sums, space.groups, space.items, ranges, totals, words,
    )  # fmt: skip
    if state[HAS_PLAIN_MATH] and (written := formulas.with_tex(html)) is not html:
        return read_page(written, token_weights, space, with_pairs, num_tags)
    num_blocks, num_elements = int(state[NUM_BLOCKS]), int(state[NUM_ELEMENTS])
    return Page(
        space.text[: state[OUT]], space.elements[:num_elements], space.weights[:num_elements],
        space.blocks[:num_blocks], space.counts[:num_blocks], space.sums[:num_elements], space.groups, space.items,
        ranges, totals, space.source[:size], pairs[: state[NUM_PAIRS]], space.links[: state[NUM_LINKS]], space.seen,
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
    source, token_weights, text = borrowed(source), borrowed(token_weights), borrowed(text)
    elements, weights, blocks, links = borrowed(elements), borrowed(weights), borrowed(blocks), borrowed(links)
    seen, pairs, state, counts = borrowed(seen), borrowed(pairs), borrowed(state), borrowed(counts)
    sums, groups, items, totals = borrowed(sums), borrowed(groups), borrowed(items), borrowed(totals)
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


def start_tag(page: Page, element: int) -> bytes:
    """The page from the element's start tag on, MAX_TAG_BYTES of it."""
    at = int(page.elements[element, TAG_START])
    return page.source[at : at + MAX_TAG_BYTES].tobytes()


MAX_WRAPPED, MAX_WRAPPERS = 3, 7  # elements in a wrapper of code: a button, a caption and the code
TABLE_WRAPPERS = tuple(TAG_IDS[name] for name in ("td", "tr", "tbody", "table"))  # of code beside its line numbers
WRAPPERS = (TAG_IDS["div"], TAG_IDS["figure"])  # of code
_CODE_TAGS = re.compile(rb"<[^<>]{0,400}>(?:\s{0,100}<(?:code|samp)\b[^<>]{0,400}>)?", re.IGNORECASE)
_LANGUAGE = re.compile(
    rb"""\sclass=["']?(?:[^"'<>]{0,300}?\s)??(?:"""
    rb"""(?:language-|lang-|highlight-source-|mw-highlight-lang-|src\ssrc-|sourceCode\s(?:numberSource\s)?|brush:\s?)"""
    rb"""([A-Za-z0-9+#_.-]{1,20})(?=[\s"';>])"""
    rb"""|highlight-([A-Za-z0-9+#_.-]{1,20})(?=\snotranslate))"""  # of Sphinx
)
_NO_LANGUAGE = frozenset(("none", "auto", "default", "nohighlight", "undefined", "unknown"))


def code_language(page: Page, element: int) -> str:
    """The language in the class of a <pre>, of the <code> in it, or of up to two wrappers around it and its table; or
    empty."""
    elements = page.elements
    tags = _CODE_TAGS.match(start_tag(page, element))
    language = _LANGUAGE.search(tags[0]) if tags else None
    num_divs = 0
    for _ in range(MAX_WRAPPERS):
        element = int(elements[element, PARENT])
        is_in_table = elements[element, TAG] in TABLE_WRAPPERS
        is_wrapper = is_in_table or elements[element, TAG] in WRAPPERS
        num_divs = 0 if is_in_table else num_divs + 1
        if language is not None or not is_wrapper or elements[element, NUM_CHILDREN] > MAX_WRAPPED or num_divs > 2:
            break
        language = _LANGUAGE.search(start_tag(page, element).partition(b">")[0] + b">")
    name = (language[1] or language[2]).decode() if language else ""
    return "" if name.lower() in _NO_LANGUAGE else name


_NUMBER = re.compile(rb"""<[^<>]{0,400}?\s(?:start|value)\s*+=\s*+["']?+\s*+(\d{1,9})\s*["'\s/>]""", re.IGNORECASE)
_REVERSED = re.compile(rb"""<[^<>]{0,400}?\sreversed[\s=/>]""", re.IGNORECASE)


@dataclass
class ItemNumbers:
    """Numbers of the items of <ol>, by `start`, `reversed` and `value`: numbers of at most nine digits, as in Markdown.
    lists: (number of the first item, step) of each list. open_items: those whose markers are
    written, and nothing outside of the list since; and the number of quotes around each."""

    page: Page
    structure: np.ndarray
    lists: dict[int, tuple[int, int]] = field(default_factory=dict)
    open_items: dict[int, int] = field(default_factory=dict)

    def of(self, item: int) -> int:
        ordinal, parent = int(self.structure[item, ORDINAL]), int(self.page.elements[item, PARENT])
        if parent not in self.lists:
            tag = start_tag(self.page, parent)
            is_reversed, number = _REVERSED.match(tag), _NUMBER.match(tag)
            first = int(number[1]) if number else int(self.structure[parent, COUNT]) if is_reversed else 1
            self.lists[parent] = (first, -1 if is_reversed else 1)
        first, step = self.lists[parent]
        if value := _NUMBER.match(start_tag(self.page, item)):  # those behind it count from there
            first = int(value[1]) - step * ordinal
            self.lists[parent] = (first, step)
        return min(max(first + step * ordinal, 0), 999_999_999)


def without_marks(page: Page) -> Page:
    """The page without the text of links that are marks, which its features count. Blocks may be empty."""
    is_mark = page.links[:, LINK_BLOCK] == MARK
    if not is_mark.any():
        return page
    drop_marks(page.text, page.blocks, page.links[is_mark])
    return page._replace(links=page.links[~is_mark])


def block_texts(page: Page) -> list[str]:
    text = page.text.tobytes()
    return [text[row[START] : row[END]].decode("utf-8", "replace") for row in page.blocks]


def classify(page: Page, first: Trees, second: Trees, network: Network) -> np.ndarray:
    """float32[B]: the probability of each block to be main text."""
    probabilities = np.empty(len(page.blocks), np.float32)
    _classify(*page[1:10], len(page.source), first, second, network, probabilities)
    return probabilities


def page_threshold(page: Page, probabilities: np.ndarray) -> float:
    """The probability from which the kept words have the largest expected F1, at most MAX_THRESHOLD and at least
    MIN_THRESHOLD and what KIND_THRESHOLDS adds. It is half of that F1 (Lipton, Elkan and Naryanaswamy 2014)."""
    return _threshold(probabilities, page.counts, page.totals)


@cached_njit(nogil=True)
def _threshold(probabilities, counts, page):
    minimum = MIN_THRESHOLD
    for kind in range(len(KIND_THRESHOLDS)):
        minimum += page[P_KINDS + kind] * KIND_THRESHOLDS[kind]
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
    return min(max(best / THRESHOLD_STEPS, minimum), MAX_THRESHOLD)


@cached_njit(nogil=True)
def _classify(
    elements, weights, blocks, counts, sums, groups, items, ranges, totals, size, first, second, network, result
):
    elements, weights, blocks, counts = borrowed(elements), borrowed(weights), borrowed(blocks), borrowed(counts)
    sums, groups, items, totals = borrowed(sums), borrowed(groups), borrowed(items), borrowed(totals)
    ranges, result, num_blocks = borrowed(ranges), borrowed(result), len(blocks)
    first, second = borrowed_trees(first), borrowed_trees(second)
    rows, chosen = np.empty((num_blocks + FLOAT_LANES, NUM_INPUTS), np.float32), np.empty(num_blocks, np.int32)
    p, num_chosen = np.empty(num_blocks, np.float32), 0
    panel = np.zeros((max(len(first.columns), len(second.columns)), FLOAT_LANES), np.float32)
    every, sums_16, totals_16 = np.arange(len(rows)), np.empty(FLOAT_LANES, np.float32), np.empty(FLOAT_LANES)
    for start in range(0, num_blocks, FLOAT_LANES):
        base, end = num_chosen, min(start + FLOAT_LANES, num_blocks)
        batch = borrowed(rows[base : base + FLOAT_LANES])
        first_features(start, end, elements, weights, blocks, counts, sums, groups, items, ranges, totals, size, batch)
        fill_panel(first, rows, every, base, base + end - start, panel)
        sum_trees(first, panel, 0, len(first.starts) - 1, sums_16, totals_16)
        for k in range(start, end):
            result[k] = probability(totals_16[k - start])
            if result[k] >= MIN_FIRST:
                chosen[num_chosen], p[num_chosen] = k, result[k]
                if num_chosen < base + k - start:
                    rows[num_chosen, :NUM_FIRST] = rows[base + k - start, :NUM_FIRST]
                num_chosen += 1
    rows, chosen, p = rows[:num_chosen], chosen[:num_chosen], p[:num_chosen]
    runs = np.empty((num_blocks, NUM_RUNS), np.float32)
    _second_rows(chosen, elements, blocks, counts, sums, groups, items, totals, result, runs, rows)
    trees, decided = np.empty(num_chosen, np.float64), np.flatnonzero(p >= MIN_SECOND)
    _sum_rows(second, rows, decided, panel, trees)
    if len(decided) < MIN_NETWORK_BLOCKS:
        for n in decided:
            result[chosen[n]] = probability(trees[n])
        return
    scale_inputs(rows, p)
    of_block, mean_weight = np.empty((GROUPINGS, num_chosen), np.int32), np.empty(num_chosen, np.float32)
    num_groups = find_groups(chosen, elements, blocks, sums, of_block)
    mean_weights(chosen, counts, mean_weight)
    log_odds = np.empty(num_chosen, np.float32)
    predict_network(network, rows, mean_weight, of_block, num_groups, log_odds)
    for n in decided:
        mean = TREES_SHARE * trees[n] + (1 - TREES_SHARE) * log_odds[n]
        result[chosen[n]] = probability(mean)


@cached_njit(nogil=True)
def _sum_rows(trees, rows, chosen, panel, result):
    """Write the log-odds of the chosen rows into the result (float64[N]). panel: work space."""
    sums, totals = np.empty(FLOAT_LANES, np.float32), np.empty(FLOAT_LANES)
    for start in range(0, len(chosen), FLOAT_LANES):
        end = min(start + FLOAT_LANES, len(chosen))
        fill_panel(trees, rows, chosen, start, end, panel)
        sum_trees(trees, panel, 0, len(trees.starts) - 1, sums, totals)
        for n in range(start, end):
            result[chosen[n]] = totals[n - start]


@cached_njit(nogil=True)
def _second_rows(chosen, elements, blocks, counts, sums, groups, items, totals, p, runs, rows):
    """Add the second stage's features to the rows of the chosen blocks. p: float32[B], of the first stage. runs:
    float32[B, NUM_RUNS], work space."""
    runs, rows = borrowed(runs), borrowed(rows)
    likely = sum_probabilities(p, elements, len(elements), blocks, len(blocks), counts, sums, groups, items, runs)
    for n in range(len(chosen)):
        second_features(chosen[n], p, likely, elements, blocks, counts, sums, groups, items, runs, totals, rows[n])


def first_rows(page: Page) -> np.ndarray:
    """float32[B, NUM_FIRST], for fitting."""
    rows = np.zeros((len(page.blocks), NUM_FIRST), np.float32)
    first_features(0, len(rows), *page[1:10], len(page.source), rows)
    return rows


class SecondInputs(NamedTuple):
    """Blocks that reach the second stage: their numbers on the page, their probabilities of the first (float32[N]),
    their features, which scale_inputs turns into the network's inputs (float32[N, NUM_INPUTS]), and the groups and
    weights of their means (find_groups, mean_weights)."""

    chosen: np.ndarray
    p: np.ndarray
    rows: np.ndarray
    groups: np.ndarray
    mean_weights: np.ndarray


def second_inputs(page: Page, rows: np.ndarray, p: np.ndarray) -> SecondInputs:
    """For fitting. rows: of first_rows; p: float32[B], of a first stage that was not fitted on the page."""
    chosen = np.flatnonzero(p >= MIN_FIRST).astype(np.int32)
    inputs = np.zeros((len(chosen), NUM_INPUTS), np.float32)
    inputs[:, :NUM_FIRST] = rows[chosen]
    elements, _, blocks, counts, sums, groups, items, _, totals = page[1:10]
    runs = np.empty((len(blocks), NUM_RUNS), np.float32)
    _second_rows(chosen, elements, blocks, counts, sums, groups, items, totals, p, runs, inputs)
    of_block, weights = np.empty((GROUPINGS, len(chosen)), np.int32), np.empty(len(chosen), np.float32)
    find_groups(chosen, elements, blocks, sums, of_block)
    mean_weights(chosen, counts, weights)
    return SecondInputs(chosen, p[chosen], inputs, of_block, weights)

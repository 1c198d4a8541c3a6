"""Kind of a page (article, listing, product, ...) from its layout: class and id tokens, hints in the markup, and what
the page consists of. Names and order of the kinds: blocks_config.PAGE_KINDS."""

import re
import zlib

import numpy as np

from gristmill.data_pipeline.extraction.attributes import NUM_TOKENS, TOKEN_BITS
from gristmill.data_pipeline.extraction.block_features import KIND_FEATURES, NUM_PAGE_FEATURES, page_features
from gristmill.data_pipeline.extraction.blocks_config import NUM_KINDS, PAGE_KINDS
from gristmill.data_pipeline.extraction.page import Page
from gristmill.data_pipeline.extraction.page_stats import P_KINDS
from gristmill.data_pipeline.extraction.weights import Trees, predict_groups
from gristmill.foundation.runtime.kernels.cached_njit import cached_njit

MAX_HINT_BYTES = 100_000  # of the page that is searched for hints
MAX_HINTS = 40  # of one sort
# What a hint begins with, and how it goes on. Searching for the bytes first takes a tenth of the pattern's time.
_HINTS = (
    (b"og:type", re.compile(rb"""og:type["'][^>]{0,80}?content=["']?([\w.:]{2,40})""")),
    (b"generator", re.compile(rb"""generator["']?[^>]{0,40}?content=["']([A-Za-z]{2,40})""")),
    (b'"@type"', re.compile(rb'"@type"\s{0,3}:\s{0,3}\[?"(\w{2,40})"')),
    (b"schema.org/", re.compile(rb"schema\.org/(\w{2,40})")),
)
_ADDRESSES = (
    (b"canonical", re.compile(rb"""canonical["'][^>]{0,200}?href=["']?https?://([^"'>\s?#]+)""")),
    (b"og:url", re.compile(rb"""og:url["'][^>]{0,80}?content=["']?https?://([^"'>\s?#]+)""")),
)
_WORD = re.compile(rb"[a-z]{2,30}")


def hint_tokens(html: bytes) -> list[int]:
    """Places in the table of tokens for the page's Open Graph and schema.org types, its generator, and the words of its
    own address."""
    head = html[:MAX_HINT_BYTES]
    hints: set[tuple[int, bytes]] = set()
    for sort, (start, pattern) in enumerate(_HINTS):
        hints |= {(sort, value.lower()) for value in _values(head, start, pattern, MAX_HINTS)}
    for start, pattern in _ADDRESSES:
        for address in _values(head, start, pattern, 1):
            host, _, path = address.lower().partition(b"/")
            hints |= {(len(_HINTS), word) for word in _WORD.findall(host)}
            hints |= {(len(_HINTS) + 1, word) for word in _WORD.findall(path)[:MAX_HINTS]}
            hints.add((len(_HINTS) + 2, b"%d" % min(path.strip(b"/").count(b"/") + (len(path) > 1), 6)))
    return [zlib.crc32(word, sort) >> (32 - TOKEN_BITS) for sort, word in sorted(hints)]


def _values(head: bytes, start: bytes, pattern: re.Pattern[bytes], limit: int) -> list[bytes]:
    """Values that the pattern finds behind the first `limit` places of `start`."""
    values, at = [], head.find(start)
    while at >= 0 and limit:
        if match := pattern.match(head, at):
            values.append(match[1])
        at, limit = head.find(start, at + 1), limit - 1
    return values


@cached_njit(nogil=True)
def kind_features(sums, page, seen, token_table, row):
    """Fill row (float32[len(KIND_FEATURES)]). seen: bool[TABLE_SIZE]; token_table: float32[TABLE_SIZE, NUM_KINDS]."""
    page_features(sums, page, row, 0)
    row[NUM_PAGE_FEATURES:] = 0
    for token in range(len(seen)):
        if seen[token]:
            at = NUM_PAGE_FEATURES if token < NUM_TOKENS else NUM_PAGE_FEATURES + NUM_KINDS + 1
            row[at + NUM_KINDS] += 1
            for kind in range(NUM_KINDS):
                row[at + kind] += token_table[token, kind]


@cached_njit(nogil=True)
def predict_kinds(row, trees, page):
    """Write the probabilities of the kinds into page, from P_KINDS on. trees: equally many for each kind."""
    total, groups = 0.0, len(trees.depths) // NUM_KINDS
    for kind in range(NUM_KINDS):
        page[P_KINDS + kind] = predict_groups(trees, row, kind * groups, (kind + 1) * groups)
        total += page[P_KINDS + kind]
    for kind in range(NUM_KINDS):
        page[P_KINDS + kind] /= total


def set_kinds(page: Page, html: bytes, kind_tokens: np.ndarray, trees: Trees) -> None:
    """Predict the page's kind: the probabilities are in its totals then, for the features of its blocks."""
    row = np.zeros(len(KIND_FEATURES), np.float32)
    page.seen[hint_tokens(html)] = True
    _set_kinds(page.sums, page.totals, page.seen, kind_tokens, trees, row)


@cached_njit(nogil=True)
def _set_kinds(sums, page, seen, kind_tokens, trees, row):
    kind_features(sums, page, seen, kind_tokens, row)
    predict_kinds(row, trees, page)


def page_kind(page: Page) -> tuple[str, float]:
    """(the most probable kind, its probability) of a page whose kinds are set."""
    probabilities = page.totals[P_KINDS:]
    best = int(np.argmax(probabilities))
    return PAGE_KINDS[best], float(probabilities[best])

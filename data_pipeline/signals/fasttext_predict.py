"""Predictions of a fastText model for many texts in one compiled pass over UTF-8 bytes.

The likeliest label is that of fastText's own `predict`; sums have another order, so scores may differ in the last
digits. Source: fastText 0.9.2, loss.cc."""

import math
import threading
from typing import NamedTuple

import numpy as np

from gristmill.data_pipeline.signals.bits import (
    ADDED_AT_ONCE,
    BLOCK,
    ONE,
    PADDING,
    ZERO,
    TextArrays,
    TextBuffer,
    below,
    decode,
    first_bit,
    without_first,
)
from gristmill.data_pipeline.signals.characters import SPACE, UPPER, character_table
from gristmill.data_pipeline.signals.fasttext_model import (
    HIERARCHICAL_SOFTMAX,
    LOSS,
    NUM_LABELS,
    SOFTMAX,
    WIDTH,
    WORD_NGRAMS,
    FastTextModel,
)
from gristmill.data_pipeline.signals.fasttext_sums import CACHE_BYTES, ENTRY_BYTES, add_tokens, pointers
from gristmill.data_pipeline.signals.intrinsics import bytes_within, ones, pointer
from gristmill.foundation.runtime.kernels.cached_njit import cached_njit

SCORE_SHIFT = 1e-5  # loss.cc, std_log
SIGMOID_STEPS, MAX_SIGMOID = 512, 8  # loss.cc, the table of sigmoid
NO_LABEL, CAPITALS = -1, -2
MAX_CHARACTERS = 1 << 40  # that are read of a text


class TokenCache(NamedTuple):
    """Direct-mapped. keys: uint64[C, 4], the token's bytes, then its hash << 32 | how many rows its sum has, with the
    first 0 for a free entry. sums: [C, D], see sum_type."""

    keys: np.ndarray
    sums: np.ndarray


class TokenSums(NamedTuple):
    """starts, ends: int64, of a line's tokens; entries: int64, their places in the cache; state: int64, see
    fasttext_tokens; token: one token with its brackets; hashes: int32, of the tokens, for word n-grams; token_sum,
    hidden: sums of D dimensions, see sum_type."""

    starts: np.ndarray
    ends: np.ndarray
    entries: np.ndarray
    state: np.ndarray
    token: np.ndarray
    hashes: np.ndarray
    token_sum: np.ndarray
    hidden: np.ndarray


class _Caches(threading.local):
    """The caches of the thread's last two models: those of texts and of paragraphs may differ."""

    def __init__(self) -> None:
        self.held: list[tuple[FastTextModel, TokenCache]] = []


_CACHES = _Caches()


def token_cache(model: FastTextModel) -> TokenCache:
    """The thread's cache for the model."""
    for owner, cache in _CACHES.held:
        if owner is model:
            return cache
    width = model.input_rows.shape[1]
    kind = sum_type(width)
    entries = 1 << max(4, (CACHE_BYTES // (ENTRY_BYTES + kind.itemsize * width)).bit_length() - 1)
    cache = TokenCache(np.zeros((entries, 4), np.uint64), np.empty((entries, width), kind))
    _CACHES.held = [*_CACHES.held[-1:], (model, cache)]
    return cache


def sum_type(width: int) -> np.dtype:
    """float64 of few dimensions, as of a projected model, where it costs nothing: in float32, scores of long texts are
    off by 1e-5, as fastText's own are (benchmarks/quality.py)."""
    return np.dtype(np.float64 if width < ADDED_AT_ONCE else np.float32)


def predict(texts: TextBuffer, model: FastTextModel, chars: int, skip_capitals: bool) -> tuple[np.ndarray, np.ndarray]:
    """(int32[N] of the likeliest labels, float64[N] of their scores) by the first `chars` characters of each text, its
    white space as single spaces. NO_LABEL where there is nothing to predict from.

    skip_capitals: CAPITALS for a text that may be mostly in capitals, which the caller decides."""
    return _predicted(texts, model, (min(chars, MAX_CHARACTERS), skip_capitals), NO_LABEL)


def label_scores(texts: TextBuffer, model: FastTextModel, label: int) -> np.ndarray:
    """float64[N]: the score that fastText's `predict` with all labels gives to this one, from the whole text with its
    white space as single spaces; NaN where there is nothing to predict from."""
    labels, scores = _predicted(texts, model, (MAX_CHARACTERS, False), label)
    scores[labels == NO_LABEL] = np.nan
    return scores


def _predicted(
    texts: TextBuffer, model: FastTextModel, limits: tuple[int, bool], wanted: int
) -> tuple[np.ndarray, np.ndarray]:
    """wanted: the label that is scored; NO_LABEL for the likeliest."""
    labels, scores = np.empty(len(texts), np.int32), np.zeros(len(texts), np.float64)
    longest = int(np.diff(texts.offsets).max(initial=0))
    work = _workspace(model, min(longest, 4 * min(limits[0], longest)) + PADDING)
    arrays = TextArrays(texts.text, texts.offsets, character_table())
    _predict(arrays, model, (token_cache(model), work), (*limits, wanted), _path(model, wanted), labels, scores)
    return labels, scores


def _path(model: FastTextModel, label: int) -> np.ndarray:
    """int32[steps, 2], from the label's leaf to the tree's root: the inner node, and 1 if it goes right there."""
    steps, node = [], label
    if len(model.left) and label >= 0:
        root = len(model.left) - 1
        while node != root:
            (parent,) = np.flatnonzero((model.left == node) | (model.right == node))
            steps.append((int(parent), int(model.right[parent] == node)))
            node = int(parent)
    return np.array(steps, np.int32).reshape(-1, 2)


def _workspace(model: FastTextModel, capacity: int) -> TokenSums:
    """For texts of so many bytes in the part that is read."""
    width = model.input_rows.shape[1]
    return TokenSums(
        starts=np.empty(capacity, np.int64),
        ends=np.empty(capacity, np.int64),
        entries=np.empty(capacity, np.int64),
        state=np.empty(NUM_STATE, np.int64),
        token=np.empty(capacity + 2, np.uint8),
        hashes=np.empty(capacity if model.settings[WORD_NGRAMS] > 1 else 0, np.int32),
        token_sum=np.zeros(width, sum_type(width)),
        hidden=np.zeros(width, sum_type(width)),
    )


@cached_njit(nogil=True)
def _predict(texts, model, spaces, limits, path, labels, scores):
    cache, work = spaces
    text, flags = pointer(texts.text, 0), pointer(texts.flags, 0)
    at, output_rows = pointers(model, cache, work), pointer(model.output_rows, 0)
    tokens = (pointer(work.starts, 0), pointer(work.ends, 0), pointer(work.state, 0))
    outputs = np.empty(at.settings[NUM_LABELS], np.float32)
    nodes, logs = np.empty(len(model.left) + 1, np.int32), np.empty(len(model.left) + 1, np.float64)
    for k in range(len(labels)):
        labels[k] = NO_LABEL
        start, end = texts.offsets[k], texts.offsets[k + 1] - 1
        num_tokens, is_capital = head_tokens(text, start, end, flags, limits[0], tokens)
        if is_capital and limits[1]:
            labels[k] = CAPITALS
            continue
        if num_tokens < 0:
            continue
        for i in range(at.settings[WIDTH]):
            at.hidden[i] = np.float32(0)
        rows = add_tokens(at, text, work, num_tokens)
        if rows == 0:
            continue
        share = np.float32(1.0 / rows)
        for i in range(at.settings[WIDTH]):
            at.hidden[i] *= share
        if limits[2] >= 0:
            labels[k], scores[k] = limits[2], _label_score(at, output_rows, outputs, path, limits[2])
        elif at.settings[LOSS] == HIERARCHICAL_SOFTMAX:
            labels[k], scores[k] = _likeliest_leaf(at, output_rows, (model.left, model.right), (nodes, logs))
        else:
            labels[k], scores[k] = _likeliest_output(at, output_rows, outputs)


@cached_njit(nogil=True, forceinline=True)
def _dot(at, output_rows, row):
    total, width = np.float32(0), at.settings[WIDTH]
    for i in range(width):
        total += at.hidden[i] * output_rows[row * width + i]
    return total


@cached_njit(nogil=True)
def _likeliest_leaf(at, output_rows, tree, stack):
    """(label, score) by a search of the tree that leaves out what cannot be better (loss.cc, dfs with k = 1)."""
    left, right = tree
    nodes, logs = stack
    num_labels = at.settings[NUM_LABELS]
    nodes[0], logs[0] = 2 * num_labels - 2, 0.0
    num_open, best, best_log = 1, np.int64(NO_LABEL), math.log(SCORE_SHIFT)
    while num_open:
        num_open -= 1
        node, log = np.int64(nodes[num_open]), logs[num_open]
        if log < best_log:
            continue
        if left[node] < 0:
            best, best_log = node, log
            continue
        chance = 1.0 / (1.0 + math.exp(-np.float64(_dot(at, output_rows, node - num_labels))))
        nodes[num_open], logs[num_open] = right[node], log + math.log(chance + SCORE_SHIFT)
        nodes[num_open + 1], logs[num_open + 1] = left[node], log + math.log(1.0 - chance + SCORE_SHIFT)
        num_open += 2
    return best, math.exp(best_log) if best >= 0 else 0.0


@cached_njit(nogil=True)
def _label_score(at, output_rows, outputs, path, label):
    if at.settings[LOSS] == HIERARCHICAL_SOFTMAX:
        log = 0.0
        for step in range(len(path)):
            row = np.int64(path[step, 0]) - at.settings[NUM_LABELS]
            chance = 1.0 / (1.0 + math.exp(-np.float64(_dot(at, output_rows, row))))
            log += math.log((chance if path[step, 1] else 1.0 - chance) + SCORE_SHIFT)
        return math.exp(log)
    if at.settings[LOSS] != SOFTMAX:
        return _sigmoid(np.float64(_dot(at, output_rows, label))) + SCORE_SHIFT
    best = np.float32(-np.inf)
    for other in range(len(outputs)):
        outputs[other] = _dot(at, output_rows, other)
        best = max(best, outputs[other])
    total = 0.0
    for other in range(len(outputs)):
        total += math.exp(np.float64(outputs[other] - best))
    return math.exp(np.float64(outputs[label] - best)) / total + SCORE_SHIFT


@cached_njit(nogil=True)
def _likeliest_output(at, output_rows, outputs):
    """(label, score) of a softmax, or of the sigmoids of a model trained with negative samples or one against all."""
    best = 0
    for label in range(len(outputs)):
        value = np.float64(_dot(at, output_rows, label))
        outputs[label] = value if at.settings[LOSS] == SOFTMAX else _sigmoid(value)
        if outputs[label] >= outputs[best]:  # of equal ones, fastText's heap keeps the last
            best = label
    score = float(outputs[best])
    if at.settings[LOSS] == SOFTMAX:
        total = 0.0
        for label in range(len(outputs)):
            total += math.exp(np.float64(outputs[label] - outputs[best]))
        score = 1.0 / total
    return best, score + SCORE_SHIFT


@cached_njit(nogil=True, forceinline=True)
def _sigmoid(value):
    """By fastText's table of steps."""
    if value < -MAX_SIGMOID:
        return 0.0
    if value > MAX_SIGMOID:
        return 1.0
    step = np.int64((value + MAX_SIGMOID) * SIGMOID_STEPS / MAX_SIGMOID / 2)
    return 1.0 / (1.0 + math.exp(-(step * 2 * MAX_SIGMOID / SIGMOID_STEPS - MAX_SIGMOID)))


# Tokens of the beginning of a text, as fastText reads them: what stands between white space and NUL.

# Places in the state of a head that is being read. READ: characters of the text; WRITTEN: characters of the line, in
# which white space is one space; STARTS, ENDS: how many tokens began and ended; LETTERS, CAPITALS: a to z, A to Z.
READ, WRITTEN, STARTS, ENDS, IS_OPEN, IS_BEHIND_SPACE, LETTERS, CAPITAL_LETTERS, UPPERS, HAS_LOWER = range(10)
NUM_STATE = 10


@cached_njit(nogil=True)
def head_tokens(text, at, end, flags, chars, out):
    """Finds the tokens of the first `chars` characters, white space taken as single spaces and the ends stripped, of
    which at most 2 * chars characters of the text are read (signals/language.head in Python).

    out: (starts, ends, state); token i is text[starts[i] : ends[i]]. Returns (number of tokens, -1 for an empty line;
    whether the line may be mostly in capitals)."""
    starts, ends, state = out
    for i in range(NUM_STATE):
        state[i] = 0
    while at < end and state[READ] < 2 * chars and state[WRITTEN] < chars:
        if _is_plain(text, at, end, chars, state):
            at = _read_block(text, at, end, starts, ends, state)
        else:
            at = _read_characters(text, at, end, flags, chars, out)
    if state[IS_OPEN]:
        ends[state[ENDS]] = at
        state[ENDS] += 1
    written, capitals = state[WRITTEN], state[CAPITAL_LETTERS]
    is_capital = state[UPPERS] > 0 and state[HAS_LOWER] == 0
    is_capital = is_capital or (written > 5 and capitals > 0.8 * state[LETTERS])
    return state[ENDS] if written > 0 else -1, is_capital


@cached_njit(nogil=True, forceinline=True)
def _is_plain(text, at, end, chars, state):
    """Whether the next block is ASCII without NUL and all of it belongs to the head."""
    if state[READ] + BLOCK > 2 * chars or state[WRITTEN] + BLOCK + 1 >= chars:
        return False
    return (bytes_within(text, at, 0x80, 0x80) | bytes_within(text, at, 0, 1)) & below(end - at) == ZERO


@cached_njit(nogil=True, forceinline=True)
def _read_block(text, at, end, starts, ends, state):
    """Reads a block for which _is_plain holds; returns its end."""
    inside = below(end - at)
    size = min(end - at, BLOCK)
    space = bytes_within(text, at, 0x09, 5) | bytes_within(text, at, 0x1C, 5)
    solid = ~space & inside
    before = solid << ONE | np.uint64(state[IS_OPEN])
    begins, stops = solid & ~before, ~solid & before & inside
    if begins != ZERO:
        is_spaced = state[IS_BEHIND_SPACE] if begins & ONE else np.int64(state[WRITTEN] > 0)
        state[WRITTEN] += np.int64(ones(begins)) - 1 + is_spaced
    state[WRITTEN] += np.int64(ones(solid))
    state[READ] += size
    begun, ended = state[STARTS], state[ENDS]
    while begins != ZERO:
        starts[begun] = at + first_bit(begins)
        begins = without_first(begins)
        begun += 1
    while stops != ZERO:
        ends[ended] = at + first_bit(stops)
        stops = without_first(stops)
        ended += 1
    state[STARTS], state[ENDS] = begun, ended
    state[IS_OPEN] = np.int64(solid >> np.uint64(size - 1) & ONE)
    state[IS_BEHIND_SPACE] = np.int64(state[IS_OPEN] == 0 and state[WRITTEN] > 0)
    lower, upper = bytes_within(text, at, 0x61, 26) & inside, bytes_within(text, at, 0x41, 26) & inside
    capitals = np.int64(ones(upper))
    state[UPPERS] += capitals
    state[CAPITAL_LETTERS] += capitals
    state[LETTERS] += capitals + np.int64(ones(lower))
    state[HAS_LOWER] |= np.int64(lower != ZERO)
    return at + size


@cached_njit(nogil=True)
def _read_characters(text, at, end, flags, chars, out):
    """Reads about a block, character by character; returns its end."""
    starts, ends, state = out
    stop = min(at + BLOCK, end)
    while at < stop and state[READ] < 2 * chars and state[WRITTEN] < chars:
        code, size = decode(text, at)
        flag = flags[code]
        state[READ] += 1
        if (flag & SPACE or code == 0) and state[IS_OPEN]:
            ends[state[ENDS]] = at
            state[ENDS] += 1
            state[IS_OPEN] = 0
        if flag & SPACE:
            state[IS_BEHIND_SPACE] = np.int64(state[WRITTEN] > 0)
            at += size
            continue
        if state[IS_BEHIND_SPACE]:
            state[WRITTEN] += 1
            state[IS_BEHIND_SPACE] = 0
            if state[WRITTEN] == chars:
                break
        state[WRITTEN] += 1
        if code != 0 and not state[IS_OPEN]:
            starts[state[STARTS]] = at
            state[STARTS] += 1
            state[IS_OPEN] = 1
        state[UPPERS] += flag & UPPER != 0
        state[CAPITAL_LETTERS] += 0x41 <= code <= 0x5A
        is_small = 0x61 <= code <= 0x7A
        state[LETTERS] += is_small or 0x41 <= code <= 0x5A
        state[HAS_LOWER] |= np.int64(is_small or _is_lower(code))
        at += size
    return at


@cached_njit(nogil=True, forceinline=True)
def _is_lower(code):
    """Whether this is one of the most frequent lower case letters beside a to z: Latin-1, Greek and Cyrillic."""
    if code < 0xDF:
        return False
    return 0xDF <= code <= 0xF6 or 0xF8 <= code <= 0xFF or 0x3B1 <= code <= 0x3C9 or 0x430 <= code <= 0x45F

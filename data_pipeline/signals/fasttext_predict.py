"""Predictions of a fastText model for many texts in one compiled pass over UTF-8 bytes.

The likeliest label is that of fastText's own `predict`; sums have another order, so scores may differ in the last
digits. Source: fastText 0.9.2, loss.cc."""

import math

import numpy as np

from gristmill.data_pipeline.signals.buffer import PADDING, TextArrays, TextBuffer
from gristmill.data_pipeline.signals.characters import character_table
from gristmill.data_pipeline.signals.fasttext_file import HIERARCHICAL_SOFTMAX, SOFTMAX
from gristmill.data_pipeline.signals.fasttext_model import LOSS, NUM_LABELS, WIDTH, WORD_NGRAMS, FastTextModel
from gristmill.data_pipeline.signals.fasttext_sums import Workspace, add_tokens, pointers, token_cache
from gristmill.data_pipeline.signals.fasttext_tokens import NUM_STATE, head_tokens
from gristmill.data_pipeline.signals.intrinsics import pointer
from gristmill.foundation.cached_njit import cached_njit

SCORE_SHIFT = 1e-5  # loss.cc, std_log
SIGMOID_STEPS, MAX_SIGMOID = 512, 8  # loss.cc, the table of sigmoid
NO_LABEL, CAPITALS = -1, -2


def predict(texts: TextBuffer, model: FastTextModel, chars: int, skip_capitals: bool) -> tuple[np.ndarray, np.ndarray]:
    """(int32[N] of the likeliest labels, float64[N] of their scores) by the first `chars` characters of each text, its
    white space as single spaces. NO_LABEL where there is nothing to predict from.

    skip_capitals: CAPITALS for a text that may be mostly in capitals, which the caller decides."""
    labels, scores = np.empty(len(texts), np.int32), np.zeros(len(texts), np.float64)
    longest = int(np.diff(texts.offsets).max(initial=0))
    work = _workspace(model, min(longest, 4 * min(chars, longest)) + PADDING)
    limits = (min(chars, 1 << 40), skip_capitals)
    arrays = TextArrays(texts.text, texts.offsets, character_table())
    _predict(arrays, model, (token_cache(model), work), limits, labels, scores)
    return labels, scores


def _workspace(model: FastTextModel, capacity: int) -> Workspace:
    """For texts of so many bytes in the part that is read."""
    width = model.input_rows.shape[1]
    return Workspace(
        starts=np.empty(capacity, np.int64),
        ends=np.empty(capacity, np.int64),
        entries=np.empty(capacity, np.int64),
        state=np.empty(NUM_STATE, np.int64),
        token=np.empty(capacity + 2, np.uint8),
        hashes=np.empty(capacity if model.settings[WORD_NGRAMS] > 1 else 0, np.int32),
        token_sum=np.zeros(width, np.float32),
        hidden=np.zeros(width, np.float32),
    )


@cached_njit(nogil=True)
def _predict(texts, model, spaces, limits, labels, scores):
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
        if at.settings[LOSS] == HIERARCHICAL_SOFTMAX:
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
    held, best, best_log = 1, np.int64(NO_LABEL), math.log(SCORE_SHIFT)
    while held:
        held -= 1
        node, log = np.int64(nodes[held]), logs[held]
        if log < best_log:
            continue
        if left[node] < 0:
            best, best_log = node, log
            continue
        chance = 1.0 / (1.0 + math.exp(-np.float64(_dot(at, output_rows, node - num_labels))))
        nodes[held], logs[held] = right[node], log + math.log(chance + SCORE_SHIFT)
        nodes[held + 1], logs[held + 1] = left[node], log + math.log(1.0 - chance + SCORE_SHIFT)
        held += 2
    return best, math.exp(best_log) if best >= 0 else 0.0


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

"""Predictions of a fastText model for many texts in one compiled pass over UTF-8 bytes.

The likeliest label is that of fastText's own `predict`; sums have another order, so scores may differ in the last
digits. Source: fastText 0.9.2, dictionary.cc (words, n-grams and their hashes), loss.cc (scores)."""

import math
from typing import Any, NamedTuple

import numpy as np

from gristmill.data_pipeline.signals.bits import ONE, ZERO, decode
from gristmill.data_pipeline.signals.buffer import PADDING, TextArrays, TextBuffer, joined
from gristmill.data_pipeline.signals.characters import SPACE, UPPER, character_table
from gristmill.data_pipeline.signals.fasttext_file import HIERARCHICAL_SOFTMAX, SOFTMAX, FastTextFile
from gristmill.data_pipeline.signals.intrinsics import ones, pointer
from gristmill.foundation.cached_njit import cached_njit

END_OF_LINE, LABEL_PREFIX = b"</s>", np.frombuffer(b"__label__", np.uint8)
FNV_START, FNV_FACTOR, MASK_32 = np.uint64(2166136261), np.uint64(16777619), np.uint64(0xFFFFFFFF)
SIGN_BITS = np.uint64(0xFFFFFF00)  # fastText hashes signed characters
WORD_NGRAM_FACTOR = np.uint64(116049371)
SCORE_SHIFT = 1e-5  # loss.cc, std_log
SIGMOID_STEPS, MAX_SIGMOID = 512, 8  # loss.cc, the table of sigmoid
MAX_SUM_BYTES = 32 << 20  # a model of a larger dictionary has no sums


class FastTextModel(NamedTuple):
    """What the kernel reads. entries: the dictionary's words, then labels, in one text with its offsets;
    entry_table: int32[2**b], open addressing by fastText's hash, -1 for a free slot.

    bucket_marks: uint64[buckets / 64, 2], which of 64 buckets were kept, and how many were kept before them; the kept
    buckets' rows stand in the order of the buckets. Empty: all have a row.
    sums: float32[words, D], of the rows of each word and its n-grams, and sum_rows int32[words], how many; empty in a
    large model. left, right: int32[2 * labels - 1], the tree of the labels; empty without hierarchical softmax."""

    entry_text: np.ndarray
    entry_offsets: np.ndarray
    entry_table: np.ndarray
    bucket_marks: np.ndarray
    input_rows: np.ndarray
    output_rows: np.ndarray
    sums: np.ndarray
    sum_rows: np.ndarray
    left: np.ndarray
    right: np.ndarray
    settings: np.ndarray  # int64[9]: NUM_WORDS ...


# Places in FastTextModel.settings. EOL: the row of </s>, -1 for none.
NUM_WORDS, NUM_LABELS, MIN_CHARS, MAX_CHARS, WORD_NGRAMS, BUCKETS, LOSS, WIDTH, EOL = range(9)


class Pointers(NamedTuple):
    """A model's arrays inside the kernel: numba would count references to arrays at every call."""

    entry_text: Any
    entry_offsets: Any
    entry_table: Any
    table_mask: Any
    bucket_marks: Any
    has_dropped: Any
    input_rows: Any
    sums: Any
    sum_rows: Any
    has_sums: Any
    settings: Any
    line: Any
    hidden: Any


class Workspace(NamedTuple):
    """line: the beginning of a text as tokens, each `<token> `; ends: where each ends in it; hashes: of the tokens, for
    word n-grams; hidden: float32[D]; outputs: float32[labels]."""

    line: np.ndarray
    ends: np.ndarray
    hashes: np.ndarray
    hidden: np.ndarray
    outputs: np.ndarray


def prepare(file: FastTextFile) -> FastTextModel:
    entry_text, entry_offsets = joined([*file.words, *(label.encode() for label in file.labels)])
    table = np.full(1 << max(4, (2 * len(entry_offsets)).bit_length()), -1, np.int32)
    _fill_table(entry_text, entry_offsets, table)
    input_rows, bucket_marks = np.ascontiguousarray(file.input_rows), np.zeros((0, 2), np.uint64)
    if file.kept_buckets is not None:
        buckets = np.array(sorted(file.kept_buckets), np.int64)
        rows = np.array([file.kept_buckets[bucket] for bucket in buckets.tolist()], np.int64)
        input_rows = np.concatenate([input_rows[: len(file.words)], input_rows[len(file.words) + rows]])
        bucket_marks = _bucket_marks(buckets, file.buckets)
    left, right = _tree(file.label_counts) if file.loss == HIERARCHICAL_SOFTMAX else (np.zeros(0, np.int32),) * 2
    end_of_line = file.words.index(END_OF_LINE) if END_OF_LINE in file.words else -1
    numbers = [len(file.words), len(file.labels), file.min_chars, file.max_chars, file.word_ngrams, file.buckets]
    settings = np.array([*numbers, file.loss, file.input_rows.shape[1], end_of_line], np.int64)
    width = input_rows.shape[1]
    has_sums = file.max_chars > 0 and 4 * len(file.words) * width <= MAX_SUM_BYTES
    num_sums = len(file.words) if has_sums else 0
    model = FastTextModel(
        entry_text=entry_text,
        entry_offsets=entry_offsets,
        entry_table=table,
        bucket_marks=bucket_marks,
        input_rows=input_rows,
        output_rows=np.ascontiguousarray(file.output_rows),
        sums=np.zeros((num_sums, width), np.float32),
        sum_rows=np.zeros(num_sums, np.int32),
        left=left,
        right=right,
        settings=settings,
    )
    longest = int(np.diff(entry_offsets).max(initial=0)) + 2
    _fill_sums(model, _workspace(model, longest))
    return model


def _workspace(model: FastTextModel, room: int) -> Workspace:
    """For texts of so many bytes in the part that is read: a token of one byte becomes four."""
    return Workspace(
        line=np.zeros(4 * room, np.uint8),
        ends=np.empty(room, np.int32),
        hashes=np.empty(room if model.settings[WORD_NGRAMS] > 1 else 0, np.int32),
        hidden=np.zeros(model.input_rows.shape[1], np.float32),
        outputs=np.zeros(model.settings[NUM_LABELS], np.float32),
    )


def predict(texts: TextBuffer, model: FastTextModel, chars: int, skip_capitals: bool) -> tuple[np.ndarray, np.ndarray]:
    """(int32[N] of the likeliest labels, float64[N] of their scores) by the first `chars` characters of each text, its
    white space as single spaces. NO_LABEL where there is nothing to predict from.

    skip_capitals: CAPITALS for a text that may be mostly in capitals, which the caller decides."""
    labels, scores = np.empty(len(texts), np.int32), np.zeros(len(texts), np.float64)
    longest = int(np.diff(texts.offsets).max(initial=0))
    room = min(longest, 4 * min(chars, longest)) + PADDING
    work = _workspace(model, room)
    limits = (min(chars, 1 << 40), skip_capitals)
    _predict(TextArrays(texts.text, texts.offsets, character_table()), model, work, limits, labels, scores)
    return labels, scores


NO_LABEL, CAPITALS = -1, -2
UNBUILT_WEIGHT = 10**15  # of an inner node that has no children yet (loss.cc)


def _bucket_marks(buckets: np.ndarray, num_buckets: int) -> np.ndarray:
    """bucket_marks of FastTextModel. A table of all rows would take 8 MB, which no CPU's cache of a core holds."""
    marks_B2 = np.zeros((num_buckets // 64 + 1, 2), np.uint64)
    np.bitwise_or.at(marks_B2[:, 0], buckets >> 6, np.uint64(1) << (buckets & 63).astype(np.uint64))
    kept = np.bincount(buckets >> 6, minlength=len(marks_B2))
    marks_B2[1:, 1] = np.cumsum(kept)[:-1]
    return marks_B2


def _tree(counts: list[int]) -> tuple[np.ndarray, np.ndarray]:
    """Children of every node: leaves 0 to L - 1, inner nodes L to 2L - 2, the root last (loss.cc, buildTree).

    Raises ValueError for counts that no training data has."""
    if max(counts) >= UNBUILT_WEIGHT:
        raise ValueError(f"a label count of {max(counts)} is damaged")
    total = len(counts)
    left, right = np.full(2 * total - 1, -1, np.int32), np.full(2 * total - 1, -1, np.int32)
    weights = [*counts, *([UNBUILT_WEIGHT] * (total - 1))]
    leaf, node = total - 1, total
    for parent in range(total, 2 * total - 1):
        children = []
        for _ in range(2):
            if leaf >= 0 and weights[leaf] < weights[node]:
                children.append(leaf)
                leaf -= 1
            else:
                children.append(node)
                node += 1
        left[parent], right[parent] = children
        weights[parent] = weights[children[0]] + weights[children[1]]
    return left, right


@cached_njit(nogil=True)
def _predict(texts, model, work, limits, labels, scores):
    text, flags = pointer(texts.text, 0), pointer(texts.flags, 0)
    at = _pointers(model, work)
    settings = at.settings
    for k in range(len(labels)):
        labels[k] = NO_LABEL
        num_tokens, is_capital = _write_head(
            text, texts.offsets[k], texts.offsets[k + 1] - 1, flags, limits[0], (at.line, pointer(work.ends, 0))
        )
        if is_capital and limits[1]:
            labels[k] = CAPITALS
            continue
        if num_tokens < 0:
            continue
        for i in range(settings[WIDTH]):
            at.hidden[i] = np.float32(0)
        rows = _add_tokens(at, work.ends, num_tokens, work.hashes)
        if rows == 0:
            continue
        share = np.float32(1.0 / rows)
        for i in range(settings[WIDTH]):
            at.hidden[i] *= share
        if settings[LOSS] == HIERARCHICAL_SOFTMAX:
            labels[k], scores[k] = _likeliest_leaf(at, pointer(model.output_rows, 0), model.left, model.right)
        else:
            labels[k], scores[k] = _likeliest_output(at, pointer(model.output_rows, 0), work.outputs)


@cached_njit(nogil=True, inline="always")
def _pointers(model, work):
    return Pointers(
        pointer(model.entry_text, 0),
        pointer(model.entry_offsets, 0),
        pointer(model.entry_table, 0),
        len(model.entry_table) - 1,
        pointer(model.bucket_marks, 0),
        len(model.bucket_marks) > 0,
        pointer(model.input_rows, 0),
        pointer(model.sums, 0),
        pointer(model.sum_rows, 0),
        len(model.sum_rows) > 0,
        pointer(model.settings, 0),
        pointer(work.line, 0),
        pointer(work.hidden, 0),
    )


@cached_njit(nogil=True)
def _write_head(text, at, end, flags, chars, out):
    """Writes the tokens of the first `chars` characters, white space taken as single spaces and the ends stripped, of
    which at most 2 * chars characters of the text are read (signals/language.head in Python).

    Returns (number of tokens, -1 for an empty line; whether the line may be mostly in capitals)."""
    line, ends = out
    put, num_tokens, read, written = 0, 0, 0, 0
    is_open, is_behind_space = False, False
    letters, capitals, uppers, has_lower = 0, 0, 0, False
    while at < end and read < 2 * chars and written < chars:
        code, size = decode(text, at)
        flag = flags[code]
        read += 1
        if flag & SPACE or code == 0:
            if is_open:
                line[put], line[put + 1] = 0x3E, 0x20
                put += 2
                ends[num_tokens] = put - 1
                num_tokens += 1
                is_open = False
            if flag & SPACE:
                is_behind_space = written > 0
                at += size
                continue
        if is_behind_space:
            written += 1
            is_behind_space = False
            if written == chars:
                break
        written += 1
        if code != 0 and not is_open:
            line[put] = 0x3C
            put += 1
            is_open = True
        for i in range(size if code != 0 else 0):
            line[put] = text[at + i]
            put += 1
        uppers += flag & UPPER != 0
        capitals += 0x41 <= code <= 0x5A
        is_small = 0x61 <= code <= 0x7A
        letters += is_small or 0x41 <= code <= 0x5A
        has_lower = has_lower or is_small or _is_lower(code)
        at += size
    if is_open:
        line[put], line[put + 1] = 0x3E, 0x20
        ends[num_tokens] = put + 1
        num_tokens += 1
    is_capital = (uppers > 0 and not has_lower) or (written > 5 and capitals > 0.8 * letters)
    return num_tokens if written > 0 else -1, is_capital


@cached_njit(nogil=True, inline="always")
def _is_lower(code):
    """Whether this is one of the most frequent lower case letters beside a to z: Latin-1, Greek and Cyrillic."""
    if code < 0xDF:
        return False
    return 0xDF <= code <= 0xF6 or 0xF8 <= code <= 0xFF or 0x3B1 <= code <= 0x3C9 or 0x430 <= code <= 0x45F


@cached_njit(nogil=True)
def _add_tokens(at, ends, num_tokens, hashes):
    """Adds the rows of all tokens and of the line's end to at.hidden; returns how many rows."""
    rows, first, num_hashes = 0, 0, 0
    end_of_line, num_words = at.settings[EOL], at.settings[NUM_WORDS]
    is_ended = False
    for k in range(num_tokens):
        stop = ends[k]
        token_hash = _hash(at.line, first + 1, stop - 1)
        entry = _find(at, first + 1, stop - 1, token_hash)
        if entry >= 0 and entry == end_of_line:
            is_ended = True
            break
        if (0 <= entry < num_words) or (entry < 0 and not _is_label(at.line, first + 1, stop - 1)):
            if not (entry < 0 and _is_end_of_line(at.line, first + 1, stop - 1)):
                rows += _add_token(at, first, stop, entry)
            else:
                is_ended = True
            if len(hashes):
                hashes[num_hashes] = np.int32(np.uint32(token_hash))
                num_hashes += 1
            if is_ended:
                break
        first = stop + 1
    if end_of_line >= 0:
        rows += _add_row(at, end_of_line)
    if len(hashes):
        hashes[num_hashes] = np.int32(np.uint32(_end_of_line_hash()))
        rows += _add_word_ngrams(at, hashes, num_hashes + 1)
    return rows


@cached_njit(nogil=True, inline="always")
def _add_token(at, first, stop, entry):
    """Adds the rows of the token at.line[first:stop], brackets included."""
    width = at.settings[WIDTH]
    if entry >= 0 and at.has_sums:
        for i in range(width):
            at.hidden[i] += at.sums[entry * width + i]
        return np.int64(at.sum_rows[entry])
    rows = _add_row(at, entry) if entry >= 0 else 0
    return rows + _add_ngrams(at, first, stop)


@cached_njit(nogil=True, inline="always")
def _add_row(at, row):
    width = at.settings[WIDTH]
    for i in range(width):
        at.hidden[i] += at.input_rows[row * width + i]
    return 1


@cached_njit(nogil=True)
def _add_ngrams(at, first, stop):
    """Adds the rows of the token's character n-grams (dictionary.cc, computeSubwords)."""
    rows, line = 0, at.line
    min_chars, max_chars, buckets = at.settings[MIN_CHARS], at.settings[MAX_CHARS], at.settings[BUCKETS]
    inverse = 1.0 / max(buckets, 1)
    start = first
    while start < stop:
        value, place, count = FNV_START, start, 1
        while place < stop and count <= max_chars:
            value = _hashed(value, line[place])
            place += 1
            while place < stop and line[place] & 0xC0 == 0x80:
                value = _hashed(value, line[place])
                place += 1
            if count >= min_chars and not (count == 1 and (start == first or place == stop)):
                rows += _add_bucket(at, _remainder(np.int64(value), buckets, inverse))
            count += 1
        start += 1
        while start < stop and line[start] & 0xC0 == 0x80:
            start += 1
    return rows


@cached_njit(nogil=True, inline="always")
def _remainder(value, divisor, inverse):
    """value % divisor of a value below 2**32, by a product: a division takes as long as all the rest."""
    left = value - np.int64(value * inverse) * divisor
    if left < 0:
        return left + divisor
    return left - divisor if left >= divisor else left


@cached_njit(nogil=True, inline="always")
def _add_bucket(at, bucket):
    if not at.has_dropped:
        return _add_row(at, at.settings[NUM_WORDS] + bucket)
    marks, mark = at.bucket_marks[2 * (bucket >> 6)], ONE << np.uint64(bucket & 63)
    if marks & mark == ZERO:
        return 0
    row = np.int64(at.bucket_marks[2 * (bucket >> 6) + 1] + ones(marks & (mark - ONE)))
    return _add_row(at, at.settings[NUM_WORDS] + row)


@cached_njit(nogil=True)
def _add_word_ngrams(at, hashes, num_hashes):
    """dictionary.cc, addWordNgrams."""
    rows = 0
    for i in range(num_hashes):
        value = np.uint64(np.int64(hashes[i]))
        for j in range(i + 1, min(num_hashes, i + at.settings[WORD_NGRAMS])):
            value = value * WORD_NGRAM_FACTOR + np.uint64(np.int64(hashes[j]))
            rows += _add_bucket(at, np.int64(value % np.uint64(at.settings[BUCKETS])))
    return rows


@cached_njit(nogil=True, inline="always")
def _hashed(value, byte):
    signed = np.uint64(byte) | (SIGN_BITS if byte & 0x80 else np.uint64(0))
    return ((value ^ signed) * FNV_FACTOR) & MASK_32


@cached_njit(nogil=True, inline="always")
def _hash(line, first, stop):
    """FNV-1a of 32 bits."""
    value = FNV_START
    for i in range(first, stop):
        value = _hashed(value, line[i])
    return value


@cached_njit(nogil=True, inline="always")
def _end_of_line_hash():
    value = FNV_START
    for byte in (0x3C, 0x2F, 0x73, 0x3E):
        value = _hashed(value, np.uint8(byte))
    return value


@cached_njit(nogil=True, inline="always")
def _is_end_of_line(line, first, stop):
    if stop - first != 4:
        return False
    return line[first] == 0x3C and line[first + 1] == 0x2F and line[first + 2] == 0x73 and line[first + 3] == 0x3E


@cached_njit(nogil=True, inline="always")
def _is_label(line, first, stop):
    """Whether an unknown token begins like a label: fastText leaves it out."""
    if stop - first < len(LABEL_PREFIX):
        return False
    same = 0
    while same < len(LABEL_PREFIX) and line[first + same] == LABEL_PREFIX[same]:
        same += 1
    return same == len(LABEL_PREFIX)


@cached_njit(nogil=True, inline="always")
def _find(at, first, stop, token_hash):
    """The dictionary's entry of line[first:stop], or -1."""
    slot = np.int64(token_hash) & at.table_mask
    while at.entry_table[slot] >= 0:
        entry = np.int64(at.entry_table[slot])
        start = at.entry_offsets[entry]
        if at.entry_offsets[entry + 1] - 1 - start == stop - first:
            i = 0
            while i < stop - first and at.entry_text[start + i] == at.line[first + i]:
                i += 1
            if i == stop - first:
                return entry
        slot = (slot + 1) & at.table_mask
    return np.int64(-1)


@cached_njit(nogil=True)
def _fill_table(text, offsets, table):
    for entry in range(len(offsets) - 1):
        slot = np.int64(_hash(text, offsets[entry], offsets[entry + 1] - 1)) & (len(table) - 1)
        while table[slot] >= 0:
            slot = (slot + 1) & (len(table) - 1)
        table[slot] = entry


@cached_njit(nogil=True)
def _fill_sums(model, work):
    """Fills model.sums and model.sum_rows; work.line has room for the longest entry with its brackets."""
    at = _pointers(model, work)
    width = model.sums.shape[1]
    for entry in range(len(model.sum_rows)):
        start, end = model.entry_offsets[entry], model.entry_offsets[entry + 1] - 1
        work.line[0], work.line[end - start + 1] = 0x3C, 0x3E
        work.line[1 : end - start + 1] = model.entry_text[start:end]
        work.hidden[:] = np.float32(0)
        rows = _add_row(at, entry)
        if entry != model.settings[EOL]:
            rows += _add_ngrams(at, 0, end - start + 2)
        model.sums[entry] = work.hidden[:width]
        model.sum_rows[entry] = rows


@cached_njit(nogil=True, inline="always")
def _dot(at, output_rows, row):
    total, width = np.float32(0), at.settings[WIDTH]
    for i in range(width):
        total += at.hidden[i] * output_rows[row * width + i]
    return total


@cached_njit(nogil=True)
def _likeliest_leaf(at, output_rows, left, right):
    """(label, score) by a search of the tree that leaves out what cannot be better (loss.cc, dfs with k = 1)."""
    num_labels = at.settings[NUM_LABELS]
    nodes, logs = np.empty(len(left) + 1, np.int32), np.empty(len(left) + 1, np.float64)
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


@cached_njit(nogil=True, inline="always")
def _sigmoid(value):
    """By fastText's table of steps."""
    if value < -MAX_SIGMOID:
        return 0.0
    if value > MAX_SIGMOID:
        return 1.0
    step = np.int64((value + MAX_SIGMOID) * SIGMOID_STEPS / MAX_SIGMOID / 2)
    return 1.0 / (1.0 + math.exp(-(step * 2 * MAX_SIGMOID / SIGMOID_STEPS - MAX_SIGMOID)))

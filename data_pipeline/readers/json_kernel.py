"""Lines of JSON as columns, in one compiled pass over bytes.

Lines that are not plain (not an object, no text, keys that are escaped or stand twice, invalid UTF-8, lone surrogates,
any mistake in the syntax) are left to the reader in Python, which decides what becomes of them."""

from typing import NamedTuple

import numpy as np

from gristmill.data_pipeline.signals.bits import BLOCK, ZERO, encode, first_bit, is_utf8
from gristmill.data_pipeline.signals.intrinsics import bytes_within, copy_block, pointer
from gristmill.foundation.runtime.kernels.cached_njit import cached_njit

# JSON strings, numbers and nested values in UTF-8 bytes, for compiled readers.
#
# The bytes of a line end with a line end or with zeros, at which every function stops.

PLAIN, NULL, UNCERTAIN = range(3)  # kinds of values: orjson writes them as they stand; null; to be parsed by orjson


def _escapes() -> np.ndarray:
    """uint8[256]: the character of each escape of one letter; 0 for none."""
    table = np.zeros(256, np.uint8)
    for letter, character in zip('"\\/bfnrt', '"\\/\b\f\n\r\t', strict=True):
        table[ord(letter)] = ord(character)
    return table


ESCAPES = _escapes()


@cached_njit(nogil=True, forceinline=True)
def is_null(piece, at):
    return piece[at] == 0x6E and piece[at + 1] == 0x75 and piece[at + 2] == 0x6C and piece[at + 3] == 0x6C


@cached_njit(nogil=True)
def string_end(piece, at):
    """(behind the string that begins at `at`, -1 if there is none; whether it holds escapes)."""
    if piece[at] != 0x22:
        return np.int64(-1), False
    at, is_escaped = np.int64(at + 1), False
    while True:
        marks = bytes_within(piece, at, 0x22, 1) | bytes_within(piece, at, 0x5C, 1) | bytes_within(piece, at, 0, 0x20)
        if marks == ZERO:
            at += BLOCK
            continue
        at += first_bit(marks)
        if piece[at] == 0x22:
            return at + 1, is_escaped
        if piece[at] != 0x5C or piece[at + 1] < 0x20:
            return np.int64(-1), False
        is_escaped = True
        at += 2


@cached_njit(nogil=True)
def copy_string(piece, at, out, put):
    """Writes the string that begins at `at` without its escapes; returns (behind it, -1 if it is invalid or has a lone
    surrogate; where the next may be written). Writes up to a block behind that."""
    at += 1
    while True:
        copy_block(out, put, piece, at)
        marks = bytes_within(piece, at, 0x22, 1) | bytes_within(piece, at, 0x5C, 1) | bytes_within(piece, at, 0, 0x20)
        if marks == ZERO:
            at += BLOCK
            put += BLOCK
            continue
        size = first_bit(marks)
        at += size
        put += size
        if piece[at] == 0x22:
            return at + 1, put
        if piece[at] != 0x5C:
            return np.int64(-1), put
        letter = ESCAPES[piece[at + 1]]
        if letter != 0:
            out[put] = letter
            put += 1
            at += 2
        elif piece[at + 1] == 0x75:
            at, put = _copy_code(piece, at + 2, out, put)
            if at < 0:
                return np.int64(-1), put
        else:
            return np.int64(-1), put


@cached_njit(nogil=True)
def _copy_code(piece, at, out, put):
    r"""Writes the character of an escape \uXXXX, or of two that are a pair of surrogates."""
    code = _four_digits(piece, at)
    at += 4
    if 0xD800 <= code < 0xDC00 and piece[at] == 0x5C and piece[at + 1] == 0x75:
        low = _four_digits(piece, at + 2)
        if 0xDC00 <= low < 0xE000:
            code = 0x10000 + ((code - 0xD800) << 10 | (low - 0xDC00))
            at += 6
    if code < 0 or 0xD800 <= code < 0xE000:
        return np.int64(-1), put
    return at, encode(code, out, put)


@cached_njit(nogil=True)
def _four_digits(piece, at):
    """The value of four hex digits; -1 if they are none."""
    code = np.int64(0)
    for i in range(4):
        byte = np.int64(piece[at + i])
        small = byte | 0x20
        if 0x30 <= byte <= 0x39:
            code = code << 4 | byte - 0x30
        elif 0x61 <= small <= 0x66:
            code = code << 4 | small - 0x57
        else:
            return np.int64(-1)
    return code


@cached_njit(nogil=True)
def value_end(piece, at, end):
    """(behind the value that begins at `at`, -1 for a mistake; its kind). An UNCERTAIN one may still be a mistake."""
    byte = piece[at]
    if byte == 0x22:
        at, is_escaped = string_end(piece, at)
        return at, UNCERTAIN if is_escaped else PLAIN
    if byte == 0x7B or byte == 0x5B:
        return _nested_end(piece, at, end), UNCERTAIN
    first = at
    while at < end and piece[at] > 0x20 and piece[at] != 0x2C and piece[at] != 0x7D and piece[at] != 0x5D:
        at += 1
    if at - first == 4 and is_null(piece, first):
        return at, NULL
    return at if at > first else np.int64(-1), PLAIN if _is_whole_number(piece, first, at) else UNCERTAIN


@cached_njit(nogil=True)
def _is_whole_number(piece, first, stop):
    """Whether orjson writes the number as it stands here."""
    if piece[first] == 0x2D:
        first += 1
        if piece[first] == 0x30:
            return False
    if stop - first < 1 or stop - first > 18 or (piece[first] == 0x30 and stop - first > 1):
        return False
    for at in range(first, stop):  # noqa: SIM110 - numba has no all()
        if not 0x30 <= piece[at] <= 0x39:
            return False
    return True


@cached_njit(nogil=True)
def _nested_end(piece, at, end):
    depth = 0
    while at < end:
        byte = piece[at]
        if byte == 0x22:
            at, _ = string_end(piece, at)
            if at < 0:
                return at
            continue
        if byte == 0x7B or byte == 0x5B:
            depth += 1
        elif byte == 0x7D or byte == 0x5D:
            depth -= 1
        at += 1
        if depth == 0:
            return np.int64(at)
    return np.int64(-1)


TEXT, URL, LANGUAGE, OTHER = range(4)  # of fields; the first three are columns
# Places in the state. AT: in the piece; NUMBER: of the line; NUM_UNCERTAIN: records whose metadata orjson must parse;
# the last four: how many bytes of a column are used.
AT, ROWS, NUMBER, NUM_UNCERTAIN, NUM_PUT = 0, 1, 2, 3, 4
NUM_STATE = 8
METADATA = 3  # the column behind TEXT, URL and LANGUAGE
ALL_READ, BATCH_FULL, LINE_LEFT = range(3)  # what parse_lines returns
LEFT, BLANK, READ = -1, 0, 1


class LineRules(NamedTuple):
    """names: the fields of text, URL and language, joined, with name_ends int64[3]; a field without a name has an end
    of -1. default_language: for records without one. metadata: ALL_METADATA ..."""

    names: np.ndarray
    name_ends: np.ndarray
    default_language: np.ndarray
    metadata: int
    max_line_bytes: int
    max_rows: int
    max_bytes: int


class LineColumns(NamedTuple):
    """Where parse_lines writes: the data and offsets of each column (record_columns.StringColumn), the records'
    numbers, and of each where its line begins in the piece, and whether orjson must still parse its metadata."""

    data: tuple
    offsets: tuple
    numbers: np.ndarray
    line_starts: np.ndarray
    is_uncertain: np.ndarray


@cached_njit(nogil=True)
def parse_lines(piece_array, piece_bytes, rules, columns, members, state):
    """Reads lines from state[AT] on, until the piece ends, the batch is full, or a line is left; then state[AT] is
    where it begins. The piece ends with a line end, or the file ends; signals/buffer.PADDING bytes follow."""
    piece = pointer(piece_array, 0)
    while state[AT] < piece_bytes:
        row = state[ROWS]
        used = state[NUM_PUT] + state[NUM_PUT + 1] + state[NUM_PUT + 2] + state[NUM_PUT + 3]
        if row == rules.max_rows or used >= rules.max_bytes:
            return BATCH_FULL
        start = state[AT]
        end = _line_end(piece, start, piece_bytes)
        if end - start > rules.max_line_bytes:
            return LINE_LEFT
        outcome = _read_line(piece, (start, end), rules, columns, members, state)
        if outcome == LEFT:
            return LINE_LEFT
        if outcome == READ:
            columns.numbers[row] = state[NUMBER]
            columns.line_starts[row] = start
            for column in range(4):
                columns.offsets[column][row + 1] = state[NUM_PUT + column]
            state[ROWS] = row + 1
        state[NUMBER] += 1
        state[AT] = end + 1
    return ALL_READ


@cached_njit(nogil=True)
def _line_end(piece, at, end):
    while at < end:
        marks = bytes_within(piece, at, 0x0A, 1)
        if marks != ZERO:
            return min(at + first_bit(marks), end)
        at += BLOCK
    return end


@cached_njit(nogil=True)
def _read_line(piece, line, rules, columns, members, state):
    """Adds the line's values to the columns; state's places of them change only if the line is READ."""
    start, end = line
    at = _skip_space(piece, start)
    if at >= end:
        return BLANK
    if piece[at] != 0x7B or not is_utf8(piece, start, end):
        return LEFT
    text_put, url_put, language_put = state[NUM_PUT], state[NUM_PUT + 1], state[NUM_PUT + 2]
    seen, count = 0, 0
    while True:
        first = _skip_space(piece, at + 1)
        behind, is_escaped = string_end(piece, first)
        if behind < 0 or is_escaped:
            return LEFT
        at = _skip_space(piece, behind)
        if piece[at] != 0x3A:
            return LEFT
        at = _skip_space(piece, at + 1)
        field = _field(piece, first + 1, behind - 1, rules)
        if field == OTHER:
            value = at
            at, kind = value_end(piece, at, end)
            if at < 0 or count == MAX_MEMBERS:
                return LEFT
            note_member(members, count, (first, behind, value, at), kind)
            count += 1
        else:
            if seen >> field & 1:
                return LEFT
            seen |= 1 << field
            if piece[at] != 0x22:
                if field == TEXT or not is_null(piece, at):
                    return LEFT
                at += 4
            elif field == TEXT:
                at, text_put = copy_string(piece, at, pointer(columns.data[TEXT], 0), text_put)
            elif field == URL:
                at, url_put = copy_string(piece, at, pointer(columns.data[URL], 0), url_put)
            else:
                at, language_put = copy_string(piece, at, pointer(columns.data[LANGUAGE], 0), language_put)
            if at < 0:
                return LEFT
        at = _skip_space(piece, at)
        if piece[at] != 0x2C:
            break
    if piece[at] != 0x7D or _skip_space(piece, at + 1) < end or not seen & 1:
        return LEFT
    put, is_uncertain = write_metadata(
        piece, members, count, rules.metadata, pointer(columns.data[METADATA], 0), state[NUM_PUT + METADATA]
    )
    if put < 0:
        return LEFT
    columns.is_uncertain[state[ROWS]] = is_uncertain
    state[NUM_UNCERTAIN] += is_uncertain
    columns.data[TEXT][text_put] = 0x0A
    if language_put == state[NUM_PUT + LANGUAGE]:
        for byte in rules.default_language:
            columns.data[LANGUAGE][language_put] = byte
            language_put += 1
    state[NUM_PUT], state[NUM_PUT + 1], state[NUM_PUT + 2] = text_put + 1, url_put, language_put
    state[NUM_PUT + METADATA] = put
    return READ


@cached_njit(nogil=True, forceinline=True)
def _skip_space(piece, at):
    while piece[at] == 0x20 or piece[at] == 0x09 or piece[at] == 0x0D:
        at += 1
    return at


@cached_njit(nogil=True, forceinline=True)
def _field(piece, first, stop, rules):
    start = 0
    for field in range(OTHER):
        end = rules.name_ends[field]
        if end < 0:
            continue
        if end - start == stop - first:
            same = 0
            while same < stop - first and piece[first + same] == rules.names[start + same]:
                same += 1
            if same == stop - first:
                return field
        start = end
    return OTHER


# The fields of a JSON line that become metadata: their places in the line, and their canonical JSON.

ALL_METADATA, NO_METADATA, SOME_METADATA = range(3)  # which of the fields the recipe keeps
MAX_MEMBERS = 64  # a line with more fields is left to the reader in Python


class Members(NamedTuple):
    """Work space. places: int64[MAX_MEMBERS, 4], where the keys and values of other fields begin and end; kinds: int64
    of their values; order: int64, for sorting."""

    places: np.ndarray
    kinds: np.ndarray
    order: np.ndarray


@cached_njit(nogil=True, forceinline=True)
def note_member(members, count, places, kind):
    for i in range(4):
        members.places[count, i] = places[i]
    members.kinds[count] = kind
    members.order[count] = count


@cached_njit(nogil=True)
def write_metadata(piece, members, count, metadata, out, put):
    """Writes the other fields as canonical JSON, or as they stand where orjson must parse them. metadata: ALL_METADATA
    ...; returns (where the next may be written, -1 for a key that stands twice; whether orjson must parse them)."""
    is_uncertain = metadata == SOME_METADATA and count > 0
    for k in range(count):
        is_uncertain = is_uncertain or members.kinds[k] == UNCERTAIN
    if not is_uncertain and not _sort_members(piece, members, count):
        return np.int64(-1), False
    out[put] = 0x7B
    put += 1
    is_first = True
    for i in range(count):
        k = members.order[i]
        if not is_uncertain and (members.kinds[k] == NULL or metadata == NO_METADATA):
            continue
        if not is_first:
            out[put] = 0x2C
            put += 1
        is_first = False
        put = _copy(piece, members.places[k, 0], members.places[k, 1], out, put)
        out[put] = 0x3A
        put = _copy(piece, members.places[k, 2], members.places[k, 3], out, put + 1)
    out[put] = 0x7D
    return np.int64(put + 1), is_uncertain


@cached_njit(nogil=True)
def _sort_members(piece, members, count):
    """Puts members.order in the order of the keys; False if two are equal."""
    order = members.order
    for i in range(1, count):
        member, place = order[i], i
        while place > 0:
            compared = _compare(piece, members.places, member, order[place - 1])
            if compared == 0:
                return False
            if compared > 0:
                break
            order[place] = order[place - 1]
            place -= 1
        order[place] = member
    return True


@cached_njit(nogil=True)
def _compare(piece, places, left, right):
    """Below 0, 0 or above 0, as the key of one is less than that of the other, equal, or more."""
    first, second = places[left, 0] + 1, places[right, 0] + 1
    size, other_size = places[left, 1] - 1 - first, places[right, 1] - 1 - second
    for i in range(min(size, other_size)):
        if piece[first + i] != piece[second + i]:
            return np.int64(piece[first + i]) - np.int64(piece[second + i])
    return np.int64(size - other_size)


@cached_njit(nogil=True, forceinline=True)
def _copy(piece, first, stop, out, put):
    for at in range(first, stop, BLOCK):
        copy_block(out, put + at - first, piece, at)
    return put + stop - first

"""Tokens of the beginning of a text, as fastText reads them: what stands between white space and NUL."""

import numpy as np

from gristmill.data_pipeline.signals.bits import BLOCK, ONE, ZERO, below, decode, first_bit, without_first
from gristmill.data_pipeline.signals.characters import SPACE, UPPER
from gristmill.data_pipeline.signals.intrinsics import bytes_within, ones
from gristmill.foundation.cached_njit import cached_njit

# Places in the state of a head that is being read. READ: characters of the text; WRITTEN: characters of the line, in
# which white space is one space; STARTS, ENDS: how many tokens began and ended; LETTERS, CAPITALS: a to z, A to Z.
READ, WRITTEN, STARTS, ENDS, IS_OPEN, IS_BEHIND_SPACE, LETTERS, CAPITALS, UPPERS, HAS_LOWER = range(10)
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
    written, capitals = state[WRITTEN], state[CAPITALS]
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
    state[CAPITALS] += capitals
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
        state[CAPITALS] += 0x41 <= code <= 0x5A
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

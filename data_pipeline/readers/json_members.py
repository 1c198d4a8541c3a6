"""The fields of a JSON line that become metadata: their places in the line, and their canonical JSON."""

from typing import NamedTuple

import numpy as np

from gristmill.data_pipeline.readers.json_values import NULL, UNCERTAIN
from gristmill.data_pipeline.signals.bits import BLOCK
from gristmill.data_pipeline.signals.intrinsics import copy_block
from gristmill.foundation.cached_njit import cached_njit

ALL_METADATA, NO_METADATA, SOME_METADATA = range(3)  # which of the fields the recipe keeps
MAX_MEMBERS = 64  # a line with more fields is left to the reader in Python


class Members(NamedTuple):
    """Work space. places: int64[MAX_MEMBERS, 4], where the keys and values of other fields begin and end; kinds: int64
    of their values; order: int64, for sorting."""

    places: np.ndarray
    kinds: np.ndarray
    order: np.ndarray


def new_members() -> Members:
    return Members(
        np.empty((MAX_MEMBERS, 4), np.int64), np.empty(MAX_MEMBERS, np.int64), np.empty(MAX_MEMBERS, np.int64)
    )


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
        one, place = order[i], i
        while place > 0:
            compared = _compare(piece, members.places, one, order[place - 1])
            if compared == 0:
                return False
            if compared > 0:
                break
            order[place] = order[place - 1]
            place -= 1
        order[place] = one
    return True


@cached_njit(nogil=True)
def _compare(piece, places, one, other):
    """Below 0, 0 or above 0, as the key of one is less than that of the other, equal, or more."""
    first, second = places[one, 0] + 1, places[other, 0] + 1
    size, other_size = places[one, 1] - 1 - first, places[other, 1] - 1 - second
    for i in range(min(size, other_size)):
        if piece[first + i] != piece[second + i]:
            return np.int64(piece[first + i]) - np.int64(piece[second + i])
    return np.int64(size - other_size)


@cached_njit(nogil=True, forceinline=True)
def _copy(piece, first, stop, out, put):
    for at in range(first, stop, BLOCK):
        copy_block(out, put + at - first, piece, at)
    return put + stop - first

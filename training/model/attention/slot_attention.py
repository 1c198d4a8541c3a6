"""Attention of one new token a row to the cache on a CPU, each row up to its own length.

torch's kernels take one length for all rows of a batch, so that a short sequence costs as much as the longest. Here no
column behind a row's token is read. 12 rows of 8 to 346 tokens, 8 heads of 32 over 4 groups: 0.15 ms against 1.0 ms
(one core of an EPYC with AVX2, 2026-11-27)."""

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from gristmill.foundation.runtime.kernels.cached_njit import cached_njit
from gristmill.training.model.cpu_kernels import FAST, exp_without_power, thread_pool
from gristmill.training.model.decoding_cache import SlotView

# B rows, N slots or tokens, C columns, H query heads, G key/value heads, R query heads of a group, K head width

MIN_SHARED_PRODUCTS = 1 << 22  # from which on threads share them


def attends_by_rows(query_B1HK: Tensor, mask_B1S: object) -> bool:
    """Whether `attend_by_rows` computes the attention of this pass. mask_B1S: of its metadata."""
    has_plain_mask = isinstance(mask_B1S, Tensor) and mask_B1S.dtype == torch.bool
    is_step = query_B1HK.shape[1] == 1 and query_B1HK.device.type == "cpu" and query_B1HK.dtype == torch.float32
    return is_step and has_plain_mask and not torch.compiler.is_compiling()


def attend_by_rows(
    query_B1HK: Tensor, key_B1GK: Tensor, value_B1GK: Tensor, slots: SlotView, scale: float, window: int | None
) -> Tensor:
    """Writes the new keys and values to the slots, then softmax(scale q k^T) v of each token over the columns of its
    slot up to its own, [B, 1, H, K]. Rows of padding are not written and give zeros. window: columns that a token sees
    at most."""
    memories = slots.memory.reserve(slots.rows, key_B1GK, value_B1GK)
    query_BF, new_BF = query_B1HK.flatten(1), torch.cat([key_B1GK.flatten(1), value_B1GK.flatten(1)], dim=1)
    positions_B, mixed_BF = slots.rows.positions_BT.flatten(), query_BF.new_zeros(query_BF.shape)
    tensors = (query_BF.contiguous(), new_BF, *memories, slots.rows.slots_B, positions_B, mixed_BF)
    queries, new, keys, values, slots_B, columns_B, mixed = (tensor.numpy() for tensor in tensors)
    write_tokens(new, 0, keys, values, slots_B, columns_B)
    reach = slots.rows.span if window is None else min(window, slots.rows.span)
    attend_tokens(queries, (keys, values), SlotPlaces(slots_B, columns_B), mixed, scale, reach)
    return mixed_BF.view_as(query_B1HK)


@dataclass(frozen=True)
class SlotPlaces:
    """Slot and column of each token, int64; column -1: the token is left out. beginnings: where the first columns of a
    slot are not read, since other code has."""

    slots_N: np.ndarray
    positions_N: np.ndarray
    beginnings: "AttendedBeginnings | None" = None


@dataclass(frozen=True)
class AttendedBeginnings:
    """The attention of tokens to the first columns of their slots, so many of each (0: none). mixed_NF: [N, H x K];
    logsumexp_NH: of the scores of these columns, natural. Both count where there are columns."""

    columns_N: np.ndarray
    mixed_NF: np.ndarray
    logsumexp_NH: np.ndarray


def attend_tokens(
    query_NF: np.ndarray,
    memories: tuple[np.ndarray, np.ndarray],
    places: SlotPlaces,
    mixed_NF: np.ndarray,
    scale: float,
    reach: int,
) -> None:
    """softmax(scale q k^T) v of each token over the columns of its slot up to its own, reach of them at most.

    The heads of a query are the first numbers of its row. memories: keys and values [slots, C, G, K]. Rows of mixed
    whose tokens are left out stay as they are."""
    beginnings = places.beginnings
    if beginnings is None:
        nothing_NF = np.empty((0, 0), dtype=np.float32)
        beginnings = AttendedBeginnings(np.zeros_like(places.positions_N), nothing_NF, nothing_NF)
    known = (beginnings.columns_N, beginnings.mixed_NF, beginnings.logsumexp_NH)
    arrays = (query_NF, *memories, places.slots_N, places.positions_N, *known, mixed_NF)
    threads = torch.get_num_threads()
    if threads == 1 or int(places.positions_N.sum()) * mixed_NF.shape[1] < MIN_SHARED_PRODUCTS:
        _attend(*arrays, scale, reach, 0, 1)
        return
    list(thread_pool(threads).map(lambda first: _attend(*arrays, scale, reach, first, threads), range(threads)))


# The kernels index flat arrays by unsigned numbers: of those the compiler makes vectors, of views it does not.


@cached_njit(nogil=True)
def write_tokens(
    new_NF: np.ndarray,
    first: int,
    key_NCGK: np.ndarray,
    value_NCGK: np.ndarray,
    slots_N: np.ndarray,
    positions_N: np.ndarray,
) -> None:
    """Writes keys and values of each row, which lie behind each other from number `first` on, to its column of its
    slot; those of column -1 are left out."""
    capacity, groups, width = key_NCGK.shape[1:]
    keys, values, new = key_NCGK.ravel(), value_NCGK.ravel(), new_NF.ravel()
    numbers = np.uint64(groups * width)
    for row in range(len(new_NF)):
        if positions_N[row] < 0:
            continue
        start = np.uint64((slots_N[row] * capacity + positions_N[row]) * groups * width)
        key = np.uint64(row * new_NF.shape[1] + first)
        value = key + numbers
        for k in range(numbers):
            keys[start + k] = new[key + k]
        for k in range(numbers):
            values[start + k] = new[value + k]


@cached_njit(nogil=True, fastmath=FAST)
def _attend(
    query_NF: np.ndarray,
    key_NCGK: np.ndarray,
    value_NCGK: np.ndarray,
    slots_N: np.ndarray,
    positions_N: np.ndarray,
    known_columns_N: np.ndarray,
    known_NF: np.ndarray,
    known_logsumexp_NH: np.ndarray,
    mixed_NF: np.ndarray,
    scale: float,
    reach: int,
    first: int,
    step: int,
) -> None:
    """Every step-th pair of a row and a group, from the first on. What is known of a row's first columns counts as one
    column, whose score is their logsumexp and whose value their mix (cascade attention; FlashInfer, arXiv 2501.01005,
    section 2.2)."""
    capacity, groups, width = key_NCGK.shape[1:]
    rows, heads = len(mixed_NF), mixed_NF.shape[1] // width
    copies, stride = heads // groups, groups * width
    keys, values, queries, mixed = key_NCGK.ravel(), value_NCGK.ravel(), query_NF.ravel(), mixed_NF.ravel()
    weights_C, powers_C = np.empty(reach + 1, dtype=np.float32), np.empty(reach + 1, dtype=np.int32)
    for pair in range(first, rows * groups, step):
        row, group = pair // groups, pair % groups
        last = positions_N[row]
        if last < 0:
            continue
        known = known_columns_N[row]
        begin = max(known, last + 1 - reach)
        start = (slots_N[row] * capacity + begin) * stride + group * width
        columns = last + 1 - begin
        for head in range(group * copies, (group + 1) * copies):
            query_start, mixed_start = row * query_NF.shape[1] + head * width, (row * heads + head) * width
            _score(weights_C, queries, query_start, keys, start, stride, columns, width, np.float32(scale))
            if known > 0:
                weights_C[columns] = known_logsumexp_NH[row, head]
                total = _softmax_weights(weights_C, columns + 1, powers_C)
                for k in range(width):
                    mixed[mixed_start + k] = weights_C[columns] * known_NF[row, head * width + k]
            else:
                total = _softmax_weights(weights_C, columns, powers_C)
                for k in range(width):
                    mixed[mixed_start + k] = 0
            _add_values(mixed, mixed_start, weights_C, values, start, stride, columns, width)
            for k in range(width):
                mixed[mixed_start + k] /= total


@cached_njit(nogil=True, fastmath=FAST, forceinline=True)
def _score(
    scores_C: np.ndarray,
    queries: np.ndarray,
    query_start: int,
    keys: np.ndarray,
    key_start: int,
    stride: int,
    columns: int,
    width: int,
    scale: np.float32,
) -> None:
    """Products of a query with the keys of the columns, four at a time."""
    query, step = np.uint64(query_start), np.uint64(stride)
    whole = columns - columns % 4
    for column in range(0, whole, 4):
        first = np.uint64(key_start + column * stride)
        second, third, fourth = first + step, first + step * np.uint64(2), first + step * np.uint64(3)
        score = other = more = rest = np.float32(0)
        for k in range(np.uint64(width)):
            q = queries[query + k]
            score += q * keys[first + k]
            other += q * keys[second + k]
            more += q * keys[third + k]
            rest += q * keys[fourth + k]
        scores_C[column], scores_C[column + 1] = score * scale, other * scale
        scores_C[column + 2], scores_C[column + 3] = more * scale, rest * scale
    for column in range(whole, columns):
        first = np.uint64(key_start + column * stride)
        score = np.float32(0)
        for k in range(np.uint64(width)):
            score += queries[query + k] * keys[first + k]
        scores_C[column] = score * scale


@cached_njit(nogil=True, forceinline=True)
def _order(bits: np.int32) -> np.int32:
    """A whole number by which float32 numbers are ordered as by their values, and back: of a maximum of floats the
    compiler makes no vectors, since one may be NaN (1.0 ns a number against .05)."""
    return np.int32(bits ^ ((bits >> np.int32(31)) & np.int32(0x7FFFFFFF)))


@cached_njit(nogil=True, fastmath=FAST, forceinline=True)
def _softmax_weights(scores_C: np.ndarray, columns: int, powers_C: np.ndarray) -> np.float32:
    """Replaces the scores by e^(score - largest); returns their sum, NaN where a score is NaN or infinity.

    powers_C: memory for the powers of 2 in e^x."""
    check = np.float32(0)
    for column in range(columns):
        check += scores_C[column] * np.float32(0)
    if check != np.float32(0):
        return np.float32(np.nan)
    bits_C, largest_order = scores_C.view(np.int32), np.int32(-(1 << 31))
    for column in range(columns):
        largest_order = max(largest_order, _order(bits_C[column]))
    powers_C[0] = _order(largest_order)
    largest = powers_C.view(np.float32)[0]
    for column in range(columns):
        x = max(scores_C[column] - largest, np.float32(-87))
        power = np.int32(x * np.float32(1.44269504088896341) - np.float32(0.5))  # rounded, as x is not positive
        n = np.float32(power)
        scores_C[column] = exp_without_power(x, n)
        powers_C[column] = power
    for column in range(columns):
        bits_C[column] += powers_C[column] << np.int32(23)
    total = np.float32(0)
    for column in range(columns):
        total += scores_C[column]
    return total


@cached_njit(nogil=True, fastmath=FAST, forceinline=True)
def _add_values(
    mixed: np.ndarray,
    mixed_start: int,
    weights_C: np.ndarray,
    values: np.ndarray,
    value_start: int,
    stride: int,
    columns: int,
    width: int,
) -> None:
    """Adds the weighted values, of eight columns at a time, so that the sums are read and written less often."""
    place, step = np.uint64(mixed_start), np.uint64(stride)
    whole = columns - columns % 8
    for column in range(0, whole, 8):
        first = np.uint64(value_start + column * stride)
        fifth = first + np.uint64(4) * step
        a, b, c, d = weights_C[column], weights_C[column + 1], weights_C[column + 2], weights_C[column + 3]
        e, f, g, h = weights_C[column + 4], weights_C[column + 5], weights_C[column + 6], weights_C[column + 7]
        for k in range(np.uint64(width)):
            p, q = first + k, fifth + k
            mixed[place + k] += (
                a * values[p] + b * values[p + step] + c * values[p + step + step] + d * values[p + np.uint64(3) * step]
            ) + (
                e * values[q] + f * values[q + step] + g * values[q + step + step] + h * values[q + np.uint64(3) * step]
            )
    for column in range(whole, columns):
        first, weight = np.uint64(value_start + column * stride), weights_C[column]
        for k in range(np.uint64(width)):
            mixed[place + k] += weight * values[first + k]

"""Seconds of collectives and sends over the links that a group of ranks shares; volumes in bytes on each rank.

Ring algorithms (Patarasuk and Yuan 2009; nccl-tests' performance notes): with n ranks and S bytes, an all-gather or a
reduce-scatter moves S (n-1)/n through each rank's link, an all-reduce twice that.
"""

from dataclasses import dataclass
from functools import lru_cache
from math import gcd, log2
from typing import NamedTuple

import numpy as np

from gristmill.training.planner.rates import Rates


class GroupLink(NamedTuple):
    """Link of one group of ranks: bytes per second for each rank, and the latency of one hop."""

    bandwidth: float
    latency: float


@dataclass(frozen=True)
class AxisLinks:
    """Links of each axis's groups, from the innermost axis: tensor, context, shard, replicate, pipeline. expert: ranks
    that exchange tokens with each other's experts; expert_data: those that hold the same experts."""

    tensor: GroupLink
    context: GroupLink
    shard: GroupLink
    replicate: GroupLink
    data: GroupLink
    pipeline: GroupLink
    expert: GroupLink
    expert_data: GroupLink


def group_link(rates: Rates, size: int, stride: int, gpus: int | None = None) -> GroupLink:
    """Of the groups of `size` ranks b, b + stride, b + 2 stride, ... that fill `gpus` ranks (None: any number of them);
    node_gpus neighbours share a node. All groups of an axis work at once, so the slowest one's link counts.

    A group with k members in a node drives k adapters there: 4 data ranks in each of 8 nodes share 4 x 25 GB/s. Where
    its nodes hold unequal numbers the smallest decides: ranks 6, 7 | 8 of a tensor group of 3 on nodes of 8 have 1."""
    node = rates.hardware.node_gpus
    inside = GroupLink(*rates.link(rates.hardware.node_link))
    members = min_members_per_node(size, stride, node, gpus)
    return inside if members == size else between_nodes(rates, members)


def between_nodes(rates: Rates, members: int) -> GroupLink:
    """Link of a group with at least `members` of its ranks on each of its nodes."""
    inside, outside = GroupLink(*rates.link(rates.hardware.node_link)), GroupLink(*rates.link(rates.hardware.network))
    if members == 1:
        return outside
    return GroupLink(min(inside.bandwidth, members * outside.bandwidth), max(inside.latency, outside.latency))


@lru_cache(maxsize=65536)
def min_members_per_node(size: int, stride: int, node_gpus: int, gpus: int | None = None) -> int:
    """Over all groups b, b + stride, ... of `size` ranks, the minimum number of members in a node that it uses; `size`
    where every group lies within one node.

    (4, 1, 8) -> 4; (3, 1, 8) -> 1: ranks 6, 7 | 8; (16, 1, 8) -> 8; (2, 8, 8) -> 1."""
    if size == 1:
        return 1
    if stride >= node_gpus:
        return 1
    block = size * stride
    blocks = node_gpus // gcd(block, node_gpus)  # after so many the pattern repeats
    if gpus is not None:
        blocks = min(blocks, max(1, gpus // block))
    starts = np.arange(blocks)[:, None] * block + np.arange(stride)[None, :]
    return min_members(starts.reshape(-1, 1) + np.arange(size) * stride, node_gpus)


def min_members(groups: np.ndarray, node_gpus: int) -> int:
    """The same for given groups: int64[groups, size], ranks in the launcher's order."""
    nodes = np.sort(groups // node_gpus, axis=1)
    begins = np.ones(nodes.shape, dtype=bool)
    begins[:, 1:] = nodes[:, 1:] != nodes[:, :-1]
    places = np.flatnonzero(begins)
    return int(np.diff(np.append(places, nodes.size)).min())


def gather_volume(num_bytes: float, size: int) -> float:
    """Bytes that each rank sends in an all-gather to num_bytes or a reduce-scatter from num_bytes."""
    return num_bytes * (size - 1) / size


def gather_seconds(num_bytes: float, size: int, link: GroupLink) -> float:
    """Time of an all-gather to, or a reduce-scatter from, num_bytes over `size` ranks."""
    if size == 1 or not num_bytes:
        return 0.0
    return gather_volume(num_bytes, size) / link.bandwidth + link.latency * log2(size)


def all_reduce_seconds(num_bytes: float, size: int, link: GroupLink) -> float:
    """Time of a reduce-scatter and an all-gather; the latency counts once (trees for small messages)."""
    if size == 1 or not num_bytes:
        return 0.0
    return 2 * gather_volume(num_bytes, size) / link.bandwidth + link.latency * log2(size)


def send_seconds(num_bytes: float, link: GroupLink) -> float:
    return num_bytes / link.bandwidth + link.latency

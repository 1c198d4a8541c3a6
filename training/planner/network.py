"""Seconds of collectives and sends over the wires that a group of ranks shares; volumes in bytes on each rank.

Ring algorithms (Patarasuk and Yuan 2009; nccl-tests' performance notes): with n ranks and S bytes, an all-gather or a
reduce-scatter moves S (n-1)/n through each rank's wire, an all-reduce twice that.
"""

from math import log2
from typing import NamedTuple

from gristmill.training.planner.rates import Rates


class Wire(NamedTuple):
    """What one group of ranks has: bytes a second on each rank, and the latency of a hop."""

    bandwidth: float
    latency: float


def group_wire(rates: Rates, size: int, stride: int) -> Wire:
    """Of the group of `size` ranks 0, stride, 2 stride, ...; node_gpus neighbours share a node.

    A group with k members in a node drives k adapters: 4 data ranks in each of 8 nodes share 4 x 25 GB/s."""
    hardware = rates.hardware
    inside, inside_latency = rates.link(hardware.node_link)
    members = max(1, min(size, hardware.node_gpus // stride)) if stride < hardware.node_gpus else 1
    if size <= members:
        return Wire(inside, inside_latency)
    outside, outside_latency = rates.link(hardware.network)
    if members == 1:
        return Wire(outside, outside_latency)
    return Wire(min(inside, members * outside), max(inside_latency, outside_latency))


def gather_volume(num_bytes: float, size: int) -> float:
    """Through each rank's wire, for an all-gather to num_bytes or a reduce-scatter from num_bytes."""
    return num_bytes * (size - 1) / size


def gather_seconds(num_bytes: float, size: int, wire: Wire) -> float:
    """All-gather to, or reduce-scatter from, num_bytes over `size` ranks."""
    if size == 1 or not num_bytes:
        return 0.0
    return gather_volume(num_bytes, size) / wire.bandwidth + wire.latency * log2(size)


def all_reduce_seconds(num_bytes: float, size: int, wire: Wire) -> float:
    """A reduce-scatter and an all-gather; the latency is paid once (trees for small messages)."""
    if size == 1 or not num_bytes:
        return 0.0
    return 2 * gather_volume(num_bytes, size) / wire.bandwidth + wire.latency * log2(size)


def send_seconds(num_bytes: float, wire: Wire) -> float:
    return num_bytes / wire.bandwidth + wire.latency

"""Bytes that each rank sends in one step, for each axis.

Ring volumes: with n ranks a gather or a scatter of S bytes sends S (n-1)/n, an all-reduce twice that."""

from dataclasses import dataclass
from functools import lru_cache
from math import gcd, lcm, log2
from typing import NamedTuple

import numpy as np

from gristmill.training.config.layout import SWAPS
from gristmill.training.planner.costs.model_shape import BlockShape, ModelShape
from gristmill.training.planner.engine_profile import EngineProfile
from gristmill.training.planner.hardware import Rates
from gristmill.training.planner.layout import Layout


@dataclass(frozen=True)
class Volumes:
    """tensor and context: of a rank that holds `layers` layers, with or without the ends. pipeline: of one that has a
    stage before and after each of its own. reduce and gather: of gradients and weights over the data axis."""

    tensor: float
    context: float
    pipeline: float
    reduce: float
    gather: float
    expert: float = 0.0


def tensor_volume(
    shape: ModelShape,
    layout: Layout,
    samples: int,
    framework: EngineProfile,
    layers: int,
    compute_bytes: int = 2,
) -> float:
    """Bytes of the layers: two all-reduces a layer each way (arXiv 1909.08053, figure 4), or a gather and a scatter for
    each under sequence parallelism, and what recomputation sends again."""
    all_reduce = 2 * gather_volume(_tokens(shape, layout, samples) * shape.width * compute_bytes, layout.tensor)
    return (4 + _sent_again(layout, framework)) * all_reduce * layers * _share_with_mlp(shape)


def _share_with_mlp(shape: ModelShape) -> float:
    """All-reduces of the model's average layer over those of a layer with attention and an MLP: a mixture without an
    MLP beside its experts has half, and so has a mixer or an MLP alone."""
    return (
        sum(
            block.has_mixer + ((not block.experts and block.has_mlp) or bool(block.ffn_hidden_size))
            for block in shape.blocks
        )
        / len(shape.blocks)
        / 2
    )


def ends_tensor_volume(shape: ModelShape, layout: Layout, samples: int, compute_bytes: int = 2) -> float:
    """Bytes of the embedding and the head: rows of the embedding are summed (under sequence parallelism gathered again
    in the backward pass), hidden states enter the head, and of the logits three fp32 numbers a token are exchanged: the
    maximum, the sum of exponentials, the target's."""
    tokens = _tokens(shape, layout, samples)
    all_reduce = 2 * gather_volume(tokens * shape.width * compute_bytes, layout.tensor)
    return 2 * all_reduce + 2 * gather_volume(3 * 4 * tokens, layout.tensor)


def _tokens(shape: ModelShape, layout: Layout, samples: int) -> int:
    """Tokens of a step on one data and context rank."""
    return samples // layout.data * shape.sequence_length // layout.context


def _sent_again(layout: Layout, framework: EngineProfile) -> float:
    """All-reduces of a layer; a gather or a scatter is half of one. Megatron repeats a layer's whole forward pass,
    or only its core, which sends nothing; torch omits the last sum or scatter, whose result is not needed."""
    if layout.recompute == "none":
        return 0.0
    if layout.recompute in SWAPS:  # attention and what it sends are kept
        return 1 - layout.token_share
    if framework.selective == "core":
        return 2.0 if layout.recompute == "full" else 0.0
    half = 0.5 if layout.sequence_parallel else 0.0
    return half if layout.recompute == "attention" else 1.0 + half


def context_volume(shape: ModelShape, layout: Layout, samples: int, layers: int, compute_bytes: int = 2) -> float:
    """Bytes of the mixer of the model's average layer. The ring: a rank's keys and values go to all others forward and
    again backward, and their gradients in the dtype of statistics all around. all_to_all: queries, keys, values and
    results each way. Other mixers pass states and the last tokens of their runs. A recomputed mixer sends its forward
    pass again, but recompute: operators keeps what came around the ring."""
    if layout.context == 1:
        return 0.0
    statistics_bytes, total = max(4, compute_bytes), 0.0
    for kind, block in enumerate(shape.distinct):
        kept = layout.recompute == "operators" and bool(block.heads) and layout.context_method == "ring"
        passes = 1 if kept or layout.recompute in ("none", *SWAPS) else 2
        forward, backward = context_numbers(block, layout, _tokens(shape, layout, samples), samples // layout.data)
        numbers = passes * forward.compute + backward.compute
        statistics = passes * forward.statistics + backward.statistics
        total += shape.kinds.count(kind) * (numbers * compute_bytes + statistics * statistics_bytes)
    return layers / len(shape.blocks) * total


@dataclass(frozen=True)
class ContextNumbers:
    """Numbers that a rank sends to others in one pass of a layer: in the dtype of the computation and in that of
    statistics."""

    compute: float
    statistics: float = 0.0


def context_numbers(block: BlockShape, layout: Layout, tokens: int, rows: int) -> tuple[ContextNumbers, ContextNumbers]:
    """(forward, backward) of one layer. tokens, of so many samples: on this context rank."""
    if block.mixer is None:
        return ContextNumbers(0.0), ContextNumbers(0.0)
    if not block.heads:
        runs = rows * (2 if layout.context_method == "ring" else 1) * (layout.context - 1)
        compute, statistics = block.mixer.context_numbers(block.width, layout.tensor)
        passed = ContextNumbers(runs * compute, runs * statistics)
        return passed, passed
    context, heads = layout.context, block.heads // layout.tensor
    kv_heads = block.kv_heads // gcd(block.kv_heads, layout.tensor)
    if layout.context_method == "ring":
        key_value = 2 * tokens * kv_heads * block.head_dim
        return ContextNumbers((context - 1) * key_value), ContextNumbers((context - 1) * key_value, context * key_value)
    copied = lcm(kv_heads, context)
    sent = gather_volume(tokens * block.head_dim * 2 * (heads + copied), context)
    return ContextNumbers(sent), ContextNumbers(sent)


def expert_volume(shape: ModelShape, layout: Layout, samples: int, layers: int, compute_bytes: int = 2) -> float:
    """Four all-to-alls a layer of each token's top_k copies, and two more where the forward pass is computed again; on
    balanced load, over the model's average layer."""
    copies = sum(block.top_k for block in shape.blocks) / len(shape.blocks) * layout.expert_tensor
    sent = _tokens(shape, layout, samples) / layout.tensor * copies * shape.width * compute_bytes
    exchanges = 6 if layout.recompute in ("full", "operators") else 4
    return exchanges * gather_volume(sent, layout.expert_ranks) * layers


def pipeline_volume(
    shape: ModelShape, layout: Layout, samples: int, framework: EngineProfile, compute_bytes: int = 2
) -> float:
    """b s h forward and as much backward for each stage; over t where each tensor rank sends its slice (arXiv
    2104.04473, section 4.1)."""
    if layout.pipeline == 1:
        return 0.0
    whole = samples // layout.data * shape.sequence_length // layout.context * shape.width * compute_bytes
    slices = layout.tensor if layout.sequence_parallel or framework.scatter_gather else 1
    return 2 * layout.virtual * whole / slices


def data_volumes(
    parameters: int, layout: Layout, samples: int, framework: EngineProfile, ends: int = 0
) -> tuple[float, float]:
    """(gradients, weights) of a rank whose stages hold so many parameters, `ends` of them not in layers.

    fsdp: gradients are scattered over the shard ranks and all-reduced over the copies, once a step or with each
    micro-batch; weights are gathered once with a pipeline, else in each forward pass; resharded (ZeRO-3), in each
    forward pass, and the layers' in each backward pass too."""
    ranks = layout.data * layout.context
    reduced, weights = parameters * framework.reduce_bytes, parameters * framework.weight_bytes
    if framework.data_parallel == "replicate":
        return 2 * gather_volume(reduced, ranks), 0.0
    if framework.data_parallel == "optimizer_shard":
        return gather_volume(reduced, ranks), gather_volume(weights, ranks)
    shard = layout.shard * layout.context
    reduce = gather_volume(reduced, shard) + 2 * gather_volume(reduced / shard, layout.replicate)
    reduce *= layout.microbatches(samples) if layout.reduce_each else 1
    times = layout.microbatches(samples) if layout.pipeline == 1 or layout.reshard else 1
    regathered = weights - ends * framework.weight_bytes if layout.reshard else 0.0
    return reduce, times * gather_volume(weights + regathered, shard)


def expert_data_volumes(experts: int, layout: Layout, samples: int, framework: EngineProfile) -> tuple[float, float]:
    """The same for the parameters of experts on one rank, which are shared with other ranks than the rest."""
    shard, copies = layout.expert_sharding.shard, layout.expert_replicate
    reduced, weights = experts * framework.reduce_bytes, experts * framework.weight_bytes
    if framework.data_parallel == "replicate":
        return 2 * gather_volume(reduced, shard * copies), 0.0
    if framework.data_parallel == "optimizer_shard":
        return gather_volume(reduced, shard * copies), gather_volume(weights, shard * copies)
    passes = 2 if layout.reshard else 1
    times = layout.microbatches(samples) * passes if layout.pipeline == 1 or layout.reshard else 1
    reduce = gather_volume(reduced, shard) + 2 * gather_volume(reduced / shard, copies)
    reduce *= layout.microbatches(samples) if layout.reduce_each else 1
    return reduce, times * gather_volume(weights, shard)


def volumes(
    shape: ModelShape, layout: Layout, samples: int, framework: EngineProfile, parameters: int, layers: int
) -> Volumes:
    """Bytes on every axis, for a rank with `layers` layers and `parameters` parameters (before the data axis shards
    them)."""
    reduce, gather = data_volumes(parameters, layout, samples, framework)
    tensor = tensor_volume(shape, layout, samples, framework, layers)
    if layout.pipeline == 1:
        tensor += ends_tensor_volume(shape, layout, samples)
    return Volumes(
        tensor=tensor,
        context=context_volume(shape, layout, samples, layers),
        pipeline=pipeline_volume(shape, layout, samples, framework),
        reduce=reduce,
        gather=gather,
        expert=expert_volume(shape, layout, samples, layers),
    )


# Seconds of collectives and sends over the links that a group of ranks shares; volumes in bytes on each rank.
#
# Ring algorithms (Patarasuk and Yuan 2009; nccl-tests' performance notes): with n ranks and S bytes, an all-gather or
# a reduce-scatter moves S (n-1)/n through each rank's link, an all-reduce twice that.


class GroupLink(NamedTuple):
    """Link of one group of ranks: bytes per second for each rank, and the latency of one hop."""

    bandwidth: float
    latency: float
    members: int = 0
    adapter: float = 0.0


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
    """Link of the groups of `size` ranks b, b + stride, b + 2 stride, ... that fill `gpus` ranks (None: any number of
    them); node_gpus neighbours share a node. All groups of an axis work at once, so the slowest one's link counts.

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
        return outside._replace(members=1, adapter=outside.bandwidth)
    together = min(inside.bandwidth, members * outside.bandwidth)
    return GroupLink(together, max(inside.latency, outside.latency), members, outside.bandwidth)


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


def exchange_seconds(num_bytes: float, size: int, link: GroupLink) -> float:
    """Time of an all-to-all of num_bytes from each of `size` ranks, an equal share to each.

    Within a node that of a gather. Across nodes what a rank sends to other nodes passes its own adapter: no other rank
    sends it on, as in a ring. 16 ranks on 2 nodes, 134 MB, 46 GB/s: 134 x 8/16 / 46 = 1.46 ms."""
    if size == 1 or not link.members:
        return gather_seconds(num_bytes, size, link)
    return num_bytes * (size - link.members) / size / link.adapter + link.latency * log2(size)


def all_reduce_seconds(num_bytes: float, size: int, link: GroupLink) -> float:
    """Time of a reduce-scatter and an all-gather; the latency counts once (trees for small messages)."""
    if size == 1 or not num_bytes:
        return 0.0
    return 2 * gather_volume(num_bytes, size) / link.bandwidth + link.latency * log2(size)


def send_seconds(num_bytes: float, link: GroupLink) -> float:
    return num_bytes / link.bandwidth + link.latency

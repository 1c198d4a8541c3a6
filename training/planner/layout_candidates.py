"""Candidate layouts of a search, every combination of the choices that are not fixed, and their placement on nodes."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from math import gcd
from typing import get_args

import numpy as np

from gristmill.training.config.layers import divisors
from gristmill.training.config.layout import STAGES_PER_RANK, ContextMethod, Schedule
from gristmill.training.planner.engine_profile import EngineProfile
from gristmill.training.planner.hardware import Cluster, Hardware, Link, Rates
from gristmill.training.planner.layout import Layout
from gristmill.training.planner.network import AxisLinks, GroupLink, between_nodes, min_members
from gristmill.training.planner.plan_request import FixedChoices, PlanRequest
from gristmill.training.planner.step_time import default_links

MICRO_BATCHES = (1, 2, 4, 8, 16, 32)
MAX_STAGES_PER_RANK = 8
MAX_CONTEXT = 64
MIN_CONTEXT_TOKENS = 4096  # of a rank: with fewer a search does not divide a sample further, unless the axis is fixed


def open_layouts(request: PlanRequest, fail: Callable[[str, str], None]) -> Iterator[Layout]:
    """Every combination of the open choices; recomputation is chosen later, by what fits."""
    for tensor in _choices(request.fixed.tensor, _tensor_sizes(request)):
        sequence_parallel = _sequence_parallel(request, tensor)
        # The rest is decided below, and no layout is refused for full recomputation.
        layout = Layout(tensor=tensor, sequence_parallel=sequence_parallel, recompute="full")
        reason = request.illegal_reason(layout)
        if reason is not None:
            fail(reason, f"tensor {tensor}")
            continue
        for base in _contexts(request, layout, fail):
            yield from _pipeline_and_data(request, base, fail)


def _contexts(request: PlanRequest, base: Layout, fail: Callable[[str, str], None]) -> Iterator[Layout]:
    """The layout with each legal context axis that divides the GPUs, or with the fixed one, by each method."""
    for context in _choices(request.fixed.context, _context_sizes(request)):
        if request.gpus % (base.tensor * context):
            if context == 1 or request.fixed.context:
                example = f"tensor {base.tensor} x context {context}"
                fail(f"tensor x context does not divide {request.gpus} GPUs", example)
            continue
        for method in get_args(ContextMethod) if context > 1 else ("ring",):
            layout = replace(base, context=context, context_method=method)
            reason = request.illegal_reason(layout)
            if reason is None:
                yield layout
            else:
                fail(reason, layout.name())


def _context_sizes(request: PlanRequest) -> list[int]:
    """Powers of two that leave a rank MIN_CONTEXT_TOKENS; our engine's layouts only."""
    if request.framework.data_parallel != "fsdp":
        return [1]
    length = request.shape.sequence_length
    sizes = [2**power for power in range(MAX_CONTEXT.bit_length())]
    return [size for size in sizes if size == 1 or length // size >= MIN_CONTEXT_TOKENS]


def _pipeline_and_data(request: PlanRequest, base: Layout, fail: Callable[[str, str], None]) -> Iterator[Layout]:
    """base: a layout with its tensor and context axes; the remaining GPUs go to the pipeline and data axes."""
    shape, fixed, framework = request.shape, request.fixed, request.framework
    inner = base.tensor * base.context
    rest = request.gpus // inner
    for pipeline in _choices(fixed.pipeline, [p for p in divisors(rest) if p <= len(shape.blocks)]):
        if rest % pipeline:
            continue
        data = rest // pipeline
        if request.samples % data:
            example = f"tensor {base.tensor} x pipeline {pipeline} x data {data}"
            fail(f"{request.samples} samples do not split over the data ranks", example)
            continue
        schedules = _schedules(pipeline, len(shape.blocks), fixed, framework)
        micro_batches = _choices(fixed.micro_batch, _micro_batches(request.samples // data, fixed))
        for shard in _shards(data, inner, request.hardware.node_gpus, fixed, framework):
            for schedule, virtual in schedules:
                for micro_batch in micro_batches:
                    for reshard in (False, True) if pipeline == 1 and shard > 1 else (False,):
                        yield from _with_experts(
                            request,
                            Layout(
                                tensor=base.tensor,
                                pipeline=pipeline,
                                replicate=data // shard,
                                shard=shard,
                                context=base.context,
                                context_method=base.context_method,
                                virtual=virtual,
                                micro_batch=micro_batch,
                                pipeline_schedule=schedule,
                                recompute=fixed.recompute or "none",
                                sequence_parallel=base.sequence_parallel,
                                reshard=reshard,
                            ),
                        )


def _with_experts(request: PlanRequest, layout: Layout) -> Iterator[Layout]:
    """The layout, with every size of the expert axis that divides its ranks and the experts of all layers."""
    if not request.shape.has_experts:
        yield layout
        return
    shares, ranks = request.fixed.expert_tensor or 1, layout.data * layout.context * layout.tensor
    sizes = divisors(gcd(*(block.experts for block in request.shape.blocks)))
    for size in _choices(request.fixed.expert, sizes):
        if ranks % (size * shares) == 0:
            yield replace(layout, expert=size, expert_tensor=shares)


def _choices(fixed: int | None, open_choices: Sequence[int]) -> Sequence[int]:
    return open_choices if fixed is None else (fixed,)


def _tensor_sizes(request: PlanRequest) -> list[int]:
    """Divisors of the heads up to two nodes: larger than a node only helps models that fit in no other way."""
    max_size = request.hardware.node_gpus * 2
    return [size for size in divisors(request.shape.tensor_heads) if size <= max_size and request.gpus % size == 0]


def _sequence_parallel(request: PlanRequest, tensor: int) -> bool:
    if tensor == 1:
        return False
    if request.fixed.sequence_parallel is not None:
        return request.fixed.sequence_parallel
    return request.framework.name != "megatron-2021" and request.shape.sequence_length % tensor == 0


def _shards(data: int, inner: int, node: int, fixed: FixedChoices, framework: EngineProfile) -> list[int]:
    """Sizes of the FSDP shard group: all ranks, those of a node, one; every divisor when wide."""
    if framework.data_parallel != "fsdp":
        return [1]
    if fixed.shard is not None:
        return [fixed.shard] if data % fixed.shard == 0 else []
    if fixed.replicate is not None:
        return [data // fixed.replicate] if data % fixed.replicate == 0 else []
    if fixed.wide:
        return divisors(data)
    local = max(1, node // inner)
    sizes = {1, data, local, 8 * local, data // 2}
    return sorted(size for size in sizes if size and data % size == 0)


def _schedules(pipeline: int, layers: int, fixed: FixedChoices, framework: EngineProfile) -> list[tuple[Schedule, int]]:
    """(schedule, stages per rank). gpipe never beats 1f1b, so it is tried only when it is fixed."""
    if pipeline == 1:
        return [("1f1b", 1)]
    names: Sequence[Schedule] = (fixed.schedule,) if fixed.schedule else framework.schedules
    if not fixed.schedule and fixed.virtual:
        names = ("1f1b",) if fixed.virtual == 1 else ("interleaved",)
    schedules: list[tuple[Schedule, int]] = []
    for name in names:
        default = STAGES_PER_RANK.get(name)
        max_virtual = min(MAX_STAGES_PER_RANK, layers // pipeline)
        open_virtual = [v for v in range(2, max_virtual + 1) if layers % (pipeline * v) == 0] or (
            [2] if max_virtual >= 2 else []
        )
        virtuals = [default] if default else _choices(fixed.virtual, open_virtual)
        schedules += [(name, virtual) for virtual in virtuals if virtual * pipeline <= layers]
    return schedules


def _micro_batches(share: int, fixed: FixedChoices) -> list[int]:
    sizes = divisors(share) if fixed.wide else MICRO_BATCHES
    return [size for size in sizes if share % size == 0 and size <= 64] or [1]


# Placement of the axes on nodes and clusters: tensor in a node, data in one cluster, pipeline across clusters.
#
# The rules of Holmes (arXiv 2312.03549, section 3) on top of the 2021 paper (arXiv 2104.04473, takeaways 1 to 3). Data
# groups avoid mixing kinds of adapters, since NCCL then falls back to the slowest; slow links between clusters carry
# only what pipeline stages send; stages on slower machines have fewer layers.
#
# The link of each group follows from the machines of its members, so that an unavoidable slow link is in the forecast.

# The axes of the mesh from the outermost to the innermost, whose ranks are neighbours.
AXES = ("pipeline", "replicate", "shard", "context", "tensor")


@dataclass(frozen=True)
class Placement:
    """rank_order: the launcher's ranks in the mesh's order (AXES), as parallel/mesh.py takes them; None: as they come.
    stage_clusters, speeds: of each pipeline rank. crossing: axes with groups that leave a cluster, innermost first."""

    links: AxisLinks
    rank_order: tuple[int, ...] | None = None
    stage_clusters: tuple[str, ...] = ()
    speeds: tuple[float, ...] = ()
    crossing: tuple[str, ...] = ()


def place(layout: Layout, rates: Rates) -> Placement:
    """The better of two orders over several clusters: pipeline ranks outermost, or copies of the model outermost.

    The better order is the one whose innermost axis between clusters is farther out: pipelines send the least."""
    clusters = used_clusters(rates.hardware, layout.gpus)
    if len(clusters) < 2:
        speeds = (clusters[0].speed,) * layout.pipeline if clusters else ()
        links = default_links(layout, rates if not clusters else _rates_in(clusters[0], rates))
        return Placement(links, speeds=speeds if clusters and clusters[0].speed != 1 else ())
    hosts = launcher_ranks(clusters, rates.hardware.node_gpus)[: layout.gpus]
    orders = [hosts, data_outermost(layout, hosts)]
    return min((placed(layout, rates, clusters, order) for order in orders), key=_inner_crossings)


def placed(layout: Layout, rates: Rates, clusters: Sequence[Cluster], order: np.ndarray) -> Placement:
    """Placement for a given order of the machines' GPUs. Where a request uses some of the machines, the launcher
    numbers only those."""
    machines = _Machines(rates, clusters)
    groups = axis_groups(layout, order)
    links = AxisLinks(**{axis: machines.link(members) for axis, members in groups.items()})
    crossing = tuple(axis for axis in _INNERMOST_FIRST if machines.crossing(groups[axis]))
    of_stage = [sorted(set(machines.cluster_of(ranks).tolist())) for ranks in order.reshape(layout.pipeline, -1)]
    ranks = np.searchsorted(np.sort(order), order)
    return Placement(
        links,
        None if np.array_equal(ranks, np.arange(len(ranks))) else tuple(ranks.tolist()),
        tuple(" + ".join(clusters[c].name for c in stage) for stage in of_stage),
        tuple(min(clusters[c].speed for c in stage) for stage in of_stage),
        crossing,
    )


_INNERMOST_FIRST = ("tensor", "context", "shard", "replicate", "pipeline")


def _inner_crossings(placement: Placement) -> tuple[bool, ...]:
    return tuple(axis in placement.crossing for axis in _INNERMOST_FIRST)


def axis_groups(layout: Layout, order: np.ndarray) -> dict[str, np.ndarray]:
    """The launcher's ranks of every group: int64[groups, members], by the name of the links it needs. `shard` are
    FSDP's groups (context ranks share them), `data` all that hold the same weights."""
    grid = np.asarray(order).reshape(layout.pipeline, layout.replicate, layout.shard, layout.context, layout.tensor)

    def along(*axes: str) -> np.ndarray:
        last = [AXES.index(axis) for axis in axes]
        first = [index for index in range(len(AXES)) if index not in last]
        size = int(np.prod([grid.shape[index] for index in last]))
        return grid.transpose(*first, *last).reshape(-1, size)

    folded = np.asarray(order).reshape(layout.pipeline, -1, layout.expert_ranks)
    return {
        "tensor": along("tensor"),
        "context": along("context"),
        "shard": along("shard", "context"),
        "replicate": along("replicate"),
        "data": along("replicate", "shard", "context"),
        "pipeline": along("pipeline"),
        "expert": folded.reshape(-1, layout.expert_ranks),
        "expert_data": folded.transpose(0, 2, 1).reshape(-1, folded.shape[1]),
    }


def stays_in_nodes(layout: Layout, placement: Placement, axis: str, node_gpus: int) -> bool:
    """True if no group of the axis has members on two nodes."""
    order = np.arange(layout.gpus) if placement.rank_order is None else np.array(placement.rank_order)
    nodes = axis_groups(layout, order)[axis] // node_gpus
    return bool((nodes == nodes[:, :1]).all())


class _Machines:
    """The link of a group of the launcher's ranks, from the nodes and clusters of its members."""

    def __init__(self, rates: Rates, clusters: Sequence[Cluster]) -> None:
        self.rates, self.node = rates, rates.hardware.node_gpus
        self.inside = [_rates_in(cluster, rates) for cluster in clusters]
        self.clusters = np.full(sum(cluster.nodes for cluster in clusters), -1)
        for index, numbers in enumerate(_node_numbers(clusters)):
            self.clusters = np.pad(self.clusters, (0, max(0, max(numbers) + 1 - len(self.clusters))))
            self.clusters[list(numbers)] = index

    def cluster_of(self, ranks: np.ndarray) -> np.ndarray:
        clusters: np.ndarray = self.clusters[ranks // self.node]
        return clusters

    def crossing(self, groups: np.ndarray) -> bool:
        """True if any group has members in two clusters."""
        clusters = self.cluster_of(groups)
        return bool((clusters != clusters[:, :1]).any())

    def link(self, groups: np.ndarray) -> GroupLink:
        """Link of the slowest group: a step waits for all of them."""
        return min(self._links(groups), key=lambda link: link.bandwidth)

    def _links(self, groups: np.ndarray) -> Iterator[GroupLink]:
        size = groups.shape[1]
        clusters = self.cluster_of(groups)
        apart = (clusters != clusters[:, :1]).any(axis=1)
        if apart.any():
            link = self.rates.hardware.between_clusters or self.rates.hardware.network
            yield GroupLink(*self.rates.link(link))
        for index in sorted(set(clusters[~apart, 0].tolist())):
            members = min_members(groups[~apart & (clusters[:, 0] == index)], self.node)
            inside = GroupLink(*self.rates.link(self.rates.hardware.node_link))
            yield inside if members == size else between_nodes(self.inside[index], members)


def used_clusters(hardware: Hardware, gpus: int) -> list[Cluster]:
    """The clusters that so many GPUs use, in order; the last one maybe in part."""
    taken: list[Cluster] = []
    left = gpus
    for cluster in hardware.clusters:
        if left <= 0:
            break
        size = cluster.nodes * hardware.node_gpus
        nodes = cluster.nodes if left >= size else -(-left // hardware.node_gpus)
        taken.append(cluster if nodes == cluster.nodes else _first_nodes(cluster, nodes))
        left -= size
    return taken


def naive_links(layout: Layout, rates: Rates) -> AxisLinks:
    """Links of a rank order that ignores clusters: the launcher's ranks in order, the data axis outermost."""
    clusters = used_clusters(rates.hardware, layout.gpus)
    if len(clusters) < 2:
        return default_links(layout, rates)
    hosts = np.sort(launcher_ranks(clusters, rates.hardware.node_gpus)[: layout.gpus])
    return placed(layout, rates, clusters, data_outermost(layout, hosts)).links


def launcher_ranks(clusters: Sequence[Cluster], node_gpus: int) -> np.ndarray:
    """Cluster after cluster, node after node; the cluster of the first node comes first, since rank 0 writes the
    checkpoints. Nodes 0, 2 in one cluster and 1, 3 in another, 2 GPUs each: 0 1 4 5 2 3 6 7."""
    rising = sorted(sorted(numbers) for numbers in _node_numbers(clusters))
    nodes = np.concatenate([np.array(numbers) for numbers in rising])
    ranks: np.ndarray = (nodes[:, None] * node_gpus + np.arange(node_gpus)).reshape(-1)
    return ranks


def data_outermost(layout: Layout, hosts: np.ndarray) -> np.ndarray:
    """Reorder hosts so that the data axis is outermost: by replicate, shard, then pipeline rank, in the mesh's order.

    Pipeline 2, data 2 on hosts 0 1 2 3: 0 2 1 3, so that the first copy has 0 and 1."""
    dealt = hosts.reshape(layout.replicate, layout.shard, layout.pipeline, layout.context, layout.tensor)
    return dealt.transpose(2, 0, 1, 3, 4).reshape(-1)


def _node_numbers(clusters: Sequence[Cluster]) -> list[Sequence[int]]:
    """Node numbers of each cluster; consecutive where none are given."""
    numbers: list[Sequence[int]] = []
    start = 0
    for cluster in clusters:
        numbers.append(cluster.node_numbers or range(start, start + cluster.nodes))
        start += cluster.nodes
    return numbers


def _rates_in(cluster: Cluster, rates: Rates) -> Rates:
    """The same machine with the cluster's own network; used for links only, so cached timings are not shared."""
    network: Link = cluster.network or rates.hardware.network
    hardware = rates.hardware.model_copy(update={"network": network})
    return Rates(hardware, rates.sustained, rates.float8, rates.routed)


def _first_nodes(cluster: Cluster, nodes: int) -> Cluster:
    return Cluster(
        name=cluster.name,
        nodes=nodes,
        network=cluster.network,
        speed=cluster.speed,
        node_numbers=cluster.node_numbers[:nodes],
    )

"""Placement of the axes on nodes and clusters: tensor in a node, data in one cluster, pipeline across clusters.

The rules of Holmes (arXiv 2312.03549, section 3) on top of the 2021 paper (arXiv 2104.04473, takeaways 1 to 3). Data
groups avoid mixing kinds of adapters, since NCCL then falls back to the slowest; slow links between clusters carry
only what pipeline stages send; stages on slower machines have fewer layers.

The link of each group follows from the machines of its members, so that an unavoidable slow link is in the forecast.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from gristmill.training.planner.hardware import Cluster, Hardware, Link, Rates
from gristmill.training.planner.layout import Layout
from gristmill.training.planner.network import AxisLinks, GroupLink, between_nodes, min_members
from gristmill.training.planner.step_time import default_links

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

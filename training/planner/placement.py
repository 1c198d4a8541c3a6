"""Where the axes lie on the machines: tensor in a node, data in one cluster and kind of adapter, pipeline across.

The rules of Holmes (arXiv 2312.03549, section 3) on top of the 2021 paper (arXiv 2104.04473, takeaways 1 to 3). A data
group never mixes kinds of adapters where that can be helped, since NCCL then falls back to the slowest; slow links
between clusters carry only what crosses a pipeline's cut; stages on slower machines hold fewer layers.

Every group is costed by the machines its own members stand on, so what cannot be helped is seen in the forecast.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from gristmill.training.planner.hardware import Cluster, Hardware, Link
from gristmill.training.planner.layout import Layout
from gristmill.training.planner.network import Wire, between_nodes, fewest_neighbours
from gristmill.training.planner.rates import Rates
from gristmill.training.planner.step_time import Wires, default_wires

# The axes of the mesh from the outermost to the innermost, whose ranks are neighbours.
AXES = ("pipeline", "replicate", "shard", "context", "tensor")


@dataclass(frozen=True)
class Placement:
    """rank_order: the launcher's ranks in the mesh's order (AXES), as parallel/mesh.py takes them; None: as they come.
    stage_clusters, speeds: of each pipeline rank. crossing: axes with groups that leave a cluster, innermost first."""

    wires: Wires
    rank_order: tuple[int, ...] | None = None
    stage_clusters: tuple[str, ...] = ()
    speeds: tuple[float, ...] = ()
    crossing: tuple[str, ...] = ()


def place(layout: Layout, rates: Rates) -> Placement:
    """The better of two orders over several clusters: pipeline ranks outermost, or copies of the model outermost.

    That one is better whose innermost crossing axis is farther out: a pipeline crosses with the least traffic."""
    clusters = used_clusters(rates.hardware, layout.gpus)
    if len(clusters) < 2:
        speeds = (clusters[0].speed,) * layout.pipeline if clusters else ()
        wires = default_wires(layout, rates if not clusters else _rates_in(clusters[0], rates))
        return Placement(wires, speeds=speeds if clusters and clusters[0].speed != 1 else ())
    hosts = launcher_ranks(clusters, rates.hardware.node_gpus)[: layout.gpus]
    orders = [hosts, data_outermost(layout, hosts)]
    return min((placed(layout, rates, clusters, order) for order in orders), key=_inner_crossings)


def placed(layout: Layout, rates: Rates, clusters: Sequence[Cluster], order: np.ndarray) -> Placement:
    """A given order of the machines' GPUs, with the wires of its real groups. Where a job takes a part of the machines,
    the launcher numbers those it takes."""
    machines = _Machines(rates, clusters)
    groups = axis_groups(layout, order)
    wires = Wires(**{axis: machines.wire(members) for axis, members in groups.items()})
    crossing = tuple(axis for axis in _INNERMOST_FIRST if machines.crossing(groups[axis]))
    of_stage = [sorted(set(machines.cluster_of(ranks).tolist())) for ranks in order.reshape(layout.pipeline, -1)]
    ranks = np.searchsorted(np.sort(order), order)
    return Placement(
        wires,
        None if np.array_equal(ranks, np.arange(len(ranks))) else tuple(ranks.tolist()),
        tuple(" + ".join(clusters[c].name for c in stage) for stage in of_stage),
        tuple(min(clusters[c].speed for c in stage) for stage in of_stage),
        crossing,
    )


_INNERMOST_FIRST = ("tensor", "context", "shard", "replicate", "pipeline")


def _inner_crossings(placement: Placement) -> tuple[bool, ...]:
    return tuple(axis in placement.crossing for axis in _INNERMOST_FIRST)


def axis_groups(layout: Layout, order: np.ndarray) -> dict[str, np.ndarray]:
    """The launcher's ranks of every group: int64[groups, members], by the name of the wires it needs. `shard` are
    FSDP's groups (context ranks share them), `data` all that hold the same weights."""
    grid = np.asarray(order).reshape(layout.pipeline, layout.replicate, layout.shard, layout.context, layout.tensor)

    def along(*axes: str) -> np.ndarray:
        last = [AXES.index(axis) for axis in axes]
        first = [index for index in range(len(AXES)) if index not in last]
        size = int(np.prod([grid.shape[index] for index in last]))
        return grid.transpose(*first, *last).reshape(-1, size)

    return {
        "tensor": along("tensor"),
        "context": along("context"),
        "shard": along("shard", "context"),
        "replicate": along("replicate"),
        "data": along("replicate", "shard", "context"),
        "pipeline": along("pipeline"),
    }


def stays_in_nodes(layout: Layout, placement: Placement, axis: str, node_gpus: int) -> bool:
    """True if no group of the axis has members on two nodes."""
    order = np.arange(layout.gpus) if placement.rank_order is None else np.array(placement.rank_order)
    nodes = axis_groups(layout, order)[axis] // node_gpus
    return bool((nodes == nodes[:, :1]).all())


class _Machines:
    """Which wire a group of the launcher's ranks has, by the nodes and clusters that its members stand on."""

    def __init__(self, rates: Rates, clusters: Sequence[Cluster]) -> None:
        self.rates, self.node = rates, rates.hardware.node_gpus
        self.inside = [_rates_in(cluster, rates) for cluster in clusters]
        self.clusters = np.full(sum(cluster.nodes for cluster in clusters), -1)
        for index, numbers in enumerate(_node_numbers(clusters)):
            self.clusters = np.pad(self.clusters, (0, max(0, max(numbers) + 1 - len(self.clusters))))
            self.clusters[list(numbers)] = index

    def cluster_of(self, ranks: np.ndarray) -> np.ndarray:
        found: np.ndarray = self.clusters[ranks // self.node]
        return found

    def crossing(self, groups: np.ndarray) -> bool:
        """True if any group has members in two clusters."""
        clusters = self.cluster_of(groups)
        return bool((clusters != clusters[:, :1]).any())

    def wire(self, groups: np.ndarray) -> Wire:
        """Of the slowest group: a step waits for all of them."""
        return min(self._wires(groups), key=lambda wire: wire.bandwidth)

    def _wires(self, groups: np.ndarray) -> Iterator[Wire]:
        size = groups.shape[1]
        clusters = self.cluster_of(groups)
        apart = (clusters != clusters[:, :1]).any(axis=1)
        if apart.any():
            link = self.rates.hardware.between_clusters or self.rates.hardware.network
            yield Wire(*self.rates.link(link))
        for index in sorted(set(clusters[~apart, 0].tolist())):
            members = fewest_neighbours(groups[~apart & (clusters[:, 0] == index)], self.node)
            inside = Wire(*self.rates.link(self.rates.hardware.node_link))
            yield inside if members == size else between_nodes(self.inside[index], members)


def used_clusters(hardware: Hardware, gpus: int) -> list[Cluster]:
    """The clusters that a job of so many GPUs takes, in order; the last may be used in part."""
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


def naive_wires(layout: Layout, rates: Rates) -> Wires:
    """What an order costs that knows nothing of clusters: the launcher's ranks as they come, copies outermost."""
    clusters = used_clusters(rates.hardware, layout.gpus)
    if len(clusters) < 2:
        return default_wires(layout, rates)
    hosts = np.sort(launcher_ranks(clusters, rates.hardware.node_gpus)[: layout.gpus])
    return placed(layout, rates, clusters, data_outermost(layout, hosts)).wires


def launcher_ranks(clusters: Sequence[Cluster], node_gpus: int) -> np.ndarray:
    """Cluster after cluster, node after node; the cluster of the first node comes first, since rank 0 writes the
    checkpoints.
    Nodes 0, 2 in one cluster and 1, 3 in another, 2 GPUs each: 0 1 4 5 2 3 6 7."""
    rising = sorted(sorted(numbers) for numbers in _node_numbers(clusters))
    nodes = np.concatenate([np.array(numbers) for numbers in rising])
    ranks: np.ndarray = (nodes[:, None] * node_gpus + np.arange(node_gpus)).reshape(-1)
    return ranks


def data_outermost(layout: Layout, hosts: np.ndarray) -> np.ndarray:
    """hosts dealt out copy by copy, shard by shard, pipeline rank by pipeline rank, in the mesh's order.

    Pipeline 2, data 2 on hosts 0 1 2 3: 0 2 1 3, so that the first copy has 0 and 1."""
    dealt = hosts.reshape(layout.replicate, layout.shard, layout.pipeline, layout.context, layout.tensor)
    return dealt.transpose(2, 0, 1, 3, 4).reshape(-1)


def _node_numbers(clusters: Sequence[Cluster]) -> list[Sequence[int]]:
    """Of each cluster; consecutive where none are given."""
    found: list[Sequence[int]] = []
    start = 0
    for cluster in clusters:
        found.append(cluster.node_numbers or range(start, start + cluster.nodes))
        start += cluster.nodes
    return found


def _rates_in(cluster: Cluster, rates: Rates) -> Rates:
    """The same machine with the cluster's own network; shares nothing that is timed, only wires are asked of it."""
    network: Link = cluster.network or rates.hardware.network
    hardware = rates.hardware.model_copy(update={"network": network})
    return Rates(hardware, rates.sustained, rates.float8)


def _first_nodes(cluster: Cluster, nodes: int) -> Cluster:
    return Cluster(
        name=cluster.name,
        nodes=nodes,
        network=cluster.network,
        speed=cluster.speed,
        node_numbers=cluster.node_numbers[:nodes],
    )


def data_groups(layout: Layout, rank_order: Sequence[int]) -> list[list[int]]:
    """The launcher's ranks of every data group: what a reader can check a placement by."""
    inner = layout.tensor * layout.context
    block = inner * layout.data
    return [
        [rank_order[stage * block + data * inner + place] for data in range(layout.data)]
        for stage in range(layout.pipeline)
        for place in range(inner)
    ]

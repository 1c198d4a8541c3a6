"""Where the axes lie on the machines: tensor in a node, data in one cluster and kind of adapter, pipeline across.

The rules of Holmes (arXiv 2312.03549, section 3) on top of the 2021 paper (arXiv 2104.04473, takeaways 1 to 3). A data
group never mixes kinds of adapters, since NCCL then falls back to the slowest; slow links between clusters carry only
what crosses a pipeline's cut; stages on slower machines hold fewer layers.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from gristmill.training.planner.hardware import Cluster, Hardware, Link
from gristmill.training.planner.layout import Layout
from gristmill.training.planner.network import Wire
from gristmill.training.planner.rates import Rates
from gristmill.training.planner.step_time import Wires, default_wires


@dataclass(frozen=True)
class Placement:
    """rank_order: the launcher's ranks in the mesh's order (pipeline, replicate, shard, context, tensor), as
    parallel/mesh.py takes them. stage_clusters, speeds: of each pipeline rank. crossing: axes that leave a cluster."""

    wires: Wires
    rank_order: tuple[int, ...] | None = None
    stage_clusters: tuple[str, ...] = ()
    speeds: tuple[float, ...] = ()
    crossing: tuple[str, ...] = ()


def place(layout: Layout, rates: Rates) -> Placement:
    """The best placement of a layout. One cluster: ranks in their own order. Several: whole pipeline ranks to clusters
    where they come out even, else the data axis has to cross."""
    clusters = used_clusters(rates.hardware, layout.gpus)
    if len(clusters) < 2:
        speeds = (clusters[0].speed,) * layout.pipeline if clusters else ()
        wires = default_wires(layout, rates if not clusters else _rates_in(clusters[0], rates))
        return Placement(wires, speeds=speeds if clusters and clusters[0].speed != 1 else ())
    block = layout.tensor * layout.context * layout.data
    sizes = [c.nodes * rates.hardware.node_gpus for c in clusters]
    if sum(sizes) == layout.gpus and all(size % block == 0 for size in sizes):
        return _pipeline_across(layout, rates, clusters, [size // block for size in sizes])
    return data_across(layout, rates, clusters)


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
    """What an order costs that knows nothing of clusters: data outermost, so its groups span all of them.

    Their ring runs at the slowest wire it meets: the link between the clusters."""
    clusters = used_clusters(rates.hardware, layout.gpus)
    return data_across(layout, rates, clusters).wires if len(clusters) > 1 else default_wires(layout, rates)


def data_across(layout: Layout, rates: Rates, clusters: Sequence[Cluster]) -> Placement:
    """Tensor and shard groups within a cluster where they fit, copies (or else shards) across."""
    wires = _slowest(layout, rates, clusters)
    slow = _between(rates)
    inside = min(c.nodes for c in clusters) * rates.hardware.node_gpus
    shard_fits = layout.replicate > 1 and layout.tensor * layout.context * layout.shard <= inside
    wires = replace(wires, data=slow, replicate=slow, shard=wires.shard if shard_fits else slow)
    slowest = min(c.speed for c in clusters)
    return Placement(wires, speeds=(slowest,) * layout.pipeline, crossing=("data",))


def _pipeline_across(layout: Layout, rates: Rates, clusters: Sequence[Cluster], stages: Sequence[int]) -> Placement:
    wires = replace(_slowest(layout, rates, clusters), pipeline=_between(rates))
    names = tuple(c.name for c, n in zip(clusters, stages, strict=True) for _ in range(n))
    speeds = tuple(c.speed for c, n in zip(clusters, stages, strict=True) for _ in range(n))
    return Placement(wires, _rank_order(clusters, rates.hardware.node_gpus), names, speeds, ("pipeline",))


def _rank_order(clusters: Sequence[Cluster], node_gpus: int) -> tuple[int, ...]:
    """Cluster after cluster, node after node. Nodes 0, 2 in one cluster and 1, 3 in another, 2 GPUs each:
    0 1 4 5 2 3 6 7."""
    order: list[int] = []
    for cluster in clusters:
        start = len(order) // node_gpus
        numbers = cluster.node_numbers or range(start, start + cluster.nodes)
        order += [number * node_gpus + gpu for number in numbers for gpu in range(node_gpus)]
    return tuple(order)


def _slowest(layout: Layout, rates: Rates, clusters: Sequence[Cluster]) -> Wires:
    """Of each axis's groups within the clusters, the slowest cluster's: a step waits for all."""
    each = [default_wires(layout, _rates_in(cluster, rates)) for cluster in clusters]

    def worst(axis: str) -> Wire:
        wires: list[Wire] = [getattr(one, axis) for one in each]
        return min(wires, key=lambda wire: wire.bandwidth)

    return Wires(*(worst(axis) for axis in ("tensor", "context", "shard", "replicate", "data", "pipeline")))


def _between(rates: Rates) -> Wire:
    link = rates.hardware.between_clusters or rates.hardware.network
    return Wire(*rates.link(link))


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

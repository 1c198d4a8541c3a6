"""Placement of the axes on nodes and clusters."""

import os
import socket
from collections import Counter
from itertools import pairwise
from unittest import mock

import numpy as np
import pytest
import torch
import torch.distributed as dist
import yaml
from hypothesis import given
from hypothesis import strategies as st

from gristmill.foundation.errors import RecipeError
from gristmill.training.calibrate.measure_layers import causal_loss
from gristmill.training.config.layout import LayoutConfig
from gristmill.training.config.model import ModelConfig
from gristmill.training.config.train import TrainConfig
from gristmill.training.engine.local_model import build_local_model
from gristmill.training.launch.processes import RankInfo, init_distributed
from gristmill.training.parallel.mesh import Mesh, single_process
from gristmill.training.planner.costs.model_shape import shape_of
from gristmill.training.planner.hardware import FITTED, PROFILES, Hardware, Rates, parse_hardware
from gristmill.training.planner.layout import Layout
from gristmill.training.planner.layout_candidates import axis_groups, naive_links, place, stays_in_nodes
from gristmill.training.planner.network import min_members_per_node
from gristmill.training.planner.plan_report import explain
from gristmill.training.planner.plan_request import FixedChoices, PlanRequest, named_shape
from gristmill.training.planner.search import Planner, search
from gristmill.training.planner.step_time import default_links
from gristmill.training.run import RunConfig, build_forward_backward

FIELDS = yaml.safe_load((PROFILES / "a100-80g.yaml").read_text("utf-8"))
ROCE = {"kind": "roce", "gb_per_second": 25.0, "efficiency": 0.8, "latency_microseconds": 80.0}


MODEL = ModelConfig(layers=6, width=32, heads=4, sequence_length=16)


def two_clusters(numbers: tuple[tuple[int, ...], tuple[int, ...]] = ((), ()), speed: float = 1.0) -> Hardware:
    """Two nodes with InfiniBand and two with RoCE, 25 Gbit/s Ethernet (3 GB/s) between them: Holmes's setting."""
    clusters = [
        {"name": "infiniband", "nodes": 2, "node_numbers": numbers[0]},
        {"name": "roce", "nodes": 2, "network": ROCE, "node_numbers": numbers[1], "speed": speed},
    ]
    slow = {"kind": "ethernet", "gb_per_second": 3.0, "latency_microseconds": 100.0}
    return parse_hardware(FIELDS | {"clusters": clusters, "between_clusters": slow}, "two.yaml")


def test_the_pipeline_crosses_and_data_groups_stay_within_one_kind_of_adapter():
    """Hosts are listed in turns: nodes 0 and 2 have InfiniBand, 1 and 3 RoCE."""
    hardware = two_clusters(((0, 2), (1, 3)))
    layout = Layout(tensor=4, pipeline=2, replicate=1, shard=4)
    placement = place(layout, Rates(hardware, FITTED))
    assert placement.stage_clusters == ("infiniband", "roce")
    assert placement.crossing == ("pipeline",)
    assert sorted(placement.rank_order) == list(range(32))
    for group in axis_groups(layout, np.array(placement.rank_order))["data"]:
        assert len({(rank // 8) % 2 for rank in group}) == 1, "a data group mixes adapters"
    # The naive order of the same hosts mixes them in every group.
    assert all(len({(rank // 8) % 2 for rank in group}) == 2 for group in axis_groups(layout, np.arange(32))["data"])


def test_tensor_groups_stay_within_a_node():
    order = place(Layout(tensor=8, pipeline=2, shard=2), Rates(two_clusters(((0, 2), (1, 3))), FITTED)).rank_order
    assert all(len({rank // 8 for rank in order[i : i + 8]}) == 1 for i in range(0, 32, 8))


def test_the_naive_order_costs_more():
    planner = Planner(PlanRequest(named_shape("gpt-3.6b"), two_clusters(), 32, 64))
    layout = Layout(tensor=4, pipeline=2, shard=4, micro_batch=1)
    good, naive = planner.forecast(layout), planner.forecast(layout, naive=True)
    assert naive.time.total > good.time.total
    assert naive_links(layout, planner.rates).data.bandwidth < good.placement.links.data.bandwidth / 4


def test_slow_machines_hold_fewer_layers():
    planner = Planner(PlanRequest(named_shape("gpt-3.6b"), two_clusters(speed=0.5), 32, 64))
    forecast = planner.forecast(Layout(tensor=4, pipeline=2, shard=4, micro_batch=1))
    assert forecast.placement.speeds == (1.0, 0.5)
    (split_point,) = forecast.split_points
    assert 19 <= split_point <= 21  # two thirds of 30 layers on the fast ones, the head on the slow ones
    even = planner.steps.step(forecast.layout, 64, (15,), forecast.placement.links, forecast.placement.speeds)
    assert forecast.time.total < even.total


def test_data_has_to_cross_where_there_is_no_pipeline():
    placement = place(Layout(tensor=8, replicate=2, shard=2), Rates(two_clusters(), FITTED))
    assert placement.crossing == ("replicate",)
    assert placement.links.shard.bandwidth > placement.links.replicate.bandwidth


def three_clusters(node_gpus: int = 8, speeds: tuple[float, ...] = (1.0, 1.0, 0.5)) -> Hardware:
    """Nodes of three clusters in turns: 0 and 3 in the first, 1 and 4 in the second, 2 and 5 in the third."""
    clusters = [
        {"name": name, "nodes": 2, "node_numbers": (index, index + 3), "speed": speed}
        for index, (name, speed) in enumerate(zip(("a", "b", "c"), speeds, strict=True))
    ]
    slow = {"kind": "ethernet", "gb_per_second": 3.0, "latency_microseconds": 100.0}
    fields = FIELDS | {"node_gpus": node_gpus, "clusters": clusters, "between_clusters": slow}
    return parse_hardware(fields, "three.yaml")


def test_three_clusters_one_stage_in_each():
    placement = place(Layout(tensor=8, pipeline=3, shard=2), Rates(three_clusters(), FITTED))
    assert placement.stage_clusters == ("a", "b", "c") and placement.crossing == ("pipeline",)
    assert placement.speeds == (1.0, 1.0, 0.5)
    assert placement.rank_order[:16] == (*range(8), *range(24, 32))
    assert placement.links.shard.bandwidth > 5 * placement.links.pipeline.bandwidth


def test_a_group_that_cannot_stay_in_its_cluster_is_costed_at_the_link_between():
    """Shards over all 48 GPUs, and tensor groups of 3 on clusters of 16: nothing keeps those inside."""
    rates = Rates(three_clusters(), FITTED)
    whole = place(Layout(tensor=8, shard=6), rates)
    assert whole.crossing == ("shard",) and whole.links.shard.bandwidth == pytest.approx(3e9)
    odd = place(Layout(tensor=3, pipeline=16), rates)
    assert "tensor" in odd.crossing and odd.links.tensor.bandwidth == pytest.approx(3e9)


def test_tensor_groups_that_straddle_nodes_pay_for_the_network(hardware):
    """Ranks 6, 7 | 8 of groups of 3 on nodes of 8: one of its members is alone in its node, with one adapter."""
    rates = Rates(hardware, FITTED)
    layout = Layout(tensor=3, shard=8)
    assert not stays_in_nodes(layout, place(layout, rates), "tensor", 8)
    assert default_links(layout, rates).tensor.bandwidth == rates.link(hardware.network)[0]
    assert stays_in_nodes(Layout(tensor=4, shard=6), place(Layout(tensor=4, shard=6), rates), "tensor", 8)


@given(
    tensor=st.integers(1, 6), context=st.integers(1, 3), shard=st.integers(1, 5), replicate=st.integers(1, 4),
    pipeline=st.integers(1, 5), node=st.sampled_from([1, 2, 4, 6, 8]),
)  # fmt: skip
def test_the_members_of_every_group_are_counted(tensor, context, shard, replicate, pipeline, node):
    """The closed form that a search uses, against all groups written out and counted one by one."""
    layout = Layout(tensor, pipeline, replicate, shard, context)
    strides = {
        "tensor": (tensor, 1),
        "context": (context, tensor),
        "shard": (shard * context, tensor),
        "replicate": (replicate, tensor * context * shard),
        "data": (layout.data * context, tensor),
        "pipeline": (pipeline, tensor * context * layout.data),
    }
    groups = axis_groups(layout, np.arange(layout.gpus))
    for axis, (size, stride) in strides.items():
        counts = [min(Counter(rank // node for rank in group).values()) for group in groups[axis].tolist()]
        assert min_members_per_node(size, stride, node, layout.gpus) == min(counts), axis


def test_interleaved_and_v_shaped_schedules_get_uneven_split_points_too():
    planner = Planner(PlanRequest(named_shape("gpt-3.6b"), two_clusters(speed=0.5), 32, 64))
    for schedule, virtual, slow in (("interleaved", 3, (1, 3, 5)), ("zbv", 2, (1, 2))):
        layout = Layout(tensor=4, pipeline=2, shard=4, pipeline_schedule=schedule, virtual=virtual)
        forecast = planner.forecast(layout)
        bounds = [0, *forecast.split_points, 30]
        layers = [b - a for a, b in pairwise(bounds)]
        on_slow = sum(layers[stage] for stage in slow)
        assert len(layers) == layout.stages and 8 <= on_slow <= 11  # a third of 30 layers, less the head
        even = planner.steps.step(layout, 64, None, forecast.placement.links, forecast.placement.speeds)
        assert forecast.time.total < even.total


def test_memory_is_computed_with_the_recommended_split_points():
    request = PlanRequest(
        named_shape("gpt-3.6b"), two_clusters(speed=0.5), 32, 64, fixed=FixedChoices(tensor=4, pipeline=2)
    )
    planner = Planner(request)
    for one in search(request).ranked[:20]:
        assert one.memory.total == planner.memory(one.layout, one.split_points).total


def test_a_real_run_has_the_mesh_and_the_split_points_that_were_planned(pool):
    """Four processes on two clusters of unequal speed: what each holds and whom it talks to is what was planned, and
    the model is that of one process."""
    clusters = [
        {"name": "slow", "nodes": 2, "node_numbers": (1, 2), "speed": 0.5},
        {"name": "fast", "nodes": 2, "node_numbers": (3, 0)},
    ]
    slow = {"kind": "ethernet", "gb_per_second": 3.0}
    machine = parse_hardware(FIELDS | {"node_gpus": 1, "clusters": clusters, "between_clusters": slow}, "four.yaml")
    request = PlanRequest(
        shape_of(MODEL, 51), machine, 4, 16, fixed=FixedChoices(pipeline=2, tensor=1, schedule="interleaved")
    )
    best = search(request).best
    assert best.placement.stage_clusters == ("fast", "slow")
    order, bounds = best.placement.rank_order, [0, *best.split_points, 6]
    assert order == (0, 3, 1, 2) and len(bounds) == best.layout.stages + 1
    held = pool.run(4, planned_place, best.layout.config(best.split_points, order))
    alone = loss_of(LayoutConfig(micro_batch=2), single_process())
    for rank, (data_group, layers, loss) in enumerate(held):
        stage = 0 if rank in (0, 3) else 1
        assert data_group == list(order[2 * stage : 2 * stage + 2])
        own = range(stage, best.layout.stages, 2)
        assert layers == [layer for s in own for layer in range(bounds[s], bounds[s + 1])]
        assert loss is None or loss == pytest.approx(alone, rel=1e-12)
    assert sum(loss is not None for _, _, loss in held) == 2


def planned_place(layout: LayoutConfig) -> tuple[list[int], list[int], float | None]:
    """Joins the group as the launcher's rank of this process; the launcher's ranks of its data group, the layers it
    holds, and the loss where it scores."""
    rank, found = dist.get_rank(), [0]
    if rank == 0:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            found = [probe.getsockname()[1]]
    dist.broadcast_object_list(found)
    dist.destroy_process_group()
    address = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(found[0]), "RANK": str(rank), "WORLD_SIZE": "4"}
    with (
        mock.patch.dict(os.environ, address),
        init_distributed(RankInfo(rank, rank, 4), layout, MODEL, "recipe", 60) as mesh,
    ):
        group: list[int] = [-1] * mesh.data.size
        dist.all_gather_object(group, rank, group=mesh.data.group)
        return group, *layers_and_loss(layout, mesh)


def layers_and_loss(layout: LayoutConfig, mesh: Mesh) -> tuple[list[int], float | None]:
    train = TrainConfig(tokens=10**6, batch_tokens=16 * 16, precision="fp64", layout=layout)
    parts = build_local_model(MODEL, 51, train, mesh, seed=1)
    generator = torch.Generator().manual_seed(1)
    tokens, targets = torch.randint(0, 51, (2, 16, 16), generator=generator)
    batch = {"tokens": tokens, "targets": targets, "weights": torch.ones(16, 16, dtype=torch.float64)}
    own = mesh.data.rank
    share = {name: value.chunk(mesh.data.size)[own] for name, value in batch.items()}
    losses = build_forward_backward(parts, RunConfig(MODEL, train, 1), mesh, causal_loss()).train(share, [1 / 256])
    layers = sorted({int(name.split(".")[1]) for name in parts.parameters if name.startswith("layers.")})
    if losses is None:
        return layers, None
    total = losses.double().sum(0)[0]
    if mesh.data.group is not None:
        dist.all_reduce(total, group=mesh.data.group)
    return layers, float(total)


def loss_of(layout: LayoutConfig, mesh: Mesh) -> float:
    loss = layers_and_loss(layout, mesh)[1]
    assert loss is not None
    return loss


def test_one_cluster_needs_no_placement(hardware):
    layout, rates = Layout(tensor=8, pipeline=2, shard=2), Rates(hardware, FITTED)
    placement = place(layout, rates)
    assert placement.links == default_links(layout, rates)
    assert placement.rank_order is None and placement.crossing == ()


def test_a_search_over_clusters_says_what_crosses():
    plan = search(PlanRequest(named_shape("gpt-3.6b"), two_clusters(), 32, 64, fixed=FixedChoices(pipeline=2)))
    assert plan.best.placement.stage_clusters == ("infiniband", "roce")
    assert any("Only the pipeline axis crosses between clusters" in sentence for sentence in explain(plan))


def test_more_gpus_than_there_are():
    with pytest.raises(RecipeError, match="have 32 in all"):
        search(PlanRequest(named_shape("gpt-3.6b"), two_clusters(), 64, 64))

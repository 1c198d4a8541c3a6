import pytest
import torch
import torch.distributed as dist
import yaml

from gristmill.data_pipeline.errors import RecipeError
from gristmill.training.config import LayoutConfig
from gristmill.training.parallel.mesh import build_mesh
from gristmill.training.planner.explain import explain
from gristmill.training.planner.hardware import PROFILES, Hardware, parse_hardware
from gristmill.training.planner.job import Job, Pins
from gristmill.training.planner.layout import Layout, from_config
from gristmill.training.planner.models import named_shape
from gristmill.training.planner.placement import data_groups, naive_wires, place
from gristmill.training.planner.rates import FITTED, Rates
from gristmill.training.planner.search import Planner, search
from gristmill.training.planner.step_time import default_wires

FIELDS = yaml.safe_load((PROFILES / "a100-80g.yaml").read_text("utf-8"))
ROCE = {"kind": "roce", "gb_per_second": 25.0, "efficiency": 0.8, "latency_microseconds": 80.0}


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
    for group in data_groups(layout, placement.rank_order):
        assert len({(rank // 8) % 2 for rank in group}) == 1, "a data group mixes adapters"
    # The naive order of the same hosts mixes them in every group.
    assert all(len({(rank // 8) % 2 for rank in group}) == 2 for group in data_groups(layout, range(32)))


def test_tensor_groups_stay_within_a_node():
    order = place(Layout(tensor=8, pipeline=2, shard=2), Rates(two_clusters(((0, 2), (1, 3))), FITTED)).rank_order
    assert all(len({rank // 8 for rank in order[i : i + 8]}) == 1 for i in range(0, 32, 8))


def test_the_naive_order_costs_more():
    planner = Planner(Job(named_shape("gpt-3.6b"), two_clusters(), 32, 64))
    layout = Layout(tensor=4, pipeline=2, shard=4, micro_batch=1)
    good, naive = planner.forecast(layout), planner.forecast(layout, naive=True)
    assert naive.time.total > good.time.total
    assert naive_wires(layout, planner.rates).data.bandwidth < good.placement.wires.data.bandwidth / 4


def test_slow_machines_hold_fewer_layers():
    planner = Planner(Job(named_shape("gpt-3.6b"), two_clusters(speed=0.5), 32, 64))
    forecast = planner.forecast(Layout(tensor=4, pipeline=2, shard=4, micro_batch=1))
    assert forecast.placement.speeds == (1.0, 0.5)
    (cut,) = forecast.cuts
    assert 19 <= cut <= 21  # two thirds of 30 layers on the fast ones, the head on the slow ones
    even = planner.steps.step(forecast.layout, 64, (15,), forecast.placement.wires, forecast.placement.speeds)
    assert forecast.time.total < even.total


def test_data_has_to_cross_where_there_is_no_pipeline():
    placement = place(Layout(tensor=8, replicate=2, shard=2), Rates(two_clusters(), FITTED))
    assert placement.crossing == ("data",)
    assert placement.wires.shard.bandwidth > placement.wires.replicate.bandwidth


def test_one_cluster_needs_no_placement(hardware):
    layout, rates = Layout(tensor=8, pipeline=2, shard=2), Rates(hardware, FITTED)
    placement = place(layout, rates)
    assert placement.wires == default_wires(layout, rates)
    assert placement.rank_order is None and placement.crossing == ()


def test_a_search_over_clusters_says_what_crosses():
    plan = search(Job(named_shape("gpt-3.6b"), two_clusters(), 32, 64, pins=Pins(pipeline=2)))
    assert plan.best.placement.stage_clusters == ("infiniband", "roce")
    assert any("Only the pipeline axis crosses between clusters" in sentence for sentence in explain(plan))


def test_more_gpus_than_there_are():
    with pytest.raises(RecipeError, match="have 32 in all"):
        search(Job(named_shape("gpt-3.6b"), two_clusters(), 64, 64))


def test_the_mesh_is_built_from_the_placement(fake_process):
    """Each process finds itself, by its rank in the launcher's order, in the data group that was planned for it."""
    config = LayoutConfig(tensor=4, pipeline=2, data=4)
    placement = place(from_config(config, 1), Rates(two_clusters(((0, 2), (1, 3))), FITTED))
    planned = {tuple(group) for group in data_groups(from_config(config, 1), placement.rank_order)}
    for rank in (0, 5, 9, 31):
        with fake_process(32, rank):
            mesh = build_mesh(config, 8, torch.device("cpu"), placement.rank_order)
            group = tuple(dist.get_process_group_ranks(mesh.data.group))
            assert rank in group and group in planned
            assert len({other // 8 for other in dist.get_process_group_ranks(mesh.tensor.group)}) == 1

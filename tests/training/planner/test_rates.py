"""Times of matmuls and collectives, on values that can be checked by hand."""

import pytest

from gristmill.training.planner.hardware import Device, Hardware, Link
from gristmill.training.planner.network import (
    GroupLink,
    all_reduce_seconds,
    gather_seconds,
    gather_volume,
    group_link,
    send_seconds,
)
from gristmill.training.planner.rates import FITTED, Rates, Sustained

PLAIN = Hardware(
    name="plain",
    device=Device(
        memory_gib=10,
        memory_tb_per_second=1,
        memory_efficiency=1,
        matmul_tflops=100,
        matmul_efficiency=1,
        multiprocessors=4,
        tile_penalty=0,
        depth_penalty=0,
        kernel_microseconds=0,
    ),
    node_gpus=4,
    node_link=Link(kind="nvlink", gb_per_second=100, latency_microseconds=0),
    network=Link(kind="infiniband", gb_per_second=10, latency_microseconds=0),
)


def test_a_wave_that_is_not_full_costs_a_full_one():
    """4 multiprocessors, tiles of 256 x 128: 4 tiles run as one wave; a fifth, split in four, a quarter of another."""
    rates = Rates(PLAIN, Sustained())
    assert rates.matmul(1024, 4096, 128) == pytest.approx(2 * 1024 * 4096 * 128 / 100e12)
    device = Device.model_validate(PLAIN.device.model_dump() | {"tile_penalty": 1e6})  # only the largest pays
    large = Rates(Hardware.model_validate(PLAIN.model_dump() | {"device": device.model_dump()}), Sustained())
    assert large.matmul(1024 + 64, 65536, 128) == pytest.approx(1.25 * large.matmul(1024, 65536, 128))


def test_a_thin_matmul_is_bound_by_memory():
    rates = Rates(PLAIN, Sustained())
    assert rates.matmul(8192, 1, 8192) == pytest.approx(2 * (2 * 8192 + 8192**2) / 1e12)


def test_larger_matmuls_are_more_efficient(hardware):
    rates = Rates(hardware, FITTED)
    sizes = [256, 512, 1024, 2048, 4096, 8192]
    rate = [2 * n**3 / rates.matmul(n, n, n) for n in sizes]
    assert rate == sorted(rate)
    assert rate[-1] < 312e12 * hardware.device.matmul_efficiency


def test_volumes_by_hand():
    """4 ranks, 1000 bytes: 750 through each link for a gather, 1500 for an all-reduce."""
    link = GroupLink(1000.0, 0.0)
    assert gather_volume(1000, 4) == 750
    assert gather_seconds(1000, 4, link) == 0.75
    assert all_reduce_seconds(1000, 4, link) == 1.5
    assert send_seconds(1000, link) == 1.0
    assert all_reduce_seconds(1000, 1, link) == 0.0


def test_a_group_drives_the_adapters_of_its_members():
    rates = Rates(PLAIN, Sustained())
    assert group_link(rates, 4, 1).bandwidth == 100e9  # within a node
    assert group_link(rates, 8, 1).bandwidth == 40e9  # two nodes, four members and adapters in each
    assert group_link(rates, 8, 2).bandwidth == 20e9  # two members in each
    assert group_link(rates, 8, 4).bandwidth == 10e9  # one
    assert group_link(rates, 2, 2).bandwidth == 100e9

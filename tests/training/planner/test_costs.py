"""FLOPs, matmuls, collectives, cuts: the closed forms on values that can be checked by hand, and against the engine."""

import pytest

from gristmill.training.config import LayoutConfig, ModelConfig
from gristmill.training.flops import flops_per_token as engine_flops
from gristmill.training.model.stage_splitting import stage_parts
from gristmill.training.planner.flops import attended_pairs, flops_per_token, paper_flops, recomputed_flops, step_flops
from gristmill.training.planner.hardware import Device, Hardware, Link
from gristmill.training.planner.model_shape import gpt, shape_of
from gristmill.training.planner.network import (
    Wire,
    all_reduce_seconds,
    gather_seconds,
    gather_volume,
    group_wire,
    send_seconds,
)
from gristmill.training.planner.rates import FITTED, Rates, Sustained
from gristmill.training.planner.stages import balanced_cuts, cost_cuts, even_cuts, stages_from_cuts, stages_of_rank

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


def test_gpt3s_step_by_the_papers_formula():
    """96 x 1536 x 2048 x 96 x 12288^2 x (1 + 2048/73728 + 51200/18874368) = 4.51e18, by hand."""
    flops = paper_flops(96, 12288, 51200, 1536, 2048)
    assert flops == pytest.approx(96 * 1536 * 2048 * 96 * 12288**2 * (1 + 2048 / 73728 + 51200 / 18874368))
    assert flops == pytest.approx(4.51e18, rel=0.01)


@pytest.mark.parametrize("size", [(24, 2304, 24), (105, 20480, 128)])
def test_the_exact_count_of_a_gpt_is_the_papers(size):
    shape = gpt(*size)
    layers, width, _ = size
    assert step_flops(shape, 8) == pytest.approx(paper_flops(layers, width, 51200, 8, 2048, recompute=False))
    full = step_flops(shape, 8) + recomputed_flops(shape.blocks, 8, 2048, "full")
    assert full == pytest.approx(paper_flops(layers, width, 51200, 8, 2048))


@pytest.mark.parametrize(
    "model",
    [
        ModelConfig(layers=4, width=128, heads=8, kv_heads=2, context=64),
        ModelConfig(layers=6, width=128, heads=8, context=64, window=(16, None), channel="gelu"),
        ModelConfig(layers=2, width=128, heads=4, head_width=64, hidden=300, context=64),
    ],
)
def test_flops_a_token_are_the_engines(model):
    assert flops_per_token(shape_of(model, 1000)) == pytest.approx(engine_flops(model, 1000))


def test_attended_pairs_by_hand():
    assert attended_pairs(4, None, causal=False) == 16
    assert attended_pairs(4, None, causal=True) == 10
    assert attended_pairs(4, 2, causal=True) == 1 + 2 + 2 + 2
    assert attended_pairs(4, 9, causal=True) == 10


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
    """4 ranks, 1000 bytes: 750 through each wire for a gather, 1500 for an all-reduce."""
    wire = Wire(1000.0, 0.0)
    assert gather_volume(1000, 4) == 750
    assert gather_seconds(1000, 4, wire) == 0.75
    assert all_reduce_seconds(1000, 4, wire) == 1.5
    assert send_seconds(1000, wire) == 1.0
    assert all_reduce_seconds(1000, 1, wire) == 0.0


def test_a_group_drives_the_adapters_of_its_members():
    rates = Rates(PLAIN, Sustained())
    assert group_wire(rates, 4, 1).bandwidth == 100e9  # within a node
    assert group_wire(rates, 8, 1).bandwidth == 40e9  # two nodes, four members and adapters in each
    assert group_wire(rates, 8, 2).bandwidth == 20e9  # two members in each
    assert group_wire(rates, 8, 4).bandwidth == 10e9  # one
    assert group_wire(rates, 2, 2).bandwidth == 100e9


def test_even_cuts_give_the_middle_the_rest():
    assert even_cuts(8, 4) == (2, 4, 6)
    sizes = [stage.layers for stage in stages_from_cuts(10, even_cuts(10, 4))]
    assert sorted(sizes) == [2, 2, 3, 3] and sizes[0] == sizes[-1] == 2


def test_balanced_cuts_by_hand():
    assert balanced_cuts([1, 1, 1, 1], 0, 1, 2) in ((2,), (3,))  # 2 | 2 + 1 or 3 | 1 + 1: both take 3 at most
    assert balanced_cuts([1, 1, 1, 1], 0, 2, 2) == (3,)
    assert balanced_cuts([1] * 6, 0, 0, 2, speeds=(2, 1)) == (4,)


@pytest.mark.parametrize("pipeline", [2, 3, 4])
@pytest.mark.parametrize("layers", [8, 12, 13])
@pytest.mark.parametrize("vocab", [100, 3000])
def test_stages_are_cut_where_the_engine_cuts(pipeline, layers, vocab):
    model = ModelConfig(layers=layers, width=64, heads=4, context=64, window=None)
    for virtual, schedule in ((1, "1f1b"), (2, "interleaved")):
        layout = LayoutConfig(pipeline=pipeline, schedule=schedule, virtual_stages=virtual if virtual > 1 else 0)
        parts = stage_parts(model, vocab, layout)
        engine = tuple(part.first for part in parts[1:])
        assert cost_cuts(shape_of(model, vocab), layout.num_stages) == engine


def test_stages_on_ranks():
    stages = stages_from_cuts(4, (1, 2, 3))
    loop = [[s.first for s in held] for held in stages_of_rank(stages, 2, "interleaved")]
    shaped = [[s.first for s in held] for held in stages_of_rank(stages, 2, "zbv")]
    assert loop == [[0, 2], [1, 3]]
    assert shaped == [[0, 3], [1, 2]]

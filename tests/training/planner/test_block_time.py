"""The forecast of Muon (Newton-Schulz balanced over the ranks, one moment a matrix) and of mixtures of experts."""

from dataclasses import replace

import pytest

from gristmill.training.config.model import ModelConfig
from gristmill.training.planner.block_time import BlockTimes, newton_schulz_seconds, orthogonal_seconds
from gristmill.training.planner.costs.model_shape import shape_of
from gristmill.training.planner.engine_profile import FRAMEWORKS, GRISTMILL
from gristmill.training.planner.hardware import ROUTED, Rates, Sustained, load_hardware
from gristmill.training.planner.layout import Layout, RankLayers
from gristmill.training.planner.layout_candidates import place
from gristmill.training.planner.memory import MemoryModel
from gristmill.training.planner.step_time import StepModel

MODEL = ModelConfig(layers=8, width=4096, heads=32, ffn_hidden_size=4096)
SHAPE, RATES = shape_of(MODEL, 32_000), Rates(load_hardware("h100"), Sustained())
LAYERS = RankLayers((8,), True, True)


def test_newton_schulz_takes_its_flops() -> None:
    """5 rounds of three products of 4096^3, and little beside."""
    product = RATES.matmul(4096, 4096, 4096)
    assert 15 * product < newton_schulz_seconds(4096, 4096, RATES) < 1.2 * 15 * product


def test_the_ranks_share_the_matrices() -> None:
    one, each = Layout(), newton_schulz_seconds(4096, 4096, RATES)
    assert orthogonal_seconds(SHAPE, one, LAYERS, RATES) == pytest.approx(7 * 8 * each)
    eight = orthogonal_seconds(SHAPE, replace(one, shard=8), LAYERS, RATES)
    sent = 2 * 2 * 7 * 8 * 4096**2 / 8 * 7 / 8  # bytes there and back
    assert eight == pytest.approx(7 * each + sent / RATES.link(RATES.hardware.node_link)[0], rel=0.01)
    assert orthogonal_seconds(SHAPE, replace(one, shard=1024), LAYERS, RATES) > each  # no matrix is divided


def test_muon_has_a_moment_less_and_takes_longer() -> None:
    layout, muon = Layout(shard=8), GRISTMILL.with_optimizer("muon")
    adam, other = (MemoryModel(SHAPE, each).rank(layout, LAYERS, 0, 1) for each in (GRISTMILL, muon))
    matrices = 7 * 8 * 4096**2
    assert adam.optimizer - other.optimizer == pytest.approx(4 * matrices / 8, rel=0.01)
    seconds = [StepModel(SHAPE, RATES, each).step(layout, 64).optimizer for each in (GRISTMILL, muon)]
    assert seconds[1] - seconds[0] == pytest.approx(orthogonal_seconds(SHAPE, layout, LAYERS, RATES))


EIGHT = Layout(shard=8, expert=8)
MIXTURE = shape_of(
    ModelConfig(
        layers=1,
        width=2048,
        heads=32,
        head_width=128,
        kv_heads=4,
        sequence_length=4096,
        moe={"experts": 128, "top_k": 8, "ffn_hidden_size": 768},
    ),
    32_000,
)


def mixture_seconds(
    layout: Layout = EIGHT, float8: bool = False, framework: str = "megatron-core", **routed: float
) -> BlockTimes:
    rates = Rates(load_hardware("h100"), Sustained(), float8, ROUTED.model_copy(update=routed))
    model = StepModel(MIXTURE, rates, FRAMEWORKS[framework])
    return model.block_times(layout, place(layout, rates).links)[0][0]


def test_routed_rows_are_copied_at_their_share_of_the_bandwidth() -> None:
    """4,096 tokens x 8 experts x 2,048 numbers, 16 + 3 bytes each forward and 16 + 4 backward, at 3.015 TB/s: 0.42 and
    0.45 ms; half the share takes as long again."""
    full, half = mixture_seconds(copies=1.0), mixture_seconds(copies=0.5)
    numbers, rate = 4096 * 8 * 2048, 3.35e12 * 0.9
    assert half.forward.memory - full.forward.memory == pytest.approx(19 * numbers / rate)
    assert half.backward.memory - full.backward.memory == pytest.approx(20 * numbers / rate)


def test_an_experts_launches_count_for_each_expert_of_the_rank() -> None:
    """16 experts x 60 microseconds, a third of them forward."""
    without, launched = mixture_seconds(expert_microseconds=0), mixture_seconds(expert_microseconds=60)
    assert launched.forward.memory - without.forward.memory == pytest.approx(16 * 20e-6)
    assert launched.backward.memory - without.backward.memory == pytest.approx(16 * 40e-6)


def test_eight_bits_halve_products_of_experts_and_add_casts() -> None:
    plain, float8 = mixture_seconds(casts=1.0), mixture_seconds(casts=1.0, float8=True)
    slow = mixture_seconds(casts=0.1, float8=True)
    assert float8.forward.matmul < 0.6 * plain.forward.matmul
    added = 6 * 4096 * 8 * (2048 + 768) / (3.35e12 * 0.9)
    assert slow.forward.memory - float8.forward.memory == pytest.approx(9 * added)


def test_the_busiest_rank_sets_the_time_of_a_mixture() -> None:
    even, uneven = mixture_seconds(), mixture_seconds(imbalance=1.5)
    latency = 2 * 3 * 20e-6  # two all-to-alls of 8 ranks
    assert uneven.forward.expert - latency == pytest.approx(1.5 * (even.forward.expert - latency))
    assert uneven.forward.memory > even.forward.memory and uneven.forward.matmul > even.forward.matmul


def test_tokens_for_other_nodes_pass_a_ranks_own_adapter_and_overlap_hides_most() -> None:
    """4,096 tokens x 8 x 2,048 numbers of 2 bytes: 7/8 over NVLink at 360 GB/s in a node, half at 46 GB/s on two."""
    within, across = mixture_seconds(), mixture_seconds(Layout(shard=16, expert=16))
    sent = 4096 * 8 * 2048 * 2
    assert within.forward.expert == pytest.approx(2 * (sent * 7 / 8 / 360e9 + 3 * 20e-6))
    assert across.forward.expert == pytest.approx(2 * (sent / 2 / 46e9 + 4 * 60e-6))
    hidden = mixture_seconds(Layout(shard=16, expert=16), framework="megatron-core-overlap")
    assert hidden.forward.expert == pytest.approx(0.1 * across.forward.expert)

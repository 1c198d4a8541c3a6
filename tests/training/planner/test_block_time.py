"""The forecast of Muon: Newton-Schulz balanced over the ranks, one moment a matrix."""

from dataclasses import replace

import pytest

from gristmill.training.config.model import ModelConfig
from gristmill.training.planner.block_time import newton_schulz_seconds, orthogonal_seconds
from gristmill.training.planner.costs.model_shape import shape_of
from gristmill.training.planner.framework import GRISTMILL
from gristmill.training.planner.hardware import Rates, Sustained, load_hardware
from gristmill.training.planner.layout import Layout, RankLayers
from gristmill.training.planner.memory import MemoryModel
from gristmill.training.planner.step_time import StepModel

MODEL = ModelConfig(layers=8, width=4096, heads=32, hidden=4096)
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

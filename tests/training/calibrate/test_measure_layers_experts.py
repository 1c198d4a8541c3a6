"""Measured works of experts become the costs that made them."""

import pytest
import torch

from gristmill.training.calibrate.links import interleaved_seconds
from gristmill.training.calibrate.measure_layers import (
    CPU_GROUPS,
    PRODUCTS,
    ROW_WIDTH,
    ROWS_ON_CPU,
    expert_works,
    fit_experts,
)
from gristmill.training.planner.hardware import ROUTED, Rates, Sustained, load_hardware, routed_on

CPU = torch.device("cpu")


def test_the_costs_that_made_the_seconds_are_fitted() -> None:
    hardware = load_hardware("h100")
    rates = Rates(hardware, Sustained())
    seconds = {f"grouped {group}": rates.matmul(*group[1:], group[0]) + 5e-6 * group[0] for group in CPU_GROUPS}
    seconds["routed rows"] = 2 * 4 * ROWS_ON_CPU * ROW_WIDTH / (0.25 * rates.memory_rate)
    profile = fit_experts(seconds, hardware, CPU)
    assert profile.device.expert_microseconds == pytest.approx(5 * PRODUCTS)
    assert profile.device.routed_copies == pytest.approx(0.25)
    assert "4x256x256x256" in profile.sources["experts"]
    routed = routed_on(profile.device, 1.5)
    assert (routed.copies, routed.casts, routed.imbalance) == (pytest.approx(0.25), ROUTED.casts, 1.5)


def test_a_profile_without_them_has_the_fitted_costs() -> None:
    assert routed_on(load_hardware("h100").device, 1.0) == ROUTED


def test_the_works_run_here() -> None:
    seconds = interleaved_seconds(expert_works(CPU), CPU, rounds=1)
    assert len(seconds) == len(CPU_GROUPS) + 1 and all(value > 0 for value in seconds.values())

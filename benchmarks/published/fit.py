"""Fits the three constants to five published runs, the H100's power limit to one, and what routing costs to three.
Physics does the rest: nothing else is fitted anywhere.

python -m published.fit
"""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from published.experts import EXPERTS_FITTED
from published.h100 import LLM_C_RUN
from published.megatron import CALIBRATION
from published.run import PublishedRun

from gristmill.training.calibrate.measure_hardware import pattern_search
from gristmill.training.planner.costs.model_shape import recomputed_flops, step_flops
from gristmill.training.planner.engine_profile import FRAMEWORKS
from gristmill.training.planner.hardware import FITTED, ROUTED, Hardware, Rates, Routed, Sustained, load_hardware
from gristmill.training.planner.step_time import StepModel

# Weight of the prior that pulls each constant towards 1: the residual added for a constant that differs from 1 by 1.
# It only decides between fits that the runs cannot tell apart.
PRIOR = 0.02


def forecast_row(row: PublishedRun, sustained: Sustained, hardware: Hardware, routed: Routed | None = None) -> float:
    """TFLOP/s per GPU, counted as the source counts them. routed: None is the fitted one."""
    rates = Rates(hardware, sustained, row.float8, routed)
    step = StepModel(row.shape, rates, FRAMEWORKS[row.framework]).step(row.layout, row.samples)
    flops = step_flops(row.shape, row.samples)
    if row.recompute_counted:
        flops += recomputed_flops(row.shape.blocks, row.samples, row.shape.sequence_length, row.layout.recompute)
    return flops / step.total / row.layout.gpus / 1e12


def errors(rows: Sequence[PublishedRun], sustained: Sustained) -> list[float]:
    """Relative error of each forecast: forecast / published - 1."""
    machines = {name: load_hardware(name) for name in {row.hardware for row in rows}}
    return _errors(rows, sustained, machines)


def _errors(rows: Sequence[PublishedRun], sustained: Sustained, machines: Mapping[str, Hardware]) -> list[float]:
    return [forecast_row(row, sustained, machines[row.hardware]) / row.tflops - 1 for row in rows]


def fit(rows: Sequence[PublishedRun] = CALIBRATION) -> Sustained:
    """The constants with the smallest squared error, rounded to three decimals."""
    machines = {name: load_hardware(name) for name in {row.hardware for row in rows}}

    def loss(point: Sequence[float]) -> float:
        constants = Sustained(matmul=point[0], memory=point[1], network=point[2])
        prior = sum((PRIOR * (value - 1)) ** 2 for value in point)
        return sum(error**2 for error in _errors(rows, constants, machines)) + prior

    best = pattern_search(loss, [0.9, 0.9, 0.9], step=0.1, min_step=0.0005, low=0.4, high=1.0)
    return Sustained(matmul=round(best[0], 3), memory=round(best[1], 3), network=round(best[2], 3))


def fit_routed(rows: Sequence[PublishedRun] = EXPERTS_FITTED) -> Routed:
    """The two shares of the memory rate with the smallest squared error, rounded to three decimals; the other fields
    are those of ROUTED."""
    hardware = load_hardware(rows[0].hardware)

    def loss(point: Sequence[float]) -> float:
        routed = ROUTED.model_copy(update={"copies": point[0], "casts": point[1]})
        return sum((forecast_row(row, FITTED, hardware, routed) / row.tflops - 1) ** 2 for row in rows)

    copies, casts = pattern_search(loss, [0.4, 0.1], step=0.1, min_step=0.0005, low=0.02, high=1.0)
    return ROUTED.model_copy(update={"copies": round(copies, 3), "casts": round(casts, 3)})


class LeftOut(NamedTuple):
    """Constants fitted without one run, and their error on that run."""

    row: PublishedRun
    constants: Sustained
    error: float


def leave_one_out(rows: Sequence[PublishedRun] = CALIBRATION) -> list[LeftOut]:
    """Leave-one-out cross-validation: one fit for each run, without that run."""
    found = []
    for row in rows:
        constants = fit([other for other in rows if other is not row])
        found.append(LeftOut(row, constants, errors([row], constants)[0]))
    return found


def refit_spread(fits: Sequence[LeftOut]) -> dict[str, tuple[float, float]]:
    """For each constant, its minimum and maximum over the fits."""
    values = {name: [getattr(one.constants, name) for one in fits] for name in Sustained.model_fields}
    return {name: (min(each), max(each)) for name, each in values.items()}


def fit_sustained(row: PublishedRun) -> float:
    """The `sustained` of the run's GPU at which the forecast equals the published figure: bisection, three decimals."""
    hardware = load_hardware(row.hardware)
    low, high = 0.5, 1.2
    while high - low > 1e-4:
        middle = (low + high) / 2
        device = hardware.device.model_copy(update={"sustained": middle})
        slower = forecast_row(row, FITTED, hardware.model_copy(update={"device": device})) < row.tflops
        low, high = (middle, high) if slower else (low, middle)
    return round(low, 3)


def print_fit() -> None:
    """Print the fitted constants, the error of each run, and how much leaving one out changes them."""
    constants = fit()
    print(constants)
    for row, error in zip(CALIBRATION, errors(CALIBRATION, constants), strict=True):
        print(f"{row.name:8s} published {row.tflops:5.0f}  forecast {row.tflops * (1 + error):6.1f}  {error:+.1%}")
    print(fit_routed())
    print(f"H100, sustained: {fit_sustained(LLM_C_RUN)}")
    print(f"mean error {sum(abs(e) for e in errors(CALIBRATION, constants)) / len(CALIBRATION):.2%}")
    fits = leave_one_out()
    print(f"mean leave-one-out error {sum(abs(one.error) for one in fits) / len(fits):.2%}")
    for name, (low, high) in refit_spread(fits).items():
        print(f"{name}: {low:.3f} to {high:.3f} over the leave-one-out fits")

"""Fits the three constants to five published runs, and the H100's power limit to one. Physics does the rest: nothing
else is fitted anywhere.

python -m gristmill.training.planner.calibrate
"""

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from gristmill.training.planner.flops import recomputed_flops, step_flops
from gristmill.training.planner.framework import PROGRAMS
from gristmill.training.planner.hardware import Hardware, load_hardware
from gristmill.training.planner.published import CALIBRATION, Row
from gristmill.training.planner.published_h100 import LLM_C_ROW
from gristmill.training.planner.rates import FITTED, Rates, Sustained
from gristmill.training.planner.step_time import StepModel

# How firmly a constant is held near 1 (a profile's best rates last): as much as one row that is off by this share when
# the constant is off by 1. It decides between fits that the rows cannot tell apart, and no more.
PRIOR = 0.02


def forecast_row(row: Row, sustained: Sustained, hardware: Hardware) -> float:
    """TFLOP/s on each GPU, counted as the row's source counts them."""
    rates = Rates(hardware, sustained, float8=row.float8)
    step = StepModel(row.shape, rates, PROGRAMS[row.software]).step(row.layout, row.samples)
    flops = step_flops(row.shape, row.samples)
    if row.recompute_counted:
        flops += recomputed_flops(row.shape.blocks, row.samples, row.shape.context, row.layout.recompute)
    return flops / step.total / row.layout.gpus / 1e12


def errors(rows: Sequence[Row], sustained: Sustained) -> list[float]:
    """Forecast over published, less 1, of each row."""
    machines = {name: load_hardware(name) for name in {row.hardware for row in rows}}
    return _errors(rows, sustained, machines)


def _errors(rows: Sequence[Row], sustained: Sustained, machines: Mapping[str, Hardware]) -> list[float]:
    return [forecast_row(row, sustained, machines[row.hardware]) / row.tflops - 1 for row in rows]


def fit(rows: Sequence[Row] = CALIBRATION) -> Sustained:
    """The constants of least squared error, to three decimals."""
    machines = {name: load_hardware(name) for name in {row.hardware for row in rows}}

    def loss(point: Sequence[float]) -> float:
        constants = Sustained(matmul=point[0], memory=point[1], network=point[2])
        prior = sum((PRIOR * (value - 1)) ** 2 for value in point)
        return sum(error**2 for error in _errors(rows, constants, machines)) + prior

    best = pattern_search(loss, [0.9, 0.9, 0.9], step=0.1, least=0.0005, low=0.4, high=1.0)
    return Sustained(matmul=round(best[0], 3), memory=round(best[1], 3), network=round(best[2], 3))


class LeftOut(NamedTuple):
    """The constants of the other rows, and the error on the row that was left out."""

    row: Row
    constants: Sustained
    error: float


def leave_one_out(rows: Sequence[Row] = CALIBRATION) -> list[LeftOut]:
    """Fits as many times as there are rows, each time without one: what a fit is worth on a row it has not seen."""
    found = []
    for row in rows:
        constants = fit([other for other in rows if other is not row])
        found.append(LeftOut(row, constants, errors([row], constants)[0]))
    return found


def refit_spread(fits: Sequence[LeftOut]) -> dict[str, tuple[float, float]]:
    """By constant, its least and greatest value over the fits."""
    values = {name: [getattr(one.constants, name) for one in fits] for name in Sustained.model_fields}
    return {name: (min(each), max(each)) for name, each in values.items()}


def fit_sustained(row: Row) -> float:
    """What the row says of its GPU's `sustained`, all else as in its profile: where the forecast meets it, by bisection
    to three decimals."""
    hardware = load_hardware(row.hardware)
    low, high = 0.5, 1.2
    while high - low > 1e-4:
        middle = (low + high) / 2
        device = hardware.device.model_copy(update={"sustained": middle})
        slower = forecast_row(row, FITTED, hardware.model_copy(update={"device": device})) < row.tflops
        low, high = (middle, high) if slower else (low, middle)
    return round(low, 3)


def pattern_search(
    loss: Callable[[Sequence[float]], float], start: Sequence[float], step: float, least: float, low: float, high: float
) -> list[float]:
    """A minimum of loss within [low, high], by moves along each axis, halved when none helps (Hooke and Jeeves)."""
    point, value = list(start), loss(start)
    while step > least:
        moved = False
        for axis in range(len(point)):
            for change in (step, -step):
                trial = list(point)
                trial[axis] = min(high, max(low, trial[axis] + change))
                trial_value = loss(trial)
                if trial_value < value:
                    point, value, moved = trial, trial_value, True
        step = step if moved else step / 2
    return point


def main() -> None:
    constants = fit()
    print(constants)
    for row, error in zip(CALIBRATION, errors(CALIBRATION, constants), strict=True):
        print(f"{row.name:8s} published {row.tflops:5.0f}  forecast {row.tflops * (1 + error):6.1f}  {error:+.1%}")
    print(f"H100, sustained: {fit_sustained(LLM_C_ROW)}")
    print(f"mean error {sum(abs(e) for e in errors(CALIBRATION, constants)) / len(CALIBRATION):.2%}")
    fits = leave_one_out()
    print(f"mean error of a row left out {sum(abs(one.error) for one in fits) / len(fits):.2%}")
    for name, (low, high) in refit_spread(fits).items():
        print(f"{name}: {low:.3f} to {high:.3f} over the fits with one row left out")


if __name__ == "__main__":
    main()

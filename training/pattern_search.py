"""Pattern search: minimize a function of a few variables without derivatives."""

from collections.abc import Callable, Sequence


def pattern_search(
    loss: Callable[[Sequence[float]], float],
    start: Sequence[float],
    step: float,
    min_step: float,
    low: float,
    high: float,
) -> list[float]:
    """Minimize loss within [low, high] by steps along each axis, halved when none improves (Hooke and Jeeves)."""
    point, value = list(start), loss(start)
    while step > min_step:
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

"""Which steps are not taken: those whose loss or gradient is not finite, or stands far out of its recent past."""

import math
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from gristmill.foundation.errors import InputError
from gristmill.training.config import GuardConfig

SURELY_ENOUGH = 16  # steps before a deviation means anything


class Guard:
    """Judges by values that all processes agree on, so all judge alike. Its state is saved with the run."""

    def __init__(self, config: GuardConfig):
        self.config = config
        self.losses: list[float] = []
        self.norms: list[float] = []
        self.skipped: list[int] = []
        self.in_a_row = 0

    def refuses(self, step: int, loss: float, norm: float) -> str | None:
        """Why this step must not be taken, or None. Raises InputError after too many refusals in a row."""
        reason = self._reason(loss, norm)
        if reason is None:
            self.in_a_row = 0
            if self.config.sigmas is not None:
                self.losses = [*self.losses, loss][-self.config.window :]
                self.norms = [*self.norms, norm][-self.config.window :]
            return None
        self.skipped.append(step)
        self.in_a_row += 1
        if self.in_a_row > self.config.most_in_a_row:
            raise InputError(
                f"step {step}: {reason}; {self.in_a_row} steps in a row were skipped (train.guard.most_in_a_row), so "
                "training has diverged: lower train.optimizer.learning_rate or warm up longer"
            )
        return reason

    def state(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in ("losses", "norms", "skipped", "in_a_row")}

    def restore(self, state: Mapping[str, Any]) -> None:
        for name, value in state.items():
            setattr(self, name, value)

    def _reason(self, loss: float, norm: float) -> str | None:
        if not (math.isfinite(loss) and math.isfinite(norm)):
            return f"loss {loss}, gradient norm {norm}: not finite"
        if self.config.sigmas is None:
            return None
        for name, value, past in (("loss", loss, self.losses), ("gradient norm", norm, self.norms)):
            if _stands_out(value, past, self.config.sigmas):
                return f"{name} {value:.4g} stands {self.config.sigmas} deviations above the last {len(past)} steps"
        return None


def _stands_out(value: float, past: Sequence[float], sigmas: float) -> bool:
    if len(past) < SURELY_ENOUGH:
        return False
    return value > statistics.fmean(past) + sigmas * statistics.pstdev(past)

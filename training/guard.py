"""Skips the update of a step whose loss or gradient norm is not finite, or is an outlier among recent steps."""

import math
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from gristmill.foundation.errors import InputError
from gristmill.training.config import GuardConfig

MIN_HISTORY = 16  # steps needed for a meaningful standard deviation


class Guard:
    """Decides from values that are equal on all processes, so all take the same decision. Saved in the checkpoint."""

    def __init__(self, config: GuardConfig):
        self.config = config
        self.losses: list[float] = []
        self.norms: list[float] = []
        self.skipped: list[int] = []
        self.consecutive_skips = 0

    def skip_reason(self, step: int, loss: float, norm: float) -> str | None:
        """Why the update of this step is skipped, or None. Raises InputError after max_consecutive_skips in a row."""
        reason = self._reason(loss, norm)
        if reason is None:
            self.consecutive_skips = 0
            if self.config.sigmas is not None:
                self.losses = [*self.losses, loss][-self.config.window :]
                self.norms = [*self.norms, norm][-self.config.window :]
            return None
        self.skipped.append(step)
        self.consecutive_skips += 1
        if self.consecutive_skips > self.config.max_consecutive_skips:
            raise InputError(
                f"step {step}: {reason}; {self.consecutive_skips} steps in a row were skipped "
                "(train.guard.max_consecutive_skips), so training has diverged: lower train.optimizer.learning_rate or "
                "warm up longer"
            )
        return reason

    def state(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in ("losses", "norms", "skipped", "consecutive_skips")}

    def restore(self, state: Mapping[str, Any]) -> None:
        for name, value in state.items():
            setattr(self, name, value)

    def _reason(self, loss: float, norm: float) -> str | None:
        if not (math.isfinite(loss) and math.isfinite(norm)):
            return f"loss {loss}, gradient norm {norm}: not finite"
        if self.config.sigmas is None:
            return None
        for name, value, past in (("loss", loss, self.losses), ("gradient norm", norm, self.norms)):
            if _is_outlier(value, past, self.config.sigmas):
                return (
                    f"{name} {value:.4g} is {self.config.sigmas} standard deviations above the mean of the last "
                    f"{len(past)} steps"
                )
        return None


def _is_outlier(value: float, past: Sequence[float], sigmas: float) -> bool:
    if len(past) < MIN_HISTORY:
        return False
    return value > statistics.fmean(past) + sigmas * statistics.pstdev(past)

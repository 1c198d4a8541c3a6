"""Dynamic loss scaling for fp16: the loss is multiplied before the backward pass, the gradients divided after it."""

import math
from typing import Any

INITIAL_SCALE = 2.0**16  # Micikevicius et al., arXiv 1710.03740, section 3.2: as high as does not overflow
STEPS_BEFORE_DOUBLING = 2000


class LossScale:
    """Halved after an overflow, doubled after 2000 steps without one. Depends on the global norm only, so all processes
    have the same scale. In other precisions it is always 1."""

    def __init__(self, dynamic: bool):
        self.dynamic = dynamic
        self.value = INITIAL_SCALE if dynamic else 1.0
        self.good_steps = 0

    def skip_reason(self, norm: float) -> str | None:
        """Why the step is skipped, or None. At a scale of 1 a non-finite norm is left to the guard."""
        if not self.dynamic:
            return None
        if math.isfinite(norm):
            self.good_steps += 1
            if self.good_steps % STEPS_BEFORE_DOUBLING == 0:
                self.value *= 2
            return None
        if self.value <= 1:
            return None
        self.value, self.good_steps = self.value / 2, 0
        return f"fp16 overflow, the loss scale falls to {self.value:g}"

    def state(self) -> dict[str, Any]:
        return {"value": self.value, "good_steps": self.good_steps}

    def restore(self, state: dict[str, Any]) -> None:
        self.value, self.good_steps = state["value"], state["good_steps"]

"""fp16's narrow range, stretched: the loss is scaled up before the backward pass and the gradients down after it."""

import math
from typing import Any

FIRST = 2.0**16  # Micikevicius et al., arXiv 1710.03740, section 3.2: as high as does not overflow
STEPS_BEFORE_DOUBLING = 2000


class LossScale:
    """Halved after an overflow, doubled after 2000 steps without. It follows the global norm, on which all processes
    agree, so all have the same scale. In other precisions it is 1 and stays so."""

    def __init__(self, dynamic: bool):
        self.dynamic = dynamic
        self.value = FIRST if dynamic else 1.0
        self.good_steps = 0

    def overflowed(self, norm: float) -> str | None:
        """Why the step must be left out, or None. A scale that is down to 1 leaves the judgement to the guard."""
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

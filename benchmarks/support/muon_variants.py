"""Variants of Muon that `recipes.py --changes` trains beside the engine's own, in one process and without a sharded
layout."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal
from unittest.mock import patch

import torch
from torch import Tensor

from gristmill.training.optim import offload
from gristmill.training.optim.muon import COEFFICIENTS, ROUNDS, Muon
from gristmill.training.optim.optimizer import Operands

# Amsel et al. 2025, arXiv 2505.16932: the best odd quintics in turn for singular values from 1e-3 to 1, with a safety
# of 2 %, as in nanochat's optim.py
POLAR_EXPRESS = (
    (8.156554524902461, -22.48329292557795, 15.878769915207462),
    (4.042929935166739, -2.808917465908714, 0.5000178451051316),
    (3.8916678022926607, -2.772484153217685, 0.5060648178503393),
    (3.285753657755655, -2.3681294933425376, 0.46449024233003106),
    (2.3465413258596377, -1.7097828382687081, 0.42323551169305323),
)
# Changes of `recipes.py`; init's own rate is 0.03
MUON_CHANGES: dict[str, dict[str, dict[str, Any]]] = {
    "NorMuon": {"muon": {"moment": "rows"}},
    "NorMuon, rate 0.02": {"muon": {"moment": "rows"}, "optimizer": {"muon_learning_rate": 0.02}},
    "AdaMuon": {"muon": {"moment": "elements"}},
    "AdaMuon, rate 0.02": {"muon": {"moment": "elements"}, "optimizer": {"muon_learning_rate": 0.02}},
    "Polar Express": {"muon": {"polynomials": "polar_express"}},
    "Polar Express, rate 0.02": {
        "muon": {"polynomials": "polar_express"},
        "optimizer": {"muon_learning_rate": 0.02},
    },
    "Moonlight's scale, rate 0.013": {"muon": {"scale": "longer_side"}, "optimizer": {"muon_learning_rate": 0.013}},
    "Moonlight's scale, rate 0.009": {"muon": {"scale": "longer_side"}, "optimizer": {"muon_learning_rate": 0.009}},
    **{
        f"weight decay {decay} on matrices, {name}": {
            "muon": {field: True},
            "optimizer": {"weight_decay": decay, "decay_tables": False},
        }
        for name, field in (("cautious", "cautious"), ("falling to 0", "decay_to_zero"))
        for decay in (0.03, 0.1, 0.3)
    },
}
MOMENT_DECAY = 0.95  # of second moments, as in NorMuon and AdaMuon


@dataclass(frozen=True)
class MuonVariant:
    """Differences from the engine's Muon.

    polynomials: `polar_express` takes these of its paper in place of Newton-Schulz's quintic. moment: second moments of
    the orthogonal update, by which it is divided, at equal Frobenius norm: of `rows` (NorMuon, arXiv 2510.05491) or
    `elements` (AdaMuon, arXiv 2507.11005, which also takes the momentum's signs alone). scale: `longer_side` gives each
    matrix updates of one root mean square, 0.2 times the rate (Moonlight, arXiv 2502.16982), in place of
    sqrt(max(1, rows / columns)). cautious: weights decay where the update makes them smaller too (arXiv 2510.12402).
    decay_to_zero: the weight decay falls linearly to 0 over the run, as nanochat's of 2026 does."""

    polynomials: Literal["newton_schulz", "polar_express"] = "newton_schulz"
    moment: Literal["rows", "elements"] | None = None
    scale: Literal["rows_over_columns", "longer_side"] = "rows_over_columns"
    cautious: bool = False
    decay_to_zero: bool = False


@contextmanager
def replaced_muon(variant: MuonVariant | None, steps: int) -> Iterator[None]:
    """Runs that are made inside have this optimizer. steps: of the run."""
    if variant is None:
        yield
        return
    with patch.object(offload, "Muon", type("Variant", (VariantMuon,), {"variant": variant, "steps": steps})):
        yield


class VariantMuon(Muon):
    variant: MuonVariant
    steps: int

    @torch.no_grad()
    def update(self, operands: Sequence[Operands], rate_share: float) -> None:
        moments: dict[str, Tensor] = self.__dict__.setdefault("moments", {})
        rate, decay = self.config.muon_learning_rate * rate_share, self.config.weight_decay
        if self.variant.decay_to_zero:
            decay *= 1 - self.updates / self.steps
        for operand in operands:
            if operand.name in self.matrices:
                direction = self._direction(operand, moments)
                decayed = operand.parameter
                if self.variant.cautious:
                    decayed = decayed * (decayed * direction > 0)
                operand.parameter.sub_(decayed * decay + direction, alpha=rate)
        self.adamw.update([operand for operand in operands if operand.name not in self.matrices], rate_share)

    def _direction(self, operand: Operands, moments: dict[str, Tensor]) -> Tensor:
        ahead = self._ahead(operand)
        made = orthogonal(ahead.sign() if self.variant.moment == "elements" else ahead, self.variant.polynomials)
        if self.variant.moment is not None:
            squares = made.square()
            squares = squares.mean(dim=1, keepdim=True) if self.variant.moment == "rows" else squares
            moment = moments.setdefault(operand.name, torch.zeros_like(squares))
            divided = made / (moment.lerp_(squares, 1 - MOMENT_DECAY).sqrt() + 1e-8)
            made = divided * (made.norm() / (divided.norm() + 1e-12))
        longer_side = float(0.2 * max(made.shape) ** 0.5)
        return made * (longer_side if self.variant.scale == "longer_side" else self._factor(operand.name))


def orthogonal(matrix: Tensor, polynomials: str) -> Tensor:
    """As the engine's, with polynomials that may change from round to round."""
    rounds = POLAR_EXPRESS if polynomials == "polar_express" else (COEFFICIENTS,) * ROUNDS
    safety = 1.02 if polynomials == "polar_express" else 1.0
    tall = matrix.shape[0] > matrix.shape[1]
    x = matrix.mT if tall else matrix
    x = x / (x.norm() * safety + 1e-7)
    for a, b, c in rounds:
        square = x @ x.mT
        x = a * x + (b * square + c * square @ square) @ x
    return x.mT if tall else x

"""Causal language modelling: the next token of every token (the default)."""

from collections.abc import Mapping, Sequence

import numpy as np
from torch import Tensor

from gristmill.training.model.output import ModelOutput
from gristmill.training.objectives.objective import Batch, Objective, Term, token_terms


class Causal(Objective):
    """The fused loss over the vocabulary, and the z-loss where train.z_loss is set."""

    bits_per_byte = True

    def sample(self, k: int) -> Mapping[str, np.ndarray]:
        drawn = self.inputs.samples.sample(k)
        fields = {name: drawn[name] for name in ("tokens", "targets", "weights")}
        if self.inputs.mask_documents:
            fields["positions"] = drawn["positions"]
            fields["documents"] = document_numbers(drawn["document_bounds"])
        return fields

    def loss(self, model: ModelOutput, batch: Batch) -> Sequence[Term]:
        return token_terms("nll", model, batch)

    def predict(self, model: ModelOutput, batch: Batch) -> Mapping[str, Tensor]:
        return {"targets": model.best_tokens()}


def document_numbers(bounds: np.ndarray) -> np.ndarray:
    """Which document each token is in. [0, 3, 5] -> [0, 0, 0, 1, 1]."""
    return np.repeat(np.arange(len(bounds) - 1), np.diff(bounds))

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
        return {name: values[0] for name, values in self.batch(range(k, k + 1)).items()}

    def batch(self, numbers: range) -> Mapping[str, np.ndarray]:
        drawn = self.inputs.samples.batch(numbers)
        learned = ("tokens", "targets", "weights")
        return {name: drawn[name] for name in (*learned, *(("positions", "documents") * self.inputs.mask_documents))}

    def loss(self, model: ModelOutput, batch: Batch) -> Sequence[Term]:
        return token_terms("nll", model, batch)

    def predict(self, model: ModelOutput, batch: Batch) -> Mapping[str, Tensor]:
        return {"targets": model.best_tokens()}

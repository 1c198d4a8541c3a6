"""Causal language modelling: the next token of every token (the default)."""

from collections.abc import Mapping, Sequence

import numpy as np
from pydantic import Field
from torch import Tensor

from gristmill.foundation.config import Config
from gristmill.training.model.heads import ModelOutput
from gristmill.training.objectives.objective import Batch, Objective, Term, no_sum, token_terms


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


# Distillation: causal language modelling, and the divergence from a frozen teacher (train.teacher).


class DistillationOptions(Config):
    """weight x temperature^2 x KL(teacher || student) is added to the loss of each token."""

    weight: float = Field(1.0, gt=0, description="factor on the divergence")
    temperature: float = Field(1.0, gt=0, description="logits of both models are divided by this")


class Distillation(Causal):
    """As Mixture-of-Students does (arXiv 2201.05596, section 4.4)."""

    Options = DistillationOptions

    def loss(self, model: ModelOutput, batch: Batch) -> Sequence[Term]:
        divergence = no_sum(batch)
        if model.has_teacher:
            divergence = model.divergence_from_teacher(batch["weights"], self.options.temperature)
        return [*super().loss(model, batch), Term("divergence", divergence, "weights", self.options.weight)]

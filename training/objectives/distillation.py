"""Distillation: causal language modelling, and the divergence from a frozen teacher (train.teacher)."""

from collections.abc import Sequence

from pydantic import Field

from gristmill.foundation.config import Config
from gristmill.training.model.output import ModelOutput
from gristmill.training.objectives.causal import Causal
from gristmill.training.objectives.objective import Batch, Term, no_sum


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

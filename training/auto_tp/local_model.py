"""A model of transformers as the part of a run that the trainer updates and a checkpoint saves."""

from dataclasses import dataclass
from typing import Any

from torch import Tensor

from gristmill.training.auto_tp.causal_model import TransformersModel, whole_on_each_rank
from gristmill.training.engine.local_model import LocalModel
from gristmill.training.parallel.mesh import Mesh


@dataclass
class TransformersLocalModel(LocalModel):
    """stages holds the one model under 0. tokens: of a sample."""

    tokens: int = 0

    @property
    def sequence_length(self) -> int:
        return self.tokens

    @property
    def buffers(self) -> dict[str, Tensor]:
        return {}


def local_model(model: TransformersModel, mesh: Mesh, sequence_length: int) -> TransformersLocalModel:
    """Parameters have the names of transformers, with those of the pieces of fused layers. The global norm counts a
    parameter that tensor ranks do not share on the first of them only."""
    parameters = dict(model.model.named_parameters())
    whole = whole_on_each_rank(parameters, mesh) if mesh.tensor.rank else frozenset()
    stages: dict[int, Any] = {0: model}
    return TransformersLocalModel(stages, parameters, excluded_from_norm=whole, tokens=sequence_length)

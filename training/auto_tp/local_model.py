"""A model of transformers as the part of a run that the trainer updates and a checkpoint saves."""

import os
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor
from torch.distributed.fsdp import FSDPModule

from gristmill.training.auto_tp.causal_model import TransformersModel, parallelize, whole_on_each_rank
from gristmill.training.auto_tp.cost import described
from gristmill.training.auto_tp.fused import whole_parameters
from gristmill.training.auto_tp.transformers_folder import TransformersFolder, plan_for
from gristmill.training.config import TrainConfig
from gristmill.training.engine.local_model import LocalModel
from gristmill.training.parallel.mesh import Mesh
from gristmill.training.parallel.precision import PRECISIONS


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


def build_transformers_model(
    folder: TransformersFolder, train: TrainConfig, mesh: Mesh, sequence_length: int, say: Callable[[str], None]
) -> TransformersLocalModel:
    """The folder's model on this process, under a plan by rules that is printed, and FSDP. Collective."""
    precision = PRECISIONS[train.precision]
    plan, traced = plan_for(folder.skeleton(), mesh.tensor.size)
    if mesh.tensor.size > 1 and mesh.is_first:
        for line in described(plan, traced, precision.compute.itemsize):
            say(f"train: {line}")
    model = parallelize(folder.load(precision.store), plan, mesh, precision, train.layout.reshards)
    model.train()
    return local_model(model, mesh, sequence_length)


def save_transformers_folder(local: LocalModel, folder: TransformersFolder, target: Path, mesh: Mesh) -> None:
    """Writes the weights as a folder that transformers opens; complete or absent. Collective."""
    model = local.stages[0]
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()
    tensors = {name: whole.cpu() for name, whole in whole_parameters(model.model, lambda parameter: parameter.detach())}
    if mesh.is_first:
        temporary = target.with_name(f".{target.name}.tmp")
        shutil.rmtree(temporary, ignore_errors=True)
        folder.save(temporary, tensors)
        shutil.rmtree(target, ignore_errors=True)
        os.replace(temporary, target)

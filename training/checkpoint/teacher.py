"""The teacher: a second, frozen model on the mesh, whose hidden states are a field of the batch. Distillation learns
from it (Mixture-of-Students, arXiv 2201.05596, section 4.4); it is DPO's reference model."""

import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from gristmill.foundation.errors import InputError
from gristmill.training.checkpoint import checkpoint
from gristmill.training.config.model import ModelConfig
from gristmill.training.config.train import TrainConfig
from gristmill.training.engine.local_model import LocalModel, build_local_model
from gristmill.training.engine.passes import Batch, ForwardBackward
from gristmill.training.model.heads import FrozenHead, TeacherStage
from gristmill.training.model.transformer import INPUT_FIELDS, Transformer
from gristmill.training.parallel.mesh import Mesh
from gristmill.training.planner.layout_checks import objections


class Teacher:
    """Computes the teacher's final hidden states of a batch, until `until_tokens` of training."""

    def __init__(self, forward_backward: ForwardBackward, until_tokens: float):
        self.forward_backward, self.until_tokens = forward_backward, until_tokens

    def outputs(self, batch: Batch, tokens: int) -> dict[str, Tensor]:
        """{"teacher": float[b, R, T, D]}, R rows of a sample, where the student's head is; {} on other stages and after
        `until_tokens`."""
        if tokens >= self.until_tokens:
            return {}
        inputs = {name: batch[name] for name in ("tokens", *INPUT_FIELDS) if name in batch}
        hidden_NTD = self.forward_backward.evaluate(inputs)
        return {} if hidden_NTD is None else {"teacher": hidden_NTD.unflatten(0, (len(batch["tokens"]), -1))}


def check_teacher(folder: Path, student: ModelConfig, train: TrainConfig, saved_config: Mapping[str, Any]) -> None:
    """Raises InputError unless the checkpoint is complete and can teach the student on its layout.

    saved_config: of the student."""
    checkpoint.verified(folder)
    there = checkpoint.read_model_config(folder)
    problems = list(_problems(there, student, train, saved_config))
    if problems:
        raise InputError(f"train.teacher: {folder} cannot teach this model: {'; '.join(problems)}")


def _problems(
    there: Mapping[str, Any], student: ModelConfig, train: TrainConfig, saved_config: Mapping[str, Any]
) -> Iterator[str]:
    model, layout = ModelConfig.model_validate(there["model"]), train.layout
    for name in ("vocab_size", "end_of_document"):
        if there[name] != saved_config[name]:
            yield (
                f"its {name} is {there[name]}, the data has {saved_config[name]}; index the data with the teacher's "
                "tokenizer, or take a teacher that was trained on this one"
            )
    if model.positions == "learned" and model.sequence_length < student.sequence_length:
        yield f"it has positions for {model.sequence_length} tokens; set model.sequence_length to at most that"
    if math.gcd(model.num_kv_heads, layout.tensor) != math.gcd(student.num_kv_heads, layout.tensor):
        yield (
            f"its {model.num_kv_heads} key/value heads lie on tensor {layout.tensor} otherwise than the student's "
            f"{student.num_kv_heads}; set tensor: 1"
        )
    if model.attention != student.attention:
        yield f"its attention is {model.attention}, the model's {student.attention}; take a teacher like the model"
    if model.head_transform or model.head_bias:
        yield "its head has a transform or a bias, which is not built for teachers; take a teacher without"
    if model.has_experts and not student.has_experts:
        yield "it has experts and the student has none, which is not built yet; take a student with experts"
    yield from objections(model, teacher_config(train, model), there["vocab_size"], layout.world_size)


def teacher_config(train: TrainConfig, model: ModelConfig) -> TrainConfig:
    """How the teacher is built and run: on the student's layout, its own layers divided over the stages by cost."""
    layout = train.layout.model_dump() | {"split_points": None, "recompute": "none", "offloaded_token_fraction": None}
    layout |= {"offload": {}}
    if not model.has_experts:
        layout |= {"expert": 1, "expert_tensor": 1}
    changes = {
        "layout": layout,
        "compile": False,
        "float8": False,
        "cuda_graphs": False,
        "teacher": None,
        "objective": "causal",
        "objective_options": {},
        "init_from": None,
        "upcycle": None,
    }
    return TrainConfig.model_validate(train.model_dump() | changes)


def load_teacher(folder: Path, train: TrainConfig, mesh: Mesh) -> tuple[LocalModel, TeacherStage | None]:
    """The frozen teacher's stages on this process, without a head; and, where the student's head is, the teacher's. The
    folder must have been checked."""
    there = checkpoint.read_model_config(folder)
    model = ModelConfig.model_validate(there["model"])
    local_model = build_local_model(
        model, there["vocab_size"], teacher_config(train, model), mesh, seed=0, weights="empty"
    )
    checkpoint.load(folder, checkpoint.saved_tensors(local_model.parameters, local_model.buffers), mesh)
    local_model.update_copies()
    teacher = None
    for stage in local_model.stages.values():
        stage.requires_grad_(False)
        if stage.head is not None:
            scoring, table_VtD = stage.head.scoring, _own_rows(stage)
            stage.head = None  # so that the stage gives hidden states
            teacher = TeacherStage(stage.tensor, FrozenHead(scoring, table_VtD))
    return local_model, teacher


@torch.no_grad()
def _own_rows(stage: Transformer) -> Tensor:
    """This tensor rank's rows of the output table, gathered over the data ranks, in the dtype of the computation."""
    assert stage.head is not None  # a teacher has no pipeline, so its stage is the last
    table = stage.head.weight.detach()
    if not isinstance(table, DTensor):
        return table.to(stage.dtype)
    whole_VD, share = table.full_tensor(), math.ceil(stage.vocab_size / stage.tensor.size)
    return whole_VD[stage.tensor.rank * share : (stage.tensor.rank + 1) * share].to(stage.dtype).clone()

"""Initializes a run from the weights of a checkpoint: step 0, a new optimizer, the same architecture. Loads the
teacher, a second model beside the one that is trained."""

import json
import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from gristmill.foundation.errors import InputError
from gristmill.training.checkpoint import checkpoint
from gristmill.training.config.layers import MoeConfig
from gristmill.training.config.model import ModelConfig
from gristmill.training.config.train import TrainConfig
from gristmill.training.engine.local_model import LocalModel, build_local_model
from gristmill.training.engine.passes import Batch, ForwardBackward
from gristmill.training.model.heads import FrozenHead, TeacherStage
from gristmill.training.model.transformer import INPUT_FIELDS, Transformer
from gristmill.training.parallel.context import HOST_DOCUMENTS
from gristmill.training.parallel.mesh import Mesh, local, local_shard
from gristmill.training.planner.layout_checks import validation_errors

MAY_DIFFER = {"dropout", "init_std", "init_method", "mup_base_width", "outputs"}


def padded_vocab_size(folder: Path | None, vocab_size: int) -> int:
    """The checkpoint's vocabulary, where an import has padding rows behind the tokens that the data has; else the
    data's."""
    if folder is None or not (folder / checkpoint.MODEL_NAME).is_file():
        return vocab_size
    there = checkpoint.read_model_config(folder)
    return int(there["vocab_size"]) if there["vocab_size"] - there.get("padded_rows", 0) == vocab_size else vocab_size


def check_init_from(folder: Path, saved_config: Mapping[str, Any]) -> None:
    """Raises InputError unless the checkpoint is complete and has the model described by `saved_config`."""
    checkpoint.verified(folder)
    there = checkpoint.read_model_config(folder)
    before, after = architecture(there["model"]), architecture(saved_config["model"])
    if saved_config["model"]["sequence_length"] > there["model"]["sequence_length"]:
        for fields in (before, after):  # the run extends the context
            del fields["rope_scaling"], fields["rope_base"]
    wrong = differing(before, after)
    if wrong:
        raise InputError(
            f"train.init_from: {folder} holds another model than the recipe's: {'; '.join(wrong)}; set the recipe's "
            f"model as {folder / checkpoint.MODEL_NAME} has it"
        )
    for name in ("vocab_size", "end_of_document"):
        if there[name] != saved_config[name]:
            padded = f", {there['padded_rows']} of them padding" if there.get("padded_rows") else ""
            raise InputError(
                f"train.init_from: {folder} was trained with {name} {there[name]}{padded}, this run's data has "
                f"{saved_config[name]}; index the data with the checkpoint's tokenizer"
            )


def load_init_from(folder: Path, model: LocalModel, mesh: Mesh) -> list[str]:
    """Loads the parameters, on any layout; returns the outputs that the checkpoint does not have, which keep their
    initial weights. The folder must have been checked."""
    there = ModelConfig.model_validate(checkpoint.read_model_config(folder)["model"])
    new = [output.name for output in model.config.outputs if output not in there.outputs]
    fresh = [f"outputs.linear.{name}." for name in new]
    if not there.has_pooler:
        fresh.append("outputs.pooler.")
    weights = {name: weight for name, weight in model.weights.items() if not name.startswith(tuple(fresh))}
    checkpoint.load(folder, checkpoint.saved_tensors(weights, model.buffers), mesh)
    model.release_pages()
    model.update_copies()
    return new


def architecture(model: Mapping[str, Any]) -> dict[str, Any]:
    """The fields that must be equal for weights to fit, with derived defaults written out. Dropout
    and initialization may differ, so may the sequence length unless learned positions depend on it, and the outputs;
    rotary base and scaling where a run has longer samples than the checkpoint."""
    config = ModelConfig.model_validate(model)
    fields = config.model_dump(mode="json", exclude=MAY_DIFFER)
    if config.positions != "learned":
        del fields["sequence_length"]
    mixers = {name: config.mixer_named(name) for name in config.stateful_mixers}
    fields["mixers"] = {name: mixer.model_dump(exclude=set(mixer.not_of_weights)) for name, mixer in mixers.items()}
    del fields["pattern"]
    fields["rope_layers"] = [layer.rope for layer in config.layer_list]
    for name in ("mixer", "mlp", "window", "norm_order"):
        fields[name] = [getattr(layer, name) for layer in config.layer_list]
    fields |= {"kv_heads": config.num_kv_heads, "head_width": config.head_dim}
    for name in ("ffn_hidden_size", "experts", "top_k", "expert_ffn_hidden_size"):
        fields[name] = [getattr(layer, name) for layer in config.layer_list]
    fields |= _mixture(fields.pop("moe", None) and config.moe)
    fields["mup"] = config.mup_base_width / config.width if config.init_method == "mup" else None
    return fields


def _mixture(moe: MoeConfig | None) -> dict[str, Any]:
    """The fields of a mixture that decide what its weights and buffers are and mean; how it is balanced may differ."""
    names = (
        "shared_experts",
        "residual",
        "router",
        "normalize_gates",
        "gate_scale",
        "groups",
        "top_groups",
        "group_score",
    )
    if moe is None:
        return dict.fromkeys(f"moe.{name}" for name in (*names, "balancing bias", "load of the last batch"))
    buffers = {"balancing bias": moe.bias_update_rate > 0}
    buffers["load of the last batch"] = moe.balance_loss > 0 and moe.balance_over == "batch"
    return {f"moe.{name}": getattr(moe, name) for name in names} | {f"moe.{name}": on for name, on in buffers.items()}


def differing(there: Mapping[str, Any], here: Mapping[str, Any]) -> list[str]:
    """["width 256 instead of 512"]."""
    names = sorted(name for name in there.keys() | here.keys() if there.get(name) != here.get(name))
    return [f"{name} {_brief(there.get(name))} instead of {_brief(here.get(name))}" for name in names]


def _brief(value: Any) -> str:
    return json.dumps(value[0] if isinstance(value, list) and len(set(value)) == 1 else value)


# Upcycling: a dense checkpoint initializes a mixture of experts (arXiv 2212.05055).
#
# Each expert begins as a copy of its layer's MLP, so that at step 0 the mixture computes what the dense model does:
# gates that sum to 1 weigh equal results.

FRESH = ("router", "coefficient")  # parts of a mixture that a dense model has none of: they keep their initial weights


def upcycling_problems(config: ModelConfig) -> Iterator[str]:
    """Why the experts of this model cannot be copies of the dense model's MLPs that give the same result."""
    moe = config.moe
    if moe is None:
        yield "the recipe's model has no experts; give it some (model.moe), or leave upcycle out"
        return
    if config.pattern is not None:
        yield "pattern names the layers of experts, which no dense model has; set moe.experts by layer instead"
        return
    if not moe.normalize_gates or moe.gate_scale != 1:
        yield "gates must sum to 1; set moe.normalize_gates: true and moe.gate_scale: 1"
    if moe.shared_experts:
        yield "shared experts would be added to the copies; set moe.shared_experts: 0"
    widths = {layer.expert_ffn_hidden_size for layer in config.layer_list if layer.experts}
    if widths != {config.hidden_width(layer.mlp) for layer in config.layer_list if layer.experts}:
        yield f"experts {sorted(widths)} wide cannot hold the MLP; leave moe.ffn_hidden_size out"


def dense_twin(config: ModelConfig) -> ModelConfig:
    """The dense model whose checkpoint initializes this one."""
    return ModelConfig.model_validate(config.model_dump() | {"moe": None})


def load_upcycled(folder: Path, model: LocalModel, mesh: Mesh) -> None:
    """Loads a dense checkpoint, which must have been checked, on any layout."""
    plain, copied = {}, {}
    for name, parameter in model.parameters.items():
        source = source_of(name)
        if source == name:
            plain[name] = parameter
        elif source is not None:
            copied[name] = torch.empty(_source_shape(name, parameter.shape), dtype=parameter.dtype)
    tensors = checkpoint.saved_tensors(plain, {})
    tensors |= {f"model.{source_of(name)}": value for name, value in copied.items() if ".experts." in name}
    checkpoint.load(folder, tensors, mesh)
    beside = {name: value for name, value in copied.items() if ".experts." not in name}
    if beside:  # under the same names in the checkpoint, so in a second reading
        checkpoint.load(folder, {f"model.{source_of(name)}": value for name, value in beside.items()}, mesh)
    for name, value in copied.items():
        target = model.parameters[name].detach()
        whole = value.expand(target.shape) if ".experts." in name else value
        local(target).copy_(local_shard(whole, target))
    model.update_copies()


def source_of(name: str) -> str | None:
    """The dense model's parameter that this one begins with; None where it keeps its initial weights.

    layers.3.mlp.experts.up.weight -> layers.3.mlp.up.weight; layers.3.mlp.router.weight -> None."""
    parts = name.split(".")
    if any(part in FRESH for part in parts):
        return None
    return ".".join(part for part in parts if part not in ("experts", "residual"))


def _source_shape(name: str, shape: torch.Size) -> torch.Size:
    return shape[1:] if ".experts." in name else shape


def check_upcycling(folder: Path, config: ModelConfig, saved_config: Mapping[str, Any]) -> checkpoint.SavedModelConfig:
    """The dense twin's model.json, against which the checkpoint is checked. Raises InputError if there is none."""
    problems = list(upcycling_problems(config))
    if problems:
        raise InputError(f"train.upcycle: {folder} cannot become this model: {'; '.join(problems)}")
    twin = checkpoint.SavedModelConfig(saved_config)
    twin["model"] = dense_twin(config).model_dump(mode="json")
    return twin


# The teacher: a second, frozen model on the mesh, whose hidden states are a field of the batch. Distillation learns
# from it (Mixture-of-Students, arXiv 2201.05596, section 4.4); it is DPO's reference model.


class Teacher:
    """Computes the teacher's final hidden states of a batch, until `until_tokens` of training."""

    def __init__(self, forward_backward: ForwardBackward, until_tokens: float):
        self.forward_backward, self.until_tokens = forward_backward, until_tokens

    def outputs(self, batch: Batch, tokens: int) -> dict[str, Tensor]:
        """{"teacher": float[b, R, T, D]}, R rows of a sample, where the student's head is; {} on other stages and after
        `until_tokens`."""
        if tokens >= self.until_tokens:
            return {}
        inputs = {name: batch[name] for name in ("tokens", *INPUT_FIELDS, HOST_DOCUMENTS) if name in batch}
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
    yield from validation_errors(model, teacher_config(train, model), there["vocab_size"], layout.world_size)


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

"""Upcycling: a dense checkpoint initialises a mixture of experts (arXiv 2212.05055).

Each expert begins as a copy of its layer's MLP, so that at step 0 the mixture computes what the dense model does: gates
that sum to 1 weigh equal results."""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

from gristmill.foundation.errors import InputError
from gristmill.training import checkpoint
from gristmill.training.engine.local_model import LocalModel
from gristmill.training.model_config import ModelConfig
from gristmill.training.parallel.local import local, local_shard
from gristmill.training.parallel.mesh import Mesh

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
    widths = {layer.expert_hidden for layer in config.layer_list if layer.experts}
    if widths != {config.hidden_width(layer.mlp) for layer in config.layer_list if layer.experts}:
        yield f"experts {sorted(widths)} wide cannot hold the MLP; leave moe.hidden out"


def dense_twin(config: ModelConfig) -> ModelConfig:
    """The dense model whose checkpoint initialises this one."""
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

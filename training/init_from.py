"""Initialises a run from the weights of a checkpoint: step 0, a new optimizer, the same architecture."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from gristmill.foundation.errors import InputError
from gristmill.training import checkpoint
from gristmill.training.engine.local_model import LocalModel
from gristmill.training.model_config import ModelConfig
from gristmill.training.moe_config import MoeConfig
from gristmill.training.parallel.mesh import Mesh

MAY_DIFFER = {"dropout", "init_std", "initialisation", "mup_base_width", "outputs"}


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
    weights = {name: each for name, each in model.weights.items() if not name.startswith(tuple(fresh))}
    checkpoint.load(folder, checkpoint.saved_tensors(weights, model.buffers), mesh)
    model.release_pages()
    model.update_copies()
    return new


def architecture(model: Mapping[str, Any]) -> dict[str, Any]:
    """The fields that must be equal for weights to fit, with derived defaults written out. Dropout
    and initialisation may differ, so may the sequence length unless learned positions depend on it, and the outputs;
    rotary base and scaling where a run has longer samples than the checkpoint."""
    config = ModelConfig.model_validate(model)
    found = config.model_dump(mode="json", exclude=MAY_DIFFER)
    if config.positions != "learned":
        del found["sequence_length"]
    mixers = {name: config.mixer_named(name) for name in config.stateful_mixers}
    found["mixers"] = {name: mixer.model_dump(exclude=set(mixer.not_of_weights)) for name, mixer in mixers.items()}
    del found["pattern"]
    found["rope_layers"] = [layer.rope for layer in config.layer_list]
    for name in ("mixer", "mlp", "window", "norm_order"):
        found[name] = [getattr(layer, name) for layer in config.layer_list]
    found |= {"kv_heads": config.num_kv_heads, "head_width": config.head_dim}
    for name in ("hidden", "experts", "top_k", "expert_hidden"):
        found[name] = [getattr(layer, name) for layer in config.layer_list]
    found |= _mixture(found.pop("moe", None) and config.moe)
    found["mup"] = config.mup_base_width / config.width if config.initialisation == "mup" else None
    return found


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

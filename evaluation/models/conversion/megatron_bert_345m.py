"""Reads the checkpoints that NVIDIA published as megatron-bert-345m, cased and uncased.

The file is release/mp_rank_00/model_optim_rng.pt, alone or in the .zip it came in. It is a pickle: torch's restricted
unpickler reads tensors and the run's arguments (an argparse.Namespace) from it and refuses everything else. The rows of
queries, keys and values lie in one matrix, ordered by checkpoint_version: below 1.0 as [3][head][row], 1.0 as
[head][row][3], from 2.0 on as [head][3][row] (transformers' convert_megatron_bert_checkpoint.py, release 4)."""

import argparse
import io
import pickle
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from gristmill.evaluation.models.conversion.bert import REARRANGED
from gristmill.foundation.errors import InputError
from gristmill.training.model_config import ModelConfig

WEIGHTS_NAME = "model_optim_rng.pt"
ZIPPED_NAME = "release/mp_rank_00/model_optim_rng.pt"
HEAD_WIDTH = 64  # where the file does not hold the run's arguments
NORM_EPSILON = 1e-5  # Megatron-LM's default

LAYER_NAMES = {
    "input_layernorm": "mixer_norm",
    "attention.dense": "mixer.output",
    "post_attention_layernorm": "mlp_norm",
    "mlp.dense_h_to_4h": "mlp.up",
    "mlp.dense_4h_to_h": "mlp.down",
}


def megatron_bert_file(folder: Path) -> Path | None:
    """The .pt or .zip of a folder, None if it has neither."""
    candidates = [folder / WEIGHTS_NAME, folder / ZIPPED_NAME, *sorted(folder.glob("*.zip"))]
    return next((path for path in candidates if path.is_file()), None)


def read_megatron_bert(path: Path) -> tuple[ModelConfig, int, dict[str, Tensor]]:
    """(config, vocabulary with its padding, tensors by our names). Raises InputError naming what is wrong."""
    content = _load(path)
    try:
        model, version = content["model"], float(content.get("checkpoint_version", 0.0))
        language = model["language_model"]
        layers = language.get("transformer") or language["encoder"]
        embedding = language["embedding"]
        words, positions = (embedding[name]["weight"] for name in ("word_embeddings", "position_embeddings"))
        segments = embedding["tokentype_embeddings"]["weight"]
        config = _config(content.get("args"), layers, words, positions, segments)
        tensors = {"embedding.weight": words, "positions.weight": positions, "segments.weight": segments}
        tensors |= _layer_tensors(layers, config, version) | _head_tensors(model, language)
    except (KeyError, TypeError, AttributeError, ValueError) as error:
        raise InputError(
            f"{path}: not a megatron-bert checkpoint ({type(error).__name__}: {error}); fetch the file again"
        ) from error
    return config, len(words), {name: value.float().contiguous() for name, value in tensors.items()}


def _load(path: Path) -> dict[str, Any]:
    try:
        file: Any = path
        if path.suffix == ".zip":
            with zipfile.ZipFile(path) as archive:
                file = io.BytesIO(archive.read(ZIPPED_NAME))
        with torch.serialization.safe_globals([argparse.Namespace]):
            content = torch.load(file, map_location="cpu", weights_only=True)
    except (OSError, KeyError, EOFError, RuntimeError, pickle.UnpicklingError, zipfile.BadZipFile) as error:
        first_line = str(error).split("\n", 1)[0]
        raise InputError(f"{path}: cannot be read as {WEIGHTS_NAME} ({first_line}); fetch the file again") from error
    if not isinstance(content, dict):
        raise InputError(f"{path}: holds {type(content).__name__}, not a checkpoint; fetch the file again")
    return content


def _config(
    arguments: Any, layers: Mapping[str, Tensor], words: Tensor, positions: Tensor, segments: Tensor
) -> ModelConfig:
    numbers = {int(name.split(".")[1]) for name in layers if name.startswith("layers.")}
    return ModelConfig(
        layers=len(numbers),
        width=words.shape[1],
        heads=getattr(arguments, "num_attention_heads", words.shape[1] // HEAD_WIDTH),
        hidden=len(layers["layers.0.mlp.dense_h_to_4h.weight"]),
        sequence_length=len(positions),
        segments=len(segments),
        norm_epsilon=getattr(arguments, "layernorm_epsilon", NORM_EPSILON),
        gelu="tanh" if getattr(arguments, "bias_gelu_fusion", True) else "exact",
        **REARRANGED,
    )


def _layer_tensors(layers: Mapping[str, Tensor], config: ModelConfig, version: float) -> dict[str, Tensor]:
    found = {f"final_norm.{leaf}": layers[f"final_layernorm.{leaf}"] for leaf in ("weight", "bias")}
    for number in range(config.layers):
        for leaf in ("weight", "bias"):
            for theirs, ours in LAYER_NAMES.items():
                found[f"layers.{number}.{ours}.{leaf}"] = layers[f"layers.{number}.{theirs}.{leaf}"]
            packed = layers[f"layers.{number}.attention.query_key_value.{leaf}"]
            for name, part in zip(("query", "key", "value"), unpacked(packed, config, version), strict=True):
                found[f"layers.{number}.mixer.{name}.{leaf}"] = part
    return found


def unpacked(packed: Tensor, config: ModelConfig, version: float) -> list[Tensor]:
    """Queries, keys and values of a packed weight [3 x heads x width of a head, D] or bias."""
    heads, width = config.heads, config.head_dim
    if version < 1.0:
        parts = packed.unflatten(0, (3, heads, width)).unbind(0)
    elif version < 2.0:
        parts = packed.unflatten(0, (heads, width, 3)).unbind(2)
    else:
        parts = packed.unflatten(0, (heads, 3, width)).unbind(1)
    return [part.flatten(0, 1) for part in parts]


def _head_tensors(model: Mapping[str, Any], language: Mapping[str, Any]) -> dict[str, Tensor]:
    pooler, head, order = language["pooler"], model["lm_head"], model["binary_head"]
    found = {"head.bias": head["bias"]}
    for leaf in ("weight", "bias"):
        found[f"outputs.pooler.{leaf}"] = pooler[f"dense.{leaf}"]
        found[f"head.transform.{leaf}"] = head[f"dense.{leaf}"]
        found[f"head.transform.norm.{leaf}"] = head[f"layernorm.{leaf}"]
        found[f"outputs.linear.sentence_order.{leaf}"] = order[leaf]
    return found

"""Reads the checkpoints of Megatron-LM's first versions: NVIDIA's megatron-gpt2-345m and megatron-bert-345m (cased and
uncased), and others of that form on any number of tensor ranks.

The file of rank 0 is release/mp_rank_00/model_optim_rng.pt, alone or in the .zip it came in. It is a pickle, of which
tensors and the run's arguments are read and all else is refused. The rows of queries, keys and values lie in one
matrix, ordered by checkpoint_version: below 1.0 as [3][head][row], 1.0 as [head][row][3], from 2.0 on as
[head][3][row] (transformers' convert_megatron_bert_checkpoint.py and convert_megatron_gpt2_checkpoint.py, release
4)."""

import zipfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import ValidationError
from torch import Tensor, cat

from gristmill.evaluation.models.conversion import gpt2
from gristmill.evaluation.models.conversion.bert import REARRANGED
from gristmill.evaluation.models.conversion.megatron_shards import joined, mean
from gristmill.foundation.errors import InputError
from gristmill.training.model_config import ModelConfig
from gristmill.training.restricted_pickle import load_restricted

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


@dataclass(frozen=True)
class Megatron345m:
    """name: of the kind. vocab_size: with padding. tensors: by our names."""

    name: str
    config: ModelConfig
    vocab_size: int
    tensors: dict[str, Tensor]


def megatron_files(folder: Path) -> list[Path]:
    """The .pt of each tensor rank, or the .zip of a folder; none if it has neither."""
    if (folder / WEIGHTS_NAME).is_file():
        return [folder / WEIGHTS_NAME]
    for place in (folder / "release", folder):
        if found := sorted(place.glob(f"mp_rank_[0-9][0-9]/{WEIGHTS_NAME}")):
            return found
    return sorted(folder.glob("*.zip"))[:1]


def read_megatron_345m(paths: Sequence[Path]) -> Megatron345m:
    """paths: of the tensor ranks, in order. Raises InputError naming what is wrong."""
    contents = [_load(path) for path in paths]
    try:
        model, version = contents[0]["model"], float(contents[0].get("checkpoint_version", 0.0))
        languages = [content["model"]["language_model"] for content in contents]
        is_bert = "pooler" in languages[0]
        if is_bert and len(paths) > 1:
            raise InputError(f"{paths[0]}: BERT on {len(paths)} tensor ranks; gristmill reads it on one")
        layers = [_layers_of(language) for language in languages]
        tensors = _tables(languages, is_bert)
        sizes = {name: len(tensors[name]) for name in tensors}
        config = _config(contents[0].get("args"), layers[0], tensors, len(paths))
        tensors |= _layer_tensors(layers, config, version) | (_head_tensors(model, languages[0]) if is_bert else {})
    except (KeyError, TypeError, AttributeError, ValueError, RuntimeError, ArithmeticError) as error:
        if isinstance(error, ValidationError):
            error = ValueError(error.errors()[0]["msg"])
        raise InputError(
            f"{paths[0]}: not a megatron-gpt2 or megatron-bert checkpoint ({type(error).__name__}: {error}); fetch the "
            "file again"
        ) from error
    tensors = {name: value.float().contiguous() for name, value in tensors.items()}
    return Megatron345m("megatron-bert" if is_bert else "megatron-gpt2", config, sizes["embedding.weight"], tensors)


def _load(path: Path) -> dict[str, Any]:
    if path.suffix != ".zip":
        return load_restricted(path)
    try:
        with zipfile.ZipFile(path) as archive:
            content = archive.read(ZIPPED_NAME)
    except (OSError, KeyError, zipfile.BadZipFile) as error:
        raise InputError(f"{path}: cannot be read as {WEIGHTS_NAME} ({error}); fetch the file again") from error
    return load_restricted(path, content)


def _layers_of(language: Mapping[str, Any]) -> dict[str, Tensor]:
    """Later versions call the transformer encoder, and attention self_attention."""
    layers = language.get("transformer") or language["encoder"]
    return {name.replace(".self_attention.", ".attention."): value for name, value in layers.items()}


def _tables(languages: Sequence[Mapping[str, Any]], is_bert: bool) -> dict[str, Tensor]:
    embeddings = [language["embedding"] for language in languages]
    words = [embedding["word_embeddings"]["weight"] for embedding in embeddings]
    found = {
        "embedding.weight": joined("word_embeddings.weight", words),
        "positions.weight": mean([embedding["position_embeddings"]["weight"] for embedding in embeddings]),
    }
    if is_bert:
        found["segments.weight"] = embeddings[0]["tokentype_embeddings"]["weight"]
    return found


def _config(
    arguments: Any, layers: Mapping[str, Tensor], tables: Mapping[str, Tensor], tensor_ranks: int
) -> ModelConfig:
    """arguments: of the run, None where the file does not hold them."""
    numbers = {int(name.split(".")[1]) for name in layers if name.startswith("layers.")}
    width = tables["embedding.weight"].shape[1]
    fused = getattr(arguments, "bias_gelu_fusion", True) or getattr(arguments, "openai_gelu", False)
    own: dict[str, Any] = {**gpt2.CONSTANTS, "tied_embeddings": True}
    if "segments.weight" in tables:
        own = {**REARRANGED, "segments": len(tables["segments.weight"])}
    return ModelConfig(
        layers=len(numbers),
        width=width,
        heads=getattr(arguments, "num_attention_heads", width // HEAD_WIDTH),
        hidden=len(layers["layers.0.mlp.dense_h_to_4h.weight"]) * tensor_ranks,
        sequence_length=len(tables["positions.weight"]),
        norm_epsilon=getattr(arguments, "layernorm_epsilon", NORM_EPSILON),
        gelu="tanh" if fused else "exact",
        **own,
    )


def _layer_tensors(ranks: Sequence[Mapping[str, Tensor]], config: ModelConfig, version: float) -> dict[str, Tensor]:
    """ranks: the layers of each tensor rank, which has its share of the heads."""
    found = {}
    for leaf in ("weight", "bias"):
        found[f"final_norm.{leaf}"] = mean([layers[f"final_layernorm.{leaf}"] for layers in ranks])
        for number in range(config.layers):
            for theirs, ours in LAYER_NAMES.items():
                name = f"layers.{number}.{theirs}.{leaf}"
                found[f"layers.{number}.{ours}.{leaf}"] = joined(name, [layers[name] for layers in ranks])
            packed = [layers[f"layers.{number}.attention.query_key_value.{leaf}"] for layers in ranks]
            heads = config.heads // len(ranks)
            parts = zip(*(unpacked(each, heads, config.head_dim, version) for each in packed), strict=True)
            for name, shares in zip(("query", "key", "value"), parts, strict=True):
                found[f"layers.{number}.mixer.{name}.{leaf}"] = cat(shares)
    return found


def unpacked(packed: Tensor, heads: int, width: int, version: float) -> list[Tensor]:
    """Queries, keys and values of a packed weight [3 x heads x width of a head, D] or bias."""
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

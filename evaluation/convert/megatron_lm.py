"""Reads the checkpoints of Megatron-LM's first versions: NVIDIA's megatron-gpt2-345m and megatron-bert-345m (cased and
uncased), and others of that form on any number of tensor ranks.

The file of rank 0 is release/mp_rank_00/model_optim_rng.pt, alone or in the .zip it came in. It is a pickle, of which
tensors and the run's arguments are read and all else is refused. The rows of queries, keys and values lie in one
matrix, ordered by checkpoint_version: below 1.0 as [3][head][row], 1.0 as [head][row][3], from 2.0 on as
[head][3][row] (transformers' convert_megatron_bert_checkpoint.py and convert_megatron_gpt2_checkpoint.py, release
4)."""

import re
import zipfile
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from pydantic import ValidationError
from torch import Tensor, cat

from gristmill.evaluation.convert.hf import gpt
from gristmill.evaluation.convert.hf.bert import REARRANGED
from gristmill.evaluation.convert.hf.opt_bloom_falcon import BLOOM, BLOOM_CONSTANTS
from gristmill.evaluation.convert.safetensors_folder import WeightSource, converted_source
from gristmill.foundation.errors import InputError
from gristmill.training.checkpoint.restricted_pickle import load_restricted
from gristmill.training.config.model import ModelConfig

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
        if files := sorted(place.glob(f"mp_rank_[0-9][0-9]/{WEIGHTS_NAME}")):
            return files
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
    except (OSError, KeyError, RuntimeError, zipfile.BadZipFile, zlib.error) as error:  # RuntimeError: encrypted
        raise InputError(f"{path}: cannot be read as {WEIGHTS_NAME} ({error}); fetch the file again") from error
    return load_restricted(path, content)


def _layers_of(language: Mapping[str, Any]) -> dict[str, Tensor]:
    """Later versions call the transformer encoder, and attention self_attention."""
    layers = language.get("transformer") or language["encoder"]
    return {name.replace(".self_attention.", ".attention."): value for name, value in layers.items()}


def _tables(languages: Sequence[Mapping[str, Any]], is_bert: bool) -> dict[str, Tensor]:
    embeddings = [language["embedding"] for language in languages]
    words = [embedding["word_embeddings"]["weight"] for embedding in embeddings]
    tables = {
        "embedding.weight": joined("word_embeddings.weight", words),
        "positions.weight": mean([embedding["position_embeddings"]["weight"] for embedding in embeddings]),
    }
    if is_bert:
        tables["segments.weight"] = embeddings[0]["tokentype_embeddings"]["weight"]
    return tables


def _config(
    arguments: Any, layers: Mapping[str, Tensor], tables: Mapping[str, Tensor], tensor_ranks: int
) -> ModelConfig:
    """arguments: of the run, None where the file does not hold them."""
    numbers = {int(name.split(".")[1]) for name in layers if name.startswith("layers.")}
    width = tables["embedding.weight"].shape[1]
    fused = getattr(arguments, "bias_gelu_fusion", True) or getattr(arguments, "openai_gelu", False)
    own: dict[str, Any] = {**gpt.CONSTANTS, "tied_embeddings": True}
    if "segments.weight" in tables:
        own = {**REARRANGED, "segments": len(tables["segments.weight"])}
    return ModelConfig(
        layers=len(numbers),
        width=width,
        heads=getattr(arguments, "num_attention_heads", width // HEAD_WIDTH),
        ffn_hidden_size=len(layers["layers.0.mlp.dense_h_to_4h.weight"]) * tensor_ranks,
        sequence_length=len(tables["positions.weight"]),
        norm_epsilon=getattr(arguments, "layernorm_epsilon", NORM_EPSILON),
        gelu="tanh" if fused else "exact",
        **own,
    )


def _layer_tensors(ranks: Sequence[Mapping[str, Tensor]], config: ModelConfig, version: float) -> dict[str, Tensor]:
    """ranks: the layers of each tensor rank, which has its share of the heads."""
    tensors = {}
    for leaf in ("weight", "bias"):
        tensors[f"final_norm.{leaf}"] = mean([layers[f"final_layernorm.{leaf}"] for layers in ranks])
        for number in range(config.layers):
            for hf_name, ours in LAYER_NAMES.items():
                name = f"layers.{number}.{hf_name}.{leaf}"
                tensors[f"layers.{number}.{ours}.{leaf}"] = joined(name, [layers[name] for layers in ranks])
            packed = [layers[f"layers.{number}.attention.query_key_value.{leaf}"] for layers in ranks]
            heads = config.heads // len(ranks)
            parts = zip(*(unpacked(tensor, heads, config.head_dim, version) for tensor in packed), strict=True)
            for name, shares in zip(("query", "key", "value"), parts, strict=True):
                tensors[f"layers.{number}.mixer.{name}.{leaf}"] = cat(shares)
    return tensors


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
    tensors = {"head.bias": head["bias"]}
    for leaf in ("weight", "bias"):
        tensors[f"outputs.pooler.{leaf}"] = pooler[f"dense.{leaf}"]
        tensors[f"head.transform.{leaf}"] = head[f"dense.{leaf}"]
        tensors[f"head.transform.norm.{leaf}"] = head[f"layernorm.{leaf}"]
        tensors[f"outputs.linear.sentence_order.{leaf}"] = order[leaf]
    return tensors


# BLOOM as Megatron-DeepSpeed saves it: layer_XX-model_YY-model_states.pt of layer file XX and tensor rank YY.
#
# File 01 holds the embedding and its norm, the layers begin with file 03, and the file behind them holds the last
# norm (transformers' convert_bloom_original_checkpoint_to_pytorch.py). Joined, the tensors are those of
# BloomForCausalLM.

FILE_NAME = re.compile(r"layer_(\d+)-model_(\d+)-model_states\.pt")
ARGUMENTS_NAME = "mp_rank_00_model_states.pt"
FIRST_LAYER = 3  # number of the file with layer 0
TOP_NAMES = {
    "word_embeddings.weight": "transformer.word_embeddings.weight",
    "word_embeddings.norm.weight": "transformer.word_embeddings_layernorm.weight",
    "word_embeddings.norm.bias": "transformer.word_embeddings_layernorm.bias",
    "weight": "transformer.ln_f.weight",
    "bias": "transformer.ln_f.bias",
}


class LayerFiles(Mapping[str, Tensor]):
    """Tensors by the names of transformers, joined over the tensor ranks. The files of one layer are open at a time."""

    def __init__(self, folder: Path):
        self._ranks = _files(folder)
        self.files = tuple(path for ranks in self._ranks.values() for path in ranks)
        self._open: tuple[int, list[dict[str, Any]]] | None = None
        self._place: dict[str, tuple[int, str]] = {}
        self.meta: dict[str, Tensor] = {}
        for number in self._ranks:
            for hf_name in self._content(number)[0]:
                name = TOP_NAMES.get(hf_name, f"transformer.h.{number - FIRST_LAYER}.{hf_name}")
                if name in self._place:
                    raise InputError(f"{folder}: {name} is in two files, {self._place[name][0]} and {number}")
                self._place[name] = (number, hf_name)
                self.meta[name] = self[name].to("meta")

    def __getitem__(self, name: str) -> Tensor:
        number, hf_name = self._place[name]
        parts = []
        for path, content in zip(self._ranks[number], self._content(number), strict=True):
            if hf_name not in content:
                raise InputError(f"{path}: lacks {hf_name}, which {self._ranks[number][0].name} has; fetch it again")
            parts.append(content[hf_name])
        return joined(hf_name, parts)

    def __iter__(self) -> Iterator[str]:
        return iter(self._place)

    def __len__(self) -> int:
        return len(self._place)

    def _content(self, number: int) -> list[dict[str, Any]]:
        if self._open is None or self._open[0] != number:
            contents = [load_restricted(path) for path in self._ranks[number]]
            for path, content in zip(self._ranks[number], contents, strict=True):
                wrong = [name for name, value in content.items() if not isinstance(value, Tensor)]
                if wrong:
                    raise InputError(f"{path}: {wrong[0]} is no tensor; fetch the file again")
            self._open = (number, contents)
        return self._open[1]


def is_megatron_deepspeed(folder: Path) -> bool:
    return folder.is_dir() and any(FILE_NAME.fullmatch(path.name) for path in folder.iterdir())


def open_megatron_deepspeed(folder: Path) -> WeightSource:
    """Raises InputError naming what is absent, damaged or does not fit."""
    arguments_file = folder / ARGUMENTS_NAME
    if not arguments_file.is_file():
        raise InputError(f"{arguments_file}: absent; it says how many heads the model has: fetch it too")
    arguments = load_restricted(arguments_file).get("args")
    weights = LayerFiles(folder)
    table = weights.meta.get("transformer.word_embeddings.weight")
    if arguments is None or table is None:
        missing = f"{arguments_file} has no args" if arguments is None else f"{folder}: no file has word_embeddings"
        raise InputError(f"{missing}; fetch the files again")
    config = _deepspeed_config(arguments_file, arguments)
    return converted_source(folder, BLOOM, config, (len(table), 0), (weights, weights.meta, weights.files))


def _deepspeed_config(place: Path, arguments: Any) -> ModelConfig:
    try:
        return ModelConfig(
            **BLOOM_CONSTANTS,
            layers=arguments.num_layers,
            width=arguments.hidden_size,
            heads=arguments.num_attention_heads,
            ffn_hidden_size=4 * arguments.hidden_size,
            sequence_length=arguments.seq_length,
            norm_epsilon=getattr(arguments, "layernorm_epsilon", 1e-5),
            tied_embeddings=True,
        )
    except (AttributeError, TypeError, ValueError) as error:
        line = str(error).replace("\n", " ")
        raise InputError(f"{place}: args do not describe a model ({line}); fetch the file again") from error


def _files(folder: Path) -> dict[int, list[Path]]:
    """The files of each layer file number, by tensor rank. Raises InputError where one is absent."""
    files_by_layer: dict[int, dict[int, Path]] = {}
    for path in sorted(folder.iterdir()):
        if match := FILE_NAME.fullmatch(path.name):
            files_by_layer.setdefault(int(match[1]), {})[int(match[2])] = path
    ranks = 1 + max(rank for files in files_by_layer.values() for rank in files)
    for number, files in files_by_layer.items():
        for rank in range(ranks):
            if rank not in files:
                name = f"layer_{number:02d}-model_{rank:02d}-model_states.pt"
                raise InputError(f"{folder / name}: absent, and other layers have {ranks} tensor ranks; fetch it")
    return {number: [files_by_layer[number][rank] for rank in range(ranks)] for number in sorted(files_by_layer)}


# Joins the tensor-parallel shards of Megatron checkpoints: row-parallel weights along their inputs, column-parallel
# ones and tables along their rows, and what every rank holds by its mean (transformers' converter of BLOOM does so).

ROW_PARALLEL = ("dense.weight", "dense_4h_to_h.weight")
COLUMN_PARALLEL = (
    "query_key_value.weight",
    "query_key_value.bias",
    "dense_h_to_4h.weight",
    "dense_h_to_4h.bias",
    "word_embeddings.weight",
)


def joined(name: str, shards: Sequence[Tensor]) -> Tensor:
    """The whole parameter. Raises InputError where the shards do not fit together."""
    if len(shards) == 1:
        return shards[0]
    try:
        if name.endswith(ROW_PARALLEL):
            return torch.cat(list(shards), dim=1)
        if name.endswith(COLUMN_PARALLEL):
            return torch.cat(list(shards))
        return mean(shards)
    except RuntimeError as error:
        raise InputError(f"{name}: the shards of the tensor ranks do not fit ({error}); fetch them again") from error


def mean(copies: Sequence[Tensor]) -> Tensor:
    """The mean of what tensor ranks hold in common; of equal copies, themselves."""
    if all(torch.equal(copies[0], copy) for copy in copies[1:]):
        return copies[0]
    return torch.stack([copy.double() for copy in copies]).mean(dim=0).to(copies[0].dtype)

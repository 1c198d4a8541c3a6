"""BLOOM as Megatron-DeepSpeed saves it: layer_XX-model_YY-model_states.pt of layer file XX and tensor rank YY.

File 01 holds the embedding and its norm, the layers begin with file 03, and the file behind them holds the last norm
(transformers' convert_bloom_original_checkpoint_to_pytorch.py). Joined, the tensors are those of BloomForCausalLM."""

import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from gristmill.evaluation.models.conversion.bloom import BLOOM, CONSTANTS
from gristmill.evaluation.models.conversion.megatron_shards import joined
from gristmill.evaluation.models.weight_source import WeightSource, converted_source
from gristmill.foundation.errors import InputError
from gristmill.training.model_config import ModelConfig
from gristmill.training.restricted_pickle import load_restricted

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
            for theirs in self._content(number)[0]:
                name = TOP_NAMES.get(theirs, f"transformer.h.{number - FIRST_LAYER}.{theirs}")
                if name in self._place:
                    raise InputError(f"{folder}: {name} is in two files, {self._place[name][0]} and {number}")
                self._place[name] = (number, theirs)
                self.meta[name] = self[name].to("meta")

    def __getitem__(self, name: str) -> Tensor:
        number, theirs = self._place[name]
        found = []
        for path, content in zip(self._ranks[number], self._content(number), strict=True):
            if theirs not in content:
                raise InputError(f"{path}: lacks {theirs}, which {self._ranks[number][0].name} has; fetch it again")
            found.append(content[theirs])
        return joined(theirs, found)

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
    config = _config(arguments_file, arguments)
    return converted_source(folder, BLOOM, config, (len(table), 0), (weights, weights.meta, weights.files))


def _config(place: Path, arguments: Any) -> ModelConfig:
    try:
        return ModelConfig(
            **CONSTANTS,
            layers=arguments.num_layers,
            width=arguments.hidden_size,
            heads=arguments.num_attention_heads,
            hidden=4 * arguments.hidden_size,
            sequence_length=arguments.seq_length,
            norm_epsilon=getattr(arguments, "layernorm_epsilon", 1e-5),
            tied_embeddings=True,
        )
    except (AttributeError, TypeError, ValueError) as error:
        line = str(error).replace("\n", " ")
        raise InputError(f"{place}: args do not describe a model ({line}); fetch the file again") from error


def _files(folder: Path) -> dict[int, list[Path]]:
    """The files of each layer file number, by tensor rank. Raises InputError where one is absent."""
    found: dict[int, dict[int, Path]] = {}
    for path in sorted(folder.iterdir()):
        if match := FILE_NAME.fullmatch(path.name):
            found.setdefault(int(match[1]), {})[int(match[2])] = path
    ranks = 1 + max(rank for files in found.values() for rank in files)
    for number, files in found.items():
        for rank in range(ranks):
            if rank not in files:
                name = f"layer_{number:02d}-model_{rank:02d}-model_states.pt"
                raise InputError(f"{folder / name}: absent, and other layers have {ranks} tensor ranks; fetch it")
    return {number: [found[number][rank] for rank in range(ranks)] for number in sorted(found)}

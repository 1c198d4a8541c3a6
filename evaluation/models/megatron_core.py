"""Distributed checkpoints of Megatron-Core (format torch_dist): .metadata, common.pt and .distcp files of a folder like
iter_0000010.

.metadata and common.pt are pickles, of which only listed classes are read. Tensors are global: layers are stacked in
one tensor, of which a layer is read at a time, or named one by one; the shards of tensor ranks are its chunks."""

import json
from collections.abc import Iterator, Mapping
from pathlib import Path

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import MetadataIndex, TensorStorageMetadata

from gristmill.evaluation.models.conversion.megatron_core import GPT_MODEL, config_of
from gristmill.evaluation.models.weight_source import WeightSource, converted_source
from gristmill.foundation.errors import InputError
from gristmill.training.restricted_pickle import load_restricted, read_metadata_pickle

METADATA_NAME, COMMON_NAME, FORMAT_NAME = ".metadata", "common.pt", "metadata.json"
LATEST_NAME = "latest_checkpointed_iteration.txt"
FORMAT = "torch_dist"
MODEL_KEYS = ("embedding.", "decoder.", "output_layer.")
LAYERS = "decoder.layers."
# Transformer Engine keeps a norm in the linear layer behind it.
FUSED_NORMS = {
    ".self_attention.linear_qkv.layer_norm_": ".input_layernorm.",
    ".mlp.linear_fc1.layer_norm_": ".pre_mlp_layernorm.",
}


class DistributedFolder(Mapping[str, Tensor]):
    """Tensors by name, decoder.layers.N for each layer. A tensor is read from its chunks when it is asked for."""

    def __init__(self, folder: Path):
        self.folder = folder
        self.metadata = read_metadata_pickle(folder / METADATA_NAME)
        self._place: dict[str, tuple[str, int | None]] = {}  # key, layer of a stacked tensor
        self.meta: dict[str, Tensor] = {}
        for key, stated in self.metadata.state_dict_metadata.items():
            if not key.startswith(MODEL_KEYS) or not isinstance(stated, TensorStorageMetadata):
                continue
            stacked = key.startswith(LAYERS) and not key.removeprefix(LAYERS).split(".")[0].isdigit()
            for layer in range(stated.size[0]) if stacked else (None,):
                shape = stated.size if layer is None else stated.size[1:]
                name = _plain_name(key if layer is None else f"{LAYERS}{layer}.{key.removeprefix(LAYERS)}")
                self._place[name] = (key, layer)
                self.meta[name] = torch.empty(shape, dtype=stated.properties.dtype, device="meta")
        self.files = tuple(sorted({folder / each.relative_path for each in self.metadata.storage_data.values()}))
        for path in self.files:
            if path.parent != folder or not path.is_file():
                raise InputError(f"{path}: absent, but {METADATA_NAME} names it; fetch the file")

    def __getitem__(self, name: str) -> Tensor:
        key, layer = self._place[name]
        found, filled = torch.empty_like(self.meta[name], device="cpu"), 0
        chunks = self.metadata.state_dict_metadata[key].chunks
        for index, chunk in enumerate(chunks):
            offsets, sizes = tuple(chunk.offsets), tuple(chunk.sizes)
            if layer is not None and not offsets[0] <= layer < offsets[0] + sizes[0]:
                continue
            part = self._chunk(key, offsets, index)
            if layer is not None:
                part, offsets, sizes = part[layer - offsets[0]], offsets[1:], sizes[1:]
            target = found[tuple(slice(start, start + size) for start, size in zip(offsets, sizes, strict=True))]
            target.copy_(part)
            filled += part.numel()
        if filled != found.numel():
            raise InputError(f"{self.folder}: the chunks of {key} do not fill it; fetch the folder again")
        return found

    def _chunk(self, key: str, offsets: tuple[int, ...], index: int) -> Tensor:
        stored = self.metadata.storage_data
        place = stored.get(MetadataIndex(key, torch.Size(offsets), index)) or stored.get(
            MetadataIndex(key, torch.Size(offsets))
        )
        if place is None or getattr(place, "transform_descriptors", None):
            raise InputError(f"{self.folder}: no plain chunk of {key} at {list(offsets)}; fetch the folder again")
        path = self.folder / place.relative_path
        with path.open("rb") as file:
            file.seek(place.offset)
            content = file.read(place.length)
        found = load_restricted(path, content, kind=Tensor)
        return found

    def __iter__(self) -> Iterator[str]:
        return iter(self._place)

    def __len__(self) -> int:
        return len(self._place)


def _plain_name(name: str) -> str:
    for fused, plain in FUSED_NORMS.items():
        name = name.replace(fused, plain)
    return name


def _iteration(folder: Path) -> Path:
    """The folder of the last iteration, where `folder` holds several."""
    try:
        latest = (folder / LATEST_NAME).read_text().strip()
    except (OSError, ValueError):
        return folder
    return folder / (f"iter_{int(latest):07d}" if latest.isdecimal() else "release")


def is_megatron_core(folder: Path) -> bool:
    if not folder.is_dir():
        return False
    place = _iteration(folder)
    return (place / FORMAT_NAME).is_file() and (place / COMMON_NAME).is_file()


def open_megatron_core(folder: Path) -> WeightSource:
    """Raises InputError naming what is absent, unsupported or damaged."""
    place = _iteration(folder)
    try:
        stated = json.loads((place / FORMAT_NAME).read_bytes())
        kind = stated["sharded_backend"]
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise InputError(f"{place / FORMAT_NAME}: does not name the format ({error}); fetch the file again") from error
    if kind != FORMAT:
        raise InputError(f"{place / FORMAT_NAME}: sharded_backend is {kind!r}; gristmill reads {FORMAT!r}")
    common = load_restricted(place / COMMON_NAME)
    if common.get("args") is None:
        raise InputError(f"{place / COMMON_NAME}: has no args, which say how many heads the model has; fetch it again")
    config = config_of(place / COMMON_NAME, common["args"])
    weights = DistributedFolder(place)
    table = weights.meta.get("embedding.word_embeddings.weight")
    if table is None:
        raise InputError(f"{place}: no embedding.word_embeddings.weight; this is not a checkpoint of a GPTModel")
    return converted_source(place, GPT_MODEL, config, (len(table), 0), (weights, weights.meta, weights.files))

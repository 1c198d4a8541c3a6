"""Weights of a model in a foreign format, read tensor by tensor; those of a Hugging Face folder in safetensors: names,
shapes and types first, a tensor when it is asked for.

Pickled weights can run code and are not read."""

import json
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from gristmill.evaluation.convert.hf.architecture import NO_WEIGHTS, ModelFamily
from gristmill.foundation.errors import InputError
from gristmill.foundation.files import atomic_path, write_atomic
from gristmill.training.config.model import ModelConfig
from gristmill.training.model.moe.router import saved_buffers
from gristmill.training.model.transformer import Transformer

SHARD_BYTES = 5_000_000_000  # the default shard size of transformers
WEIGHTS_NAME = "model.safetensors"
INDEX_NAME = "model.safetensors.index.json"
DTYPES = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


class SafetensorsFolder(Mapping[str, Tensor]):
    """Tensors by name: of the files that the index names, else of `single`. Each access maps the file anew, so that
    pages of tensors that are no longer held are given back. Raises InputError if a file is absent or damaged, or files
    and index differ."""

    def __init__(self, folder: Path, single: str = WEIGHTS_NAME):
        names_by_file = _weight_files(folder, single)
        self.files = tuple(sorted(names_by_file))
        self._file_of: dict[str, Path] = {}
        self.meta: dict[str, Tensor] = {}  # of the same shapes and types, without values
        for path in self.files:
            header = dict(_header(path))
            for name, tensor in header.items():
                if name in self._file_of:
                    raise InputError(f"{path}: holds {name}, as {self._file_of[name].name} does; fetch the files again")
                self._file_of[name], self.meta[name] = path, tensor
            for name in sorted(names_by_file[path] - header.keys()):
                raise InputError(f"{path}: lacks {name}, which {INDEX_NAME} says it holds; fetch both again")

    def __getitem__(self, name: str) -> Tensor:
        path = self._file_of[name]
        try:
            with safe_open(path, "pt") as file:
                return file.get_tensor(name)
        except (SafetensorError, OSError) as error:
            raise InputError(f"{path}: {name} cannot be read ({error}); fetch the file again") from error

    def __iter__(self) -> Iterator[str]:
        return iter(self._file_of)

    def __len__(self) -> int:
        return len(self._file_of)


def _header(path: Path) -> Iterator[tuple[str, Tensor]]:
    """(name, tensor without values) of a file."""
    try:
        with safe_open(path, "pt") as file:
            slices = {name: file.get_slice(name) for name in file.keys()}  # noqa: SIM118 (no mapping)
            tensors = {name: (part.get_shape(), part.get_dtype()) for name, part in slices.items()}
    except (SafetensorError, OSError) as error:
        raise InputError(f"{path}: not readable as safetensors ({error}); fetch the file again") from error
    for name, (shape, dtype) in tensors.items():
        if dtype not in DTYPES and not name.endswith(NO_WEIGHTS):
            raise InputError(
                f"{path}: {name} has the type {dtype}; gristmill reads weights in {', '.join(DTYPES)}: turn quantized "
                "ones into one of these first"
            )
        yield name, torch.empty(shape, dtype=DTYPES.get(dtype, torch.uint8), device="meta")


def _weight_files(folder: Path, single: str) -> dict[Path, set[str]]:
    """The names that the index says each file holds; none where there is no index."""
    if (folder / INDEX_NAME).is_file():
        try:
            files: dict[Path, set[str]] = {}
            for name, file in json.loads((folder / INDEX_NAME).read_bytes())["weight_map"].items():
                files.setdefault(folder / Path(file).name, set()).add(name)
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise InputError(
                f"{folder / INDEX_NAME}: not a weight index ({type(error).__name__}: {error}); fetch the file again"
            ) from error
        for path in files:
            if not path.is_file():
                raise InputError(f"{path}: absent, but {INDEX_NAME} names it; fetch the file")
        return files
    if (folder / single).is_file():
        return {folder / single: set()}
    raise InputError(
        f"{folder}: neither {single} nor {INDEX_NAME}; pickled weights (.bin, .pt) can run code and are not "
        "read: turn them into safetensors where you trust them"
    )


def write_weights(folder: Path, tensors: Mapping[str, Tensor]) -> None:
    """Writes the files of the tensors, and an index if they are several; removes older ones."""
    shards = list(_shards(tensors))
    for stale in folder.glob("*.safetensors*"):
        stale.unlink()
    if len(shards) == 1:
        write_safetensors(folder / WEIGHTS_NAME, shards[0])
        return
    weight_map = {}
    for number, shard in enumerate(shards, start=1):
        name = f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        write_safetensors(folder / name, shard)
        weight_map.update(dict.fromkeys(shard, name))
    total = sum(tensor.nbytes for tensor in tensors.values())
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    write_atomic(folder / INDEX_NAME, json.dumps(index, indent=2, sort_keys=True).encode() + b"\n")


def write_safetensors(path: Path, tensors: Mapping[str, Tensor]) -> None:
    with atomic_path(path) as temporary:
        temporary.touch()
        mode = temporary.stat().st_mode  # as the umask says; safetensors lets only the owner read
        try:
            save_file(dict(tensors), temporary, metadata={"format": "pt"})
        except SafetensorError as error:  # for a full disk its text ends with "(os error 28)"
            if (number := re.search(r"os error (\d+)", str(error))) is None:
                raise
            code = int(number[1])
            raise OSError(code, os.strerror(code), str(path)) from error
        temporary.chmod(mode)


def _shards(tensors: Mapping[str, Tensor]) -> Iterable[dict[str, Tensor]]:
    shard: dict[str, Tensor] = {}
    size = 0
    for name, tensor in sorted(tensors.items()):
        if shard and size + tensor.nbytes > SHARD_BYTES:
            yield shard
            shard, size = {}, 0
        shard[name] = tensor
        size += tensor.nbytes
    yield shard


# A model in a foreign format: checked, and read tensor by tensor.


Stream = Iterator[tuple[str, Tensor]]


@dataclass(frozen=True)
class WeightSource:
    """architecture: of transformers, or the name of another format. end_of_document: as the source says it, 0 if it
    does not. files: those that hold weights. names: our names of all parameters and of buffers that are saved, in the
    order of the stream. stream: (our name, tensor) of each, read as it is asked for. dtypes: of parameters by our
    names, float32 where absent."""

    architecture: str
    config: ModelConfig
    vocab_size: int
    end_of_document: int
    files: tuple[Path, ...]
    names: tuple[str, ...]
    stream: Callable[[], Stream]
    dtypes: Mapping[str, torch.dtype] = field(default_factory=dict)


def check_shapes(place: Path, config: ModelConfig, vocab_size: int, tensors: Mapping[str, Tensor]) -> None:
    """Raises InputError unless the tensors, of which only shapes are read, are the parameters of the model."""
    model = Transformer(config, vocab_size)
    expected: dict[str, Tensor] = dict(model.named_parameters()) | saved_buffers(model)
    for name, tensor in tensors.items():
        if name not in expected or tensor.shape != expected[name].shape:
            wanted = f"expected {list(expected[name].shape)}" if name in expected else "which the config does not have"
            raise InputError(
                f"{place}: {name} is {list(tensor.shape)}, {wanted}; config and weights differ: fetch both again"
            )
    for name in sorted(expected.keys() - tensors.keys()):
        raise InputError(f"{place}: no weights of {name}, which the config has; fetch both again")


def converted_source(
    place: Path,
    family: ModelFamily,
    config: ModelConfig,
    sizes: tuple[int, int],
    weights: tuple[Mapping[str, Tensor], Mapping[str, Tensor], tuple[Path, ...]],
) -> WeightSource:
    """Tensors by the names of transformers, to be converted one after the other. sizes: vocabulary, end of document.
    weights: tensors, the same without values, files. Raises InputError where they are not those of the family."""
    tensors, meta, files = weights
    converted = family.from_hf(config, meta)
    check_shapes(place, config, sizes[0], converted)
    dtypes = {name: value.dtype for name, value in converted.items()}
    return WeightSource(
        family.architecture, config, *sizes, files, tuple(converted), lambda: family.converted(config, tensors), dtypes
    )

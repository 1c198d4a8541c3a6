"""The weights of a Hugging Face folder: names, shapes and types are read first, a tensor when it is asked for."""

import json
from collections.abc import Iterator, Mapping
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from gristmill.evaluation.models.conversion.family import NO_WEIGHTS
from gristmill.foundation.errors import InputError

WEIGHTS_NAME = "model.safetensors"
INDEX_NAME = "model.safetensors.index.json"
DTYPES = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


class SafetensorsFolder(Mapping[str, Tensor]):
    """Tensors by name. Each access maps the file anew, so that pages of tensors that are no longer held are given
    back. Raises InputError if a file is absent or damaged, or files and index differ."""

    def __init__(self, folder: Path):
        names_by_file = _weight_files(folder)
        self.files = tuple(sorted(names_by_file))
        self._file_of: dict[str, Path] = {}
        self.meta: dict[str, Tensor] = {}  # of the same shapes and types, without values
        for path in self.files:
            held = dict(_header(path))
            for name, tensor in held.items():
                if name in self._file_of:
                    raise InputError(f"{path}: holds {name}, as {self._file_of[name].name} does; fetch the files again")
                self._file_of[name], self.meta[name] = path, tensor
            for name in sorted(names_by_file[path] - held.keys()):
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
            found = {name: (part.get_shape(), part.get_dtype()) for name, part in slices.items()}
    except (SafetensorError, OSError) as error:
        raise InputError(f"{path}: not readable as safetensors ({error}); fetch the file again") from error
    for name, (shape, dtype) in found.items():
        if dtype not in DTYPES and not name.endswith(NO_WEIGHTS):
            raise InputError(
                f"{path}: {name} has the type {dtype}; gristmill reads weights in {', '.join(DTYPES)}: turn quantised "
                "ones into one of these first"
            )
        yield name, torch.empty(shape, dtype=DTYPES.get(dtype, torch.uint8), device="meta")


def _weight_files(folder: Path) -> dict[Path, set[str]]:
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
    if (folder / WEIGHTS_NAME).is_file():
        return {folder / WEIGHTS_NAME: set()}
    raise InputError(
        f"{folder}: neither {WEIGHTS_NAME} nor {INDEX_NAME}; pickled weights (.bin, .pt) can run code and are not "
        "read: turn them into safetensors where you trust them"
    )

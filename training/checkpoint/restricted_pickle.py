"""Reads files that torch.save and torch.distributed.checkpoint wrote, without running code of theirs: tensors,
containers, and the classes listed. torch itself unpickles .metadata and entries that are no tensors, without limits."""

import argparse
import io
import pickle
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta, TensorStorageMetadata

from gristmill.foundation.errors import InputError

# Enumerations among the arguments of a Megatron run. Their code is not here: the value in the file is kept.
ENUMERATIONS = (
    "megatron.enums.AttnMaskType",
    "megatron.enums.AttnType",
    "megatron.enums.LayerType",
    "megatron.enums.ModelType",
    "megatron.enums.PositionEmbeddingType",
    "megatron.model.enums.AttnMaskType",
    "megatron.model.enums.ModelType",
    "megatron.core.enums.ModelType",
    "megatron.core.transformer.enums.AttnBackend",
    "megatron.core.transformer.enums.AttnMaskType",
    "megatron.core.transformer.enums.ModelType",
)


class ForeignValue:
    """A value of a class that is not read, such as an enumeration of a run's arguments."""

    def __init__(self, *values: Any):
        self.values = values


ALLOWED: list[Any] = [argparse.Namespace, *((ForeignValue, name) for name in ENUMERATIONS)]


def load_restricted(path: Path, content: bytes | None = None, kind: type = dict) -> Any:
    """Object of that kind in a file. content: of the file or of a part of it. Raises InputError for anything that is
    not allowed or not readable."""
    try:
        with torch.serialization.safe_globals(ALLOWED):
            content_object = torch.load(
                path if content is None else io.BytesIO(content),
                map_location="cpu",
                weights_only=True,
                mmap=content is None and _is_zip(path),
            )
    except DAMAGED as error:
        raise InputError(f"{path}: cannot be read as {path.name} ({_reason(error)}); fetch the file again") from error
    if not isinstance(content_object, kind):
        raise InputError(f"{path}: holds {type(content_object).__name__}, not a checkpoint; fetch the file again")
    return content_object


def read_metadata_pickle(path: Path) -> Metadata:
    """The .metadata file of a distributed checkpoint. Raises InputError as `load_restricted` does, and for files that
    are not in its folder."""
    try:
        metadata = _MetadataUnpickler(io.BytesIO(path.read_bytes())).load()
        names = {place.relative_path for place in metadata.storage_data.values()}
    except FileNotFoundError as error:
        raise InputError(f"{path}: absent; fetch the file") from error
    except DAMAGED as error:
        raise InputError(f"{path}: cannot be read ({_reason(error)}); fetch the file again") from error
    if not isinstance(metadata, Metadata):
        raise InputError(f"{path}: holds {type(metadata).__name__}; fetch the file again")
    if outside := [name for name in names if not isinstance(name, str) or Path(name).name != name or name == ".."]:
        raise InputError(f"{path}: names {outside[0]!r}, which is no file of its folder; fetch the file again")
    return metadata


class TensorReader(FileSystemReader):
    """Reads the tensors of a distributed checkpoint, and nothing else: an entry of another kind would be unpickled.

    problem: what is wrong with its .metadata, which torch 2.11 leaves out of its own error."""

    problem: InputError | None = None

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """Raises InputError as `read_metadata_pickle` does, and for an entry that is no tensor."""
        try:
            return self._read_metadata(Path(self.path) / ".metadata")
        except InputError as error:
            self.problem = error
            raise

    def _read_metadata(self, path: Path) -> Metadata:
        metadata = read_metadata_pickle(path)
        for name, entry in metadata.state_dict_metadata.items():
            if not isinstance(entry, TensorStorageMetadata):
                raise InputError(f"{path}: {name} is no tensor, and nothing else is read; take another checkpoint")
        metadata.storage_meta = StorageMeta(load_id=self.load_id)
        return metadata


DAMAGED = (
    OSError,
    LookupError,
    EOFError,
    RuntimeError,
    ValueError,
    TypeError,
    AttributeError,
    ArithmeticError,
    MemoryError,
    ImportError,
    pickle.UnpicklingError,
)


class _MetadataUnpickler(pickle.Unpickler):
    """Makes the classes of torch.distributed.checkpoint's metadata, and no others."""

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) not in METADATA_CLASSES and not (module == "torch" and name in DTYPE_NAMES):
            raise pickle.UnpicklingError(f"the class {module}.{name} is not allowed")
        return super().find_class(module, name)


METADATA_CLASSES = {
    *(
        ("torch.distributed.checkpoint.metadata", name)
        for name in (
            "Metadata",
            "TensorStorageMetadata",
            "BytesStorageMetadata",
            "ChunkStorageMetadata",
            "TensorProperties",
            "MetadataIndex",
            "StorageMeta",
            "_MEM_FORMAT_ENCODING",
        )
    ),
    ("torch.distributed.checkpoint.filesystem", "_StorageInfo"),
    ("torch", "Size"),
    ("torch.serialization", "_get_layout"),
    ("collections", "OrderedDict"),
    ("pathlib", "PosixPath"),
    ("pathlib", "PurePosixPath"),
}
DTYPE_NAMES = {name for name in dir(torch) if isinstance(getattr(torch, name), torch.dtype)}


def _reason(error: BaseException) -> str:
    """The line that names a class that is not allowed, else the first."""
    lines = str(error).splitlines() or [type(error).__name__]
    return next((line.strip() for line in lines if "GLOBAL" in line), lines[0])


def _is_zip(path: Path) -> bool:
    """Whether it has torch's newer format, which can be mapped instead of read."""
    with path.open("rb") as file:
        return file.read(4) == b"PK\x03\x04"

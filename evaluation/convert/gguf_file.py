"""GGUF files (llama.cpp): checked, and written as a Hugging Face folder with their weights dequantized.

The header is read here with bounds before anything else reads it: counts, lengths and places of a damaged or hostile
file are refused. Names, layouts, tokenizer and dequantization are those of transformers and the package `gguf`."""

import struct
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from math import prod
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, BinaryIO

import torch

from gristmill.evaluation.convert.safetensors_folder import WEIGHTS_NAME, write_safetensors
from gristmill.foundation.errors import InputError, RecipeError

MAGIC, VERSIONS = b"GGUF", (2, 3)
SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
STRING, ARRAY = 8, 9
MAX_NAME, MAX_DIMS, MAX_TENSORS, MAX_FIELDS = 1024, 4, 1_000_000, 100_000
BOUNDED = ("block_count", "embedding_length", "feed_forward_length", "expert_count", "vocab_size")


def is_gguf(path: Path) -> bool:
    """Whether the path is a file that begins as GGUF does."""
    if not path.is_file():
        return False
    with path.open("rb") as file:
        return file.read(4) == MAGIC


@dataclass(frozen=True)
class GgufTensor:
    name: str
    shape: tuple[int, ...]
    kind: int
    offset: int


class _Header:
    """Reads values that lie within the file; raises InputError for others."""

    def __init__(self, path: Path, file: BinaryIO):
        self.path, self.file, self.size = path, file, path.stat().st_size

    def damaged(self, problem: str) -> InputError:
        return InputError(f"{self.path}: not a valid GGUF file ({problem}); fetch the file again")

    def number(self, form: str) -> Any:
        return struct.unpack(f"<{form}", self.bytes(struct.calcsize(f"<{form}")))[0]

    def bytes(self, count: int) -> bytes:
        if count > self.size - self.file.tell():
            raise self.damaged(f"{count} bytes at {self.file.tell()} reach beyond its end")
        return self.file.read(count)

    def text(self, longest: int | None = None) -> str:
        length = self.number("Q")
        if longest is not None and length > longest:
            raise self.damaged(f"a name of {length} bytes")
        return self.bytes(length).decode(errors="replace")

    def value(self, kind: int) -> Any:
        """A scalar or a text; None for an array, which is passed over."""
        if kind in SCALARS:
            return self.number(SCALARS[kind])
        if kind == STRING:
            return self.text()
        if kind != ARRAY:
            raise self.damaged(f"type {kind} of a field")
        item, count = self.number("I"), self.number("Q")
        if item in SCALARS:
            self.bytes(count * struct.calcsize(f"<{SCALARS[item]}"))
        elif item != STRING or count > self.size // 8:
            raise self.damaged(f"an array of {count} values of type {item}")
        else:
            for _ in range(count):
                self.bytes(self.number("Q"))
        return None


def check_gguf(path: Path) -> dict[str, Any]:
    """The fields of one value. Raises InputError unless header, tensors and sizes fit each other and the file."""
    with path.open("rb") as file:
        header = _Header(path, file)
        if header.bytes(4) != MAGIC or (version := header.number("I")) not in VERSIONS:
            raise header.damaged(f"it begins as none of the versions {VERSIONS}")
        tensor_count, field_count = header.number("Q"), header.number("Q")
        if not 0 < tensor_count <= MAX_TENSORS or field_count > MAX_FIELDS:
            raise header.damaged(f"version {version} with {tensor_count} tensors and {field_count} fields")
        fields = {header.text(MAX_NAME): header.value(header.number("I")) for _ in range(field_count)}
        tensors = list(_tensors(header, tensor_count))
        alignment = fields.get("general.alignment", 32)
        if not isinstance(alignment, int) or not 0 < alignment <= 1 << 20:
            raise header.damaged(f"an alignment of {alignment}")
        start = -(-file.tell() // alignment) * alignment
        _check_places(header, tensors, start)
        _check_sizes(header, fields, tensors)
        return fields


def _tensors(header: _Header, count: int) -> Iterator[GgufTensor]:
    for _ in range(count):
        name, dims = header.text(MAX_NAME), header.number("I")
        if not 0 < dims <= MAX_DIMS:
            raise header.damaged(f"tensor {name!r} has {dims} dimensions")
        shape = tuple(header.number("Q") for _ in range(dims))
        yield GgufTensor(name, shape, header.number("I"), header.number("Q"))


def _check_places(header: _Header, tensors: list[GgufTensor], start: int) -> None:
    """Every tensor lies in the file, and none in another."""
    sizes, end = _library().GGML_QUANT_SIZES, start
    for tensor in sorted(tensors, key=lambda tensor: tensor.offset):
        if tensor.kind not in sizes:
            raise header.damaged(f"tensor {tensor.name!r} has the unknown type {tensor.kind}")
        block, block_bytes = sizes[tensor.kind]
        first = start + tensor.offset
        if 0 in tensor.shape or tensor.shape[0] % block or first < end:
            raise header.damaged(f"tensor {tensor.name!r} of shape {tensor.shape} at {first}")
        end = first + prod(tensor.shape) // block * block_bytes
        if end > header.size:
            raise header.damaged(f"tensor {tensor.name!r} reaches beyond its end")
    if len({tensor.name for tensor in tensors}) < len(tensors):
        raise header.damaged("two tensors of one name")


def _check_sizes(header: _Header, fields: dict[str, Any], tensors: list[GgufTensor]) -> None:
    """No size of the model is larger than its tensors, so that nothing is built which they cannot fill."""
    largest = max(len(tensors), *(max(tensor.shape) for tensor in tensors))
    for name, value in fields.items():
        if name.rsplit(".", 1)[-1] in BOUNDED and not (isinstance(value, int) and 0 <= value <= largest):
            raise header.damaged(f"{name} is {value}, and no tensor is so large")


def _library() -> Any:
    try:
        import gguf  # the extra `gguf`
    except ModuleNotFoundError as error:
        raise RecipeError(
            "gguf is not installed, which GGUF files need; run `pip install -c constraints.txt 'gristmill[gguf]'`"
        ) from error
    return gguf


@contextmanager
def huggingface_of_gguf(path: Path) -> Iterator[Path]:
    """A temporary Hugging Face folder of the file: weights in float32, tokenizer, chat template. Raises InputError for
    a damaged file and for an architecture that transformers does not read."""
    import transformers  # the extra `gguf`
    from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

    check_gguf(path)
    with TemporaryDirectory(prefix="gristmill-gguf-") as name:
        try:
            tokenizer = transformers.AutoTokenizer.from_pretrained(
                path.parent, gguf_file=path.name, local_files_only=True
            )
            config = transformers.AutoConfig.for_model(**load_gguf_checkpoint(str(path))["config"])
            with torch.device("meta"):
                model = transformers.AutoModelForCausalLM.from_config(config)
            tensors = load_gguf_checkpoint(str(path), return_tensors=True, model_to_load=model)["tensors"]
        except Exception as error:  # of any kind, since the file decides what transformers meets
            raise InputError(
                f"{path}: transformers cannot read it ({type(error).__name__}: {str(error)[:200]}); import the "
                "publisher's safetensors instead"
            ) from error
        config.architectures = [type(model).__name__]
        config.save_pretrained(name)
        tokenizer.save_pretrained(name)
        write_safetensors(Path(name) / WEIGHTS_NAME, {key: value.contiguous() for key, value in tensors.items()})
        yield Path(name)

"""A model in a foreign format: checked, and read tensor by tensor."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor

from gristmill.evaluation.convert.hf.architecture import ModelFamily
from gristmill.foundation.errors import InputError
from gristmill.training.config.model import ModelConfig
from gristmill.training.model.moe.router import saved_buffers
from gristmill.training.model.transformer import Transformer

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
    converted = family.to_ours(config, meta)
    check_shapes(place, config, sizes[0], converted)
    dtypes = {name: value.dtype for name, value in converted.items()}
    return WeightSource(
        family.architecture, config, *sizes, files, tuple(converted), lambda: family.converted(config, tensors), dtypes
    )

"""Conversion of one Hugging Face tensor from and to gristmill tensors: transpose, concatenate, interleave."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from gristmill.training.model_config import ModelConfig

# D width, F features of a projection, H heads, K head width


@dataclass(frozen=True)
class TensorConversion:
    """join: gristmill to Hugging Face. split: the inverse; split(join(x)) == x."""

    join: Callable[[Sequence[Tensor], ModelConfig], Tensor]
    split: Callable[[Tensor, ModelConfig], Sequence[Tensor]]


def _interleave(tensors: Sequence[Tensor], config: ModelConfig) -> Tensor:
    """q, k, v [H * K, ...] -> [H * 3 * K, ...]: for each head its q, its k, its v."""
    heads = [tensor.unflatten(0, (config.heads, config.head_dim)) for tensor in tensors]
    return torch.stack(heads, dim=1).flatten(0, 2)


def _separate(tensor: Tensor, config: ModelConfig) -> Sequence[Tensor]:
    heads = tensor.unflatten(0, (config.heads, 3, config.head_dim))
    return [heads[:, index].flatten(0, 1) for index in range(3)]


SAME = TensorConversion(lambda tensors, _: tensors[0], lambda tensor, _: [tensor])

# GPT-2 stores the transpose of a linear layer's weight ("Conv1D"), and q, k and v side by side.
TRANSPOSED = TensorConversion(lambda tensors, _: tensors[0].T, lambda tensor, _: [tensor.T])
TRANSPOSED_TRIPLE = TensorConversion(
    lambda tensors, _: torch.cat([tensor.T for tensor in tensors], dim=1),
    lambda tensor, _: [part.T for part in tensor.chunk(3, dim=1)],
)
TRIPLE = TensorConversion(lambda tensors, _: torch.cat(list(tensors)), lambda tensor, _: tensor.chunk(3))

# BLOOM interleaves q, k and v by head.
BY_HEAD = TensorConversion(_interleave, _separate)


@dataclass(frozen=True)
class Rule:
    """One Hugging Face tensor and the gristmill tensors it is made of. `{i}` is the layer index."""

    theirs: str
    ours: tuple[str, ...]
    form: TensorConversion = SAME

    @property
    def per_layer(self) -> bool:
        return "{i}" in self.theirs

    def at(self, layer: int) -> "Rule":
        return Rule(self.theirs.format(i=layer), tuple(name.format(i=layer) for name in self.ours), self.form)

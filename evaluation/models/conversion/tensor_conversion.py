"""Conversion of one Hugging Face tensor from and to gristmill tensors: transpose, concatenate, interleave."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

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
    """One Hugging Face tensor and the gristmill tensors it is made of. `{i}` is the layer index; layers: those that
    have it, None for all. With `{e}`, the tensors of all `experts` are one of gristmill's, stacked."""

    theirs: str
    ours: tuple[str, ...]
    form: TensorConversion = SAME
    layers: tuple[int, ...] | None = None
    experts: int = 0

    def expanded(self, layers: int) -> list["Rule"]:
        """One rule for each layer that has the tensor."""
        if "{i}" not in self.theirs:
            return [self]
        return [self._at(layer) for layer in (range(layers) if self.layers is None else self.layers)]

    def names(self) -> list[str]:
        """Their tensors: one, or one for each expert."""
        if not self.experts:
            return [self.theirs]
        return [self.theirs.replace("{e}", str(expert)) for expert in range(self.experts)]

    def to_theirs(self, tensors: Mapping[str, Tensor], config: ModelConfig) -> dict[str, Tensor]:
        joined = self.form.join([tensors[name] for name in self.ours], config)
        parts = joined.unbind() if self.experts else [joined]
        return {name: part.contiguous() for name, part in zip(self.names(), parts, strict=True)}

    def to_ours(self, tensors: Mapping[str, Tensor], config: ModelConfig) -> dict[str, Tensor]:
        found = [tensors[name] for name in self.names()]
        whole = torch.stack(found) if self.experts else found[0]
        parts = self.form.split(whole, config)
        return {name: part.contiguous() for name, part in zip(self.ours, parts, strict=True)}

    def _at(self, layer: int) -> "Rule":
        ours = tuple(name.replace("{i}", str(layer)) for name in self.ours)
        return replace(self, theirs=self.theirs.replace("{i}", str(layer)), ours=ours)

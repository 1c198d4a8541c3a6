"""Joins the tensor-parallel shards of Megatron checkpoints: row-parallel weights along their inputs, column-parallel
ones and tables along their rows, and what every rank holds by its mean (transformers' converter of BLOOM does so)."""

from collections.abc import Sequence

import torch
from torch import Tensor

from gristmill.foundation.errors import InputError

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

"""Tensor-parallel layers. They store DTensors, so that checkpoints reshard, and compute on local shards with the
collectives of `collectives.py`."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.placement_types import Placement

from gristmill.training.parallel.collectives import (
    all_tokens,
    copy_to_ranks,
    gather_tokens,
    scatter_tokens,
    sum_over_ranks,
)
from gristmill.training.parallel.context import around_the_ring, count_once, pass_on
from gristmill.training.parallel.linear import Float8Copy, float8_linear, joins, joint_linear, linear, matmul, product
from gristmill.training.parallel.mesh import Axis, Mesh

# B batch, T tokens, D width, F outputs; a small t after a letter = this tensor rank's share


class Sharding(Enum):
    """How a parameter is sharded over the tensor ranks."""

    OUTPUT = "output"  # dimension 0 is split: the outputs of a column-parallel layer, the vocabulary
    INPUT = "input"  # dimension 1 is split: the inputs of a row-parallel layer
    KEY_VALUE = "key_value"  # dimension 0 is split over the key/value heads, replicated where ranks share a head
    REPLICATED = "replicated"  # every rank holds all of it and applies it to its tokens
    REPLICATED_OVER_HEADS = "replicated_over_heads"  # every rank holds all of it and applies it to its heads
    WHOLE = "whole"  # every rank holds all of it and applies it to all tokens
    SPLIT_TOKENS = "split_tokens"  # every rank holds all of it and applies it to tokens of its own


@dataclass(frozen=True)
class TensorAxis:
    """The tensor-parallel axis of a layer. Call `enter` before a column-parallel layer; a row-parallel
    layer calls `leave`.

    Under sequence parallelism the residual stream holds this rank's tokens [B, Tt, D] only. overlaps: products and
    collectives run beside each other."""

    mesh: Mesh
    sequence_parallel: bool
    float8: bool = False
    overlaps: bool = False

    @property
    def size(self) -> int:
        return self.mesh.tensor.size

    @property
    def rank(self) -> int:
        return self.mesh.tensor.rank

    @property
    def shards_tokens(self) -> bool:
        return self.size > 1 and self.sequence_parallel

    def enter(self, x: Tensor) -> Tensor:
        if self.size == 1:
            return x
        collective = gather_tokens if self.sequence_parallel else copy_to_ranks
        return collective(x, self.mesh.tensor.group)

    def leave(self, x: Tensor) -> Tensor:
        if self.size == 1:
            return x
        collective = scatter_tokens if self.sequence_parallel else sum_over_ranks
        return collective(x, self.mesh.tensor.group)

    def whole_tokens(self, x: Tensor) -> Tensor:
        """All tokens [B, T, ...] on every rank, for work that every rank does in full; backward each rank takes its own
        tokens of the gradient, which is the same on all."""
        return all_tokens(x, self.rank, self.mesh.tensor.group) if self.shards_tokens else x

    def own_channels(self, x_BTD: Tensor) -> Tensor:
        """This rank's share of the channels, as a column-parallel layer has its outputs."""
        if self.size == 1:
            return x_BTD
        share = x_BTD.shape[-1] // self.size
        return x_BTD.narrow(-1, self.rank * share, share)

    def gather_channels(self, x_BTDt: Tensor) -> Tensor:
        """All channels on every rank, for column-parallel layers; backward, the gradients of the ranks are summed."""
        if self.size == 1:
            return x_BTDt
        return gather_tokens(x_BTDt.transpose(1, 2), self.mesh.tensor.group).transpose(1, 2)

    def sum_for_all(self, x: Tensor) -> Tensor:
        """The sum of the ranks' shares for work that differs on each; backward, the gradients are summed too."""
        if self.size == 1:
            return x
        return copy_to_ranks(sum_over_ranks(x, self.mesh.tensor.group), self.mesh.tensor.group)

    def local_tokens(self, per_token: Tensor, dim: int = 1) -> Tensor:
        """The slice that belongs to the tokens of this rank's residual stream."""
        if not self.shards_tokens:
            return per_token
        share = per_token.shape[dim] // self.size
        return per_token.narrow(dim, self.rank * share, share)

    def parameter(self, shape: tuple[int, ...], sharding: Sharding) -> nn.Parameter:
        """A parameter of the full shape on the meta device; `model/init.py` or a checkpoint fills it. On one tensor
        rank a plain tensor: DTensor takes 0.1 ms of Python at each use."""
        return nn.Parameter(self.store(torch.empty(shape, device="meta"), sharding))

    def store(self, whole: Tensor, sharding: Sharding) -> Tensor:
        if self.size == 1:
            return whole
        grid = self.mesh.key_value_grid if sharding is Sharding.KEY_VALUE else self.mesh.tensor_grid
        return distribute_tensor(whole, grid, _STORED[sharding], src_data_rank=None)

    def local(self, parameter: Tensor, sharding: Sharding, dtype: torch.dtype) -> Tensor:
        """This rank's shard, in the dtype of the computation. Its gradient is declared a partial sum where each rank
        sees a part of the tokens or of the heads; the sum is taken when the gradient is stored."""
        if isinstance(parameter, DTensor):
            placements: list[Placement] = list(_STORED[sharding])
            if sharding is Sharding.KEY_VALUE:
                placements = [Shard(0), Partial()]
            elif sharding in (Sharding.REPLICATED_OVER_HEADS, Sharding.SPLIT_TOKENS) or (
                sharding is Sharding.REPLICATED and self.shards_tokens
            ):
                placements = [Partial()]
            parameter = parameter.to_local(grad_placements=placements)
        if sharding is Sharding.WHOLE and self.mesh.context.size > 1:
            parameter = count_once(parameter, self.mesh.context.size)
        return parameter.to(dtype)


_STORED = {
    Sharding.OUTPUT: (Shard(0),),
    Sharding.INPUT: (Shard(1),),
    Sharding.KEY_VALUE: (Shard(0), Replicate()),
    Sharding.REPLICATED: (Replicate(),),
    Sharding.REPLICATED_OVER_HEADS: (Replicate(),),
    Sharding.WHOLE: (Replicate(),),
    Sharding.SPLIT_TOKENS: (Replicate(),),
}


class ColumnParallelLinear(nn.Module):
    """x W^T + b; each rank computes a shard of the outputs. Takes full inputs (after `enter`)."""

    def __init__(self, tensor: TensorAxis, inputs: int, outputs: int, bias: bool, sharding: Sharding = Sharding.OUTPUT):
        super().__init__()
        self.tensor, self.sharding = tensor, sharding
        self.weight = tensor.parameter((outputs, inputs), sharding)
        self.bias = tensor.parameter((outputs,), sharding) if bias else None
        self.float8_copy: Float8Copy | None = None  # of the weight, as engine/local_model.py cast it

    def forward(self, x_BTD: Tensor) -> Tensor:
        bias_Ft = None if self.bias is None else self.tensor.local(self.bias, self.sharding, x_BTD.dtype)
        if self.tensor.float8:
            weight_FtD = self.tensor.local(self.weight, self.sharding, self.weight.dtype)
            y_BTFt = float8_linear(x_BTD, weight_FtD, self.float8_copy)
            return y_BTFt if bias_Ft is None else y_BTFt + bias_Ft
        return linear(x_BTD, self.tensor.local(self.weight, self.sharding, x_BTD.dtype), bias_Ft)


def column_parallel(tensor: TensorAxis, x: Tensor, layers: Sequence[nn.Module], joint: bool = False) -> list[Tensor]:
    """The outputs of several column-parallel layers of one input, which this enters. joint: as one product where that
    is the better way."""
    if not (tensor.overlaps and tensor.shards_tokens and all(type(layer) is ColumnParallelLinear for layer in layers)):
        x_BTD = tensor.enter(x)
        return list(joint_column_parallel(x_BTD, layers)) if joint else [layer(x_BTD) for layer in layers]
    plain = [layer for layer in layers if isinstance(layer, ColumnParallelLinear)]
    weights = tuple(tensor.local(layer.weight, layer.sharding, x.dtype) for layer in plain)
    made = gathered_products(x, weights, tensor.mesh.tensor)
    return [
        y if layer.bias is None else y + tensor.local(layer.bias, layer.sharding, x.dtype)
        for y, layer in zip(made, plain, strict=True)
    ]


def joint_column_parallel(x_BTD: Tensor, layers: Sequence[nn.Module]) -> tuple[Tensor, ...]:
    """The outputs of several column-parallel layers of one input: views of one product where that is the better way."""
    if all(type(layer) is ColumnParallelLinear and not layer.tensor.float8 for layer in layers):
        plain = [layer for layer in layers if isinstance(layer, ColumnParallelLinear)]
        weights = [layer.tensor.local(layer.weight, layer.sharding, layer.weight.dtype) for layer in plain]
        if joins(x_BTD, weights):
            biases = [
                layer.tensor.local(layer.bias, layer.sharding, x_BTD.dtype) for layer in plain if layer.bias is not None
            ]
            return joint_linear(x_BTD, weights, biases)
    return tuple(layer(x_BTD) for layer in layers)


class RowParallelLinear(nn.Module):
    """x W^T + b; each rank takes a shard of the inputs. Returns the sum over ranks: it calls `leave` itself."""

    def __init__(self, tensor: TensorAxis, inputs: int, outputs: int, bias: bool):
        super().__init__()
        self.tensor = tensor
        self.weight = tensor.parameter((outputs, inputs), Sharding.INPUT)
        self.bias = tensor.parameter((outputs,), Sharding.REPLICATED) if bias else None
        self.float8_copy: Float8Copy | None = None  # of the weight, as engine/local_model.py cast it

    def forward(self, x_BTFt: Tensor) -> Tensor:
        dtype = self.weight.dtype if self.tensor.float8 else x_BTFt.dtype
        weight_DFt = self.tensor.local(self.weight, Sharding.INPUT, dtype)
        if self.tensor.overlaps and self.tensor.shards_tokens:
            y_BTD = scattered_product(x_BTFt, weight_DFt, self.tensor.mesh.tensor)
        elif self.tensor.float8:
            y_BTD = self.tensor.leave(float8_linear(x_BTFt, weight_DFt, self.float8_copy))
        else:
            y_BTD = self.tensor.leave(linear(x_BTFt, weight_DFt, None))
        return y_BTD if self.bias is None else y_BTD + self.tensor.local(self.bias, Sharding.REPLICATED, x_BTFt.dtype)


class VocabularyEmbedding(nn.Module):
    """Embedding sharded over the vocabulary: each rank holds consecutive ids. No padding: the last rank may hold
    fewer."""

    def __init__(self, tensor: TensorAxis, vocab_size: int, width: int, dtype: torch.dtype):
        super().__init__()
        self.tensor, self.vocab_size, self.dtype = tensor, vocab_size, dtype
        self.weight = tensor.parameter((vocab_size, width), Sharding.OUTPUT)

    def forward(self, tokens_BT: Tensor) -> Tensor:
        table_VtD = self.tensor.local(self.weight, Sharding.OUTPUT, self.weight.dtype)
        if self.tensor.size == 1:
            return F.embedding(tokens_BT, table_VtD).to(self.dtype)  # rows are cast, not the table
        index_BT, mine_BT = local_ids(tokens_BT, self.vocab_size, self.tensor, len(table_VtD))
        return self.tensor.leave(F.embedding(index_BT, table_VtD).to(self.dtype) * mine_BT.unsqueeze(-1).to(self.dtype))


def local_ids(ids: Tensor, vocab_size: int, tensor: TensorAxis, rows: int) -> tuple[Tensor, Tensor]:
    """(row in this rank's shard of the table, whether the id is there); ids of other ranks point at row 0."""
    index = ids - tensor.rank * math.ceil(vocab_size / tensor.size)
    is_local = (index >= 0) & (index < rows)
    return index.where(is_local, torch.zeros_like(index)), is_local


# Products of tensor-parallel layers that overlap with their collectives under sequence parallelism: the collective is
# a ring, and while one rank's tokens travel, the product of those at hand is computed (Wang et al., ASPLOS 2023,
# "Overlap Communication with Dependent Computation via Decomposition"; torch's async tensor parallelism).
#
# A ring sends the bytes of the all-gather or reduce-scatter that it replaces, in n - 1 messages of one rank's tokens.

# B batch, T tokens, D inputs, F outputs; a small t after a letter = this tensor rank's share


def gathered_products(x_BTtD: Tensor, weights: tuple[Tensor, ...], axis: Axis) -> tuple[Tensor, ...]:
    """x W^T [B, T, F] of all tokens with each weight [F, D], from this rank's tokens."""
    return _GatheredProducts.apply(x_BTtD, axis, *weights)


def scattered_product(x_BTFt: Tensor, weight_DFt: Tensor, axis: Axis) -> Tensor:
    """This rank's tokens [B, Tt, D] of the sum over the ranks of x W^T."""
    return _ScatteredProduct.apply(x_BTFt, weight_DFt, axis)


class _GatheredProducts(torch.autograd.Function):
    """Keeps the gathered input, as the layers do that it replaces."""

    @staticmethod
    def forward(ctx: Any, x_BTtD: Tensor, axis: Axis, *weights: Tensor) -> tuple[Tensor, ...]:
        x_BTD, made = _products_around(x_BTtD, weights, axis)
        ctx.save_for_backward(x_BTD, *weights)
        ctx.axis = axis
        return made

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        x_BTD, *weights = ctx.saved_tensors
        share = x_BTD.shape[1] // ctx.axis.size

        def of_rank(rank: int) -> Tensor:
            parts = [
                product(gradient[:, rank * share : (rank + 1) * share].contiguous(), weight.T)
                for gradient, weight in zip(gradients, weights, strict=True)
            ]
            return torch.stack(parts).sum(dim=0) if len(parts) > 1 else parts[0]

        by_x = _summed_around(of_rank, ctx.axis)
        return by_x, None, *(_by_weight(gradient, x_BTD) for gradient in gradients)


class _ScatteredProduct(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_BTFt: Tensor, weight_DFt: Tensor, axis: Axis) -> Tensor:
        ctx.save_for_backward(x_BTFt, weight_DFt)
        ctx.axis, share = axis, x_BTFt.shape[1] // axis.size
        return _summed_around(
            lambda rank: product(x_BTFt[:, rank * share : (rank + 1) * share].contiguous(), weight_DFt), axis
        )

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient_BTtD: Tensor) -> tuple[Tensor, Tensor, None]:
        x_BTFt, weight_DFt = ctx.saved_tensors
        gradient_BTD, (by_x,) = _products_around(gradient_BTtD, (weight_DFt.T,), ctx.axis)
        return by_x, _by_weight(gradient_BTD, x_BTFt), None


def _products_around(own_BTtD: Tensor, weights: tuple[Tensor, ...], axis: Axis) -> tuple[Tensor, tuple[Tensor, ...]]:
    """(the tensor of all tokens, its product with each weight); each rank's tokens are multiplied while the next
    travel."""
    own_BTtD = own_BTtD.contiguous()
    share = own_BTtD.shape[1]
    whole_BTD = own_BTtD.new_empty(len(own_BTtD), share * axis.size, own_BTtD.shape[2])
    made = [own_BTtD.new_empty(*whole_BTD.shape[:2], len(weight)) for weight in weights]
    for rank, part in around_the_ring(own_BTtD, axis):
        place = slice(rank * share, (rank + 1) * share)
        whole_BTD[:, place] = part
        for target, weight in zip(made, weights, strict=True):
            if len(part) == 1:  # the rows of the only sample lie together: the product is written to them
                matmul(part[0], weight.T, out=target[0, place])
            else:
                target[:, place] = product(part, weight)
    return whole_BTD, tuple(made)


def _summed_around(of_rank: Callable[[int], Tensor], axis: Axis) -> Tensor:
    """The sum over the ranks of what each computes for this one. What is for a rank begins at the rank after it and
    goes once around the ring; each rank adds its share, which it computes while the sum travels."""
    total = of_rank((axis.rank - 1) % axis.size)
    for step in range(2, axis.size + 1):
        waiting = pass_on(total, axis)
        own = of_rank((axis.rank - step) % axis.size)
        total = waiting.wait() + own
    return total


def _by_weight(gradient_BTF: Tensor, x_BTD: Tensor) -> Tensor:
    return matmul(gradient_BTF.flatten(0, 1).T, x_BTD.flatten(0, 1))

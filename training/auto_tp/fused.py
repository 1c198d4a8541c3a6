"""A fused linear layer (query, key and value in one) as one parameter for each piece, each sharded by itself."""

from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from gristmill.training.auto_tp.operators import is_transposed
from gristmill.training.auto_tp.plan import LayerPlan
from gristmill.training.auto_tp.region import as_whole

PIECE = "piece_"


class FusedLinear(nn.Module):
    """x W^T + b for each piece of the outputs. Parameters are piece_0_weight, piece_0_bias, ..., and weights keep the
    orientation of the layer that they come from. grid: None for plain parameters, which have the same names, so that a
    checkpoint fits every layout."""

    def __init__(self, layer: nn.Module, plan: LayerPlan, grid: DeviceMesh | None):
        super().__init__()
        self.grid, self.pieces = grid, plan.pieces
        self.transposed = is_transposed(layer)
        dim = 1 if self.transposed else 0
        weights = layer.weight.detach().split(plan.pieces, dim=dim)
        biases = layer.bias.detach().split(plan.pieces) if layer.bias is not None else [None] * len(weights)
        for index, (weight, bias, sharded) in enumerate(zip(weights, biases, plan.sharded_pieces, strict=True)):
            self._store(f"{PIECE}{index}_weight", weight, Shard(dim) if sharded else Replicate())
            if bias is not None:
                self._store(f"{PIECE}{index}_bias", bias, Shard(0) if sharded else Replicate())

    def _store(self, name: str, whole: Tensor, placement: Any) -> None:
        stored = whole.clone()
        if self.grid is not None:
            stored = distribute_tensor(stored, self.grid, [placement], src_data_rank=None)
        self.register_parameter(name, nn.Parameter(stored))

    @property
    def weight(self) -> Tensor:
        """The fused weight, for code that takes it from the layer, as Mamba's does."""
        pieces = [getattr(self, f"{PIECE}{index}_weight") for index in range(len(self.pieces))]
        return torch.cat(pieces, dim=1 if self.transposed else 0)

    @property
    def bias(self) -> Tensor | None:
        pieces = [getattr(self, f"{PIECE}{index}_bias", None) for index in range(len(self.pieces))]
        return None if pieces[0] is None else torch.cat(pieces)

    def forward(self, x: Tensor) -> "FusedOutput":
        x = x if self.grid is None else as_whole(x, self.grid)
        return FusedOutput([self._piece(x, index) for index in range(len(self.pieces))])

    def _piece(self, x: Tensor, index: int) -> Tensor:
        weight = getattr(self, f"{PIECE}{index}_weight")
        return F.linear(x, weight.T if self.transposed else weight, getattr(self, f"{PIECE}{index}_bias", None))


class FusedOutput:
    """The pieces of a fused layer's result, for the operation that cuts it; the trace has seen no other use of it."""

    def __init__(self, pieces: list[Tensor]):
        self.parts = pieces

    def split(self, *sizes: Any, **named: Any) -> tuple[Tensor, ...]:
        return tuple(self.parts)

    chunk = tensor_split = split_with_sizes = split

    def __getitem__(self, index: Any) -> Tensor:
        """x[..., first:end]."""
        first = 0
        width = sum(each.shape[-1] for each in self.parts)
        bounds = index[-1].indices(width)[:2]
        for each in self.parts:
            if bounds == (first, first + each.shape[-1]):
                return each
            first += each.shape[-1]
        raise IndexError(f"{bounds} are not the bounds of a piece of the fused layer's result")

    def __iter__(self) -> Iterator[Tensor]:
        raise TypeError("the result of a fused layer is cut into its pieces, not iterated over")

    @property
    def shape(self) -> torch.Size:
        first = self.parts[0].shape
        return torch.Size([*first[:-1], sum(each.shape[-1] for each in self.parts)])


def whole_parameters(model: nn.Module, value: Callable[[Tensor], Tensor | None]) -> Iterator[tuple[str, Tensor | None]]:
    """Names of the model before it was sharded, and value of each parameter, gathered from all ranks; collective. The
    pieces of fused layers are joined. Names that share a parameter have one tensor."""
    known: dict[int, Tensor | None] = {}
    for path, module in model.named_modules():
        prefix = f"{path}." if path else ""
        if isinstance(module, FusedLinear):
            for leaf, dim in (("weight", 1 if module.transposed else 0), ("bias", 0)):
                names = [f"{PIECE}{index}_{leaf}" for index in range(len(module.pieces))]
                if hasattr(module, names[0]):
                    parts = [_gathered(value(getattr(module, name))) for name in names]
                    yield f"{prefix}{leaf}", None if parts[0] is None else torch.cat(parts, dim=dim)
            continue
        for leaf, parameter in module.named_parameters(recurse=False):
            if id(parameter) not in known:
                known[id(parameter)] = _gathered(value(parameter))
            yield f"{prefix}{leaf}", known[id(parameter)]


def _gathered(tensor: Tensor | None) -> Tensor | None:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor

"""Applies a tensor-parallel plan to a model with DTensor."""

from collections import defaultdict
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import (
    DTensor,
    Partial,
    Placement,
    Replicate,
    Shard,
    distribute_module,
    distribute_tensor,
)
from torch.distributed.tensor.parallel import ColwiseParallel, ParallelStyle, RowwiseParallel, parallelize_module
from torch.func import functional_call
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves, tree_map

from gristmill.training.auto_tp.module_trace import is_transposed
from gristmill.training.auto_tp.plan import LayerPlan, LayerRole, TensorPlan

Site = tuple[nn.Module, str]


def apply_plan(model: nn.Module, plan: TensorPlan, grid: DeviceMesh | None) -> None:
    """Replaces the parameters of sharded layers by DTensors and registers the hooks that exchange activations. Equal on
    all ranks before; parameters that several modules share stay shared. All other parameters stay plain tensors.
    Fused layers become pieces also in a plan for one rank, where grid is None."""
    shared = _shared_parameters(model)
    for layer in plan.layers.values():
        module = model.get_submodule(layer.name)
        layer_grid = None if layer.role is LayerRole.REPLICATED else grid
        parent, _, leaf = layer.name.rpartition(".")
        if layer.has_experts:
            setattr(model.get_submodule(parent), leaf, ShardedExperts(module, layer_grid))
        elif layer.pieces:
            setattr(model.get_submodule(parent), leaf, FusedLinear(module, layer, layer_grid))
        elif layer_grid is not None:
            module.register_forward_pre_hook(partial(_input_as_whole, layer_grid, layer))
            parallelize_module(module, layer_grid, _style(module, layer), src_data_rank=None)
            if layer.role is LayerRole.INPUT or isinstance(module, nn.Embedding):
                module.register_forward_hook(_own_memory)
    for sites in shared:
        _share_again(sites)


def _input_as_whole(grid: DeviceMesh, layer: LayerPlan, module: nn.Module, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
    """Layers with the same input share its DTensor, so that one all-reduce sums the gradients of all of them."""
    first = inputs[0]
    if layer.role is LayerRole.INPUT or isinstance(first, DTensor) or isinstance(module, nn.Embedding):
        return inputs
    return as_whole(first, grid), *inputs[1:]


def _own_memory(module: nn.Module, inputs: Any, output: Tensor) -> Tensor:
    """A copy: what to_local returns cannot be added to in place, as Falcon does."""
    return output.clone()


def _style(module: nn.Module, layer: LayerPlan) -> ParallelStyle:
    rows = layer.role is LayerRole.INPUT or isinstance(module, nn.Embedding)
    if is_transposed(module):
        return TransposedLinear(rows)
    return RowwiseParallel(input_layouts=_rows_input(module)) if rows else ColwiseParallel(use_local_output=False)


def _rows_input(module: nn.Module) -> Placement:
    return Replicate() if isinstance(module, nn.Embedding) else Shard(-1)


class TransposedLinear(ParallelStyle):
    """The same for transformers' Conv1D, whose weight is [inputs, outputs]. rows: sharded by inputs."""

    def __init__(self, rows: bool):
        super().__init__()
        self.rows = rows

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        output: Any = self._whole_output if self.rows else None  # torch's annotation says that it returns nothing
        return distribute_module(module, device_mesh, self._shard, None, output)

    def _shard(self, name: str, module: nn.Module, grid: DeviceMesh) -> None:
        placements = {"weight": Shard(0), "bias": Replicate()} if self.rows else {"weight": Shard(1), "bias": Shard(0)}
        for leaf, placement in placements.items():
            stored = distribute_tensor(getattr(module, leaf).detach(), grid, [placement], src_data_rank=None)
            module.register_parameter(leaf, nn.Parameter(stored))

    def _whole_output(self, module: nn.Module, output: DTensor, grid: DeviceMesh) -> Tensor:
        return output.redistribute(placements=[Replicate()]).to_local()


def _shared_parameters(model: nn.Module) -> list[list[Site]]:
    """The places of each parameter that more than one module holds."""
    sites: dict[int, list[Site]] = defaultdict(list)
    for module in model.modules():
        for name, parameter in module.named_parameters(recurse=False):
            sites[id(parameter)].append((module, name))
    return [places for places in sites.values() if len(places) > 1]


def _share_again(sites: list[Site]) -> None:
    """parallelize_module makes a parameter of its own for each module."""
    sharded = [getattr(module, name) for module, name in sites if isinstance(getattr(module, name), DTensor)]
    for module, name in sites:
        if sharded:
            module.register_parameter(name, sharded[0])


# A fused linear layer (query, key and value in one) as one parameter for each piece, each sharded by itself.

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
        weight, bias = (getattr(layer, leaf) for leaf in ("weight", "bias"))
        weights = weight.detach().split(plan.pieces, dim=dim)
        biases = bias.detach().split(plan.pieces) if bias is not None else [None] * len(weights)
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
        return None if pieces[0] is None else torch.cat([piece for piece in pieces if piece is not None])

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

    def unsqueeze(self, dim: int) -> "FusedOutput":
        return FusedOutput([part.unsqueeze(dim) for part in self.parts])

    def __getitem__(self, index: Any) -> Tensor:
        """x[..., first:end]."""
        first = 0
        width = sum(part.shape[-1] for part in self.parts)
        bounds = index[-1].indices(width)[:2]
        for part in self.parts:
            if bounds == (first, first + part.shape[-1]):
                return part
            first += part.shape[-1]
        raise IndexError(f"{bounds} are not the bounds of a piece of the fused layer's result")

    def __iter__(self) -> Iterator[Tensor]:
        raise TypeError("the result of a fused layer is cut into its pieces, not iterated over")

    @property
    def shape(self) -> torch.Size:
        first = self.parts[0].shape
        return torch.Size([*first[:-1], sum(part.shape[-1] for part in self.parts)])


# A module of experts, each of which has its share of the features on every tensor rank.

# E experts, F features of an expert, D width; Ft = this tensor rank's share


class ShardedExperts(nn.Module):
    """The experts of a layer in transformers' code, run on this rank's features; the results are summed over the ranks.

    gate_up_proj [E, 2, F, D] and down_proj [E, D, F] are sharded by F. grid: None for plain parameters of the same
    shapes, so that a checkpoint fits every layout."""

    def __init__(self, experts: nn.Module, grid: DeviceMesh | None):
        super().__init__()
        self.grid = grid
        gate_up = experts.get_parameter("gate_up_proj").detach().unflatten(1, (2, -1))
        for name, whole in (("gate_up_proj", gate_up), ("down_proj", experts.get_parameter("down_proj").detach())):
            stored = whole.clone() if grid is None else distribute_tensor(whole, grid, [Shard(2)], src_data_rank=None)
            self.register_parameter(name, nn.Parameter(stored))
        self._code = [experts.to("meta")]  # in a list, so that its parameters are none of this module

    def forward(self, x: Tensor, expert_ids: Tensor, weights: Tensor) -> Tensor:
        gate_up, down = (_local(self.get_parameter(name)) for name in ("gate_up_proj", "down_proj"))
        own = {"gate_up_proj": gate_up.flatten(1, 2), "down_proj": down}
        if self.grid is None:
            return functional_call(self._code[0], own, (x, expert_ids, weights))
        inputs = [self._with_summed_gradient(part) for part in (x, weights)]
        partial_result = functional_call(self._code[0], own, (inputs[0], expert_ids, inputs[1]))
        summed = DTensor.from_local(partial_result, self.grid, [Partial()], run_check=False)
        return summed.redistribute(placements=[Replicate()]).to_local()

    def _with_summed_gradient(self, x: Tensor) -> Tensor:
        whole: Any = x if isinstance(x, DTensor) else DTensor.from_local(x, self.grid, [Replicate()], run_check=False)
        return whole.to_local(grad_placements=[Partial()])


def _local(parameter: Tensor) -> Tensor:
    return parameter.to_local() if isinstance(parameter, DTensor) else parameter


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
                    present = [part for part in parts if part is not None]
                    yield f"{prefix}{leaf}", torch.cat(present, dim=dim) if present else None
            continue
        if isinstance(module, ShardedExperts):
            gate_up = _gathered(value(module.get_parameter("gate_up_proj")))
            yield f"{prefix}gate_up_proj", None if gate_up is None else gate_up.flatten(1, 2)
            yield f"{prefix}down_proj", _gathered(value(module.get_parameter("down_proj")))
            continue
        for leaf, parameter in module.named_parameters(recurse=False):
            if id(parameter) not in known:
                known[id(parameter)] = _gathered(value(parameter))
            yield f"{prefix}{leaf}", known[id(parameter)]


def _gathered(tensor: Tensor | None) -> Tensor | None:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


# What runs between a layer sharded by outputs and the next one sharded by inputs, on DTensors.

# B samples, H heads, T tokens, K head width; Ht = this tensor rank's share

WHOLE = "_auto_tp_whole"  # attribute of a tensor: itself as a DTensor


def as_whole(x: Tensor, grid: DeviceMesh) -> DTensor:
    """A tensor that is whole and equal on all ranks as a DTensor; the same one in every call, so that the gradients of
    all its uses are summed on this rank before they are summed over the ranks."""
    whole: DTensor | None = getattr(x, WHOLE, None)
    if whole is None or (torch.is_grad_enabled() and x.requires_grad and not whole.requires_grad):
        whole = DTensor.from_local(x, grid, [Replicate()], run_check=False)
        if not isinstance(x, torch.nn.Parameter):
            setattr(x, WHOLE, whole)
    return whole


class ShardedRegion(TorchFunctionMode):
    """While it is active, operations on DTensors take plain tensors (masks, rotary tables, norm weights) as whole ones,
    and attention runs on each rank's heads without DTensor, whose rules do not cover all kernels."""

    def __init__(self, grid: DeviceMesh):
        super().__init__()
        self.grid = grid

    def __torch_function__(self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if not any(isinstance(leaf, DTensor) for leaf in tree_leaves((args, kwargs))):
            return func(*args, **kwargs)
        if func is F.scaled_dot_product_attention:
            return self._attention(*args, **kwargs)
        if func is torch.cat:  # transformers' caches begin with empty tensors of one dimension
            args = [tensor for tensor in args[0] if tensor.ndim > 1 or tensor.numel()], *args[1:]
        args, kwargs = tree_map(self._whole, (args, kwargs))
        return func(*args, **kwargs)

    def _whole(self, leaf: Any) -> Any:
        if isinstance(leaf, Tensor) and not isinstance(leaf, DTensor) and leaf.ndim:
            return as_whole(leaf, self.grid)
        return leaf

    def _attention(
        self, q_BHTK: Tensor, k_BHTK: Tensor, v_BHTK: Tensor, attn_mask: Tensor | None = None, *rest: Any, **named: Any
    ) -> DTensor:
        heads = q_BHTK.shape[1]
        q_BHtTK, k_BHtTK, v_BHtTK = (self._own_heads(projected, heads) for projected in (q_BHTK, k_BHTK, v_BHTK))
        if attn_mask is not None and attn_mask.ndim == 4 and attn_mask.shape[1] > 1:
            attn_mask = self._own_heads(attn_mask, heads)
        elif isinstance(attn_mask, DTensor):
            attn_mask = attn_mask.full_tensor()
        y_BHtTK = F.scaled_dot_product_attention(q_BHtTK, k_BHtTK, v_BHtTK, attn_mask, *rest, **named)
        return DTensor.from_local(y_BHtTK, self.grid, [Shard(1)], run_check=False)

    def _own_heads(self, x_BHTK: Tensor, heads: int) -> Tensor:
        """This rank's share of the heads. Key/value heads that are too few to split are repeated first."""
        whole: Any = x_BHTK if isinstance(x_BHTK, DTensor) else as_whole(x_BHTK, self.grid)
        if whole.shape[1] != heads and not whole.placements[0].is_shard(1):
            whole = whole.repeat_interleave(heads // whole.shape[1], dim=1)
        return whole.redistribute(placements=[Shard(1)]).to_local()

"""Applies a tensor-parallel plan to a model with DTensor."""

from collections import defaultdict
from functools import partial
from typing import Any

from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard, distribute_module, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, ParallelStyle, RowwiseParallel, parallelize_module

from gristmill.training.auto_tp.fused import FusedLinear
from gristmill.training.auto_tp.operators import is_transposed
from gristmill.training.auto_tp.plan import LayerPlan, Role, TensorPlan
from gristmill.training.auto_tp.region import as_whole

Site = tuple[nn.Module, str]


def apply_plan(model: nn.Module, plan: TensorPlan, grid: DeviceMesh | None) -> None:
    """Replaces the parameters of sharded layers by DTensors and registers the hooks that exchange activations. Equal on
    all ranks before; parameters that several modules share stay shared. All other parameters stay plain tensors.
    Fused layers become pieces also in a plan for one rank, where grid is None."""
    shared = _shared_parameters(model)
    for layer in plan.layers.values():
        module, is_sharded = model.get_submodule(layer.name), grid is not None and layer.role is not Role.REPLICATED
        if layer.pieces:
            parent, _, leaf = layer.name.rpartition(".")
            setattr(model.get_submodule(parent), leaf, FusedLinear(module, layer, grid if is_sharded else None))
        elif is_sharded:
            module.register_forward_pre_hook(partial(_input_as_whole, grid, layer))
            parallelize_module(module, grid, _style(module, layer), src_data_rank=None)
            if layer.role is Role.INPUT or isinstance(module, nn.Embedding):
                module.register_forward_hook(_own_memory)
    for sites in shared:
        _share_again(sites)


def _input_as_whole(grid: DeviceMesh, layer: LayerPlan, module: nn.Module, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
    """Layers with the same input share its DTensor, so that one all-reduce sums the gradients of all of them."""
    first = inputs[0]
    if layer.role is Role.INPUT or isinstance(first, DTensor) or isinstance(module, nn.Embedding):
        return inputs
    return as_whole(first, grid), *inputs[1:]


def _own_memory(module: nn.Module, inputs: Any, output: Tensor) -> Tensor:
    """A copy: what to_local returns cannot be added to in place, as Falcon does."""
    return output.clone()


def _style(module: nn.Module, layer: LayerPlan) -> ParallelStyle:
    rows = layer.role is Role.INPUT or isinstance(module, nn.Embedding)
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
        return distribute_module(module, device_mesh, self._shard, None, self._whole_output if self.rows else None)

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

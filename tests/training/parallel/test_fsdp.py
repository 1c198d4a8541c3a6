"""What FSDP gathers and reduces, when, and what it keeps."""

from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp._fully_shard import _fsdp_param_group
from torch.distributed.fsdp._fully_shard._fsdp_collectives import foreach_all_gather, foreach_reduce
from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup

from gristmill.training.calibrate.measure_layers import causal_loss
from gristmill.training.config.model import ModelConfig
from gristmill.training.config.train import TrainConfig
from gristmill.training.engine.fsdp import parameter_groups
from gristmill.training.engine.local_model import build_local_model
from gristmill.training.parallel.mesh import build_mesh
from gristmill.training.run import RunConfig, build_forward_backward
from tests.support.forked_pool import ForkedPool

MODEL = ModelConfig(layers=2, width=16, heads=2, sequence_length=8)


def reductions(axes: dict[str, Any]) -> list[tuple[float | None, bool]]:
    """(divisor, whether the plain sum is forced) of each group of parameters."""
    train = TrainConfig(tokens=64, batch_tokens=64, precision="fp32", layout=axes)
    mesh = build_mesh(train.layout, MODEL.num_kv_heads, torch.device("cpu"))
    parts = build_local_model(MODEL, 50, train, mesh, seed=3, weights="meta")
    return [
        (group.gradient_divide_factor, group.force_sum_reduction_for_comms)
        for stage in parts.stages.values()
        for module in stage.modules()
        if isinstance(module, FSDPModule)
        for group in parameter_groups(module._get_fsdp_state())
    ]


def test_gradients_of_one_data_rank_are_not_divided(pool: ForkedPool) -> None:
    """torch divides by any factor that it is given, also by 1."""
    for axes in ({"tensor": 2}, {"pipeline": 2}):
        for found in pool.run(2, reductions, axes):
            assert {divisor for divisor, _ in found} == {None}


def uses_of_tensors_of_the_mesh(axes: dict[str, Any]) -> int:
    """In a step: how often a parameter's shard of the tensor ranks is taken out of a DTensor for autograd."""
    train = TrainConfig(tokens=32, batch_tokens=32, precision="fp32", layout={"micro_batch": 1} | axes)
    mesh = build_mesh(train.layout, MODEL.num_kv_heads, torch.device("cpu"))
    parts = build_local_model(MODEL, 50, train, mesh, seed=3)
    passes = build_forward_backward(parts, RunConfig(MODEL, train, 3), mesh, causal_loss())
    tokens = torch.zeros(4 // mesh.data.size, 8, dtype=torch.int64)
    with torch.profiler.profile() as profiled:
        passes.train({"tokens": tokens, "targets": tokens, "weights": torch.ones(tokens.shape)}, [1.0])
    return sum(each.count for each in profiled.key_averages() if each.key == "_ToTorchTensor")


def test_parameters_are_tensors_of_the_mesh_only_for_tensor_ranks(pool: ForkedPool) -> None:
    """DTensor's dispatch takes as long as a small layer."""
    assert pool.run(2, uses_of_tensors_of_the_mesh, {"tensor": 2})[0] > 0
    for axes in ({"data": 2}, {"pipeline": 2}):
        assert pool.run(2, uses_of_tensors_of_the_mesh, axes) == [0, 0]


@pytest.mark.parametrize("axes", [{"data": 2}, {"data": 2, "replicate": 2}], ids=str)
def test_gradients_are_reduced_by_plain_sums(axes: dict[str, Any], pool: ForkedPool) -> None:
    """Of each layer, the head and the embedding. NCCL has faster kernels for a sum than for a scaled one."""
    for found in pool.run(2, reductions, axes):
        assert found == [(1.0, True)] * (MODEL.layers + 2)


def events(axes: dict[str, Any], tied: bool = False) -> list[str]:
    """Of one step of four micro-batches a data rank: what is gathered ("+0": layer 0's weights), passed ("F0", "B0"),
    reduced ("r0") and, after each pass, how many layers' weights are unsharded ("=1")."""
    model = ModelConfig(layers=4, width=16, heads=2, sequence_length=8, tied_embeddings=tied)
    train = TrainConfig(tokens=64 * 8, batch_tokens=64, precision="fp32", layout={"micro_batch": 1} | axes)
    mesh = build_mesh(train.layout, model.num_kv_heads, torch.device("cpu"))
    parts = build_local_model(model, 50, train, mesh, seed=3)
    passes = build_forward_backward(parts, RunConfig(model, train, 3), mesh, causal_loss())
    found: list[str] = []
    stages = list(parts.stages.values())
    layers = {index: layer for stage in stages for index, layer in stage.layers.items()}
    names = {f"layers.{index}": index for index in layers} | {"head": "h", "": "e"}

    def note(kind: str, group: FSDPParamGroup) -> None:
        found.append(kind + names[group._module_fqn or ""])

    def gather(parameters: Any, *arguments: Any) -> Any:
        note("+", group_of[parameters[0]])
        return foreach_all_gather(parameters, *arguments)

    def reduce(parameters: Any, *arguments: Any) -> Any:
        note("r", group_of[parameters[0]])
        return foreach_reduce(parameters, *arguments)

    group_of = {
        parameter: group
        for stage in stages
        for module in stage.modules()
        if isinstance(module, FSDPModule)
        for group in parameter_groups(module._get_fsdp_state())
        for parameter in group.fsdp_params
    }

    def unsharded() -> str:
        groups = {group for group in group_of.values() if (group._module_fqn or "").startswith("layers")}
        return f"={sum(group.is_unsharded for group in groups)}"

    for index, layer in layers.items():
        layer.register_forward_hook(lambda *_, index=index: found.append(f"F{index}"))
        layer.register_full_backward_hook(lambda *_, index=index: found.append(f"B{index}"))
    tokens = torch.arange(8 * 8).reshape(8, 8)[: 8 // mesh.data.size] % 50
    batch = {"tokens": tokens, "targets": tokens, "weights": torch.ones(tokens.shape)}
    module = _fsdp_param_group
    with mock.patch.object(module, "foreach_all_gather", gather), mock.patch.object(module, "foreach_reduce", reduce):
        passes.train(batch, [1.0], lambda phase: found.append(unsharded()))
    return found


def test_the_next_layer_is_gathered_while_one_computes(pool: ForkedPool) -> None:
    """Forward and backward; the head's gradients are reduced before the layers', the embedding's at the end."""
    for found in pool.run(2, events, {"data": 2, "micro_batch": 4}):
        order = [each for each in found if not each.startswith("=")]
        assert order == [
            *("+e", "+0", "+1", "F0", "+2", "F1", "+3", "F2", "F3", "+h"),
            *("+3", "rh", "+2", "B3", "r3", "+1", "B2", "r2", "+0", "B1", "r1", "B0", "r0", "re"),
        ]


def test_a_tied_table_is_one_unit_with_the_head(pool: ForkedPool) -> None:
    for found in pool.run(2, events, {"data": 2, "micro_batch": 4}, True):
        assert {"+h", "rh"}.isdisjoint(found) and found.count("+e") == found.count("re") == 1


@pytest.mark.parametrize("policy", ["default", "always"])
@pytest.mark.parametrize("reduces_each", [False, True])
def test_a_pipeline_keeps_weights_and_sums_or_gives_them_up(policy: str, reduces_each: bool, pool: ForkedPool) -> None:
    """Of two layers on each of two stages, over four micro-batches."""
    axes = {"data": 2, "pipeline": 2, "fsdp_reshard_after_forward": policy, "reduce_each_micro_batch": reduces_each}
    for rank, found in enumerate(pool.run(4, events, axes)):
        first = str(rank // 2 * 2)
        assert found.count(f"F{first}") == found.count(f"B{first}") == 4
        assert found.count(f"+{first}") == (1 if policy == "default" else 2 * 4)
        assert found.count(f"r{first}") == (4 if reduces_each else 1)
        between = found[found.index(f"F{first}") :]
        most = max(int(each[1:]) for each in between if each.startswith("="))
        assert most == (2 if policy == "default" else 0)


def test_groups_of_parameters_by_either_name() -> None:
    """torch 2.11 has one group or none of a module, later versions a list."""
    group = object()
    assert parameter_groups(SimpleNamespace(_fsdp_param_groups=[group])) == [group]
    assert parameter_groups(SimpleNamespace(_fsdp_param_group=group)) == [group]
    assert parameter_groups(SimpleNamespace(_fsdp_param_group=None)) == []

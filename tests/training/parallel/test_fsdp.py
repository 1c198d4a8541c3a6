"""How FSDP reduces gradients."""

from typing import Any

import pytest
import torch
from torch.distributed.fsdp import FSDPModule

from gristmill.training.config import TrainConfig
from gristmill.training.engine.local_model import build_local_model
from gristmill.training.model_config import ModelConfig
from gristmill.training.parallel.mesh import build_mesh
from gristmill.training.testing.forked_pool import ForkedPool

MODEL = ModelConfig(layers=2, width=16, heads=2, sequence_length=8)


def reductions(axes: dict[str, Any]) -> list[tuple[float | None, bool]]:
    """(divisor, whether the plain sum is forced) of each group of parameters."""
    train = TrainConfig(tokens=64, batch_tokens=64, precision="fp32", layout=axes)
    mesh = build_mesh(train.layout, MODEL.num_kv_heads, torch.device("cpu"))
    parts = build_local_model(MODEL, 50, train, mesh, seed=3, weights="meta")
    return [
        (group.gradient_divide_factor, group.force_sum_reduction_for_comms)
        for module in parts.stages[0].modules()
        if isinstance(module, FSDPModule)
        for group in module._get_fsdp_state()._fsdp_param_groups
    ]


@pytest.mark.parametrize("axes", [{"data": 2}, {"data": 2, "replicate": 2}], ids=str)
def test_gradients_are_reduced_by_plain_sums(axes: dict[str, Any], pool: ForkedPool) -> None:
    """Of each layer and of the ends. NCCL has faster kernels for a sum than for a scaled one."""
    for found in pool.run(2, reductions, axes):
        assert found == [(1.0, True)] * (MODEL.layers + 1)

"""Our tensor parallelism equals torch's `parallelize_module` on a plain block."""

from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

from gristmill.training.config.layout import LayoutConfig
from gristmill.training.config.model import ModelConfig
from gristmill.training.model.attention.metadata import AttentionMetadata
from gristmill.training.model.init import fill, shard_like
from gristmill.training.model.layer import Layer
from gristmill.training.parallel.mesh import build_mesh
from gristmill.training.parallel.tensor import TensorAxis

SIZE, SAMPLES, TOKENS = 2, 3, 8
MODEL = ModelConfig(
    layers=1, width=16, heads=4, kv_heads=2, ffn_hidden_size=24, sequence_length=TOKENS, positions="none"
)

Outcome = tuple[Tensor, Tensor, dict[str, Tensor]]  # output, gradient by the input, gradients by name


class PlainMixer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        width, keys = MODEL.width, MODEL.num_kv_heads * MODEL.head_dim
        self.query, self.output = (nn.Linear(width, width, bias=False) for _ in range(2))
        self.key, self.value = (nn.Linear(width, keys, bias=False) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        parts = [each(x).unflatten(-1, (-1, MODEL.head_dim)) for each in (self.query, self.key, self.value)]
        query, key, value = (part.transpose(1, 2) for part in parts)
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True)
        return self.output(mixed.transpose(1, 2).flatten(2))


class PlainMlp(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate, self.up = (nn.Linear(MODEL.width, MODEL.ffn_hidden_size, bias=False) for _ in range(2))
        self.down = nn.Linear(MODEL.ffn_hidden_size, MODEL.width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.silu(self.gate(x)) * self.up(x))


class PlainBlock(nn.Module):
    """A Llama layer as a textbook has it, under the names of ours."""

    def __init__(self) -> None:
        super().__init__()
        self.mixer_norm, self.mlp_norm = (nn.RMSNorm(MODEL.width, eps=MODEL.norm_epsilon) for _ in range(2))
        self.mixer, self.mlp = PlainMixer(), PlainMlp()

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.mixer(self.mixer_norm(x))
        return x + self.mlp(self.mlp_norm(x))


def oracle_plan(sequence_parallel: bool) -> dict[str, Any]:
    into, out = (
        ("mixer.query", "mixer.key", "mixer.value", "mlp.gate", "mlp.up"),
        ("mixer.output", "mlp.down"),
    )
    lies = Shard(1) if sequence_parallel else Replicate()
    plan: dict[str, Any] = {name: ColwiseParallel() for name in into}
    plan |= {name: RowwiseParallel(output_layouts=lies) for name in out}
    if sequence_parallel:
        plan |= {name: SequenceParallel() for name in ("mixer_norm", "mlp_norm")}
        gathered = PrepareModuleInput(input_layouts=(Shard(1),), desired_input_layouts=(Replicate(),))
        plan |= {"mixer": gathered, "mlp": gathered}
    return plan


def weights() -> dict[str, Tensor]:
    torch.manual_seed(0)
    return {name: torch.randn_like(value, dtype=torch.float64) for name, value in PlainBlock().named_parameters()}


def local_tokens(x: Tensor, sequence_parallel: bool, rank: int) -> Tensor:
    return x.chunk(SIZE, dim=1)[rank].contiguous() if sequence_parallel else x


def outcome(block: Any, named: nn.Module, sequence_parallel: bool, rank: int) -> Outcome:
    generator = torch.Generator().manual_seed(1)
    shape = (SAMPLES, TOKENS, MODEL.width)
    drawn = [torch.randn(shape, generator=generator, dtype=torch.float64) for _ in range(2)]
    x, upstream = (local_tokens(each, sequence_parallel, rank) for each in drawn)
    x.requires_grad_()
    y = block(x)
    y.backward(upstream)
    gradients = {name: parameter.grad for name, parameter in named.named_parameters()}
    whole = {name: value.full_tensor() if isinstance(value, DTensor) else value for name, value in gradients.items()}
    return y.detach(), x.grad, whole


def on_this_rank(sequence_parallel: bool) -> tuple[Outcome, Outcome]:
    """(ours, the oracle's)."""
    layout = LayoutConfig(tensor=SIZE, sequence_parallel=sequence_parallel)
    mesh = build_mesh(layout, MODEL.num_kv_heads, torch.device("cpu"))
    values, rank = weights(), mesh.tensor.rank
    layer = Layer(MODEL, 0, TensorAxis(mesh, sequence_parallel))
    fill(layer, lambda name, parameter: shard_like(values[name], parameter))
    plan = AttentionMetadata(torch.arange(TOKENS).unsqueeze(0), {None: None})
    ours = outcome(lambda x: layer(x, plan)[0], layer, sequence_parallel, rank)

    block = PlainBlock().double()
    block.load_state_dict(values)
    parallelize_module(block, init_device_mesh("cpu", (SIZE,)), oracle_plan(sequence_parallel))
    return ours, outcome(block, block, sequence_parallel, rank)


@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_our_layer_is_what_torch_parallelizes(sequence_parallel: bool, pool: Any) -> None:
    block = PlainBlock().double()
    block.load_state_dict(weights())
    for rank, (ours, oracle) in enumerate(pool.run(SIZE, on_this_rank, sequence_parallel)):
        alone = outcome(block, block, False, 0)
        block.zero_grad()
        for index in (0, 1):
            np.testing.assert_allclose(ours[index], oracle[index], rtol=0, atol=1e-12 * oracle[index].abs().max())
            there = local_tokens(alone[index], sequence_parallel, rank)
            np.testing.assert_allclose(ours[index], there, rtol=0, atol=1e-12 * there.abs().max())
        assert ours[2].keys() == oracle[2].keys() == alone[2].keys()
        for name, value in oracle[2].items():
            np.testing.assert_allclose(ours[2][name], value, rtol=0, atol=1e-12 * value.abs().max(), err_msg=name)

"""Weights in 8 bits: cast once a step, gathered as bytes; the training is that of a cast in every pass."""

from contextlib import ExitStack
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor
from torch.distributed.fsdp._fully_shard import _fsdp_param_group
from torch.distributed.fsdp._fully_shard._fsdp_collectives import foreach_all_gather

from gristmill.evaluation.in_training import _unsharded_over_data
from gristmill.training.calibrate.measure_layers import causal_loss
from gristmill.training.config.model import ModelConfig
from gristmill.training.config.train import TrainConfig
from gristmill.training.engine import local_model
from gristmill.training.engine.local_model import build_local_model
from gristmill.training.model.moe import mixture
from gristmill.training.objectives.objective import Batches
from gristmill.training.optim.offload import build_optimizer
from gristmill.training.parallel import linear
from gristmill.training.parallel.mesh import Mesh, build_mesh, single_process
from gristmill.training.run import RunConfig, build_forward_backward
from gristmill.training.trainer import Trainer
from tests.support.causal_samples import causal_samples
from tests.support.forked_pool import ForkedPool
from tests.support.parity import Uneven, whole

MODEL = ModelConfig(layers=2, width=32, heads=2, kv_heads=1, ffn_hidden_size=48, sequence_length=16, biases="qkv")
STEPS, SAMPLES, VOCAB = 2, 4, 51
MATRICES = MODEL.layers * 7  # query, key, value, output, gate, up, down
ELEMENTS = MODEL.layers * (2 * 32 * 32 + 2 * 16 * 32 + 3 * 48 * 32)


def trained(
    layout: dict[str, Any], every_pass: bool = False, model: ModelConfig = MODEL
) -> tuple[list[float], dict[str, Any], list[int], int]:
    """(losses, parameters, weights that are cast in each step, bytes gathered). every_pass: without the copies."""
    distributed = torch.distributed.is_initialized() and bool(layout)
    train = TrainConfig(
        tokens=STEPS * SAMPLES * 16,
        batch_tokens=SAMPLES * 16,
        precision="bf16",
        float8=True,
        optimizer={"learning_rate": 1e-2},
        layout={"micro_batch": 1} | layout,
    )
    device, experts = torch.device("cpu"), model.has_experts
    mesh: Mesh = build_mesh(train.layout, 1, device, experts) if distributed else single_process()
    casts: list[int] = []
    gathered: list[int] = []

    def scaled(x: Tensor, largest: Tensor, dtype: torch.dtype) -> Any:
        casts[-1:] = [casts[-1] + (x.ndim == 2 and dtype == torch.float8_e4m3fn and id(x) not in activations)]
        return plain(x, largest, dtype)

    def cast(x: Tensor, dtype: torch.dtype) -> Any:
        activations.add(id(x))
        found = plain_cast(x, dtype)
        activations.discard(id(x))
        return found

    def gather(parameters: Any, group: Any, *arguments: Any) -> Any:
        result = foreach_all_gather(parameters, group, *arguments)
        gathered.append(result.all_gather_output.nbytes)
        return result

    activations: set[int] = set()
    plain, plain_cast = linear._scaled, linear._cast
    with ExitStack() as patches:
        patches.enter_context(mock.patch.object(linear, "_scaled", scaled))
        patches.enter_context(mock.patch.object(linear, "_cast", cast))
        patches.enter_context(mock.patch.object(mixture, "uses_grouped", lambda x: True))
        patches.enter_context(mock.patch.object(_fsdp_param_group, "foreach_all_gather", gather))
        if every_pass:
            patches.enter_context(mock.patch.object(local_model, "Float8Weights", lambda *_: SimpleNamespace()))
        parts = build_local_model(model, VOCAB, train, mesh, seed=3)
        passes = build_forward_backward(parts, RunConfig(model, train, 3), mesh, causal_loss())
        optimizer = build_optimizer(parts.parameters, train, model, mesh)
        batches = Batches(causal_samples(Uneven(VOCAB), False), mesh.data, mesh.device)
        trainer = Trainer(train, parts, passes, optimizer, batches, mesh)
        losses = []
        for _ in range(STEPS):
            casts.append(0)
            losses.append(trainer.step().loss)
    return losses, {name: whole(value.detach()) for name, value in parts.parameters.items()}, casts, sum(gathered)


def same(one: Any, other: Any) -> None:
    assert one[0] == other[0]
    for name, value in one[1].items():
        assert (value == other[1][name]).all(), name


def test_one_process_casts_each_weight_once_a_step() -> None:
    once, each = trained({}), trained({}, every_pass=True)
    same(once, each)
    assert once[2] == [MATRICES] * STEPS
    assert each[2] == [MATRICES * SAMPLES] * STEPS


LAYOUTS = [
    {"data": 2},
    {"tensor": 2},
    pytest.param({"data": 2, "replicate": 2, "recompute": "full"}, marks=pytest.mark.slow),
    {"data": 2, "pipeline": 2, "fsdp_reshard_after_forward": "always"},
]


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_ranks_cast_their_shards_once_a_step_and_gather_bytes(layout: dict[str, Any], pool: ForkedPool) -> None:
    ranks = TrainConfig(tokens=16, batch_tokens=16, layout=layout).layout.world_size
    for once, each in zip(pool.run(ranks, trained, layout), pool.run(ranks, trained, layout, True), strict=True):
        same(once, each)
        assert once[2] == [MATRICES // layout.get("pipeline", 1)] * STEPS
        if layout == {"data": 2}:  # a byte a number instead of two, in both passes of two micro-batches
            assert each[3] - once[3] == STEPS * 2 * 2 * ELEMENTS


def test_experts_in_eight_bits_train_alike_on_ranks_of_experts(pool: ForkedPool) -> None:
    """A row's scale is its own, so only the order of sums differs between layouts, in bf16."""
    experts = {"experts": 4, "top_k": 2, "ffn_hidden_size": 16, "balance_loss": 0.1}
    model = ModelConfig(**(MODEL.model_dump() | {"moe": experts}))
    alone, *_ = trained({}, model=model)
    for losses, *_ in pool.run(2, trained, {"data": 2, "expert": 2}, False, model):
        assert losses == pytest.approx(alone, rel=3e-3)


def evaluated(layout: dict[str, Any]) -> dict[str, tuple[Any, Any]]:
    """The weights that an evaluation during training takes, and those that are trained."""
    train = TrainConfig(tokens=128, batch_tokens=128, precision="bf16", float8=True, layout=layout)
    mesh = build_mesh(train.layout, 1, torch.device("cpu"))
    parts = build_local_model(MODEL, VOCAB, train, mesh, seed=3)
    parts.stages[0](torch.zeros(1, 16, dtype=torch.int64))
    taken = _unsharded_over_data(parts.stages[0])
    return {name: (whole(taken[name].float()), whole(value.detach())) for name, value in parts.parameters.items()}


@pytest.mark.parametrize("layout", [{"data": 2}, {"data": 2, "tensor": 2}], ids=str)
def test_an_evaluation_takes_all_bits(layout: dict[str, Any], pool: ForkedPool) -> None:
    for found in pool.run(2 * layout.get("tensor", 1), evaluated, layout):
        for name, (taken, trained_value) in found.items():
            assert (taken == torch.from_numpy(trained_value).bfloat16().float().numpy()).all(), name


def test_other_readers_see_the_weight() -> None:
    weight = torch.randn(16, 32, generator=torch.Generator().manual_seed(0)).bfloat16()
    gathered = linear.Float8Weight(linear.float8_copy(weight), torch.bfloat16)
    assert gathered.dtype == torch.bfloat16 and gathered.shape == weight.shape
    torch.testing.assert_close(gathered + 0, weight, rtol=2**-4, atol=2**-9)
    assert isinstance(gathered.detach().view(32, 16), linear.Float8Weight)

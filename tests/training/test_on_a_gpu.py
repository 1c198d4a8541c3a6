"""The parity grid on a real GPU: models, precisions, compiled layers and recorded passes against the CPU, over NCCL."""

from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from gristmill.training.config.model import ModelConfig
from gristmill.training.engine.passes import GradientAccumulation
from gristmill.training.model.attention import ring
from gristmill.training.model.moe.dispatch import Runs, grouped_linear
from gristmill.training.parallel.linear import GROUPED_CAPABILITIES
from gristmill.training.parallel.mesh import Mesh, build_mesh, single_process
from gristmill.training.trainer import Trainer
from tests.support import parity
from tests.support.parity import MODELS, Case, Outcome, outcome, relative, worst

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")

# Largest relative difference of (losses, gradients). bfloat16 has 8 bits, a rounding of 1 in 256 at each operator; a
# token near a tie may take another expert.
TOLERANCES = {"fp64": (1e-12, 1e-9), "fp32": (1e-5, 1e-3), "bf16": (1e-2, 0.5)}
COMPILED = (
    "llama",
    "gpt2",
    "bloom",
    "gemma2",
    "latent",
    "three_mixers",
    "experts",
    "hybrid_experts",
    "pr_moe",
    "tcnca",
)
RECORDED = ("llama", "bloom", "gemma2", "experts", "hybrid_experts", "tcnca", "latent", "mamba2")


class GpuCase(Case):
    """Heads that are 16 wide at least, as flex attention wants them."""

    @property
    def configs(self) -> Any:
        model, train = super().configs
        if model.head_dim >= 16:
            return model, train
        fields = model.model_dump() | {"head_width": 16}
        if model.mixer == "latent_attention":
            fields["mixers"]["latent_attention"]["value_width"] = 16
        return ModelConfig.model_validate(fields), train


@pytest.fixture(scope="module")
def group(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    torch.cuda.set_device(0)
    store = f"file://{tmp_path_factory.mktemp('nccl') / 'store'}"
    dist.init_process_group("nccl", store, rank=0, world_size=1, device_id=torch.device("cuda", 0))
    yield
    dist.destroy_process_group()


def mesh_of_group(case: Case) -> Mesh:
    model, train = case.configs
    return build_mesh(train.layout, model.num_kv_heads, torch.device("cuda", 0), model.has_experts)


def on_the_gpu(case: Case) -> Outcome:
    return outcome(case, single_process(torch.device("cuda", 0)))


@cache
def expected(model: str, documents: bool) -> Outcome:
    """In float64 on the CPU."""
    return outcome(case_of(model, "fp64", documents), single_process())


def case_of(model: str, precision: str, documents: bool = False, **changes: Any) -> Case:
    case = GpuCase({}, model, precision, documents=documents, masked=model.startswith("bert"))
    return replace(case, **changes)


def assert_same(trained: Outcome, reference: Outcome, precision: str) -> None:
    loss, gradient = TOLERANCES[precision]
    assert relative(trained.losses, reference.losses) <= loss
    assert worst(trained.gradients, reference.gradients) <= gradient


@pytest.mark.parametrize("precision", list(TOLERANCES))
@pytest.mark.parametrize("model", list(MODELS))
def test_a_gpu_trains_the_model_of_the_cpu(model: str, precision: str) -> None:
    case = case_of(model, precision)
    assert_same(on_the_gpu(case), expected(model, False), precision)


@pytest.mark.parametrize("model", ["llama", "gemma2", "tied", "experts", "hybrid_experts", "latent"])
@pytest.mark.parametrize("compiled", [False, True])
def test_the_same_over_nccl(model: str, compiled: bool, group: None) -> None:
    """With FSDP's groups of one rank."""
    case = case_of(model, "bf16", compiled=compiled)
    assert_same(outcome(case, mesh_of_group(case)), expected(model, False), "bf16")


@pytest.mark.parametrize("model", ["llama", "windows", "gemma2", "bloom", "mamba2", "tcnca", "latent"])
def test_documents_stay_apart(model: str) -> None:
    case = case_of(model, "fp32", documents=True)
    assert_same(on_the_gpu(case), expected(model, True), "fp32")


@pytest.mark.parametrize("model", COMPILED)
def test_compiled_layers_train_the_same_model(model: str) -> None:
    case = case_of(model, "bf16", compiled=True)
    assert_same(on_the_gpu(case), expected(model, False), "bf16")


class WithRecordedPasses(GpuCase):
    @property
    def configs(self) -> Any:
        model, train = super().configs
        return model, train.model_copy(update={"cuda_graphs": True})


@pytest.mark.parametrize("model", RECORDED)
def test_recorded_passes_train_the_same_model(model: str) -> None:
    """Four steps of two micro-batches: three warm-ups, then the recording is replayed."""
    with mock.patch.object(parity, "STEPS", 4):
        case = case_of(model, "bf16")
        plain = on_the_gpu(case)
        recorded = on_the_gpu(WithRecordedPasses({}, model, "bf16"))
    assert relative(recorded.losses, plain.losses) <= 1e-3


@pytest.mark.parametrize("model", [*RECORDED, "pr_moe", "bert", "random_drops"])
def test_passes_do_not_wait_for_the_gpu(model: str) -> None:
    """CUDA itself raises where the host would wait; after a first step, in which masks and workspaces are made."""
    passes = GradientAccumulation.train
    steps = 0

    def without_waiting(*arguments: Any, **named: Any) -> Tensor:
        nonlocal steps
        steps += 1
        torch.cuda.set_sync_debug_mode("error" if steps > 1 else "default")
        try:
            return passes(*arguments, **named)
        finally:
            torch.cuda.set_sync_debug_mode("default")

    case = case_of(model, "bf16")
    with mock.patch.object(GradientAccumulation, "train", without_waiting):
        on_the_gpu(case)
    assert steps == parity.STEPS


def test_a_step_waits_once() -> None:
    """When its results are read."""
    steps = Trainer.step
    waits: list[int] = []

    def counted(trainer: Trainer, *arguments: Any) -> Any:
        torch.cuda.set_sync_debug_mode("warn")
        with pytest.warns() as caught:
            report = steps(trainer, *arguments)
        torch.cuda.set_sync_debug_mode("default")
        waits.append(sum("synchroniz" in str(warning.message) for warning in caught))
        return report

    case = case_of("llama", "bf16")
    with mock.patch.object(Trainer, "step", counted):
        on_the_gpu(case)
    assert waits[-1] == 1


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=["bf16", "fp32"])
@pytest.mark.parametrize("kind", ["none", "causal", "bias"])
def test_a_tile_of_the_ring_is_that_of_matmuls(kind: str, dtype: torch.dtype) -> None:
    """Of 300 queries and keys in 4 heads on 2, and 300 keys before: results over all 600, gradients of the second half.
    bfloat16 rounds by 1 in 256, and its sums have 600 summands."""
    if kind == "causal" and dtype == torch.float32:
        pytest.skip("the flash kernel takes 16 bits")
    generator = torch.Generator().manual_seed(5)
    shapes = (2, 4, 300, 64), (2, 2, 600, 64), (2, 2, 600, 64), (2, 4, 300, 64)
    streams = [torch.randn(shape, generator=generator).to(dtype) for shape in shapes]
    hidden = {"none": torch.zeros(300, 300), "causal": torch.ones(300, 300).triu(1)}.get(kind)
    hidden = torch.rand(300, 300, generator=generator) < 0.5 if hidden is None else hidden > 0
    bias = torch.zeros(300, 300, dtype=torch.float64).masked_fill(hidden, -torch.inf).expand(2, 1, 300, 300)

    def results(device: str, precision: torch.dtype, mask: Any) -> list[Tensor]:
        query, key, value, upstream = (stream.to(device, precision) for stream in streams)
        scoring = ring.ScoreScale(0.125)
        first = ring.attend_tile(query, key[:, :, :300], value[:, :, :300], None, scoring)
        second = query, key[:, :, 300:], value[:, :, 300:]
        both = ring.merge(*first, *ring.attend_tile(*second, mask, scoring))
        tile = ring.TileResult(*second, both[0].to(precision), both[1])
        return [*both, *ring.tile_gradients(tile, upstream, mask, scoring)]

    mask = {"none": None, "causal": ring.CAUSAL_MASK}.get(kind, bias.to("cuda", torch.float32))
    tolerance = 2e-2 if dtype == torch.bfloat16 else 1e-4
    for found, wanted in zip(results("cuda", dtype, mask), results("cpu", torch.float64, bias), strict=True):
        assert ((found.cpu().double() - wanted).norm() / wanted.norm()).item() <= tolerance


def test_experts_in_eight_bits_are_those_of_the_cpu() -> None:
    """Runs of 16, 0 and 48 rows; the kernel's sums of 14 bits are below the rounding of bfloat16."""
    if torch.cuda.get_device_capability()[0] not in GROUPED_CAPABILITIES:
        pytest.skip("needs grouped 8-bit matmuls")
    generator = torch.Generator().manual_seed(6)
    x, weight, upstream = (
        torch.randn(shape, generator=generator).bfloat16() for shape in ((64, 128), (3, 96, 128), (64, 96))
    )

    def results(device: str) -> list[Tensor]:
        own = [value.to(device).requires_grad_() for value in (x, weight)]
        ends = torch.tensor([16, 16, 64], dtype=torch.int32, device=device)
        y = grouped_linear(*own, Runs(ends_E=ends), float8=True)
        y.backward(upstream.to(device))
        return [y.detach(), *(value.grad for value in own)]

    for found, wanted in zip(results("cuda"), results("cpu"), strict=True):
        assert ((found.cpu().float() - wanted.float()).norm() / wanted.float().norm()).item() <= 1e-2


def test_two_runs_are_bitwise_equal_with_deterministic_operators(tmp_path: Path) -> None:
    case = case_of("llama", "bf16")
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        first, second = (on_the_gpu(case) for _ in range(2))
    finally:
        torch.use_deterministic_algorithms(False)
    assert first.losses == second.losses
    assert all((first.parameters[name] == second.parameters[name]).all() for name in first.parameters)

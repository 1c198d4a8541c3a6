"""The chunked cross entropy by hand, on full and on sharded vocabularies."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from gristmill.training.config.layout import CHUNK_LOGITS, LayoutConfig
from gristmill.training.model import fused, loss
from gristmill.training.model.cpu_kernels import TILE, exponentials_of_rows
from gristmill.training.model.loss import Scoring, losses, token_chunks, upcast
from gristmill.training.parallel.mesh import build_mesh, single_process
from gristmill.training.parallel.tensor import TensorAxis

# With width 1, hidden state 1 and the head's rows log(1), log(2), log(5), the probabilities are 1/8, 2/8 and 5/8.
HEAD = torch.tensor([[1.0], [2.0], [5.0]], dtype=torch.float64).log()
HIDDEN = torch.ones(1, 2, 1, dtype=torch.float64)
TARGETS = torch.tensor([[2, 0]])


def scoring(tensor: TensorAxis | None = None, **fields: Any) -> Scoring:
    return Scoring(tensor or TensorAxis(single_process(), sequence_parallel=False), vocab_size=3, **fields)


def test_loss_of_three_known_probabilities() -> None:
    found = losses(scoring(), HIDDEN, HEAD, TARGETS, torch.ones(1, 2))
    assert found.tolist()[0] == pytest.approx([math.log(8 / 5) + math.log(8), 0])


def test_weights_count_tokens_in_part_or_not_at_all() -> None:
    found = losses(scoring(), HIDDEN, HEAD, TARGETS, torch.tensor([[0.5, 0.0]]))
    assert found.tolist()[0] == pytest.approx([math.log(8 / 5) / 2, 0])


def test_z_loss_is_a_column_of_its_own() -> None:
    nll, z_loss = losses(scoring(z_loss=0.1), HIDDEN, HEAD, TARGETS, torch.ones(1, 2)).tolist()[0]
    assert nll == pytest.approx(math.log(8 / 5) + math.log(8))
    assert z_loss == pytest.approx(2 * 0.1 * math.log(8) ** 2)  # Z = 1 + 2 + 5 at both tokens


def test_scale_and_softcap_shape_the_logits() -> None:
    raw = torch.tensor([-4.0, 0.0, 4.0])
    assert scoring(scale=0.5).shaped(raw).tolist() == [-2, 0, 2]
    assert scoring(softcap=2.0).shaped(raw).tolist() == pytest.approx([-2 * math.tanh(2), 0, 2 * math.tanh(2)])


def test_gradient_is_probability_minus_one_at_the_target() -> None:
    head = HEAD.clone().requires_grad_()
    losses(scoring(), HIDDEN[:, :1], head, TARGETS[:, :1], torch.ones(1, 1)).sum(dim=0)[0].backward()
    assert head.grad.flatten().tolist() == pytest.approx([1 / 8, 2 / 8, 5 / 8 - 1])


def test_chunks_cover_all_tokens_with_sizes_that_differ_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(CHUNK_LOGITS["cpu"], HEAD.element_size(), 12)  # 4 rows of a vocabulary of 3
    assert token_chunks(10, HEAD) == [slice(0, 3), slice(3, 6), slice(6, 10)]


@pytest.mark.parametrize("threads", [1, 2])
def test_exponentials_of_bfloat16_rows(threads: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """More logits than a tile has, of both signs and far apart; against float64, to the rounding of bfloat16."""
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
    generator = torch.Generator().manual_seed(0)
    raw_NV = torch.randn(3, 2 * TILE + 77, generator=generator).mul(20).bfloat16()
    raw_NV[1] = -raw_NV[1].abs() - 1  # all negative
    raw_NV[2, ::7], raw_NV[2, 3] = 0, -math.inf
    exact_NV = raw_NV.double()
    highest_N, total_N = exponentials_of_rows(raw_NV)
    expected_NV = (exact_NV - exact_NV.amax(dim=1, keepdim=True)).exp()
    assert torch.equal(highest_N.double(), exact_NV.amax(dim=1))
    torch.testing.assert_close(total_N.double(), expected_NV.sum(dim=1), rtol=2e-6, atol=0)
    torch.testing.assert_close(raw_NV.double(), expected_NV, rtol=2**-8, atol=1e-37)


@pytest.mark.parametrize("row", [[1.0, math.nan], [1.0, -math.nan], [1.0, math.inf], [-math.inf, -math.inf]])
def test_a_row_without_a_softmax_becomes_no_number(row: list[float]) -> None:
    raw_NV = torch.tensor([[1.0, 1.0], row], dtype=torch.bfloat16)
    _, total_N = exponentials_of_rows(raw_NV)
    assert total_N[0] == 2 and total_N[1].isnan() and raw_NV[1].isnan().all() and not raw_NV[0].isnan().any()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_statistics_are_float32_or_better(dtype: torch.dtype) -> None:
    assert upcast(torch.ones(1, dtype=dtype)).dtype == torch.float32
    assert upcast(torch.ones(1, dtype=torch.float64)).dtype == torch.float64


def loss_of_this_rank() -> tuple[Tensor, Tensor]:
    """(losses, gradient of this rank's rows of the head): rank 0 holds ids 0 and 1, rank 1 id 2."""
    mesh = build_mesh(LayoutConfig(tensor=2), 2, torch.device("cpu"))
    tensor = TensorAxis(mesh, sequence_parallel=False)
    head = (HEAD[:2] if mesh.tensor.rank == 0 else HEAD[2:]).clone().requires_grad_()
    found = losses(scoring(tensor), HIDDEN, head, TARGETS, torch.ones(1, 2))
    found[:, 0].sum().backward()
    return found.detach(), head.grad


def test_a_sharded_vocabulary_gives_the_same_loss_and_gradient(pool: Any) -> None:
    ranks = pool.run(2, loss_of_this_rank)
    for found, _ in ranks:
        assert found.tolist()[0] == pytest.approx([math.log(8 / 5) + math.log(8), 0])
    gradient = [value for _, gradient in ranks for value in gradient.flatten().tolist()]
    assert gradient == pytest.approx([2 / 8 - 1, 4 / 8, 10 / 8 - 1])  # targets 2 and 0


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("fields", [{}, {"softcap": 2.0, "scale": 0.5, "z_loss": 0.1}], ids=str)
def test_the_kernels_of_a_gpu_compute_the_same(
    dtype: torch.dtype, fields: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before they are compiled: what a compiler makes of them is held against the CPU in test_on_a_gpu.py."""
    generator = torch.Generator().manual_seed(0)
    hidden, head = (torch.randn(shape, generator=generator).to(dtype) for shape in ((2, 5, 8), (11, 8)))
    targets, weights = torch.randint(0, 11, (2, 5), generator=generator), torch.rand(2, 5, generator=generator)
    monkeypatch.setattr(fused, "compiled", lambda function, tuned: function)
    outcomes = []
    for on_gpu in (False, True):
        monkeypatch.setattr(loss, "fuses", lambda raw, on_gpu=on_gpu: on_gpu)
        parts = hidden.clone().requires_grad_(), head.clone().requires_grad_()
        sums = losses(Scoring(scoring().tensor, 11, **fields), *parts, targets, weights)
        sums.sum().backward()
        outcomes.append([sums.detach(), *(part.grad for part in parts)])
    precise = {torch.float64: 1e-12, torch.float32: 1e-6}.get(dtype, 1e-2)
    for plain, other in zip(*outcomes, strict=True):
        torch.testing.assert_close(other, plain, rtol=precise, atol=precise)

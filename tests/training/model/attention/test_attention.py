"""Blockwise causal attention equals torch's."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from gristmill.training.model.attention.attention import BLOCK, MAX_SCORES, causal_blocks, fits_blocks


def outcome(attend, parts: list[Tensor], upstream: Tensor) -> list[Tensor]:
    leaves = [part.clone().requires_grad_() for part in parts]
    y = attend(*leaves)
    return [y.detach(), *torch.autograd.grad(y, leaves, upstream)]


@pytest.mark.parametrize("tokens", [1, BLOCK, BLOCK + 1, 150])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-12), (torch.float32, 1e-5)])
def test_blocks_are_torchs_attention(tokens: int, dtype: torch.dtype, tolerance: float) -> None:
    generator = torch.Generator().manual_seed(0)
    drawn = [torch.randn(2, 3, tokens, 8, generator=generator, dtype=torch.float64).to(dtype) for _ in range(4)]
    found = outcome(lambda *parts: causal_blocks(*parts, scale=0.3), drawn[:3], drawn[3])
    expected = outcome(
        lambda *parts: F.scaled_dot_product_attention(*parts, is_causal=True, scale=0.3), drawn[:3], drawn[3]
    )
    for own, other in zip(found, expected, strict=True):
        torch.testing.assert_close(own, other, rtol=0, atol=tolerance)


def test_bfloat16_is_as_close_to_the_truth_as_torchs() -> None:
    generator = torch.Generator().manual_seed(0)
    drawn = [torch.randn(2, 3, 150, 16, generator=generator).bfloat16() for _ in range(4)]
    exact = outcome(
        lambda *parts: F.scaled_dot_product_attention(*parts, is_causal=True),
        [part.double() for part in drawn[:3]],
        drawn[3].double(),
    )
    own = outcome(lambda *parts: causal_blocks(*parts, scale=0.25), drawn[:3], drawn[3])
    other = outcome(lambda *parts: F.scaled_dot_product_attention(*parts, is_causal=True), drawn[:3], drawn[3])
    for truth, ours, theirs in zip(exact, own, other, strict=True):
        assert (ours - truth).square().mean() < 2 * (theirs - truth).square().mean()


def test_blocks_are_for_training_on_the_cpu() -> None:
    query = torch.empty(2, 3, 150, 8, requires_grad=True)
    assert fits_blocks(query)
    assert not fits_blocks(query.detach())
    with torch.no_grad():
        assert not fits_blocks(query)
    tokens = int(MAX_SCORES**0.5)
    assert not fits_blocks(torch.empty(2, 1, tokens, 1, requires_grad=True))

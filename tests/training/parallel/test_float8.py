"""The 8-bit linear layer computes the product to the precision of its numbers, forward and backward."""

import pytest
import torch

from gristmill.data_pipeline.errors import RecipeError
from gristmill.training.parallel.float8 import check_float8, float8_linear


def relative_error(found: torch.Tensor, expected: torch.Tensor) -> float:
    return ((found.float() - expected).norm() / expected.norm()).item()


def test_products_and_gradients_are_right_to_eight_bits() -> None:
    generator = torch.Generator().manual_seed(0)
    x, weight, gradient = (torch.randn(shape, generator=generator) for shape in ((2, 16, 64), (32, 64), (2, 16, 32)))
    x8, weight8 = (value.bfloat16().requires_grad_() for value in (x, weight))
    y = float8_linear(x8, weight8)
    y.backward(gradient.bfloat16())
    assert relative_error(y.detach(), x @ weight.T) < 0.05  # e4m3 has 3 bits after the point: 2^-4 at most an element
    assert relative_error(x8.grad, gradient @ weight) < 0.1  # e5m2 has 2
    assert relative_error(weight8.grad, torch.einsum("btf,btd->fd", gradient, x)) < 0.1


def test_devices_without_it_are_refused() -> None:
    with pytest.raises(RecipeError, match=r"needs a GPU with 8-bit matmuls .*, not cpu; set it false"):
        check_float8(torch.device("cpu"))

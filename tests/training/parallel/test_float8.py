"""The float8 linear layer equals the exact product within float8 precision, forward and backward."""

import pytest
import torch

from gristmill.foundation.errors import RecipeError
from gristmill.training.config import TrainConfig
from gristmill.training.model_config import ModelConfig
from gristmill.training.parallel.float8 import check_float8, float8_linear
from gristmill.training.parallel.layout import objections


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


def test_sizes_that_do_not_fit_are_named() -> None:
    model = ModelConfig(layers=2, width=64, heads=4, hidden=72, sequence_length=24)
    train = TrainConfig(tokens=48, batch_tokens=24, float8=True, layout={"tensor": 2})
    assert list(objections(model, train, 64, 2)) == [
        "float8 wants tokens of a micro-batch on a rank (24) to be a multiple of 16; change it, or set float8: false",
        "float8 wants hidden width on a tensor rank (36) to be a multiple of 16; change it, or set float8: false",
    ]
    with pytest.raises(ValueError, match="float8 products come out in bf16, not fp32; set precision: bf16"):
        TrainConfig(tokens=48, batch_tokens=24, float8=True, precision="fp32")


def test_devices_without_it_are_refused() -> None:
    with pytest.raises(RecipeError, match=r"needs a GPU with 8-bit matmuls .*, not cpu; set it false"):
        check_float8(torch.device("cpu"))

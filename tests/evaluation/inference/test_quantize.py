"""Quantized linear layers: rounding by hand, memory, outliers, and what a model says with them."""

import pytest
import torch

from gristmill.evaluation.inference.quantize import (
    Int4Linear,
    Int8Linear,
    SmoothQuantLinear,
    largest_inputs,
    own_text,
    quantize,
)
from gristmill.training.checkpoint.checkpoint import load_model


def test_a_row_of_int8_by_hand():
    """Largest magnitude 2.54, so one step is 0.02: 1.0 is 50 steps, -0.03 rounds to -2 of them (half to even)."""
    layer = Int8Linear(torch.tensor([[2.54, 1.0, -0.03]], dtype=torch.float64), None)
    assert layer.weight.tolist() == [[127, 50, -2]]
    assert torch.allclose(layer(torch.eye(3, dtype=torch.float64))[:, 0], torch.tensor([2.54, 1.0, -0.04]).double())


def test_a_row_of_int4_by_hand():
    """From -1 to 2 in 15 steps of 0.2: 0.07 is 5.35 steps above -1, rounded to 5, which stands for 0. Two numbers share
    a byte, the first in its low half: 0 + 16 x 5 and 15 + 16 x 10."""
    layer = Int4Linear(torch.tensor([[-1.0, 0.07, 2.0, 1.0]], dtype=torch.float64), None)
    assert layer.packed[0, :2].tolist() == [80, 175]
    assert torch.allclose(layer.weight(torch.float64), torch.tensor([[-1.0, 0.0, 2.0, 1.0]]).double())


@pytest.mark.parametrize("inputs", [128, 300])
def test_no_weight_moves_by_more_than_half_a_step(inputs):
    weight = torch.randn(64, inputs, generator=torch.Generator().manual_seed(0))
    eight, four = Int8Linear(weight, None), Int4Linear(weight, None)
    assert ((eight.weight * eight.scale[:, None] - weight).abs() <= eight.scale[:, None] * 0.501).all()
    steps = four.scale.expand(-1, -1, 128).flatten(1)[:, :inputs]
    assert ((four.weight(torch.float32) - weight).abs() <= steps * 0.501).all()


def test_four_bits_take_four_and_a_half_bits_a_weight():
    layer = Int4Linear(torch.randn(64, 512), None)
    assert sum(buffer.nbytes for buffer in layer.buffers()) * 8 == 4.5 * 64 * 512


def test_smoothquant_survives_an_outlier_that_plain_rounding_does_not():
    """One input is a thousand times as large as the others, as in large models: without smoothing it takes all steps of
    a token's scale."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(40, 64, generator=generator)
    x[:, 5] *= 1000
    weight = torch.randn(32, 64, generator=generator)
    weight[:, 5] /= 1000
    exact = x @ weight.T
    smooth = SmoothQuantLinear(weight, None, x.abs().amax(dim=0))
    plain = SmoothQuantLinear(weight, None, weight.abs().amax(dim=0))  # smoothing of 1
    assert torch.allclose(plain.smoothing, torch.ones(64))
    errors = [(layer(x) - exact).norm() / exact.norm() for layer in (smooth, plain)]
    assert errors[0] < 0.02 and errors[1] > 0.3


def test_the_integer_product_is_exact():
    """Inputs and weights that are multiples of their scales lose nothing."""
    x = torch.tensor([[127.0, -3.0, 50.0]])
    layer = SmoothQuantLinear(torch.tensor([[127.0, 2.0, -7.0]]), torch.tensor([0.5]), torch.tensor([127.0, 2.0, 7.0]))
    assert layer(x).item() == 127 * 127 - 6 - 350 + 0.5


@pytest.mark.parametrize(("weights", "bound"), [("int8", 0.05), ("int4", 0.3), ("smoothquant", 0.1)])
def test_a_quantized_model_says_nearly_the_same(weights, bound, random_checkpoint):
    for family in ("llama", "gpt2"):
        model, _ = load_model(random_checkpoint(family, name=family))
        tokens = torch.randint(0, 257, (2, 30), generator=torch.Generator().manual_seed(0))
        with torch.inference_mode():
            before = model(tokens).log_softmax(-1)
            quantize(model, weights, first_token=256)
            after = model(tokens).log_softmax(-1)
        assert not torch.equal(before, after)
        assert (before - after).abs().mean() < bound


def test_calibration_texts_are_the_models_own_and_the_same_each_time(random_checkpoint):
    model, _ = load_model(random_checkpoint())
    first = own_text(model, 256)
    assert torch.equal(first, own_text(model, 256)) and (first[:, 0] == 256).all() and len(first.unique()) > 50
    largest = largest_inputs(model, first)
    assert all(value.shape == (linear.weight.shape[1],) and (value > 0).all() for linear, value in largest.items())

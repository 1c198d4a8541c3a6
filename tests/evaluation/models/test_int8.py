"""Weight-only int8 quantization: rounding error and memory."""

import torch

from gristmill.evaluation.models.int8 import Int8Linear, quantize_int8
from gristmill.training.checkpoint import load_model


def test_a_row_by_hand():
    """Largest magnitude 2.54, so one step is 0.02: 1.0 is 50 steps, -0.03 rounds to -2 of them (half to even)."""
    layer = Int8Linear(torch.tensor([[2.54, 1.0, -0.03]], dtype=torch.float64), None)
    assert layer.weight.tolist() == [[127, 50, -2]]
    assert torch.allclose(layer(torch.eye(3, dtype=torch.float64))[:, 0], torch.tensor([2.54, 1.0, -0.04]).double())


def test_no_weight_moves_by_more_than_half_a_step():
    weight = torch.randn(64, 32, generator=torch.Generator().manual_seed(0))
    layer = Int8Linear(weight, None)
    assert ((layer.weight * layer.scale[:, None] - weight).abs() <= layer.scale[:, None] * 0.501).all()


def test_a_quantised_model_says_nearly_the_same(random_checkpoint):
    for family in ("llama", "gpt2"):
        model, _ = load_model(random_checkpoint(family, name=family))
        tokens = torch.randint(0, 257, (2, 30), generator=torch.Generator().manual_seed(0))
        with torch.inference_mode():
            before = model(tokens).log_softmax(-1)
            quantize_int8(model)
            after = model(tokens).log_softmax(-1)
        assert not torch.equal(before, after)
        assert (before - after).abs().mean() < 0.05

"""The causal convolution in its two forms."""

import pytest
import torch

from gristmill.training.model.ssm.convolution import _convolve, sum_of_taps


@pytest.mark.parametrize(("kernel", "dilation"), [(4, 1), (3, 2)])
def test_taps_sum_to_the_convolution(kernel: int, dilation: int) -> None:
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randn(2, 9 + (kernel - 1) * dilation, 5, generator=generator, dtype=torch.float64)
    weight, bias = (torch.randn(shape, generator=generator, dtype=torch.float64) for shape in ((5, kernel), (5,)))
    torch.testing.assert_close(
        sum_of_taps(tokens, weight, bias, dilation, None), _convolve(tokens, weight, bias, dilation)
    )


def test_taps_stop_at_the_begin_of_a_document() -> None:
    tokens, weight = torch.ones(1, 5, 1), torch.ones(1, 3)  # two tokens before the first
    documents = torch.tensor([[0, 1, 1]])
    sums = sum_of_taps(tokens, weight, torch.zeros(1), 1, documents)
    assert sums.flatten().tolist() == [3, 1, 2]

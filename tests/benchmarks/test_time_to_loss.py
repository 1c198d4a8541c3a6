"""Time to loss from curves made by hand; the peers' recipes begin and fall as their sources say."""

import math

import pytest
import torch
from peers import nanochat, nanogpt
from recipes import Curve, interval, speed_up, time_speed_up


def test_flops_to_a_loss_are_interpolated_in_logarithms() -> None:
    curve = Curve((1e12, 4e12, 16e12), (3.0, 2.0, 1.5))
    assert curve.flops_to(2.5) == pytest.approx(2e12)
    assert curve.flops_to(3.5) == 1e12
    assert curve.flops_to(1.4) == math.inf


def test_speed_up_is_above_one_for_the_faster_and_below_for_the_slower() -> None:
    fast, slow = Curve((1e12, 4e12), (2.0, 1.0)), Curve((1e12, 4e12), (3.0, 2.0))
    assert speed_up(fast, slow) == pytest.approx(4)
    assert speed_up(slow, fast) == pytest.approx(1 / 4)
    assert speed_up(fast, fast) == pytest.approx(1)


def test_time_goes_with_the_flops_of_a_run() -> None:
    ours, peer = Curve((1e12, 4e12), (2.0, 1.0), seconds=8.0), Curve((1e12, 4e12), (3.0, 2.0), seconds=16.0)
    assert time_speed_up(ours, peer) == pytest.approx(2 * speed_up(ours, peer))


def test_the_interval_is_students() -> None:
    mean, low, high = interval([1.0, 1.1, 1.21])
    assert mean == pytest.approx(1.1)
    assert math.log(high / mean) == pytest.approx(4.303 * math.log(1.1) / math.sqrt(3))
    assert low * high == pytest.approx(mean**2)


def test_the_peers_begin_as_their_sources_say() -> None:
    torch.manual_seed(1)
    tokens = torch.randint(0, 64, (2, 16))
    chat, gpt = nanochat.NanoChat(2, 64, 2, 16, 64), nanogpt.NanoGPT(2, 64, 1, 16, 64)
    nanogpt.initialize(gpt)
    targets = tokens.roll(1, dims=1)
    assert chat(tokens, targets).item() == pytest.approx(math.log(64))  # its head is zero
    assert gpt(tokens, targets).item() == pytest.approx(math.log(64), abs=0.1)
    assert gpt.blocks[0].down.weight.std().item() == pytest.approx(0.01, rel=0.05)
    assert [nanochat.rate_factor(share) for share in (0.0, 0.8, 0.9)] == pytest.approx([1, 1, 0.5])
    assert nanogpt.rate_factor(0.0) == 0 and nanogpt.rate_factor(1.0) == pytest.approx(0.1)


def test_nanochats_muon_steps_by_orthogonal_matrices() -> None:
    weight = torch.nn.Parameter(torch.zeros(8, 4))
    weight.grad = torch.randn(8, 4, generator=torch.Generator().manual_seed(1))
    nanochat.Muon([weight], 0.02).step()
    singular = torch.linalg.svdvals(weight.detach()) / 0.02 / 2**0.5
    assert singular.min() > 0.5 and singular.max() < 1.3

"""Time to loss from curves made by hand; the peers' recipes begin and fall as their sources say."""

import math

import numpy as np
import pytest
import torch
from peers import nanochat, nanogpt
from recipes import CHANGES, NAMED_CHANGES, SEQUENCE_LENGTH, Curve, Windows, interval, speed_up, time_speed_up
from support.muon_variants import MuonVariant, VariantMuon, orthogonal, replaced_muon

from gristmill.training.config.model import ModelConfig
from gristmill.training.config.train import OptimizerConfig
from gristmill.training.optim import offload
from gristmill.training.optim.muon import Muon

MODEL = ModelConfig(layers=1, width=8, heads=1)


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


def updated(kind: type[Muon], **fields: float) -> torch.Tensor:
    """A matrix of a layer after three updates; the first gradient is zero, as that of a layer with a zero output."""
    start = torch.randn(12, 8, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    weight = torch.nn.Parameter(start.clone())
    optimizer = kind({"layers.0.mlp.up.weight": weight}, OptimizerConfig(name="muon", **fields), MODEL)
    for step in range(3):
        draw = torch.Generator().manual_seed(step)
        weight.grad = min(step, 1) * torch.randn(12, 8, generator=draw, dtype=torch.float64)
        optimizer.step(1.0)
    assert optimizer.matrices and weight.isfinite().all()
    return weight.detach() - start


def variant(**fields: object) -> type[VariantMuon]:
    return type("Variant", (VariantMuon,), {"variant": MuonVariant(**fields), "steps": 4})


def test_a_variant_without_differences_is_the_engines_muon() -> None:
    torch.testing.assert_close(updated(variant()), updated(Muon), rtol=1e-12, atol=1e-14)


def test_variants_of_muon_change_what_they_say() -> None:
    plain = updated(Muon, weight_decay=0.0)
    for moment in ("rows", "elements"):
        made = updated(variant(moment=moment), weight_decay=0.0)
        assert not torch.allclose(made, plain) and 0.5 < made.norm() / plain.norm() < 2
    longer = updated(variant(scale="longer_side"), weight_decay=0.0)
    torch.testing.assert_close(longer / plain, torch.full_like(plain, 0.2 * 12**0.5 / 1.5**0.5))
    falling = updated(variant(decay_to_zero=True), weight_decay=1.0) - plain
    whole = updated(Muon, weight_decay=1.0) - plain
    assert 0.7 < falling.norm() / whole.norm() < 0.8  # 1, 3/4 and 1/2 of it in three of four steps
    cautious = updated(variant(cautious=True), weight_decay=1.0) - plain
    assert 0.2 < cautious.norm() / whole.norm() < 0.9


def test_the_polynomials_of_polar_express_end_nearer_at_one() -> None:
    """Of singular values from 0.01 to 1; the quintic leaves them between 0.7 and 1.2."""
    left, _ = torch.linalg.qr(torch.randn(16, 16, generator=torch.Generator().manual_seed(1), dtype=torch.float64))
    matrix = left * torch.logspace(-2, 0, 16, dtype=torch.float64)
    off = [
        (torch.linalg.svdvals(orthogonal(matrix, name)) - 1).abs().max() for name in ("polar_express", "newton_schulz")
    ]
    assert off[0] < 0.15 and off[0] < off[1] < 0.35


def test_runs_have_the_variant_only_inside() -> None:
    with replaced_muon(MuonVariant(moment="rows"), 10):
        assert issubclass(offload.Muon, VariantMuon)
    assert offload.Muon is Muon
    for changes in (CHANGES | NAMED_CHANGES).values():
        MuonVariant(**changes.get("muon", {}))


def test_masked_samples_have_positions_by_document() -> None:
    """Ends behind the tokens 2 and 5 of a sample: nothing is learned there, and positions restart behind them."""
    tokens = np.ones(SEQUENCE_LENGTH + 1, np.int64)
    tokens[[2, 5]] = 0
    plain, masked = (Windows(tokens, None, 0, mask).batch(range(1)) for mask in (False, True))
    assert set(plain) == {"tokens", "targets", "weights"}
    assert masked["positions"][0, :8].tolist() == [0, 1, 2, 0, 1, 2, 0, 1]
    assert masked["documents"][0, :8].tolist() == [0, 0, 0, 1, 1, 1, 2, 2]
    for batch in (plain, masked):
        assert np.flatnonzero(batch["weights"][0] == 0).tolist() == [2, 5]
    assert Windows(tokens, None).batch(range(1))["weights"].all()

"""Addresses planned for known lifetimes: by hand, by exhaustive search, and on the trace of a layer."""

from itertools import permutations

import numpy as np
import pytest
import torch
from support.address_plan import (
    Block,
    best_plan,
    caching_peak,
    greedy_plan,
    layer_trace,
    live_peak,
    plan_by_layer,
    recorded,
    replay,
)

from gristmill.training.config.model import ModelConfig
from gristmill.training.model.layer import Layer
from gristmill.training.model.transformer import Transformer


def random_blocks(seed: int, count: int) -> list[Block]:
    generator = np.random.default_rng(seed)
    starts, lives, sizes = (
        generator.integers(0, 12, count),
        generator.integers(1, 7, count),
        generator.integers(1, 30, count),
    )
    return [Block(int(s), int(s + n), int(z)) for s, n, z in zip(starts, lives, sizes, strict=True)]


def first_fit(blocks: list[Block], order: tuple[int, ...]) -> int:
    addresses: dict[int, int] = {}
    for place in order:
        size, others = blocks[place].size, [other for other in addresses if blocks[other].meets(blocks[place])]
        taken = [(addresses[other], addresses[other] + blocks[other].size) for other in others]
        addresses[place] = min(
            address
            for address in (0, *(end for _, end in taken))
            if all(address + size <= start or address >= end for start, end in taken)
        )
    return max(addresses[place] + blocks[place].size for place in addresses)


def test_by_hand() -> None:
    """a and b live together, then b and c, then c and d: a at 0, b over it, c in a's place, d in b's."""
    blocks = [Block(0, 2, 4), Block(1, 4, 4), Block(3, 6, 4), Block(5, 8, 4)]
    plan = best_plan(blocks)
    assert plan.peak == live_peak(blocks) == replay(blocks, plan.addresses) == 8
    with pytest.raises(ValueError, match="blocks 0 and 1 overlap at address 2"):
        replay(blocks, [0, 2, 8, 12])


@pytest.mark.parametrize("seed", range(8))
def test_the_programme_is_the_best_of_all_orders(seed: int) -> None:
    """Some order of first-fit placement is optimal, so all 720 orders of six blocks find the best peak."""
    blocks = random_blocks(seed, 6)
    best = min(first_fit(blocks, order) for order in permutations(range(6)))
    plan = best_plan(blocks)
    assert plan.optimal and plan.peak == best == replay(blocks, plan.addresses)


def test_the_programme_is_below_the_greedy_plan() -> None:
    found = [
        (best_plan(blocks), greedy_plan(blocks), blocks) for blocks in (random_blocks(s, 12) for s in range(30, 42))
    ]
    for plan, greedy, blocks in found:
        assert live_peak(blocks) <= replay(blocks, plan.addresses) == plan.peak <= greedy.peak
        assert replay(blocks, greedy.addresses) == greedy.peak
    assert any(plan.peak < greedy.peak for plan, greedy, _ in found)


def test_too_many_pairs_are_placed_greedily(monkeypatch: pytest.MonkeyPatch) -> None:
    blocks = next(b for b in (random_blocks(s, 12) for s in range(30, 42)) if best_plan(b).peak < greedy_plan(b).peak)
    monkeypatch.setattr("support.address_plan.MAX_PAIRS", 1)
    assert best_plan(blocks) == greedy_plan(blocks)


def test_the_caching_allocator_by_hand() -> None:
    mib = 2**20
    assert caching_peak([Block(0, 1, 100)]) == 2 * mib  # a small segment
    assert caching_peak([Block(0, 1, 3 * mib), Block(1, 2, 3 * mib)]) == 20 * mib  # freed and taken again
    assert caching_peak([Block(0, 2, 11 * mib), Block(1, 3, 12 * mib)]) == 24 * mib  # 12 for each, rounded to 2
    # 12 MiB leave a hole that 13 do not fit in
    assert caching_peak([Block(0, 1, 12 * mib), Block(1, 2, 13 * mib)]) == 12 * mib + 14 * mib


def test_recorded_by_hand() -> None:
    x = torch.zeros(4, 8)
    with recorded() as blocks:
        y = x + 1
        z = y * 2
        del y
        w = z.view(-1)  # no memory of its own
    assert [block.size for block in blocks()] == [128, 128]
    first, second = blocks()
    assert first.meets(second) and first.end < second.end and w is not z


def layer() -> tuple[Layer, torch.Tensor, object]:
    model = Transformer(
        ModelConfig(layers=1, width=64, heads=4, sequence_length=64, ffn_hidden_size=256, mlp="gelu"), 51
    )
    generator = torch.Generator().manual_seed(0)
    model = model.to_empty(device="cpu")
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.1)
    x = torch.randn(2, 64, 64, generator=generator)
    return model.layers["0"], x, model.attention_metadata(torch.zeros(2, 64, dtype=torch.long))


def test_the_trace_of_a_layer_is_placed_without_overlap() -> None:
    one, x, metadata = layer()
    blocks = layer_trace(lambda x: one(x, metadata)[0], x)
    assert max(block.size for block in blocks) == 2 * 64 * 256 * 4  # the MLP's inner width
    plan = best_plan(blocks)
    assert live_peak(blocks) <= replay(blocks, plan.addresses) == plan.peak <= greedy_plan(blocks).peak
    assert plan.peak <= caching_peak(blocks)
    # three layers, one after another: each block of a layer at the same place
    end = max(block.end for block in blocks)
    layers = [[Block(b.start + end * n, b.end + end * n, b.size) for b in blocks] for n in range(3)]
    addresses, whole = plan_by_layer(layers)
    together = [block for part in layers for block in part]
    assert replay(together, [address for part in addresses for address in part]) == whole.peak == plan.peak

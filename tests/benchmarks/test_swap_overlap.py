"""Copies of activations beside the computation: by hand, and the schedule decisions of MEMO."""

import pytest
from support.swap_overlap import SwappedPass, swapped_pass

from gristmill.training.planner.activations import SwapBytes, hidden_from_tokens, solve_share

RATE, LINK, WIDTH, RANKS, LAYERS = 156e12, 12e9, 4096, 8, 32  # half of an A800's peak; 7B on 8 tensor ranks


def forward_seconds(tokens: int) -> float:
    return (24 * tokens * WIDTH**2 + 2 * tokens**2 * WIDTH) / RANKS / RATE


def layer_bytes(tokens: int) -> SwapBytes:
    """16 numbers a token and width in 16 bits, of which the layer's input and the attention's output are two."""
    number = tokens * WIDTH * 2 / RANKS
    return SwapBytes(2 * number, 14 * number)


def simulated(tokens: int, share: float) -> SwappedPass:
    """What is not swapped is recomputed, but for attention."""
    forward = forward_seconds(tokens)
    again = (1 - share) * 24 * tokens * WIDTH**2 / RANKS / RATE
    return swapped_pass(LAYERS, 2, forward, again, layer_bytes(tokens).of_share(share) / LINK)


def test_three_layers_by_hand() -> None:
    """Forward 1 s, backward 2 s, copies of 1.5 s, two layers swapped. Forward: 0-1, 1-2; the third waits for the first
    layer's copy, 1-2.5, and ends at 3.5. The copy of the second takes 2.5-4, its copy back 4-5.5, beside the third
    layer's backward pass, 3.5-5.5; then 5.5-7.5, the first layer's copy beside it, and 7.5-9.5: 9 s and 0.5."""
    one = SwappedPass(3, 1, 1.0, 2.0, 1.5)
    assert one.seconds == pytest.approx(9.5) and one.exposed == pytest.approx(0.5)
    assert SwappedPass(3, 1, 1.0, 2.0, 0.9).exposed == pytest.approx(0)


def test_a_full_swap_hides_from_192k_tokens() -> None:
    """The paper: full overlap from 192K tokens at tensor 8; of multiples of 64K the simulation says the same."""
    shown = {kilo: simulated(kilo * 1024, 1.0).exposed for kilo in range(64, 385, 64)}
    assert min(kilo for kilo, seconds in shown.items() if seconds < 1e-9) == 192
    assert shown[64] > shown[128] > 1e-3
    edge = hidden_from_tokens(WIDTH, 2, RATE / 1e12, LINK / 1e9)
    assert simulated(int(1.01 * edge), 1.0).exposed < 1e-9 < simulated(int(0.99 * edge), 1.0).exposed


@pytest.mark.parametrize("kilo", [64, 96, 128, 144])
def test_the_planned_share_is_the_largest_that_hides(kilo: int) -> None:
    tokens = kilo * 1024
    plan = solve_share(layer_bytes(tokens), LAYERS - 2, forward_seconds(tokens), LINK, 1e15)
    assert plan.bound == "link" and 0 < plan.share < 1
    assert simulated(tokens, plan.share).exposed < 1e-6
    assert simulated(tokens, plan.share + 0.05).exposed > 1e-3


@pytest.mark.parametrize("kilo", [64, 128, 256])
def test_the_planned_share_beats_recomputing_all_and_a_swap_that_shows(kilo: int) -> None:
    """Full recomputation computes attention again; a full swap of short samples waits for the link."""
    tokens = kilo * 1024
    forward = forward_seconds(tokens)
    share = solve_share(layer_bytes(tokens), LAYERS - 2, forward, LINK, 1e15).share
    seconds = simulated(tokens, share).seconds
    assert seconds < LAYERS * 4 * forward  # forward, backward of two, forward again
    assert seconds <= simulated(tokens, 1.0).seconds + 1e-9

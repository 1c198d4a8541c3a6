"""Prompts are read in parts so long that a step with one takes less than twice a step without."""

import pytest

from gristmill.evaluation.inference.server.engine import IDLE_PROMPT_TOKENS, MEASURED_EVERY, PromptPace


@pytest.mark.parametrize("fixed, token", [(0.2, 0.01), (0.5, 0.001), (0.9, 0.05)])
def test_the_part_follows_the_measured_time(fixed: float, token: float) -> None:
    """Decoding takes 1, a part `fixed` and `token` for each of its tokens; all become dearer."""
    pace, slowdowns = PromptPace(), []
    for step in range(400):
        tokens, growth = pace.prompt_tokens(16, 1), 1 + step / 400
        seconds = growth * (1.0 + (fixed + token * growth * tokens if tokens else 0))
        pace.record(seconds, tokens, 16)
        if tokens:
            slowdowns.append(seconds / growth)
    assert len(slowdowns) == pytest.approx(400 * MEASURED_EVERY / (MEASURED_EVERY + 1), abs=2)
    assert max(slowdowns[100:]) < 2.1 and sum(slowdowns[100:]) / len(slowdowns[100:]) > 1.6


def test_nobody_waits_for_a_prompt_that_is_alone() -> None:
    pace = PromptPace()
    pace.record(9.0, IDLE_PROMPT_TOKENS, 0)
    assert pace.prompt_tokens(0, 1) == IDLE_PROMPT_TOKENS and pace.decode_seconds is None


def test_prompts_share_the_time_by_the_number_of_requests():
    """Decoding takes 1, each token of prompts .01; twelve requests wait beside four that run."""
    pace, shares = PromptPace(), []
    for _ in range(200):
        tokens = pace.prompt_tokens(4, 12)
        pace.record(1 + 0.01 * tokens, tokens, 4)
        shares.append(0.01 * tokens)
    assert 2.0 < max(shares[100:]) < 3.2

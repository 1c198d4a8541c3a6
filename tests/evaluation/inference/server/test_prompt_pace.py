"""Prompts are read in parts so long that a step with one takes less than twice a step without."""

import pytest

from gristmill.evaluation.inference.server.engine import IDLE_PROMPT_TOKENS, PromptPace


@pytest.mark.parametrize("fixed, token", [(0.2, 0.01), (0.5, 0.001), (0.9, 0.05)])
def test_the_part_follows_the_measured_time(fixed: float, token: float) -> None:
    """Decoding takes 1, a part `fixed` and `token` for each of its tokens, which become dearer."""
    pace = PromptPace()
    pace.record(1.0, 0, True)
    for step in range(400):
        tokens = pace.prompt_tokens(True)
        price = token * (1 + step / 400)
        pace.record(1.0 + fixed + price * tokens, tokens, True)
        if step > 100 and tokens > 1:
            assert 1.0 + fixed + price * tokens < 2.1
    assert tokens == 1 or 1.0 + fixed + price * (tokens + 2) > 1.6


def test_nobody_waits_for_a_prompt_that_is_alone() -> None:
    pace = PromptPace()
    pace.record(9.0, IDLE_PROMPT_TOKENS, False)
    assert pace.prompt_tokens(False) == IDLE_PROMPT_TOKENS and pace.decode_seconds is None

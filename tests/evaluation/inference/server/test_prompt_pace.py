"""Prompts are read in parts so long that a step with one takes less than twice a step without."""

import pytest

from gristmill.evaluation.inference.server.engine import IDLE_PROMPT_TOKENS, PromptPace


@pytest.mark.parametrize("fixed, token", [(0.2, 0.01), (0.5, 0.001), (0.7, 0.05)])
def test_the_part_follows_the_measured_time(fixed: float, token: float) -> None:
    """Decoding takes 1, a part `fixed` and `token` for each of its tokens; all become dearer."""
    pace, slowdowns = PromptPace(), []
    for step in range(400):
        tokens, growth = pace.prompt_tokens(16, 1), 1 + step / 400
        seconds = fixed + token * growth * tokens
        pace.record(tokens, growth * seconds, growth)
        slowdowns.append(1 + seconds)
    assert max(slowdowns[100:]) < 2.0 and sum(slowdowns[100:]) / len(slowdowns[100:]) > 1.3


def test_nobody_waits_for_a_prompt_that_is_alone() -> None:
    assert PromptPace().prompt_tokens(0, 1) == IDLE_PROMPT_TOKENS


def test_prompts_share_the_time_by_the_number_of_requests():
    """Decoding takes 1, each token of prompts .01; twelve requests wait beside four that run: prompts take 6 x .35 to
    6 x .45, and what one step's growth adds."""
    pace, shares = PromptPace(), []
    for _ in range(200):
        tokens = pace.prompt_tokens(4, 12)
        pace.record(tokens, 0.01 * tokens, 1.0)
        shares.append(0.01 * tokens)
    assert 2.1 < max(shares[100:]) < 2.7 * 1.125


def test_steps_behind_one_that_took_too_long_are_measured():
    """Three steps behind a good one need not be; the fourth is, and so are all until one is good again."""
    pace = PromptPace()
    assert not pace.together
    pace.record(16, 0.4, 1.0)
    measured = []
    for _ in range(4):
        measured.append(not pace.together)
        pace.unmeasured += 1
    assert measured == [False, False, False, True]
    pace.record(16, 0.6, 1.0)
    assert not pace.together
    pace.record(12, 0.45, 1.0)
    assert pace.together

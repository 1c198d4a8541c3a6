"""Prompts are read in parts so long that a step with one takes less than twice a step without."""

import pytest

from gristmill.evaluation.inference.server.generation_engine import IDLE_PROMPT_TOKENS, PromptPace


@pytest.mark.parametrize("fixed, token", [(0.2, 0.01), (0.5, 0.001), (0.7, 0.05)])
def test_the_part_follows_the_measured_time(fixed: float, token: float) -> None:
    """Decoding takes 1, a part `fixed` and `token` for each of its tokens; all become dearer."""
    pace, slowdowns = PromptPace(), []
    for step in range(400):
        tokens, growth = pace.prompt_tokens(16, 1, together=False), 1 + step / 400
        seconds = fixed + token * growth * tokens
        pace.record(tokens, growth * seconds, growth)
        slowdowns.append(1 + seconds)
    assert max(slowdowns[100:]) < 2.0 and sum(slowdowns[100:]) / len(slowdowns[100:]) > 1.3


def test_nobody_waits_for_a_prompt_that_is_alone() -> None:
    assert PromptPace().prompt_tokens(0, 1, together=True) == IDLE_PROMPT_TOKENS


def test_prompts_share_the_time_by_the_number_of_requests():
    """Decoding takes 1, each token of prompts .01; six requests wait beside four that run: prompts take 6 x .35 to
    6 x .45."""
    pace, shares = PromptPace(), []
    for _ in range(200):
        tokens = pace.prompt_tokens(4, 6, together=False)
        pace.record(tokens, 0.01 * tokens, 1.0)
        shares.append(0.01 * tokens)
    assert min(shares[5:]) >= 2.1 and max(shares[5:]) <= 2.7


@pytest.mark.parametrize("token", [0.001, 0.05])
def test_the_part_of_a_pass_that_decodes_too_follows_its_time(token: float) -> None:
    """Decoding takes 1, each token of a prompt `token`; both become dearer."""
    pace, slowdowns = PromptPace(), []
    for step in range(600):
        tokens, growth = pace.prompt_tokens(16, 1, together=True), 1 + step / 600
        pace.record_pass(16, tokens, growth * (1 + token * tokens))
        if tokens:
            slowdowns.append(1 + token * tokens)
    assert max(slowdowns[100:]) < 2.0 and sum(slowdowns[100:]) / len(slowdowns[100:]) > 1.3


def test_decoding_is_measured_alone_every_sixteenth_step_and_where_the_batch_has_changed() -> None:
    pace, measured = PromptPace(), []
    for decoding in [16] * 18 + [24, 25, 17, 16]:
        tokens = pace.prompt_tokens(decoding, 1, together=True)
        measured.append(not tokens)
        pace.record_pass(decoding, tokens, 1.4 if tokens else 1.0)
    assert [step for step, alone in enumerate(measured) if alone] == [0, 16, 19, 21]

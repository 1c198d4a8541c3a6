"""Batched and packed log-likelihoods equal those of single requests."""

import numpy as np
import pytest
import torch

from gristmill.evaluation.scoring.loglikelihood import score
from gristmill.evaluation.scoring.packing import Request
from gristmill.foundation.errors import InputError


def random_requests(count: int, longest: int, seed: int = 0) -> list[Request]:
    """Few different tokens, so that many requests begin alike."""
    rng = np.random.default_rng(seed)
    return [
        Request(
            tuple(rng.integers(0, 3, rng.integers(1, longest)).tolist()),
            tuple(rng.integers(0, 3, rng.integers(1, 8)).tolist()),
        )
        for _ in range(count)
    ]


def one_at_a_time(causal_lm, request: Request) -> tuple[float, bool]:
    """The definition: the sum of log softmax at each position, one request a forward pass, the left cut to fit."""
    whole = list(request.context + request.continuation)[-(causal_lm.sequence_length + 1) :]
    logprobs = torch.log_softmax(causal_lm.head(causal_lm.hidden(torch.tensor([whole[:-1]]))[0]), dim=-1)
    tail = logprobs[len(logprobs) - len(request.continuation) :]
    targets = torch.tensor(request.continuation)
    return tail[range(len(targets)), targets].sum().item(), bool((tail.argmax(-1) == targets).all())


@pytest.mark.parametrize("share", [True, False])
@pytest.mark.parametrize("batch_tokens", [1, 100, 5000])
def test_batched_scores_are_those_of_each_request_alone(small_causal_lm, share, batch_tokens):
    causal_lm = small_causal_lm(vocab_size=5, sequence_length=24)
    requests = random_requests(120, longest=40)
    found = score(causal_lm, requests, batch_tokens, share)
    for request, result in zip(requests, found, strict=True):
        logprob, greedy = one_at_a_time(causal_lm, request)
        assert result.logprob == pytest.approx(logprob, abs=1e-9)
        assert result.greedy == greedy


def test_sharing_reads_less(small_causal_lm):
    causal_lm = small_causal_lm(vocab_size=5, sequence_length=24)
    question = Request((1, 2, 0, 1, 2, 0, 1, 2, 0, 1), (2, 3))
    requests = [Request(question.context, (2, answer, 4)) for answer in range(4)]
    found = score(causal_lm, requests, 1000)
    assert (found.unpacked_tokens, found.read_tokens) == (4 * 12, 11 + 4)


def test_logits_that_are_no_numbers_are_refused(small_causal_lm):
    causal_lm = small_causal_lm(vocab_size=5)
    causal_lm.output[0, 0] = float("nan")
    with pytest.raises(InputError, match="not numbers"):
        score(causal_lm, random_requests(3, 5), 100)

"""Packed rows and KV caches give the hidden states of separate full sequences."""

import numpy as np
import pytest
import torch

from gristmill.evaluation.inference.local_causal_lm import LocalCausalLM
from gristmill.evaluation.scoring.loglikelihood import Request, score
from gristmill.training.checkpoint.checkpoint import load_model
from tests.support.decoding import read_in_pieces

KINDS = [
    ("llama", {}),
    ("llama", {"window": (7, None)}),
    ("gpt2", {}),
    ("gpt2", {"window": 5}),
    ("bloom", {}),
    ("llama", {"positions": "none", "qk_norm": True, "logit_softcap": 5.0}),
]


@pytest.fixture(params=range(len(KINDS)), ids=lambda index: f"{KINDS[index][0]}-{index}")
def causal_lm(request, random_checkpoint):
    family, fields = KINDS[request.param]
    model, config = load_model(random_checkpoint(family, sequence_length=40, **fields))
    return LocalCausalLM(model, config.sequence_length)


def test_logits_are_the_models_own(causal_lm):
    tokens_BT = torch.randint(0, 257, (3, 20), generator=torch.Generator().manual_seed(0))
    found = causal_lm.head(causal_lm.hidden(tokens_BT).flatten(0, 1)).unflatten(0, (3, 20))
    assert torch.equal(found, causal_lm.model(tokens_BT))


def test_wanted_hidden_states_are_those_of_all(causal_lm):
    tokens_BT = torch.randint(0, 257, (3, 20), generator=torch.Generator().manual_seed(0))
    wanted_N = torch.tensor([0, 7, 19, 20, 58])
    expected_ND = causal_lm.hidden(tokens_BT).flatten(0, 1)[wanted_N]
    torch.testing.assert_close(causal_lm.hidden(tokens_BT, wanted_N=wanted_N), expected_ND, rtol=1e-5, atol=1e-6)


def test_packed_scores_are_those_of_each_request_alone(causal_lm):
    """The brute force: one request a forward pass of the model itself, log softmax over everything."""
    rng = np.random.default_rng(0)
    requests = [
        Request(tuple(rng.integers(0, 2, rng.integers(1, 45)).tolist()), tuple(rng.integers(0, 2, 4).tolist()))
        for _ in range(80)
    ]
    for request, found in zip(requests, score(causal_lm, requests, 400), strict=True):
        whole = torch.tensor([(request.context + request.continuation)[-41:]])
        logprobs = torch.log_softmax(causal_lm.model(whole[:, :-1])[0], dim=-1)[-4:]
        assert found.logprob == pytest.approx(logprobs[range(4), whole[0, -4:]].sum().item(), abs=1e-4)


def test_a_sequence_is_read_in_pieces(causal_lm):
    tokens_BT = torch.randint(0, 257, (2, 30), generator=torch.Generator().manual_seed(0))
    found_BTD = read_in_pieces(causal_lm, tokens_BT, (9, 10, 30))
    assert torch.allclose(found_BTD, causal_lm.hidden(tokens_BT), atol=1e-5)

"""Packed rows and KV caches give the hidden states of separate full sequences."""

import numpy as np
import pytest
import torch

from gristmill.evaluation.models.local_causal_lm import LocalCausalLM
from gristmill.evaluation.scoring.loglikelihood import score
from gristmill.evaluation.scoring.packing import Request
from gristmill.training.checkpoint import load_model
from gristmill.training.model.attention import grow

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


def test_the_state_goes_on_where_it_stopped(causal_lm):
    tokens_BT = torch.randint(0, 257, (2, 30), generator=torch.Generator().manual_seed(0))
    positions_BT = torch.arange(30).expand(2, 30)
    visible_BTT = torch.ones(30, 30, dtype=torch.bool).tril().expand(2, 30, 30)
    pieces, state = [], None
    for first, end in ((0, 9), (9, 10), (10, 30)):
        columns = slice(first, end)
        hidden_BTD, state = causal_lm.extend(
            tokens_BT[:, columns], positions_BT[:, columns], visible_BTT[:, columns, :end], state
        )
        pieces.append(hidden_BTD)
    assert torch.allclose(torch.cat(pieces, dim=1), causal_lm.hidden(tokens_BT), atol=1e-5)


@torch.inference_mode()
def test_a_state_that_has_grown_may_grow_again_in_another_way():
    """Two continuations of one state share its memory, and neither writes over the other."""
    state = grow(grow(None, *drawn(5)), *drawn(1, seed=1))
    one, two = (grow(state, *drawn(2, seed=seed)) for seed in (2, 3))
    longer = grow(one, *drawn(200, seed=4))
    for grown, seeds in ((one, (1, 2)), (two, (1, 3)), (longer, (1, 2, 4))):
        lengths = {1: 1, 2: 2, 3: 2, 4: 200}
        parts = [drawn(5), *(drawn(lengths[seed], seed=seed) for seed in seeds)]
        for found, place in ((grown.key_BGSK, 0), (grown.value_BGSK, 1)):
            assert torch.equal(found, torch.cat([part[place] for part in parts], dim=2))


def drawn(tokens, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(2, 3, tokens, 4, generator=generator), torch.randn(2, 3, tokens, 4, generator=generator)

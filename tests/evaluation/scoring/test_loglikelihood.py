"""Batched and packed log-likelihoods equal those of single requests."""

import numpy as np
import pytest
import torch

from gristmill.evaluation.scoring.loglikelihood import Request, batches, model_inputs, pack, score
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


# Packing requests into rows with shared prefixes, by hand.


def inputs(*pairs, sequence_length=100):
    return [model_inputs(Request(tuple(left), tuple(right)), sequence_length) for left, right in pairs]


def test_the_last_token_is_not_read_and_the_left_is_cut():
    found = model_inputs(Request((1, 2, 3), (4, 5)), sequence_length=3)
    assert (found.tokens, found.scored) == ((2, 3, 4), 2)
    with pytest.raises(InputError, match="4 tokens does not fit the model's context of 3"):
        model_inputs(Request((1,), (2, 3, 4, 5)), sequence_length=3)


def test_choices_share_their_question():
    (row,) = pack(inputs(([1, 2, 3], [4, 5]), ([1, 2, 3], [6, 7])), row_tokens=100)
    assert row.tokens.tolist() == [1, 2, 3, 4, 6]
    assert row.positions.tolist() == [0, 1, 2, 3, 3]
    assert row.request_ids == (0, 1)
    assert [nodes.tolist() for nodes in row.nodes] == [[2, 3], [2, 4]]
    assert row.visible().astype(int).tolist() == [
        [1, 0, 0, 0, 0],
        [1, 1, 0, 0, 0],
        [1, 1, 1, 0, 0],
        [1, 1, 1, 1, 0],
        [1, 1, 1, 0, 1],
    ]


def test_single_token_choices_cost_nothing_more():
    (row,) = pack(inputs(([1, 2], [3]), ([1, 2], [4])), row_tokens=100)
    assert row.is_chain and row.tokens.tolist() == [1, 2]
    assert [nodes.tolist() for nodes in row.nodes] == [[1], [1]]


def test_an_answer_that_goes_on_is_the_same_chain():
    (row,) = pack(inputs(([1, 2], [3]), ([1, 2], [3, 4, 5])), row_tokens=100)
    assert row.is_chain and row.tokens.tolist() == [1, 2, 3, 4]


def test_little_in_common_or_too_long_makes_a_new_row():
    assert len(pack(inputs(([1], [2, 3, 4, 5, 6]), ([1], [7, 8, 9, 5, 6])), row_tokens=100)) == 2
    assert len(pack(inputs(([1, 2, 3], [4, 5]), ([1, 2, 3], [6, 7])), row_tokens=4)) == 2
    assert len(pack(inputs(([1, 2, 3], [4, 5]), ([1, 2, 3], [6, 7])), row_tokens=100, share=False)) == 2


def test_every_path_reads_its_own_request():
    """Law: following the nodes that a node sees, in order, gives the tokens of the request, whatever is packed."""
    rng = np.random.default_rng(0)
    pairs = [(rng.integers(0, 3, rng.integers(1, 12)), rng.integers(0, 3, rng.integers(1, 6))) for _ in range(300)]
    items = inputs(*[(left.tolist(), right.tolist()) for left, right in pairs], sequence_length=9)
    rows = pack(items, row_tokens=40)
    assert sorted(index for row in rows for index in row.request_ids) == list(range(300))
    for row in rows:
        visible = row.visible()
        assert row.is_chain or len(row.tokens) <= 40
        for index, nodes in zip(row.request_ids, row.nodes, strict=True):
            path = np.flatnonzero(visible[nodes[-1]])
            assert tuple(row.tokens[path].tolist()) == items[index].tokens
            assert row.positions[path].tolist() == list(range(len(path)))
            assert nodes.tolist() == path[len(path) - items[index].scored :].tolist()


def test_batches_keep_to_the_budget_and_keep_trees_apart():
    items = inputs(*[([1] * size, [2]) for size in range(1, 20)], ([9, 9, 9], [4, 5]), ([9, 9, 9], [6, 7]))
    lots = batches(pack(items, row_tokens=100, share=True), batch_tokens=30)
    for lot in lots:
        assert len({row.is_chain for row in lot}) == 1
        assert len(lot) == 1 or len(lot) * max(len(row.tokens) for row in lot) <= 30

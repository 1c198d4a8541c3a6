"""Packing requests into rows with shared prefixes, by hand."""

import numpy as np
import pytest

from gristmill.evaluation.scoring.packing import Request, batches, model_inputs, pack
from gristmill.foundation.errors import InputError


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

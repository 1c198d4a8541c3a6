"""The shares of context ranks, the tokens that tokens see and the merge of blocks, by hand."""

import math
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F

from gristmill.training.model.attention import ring
from gristmill.training.model.attention import ring_plan as plans
from gristmill.training.model.attention.ring import (
    CAUSAL_MASK,
    ScoreScale,
    TileResult,
    attend_tile,
    fused_tile,
    fused_tile_gradients,
    merge,
    tile_gradients,
)
from gristmill.training.model.attention.ring_plan import ring_plan, ring_shares, visible_tokens, work_imbalance
from gristmill.training.parallel.context import (
    around_the_ring,
    balanced_shares,
    contiguous_shares,
    exchange_heads,
    exchange_tokens,
    token_shares,
    zigzag_shares,
)
from gristmill.training.parallel.mesh import Axis


def test_shares_by_hand() -> None:
    assert contiguous_shares(8, 2).tolist() == [[0, 1, 2, 3], [4, 5, 6, 7]]
    assert zigzag_shares(8, 2).tolist() == [[0, 1, 6, 7], [2, 3, 4, 5]]
    assert balanced_shares(torch.tensor([1, 2, 3, 4, 1, 2, 3, 4]), 2).tolist() == [[0, 1, 2, 3], [4, 5, 6, 7]]
    assert work_imbalance(torch.tensor([1, 2, 3, 4]), torch.tensor([[0, 1], [2, 3]])) == 1.4


@pytest.mark.parametrize("ranks", [2, 3, 8])
def test_zigzag_shares_are_equal_work_of_causal_attention(ranks: int) -> None:
    work_T = torch.arange(1, 48 * ranks + 1)
    assert work_imbalance(work_T, zigzag_shares(48 * ranks, ranks)) == 1
    assert work_imbalance(work_T, ring_shares(work_T, ranks)) == 1


@pytest.mark.parametrize("seed", range(5))
def test_shares_of_packed_documents_hold_each_token_once_and_are_nearer_to_equal_work(seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    lengths = (torch.rand(12, generator=generator) * 8).exp().int() + 1
    documents_BT = torch.repeat_interleave(torch.arange(12), lengths)[:4096]
    documents_BT = F.pad(documents_BT, (0, 4096 - len(documents_BT)), value=12).unsqueeze(0)
    work_T = visible_tokens(4096, documents_BT, None, causal=True).work_T
    shares = ring_shares(work_T, 4)
    assert shares.shape == (4, 1024) and shares.flatten().sort().values.equal(torch.arange(4096))
    assert (shares.diff(dim=1) > 0).all()
    assert work_imbalance(work_T, shares) <= work_imbalance(work_T, zigzag_shares(4096, 4))


@pytest.mark.parametrize(
    ("documents", "window", "causal", "first", "last"),
    [
        (None, None, True, [0, 0, 0, 0], [0, 1, 2, 3]),
        (None, 2, True, [0, 0, 1, 2], [0, 1, 2, 3]),
        ([0, 0, 1, 1], None, True, [0, 0, 2, 2], [0, 1, 2, 3]),
        ([5, 5, 5, 2], 2, True, [0, 0, 1, 3], [0, 1, 2, 3]),
        ([0, 0, 1, 1], None, False, [0, 0, 2, 2], [1, 1, 3, 3]),
        (None, None, False, [0, 0, 0, 0], [3, 3, 3, 3]),
    ],
)
def test_the_tokens_that_tokens_see(documents: Any, window: Any, causal: bool, first: Any, last: Any) -> None:
    documents_BT = None if documents is None else torch.tensor([documents])
    visible = visible_tokens(4, documents_BT, window, causal)
    assert visible.first_BT.tolist() == [first] and visible.last_BT.tolist() == [last]


def test_merging_by_hand() -> None:
    """Scores 0, ln 3 with values 1, 2, and score ln 2 with value 5: (1 + 6 + 10) / 6."""
    query = torch.ones(1, 1, 1, 1, dtype=torch.float64)

    def part(scores: list[float], values: list[float]) -> Any:
        shape = (1, 1, -1, 1)
        score = torch.tensor(scores, dtype=torch.float64).log().view(shape)
        return attend_tile(query, score, torch.tensor(values, dtype=torch.float64).view(shape), None, ScoreScale(1.0))

    both, log_sum = merge(*part([1, 3], [1, 2]), *part([2], [5]))
    assert both.item() == pytest.approx(17 / 6, abs=1e-15) and log_sum.item() == pytest.approx(math.log(6), abs=1e-15)


@pytest.mark.parametrize("seen", ["some", "none"])
def test_a_tile_is_torchs_attention(seen: str) -> None:
    """With 4 heads on 2 key/value heads; a query that sees nothing gives 0 and the log-sum-exp minus infinity."""
    torch.manual_seed(0)
    query, key, value = (torch.randn(2, heads, 5, 8, dtype=torch.float64, requires_grad=True) for heads in (4, 2, 2))
    bias = torch.randn(2, 4, 5, 5, dtype=torch.float64).masked_fill(torch.rand(2, 1, 5, 5) < 0.3, -torch.inf)
    bias[:, :, :, 0] = 0
    if seen == "none":
        bias[:, :, 2] = -torch.inf
    expected = F.scaled_dot_product_attention(query, key, value, attn_mask=bias, scale=0.3, enable_gqa=True)
    expected = expected.nan_to_num()
    upstream = torch.randn_like(expected)
    upstream[:, :, 2] *= seen == "some"
    (expected * upstream).nansum().backward()
    mixed, log_sum = attend_tile(query.detach(), key.detach(), value.detach(), bias, ScoreScale(0.3))
    torch.testing.assert_close(mixed, expected.detach(), atol=1e-14, rtol=0)
    if seen == "none":
        assert (log_sum[:, :, 2] == -torch.inf).all() and (mixed[:, :, 2] == 0).all()
        return
    tile = TileResult(query.detach(), key.detach(), value.detach(), mixed, log_sum)
    for found, part in zip(tile_gradients(tile, upstream, bias, ScoreScale(0.3)), (query, key, value), strict=True):
        torch.testing.assert_close(found, part.grad, atol=1e-13, rtol=0)


@pytest.mark.parametrize("biased", [False, True])
def test_a_fused_tile_is_a_tile_of_matmuls(biased: bool) -> None:
    """On the CPU's kernel. The keys are half of all; mixed and log-sum-exp of the backward pass are over both."""
    torch.manual_seed(1)
    query, (key, value) = torch.randn(2, 4, 6, 8, dtype=torch.float64), torch.randn(2, 2, 2, 10, 8, dtype=torch.float64)
    hidden = torch.rand(2, 1, 6, 10) < 0.4
    hidden[:, :, 3, :5] = True  # sees nothing of the first half
    bias = torch.zeros(2, 1, 6, 10, dtype=torch.float64).masked_fill(hidden, -torch.inf) if biased else None
    half = None if bias is None else bias[..., :5]
    scoring, upstream = ScoreScale(0.3), torch.randn_like(query)
    first = query, key[:, :, :5], value[:, :, :5]
    for found, expected in zip(fused_tile(*first, half, 0.3), attend_tile(*first, half, scoring), strict=True):
        torch.testing.assert_close(found, expected, atol=1e-14, rtol=0)
    results = attend_tile(query, key, value, bias, scoring)
    expected = tile_gradients(TileResult(*first, *results), upstream, half, scoring)
    for found, wanted in zip(fused_tile_gradients(first, results, upstream, half, 0.3), expected, strict=True):
        torch.testing.assert_close(found, wanted, atol=1e-13, rtol=0)


def test_tiles_leave_out_what_no_token_sees() -> None:
    """Zig-zag, 2 ranks, 8 tokens: rank 0 has 0 1 6 7; of rank 1's 2 3 4 5 only 6 and 7 see something."""
    shares = token_shares(Axis(2, 0), zigzag_shares(8, 2), torch.device("cpu"))
    plan = ring_plan(visible_tokens(8, None, None, True), shares, None)
    spans = [
        [(t.queries.start, t.queries.stop, t.keys.start, t.keys.stop, t.masked) for t in each] for each in plan.tiles
    ]
    assert spans == [[(0, 2, 0, 2, True), (2, 4, 2, 4, True), (2, 4, 0, 2, False)], [(2, 4, 0, 4, False)]]
    assert [t.causal for t in plan.tiles[0]] == [True, True, False] and not plan.tiles[1][0].causal
    both = ring_plan(visible_tokens(8, None, None, False), shares, None)
    assert [(t.masked, t.causal) for t in both.tiles[0]] == [(False, False)] * 2
    windowed = ring_plan(visible_tokens(8, None, 2, True), shares, None)
    assert [(t.masked, t.causal) for t in windowed.tiles[0]] == [(True, True)] * 2
    assert [(t.queries.start, t.keys.start, t.keys.stop) for t in windowed.tiles[1]] == [(2, 3, 4)]


def test_tiles_begin_where_long_documents_do(monkeypatch: pytest.MonkeyPatch) -> None:
    """Then each tile is seen whole or causally, which flash kernels take, and else masked by its bounds."""
    shares = token_shares(Axis(2, 1), contiguous_shares(16, 2), torch.device("cpu"))
    documents = torch.tensor([[0] * 10 + [1] * 6])
    visible = visible_tokens(16, documents, None, True)

    def tiles_of_rank_1() -> list[list[tuple[int, ...]]]:
        return [
            [(t.queries.start, t.keys.start, t.masked, t.causal) for t in each]
            for each in ring_plan(visible, shares, None).tiles
        ]

    assert tiles_of_rank_1() == [[(0, 0, True, False)], [(0, 0, True, False)]]
    monkeypatch.setattr(plans, "MIN_DOCUMENT", 4)
    assert tiles_of_rank_1() == [[(0, 0, False, False)], [(0, 0, True, True), (2, 2, True, True)]]


def test_a_causal_tile_of_the_flash_kernel_is_a_tile_under_its_mask() -> None:
    torch.manual_seed(2)
    query, key, value = (torch.randn(2, heads, 6, 8, dtype=torch.float64) for heads in (4, 2, 2))
    bias = (
        torch.zeros(6, 6, dtype=torch.float64).masked_fill(torch.ones(6, 6).triu(1) > 0, -torch.inf).expand(2, 1, 6, 6)
    )
    results, upstream = attend_tile(query, key, value, bias, ScoreScale(0.3)), torch.randn_like(query)
    for found, expected in zip(fused_tile(query, key, value, CAUSAL_MASK, 0.3), results, strict=True):
        torch.testing.assert_close(found, expected, atol=1e-14, rtol=0)
    wanted = tile_gradients(TileResult(query, key, value, *results), upstream, bias, ScoreScale(0.3))
    found = fused_tile_gradients((query, key, value), results, upstream, CAUSAL_MASK, 0.3)
    for one, other in zip(found, wanted, strict=True):
        torch.testing.assert_close(one, other, atol=1e-13, rtol=0)


def ring_errors(precision: torch.dtype, documents: bool) -> list[float]:
    """How far the ring by flash kernels is from the ring by matmuls in float64: output, then gradients of query, key
    and value, over the largest number of each."""
    axis = Axis(dist.get_world_size(), dist.get_rank(), dist.group.WORLD)
    tokens = 64 * axis.size
    torch.manual_seed(3)
    query, key, value, upstream = (torch.randn(2, heads, tokens, 16, dtype=torch.float64) for heads in (4, 2, 2, 4))
    number_BT = (torch.arange(tokens) // 50).expand(2, -1)
    visible = visible_tokens(tokens, number_BT if documents else None, None, causal=True)
    shares = token_shares(axis, zigzag_shares(tokens, axis.size), torch.device("cpu"))
    plan = ring_plan(visible, shares, None)

    def results(dtype: torch.dtype) -> list[torch.Tensor]:
        own = [x[:, :, shares.own_T].to(precision).to(dtype).requires_grad_() for x in (query, key, value)]
        mixed = ring.ring_attention(*own, plan, 0.25)
        (mixed * upstream[:, :, shares.own_T].to(precision).to(dtype)).sum().backward()
        return [mixed.detach().double(), *(x.grad.double() for x in own)]

    expected = results(torch.float64)
    with mock.patch.object(ScoreScale, "fuses", lambda scoring, query: True):
        found = results(precision)
    return [((a - b).abs().max() / b.abs().max()).item() for a, b in zip(found, expected, strict=True)]


@pytest.mark.parametrize("ranks", [2, 4])
def test_the_ring_by_flash_kernels_is_the_ring_by_matmuls(ranks: int, pool: Any) -> None:
    """Rounded once a tile: half a unit in the last place of bf16 is 2e-3."""
    for precision, most in ((torch.float32, 1e-6), (torch.bfloat16, 1e-2)):
        for documents in (False, True):
            errors = pool.run(ranks, ring_errors, precision, documents)
            assert max(max(errors_of_rank) for errors_of_rank in errors) < most, (precision, errors)


def exchanged() -> tuple[list[float], list[float], list[float]]:
    """Two ranks with a token each of 2 heads, width 1: rank 0 has (1, 2), rank 1 (10, 20)."""
    axis = Axis(2, dist.get_rank(), dist.group.WORLD)
    x = torch.tensor([1.0, 2.0]).mul(10**axis.rank).view(1, 1, 2, 1).requires_grad_()
    heads = exchange_heads(x, axis)
    back = exchange_tokens(heads, axis)
    (back * torch.tensor([3.0, 4.0]).view(1, 1, 2, 1)).sum().backward()
    return heads.flatten().tolist(), back.flatten().tolist(), x.grad.flatten().tolist()


def test_heads_are_exchanged_for_tokens(pool: Any) -> None:
    assert pool.run(2, exchanged) == [([1, 10], [1, 2], [3, 4]), ([2, 20], [10, 20], [3, 4])]


def seen_on_the_ring() -> list[tuple[int, float]]:
    axis = Axis(3, dist.get_rank(), dist.group.WORLD)
    return [(source, part.item()) for source, part in around_the_ring(torch.tensor([axis.rank * 1.0]), axis)]


def test_all_ranks_come_around_the_ring(pool: Any) -> None:
    assert pool.run(3, seen_on_the_ring) == [
        [(0, 0), (2, 2), (1, 1)],
        [(1, 1), (0, 0), (2, 2)],
        [(2, 2), (1, 1), (0, 0)],
    ]

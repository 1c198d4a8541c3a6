"""Attention by rows, beside the definition in float64."""

import pytest
import torch

from gristmill.training.model.attention.attention import attend
from gristmill.training.model.attention.slot_attention import attend_by_rows
from gristmill.training.model.decoding_cache import KVSlots, SlotRows

HEADS, GROUPS, WIDTH, SLOTS = 6, 2, 12, 5
LENGTHS = [0, 1, 7, 300]  # of the rows before the new token


def _filled() -> KVSlots:
    """Slots in which columns behind a row's own hold other numbers."""
    cache, generator = KVSlots(SLOTS, 320), torch.Generator().manual_seed(0)
    numbers = [torch.randn(SLOTS, 310, GROUPS, WIDTH, generator=generator) for _ in range(2)]
    cache.write(SlotRows.of_batch(torch.arange(310).expand(SLOTS, -1), torch.device("cpu")), *numbers)
    return cache


def _rows(positions: list[int], slots: list[int]) -> SlotRows:
    positions_B1 = torch.tensor(positions).unsqueeze(1)
    padded = bool((positions_B1 < 0).any())
    return SlotRows(torch.tensor(slots), positions_B1, max(positions) + 1, False, padded, in_order=False)


def _new_token(rows: int, scale: float = 1.0) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [scale * torch.randn(rows, 1, heads, WIDTH, generator=generator) for heads in (HEADS, GROUPS, GROUPS)]


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("window", [None, 5])
@pytest.mark.parametrize("scale", [1.0, 40.0])
def test_equals_softmax_over_the_row_s_own_columns(
    window: int | None, scale: float, threads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At scale 40 one column has nearly all of the weight, and others underflow."""
    monkeypatch.setattr("gristmill.training.model.attention.slot_attention.MIN_SHARED_PRODUCTS", 0)
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
    rows, (query, key, value) = _rows(LENGTHS, [3, 0, 4, 1]), _new_token(len(LENGTHS), scale)
    by_rows, expected = _filled(), _filled()
    mixed = attend_by_rows(query, key, value, by_rows.at(rows), WIDTH**-0.5, window)
    cached = expected.at(rows).append(key, value)
    back_BTS = rows.positions_BT.unsqueeze(2) - torch.arange(rows.span)
    mask_BTS = (back_BTS >= 0) & (back_BTS < (window or rows.span))
    exact = (part.double() for part in (query.transpose(1, 2), cached.key_BGSK, cached.value_BGSK))
    torch.testing.assert_close(mixed.transpose(1, 2).double(), attend(*exact, mask_BTS, WIDTH**-0.5), atol=2e-5, rtol=0)
    read = by_rows.read(rows)
    assert torch.equal(read.key_BGSK, cached.key_BGSK) and torch.equal(read.value_BGSK, cached.value_BGSK)


def test_padding_writes_nothing_and_gives_zeros() -> None:
    cache = _filled()
    before = _filled().read(_rows([309, 309], [2, 1]))
    mixed = attend_by_rows(*_new_token(2), cache.at(_rows([-1, 20], [2, 1])), 1.0, None)
    after = cache.read(_rows([309, 309], [2, 1]))
    assert not mixed[0].any() and mixed[1].any()
    assert torch.equal(after.key_BGSK[0], before.key_BGSK[0])


@pytest.mark.parametrize("number", [float("nan"), float("inf")])
def test_numbers_that_are_none_reach_their_row_alone(number: float) -> None:
    query, key, value = _new_token(2)
    query[0, 0, 1, 3] = number
    mixed = attend_by_rows(query, key, value, _filled().at(_rows([4, 4], [2, 1])), 1.0, None)
    assert mixed[0, 0, 1].isnan().all()
    assert mixed[1].isfinite().all() and mixed[0, 0, 2:].isfinite().all()

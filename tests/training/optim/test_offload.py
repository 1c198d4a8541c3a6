"""The optimizer with its state in host memory: any split and order of subgroups is bitwise the plain step."""

import itertools
from typing import Any

import pytest
import torch
from torch import nn

from gristmill.training.config.layout import OffloadConfig
from gristmill.training.config.model import ModelConfig
from gristmill.training.config.train import OptimizerConfig
from gristmill.training.optim.muon import Muon
from gristmill.training.optim.offload import PIECE_ELEMENTS, OffloadedOptimizer, split_into_subgroups
from gristmill.training.optim.optimizer import AdamW
from gristmill.training.planner.costs.host_update import (
    OURS,
    PAPER,
    CopiedBytes,
    HostRates,
    QueuedWork,
    best_stride,
    end_times,
    equal_stride,
    on_device,
    operations,
    update_seconds,
)

MODEL = ModelConfig(layers=2, width=64, heads=2)
SHAPES = {
    "embedding.weight": (401, 64),
    "layers.0.mixer.query.weight": (64, 64),
    "layers.0.mixer_norm.weight": (64,),
    "layers.1.mlp.up.weight": (171, 64),
    "final_norm.weight": (64,),
}


def parameters(dtype: torch.dtype) -> dict[str, nn.Parameter]:
    generator = torch.Generator().manual_seed(0)
    return {name: nn.Parameter(torch.randn(shape, generator=generator, dtype=dtype)) for name, shape in SHAPES.items()}


def set_gradients(values: dict[str, nn.Parameter], step: int) -> None:
    for number, value in enumerate(values.values()):
        generator = torch.Generator().manual_seed(100 * step + number)
        value.grad = torch.randn(value.shape, generator=generator, dtype=value.dtype)


def plain_and_offloaded(kind: Any, dtype: torch.dtype, placement: int, order: list[int] | None) -> tuple[Any, Any]:
    """Three steps of both; the bits of `placement` say which subgroups the device updates."""
    ours, plain = parameters(dtype), parameters(dtype)
    config = OptimizerConfig(learning_rate=0.01)
    optimizer = kind(ours, config, MODEL)
    groups = split_into_subgroups(ours, 2 * PIECE_ELEMENTS, optimizer.is_whole)
    device = [bool(placement >> index & 1) for index in range(len(groups))]
    offloaded = OffloadedOptimizer(ours, optimizer, groups, device, order and [i for i in order if i < len(groups)])
    other = kind(plain, config, MODEL)
    for step in range(3):
        set_gradients(ours, step)
        set_gradients(plain, step)
        for name, gradient in offloaded.host_gradients.items():
            gradient.copy_(ours[name].grad)
        offloaded.step(0.5)
        other.step(0.5)
    mine = {name: value.detach() for name, value in ours.items()} | offloaded.state()
    its = {name: value.detach() for name, value in plain.items()} | other.state()
    return mine, its


@pytest.mark.parametrize("kind", [AdamW, Muon])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("placement", [0, 0b11111111, 0b01010101, 0b10010110])
def test_any_split_and_order_is_bitwise_the_plain_step(kind: Any, dtype: torch.dtype, placement: int) -> None:
    for order in (None, [5, 2, 0, 6, 3, 1, 4, 7]):
        mine, its = plain_and_offloaded(kind, dtype, placement, order)
        assert mine.keys() == its.keys()
        for name in its:
            assert torch.equal(mine[name], its[name]), name


def test_a_state_left_out_would_be_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(OffloadedOptimizer, "_store", lambda self, index, operands: None)
    mine, its = plain_and_offloaded(AdamW, torch.float32, 0b01010101, None)
    assert not all(torch.equal(mine[name], its[name]) for name in its)


def test_subgroups_hold_each_element_once_and_matrices_of_muon_whole() -> None:
    values = parameters(torch.float32)
    for kind, size in itertools.product((AdamW, Muon), (1, 2 * PIECE_ELEMENTS, 10**9)):
        optimizer = kind(values, OptimizerConfig(), MODEL)
        groups = split_into_subgroups(values, size, optimizer.is_whole)
        held: dict[str, list[tuple[int, int]]] = {}
        for piece in itertools.chain(*groups):
            held.setdefault(piece.name, []).append((piece.start, piece.end))
            assert piece.start % PIECE_ELEMENTS == 0
        for name, value in values.items():
            starts, ends = zip(*held[name], strict=True)
            assert [0, *ends[:-1]] == list(starts) and ends[-1] == value.numel()
            assert len(starts) == 1 or not optimizer.is_whole(name)
        largest = max(sum(piece.size for piece in group) for group in groups)
        whole = max([0, *(value.numel() for name, value in values.items() if optimizer.is_whole(name))])
        assert largest <= max(size, PIECE_ELEMENTS, whole)


def test_strategies_by_hand() -> None:
    assert on_device(6, OffloadConfig(optimizer="cpu")) == [False] * 6
    assert on_device(4, OffloadConfig(optimizer="static", device_share=0.5)) == [True, True, False, False]
    assert on_device(6, OffloadConfig(optimizer="interleaved", stride=3)) == [False, False, True, False, False, True]
    assert on_device(3, OffloadConfig(optimizer="auto"), stride=None) == [False] * 3
    assert [f"{kind} {index}" for kind, index in operations([False, True, False, True])] == [
        "fetch 1", "fetch 3", "update 0", "publish 0", "update 1", "store 1", "update 2", "publish 2", "update 3",
        "store 3",
    ]  # fmt: skip


def test_clocks_by_hand() -> None:
    works = [QueuedWork("a", 2), QueuedWork("b", 3, (0,)), QueuedWork("a", 1), QueuedWork("b", 1, (2,))]
    assert end_times(works) == [2, 5, 3, 6]
    # b slows a to half while both run: a needs 2 s alone; b runs 3 s, in which a does 1.5 s of work
    assert end_times([QueuedWork("a", 2), QueuedWork("b", 3)], {"a": 0.5}, frozenset("b")) == pytest.approx([3.5, 3])
    with pytest.raises(ValueError, match="waits for work behind it"):
        end_times([QueuedWork("a", 1, (1,)), QueuedWork("a", 1)])


def test_the_papers_stride() -> None:
    for link, expected in ((12e9, 1.96), (24e9, 1.45)):
        assert equal_stride(HostRates(link, 0.83e9, 50e9), PAPER) == pytest.approx(expected, abs=0.005)
    assert best_stride([1e8] * 24, HostRates(12e9, 0.83e9, 50e9), PAPER) == 2  # k = 2 in the paper's logs


@pytest.mark.parametrize("copied", [OURS, PAPER])
def test_the_stride_of_equal_times_is_the_best_of_the_simulation(copied: CopiedBytes) -> None:
    seen = 0
    for link, host in itertools.product((6e9, 12e9, 24e9, 50e9), (0.4e9, 0.83e9, 1.5e9, 2e9)):
        rates = HostRates(link, host, 50e9)
        stride = equal_stride(rates, copied)
        if stride > 4:
            continue
        seen += 1
        assert best_stride([1e8] * 120, rates, copied) in (int(stride), int(stride) + 1)
    assert seen >= 8
    # a host faster than the link publishes needs no help
    assert best_stride([1e8] * 24, HostRates(6e9, 4e9, 50e9), copied) is None


def test_interleaving_hides_the_copies() -> None:
    """24 subgroups of 1e8, stride 2, U = 0.83e9: the host has 12 x 0.1205 s; the link's 12 x (8 + 4) bytes take 1.2 s
    at 12 GB/s and run beside it, so only the last publish is left over."""
    rates = HostRates(12e9, 0.83e9, 1e13)
    halves = on_device(24, OffloadConfig(optimizer="interleaved", stride=2))
    host, publish = 12 * 1e8 / 0.83e9, 4e8 / 12e9
    assert update_seconds([1e8] * 24, halves, rates) == pytest.approx(host + publish, rel=1e-4)
    assert update_seconds([1e8] * 24, [False] * 24, rates) == pytest.approx(2 * host + publish, rel=1e-6)
    # a third longer while the link copies
    slowed = update_seconds([1e8] * 24, halves, HostRates(12e9, 0.83e9, 1e13, contention=1 / 3))
    assert host + publish < slowed < 4 / 3 * host + publish + 1e-9


def test_the_host_updates_with_its_own_number_of_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only while it updates: passes on a CPU keep torch's number, on which their rounding depends."""
    values, used = parameters(torch.float32), []
    optimizer = AdamW(values, OptimizerConfig(), MODEL)
    groups = split_into_subgroups(values, 2 * PIECE_ELEMENTS, optimizer.is_whole)
    placed = [False] * (len(groups) - 1) + [True]
    offloaded = OffloadedOptimizer(values, optimizer, groups, placed, threads=3)
    before, update = torch.get_num_threads(), optimizer.update

    def noted(operands: Any, rate_share: float) -> None:
        used.append(torch.get_num_threads())
        update(operands, rate_share)

    monkeypatch.setattr(optimizer, "update", noted)
    set_gradients(values, 0)
    for name, gradient in offloaded.host_gradients.items():
        gradient.copy_(values[name].grad)
    offloaded.step(1.0)
    assert sorted(used) == sorted([3] * (len(groups) - 1) + [before]) and torch.get_num_threads() == before

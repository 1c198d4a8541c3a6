"""Days and money of a training: worked numbers, and a simulation of interruptions."""

from dataclasses import replace

import numpy as np
import pytest

from gristmill.training.config.train import TrainConfig
from gristmill.training.planner.command import PlanOptions, make_request
from gristmill.training.planner.plan_report import explain
from gristmill.training.planner.plan_request import PlanRequest, named_shape
from gristmill.training.planner.run_cost import Interruptions, best_interval, cost, days
from gristmill.training.planner.search import SearchResult, search, support

DAY = 86400.0


def test_the_best_interval_of_young_and_daly() -> None:
    """60 s a checkpoint, one interruption a day: sqrt(2 x 60 x 86,400) = 3,220 s by Young; Daly's terms add 20 s and
    take the checkpoint's 60 s off. Where a checkpoint takes longer than two interruptions, the time between them."""
    assert best_interval(60, DAY) == pytest.approx(3219.9 * (1 + 0.018634 / 3 + 0.00034722 / 9) - 60, abs=0.1)
    assert best_interval(100, 50) == 50


def simulated(interruptions: Interruptions, interval: float, work: float) -> float:
    """Seconds until so much work is saved, over the work."""
    draw = np.random.default_rng(3)
    clock, done, next_one = 0.0, 0.0, draw.exponential(interruptions.mttf)
    while done < work:
        end = clock + interval + interruptions.checkpoint
        if next_one >= end:
            clock, done = end, done + interval
            continue
        while True:  # a restart may be interrupted too
            clock = next_one
            next_one = clock + draw.exponential(interruptions.mttf)
            if next_one >= clock + interruptions.restart:
                break
        clock += interruptions.restart
    return clock / done


@pytest.mark.parametrize(("mttf", "restart", "checkpoint"), [(DAY / 4, 600, 60), (3600, 300, 30)])
def test_the_slowdown_is_that_of_a_simulation_and_least_at_the_best_interval(mttf, restart, checkpoint) -> None:
    interruptions = Interruptions(mttf, restart, checkpoint)
    best = interruptions.best
    for interval in (best / 4, best, best * 3):
        assert simulated(interruptions, interval, 4000 * mttf) == pytest.approx(
            interruptions.slowdown(interval), rel=0.02
        )
    assert interruptions.slowdown(best) < min(interruptions.slowdown(best * f) for f in (0.8, 0.9, 1.1, 1.25))


def plan(train: TrainConfig | None = None, **fields: float | str) -> SearchResult:
    request: PlanRequest = make_request(named_shape("llama3-8b"), 64, PlanOptions("h100", 2**22, 10**12))
    hardware = request.hardware.model_copy(update=fields)
    return search(replace(request, hardware=hardware, train=train))


def test_days_and_price_have_the_range_of_the_forecast() -> None:
    found = plan(price_per_gpu_hour=2.0, currency="EUR")
    length, price = days(found.request, found.best), cost(found.request, found.best)
    assert length == pytest.approx(10**12 / found.best.tokens_per_second / DAY)
    assert price == pytest.approx(length * 24 * 64 * 2.0)
    error, _ = support(found.request, found.best.layout)
    low, high = length * (1 - error), length * (1 + error)
    said = f"Training takes {length:,.1f} days ({low:,.1f} to {high:,.1f}) and costs {price:,.0f} EUR ("
    assert any(said in sentence for sentence in explain(found))


def test_a_short_training_is_told_in_hours_or_minutes() -> None:
    tokens = 10**12 // 2000
    request: PlanRequest = make_request(named_shape("llama3-8b"), 64, PlanOptions("h100", 2**22, tokens))
    found = search(request)
    length = days(found.request, found.best)
    assert length is not None and length < 2
    unit, number = ("hours", 24) if length >= 2 / 24 else ("minutes", 1440)
    assert any(f"Training takes {length * number:,.1f} {unit} (" in sentence for sentence in explain(found))


def test_interruptions_lengthen_a_training_and_the_recipes_interval_is_compared() -> None:
    """64 GPUs with one failure in 6,400 h each: one in 100 h. 8.03e9 parameters of 12 bytes at 64 x 0.5 GB/s: 3.0 s."""
    train = TrainConfig(tokens=10**12, batch_tokens=2**22, compile=True, checkpoint={"every": 1000})
    found = plan(train, gpu_mttf_hours=6400.0)
    interruptions = Interruptions.of(found.request.hardware, found.request)
    assert interruptions.mttf == 360_000 and interruptions.checkpoint == pytest.approx(3.01, abs=0.01)
    said = "\n".join(explain(found))
    assert "An interruption every 100.0 h (of 64 GPUs, one in 6,400 h each), 10 min of restart and 3 s" in said
    own = interruptions.slowdown(1000 * found.best.time.total)
    assert own > interruptions.slowdown(interruptions.best)
    assert (
        f"The recipe's checkpoint every 1,000 steps ({1000 * found.best.time.total / 60:,.1f} min) costs {own - 1:.1%}."
        in said
    )
    never = plan(
        TrainConfig(tokens=10**12, batch_tokens=2**22, compile=True, checkpoint={"every": 0}), gpu_mttf_hours=9.0
    )
    assert "an interruption loses all since the start" in "\n".join(explain(never))
    assert "interruption" not in "\n".join(explain(plan()))

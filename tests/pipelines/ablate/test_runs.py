"""How a budget becomes a model and a number of tokens."""

import pytest

from gristmill.foundation.progress import Reporter
from gristmill.foundation.runtime.tasks.local import LocalEngine
from gristmill.pipelines.ablate.runs import Budget, ProxySize, choose_size, largest_size

HERE = LocalEngine(1, Reporter.silent())


def test_operations_are_spent_on_all_runs(tmp_path):
    """Two arms, five seeds and two rates are 20 runs, and tuning is three quarters of one."""
    budget = Budget(None, 1e12, seeds=5)
    assert budget.num_runs(2) == 20.75
    size, tokens = choose_size(budget, 2, 400, 10**9, HERE, tmp_path)
    assert (size.layers, size.width) == (2, 64)
    assert 6 * size.parameters * tokens * 20.75 == pytest.approx(1e12, rel=0.02)


def test_a_cooldown_costs_a_fifth_of_each_further_arm():
    whole, cooldown = (Budget(None, 1e12, 5, shared).num_runs(11) - 0.75 for shared in (False, True))
    assert (whole, cooldown) == (110, pytest.approx(10 * (0.8 + 11 * 0.2)))


def test_more_budget_makes_larger_models_and_little_text_shorter_runs():
    sizes = [largest_size(400, 10**9, lambda size, spent=spent: spent / size.parameters)[0].width for spent in (
        1e10, 1e13, 1e15, 1e18
    )]  # fmt: skip
    assert sizes == sorted(sizes) and sizes[0] == 64 and sizes[-1] == 768
    size, tokens = largest_size(400, 50_000, lambda size: 1e12)
    assert tokens <= 4 * 50_000 < tokens + size.batch_tokens


def test_a_stopped_command_goes_on_with_the_same_size(tmp_path):
    budget = Budget(None, 1e12, 5)
    first = choose_size(budget, 2, 400, 10**9, HERE, tmp_path)
    assert choose_size(budget, 2, 400, 10, HERE, tmp_path) == first  # whatever it would choose now
    assert isinstance(first[0], ProxySize)

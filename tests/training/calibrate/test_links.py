"""Works that are timed in turn."""

import torch

from gristmill.training.calibrate import links
from gristmill.training.calibrate.links import Work, interleaved_seconds


def test_every_round_runs_each_work_once_and_the_lower_quartile_counts(monkeypatch):
    """Two rounds to warm up, then 9, 8, ... 2 seconds of `a`: of eight times the third."""
    order, seconds = [], {"a": [99, 99, 9, 8, 7, 6, 5, 4, 3, 2], "b": [1.0] * 10}
    works = {name: Work(lambda name=name: order.append(name)) for name in seconds}

    def timed(work, device):
        work.run()
        return seconds[order[-1]].pop(0)

    monkeypatch.setattr(links, "_seconds", timed)
    rounds = []
    assert interleaved_seconds(works, torch.device("cpu"), 8, lambda: rounds.append(1)) == {"a": 4, "b": 1.0}
    assert order == ["a", "b"] * 10 and len(rounds) == 10

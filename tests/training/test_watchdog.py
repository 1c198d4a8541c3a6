"""The watchdog names hangs and failures."""

import threading
import time

import pytest
import torch
import torch.distributed as dist

from gristmill.foundation.errors import InputError
from gristmill.training.parallel.mesh import single_process
from gristmill.training.processes import RankInfo, check_same_recipe
from gristmill.training.testing.forked_pool import RankFailed
from gristmill.training.watchdog import Watchdog, first_failure_named


def test_a_process_that_hangs_says_where(capfd) -> None:
    ended = threading.Event()
    with Watchdog(single_process(), 0.2, ended.set) as watchdog:
        watchdog.at("step 17, data")
        assert ended.wait(10)
    said = capfd.readouterr().err
    assert "rank 0 (pipeline 0, data 0, context 0, tensor 0) hangs: step 17, data" in said
    assert "test_a_process_that_hangs_says_where" in said  # the stack


def test_a_process_that_moves_is_left_alone() -> None:
    ended = threading.Event()
    with Watchdog(single_process(), 0.5, ended.set) as watchdog:
        for step in range(10):
            watchdog.at(f"step {step}")
            time.sleep(0.1)
    assert not ended.is_set()


def one_rank_raises() -> str:
    rank = dist.get_rank()
    store = dist.distributed_c10d._get_default_store()
    try:
        with first_failure_named(rank, store):
            if rank == 1:
                raise ValueError("shard 7 is torn")
            dist.all_reduce(torch.zeros(1))
            return "no failure"
    except (InputError, ValueError) as error:
        if rank == 1:
            dist.destroy_process_group()
        return f"{type(error).__name__}: {error}"


def test_the_cause_reaches_every_rank(pool) -> None:
    said = pool.run(3, one_rank_raises, timeout_seconds=20)
    assert said[1] == "ValueError: shard 7 is torn"
    for rank in (0, 2):
        assert said[rank] == f"InputError: rank {rank} stopped, because rank 1 failed: ValueError: shard 7 is torn"


def compare_recipes() -> None:
    rank = dist.get_rank()
    check_same_recipe("aaaa" if rank < 2 else "bbbb", RankInfo(rank, rank, 3))


def test_different_recipes_are_refused(pool) -> None:
    with pytest.raises(RankFailed, match=r"RecipeError: ranks \[2\] were given another recipe than rank 0"):
        pool.run(3, compare_recipes)

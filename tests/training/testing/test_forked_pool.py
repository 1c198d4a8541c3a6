"""Pools of forked processes end when they are closed, and say where a process hangs."""

import os
import signal
import threading

import pytest
import torch.distributed as dist

from tests.support.forked_pool import ForkedPool, RankFailed


def rank_1_waits_for_nothing() -> None:
    if dist.get_rank() == 1:
        threading.Event().wait()


def test_a_rank_that_hangs_is_named_with_its_place(pool) -> None:
    with pytest.raises(RankFailed, match=r"ranks \[1\] did not answer within 3 s(.|\n)*rank_1_waits_for_nothing"):
        pool.run(2, rank_1_waits_for_nothing, timeout_seconds=3)


def rank_1_is_killed() -> int:
    if dist.get_rank() == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    return dist.get_rank()


def test_a_killed_rank_is_named_and_the_next_call_has_new_processes(pool) -> None:
    """As when memory runs out."""
    with pytest.raises(RankFailed, match=r"processes ended, of rank and exit code \{1: -9\}"):
        pool.run(2, rank_1_is_killed)
    assert pool.run(1, rank_1_is_killed) == [0]


def test_the_pool_that_was_created_first_may_be_closed_first():
    first, second = ForkedPool(1), ForkedPool(1)
    first.close()  # the second's processes were forked with the first's pipe open
    second.close()
    assert not first._helper.is_alive() and not second._helper.is_alive()

"""Refused connections: all ranks try again together, then report them."""

import math
import platform
import subprocess
import sys
import threading
import time

import pytest
import torch
import torch.distributed as dist

from gristmill.foundation.errors import InputError
from gristmill.training.config.layout import LayoutConfig
from gristmill.training.config.train import GuardConfig
from gristmill.training.launch import processes
from gristmill.training.launch.processes import (
    CONNECTION_ATTEMPTS,
    MIN_HISTORY,
    Guard,
    RankInfo,
    Watchdog,
    check_same_recipe,
    connect,
    device_of_task,
    first_failure_named,
    host_threads,
)
from gristmill.training.parallel.mesh import single_process
from tests.support.forked_pool import RankFailed

REFUSED = "Gloo connectFullMesh failed with connect [127.0.1.1]:35123: Connection refused\nmore"


class Ranks:
    """Two ranks as threads over one store; `refused` are the (rank, attempt) pairs whose connection fails."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, refused: set[tuple[int, int]]):
        self.refused, self.made, self.undone = refused, [[], []], [0, 0]
        self.store = dist.HashStore()
        monkeypatch.setattr(processes.dist, "init_process_group", self.init)
        monkeypatch.setattr(processes.dist, "destroy_process_group", self.destroy)
        monkeypatch.setattr(processes, "SECONDS_BETWEEN_ATTEMPTS", 0.0)

    def init(self, backend, store, rank, world_size, timeout, device_id=None):
        self.made[rank].append(store)
        if (rank, len(self.made[rank])) in self.refused:
            raise RuntimeError(REFUSED)

    def destroy(self):
        self.undone[int(threading.current_thread().name)] += 1

    def run(self) -> list[str | None]:
        said: list[str | None] = [None, None]

        def connected(rank: int) -> None:
            try:
                connect("gloo", self.store, rank, 2, processes.timedelta(seconds=5))
            except InputError as error:
                said[rank] = str(error)

        threads = [threading.Thread(target=connected, args=(rank,), name=str(rank)) for rank in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(30)
        return said


def test_one_refused_connection_is_tried_again_by_all_under_other_names(monkeypatch) -> None:
    ranks = Ranks(monkeypatch, {(1, 1), (0, 2)})
    assert ranks.run() == [None, None]
    assert [len(made) for made in ranks.made] == [3, 3]
    assert ranks.undone == [1, 1]  # rank 0 had connected in the first attempt, rank 1 in the second
    ranks.made[0][0].set("address", "of a dead one")
    assert not ranks.made[0][1].check(["address"])


def test_the_end_of_the_attempts_is_named_on_all_ranks(monkeypatch) -> None:
    ranks = Ranks(monkeypatch, {(1, attempt) for attempt in range(1, CONNECTION_ATTEMPTS + 1)})
    for said in ranks.run():
        assert said.startswith(f"the processes could not connect in {CONNECTION_ATTEMPTS} attempts; rank 1: Gloo")
        assert "Connection refused; check that" in said and "more" not in said


def test_the_number_of_restarts_is_read(monkeypatch) -> None:
    for name, value in (("RANK", "3"), ("LOCAL_RANK", "1"), ("WORLD_SIZE", "4"), ("TORCHELASTIC_RESTART_COUNT", "2")):
        monkeypatch.setenv(name, value)
    assert RankInfo.from_environment() == RankInfo(3, 1, 4, restarts=2)


def test_a_rank_that_never_answers_is_an_error_and_no_hang(monkeypatch) -> None:
    store = dist.HashStore()
    store.set_timeout(processes.timedelta(milliseconds=50))
    monkeypatch.setattr(processes.dist, "init_process_group", lambda *_, **__: None)
    with pytest.raises(InputError, match="another rank did not report whether it connected"):
        connect("gloo", store, 0, 2, processes.timedelta(seconds=5))


# Steps that the guard skips, for losses and norms with known mean and deviation.


def guard_with_history(**config: float) -> Guard:
    """Losses alternate between 1 and 3 (mean 2, deviation 1), norms between 10 and 30 (mean 20, deviation 10)."""
    guard = Guard(GuardConfig(**config))
    for step in range(1, MIN_HISTORY + 1):
        assert guard.skip_reason(step, 1.0 + 2 * (step % 2), 10.0 + 20 * (step % 2)) is None
    return guard


@pytest.mark.parametrize(
    ("loss", "norm", "reason"),
    [
        (4.9, 49.0, None),
        (5.1, 20.0, "loss 5.1 is 3.0 standard deviations above the mean of the last 16 steps"),
        (2.0, 51.0, "gradient norm 51 is 3.0 standard deviations above the mean of the last 16 steps"),
        (-99.0, 0.0, None),  # only values above the mean are outliers
        (math.nan, 20.0, "loss nan, gradient norm 20.0: not finite"),
    ],
)
def test_outliers_are_above_mean_plus_sigmas_deviations(loss: float, norm: float, reason: str | None) -> None:
    assert guard_with_history(sigmas=3).skip_reason(17, loss, norm) == reason


def test_without_sigmas_only_values_that_are_not_finite_are_skipped() -> None:
    guard = guard_with_history()
    assert guard.skip_reason(17, 1e9, 1e9) is None
    assert guard.skip_reason(18, 1.0, math.inf) is not None


def test_a_short_history_has_no_outliers() -> None:
    guard = Guard(GuardConfig(sigmas=3))
    for step in range(1, MIN_HISTORY):
        assert guard.skip_reason(step, 1.0, 1.0) is None
    assert guard.skip_reason(MIN_HISTORY, 100.0, 1.0) is None


def test_skipped_steps_do_not_enter_the_history_and_the_window_slides() -> None:
    guard = guard_with_history(sigmas=3, window=16)
    assert guard.skip_reason(17, 100.0, 20.0) is not None
    assert 100.0 not in guard.losses and len(guard.losses) == 16
    guard.skip_reason(18, 2.5, 20.0)
    assert guard.losses[-1] == 2.5 and len(guard.losses) == 16


def test_consecutive_skips_are_counted_anew_after_a_step_that_is_taken() -> None:
    guard = Guard(GuardConfig(max_consecutive_skips=2))
    for step, loss in ((1, math.inf), (2, math.inf), (3, 1.0), (4, math.inf), (5, math.inf)):
        guard.skip_reason(step, loss, 1.0)
    assert guard.skipped == [1, 2, 4, 5]
    with pytest.raises(InputError, match=r"step 6: .*3 steps in a row were skipped \(train.guard.max_consecutive"):
        guard.skip_reason(6, math.inf, 1.0)


def test_the_state_restores_the_decisions() -> None:
    guard, again = guard_with_history(sigmas=3), Guard(GuardConfig(sigmas=3))
    again.restore(guard.state())
    assert again.skip_reason(17, 5.1, 20.0) == guard.skip_reason(17, 5.1, 20.0) is not None


# Memory of freed tensors is kept for the next step.

SCRIPT = """
import resource, sys
import torch
from gristmill.training.launch.processes import keep_freed_memory

if sys.argv[1] == "keep":
    assert keep_freed_memory()

def allocate(rounds):
    for _ in range(rounds):
        torch.ones(64 << 20, dtype=torch.uint8)

allocate(10)  # until the heap has a place of this size and alignment
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
allocate(10)
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


def page_faults(choice: str) -> int:
    done = subprocess.run([sys.executable, "-c", SCRIPT, choice], capture_output=True, text=True, check=True)
    return int(done.stdout)


@pytest.mark.slow
@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="the C library is not glibc")
def test_a_tensor_as_large_as_a_freed_one_takes_its_memory():
    assert page_faults("keep") * 10 < page_faults("return")


# The watchdog names hangs and failures.


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


@pytest.mark.parametrize(
    ("variable", "cores", "ranks", "threads"),
    [("1", 96, 8, 12), (None, 96, 8, 12), ("6", 96, 8, 6), ("1", 2, 4, 1), (None, 2, 1, 2)],
)
def test_the_host_computes_with_its_share_of_the_cores(
    variable: str | None, cores: int, ranks: int, threads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """torchrun sets OMP_NUM_THREADS=1 for several processes, which no user means for the host's AdamW."""
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    if variable is not None:
        monkeypatch.setenv("OMP_NUM_THREADS", variable)
    monkeypatch.setattr(processes, "usable_cores", lambda: cores)
    assert host_threads(ranks) == threads


def test_nccl_is_told_its_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """So it connects at the start and the groups of the mesh are split from the first; gloo stands beside it only where
    the host computes updates."""
    calls: list[dict[str, object]] = []
    monkeypatch.setattr(
        dist, "init_process_group", lambda backend, **options: calls.append({"backend": backend} | options)
    )
    cuda, plain = torch.device("cuda", 3), LayoutConfig()
    offloaded = LayoutConfig(offload={"optimizer": "cpu"})
    for device, layout in ((cuda, plain), (cuda, offloaded), (processes.CPU, plain)):
        backend = processes.backend_of(device, layout)
        connect(backend, dist.HashStore(), 0, 1, processes.timedelta(seconds=5), device)
    assert [(call["backend"], call["device_id"]) for call in calls] == [
        ("nccl", cuda),
        ("cpu:gloo,cuda:nccl", cuda),
        ("gloo", None),
    ]


@pytest.mark.parametrize(("count", "devices"), [(0, ["cpu", "cpu", "cpu"]), (2, ["cuda:0", "cuda:1", "cuda:0"])])
def test_independent_tasks_take_the_gpus_in_turn(monkeypatch, count, devices):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: count > 0)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: count)
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: None)
    assert [str(device_of_task(number)) for number in (0, 1, 2)] == devices

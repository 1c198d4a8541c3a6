"""Run a function on several forked processes of this machine, without torchrun: for tests and benchmarks.

Forking after torch is imported saves the seconds of importing it in each process."""

import ctypes
import faulthandler
import multiprocessing
import os
import pickle
import signal
import tempfile
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor._redistribute import _gen_transform_infos
from torch.distributed.tensor.debug import _clear_sharding_prop_cache

from gristmill.foundation.runtime.tasks.local import PR_SET_PDEATHSIG
from gristmill.training.parallel.mesh import silence_redistribution

CLOSE = b"close"
MAX_THREADS = 200  # gloo leaves about 30 threads per mesh of 8 ranks; processes with more are forked anew


class RankFailed(Exception):
    """A process raised an exception or ended. The message is its traceback, not the timeouts of the processes that
    waited."""


class ForkedPool:
    """Up to `size` processes with one compute thread each, forked by a helper process that the constructor forks.

    Create the pool before torch has computed anything in this process, since a fork does not copy threads."""

    def __init__(self, size: int):
        context = multiprocessing.get_context("fork")
        self._pipe, there = context.Pipe()
        self._helper = context.Process(target=_run_helper, args=(size, there, self._pipe))
        self._helper.start()
        there.close()

    def run(self, world_size: int, function: Callable[..., Any], *arguments: Any, timeout_seconds: float = 180) -> list:
        """function(*arguments) on ranks 0 to world_size - 1 of a gloo group; its results by rank. Calls of one size in
        a row have the same group, so a mesh that the function keeps is valid while dist.group.WORLD is the same.

        The function must be in a module that was imported before the pool was created. Raises RankFailed with the first
        traceback, or when a rank does not answer within timeout_seconds."""
        self._pipe.send_bytes(pickle.dumps((world_size, function, arguments, timeout_seconds)))
        ok, value = self._pipe.recv()
        if not ok:
            raise RankFailed(value)
        return value

    def close(self) -> None:
        """Stop the processes with a message: closing the pipe is not enough, since a pool created later holds it open
        too."""
        with suppress(BrokenPipeError):
            self._pipe.send_bytes(CLOSE)
        self._pipe.close()
        self._helper.join()


def _run_helper(size: int, pipe: Connection, other_end: Connection) -> None:
    """The helper process: forks the workers, sends them the calls and kills them when the pool is closed."""
    other_end.close()
    workers = _Workers(size)
    while True:
        try:
            call = pipe.recv_bytes()
        except EOFError:  # the pool's process was killed
            call = CLOSE
        if call == CLOSE:
            workers.close()
            return
        try:
            answer = (True, workers.run(*pickle.loads(call)))
        except RankFailed as failure:
            answer = (False, str(failure))
        pipe.send(answer)


class _Workers:
    """Worker processes, forked again when they have many threads and after any failure."""

    def __init__(self, size: int):
        self.size, self._threads = size, 0
        self._stacks = tempfile.TemporaryDirectory()  # a file for each rank, written at SIGUSR1
        self._workers: list[tuple[Any, Connection]] = []
        self._group: tuple[tuple[int, float], tempfile.TemporaryDirectory] | None = None  # (size, timeout), store

    def run(self, world_size: int, function: Callable[..., Any], arguments: tuple, timeout_seconds: float) -> list:
        if self._threads > MAX_THREADS or not self._workers or self._ended(0):
            self._fork()
        store = self._store(world_size, timeout_seconds)
        call = pickle.dumps((store, world_size, function, arguments, timeout_seconds))
        pipes = [pipe for _, pipe in self._workers[:world_size]]
        self._signal(world_size, signal.SIGCONT)
        try:
            for pipe in pipes:
                pipe.send_bytes(call)
            results = self._collect(pipes, timeout_seconds)
            self._signal(world_size, signal.SIGSTOP)
            return results
        except RankFailed:
            self.close()
            raise
        except (EOFError, OSError):  # a pipe whose process is gone
            ended = self._ended(1)
            self.close()
            raise RankFailed(f"processes ended, of rank and exit code {ended}; -9: memory may have run out") from None

    def _signal(self, world_size: int, number: int) -> None:
        """Processes stand still between calls: gloo's threads, hundreds of them, each wake a hundred times a second,
        which took up to a third of a core."""
        for process, _ in self._workers[:world_size]:
            os.kill(process.pid, number)

    def _ended(self, wait_seconds: float) -> dict[int, int]:
        """Exit code by rank of the processes that have ended, or do so within wait_seconds."""
        sentinels = [process.sentinel for process, _ in self._workers]
        found = {}
        for sentinel in multiprocessing.connection.wait(sentinels, wait_seconds):
            rank = sentinels.index(sentinel)
            process = self._workers[rank][0]
            process.join()  # its pipes are closed a moment before its exit code is there
            found[rank] = process.exitcode
        return found

    def close(self) -> None:
        for process, pipe in self._workers:
            process.kill()
            process.join()
            pipe.close()
        self._workers = []
        self._leave_group()

    def _store(self, world_size: int, timeout_seconds: float) -> str:
        """The path of the group's store: the last call's, unless the group has to be another one."""
        wanted = world_size, timeout_seconds
        if self._group is None or self._group[0] != wanted:
            self._leave_group()
            self._group = wanted, tempfile.TemporaryDirectory()
        return str(Path(self._group[1].name) / "store")

    def _leave_group(self) -> None:
        if self._group is not None:
            self._group[1].cleanup()
        self._group = None

    def _collect(self, pipes: list[Connection], timeout_seconds: float) -> list:
        results: dict[int, Any] = {}
        while len(results) < len(pipes):
            waiting = {pipe: rank for rank, pipe in enumerate(pipes) if rank not in results}
            ready = multiprocessing.connection.wait(list(waiting), timeout_seconds)
            if not ready:
                silent = sorted(waiting.values())
                raise RankFailed(
                    f"ranks {silent} did not answer within {timeout_seconds} s. They stand at:\n{self._where(silent)}"
                )
            for pipe in ready:
                ok, value, threads = pipe.recv()
                if not ok:
                    raise RankFailed(f"rank {waiting[pipe]}:\n{value}")
                self._threads = max(self._threads, threads)
                results[waiting[pipe]] = value
        return [results[rank] for rank in range(len(pipes))]

    def _where(self, ranks: list[int]) -> str:
        for rank in ranks:
            os.kill(self._workers[rank][0].pid, signal.SIGUSR1)
        time.sleep(1)  # faulthandler writes in the signal's handler
        return "\n".join(f"rank {rank}:\n{Path(self._stacks.name, str(rank)).read_text()}" for rank in ranks)

    def _fork(self) -> None:
        self.close()
        self._threads = 0
        context = multiprocessing.get_context("fork")
        for rank in range(self.size):
            here, there = context.Pipe()
            stacks = Path(self._stacks.name, str(rank))
            process = context.Process(target=_serve, args=(rank, there, stacks), daemon=True)
            process.start()
            there.close()
            self._workers.append((process, here))


def _serve(rank: int, pipe: Connection, stacks: Path) -> None:
    faulthandler.register(signal.SIGUSR1, stacks.open("w"))
    # A process that stands still does not see that its pipe is closed.
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.set_num_threads(1)
    silence_redistribution()
    joined = None
    while True:
        try:
            store, world_size, function, arguments, timeout_seconds = pickle.loads(pipe.recv_bytes())
        except EOFError:
            return
        try:
            if joined != store or not dist.is_initialized():
                _leave_group()
                dist.init_process_group(
                    "gloo",
                    store=dist.FileStore(store, world_size),
                    rank=rank,
                    world_size=world_size,
                    timeout=timedelta(seconds=timeout_seconds),
                )
                dist.barrier()  # a rank that fails at once must not close a connection that the others still make
                joined = store
            ok, value = True, function(*arguments)
        except BaseException:
            ok, value = False, traceback.format_exc()
        pipe.send((ok, value, len(os.listdir("/proc/self/task"))))


def _leave_group() -> None:
    """Clear torch's caches too: they keep meshes of destroyed groups, which fail in the next group."""
    if dist.is_initialized():
        dist.destroy_process_group()
    _clear_sharding_prop_cache()
    _gen_transform_infos.cache_clear()

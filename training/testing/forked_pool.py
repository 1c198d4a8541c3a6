"""The same function on several processes of this machine, forked: layouts tried without torchrun, in tests and
benchmarks.

Forking after torch is imported saves its seconds of start-up for each process."""

import multiprocessing
import os
import pickle
import tempfile
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

from gristmill.training.parallel.mesh import silence_redistribution

CLOSE = b"close"
CASES_A_FORK = 5  # gloo leaves some 27 threads a layout at 8 ranks behind, which slow all that follows


class RankFailed(Exception):
    """A process raised; the message is its traceback, not the time-outs of those that waited for it."""


class ForkedPool:
    """Up to `size` processes with one thread of compute each. They are forked by a process that does nothing else and
    is itself forked at once: make the pool before torch has computed anything here, for a fork takes no threads
    along."""

    def __init__(self, size: int):
        context = multiprocessing.get_context("fork")
        self._pipe, there = context.Pipe()
        self._keeper = context.Process(target=_keep, args=(size, there, self._pipe))
        self._keeper.start()
        there.close()

    def run(self, world_size: int, function: Callable[..., Any], *arguments: Any, timeout_seconds: float = 180) -> list:
        """function(*arguments) on ranks 0 to world_size - 1 of a fresh gloo group; its results by rank.

        The function must stand in a module that was loaded before the pool was made. Raises RankFailed with the first
        traceback, or when a rank gives no sign for so long."""
        self._pipe.send_bytes(pickle.dumps((world_size, function, arguments, timeout_seconds)))
        whole, value = self._pipe.recv()
        if not whole:
            raise RankFailed(value)
        return value

    def close(self) -> None:
        """Says so to the keeper: a pool that was made later holds this pipe open too, so closing it tells nothing."""
        with suppress(BrokenPipeError):
            self._pipe.send_bytes(CLOSE)
        self._pipe.close()
        self._keeper.join()


def _keep(size: int, pipe: Connection, other_end: Connection) -> None:
    """The process that forks the workers, hands them the calls and kills them when the pool is closed."""
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
    """Forked anew every few cases and after any failure."""

    def __init__(self, size: int):
        self.size, self._cases = size, 0
        self._workers: list[tuple[Any, Connection]] = []

    def run(self, world_size: int, function: Callable[..., Any], arguments: tuple, timeout_seconds: float) -> list:
        if self._cases >= CASES_A_FORK or not self._workers:
            self._fork()
        self._cases += 1
        with tempfile.TemporaryDirectory() as folder:
            call = pickle.dumps((str(Path(folder) / "store"), world_size, function, arguments, timeout_seconds))
            pipes = [pipe for _, pipe in self._workers[:world_size]]
            for pipe in pipes:
                pipe.send_bytes(call)
            try:
                return self._collect(pipes, timeout_seconds)
            except RankFailed:
                self.close()
                raise

    def close(self) -> None:
        for process, pipe in self._workers:
            process.kill()
            process.join()
            pipe.close()
        self._workers = []

    def _collect(self, pipes: list[Connection], timeout_seconds: float) -> list:
        results: dict[int, Any] = {}
        while len(results) < len(pipes):
            waiting = {pipe: rank for rank, pipe in enumerate(pipes) if rank not in results}
            ready = multiprocessing.connection.wait(list(waiting), timeout_seconds)
            if not ready:
                raise RankFailed(f"ranks {sorted(waiting.values())} gave no sign for {timeout_seconds} s")
            for pipe in ready:
                whole, value = pipe.recv()
                if not whole:
                    raise RankFailed(f"rank {waiting[pipe]}:\n{value}")
                results[waiting[pipe]] = value
        return [results[rank] for rank in range(len(pipes))]

    def _fork(self) -> None:
        self.close()
        self._cases = 0
        context = multiprocessing.get_context("fork")
        for rank in range(self.size):
            here, there = context.Pipe()
            process = context.Process(target=_serve, args=(rank, there), daemon=True)
            process.start()
            there.close()
            self._workers.append((process, here))


def _serve(rank: int, pipe: Connection) -> None:
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.set_num_threads(1)
    silence_redistribution()
    while True:
        try:
            store, world_size, function, arguments, timeout_seconds = pickle.loads(pipe.recv_bytes())
        except EOFError:
            return
        try:
            dist.init_process_group(
                "gloo",
                store=dist.FileStore(store, world_size),
                rank=rank,
                world_size=world_size,
                timeout=timedelta(seconds=timeout_seconds),
            )
            answer = (True, function(*arguments))
        except BaseException:
            answer = (False, traceback.format_exc())
        pipe.send(answer)
        _leave_group()


def _leave_group() -> None:
    """torch's caches keep meshes of dead groups and trip over them in the next case."""
    if dist.is_initialized():
        dist.destroy_process_group()
    _clear_sharding_prop_cache()
    _gen_transform_infos.cache_clear()

"""Training that goes on when a replica dies (`train.layout.lost_replicas: continue`): the driver starts the processes
of all replicas, decides after each round which replicas take part in the next, and starts lost ones again.

The driver is the parent of all processes, so it knows of a death by the system's word, not by a time-out. A replica of
which a process died is killed whole before anything is decided: what it would still have sent reaches nobody."""

import multiprocessing
import os
import signal
import sys
import traceback
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, wait
from typing import Any

import torch.distributed as dist

from gristmill.foundation.errors import InputError, RecipeError
from gristmill.foundation.progress import Reporter, Terminated
from gristmill.foundation.runtime.tasks.local import RemoteTraceback, leave_with_parent
from gristmill.training.config.layout import LayoutConfig
from gristmill.training.launch.processes import HANGING, StopRequest, stop_requests
from gristmill.training.parallel.replicas import Decision, ReplicaProcess

MAX_FAILED_STARTS = 3  # in a row, of a replica that never took part; then the others go on without it
MAX_FAILED_ROUNDS = 10  # in a row, while nobody dies
SECONDS_TO_DIE = 2.0  # of a process whose neighbour has told that it is gone
POLL_SECONDS = 0.5
ENDINGS: dict[str, type[BaseException]] = {
    error.__name__: error for error in (InputError, RecipeError, KeyboardInterrupt, Terminated)
}


@dataclass
class _Process:
    """A process and the driver's end of its pipe (None once it is closed). vote: the round and what went wrong, None if
    nothing did. error: its type, text and traceback."""

    process: Any
    connection: Connection | None
    ready: bool = False
    vote: tuple[str, str | None] | None = None
    error: tuple[str, str, str] | None = None

    @property
    def died(self) -> bool:
        return self.process.exitcode not in (None, 0)

    @property
    def was_killed(self) -> bool:
        """Whether a signal or the watchdog ended it, and not an error of its own."""
        return self.died and (self.process.exitcode < 0 or self.process.exitcode == HANGING)


@dataclass
class _Replica:
    """processes: by rank; none while the replica is not to be started again. failed_starts: in a row."""

    processes: list[_Process] = field(default_factory=list)
    failed_starts: int = 0

    @property
    def is_ready(self) -> bool:
        return bool(self.processes) and all(process.ready for process in self.processes)

    @property
    def is_finished(self) -> bool:
        return bool(self.processes) and all(process.process.exitcode == 0 for process in self.processes)


class ReplicaDriver:
    """Runs target(process, *arguments) in each process of each replica. The target trains, and returns the summary of
    the run on rank 0 of a replica. context: how processes are started."""

    def __init__(
        self,
        layout: LayoutConfig,
        target: Callable[..., dict[str, Any]],
        arguments: tuple[Any, ...],
        reporter: Reporter,
        context: Any = None,
    ):
        self.ranks, self.reporter = layout.world_size // layout.replicate, reporter
        self.target, self.arguments = target, arguments
        self.context = context or multiprocessing.get_context("spawn")
        self.store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        self.replicas = [_Replica() for _ in range(layout.replicate)]
        self.decision: Decision | None = None
        self.summary: dict[str, Any] = {}
        self._incarnation = self._failed_rounds = 0
        self._lost: set[int] = set()  # since the last decision; started again, they are no members
        self._passed_on = False

    def run(self) -> dict[str, Any]:
        """The summary of the run. Raises the error of a process that was not killed, InputError when all replicas are
        lost, and what a stop request raises in the processes."""
        try:
            with stop_requests() as request:
                for number in range(len(self.replicas)):
                    self._start(number)
                while not self._is_finished():
                    self._pass_on(request)
                    self._receive()
                    for number in range(len(self.replicas)):
                        self._look_after(number)
                    self._decide()
            return self.summary
        finally:
            for replica in self.replicas:
                self._kill(replica)

    def _start(self, number: int) -> None:
        replica, self._incarnation = self.replicas[number], self._incarnation + 1
        for rank in range(self.ranks):
            own, other = self.context.Pipe()
            place = ReplicaProcess(
                other, number, len(self.replicas), rank, self.ranks, self._incarnation, self.store.port
            )
            process = self.context.Process(target=run_process, args=(place, self.target, self.arguments), daemon=True)
            process.start()
            other.close()  # the process has the only copy, so its death closes the pipe
            replica.processes.append(_Process(process, own))

    def _pass_on(self, request: StopRequest) -> None:
        """Hands a stop request to all processes, once: they are in groups of their own, which Ctrl-C does not reach."""
        if request.signal is None or self._passed_on:
            return
        if self.decision is None:
            error = KeyboardInterrupt if request.signal == signal.SIGINT else Terminated
            raise error("stopped before the first step; run the same command to go on")
        self._passed_on = True
        for replica in self.replicas:
            for process in replica.processes:
                if process.process.exitcode is None:
                    os.kill(process.process.pid, request.signal)

    def _receive(self) -> None:
        processes = [process for replica in self.replicas for process in replica.processes]
        open_ones = {process.connection: process for process in processes if process.connection is not None}
        running = [process.process.sentinel for process in processes if process.process.exitcode is None]
        for handle in wait([*open_ones, *running], POLL_SECONDS):
            if handle in open_ones:
                self._read(open_ones[handle])

    def _read(self, process: _Process) -> None:
        assert process.connection is not None
        try:
            kind, value = process.connection.recv()
        except (EOFError, OSError):
            process.connection.close()
            process.connection = None
            return
        if kind == "ready":
            process.ready = True
        elif kind == "vote":
            process.vote = value
        elif kind == "error":
            process.error = value
        elif value:
            self.summary = value

    def _look_after(self, number: int) -> None:
        """Kills and starts again a replica that lost a process. Raises the error of one that failed by itself."""
        replica = self.replicas[number]
        if not any(process.died for process in replica.processes):
            return
        if not any(process.was_killed for process in replica.processes):
            for process in replica.processes:  # the first to tell need not be the first that died
                process.process.join(SECONDS_TO_DIE)
                while process.connection is not None and process.connection.poll():
                    self._read(process)
        errors = [process.error for process in replica.processes if process.error is not None]
        if errors and not any(process.was_killed for process in replica.processes):
            name, text, trace = errors[0]
            if name in ENDINGS:
                raise ENDINGS[name](text)
            raise RuntimeError(f"{name}: {text}") from RemoteTraceback(trace)
        codes = [process.process.exitcode for process in replica.processes]
        took_part = self.decision is not None and number in self.decision.members
        self._lost.add(number)
        replica.failed_starts = 0 if took_part else replica.failed_starts + 1
        self._kill(replica)
        starts_anew = replica.failed_starts < MAX_FAILED_STARTS and not self._passed_on and not self._is_ending
        self.reporter.info(
            f"train: replica {number} was lost (exit codes of its processes: {codes}); "
            + ("it is started again" if starts_anew else "it is not started again")
        )
        if starts_anew:
            self._start(number)

    def _decide(self) -> None:
        if self.decision is None:
            self._decide_start()
            return
        before = self.decision
        members = [number for number in before.members if number not in self._lost]
        if not set(members) - set(before.joiners):
            raise InputError(
                "all replicas that had the state of the training were lost; run the same command to go on from the "
                "last checkpoint"
            )
        votes = [process.vote for number in members for process in self.replicas[number].processes]
        given = [vote for vote in votes if vote is not None]
        if len(given) < len(votes):
            return
        (name,) = {name for name, _ in given}
        leader_lives = before.leader in members
        problems = [problem for _, problem in given if problem is not None]
        done = not problems and (leader_lives or name != "files")
        joiners = [] if name == "state" and done else [number for number in before.joiners if number in members]
        leader = before.leader if leader_lives else min(set(members) - set(joiners))
        if name == "files" and done:
            joiners = [n for n, replica in enumerate(self.replicas) if replica.is_ready and n not in members]
        members = sorted({*members, *joiners})
        changed = tuple(members) != before.members
        self._failed_rounds = 0 if done or changed else self._failed_rounds + 1
        if self._failed_rounds > MAX_FAILED_ROUNDS:
            raise InputError(
                f"the replicas {members} live but could not exchange in {MAX_FAILED_ROUNDS} attempts ({problems[0]}); "
                "check the machine's network, then run the same command again"
            )
        epoch = before.epoch + int(changed or not done)
        self._announce(Decision(done, epoch, tuple(members), tuple(joiners), leader))

    def _decide_start(self) -> None:
        """The first replica resumes and gives its state to the others, once all are there or have been given up."""
        running = [number for number, replica in enumerate(self.replicas) if replica.processes]
        if not running:
            raise InputError(f"no replica could be started in {MAX_FAILED_STARTS} attempts; their errors are above")
        if all(self.replicas[number].is_ready for number in running):
            self._announce(Decision(True, 1, tuple(running), tuple(running[1:]), running[0]))

    def _announce(self, decision: Decision) -> None:
        if self.decision is not None and decision.joiners and decision.done:
            self.reporter.info(f"train: replicas {list(decision.joiners)} take part again")
        self.decision = decision
        self._lost.clear()
        for number in decision.members:
            for process in self.replicas[number].processes:
                process.vote = None
                if process.connection is not None:
                    with suppress(OSError):  # it died: the next round shows it
                        process.connection.send(decision)

    @property
    def _is_ending(self) -> bool:
        return any(replica.is_finished for replica in self.replicas)

    def _is_finished(self) -> bool:
        """Whether a replica has finished and no other member still runs."""
        members = set(self.decision.members) - set(self.decision.joiners) if self.decision is not None else ()
        running = [process for number in members for process in self.replicas[number].processes]
        return self._is_ending and all(process.process.exitcode is not None for process in running)

    def _kill(self, replica: _Replica) -> None:
        for process in replica.processes:
            process.process.kill()
        for process in replica.processes:
            process.process.join()
            if process.connection is not None:
                process.connection.close()
        replica.processes = []


def run_process(place: ReplicaProcess, target: Callable[..., dict[str, Any]], arguments: tuple[Any, ...]) -> None:
    """A process of a replica: torchrun's variables name the replica's own processes, which meet in the driver's store
    under the number of their incarnation."""
    os.setpgrp()
    leave_with_parent(os.getppid(), from_main_thread=True)
    os.environ |= {
        "RANK": str(place.rank),
        "LOCAL_RANK": str(place.rank),
        "WORLD_SIZE": str(place.ranks),
        "LOCAL_WORLD_SIZE": str(place.ranks),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(place.port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "TORCHELASTIC_RESTART_COUNT": str(place.incarnation),
    }
    try:
        place.connection.send(("summary", target(place, *arguments)))
    except BaseException as error:
        with suppress(OSError):
            place.connection.send(("error", (type(error).__name__, str(error), traceback.format_exc())))
        sys.exit(1)

"""Shared measuring code: our function and a peer's in alternation, median of paired ratios, one JSON line per
figure."""

import argparse
import json
import multiprocessing
import resource
import statistics
import sys
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, TypeVar

from rich.console import Console
from rich.table import Table

Answer = TypeVar("Answer")

sys.path.append(str(Path(__file__).parent.parent))  # some programs use what tests/support has


@dataclass(frozen=True)
class Figure:
    """ours and peer are rates or amounts in `unit`; ratio is above 1 where we are better; goal is the least ratio (or,
    where there is no peer, the least value of ours) that was asked for."""

    figure: str
    ours: float
    unit: str
    peer: float | None = None
    peer_name: str | None = None
    ratio: float | None = None
    goal: float | None = None


def arguments(description: str) -> argparse.ArgumentParser:
    """--data takes any folder, --quick stays under a minute; a program may add its own."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--data", type=Path, default=None, help="a folder of input; the default is made or shared data")
    parser.add_argument("--quick", action="store_true", help="a small input, under a minute")
    return parser


def cpu_seconds(function: Callable[[], object]) -> float:
    """User and system seconds of this process and its ended children, which vary less than the clock on a busy
    machine."""
    before = _cpu()
    function()
    return _cpu() - before


def wall_seconds(function: Callable[[], object]) -> float:
    started = time.perf_counter()
    function()
    return time.perf_counter() - started


def in_turn(
    ours: Callable[[], object],
    peer: Callable[[], object],
    rounds: int,
    clock: Callable[[Callable[[], object]], float] = cpu_seconds,
) -> tuple[float, float, float]:
    """(median seconds of ours, of the peer, median of the paired ratios peer / ours), after one round to warm up."""
    ours()
    peer()
    pairs = [(clock(ours), clock(peer)) for _ in range(rounds)]
    return (
        statistics.median(own for own, _ in pairs),
        statistics.median(other for _, other in pairs),
        statistics.median(other / own for own, other in pairs),
    )


class OwnProcess:
    """A function in a process of its own, so that neither side's threads, allocator or caches are the other's.

    make(*arguments), a module's function, is called there and returns the function; a call of this object runs it and
    returns the processor seconds it took there: in_turn(OwnProcess(...), OwnProcess(...), rounds, own_seconds)."""

    def __init__(self, make: Callable[..., Callable[[], object]], *arguments: object):
        context = multiprocessing.get_context("spawn")
        self._connection, there = context.Pipe()
        self._process = context.Process(target=_serve, args=(there, make, arguments), daemon=True)
        self._process.start()
        there.close()

    def __call__(self) -> float:
        return self.ask(cpu_seconds)

    def ask(self, question: Callable[[Any], Answer]) -> Answer:
        """question(function), computed there. Both the question, a module's function, and its answer are sent."""
        self._connection.send(question)
        return self._connection.recv()

    def close(self) -> None:
        self._connection.close()
        self._process.join()


def own_seconds(function: Callable[[], object]) -> float:
    """The clock of `in_turn` for two OwnProcess: what they return, in processor seconds."""
    seconds = function()
    assert isinstance(seconds, float)
    return seconds


def own_wall_seconds(process: Callable[[], object]) -> float:
    """As `own_seconds`, by the clock on the wall, for functions of several threads."""
    assert isinstance(process, OwnProcess)
    return process.ask(wall_seconds)


def _serve(connection: Connection, make: Callable[..., Callable[[], object]], arguments: tuple[object, ...]) -> None:
    function = make(*arguments)
    with suppress(EOFError):
        while True:
            connection.send(connection.recv()(function))


def peak_megabytes() -> float:
    """Peak resident memory of this process, in MB of 10^6 bytes."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 1e6


def print_figures(figures: Iterable[Figure]) -> None:
    """One JSON line a figure for `run_all.py`, as soon as it is measured, then a table for people."""
    table = Table("figure", "ours", "peer", "unit", "ratio", "goal")
    for each in figures:
        print(json.dumps({key: value for key, value in vars(each).items() if value is not None}), flush=True)
        peer = "" if each.peer is None else f"{each.peer:.4g} ({each.peer_name})"
        ratio = "" if each.ratio is None else f"{each.ratio:.2f}"
        table.add_row(
            each.figure, f"{each.ours:.4g}", peer, each.unit, ratio, "" if each.goal is None else f"{each.goal:g}"
        )
    Console(width=120).print(table)


def _cpu() -> float:
    own = resource.getrusage(resource.RUSAGE_SELF)
    children = resource.getrusage(resource.RUSAGE_CHILDREN)
    return own.ru_utime + own.ru_stime + children.ru_utime + children.ru_stime


def process_peak_bytes(process: str) -> int:
    """The largest resident set of a process that still runs; getrusage's would be its parent's too, which execve
    keeps."""
    lines = Path(f"/proc/{process}/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("VmHWM")) * 1024

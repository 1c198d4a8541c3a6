"""Steps of a run in metrics.jsonl, found by bisection of the file: a run of 10^6 steps is not read whole."""

import mmap
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Self

import orjson

from gristmill.foundation.errors import InputError
from gristmill.training.config.train import LEFT_OUT

Step = dict[str, Any]


class StepLog:
    """The lines of metrics.jsonl, whose steps and tokens ascend. Raises InputError if there is no such file, or no step
    in it; an unfinished last line is left out."""

    def __init__(self, folder: Path):
        path = folder / "metrics.jsonl"
        if not path.is_file() or not path.stat().st_size:
            raise InputError(f"{path}: no such file; name a run that has trained at least a step")
        with path.open("rb") as file:
            self._content = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        self._size = self._content.rfind(b"\n") + 1
        if not self._size:
            raise InputError(f"{path}: no complete line; name a run that has trained at least a step")
        self.first, self.last = self._line(0)[0], self._line(self._start(self._size - 1))[0]

    def first_with(self, is_reached: Callable[[Step], bool]) -> Step | None:
        """The first step for which this holds, as it does for all later ones; None if it does for none."""
        start = self._offset_of_first(is_reached)
        return None if start is None else self._line(start)[0]

    def between(self, first: int, last: int) -> Iterator[Step]:
        """The steps of these numbers that the run has made, ascending."""
        start = self._offset_of_first(lambda step: step["step"] >= first)
        while start is not None and start < self._size:
            step, start = self._line(start)
            if step["step"] > last:
                return
            yield step

    def _offset_of_first(self, is_reached: Callable[[Step], bool]) -> int | None:
        """Where the line of the first such step begins."""
        low, high, reached = 0, self._size, None
        while low < high:
            start = self._start((low + high) // 2)
            step, end = self._line(start)
            if is_reached(step):
                high, reached = start, start
            else:
                low = end
        return reached

    def at(self, number: int) -> Step | None:
        """The step of this number; None if the run has not made it."""
        step = self.first_with(lambda step: step["step"] >= number)
        return step if step is not None and step["step"] == number else None

    def _start(self, offset: int) -> int:
        """Where the line begins that holds this byte."""
        return self._content.rfind(b"\n", 0, offset) + 1

    def _line(self, start: int) -> tuple[Step, int]:
        """(the line that begins here, where the next begins)."""
        end = self._content.find(b"\n", start) + 1
        return orjson.loads(self._content[start:end]), end

    def close(self) -> None:
        self._content.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def samples_of_steps(log: StepLog, first: int, last: int, sequence_length: int) -> Sequence[int]:
    """The samples that steps first to last read, without those of replicas that were lost. Raises InputError for steps
    that the run has not made."""
    begin, end = log.at(first), log.at(last)
    if begin is None or end is None or last < first:
        raise InputError(f"steps {first} to {last}: the run has made steps {log.first['step']} to {log.last['step']}")
    before = log.at(first - 1)
    samples = range((before["tokens"] if before else 0) // sequence_length, end["tokens"] // sequence_length)
    left_out = {k for step in log.between(first, last) for bounds in step.get(LEFT_OUT, ()) for k in range(*bounds)}
    return [k for k in samples if k not in left_out] if left_out else samples


def was_left_out(log: StepLog, sample: int, step: int) -> bool:
    """Whether the replica that would have read the sample in this step, which is its own, was lost."""
    line = log.at(step)
    return line is not None and any(sample in range(*bounds) for bounds in line.get(LEFT_OUT, ()))


def step_of(log: StepLog, sample: int, sequence_length: int) -> int | None:
    """The step of the sample, which read it unless it `was_left_out`; None if the run has not made it yet."""
    step = log.first_with(lambda step: step["tokens"] > sample * sequence_length)
    return None if step is None else step["step"]

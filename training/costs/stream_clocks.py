"""Work on streams, simulated with a clock each: when every piece ends, if streams run side by side."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Work:
    """seconds on one stream, which runs its work in the order of the list. after: places in the list of what must end
    before, on any stream."""

    stream: str
    seconds: float
    after: tuple[int, ...] = ()


def end_times(
    works: Sequence[Work], slowed: Mapping[str, float] | None = None, by: frozenset[str] = frozenset()
) -> list[float]:
    """The time at which each piece of work ends.

    slowed: by stream, the factor on its speed while any of the streams `by` is busy: two that share memory bandwidth.
    Raises ValueError where work waits for itself. [a: 2 s], [b: 3 s after a], [a: 1 s] -> 2, 5, 3."""
    slowed = slowed or {}
    queues: dict[str, list[int]] = {}
    for place, work in enumerate(works):
        queues.setdefault(work.stream, []).append(place)
    left = [work.seconds for work in works]
    ends: dict[int, float] = {}
    now = 0.0
    while len(ends) < len(works):
        running = {
            stream: queue[0]
            for stream, queue in queues.items()
            if queue and all(each in ends for each in works[queue[0]].after)
        }
        if not running:
            raise ValueError("work waits for work behind it; order each stream by what it waits for")
        speeds = {stream: slowed.get(stream, 1.0) if by & (running.keys() - {stream}) else 1.0 for stream in running}
        passed = min(left[place] / speeds[stream] for stream, place in running.items())
        now += passed
        for stream, place in running.items():
            left[place] -= passed * speeds[stream]
            if left[place] <= 1e-12 * works[place].seconds:
                ends[place] = now
                queues[stream].pop(0)
    return [ends[place] for place in range(len(works))]

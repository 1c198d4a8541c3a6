"""A pass whose layers' activations go to host memory and come back, simulated with a clock for the computation and for
each direction of the link (MEMO, SIGMOD 2025)."""

from dataclasses import dataclass

from gristmill.training.planner.costs.host_update import QueuedWork, end_times

ROUNDING_BUFFERS = 2  # layers whose activations are on the device at once


@dataclass(frozen=True)
class SwappedPass:
    """layers: of the model, of which the last `kept` stay on the device. Seconds of one layer's forward pass, of its
    backward pass with what it recomputes, and of one copy of what it swaps."""

    layers: int
    kept: int
    forward: float
    backward: float
    copy: float

    @property
    def computing(self) -> float:
        return self.layers * (self.forward + self.backward)

    @property
    def seconds(self) -> float:
        return max(end_times(self.works()), default=0.0)

    @property
    def exposed(self) -> float:
        """Seconds by which the copies lengthen the pass."""
        return max(0.0, self.seconds - self.computing)

    def works(self) -> list[QueuedWork]:
        """A layer's forward pass waits until the layer before the last has left its buffer; its copy back begins once
        the layer two behind it has been computed backward, and its backward pass waits for it."""
        swapped = self.layers - self.kept
        works: list[QueuedWork] = []
        stored: list[int] = []
        for index in range(self.layers):
            before = index - ROUNDING_BUFFERS
            after = (stored[before],) if 0 <= before < len(stored) else ()
            works.append(QueuedWork("compute", self.forward, after))
            if index < swapped:
                stored.append(len(works))
                works.append(QueuedWork("to_host", self.copy, (len(works) - 1,)))
        done: dict[int, int] = {}
        forward_end = max(index for index, work in enumerate(works) if work.stream == "compute")
        for index in reversed(range(self.layers)):
            fetched: tuple[int, ...] = ()
            if index < swapped:
                behind = index + ROUNDING_BUFFERS
                ready = done.get(behind, forward_end)
                works.append(QueuedWork("to_device", self.copy, (ready, stored[index])))
                fetched = (len(works) - 1,)
            done[index] = len(works)
            works.append(QueuedWork("compute", self.backward, fetched))
        return works


def swapped_pass(layers: int, kept: int, forward: float, again: float, copy: float) -> SwappedPass:
    """backward: twice the forward pass, and what is recomputed."""
    return SwappedPass(layers, kept, forward, 2 * forward + again, copy)

"""Copies between the device and host memory beside the computation. On a CPU "the device" is the same memory, and every
copy is made at once."""

from collections import deque
from typing import Protocol

import torch
from torch import Tensor


def host_zeros_like(tensor: Tensor) -> Tensor:
    """Zeros in host memory; pinned beside a CUDA device, so that copies run beside the computation."""
    return torch.zeros(tensor.shape, dtype=tensor.dtype, device="cpu", pin_memory=tensor.is_cuda)


class HostCopies:
    """Copies in one direction, on a stream of their own. Sources are held until their copy has ended, so that their
    memory is not given to other tensors before (the caching allocator knows the stream that made them only)."""

    def __init__(self, device: torch.device):
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._held: deque[tuple[torch.cuda.Event, Tensor]] = deque()

    def copy(self, target: Tensor, source: Tensor) -> torch.cuda.Event | None:
        """Copies after all that the current stream was given so far; returns the event of its end."""
        if self._stream is None:
            target.copy_(source)
            return None
        self._stream.wait_stream(torch.cuda.current_stream(self._stream.device))
        with torch.cuda.stream(self._stream):
            target.copy_(source, non_blocking=True)
            event = self._stream.record_event()
        self._held.append((event, source))
        self.release()
        return event

    def release(self) -> None:
        """Gives up the sources whose copies have ended."""
        while self._held and self._held[0][0].query():
            self._held.popleft()

    def record(self, event: torch.cuda.Event) -> None:
        """The event happens once all copies so far have ended."""
        if self._stream is not None:
            event.record(self._stream)

    def finish(self) -> None:
        """Blocks until all copies have ended."""
        if self._stream is not None:
            self._stream.synchronize()
            self._held.clear()

    def join(self) -> None:
        """Work given to the current stream from here on waits for all copies so far."""
        if self._stream is not None:
            torch.cuda.current_stream(self._stream.device).wait_stream(self._stream)


# Copies of activations to host memory and back: the streams that a model's layers share, and one tensor's copy.

ROUNDING_BUFFERS = 2  # layers whose activations may be on the device at once


class Prefetched(Protocol):
    """A layer in one pass, whose activations are in host memory."""

    def prefetch(self) -> None: ...


class InHostMemory:
    """A tensor's copy, in the order of the memory, and the events of its copies."""

    def __init__(self, values: Tensor, swap: "SwapStreams"):
        self.swap, self.device = swap, values.device
        self.host = torch.empty(values.shape, dtype=values.dtype, device="cpu", pin_memory=values.is_cuda)
        self._stored = swap.to_host.copy(self.host, values)
        self._back: tuple[Tensor, torch.cuda.Event | None] | None = None

    def prefetch(self) -> None:
        """Begins the copy to the device, for a backward pass that is near."""
        if self._back is None and self.device.type == "cuda":
            self._back = self._fetched()

    def values(self) -> Tensor:
        """On the device; on a CPU the copy itself."""
        if self.device.type == "cpu":
            return self.host
        target, arrived = self._back or self._fetched()
        self._back = None
        if arrived is not None:
            torch.cuda.current_stream(self.device).wait_event(arrived)
        return target

    def _fetched(self) -> tuple[Tensor, torch.cuda.Event | None]:
        if self._stored is not None:
            torch.cuda.current_stream(self.device).wait_event(self._stored)
        target = torch.empty(self.host.shape, dtype=self.host.dtype, device=self.device)
        return target, self.swap.to_device.copy(target, self.host)


class SwapStreams:
    """Shared by the layers of one model: the streams, and the layers whose activations are in host memory. A layer
    begins once the copies of the layer but one before it have ended; in the backward pass each layer begins the copies
    of the one before it."""

    def __init__(self, device: torch.device):
        self.to_host, self.to_device = HostCopies(device), HostCopies(device)
        self.device = device
        self.layers: list[Prefetched] = []
        self._ends: list[torch.cuda.Event] = []

    def begin(self, layer: "Prefetched") -> None:
        if self.device.type == "cuda":
            if len(self._ends) >= ROUNDING_BUFFERS:
                # This thread waits, not only the stream: it runs ahead, and memory is free once it has seen the end.
                self._ends.pop(0).synchronize()
                self.to_host.release()
            self.layers.append(layer)

    def end(self) -> None:
        if self.device.type == "cuda":
            event = torch.cuda.Event()
            self.to_host.record(event)
            self._ends.append(event)

    def backward_begins(self, layer: "Prefetched") -> None:
        if layer in self.layers:
            place = self.layers.index(layer)
            if place:
                self.layers[place - 1].prefetch()
            del self.layers[place]

"""Copies of activations to host memory and back: the streams that a model's layers share, and one tensor's copy."""

from typing import Protocol

import torch
from torch import Tensor

from gristmill.training.memory.host_copies import HostCopies

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

"""Copies between the device and host memory beside the computation. On a CPU "the device" is the same memory, and every
copy is made at once."""

from collections import deque

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

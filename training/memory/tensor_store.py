"""Tensors that lie outside the device's memory: in host memory, or in a file on disk of which no more is in memory than
what is being copied."""

import ctypes
import mmap
import os
import tempfile
from collections.abc import Callable
from math import prod
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor

from gristmill.foundation.errors import InputError

CHUNK_ELEMENTS = 1 << 20  # of a tensor on disk, that are in memory at once where it is read and written piece by piece


class TensorStore(Protocol):
    """in_memory: its tensors may be computed with as they are. Those of a file on disk should be read and written
    here, since pages of the file that are touched through the tensor stay in the process until `release_pages`."""

    in_memory: bool

    def zeros(self, shape: torch.Size, dtype: torch.dtype) -> Tensor:
        """A tensor of the store, to be saved to and loaded from a checkpoint as any tensor in host memory."""
        ...

    def read(self, tensor: Tensor, target: Tensor, start: int = 0) -> None:
        """Fills the target (one dimension, in host memory) with elements from `start` on."""
        ...

    def write(self, tensor: Tensor, source: Tensor, start: int = 0) -> None:
        """Replaces elements from `start` on by those of the source (one dimension, in host memory)."""
        ...

    def on_disk(self, tensor: Tensor) -> bool: ...

    def release_pages(self) -> None: ...


class HostStore:
    """pinned: beside a CUDA device, so that copies run beside the computation."""

    in_memory = True

    def __init__(self, pinned: bool):
        self.pinned = pinned

    def zeros(self, shape: torch.Size, dtype: torch.dtype) -> Tensor:
        return torch.zeros(shape, dtype=dtype, pin_memory=self.pinned)

    def read(self, tensor: Tensor, target: Tensor, start: int = 0) -> None:
        target.copy_(tensor.view(-1)[start : start + target.numel()])

    def write(self, tensor: Tensor, source: Tensor, start: int = 0) -> None:
        tensor.view(-1)[start : start + source.numel()].copy_(source)

    def on_disk(self, tensor: Tensor) -> bool:
        return False

    def release_pages(self) -> None: ...


class DiskStore:
    """One file without a name, which the system removes when the process ends, however it ends. Its blocks are reserved
    as tensors are made, so that a full disk is an error before the first step and not in the middle of a write."""

    in_memory = False

    def __init__(self, folder: Path):
        self.folder = folder
        try:
            folder.mkdir(parents=True, exist_ok=True)
            self._file = tempfile.TemporaryFile(dir=folder, buffering=0)  # noqa: SIM115 (open as long as the store)
        except OSError as error:
            raise InputError(
                f"{folder}: weights on disk need a file here, which cannot be made ({error.strerror}); take a folder "
                "that can be written to, or keep the weights in host memory"
            ) from error
        self._end = 0
        self._maps: list[mmap.mmap] = []
        self._offsets: dict[int, int] = {}  # by address: the maps stay until the end

    def zeros(self, shape: torch.Size, dtype: torch.dtype) -> Tensor:
        count = prod(shape)
        if not count:
            return torch.zeros(shape, dtype=dtype)
        size = count * dtype.itemsize
        try:
            os.posix_fallocate(self._file.fileno(), self._end, size)
        except OSError as error:
            raise InputError(
                f"{self.folder}: {self._end + size:,} bytes of the weights do not fit on this disk ({error.strerror}); "
                "free space, take a folder on a larger one, or keep the weights in host memory"
            ) from error
        mapped = mmap.mmap(self._file.fileno(), size, offset=self._end)
        self._maps.append(mapped)
        tensor = torch.frombuffer(mapped, dtype=dtype, count=count).view(shape)
        self._offsets[tensor.data_ptr()] = self._end
        self._end += -(-size // mmap.ALLOCATIONGRANULARITY) * mmap.ALLOCATIONGRANULARITY
        return tensor

    def read(self, tensor: Tensor, target: Tensor, start: int = 0) -> None:
        self._each(os.preadv, tensor, target, start)

    def write(self, tensor: Tensor, source: Tensor, start: int = 0) -> None:
        self._each(os.pwritev, tensor, source, start)

    def on_disk(self, tensor: Tensor) -> bool:
        """Whether it is a tensor of this store, or begins where one does."""
        return tensor.data_ptr() in self._offsets

    def release_pages(self) -> None:
        """Gives back the memory of pages that were touched through the tensors; their values stay in the file."""
        for mapped in self._maps:
            mapped.madvise(mmap.MADV_DONTNEED)

    def _each(
        self, move: Callable[[int, list[memoryview], int], int], tensor: Tensor, memory: Tensor, start: int
    ) -> None:
        """The system moves at most 2 GiB at once, and may move less."""
        if not memory.numel():
            return
        # Not through numpy, after which torch no longer resizes the storage.
        view = memoryview((ctypes.c_char * memory.nbytes).from_address(memory.data_ptr()))
        place = self._offsets[tensor.data_ptr()] + start * tensor.element_size()
        done = 0
        while done < len(view):
            moved = move(self._file.fileno(), [view[done:]], place + done)
            if not moved:
                raise InputError(f"{self.folder}: the file of the weights has become shorter; start the run again")
            done += moved


def make_store(place: str, folder: Path, device: torch.device) -> TensorStore:
    """place: host or disk."""
    return DiskStore(folder) if place == "disk" else HostStore(pinned=device.type == "cuda")


def values_of(storage: torch.UntypedStorage, dtype: torch.dtype) -> Tensor:
    """All elements of a storage, as a tensor of one dimension that autograd does not know."""
    return torch.empty(0, dtype=dtype, device=storage.device).set_(storage)  # type: ignore[call-overload]

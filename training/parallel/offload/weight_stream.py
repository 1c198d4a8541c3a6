"""Tensors that lie outside the device's memory: in host memory, or in a file on disk of which no more is in memory than
what is being copied."""

import ctypes
import mmap
import os
import tempfile
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from math import prod
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor, nn

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


# Weights of layers that lie in host memory or on disk and are on the device only while their layer computes
# (ZeRO-Infinity, arXiv 2104.07857; ZeRO-Inference, arXiv 2207.00032, section 6).

LAYERS_HELD = 2  # on the device at once: the one that computes, and the next, which arrives


@dataclass(frozen=True)
class _Weight:
    """storage: of the parameter, empty while its layer is not held."""

    storage: torch.UntypedStorage
    dtype: torch.dtype
    stored: Tensor


@dataclass
class _Layer:
    weights: list[_Weight] = field(default_factory=list)
    arrival: "Future[torch.cuda.Event | None] | None" = None  # None: not held


class WeightStream:
    """Brings each layer's weights in before its forward and its backward pass, the next layer's while it computes, and
    lets go of the layer before. The storages of the parameters are emptied and filled again, so autograd, FSDP and the
    layers see ordinary parameters.

    A stream belongs to the layers of one model, which run in their order. `take` gives it the weights of a layer one by
    one; `attach` begins. stored: the shards in the store, by the parameter's name."""

    def __init__(self, store: TensorStore, device: torch.device):
        self.store, self.device = store, device
        self.stored: dict[str, Tensor] = {}
        self.max_held = 0  # layers whose weights were on the device at once
        self._layers: list[_Layer] = []
        self._reader = ThreadPoolExecutor(max_workers=1, thread_name_prefix="weights")
        self._copies = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._ring: list[tuple[Tensor, torch.cuda.Event]] = []  # pinned, of a disk's weights on their way to the device

    def take(self, layer: int, name: str, shard: Tensor, keep_values: bool = True) -> None:
        """Moves the values of this process's shard of a parameter to the store. layer: its place among this process's
        layers. Without keep_values they are zeros, to be loaded into `stored`."""
        while len(self._layers) <= layer:
            self._layers.append(_Layer())
        if not shard.is_contiguous() or shard.storage_offset():
            raise ValueError(f"{name}: a shard that is a view of other weights cannot be streamed")
        storage = shard.untyped_storage()
        flat = self.store.zeros(torch.Size([storage.nbytes() // shard.element_size()]), shard.dtype)
        if keep_values:
            self.store.write(flat, values_of(storage, shard.dtype).cpu())
        self.stored[name] = flat[: shard.numel()].view(shard.shape)
        storage.resize_(0)
        self._layers[layer].weights.append(_Weight(storage, shard.dtype, flat))

    @property
    def held_bytes(self) -> int:
        """Bytes of the layers that are on the device at once, at most."""
        sizes = sorted((sum(weight.stored.nbytes for weight in layer.weights) for layer in self._layers), reverse=True)
        return sum(sizes[:LAYERS_HELD])

    def attach(self, layers: Sequence[nn.Module]) -> None:
        """Registers the hooks: the first of the layers' hooks, before those of FSDP."""
        for index, layer in enumerate(layers):
            layer.register_forward_pre_hook(partial(self._before_forward, index), prepend=True)
            layer.register_forward_hook(partial(self._after_forward, index), prepend=True)

    def release(self) -> None:
        """Lets go of all layers: their weights in the store are about to change."""
        self._hold()

    def close(self) -> None:
        self.release()
        self._reader.shutdown()

    def _before_forward(self, index: int, *_: Any) -> None:
        following = index + 1
        if following == len(self._layers) and not torch.is_grad_enabled():
            following = 0  # of the next pass
        self._enter(index, following)

    def _after_forward(self, index: int, layer: nn.Module, inputs: Any, output: Any) -> None:
        hidden = output[0]
        if not (torch.is_grad_enabled() and hidden.requires_grad):
            return
        hidden.register_hook(lambda gradient: self._enter(index, index - 1))
        if index == len(self._layers) - 1:
            self._enter(index, index - 1)  # its backward pass comes first

    def _enter(self, index: int, following: int) -> None:
        """The layer is held and has arrived; the following one, if there is one, is on its way."""
        self._hold(index, following)
        self._begin(index)
        arrived = self._layers[index].arrival.result()  # type: ignore[union-attr]
        if arrived is not None:
            torch.cuda.current_stream(self.device).wait_event(arrived)
        if 0 <= following < len(self._layers):
            self._begin(following)

    def _hold(self, *kept: int) -> None:
        for index, layer in enumerate(self._layers):
            if layer.arrival is not None and index not in kept:
                layer.arrival.result()
                layer.arrival = None
                for weight in layer.weights:
                    weight.storage.resize_(0)

    def _begin(self, index: int) -> None:
        """Begins the copies of a layer, into memory that is taken here, on the stream of the computation."""
        layer = self._layers[index]
        if layer.arrival is not None:
            return
        for weight in layer.weights:
            weight.storage.resize_(weight.stored.nbytes)
        free = None
        if self._copies is not None:
            free = torch.cuda.current_stream(self.device).record_event()
        layer.arrival = self._reader.submit(self._fill, layer.weights, free)
        self.max_held = max(self.max_held, sum(streamed.arrival is not None for streamed in self._layers))

    def _fill(self, weights: Sequence[_Weight], free: "torch.cuda.Event | None") -> "torch.cuda.Event | None":
        """Runs in the reading thread; returns the event of the last copy to a CUDA device."""
        if self._copies is None:
            for weight in weights:
                self.store.read(weight.stored, values_of(weight.storage, weight.dtype))
            return None
        assert free is not None
        with torch.cuda.stream(self._copies):
            self._copies.wait_event(free)
            for weight in weights:
                source = weight.stored if self.store.in_memory else self._pinned(weight)
                values_of(weight.storage, weight.dtype).copy_(source, non_blocking=True)
                if not self.store.in_memory:
                    self._ring[-1][1].record(self._copies)
            return self._copies.record_event()

    def _pinned(self, weight: _Weight) -> Tensor:
        """The weight's values in one of two pinned buffers of the largest weight, once its last copy has ended."""
        if not self._ring:
            size = max(streamed.stored.nbytes for layer in self._layers for streamed in layer.weights)
            self._ring = [(torch.empty(size, dtype=torch.uint8, pin_memory=True), torch.cuda.Event()) for _ in range(2)]
        self._ring.append(self._ring.pop(0))
        buffer, copied = self._ring[-1]
        copied.synchronize()
        values = buffer[: weight.stored.nbytes].view(weight.dtype)
        self.store.read(weight.stored, values)
        return values

"""Weights of layers that lie in host memory or on disk and are on the device only while their layer computes
(ZeRO-Infinity, arXiv 2104.07857; ZeRO-Inference, arXiv 2207.00032, section 6)."""

from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from gristmill.training.memory.tensor_store import TensorStore, values_of

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
        """Of the layers that are on the device at once, the largest."""
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
        self.max_held = max(self.max_held, sum(each.arrival is not None for each in self._layers))

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
            size = max(each.stored.nbytes for layer in self._layers for each in layer.weights)
            self._ring = [(torch.empty(size, dtype=torch.uint8, pin_memory=True), torch.cuda.Event()) for _ in range(2)]
        self._ring.append(self._ring.pop(0))
        buffer, copied = self._ring[-1]
        copied.synchronize()
        values = buffer[: weight.stored.nbytes].view(weight.dtype)
        self.store.read(weight.stored, values)
        return values

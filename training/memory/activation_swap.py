"""Activations of a layer in host memory between its forward and its backward pass, whole or of a share of the tokens
(MEMO, SIGMOD 2025): the layer's input and the attention's output always, of the rest the first tokens; those of the
other tokens are recomputed. All but attention is computed token by token, so attention itself is never recomputed."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.distributed.tensor import DTensor
from torch.multiprocessing.reductions import StorageWeakRef

from gristmill.training.memory.host_copies import HostCopies

# B batch, T tokens, R of them that are recomputed

# The cut is a multiple of this, so that the blocks of a matmul over the tokens that are left begin where they begin
# over all of them.
CUT_TOKENS = 8
ROUNDING_BUFFERS = 2  # layers whose activations may be on the device at once


@dataclass(frozen=True)
class _Order:
    """How a tensor lies in memory: its dimensions from the outermost, and its shape in that order."""

    dims: tuple[int, ...]
    shape: tuple[int, ...]

    @staticmethod
    def of(tensor: Tensor) -> "_Order":
        dims = tuple(sorted(range(tensor.dim()), key=lambda dim: -tensor.stride(dim)))
        return _Order(dims, tuple(tensor.shape[dim] for dim in dims))

    def in_memory(self, tensor: Tensor) -> Tensor:
        return tensor.permute(self.dims).contiguous()

    def restored(self, flat: Tensor) -> Tensor:
        inverse = [self.dims.index(dim) for dim in range(len(self.dims))]
        return flat.view(self.shape).permute(inverse)


class _InHostMemory:
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
        self.layers: list[SwappedLayer] = []
        self._ends: list[torch.cuda.Event] = []

    def begin(self, layer: "SwappedLayer") -> None:
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

    def backward_begins(self, layer: "SwappedLayer") -> None:
        if layer in self.layers:
            place = self.layers.index(layer)
            if place:
                self.layers[place - 1].prefetch()
            del self.layers[place]


@dataclass(frozen=True)
class _Rows:
    """Of a saved tensor the first tokens are in host memory; number: of the saved tensor in the recomputation."""

    number: int | str
    first: _InHostMemory | None
    order: _Order
    shards: int


@dataclass(frozen=True)
class _Whole:
    copy: _InHostMemory
    order: _Order


class SwappedLayer:
    """One layer in one pass. compute: a method of the layer. share: of the tokens; 1 recomputes nothing.

    metadata: of the pass; it gives that of the last tokens (`of_tokens`), and calls `around_attention` where attention
    is computed. Tensors that the metadata holds, parameters and small tensors stay on the device.

    Under sequence parallelism the input is one tensor rank's shard of the tokens, and what is gathered has `shards` of
    them: the first tokens are then those of each shard, so that every rank recomputes the tokens that it gathers."""

    def __init__(self, compute: Callable[..., Any], x_BTD: Tensor, metadata: Any, share: float, swap: SwapStreams):
        self.compute, self.metadata, self.swap = compute, metadata, swap
        self.batch, self.tokens = x_BTD.shape[:2]
        self.shards = metadata.positions_BT.shape[1] // self.tokens
        self.cut = first_tokens(share, self.tokens)
        self.needs_gradient = x_BTD.requires_grad
        weights = [parameter.detach() for parameter in compute.__self__.parameters()]  # type: ignore[attr-defined]
        weights = [each.to_local() if isinstance(each, DTensor) else each for each in weights]
        self._kept = {_key(tensor)[0] for tensor in [*metadata.tensors(), *weights]}
        self._copies: dict[tuple[Any, ...], tuple[StorageWeakRef, _InHostMemory]] = {}
        self._whole: dict[int, StorageWeakRef] = {}  # storages that are always in host memory
        # Places in memory of queries, keys and values, which may share a storage, while attention is computed.
        self._heads: dict[tuple[Any, ...], str] = {}
        self._in_attention = False
        self._saved = 0
        self._again: dict[int | str, Tensor] | None = None
        self._began_backward = False
        self._input = self._attention = None
        if self.cut < self.tokens:
            self._input = self._always(x_BTD)

    def __call__(self, x_BTD: Tensor, state: Any) -> Any:
        self.swap.begin(self)
        with saved_tensors_hooks(self._pack, self._unpack):
            output = self.compute(x_BTD, replace(self.metadata, around_attention=self._attend), state)
        self._heads.clear()
        self.swap.end()
        return output

    def prefetch(self) -> None:
        for _, copy in self._copies.values():
            copy.prefetch()

    def _attend(self, attend: Callable[..., Tensor], *heads: Tensor) -> Tensor:
        """Attention of queries, keys and values [B, T, H, K]; what it saves besides those is kept whole."""
        self._heads = {_key(part): name for part, name in zip(heads, ("query", "key", "value"), strict=True)}
        self._in_attention = True
        mixed = attend(*heads)
        self._in_attention = False
        if self.cut < self.tokens:
            self._attention = self._always(mixed)
        return mixed

    def _always(self, tensor: Tensor) -> _Whole:
        self._whole[_key(tensor)[0]] = StorageWeakRef(tensor.untyped_storage())
        return self._stored(tensor.detach())

    def _pack(self, tensor: Tensor) -> Tensor | _Rows | _Whole:
        number: int | str = self._saved
        self._saved += not self._in_attention
        storage = _key(tensor)[0]
        if storage in self._kept or tensor.numel() < self.tokens:
            return tensor
        order = _Order.of(tensor)
        if self._in_attention:
            name = self._heads.get(_key(tensor))
            if name is None or self.cut == self.tokens or tensor.numel() % (self.batch * self.tokens):
                return self._stored(tensor)
            number, shards = name, self.shards
        elif self.cut == self.tokens or self._is_whole(storage) or not self._is_by_token(order):
            return self._stored(tensor)
        else:
            shards = self._shards_of(order)
        first = None
        if self.cut:
            first = self._copied(
                tensor, "first", lambda values: self._by_token(values, shards)[:, :, : self.cut].contiguous(), order
            )
        return _Rows(number, first, order, shards)

    def _is_whole(self, storage: int) -> bool:
        """The address of a storage that was freed may be another one's by now."""
        return storage in self._whole and not self._whole[storage].expired()

    def _stored(self, tensor: Tensor) -> _Whole:
        order = _Order.of(tensor)
        return _Whole(self._copied(tensor, "whole", lambda values: values.view(-1), order), order)

    def _copied(self, tensor: Tensor, part: str, take: Callable[[Tensor], Tensor], order: _Order) -> _InHostMemory:
        """Views of the same values are copied once, while they are alive."""
        key = part, *_key(tensor)
        held = self._copies.get(key)
        if held is None or held[0].expired():
            copy = _InHostMemory(take(order.in_memory(tensor.detach())), self.swap)
            held = self._copies[key] = StorageWeakRef(tensor.untyped_storage()), copy
        return held[1]

    def _unpack(self, saved: Tensor | _Rows | _Whole) -> Tensor:
        if isinstance(saved, Tensor):
            return saved
        if not self._began_backward:
            self._began_backward = True
            self.swap.backward_begins(self)
        if isinstance(saved, _Whole):
            return saved.order.restored(saved.copy.values())
        last = self._recomputed(saved.number)
        if last.numel() == _product(saved.order.shape):  # not of tokens after all, but for its size
            return saved.order.restored(last)
        parts = [] if saved.first is None else [saved.first.values()]
        whole = torch.cat([*parts, last.view(self.batch, saved.shards, self.tokens - self.cut, -1)], dim=2)
        return saved.order.restored(whole)

    def _recomputed(self, number: int | str) -> Tensor:
        """The last tokens of a saved tensor, in the order of the memory. The layer is computed once more over them,
        with the attention's output in place of attention."""
        if self._again is None:
            self._again = self._recompute()
        return self._again[number]

    def _recompute(self) -> dict[int | str, Tensor]:
        assert self._input is not None
        again: dict[int | str, Tensor] = {}

        def pack(tensor: Tensor) -> Tensor:
            number = sum(isinstance(key, int) for key in again)
            again[number] = _Order.of(tensor).in_memory(tensor.detach())
            return tensor

        def attend(_: Callable[..., Tensor], *heads: Tensor) -> Tensor:
            for part, name in zip(heads, ("query", "key", "value"), strict=True):
                again[name] = _Order.of(part).in_memory(part.detach())
            assert self._attention is not None
            return _last(self._attention, self.cut, self.shards).requires_grad_(heads[0].requires_grad)

        metadata = replace(self.metadata.of_tokens(self.cut, self.shards), around_attention=attend)
        x_BRD = _last(self._input, self.cut, 1).requires_grad_(self.needs_gradient)
        with torch.enable_grad(), saved_tensors_hooks(pack, lambda tensor: tensor):
            self.compute(x_BRD, metadata, None)
        return again

    def _is_by_token(self, order: _Order) -> bool:
        return self._tokens_of(order) in (self.tokens, self.shards * self.tokens)

    def _tokens_of(self, order: _Order) -> int:
        """Of a sample, in a tensor [B, T, ...] or [B x T, ...]; 0 in others."""
        if order.shape[:1] == (self.batch,) and len(order.shape) > 1:
            return order.shape[1]
        return order.shape[0] // self.batch if order.shape and order.shape[0] % self.batch == 0 else 0

    def _shards_of(self, order: _Order) -> int:
        return self._tokens_of(order) // self.tokens

    def _by_token(self, values: Tensor, shards: int) -> Tensor:
        return values.reshape(self.batch, shards, self.tokens, -1)


def first_tokens(share: float, tokens: int) -> int:
    """Tokens of a share: a multiple of 8 where that leaves some on both sides."""
    cut = round(share * tokens)
    return cut if cut in (0, tokens) else round(cut / CUT_TOKENS) * CUT_TOKENS


def _last(saved: _Whole, cut: int, shards: int) -> Tensor:
    """The tokens behind the first `cut` of each shard."""
    whole = saved.order.restored(saved.copy.values())
    return whole.unflatten(1, (shards, -1))[:, :, cut:].flatten(1, 2).contiguous()


def _key(tensor: Tensor) -> tuple[Any, ...]:
    storage = tensor.untyped_storage().data_ptr()
    return storage, tensor.storage_offset(), tensor.numel(), tensor.dtype, tensor._version


def _product(shape: Iterable[int]) -> int:
    result = 1
    for size in shape:
        result *= size
    return result

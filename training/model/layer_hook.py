"""Layer hooks that save the memory of activations: they recompute them, or keep them in host memory."""

import math
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from gristmill.training.model.attention.metadata import LayerHook
from gristmill.training.model.attention.ring import RING_OPERATOR
from gristmill.training.parallel.linear import ONEDNN_OPERATOR
from gristmill.training.parallel.offload.swap import InHostMemory, SwapStreams

# Saved under recompute: operators: results of matmuls and attention; all other operators are cheap to recompute.
# Collectives are not listed: the result of an in-place one is memory that the layer goes on to change.
_KEPT_OPERATORS: tuple[Any, ...] = (
    torch.ops.aten.mm.default,
    torch.ops.aten.addmm.default,
    torch.ops.aten._scaled_dot_product_flash_attention.default,
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default,
    torch.ops.aten._scaled_dot_product_efficient_attention.default,
    torch.ops.aten._scaled_dot_product_cudnn_attention.default,
    torch.ops.aten._scaled_mm.default,
    torch.ops.aten._grouped_mm.default,
    torch.ops.aten._scaled_grouped_mm.default,
    RING_OPERATOR,
)
if torch.backends.mkldnn.is_available():  # a torch built without oneDNN does not have the operator
    _KEPT_OPERATORS += (torch.ops.mkldnn._linear_pointwise.default,)
_KEPT_WHEN_COMPILED: tuple[Any, ...] = (ONEDNN_OPERATOR, torch.ops.higher_order.flex_attention)


class RecomputedLayer(LayerHook):
    """recompute: full. Keeps the layer's input."""

    def around_layer(self, compute: Callable[..., Any], *inputs: Any) -> Any:
        return _recomputed(compute, inputs)


class RecomputedOperators(LayerHook):
    """recompute: operators. Keeps the layer's input and the results of matmuls and attention."""

    def around_layer(self, compute: Callable[..., Any], *inputs: Any) -> Any:
        return _recomputed(compute, inputs, context_fn=_kept_and_reused)


class CompiledOperators(LayerHook):
    """recompute: operators, of a layer that is compiled with the hook around it: the compiler keeps the results.
    Operators inside a compiled function cannot be seen from outside."""

    def __init__(self, dynamic: bool | None = None) -> None:
        """dynamic: of torch.compile."""
        self.train, self.evaluate = (torch.compile(call, dynamic=dynamic) for call in (_with_kept_results, _called))

    def around_layer(self, compute: Callable[..., Any], *inputs: Any) -> Any:
        return self.train(compute, inputs) if torch.is_grad_enabled() else self.evaluate(compute, inputs)


def _with_kept_results(compute: Callable[..., Any], inputs: tuple[Tensor, Any, Any]) -> tuple[Tensor, None]:
    """In training no mixer returns a state."""
    x_BTD, *others = inputs
    keeps = partial(create_selective_checkpoint_contexts, _policy)
    return checkpoint(lambda x: compute(x, *others)[0], x_BTD, use_reentrant=False, context_fn=keeps), None


def _called(compute: Callable[..., Any], inputs: tuple[Tensor, Any, Any]) -> Any:
    return compute(*inputs)


def _policy(_: Any, operator: Any, *arguments: Any, **named: Any) -> CheckpointPolicy:
    kept = operator in _KEPT_OPERATORS or operator in _KEPT_WHEN_COMPILED
    return CheckpointPolicy.MUST_SAVE if kept else CheckpointPolicy.PREFER_RECOMPUTE


class RecomputedMixer(LayerHook):
    """recompute: attention. Keeps the input of the mixer's norm."""

    def around_mixer(self, mix: Callable[..., Any], *inputs: Any) -> Any:
        return _recomputed(mix, inputs)


def _recomputed(function: Callable[..., Any], inputs: tuple[Any, ...], **options: Any) -> Any:
    return checkpoint(function, *inputs, use_reentrant=False, preserve_rng_state=False, **options)


def _kept_and_reused() -> tuple["_KeptResults", "_ReusedResults"]:
    """Dispatch modes of a layer's forward pass and of its recomputation."""
    kept = _KeptResults()
    return kept, _ReusedResults(kept)


@dataclass(frozen=True)
class _Kept:
    """Results of an operator, and how often each tensor had been written to."""

    tensors: tuple[Any, ...]
    versions: tuple[int, ...]
    single: bool

    @classmethod
    def of(cls, result: Any) -> "_Kept":
        tensors = tuple(result) if isinstance(result, tuple | list) else (result,)
        kept = tuple(tensor.detach() if isinstance(tensor, torch.Tensor) else tensor for tensor in tensors)
        return cls(kept, _versions(kept), not isinstance(result, tuple | list))

    def result(self) -> Any:
        if _versions(self.tensors) != self.versions:
            raise RuntimeError("a result that recompute: operators keeps was changed in place before the backward pass")
        return self.tensors[0] if self.single else self.tensors


def _versions(values: tuple[Any, ...]) -> tuple[int, ...]:
    return tuple(tensor._version for tensor in values if isinstance(tensor, torch.Tensor))


class _KeptResults(TorchDispatchMode):
    """Keeps the results of _KEPT_OPERATORS in the order in which they were computed.

    torch's own selective checkpointing numbers the calls of every operator and fails where the recomputation has more
    of any. A module that FSDP shards within the layer has more: it gathers its weights once more where they were
    still whole in the forward pass, and its hooks and the profiler's marks are operators too. Only the layer itself
    calls the operators that are kept here, so only those are numbered."""

    supports_higher_order_operators = True  # a compiled layer is a single one

    def __init__(self) -> None:
        super().__init__()
        self.results: defaultdict[Any, deque[_Kept]] = defaultdict(deque)

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """True: operators inside a compiled layer are not seen; it is recomputed as a whole."""
        return True

    def __torch_dispatch__(self, operator: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = operator(*args, **(kwargs or {}))
        if operator in _KEPT_OPERATORS:
            self.results[operator].append(_Kept.of(result))
        return result


class _ReusedResults(TorchDispatchMode):
    """Gives the kept results again, each once, in place of computing them."""

    supports_higher_order_operators = True

    def __init__(self, kept: _KeptResults) -> None:
        super().__init__()
        self.kept = kept

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """As in the forward pass."""
        return True

    def __torch_dispatch__(self, operator: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if operator in _KEPT_OPERATORS:
            return self.kept.results[operator].popleft().result()
        return operator(*args, **(kwargs or {}))


# Activations of a layer in host memory between its forward and its backward pass, whole or of a share of the tokens
# (MEMO, SIGMOD 2025): the layer's input and the attention's output always, of the rest the first tokens; those of the
# other tokens are recomputed. All but attention is computed token by token, so attention itself is never recomputed;
# nor are convolutions and scans of other mixers, and routed experts, whose load and capacity are of all tokens.

# B batch, T tokens, R of them that are recomputed

# The cut is a multiple of this, so that the blocks of a matmul over the tokens that are left begin where they begin
# over all of them.
CUT_TOKENS = 8


@dataclass(frozen=True)
class _MemoryLayout:
    """How a tensor lies in memory: its dimensions from the outermost, and its shape in that order."""

    dims: tuple[int, ...]
    shape: tuple[int, ...]

    @staticmethod
    def of(tensor: Tensor) -> "_MemoryLayout":
        dims = tuple(sorted(range(tensor.dim()), key=lambda dim: -tensor.stride()[dim]))
        return _MemoryLayout(dims, tuple(tensor.shape[dim] for dim in dims))

    def in_memory(self, tensor: Tensor) -> Tensor:
        return tensor.permute(self.dims).contiguous()

    def restored(self, flat: Tensor) -> Tensor:
        inverse = [self.dims.index(dim) for dim in range(len(self.dims))]
        return flat.view(self.shape).permute(inverse)


@dataclass(frozen=True)
class _SavedRows:
    """A saved tensor whose first tokens are in host memory; number: of the saved tensor in the recomputation."""

    number: int | str
    first: InHostMemory | None
    order: _MemoryLayout
    shards: int


@dataclass(frozen=True)
class _SavedTensor:
    copy: InHostMemory
    order: _MemoryLayout


@dataclass(frozen=True)
class _TokenMixing:
    """Names of what is mixed, by its place in memory. shards: of the tokens, in each of them."""

    names: dict[tuple[Any, ...], str]
    shards: int


class SwapHook(LayerHook):
    """recompute: swap and tokens. share: of the tokens whose activations go to host memory."""

    def __init__(self, share: float, swap: SwapStreams):
        self.share, self.swap = share, swap

    def around_layer(self, compute: Callable[..., Any], *inputs: Any) -> Any:
        if not torch.is_grad_enabled():
            return compute(*inputs)
        x_BTD, metadata, state = inputs
        return SwappedLayer(compute, x_BTD, metadata, self.share, self.swap)(x_BTD, state)


class SwappedLayer(LayerHook):
    """One layer in one pass, and the hook of that pass. compute: a method of the layer. share: of the tokens; 1
    recomputes nothing.

    metadata: of the pass; it gives that of the last tokens (`of_tokens`), and its hook is called where what is computed
    is not of single tokens. Tensors that the metadata holds, parameters and small tensors stay on the device.

    Under sequence parallelism the input is one tensor rank's shard of the tokens, and what is gathered has `shards` of
    them: the first tokens are then those of each shard, so that every rank recomputes the tokens that it gathers."""

    def __init__(self, compute: Callable[..., Any], x_BTD: Tensor, metadata: Any, share: float, swap: SwapStreams):
        self.compute, self.metadata, self.swap = compute, metadata, swap
        self.batch, self.tokens = x_BTD.shape[:2]
        self.shards = metadata.positions_BT.shape[1] // self.tokens
        self.cut = first_tokens(share, self.tokens)
        self.needs_gradient = x_BTD.requires_grad
        layer: nn.Module = getattr(compute, "_torchdynamo_orig_callable", compute).__self__  # type: ignore[union-attr]
        self._kept = {_key(tensor)[0] for tensor in metadata.tensors()} | _places(layer.parameters())
        # Parts of the layer whose weights FSDP gathers when they are called, after this.
        self._gathered_later = [part for part in layer.modules() if isinstance(part, FSDPModule) and part is not layer]
        self._copies: dict[tuple[Any, ...], tuple[StorageWeakRef, InHostMemory]] = {}
        self._whole: dict[int, StorageWeakRef] = {}  # storages that are always in host memory
        # Places in memory of what is mixed (queries, keys and values, which may share a storage), while it is.
        self._mixing: _TokenMixing | None = None
        self._mixed: list[tuple[_SavedTensor, int]] = []  # results, always in host memory, with their shards
        self._mixings = self._saved = 0
        self._again: dict[int | str, Tensor] | None = None
        self._began_backward = False
        self._input = None
        if self.cut < self.tokens:
            self._input = self._always(x_BTD)

    def __call__(self, x_BTD: Tensor, state: Any) -> Any:
        self.swap.begin(self)
        with saved_tensors_hooks(self._pack, self._unpack):
            # Only where tokens are computed again must it be known what is mixed; compiled layers do not take that.
            metadata = self.metadata if self.cut == self.tokens else replace(self.metadata, hook=self)
            output = self.compute(x_BTD, metadata, state)
        self.swap.end()
        return output

    def prefetch(self) -> None:
        for _, copy in self._copies.values():
            copy.prefetch()

    def around_token_mixing(self, function: Callable[..., Tensor], *streams: Tensor) -> Tensor:
        """Keeps whole what the function saves besides its streams."""
        names = self._names(streams)
        shards = streams[0].shape[1] // self.tokens
        self._mixing = _TokenMixing({_key(part): name for part, name in zip(streams, names, strict=True)}, shards)
        mixed = function(*streams)
        self._mixing = None
        if self.cut < self.tokens:
            self._mixed.append((self._always(mixed), shards))
        return mixed

    def _names(self, streams: Sequence[Tensor]) -> list[str]:
        """Names of the streams that are mixed next: the same in the recomputation."""
        self._mixings += 1
        return [f"{self._mixings}.{index}" for index in range(len(streams))]

    def _always(self, tensor: Tensor) -> _SavedTensor:
        self._whole[_key(tensor)[0]] = StorageWeakRef(tensor.untyped_storage())
        return self._stored(tensor.detach())

    def _pack(self, tensor: Tensor) -> Tensor | _SavedRows | _SavedTensor:
        number: int | str = self._saved
        self._saved += self._mixing is None
        storage = _key(tensor)[0]
        if tensor.numel() < self.tokens or self._is_kept(storage):
            return tensor
        order = _MemoryLayout.of(tensor)
        if self._mixing is not None:
            name = self._mixing.names.get(_key(tensor))
            if name is None or self.cut == self.tokens:
                return self._stored(tensor)
            number, shards = name, self._mixing.shards
        elif self.cut == self.tokens or self._is_whole(storage) or not self._is_by_token(order):
            return self._stored(tensor)
        else:
            shards = self._shards_of(order)
        first = None
        if self.cut:
            first = self._copied(
                tensor, "first", lambda values: self._by_token(values, shards)[:, :, : self.cut].contiguous(), order
            )
        return _SavedRows(number, first, order, shards)

    def _is_kept(self, storage: int) -> bool:
        return storage in self._kept or any(storage in _places(part.parameters()) for part in self._gathered_later)

    def _is_whole(self, storage: int) -> bool:
        """The address of a storage that was freed may be another one's by now."""
        return storage in self._whole and _is_at(self._whole[storage], storage)

    def _stored(self, tensor: Tensor) -> _SavedTensor:
        order = _MemoryLayout.of(tensor)
        return _SavedTensor(self._copied(tensor, "whole", lambda values: values.view(-1), order), order)

    def _copied(
        self, tensor: Tensor, part: str, take: Callable[[Tensor], Tensor], order: _MemoryLayout
    ) -> InHostMemory:
        """Views of the same values are copied once, while they are alive."""
        key = part, *_key(tensor)
        cached = self._copies.get(key)
        if cached is None or not _is_at(cached[0], key[1]):
            copy = InHostMemory(take(order.in_memory(tensor.detach())), self.swap)
            cached = self._copies[key] = StorageWeakRef(tensor.untyped_storage()), copy
        return cached[1]

    def _unpack(self, saved: Tensor | _SavedRows | _SavedTensor) -> Tensor:
        if isinstance(saved, Tensor):
            return saved
        if not self._began_backward:
            self._began_backward = True
            self.swap.backward_begins(self)
        if isinstance(saved, _SavedTensor):
            return saved.order.restored(saved.copy.values())
        last = self._recomputed(saved.number)
        if last.numel() == math.prod(saved.order.shape):  # not of tokens after all, but for its size
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
        recomputed: dict[int | str, Tensor] = {}
        mixed, self._mixings = iter(self._mixed), 0

        def pack(tensor: Tensor) -> Tensor:
            number = sum(isinstance(key, int) for key in recomputed)
            recomputed[number] = _MemoryLayout.of(tensor).in_memory(tensor.detach())
            return tensor

        def mix(streams: Sequence[Tensor]) -> Tensor:
            for part, name in zip(streams, self._names(streams), strict=True):
                recomputed[name] = _MemoryLayout.of(part).in_memory(part.detach())
            saved, shards = next(mixed)
            return _last(saved, self.cut, shards).requires_grad_(streams[0].requires_grad)

        metadata = replace(self.metadata.of_tokens(self.cut, self.shards), hook=_Recomputation(mix))
        x_BRD = _last(self._input, self.cut, 1).requires_grad_(self.needs_gradient)
        with torch.enable_grad(), saved_tensors_hooks(pack, lambda tensor: tensor):
            self.compute(x_BRD, metadata, None)
        return recomputed

    def _is_by_token(self, order: _MemoryLayout) -> bool:
        return self._tokens_of(order) in (self.tokens, self.shards * self.tokens)

    def _tokens_of(self, order: _MemoryLayout) -> int:
        """Tokens of a sample, in a tensor [B, T, ...] or [B x T, ...]; 0 in others."""
        if order.shape[:1] == (self.batch,) and len(order.shape) > 1:
            return order.shape[1]
        return order.shape[0] // self.batch if order.shape and order.shape[0] % self.batch == 0 else 0

    def _shards_of(self, order: _MemoryLayout) -> int:
        return self._tokens_of(order) // self.tokens

    def _by_token(self, values: Tensor, shards: int) -> Tensor:
        return values.reshape(self.batch, shards, self.tokens, -1)


class _Recomputation(LayerHook):
    """The hook of a recomputation, where `mix` gives the kept result of each mixing."""

    def __init__(self, mix: Callable[[Sequence[Tensor]], Tensor]):
        self.mix = mix

    def around_token_mixing(self, function: Callable[..., Tensor], *streams: Tensor) -> Tensor:
        return self.mix(streams)


def first_tokens(share: float, tokens: int) -> int:
    """Tokens of a share: a multiple of 8 where that leaves some on both sides."""
    cut = round(share * tokens)
    return cut if cut in (0, tokens) else round(cut / CUT_TOKENS) * CUT_TOKENS


def _last(saved: _SavedTensor, cut: int, shards: int) -> Tensor:
    """The tokens behind the first `cut` of each shard."""
    whole = saved.order.restored(saved.copy.values())
    return whole.unflatten(1, (shards, -1))[:, :, cut:].flatten(1, 2).contiguous()


def _places(parameters: Iterable[nn.Parameter]) -> set[int]:
    """Addresses of their storages, of DTensors of this rank's part."""
    shards = (parameter.detach() for parameter in parameters)
    return {_key(shard.to_local() if isinstance(shard, DTensor) else shard)[0] for shard in shards}


def _is_at(reference: StorageWeakRef, address: int) -> bool:
    """Whether the storage is alive with its memory there: that of a weight that FSDP gathered outlives its memory."""
    storage = torch.UntypedStorage._new_with_weak_ptr(reference.cdata)
    return storage is not None and storage.data_ptr() == address


def _key(tensor: Tensor) -> tuple[Any, ...]:
    storage = tensor.untyped_storage().data_ptr()
    return storage, tensor.storage_offset(), tensor.numel(), tensor.dtype, tensor._version

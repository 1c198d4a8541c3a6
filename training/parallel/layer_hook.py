"""Layer hooks: what stands around the computation of a layer, and the hooks that recompute activations.

A layer calls its hook at three places, and a hook overrides those it needs; the base class only calls through. The hook
that keeps activations in host memory is in `offload/swap.py`."""

from collections import defaultdict, deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

# Saved under recompute: operators: results of matmuls and attention; all other operators are cheap to recompute.
# Collectives are not listed: the result of an in-place one is memory that the layer goes on to change.
_KEPT_OPERATORS: tuple[Any, ...] = (
    torch.ops.aten.mm.default,
    torch.ops.aten.addmm.default,
    torch.ops.aten._scaled_dot_product_flash_attention.default,
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default,
    torch.ops.aten._scaled_dot_product_efficient_attention.default,
    torch.ops.aten._scaled_dot_product_cudnn_attention.default,
)
if torch.backends.mkldnn.is_available():  # a torch built without oneDNN does not have the operator
    _KEPT_OPERATORS += (torch.ops.mkldnn._linear_pointwise.default,)


class LayerHook:
    """Calls through. Hooks need no random state: dropout masks are hashes."""

    def around_layer(self, compute: Callable[..., Any], *inputs: Any) -> Any:
        """Around the whole layer: compute(x_BTD, metadata, state)."""
        return compute(*inputs)

    def around_mixer(self, mix: Callable[..., Any], *inputs: Any) -> Any:
        """Around the mixer and the norm before it: mix(x_BTD, metadata, state)."""
        return mix(*inputs)

    def around_mixing(self, function: Callable[..., Tensor], *streams: Tensor) -> Tensor:
        """Around all in a layer that is not computed token by token: function(*streams) [B, T, ...] of tensors
        [B, T, ...], such as attention of queries, keys and values, scans and routed experts. A hook may replace the
        result without calling the function. Called on the hook of the pass, `AttentionMetadata.hook`."""
        return function(*streams)


NO_HOOK = LayerHook()


class RecomputedLayer(LayerHook):
    """recompute: full. Keeps the layer's input."""

    def around_layer(self, compute: Callable[..., Any], *inputs: Any) -> Any:
        return _recomputed(compute, inputs)


class RecomputedOperators(LayerHook):
    """recompute: operators. Keeps the layer's input and the results of matmuls and attention."""

    def around_layer(self, compute: Callable[..., Any], *inputs: Any) -> Any:
        return _recomputed(compute, inputs, context_fn=_kept_and_reused)


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

"""Activation checkpointing: which activations a layer saves for the backward pass, and which it recomputes."""

from collections import defaultdict, deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from gristmill.training.config.layout import SWAPS, LayoutConfig, Recompute
from gristmill.training.parallel.offload.swap import SwappedLayer, SwapStreams

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


@dataclass(frozen=True)
class ActivationCheckpointing:
    """The policy of one layer. Recomputation needs no random state: dropout masks are hashes."""

    mode: Recompute = "none"
    offloaded_token_fraction: float = 1.0
    swap: SwapStreams | None = None

    def layer(self, compute: Callable[..., Any], *inputs: Any) -> Any:
        if self.mode == "full":
            return _recomputed(compute, inputs)
        if self.mode == "operators":
            return _recomputed(compute, inputs, context_fn=_kept_and_reused)
        if self.mode in SWAPS and torch.is_grad_enabled():
            assert self.swap is not None
            x_BTD, metadata, state = inputs
            return SwappedLayer(compute, x_BTD, metadata, self.offloaded_token_fraction, self.swap)(x_BTD, state)
        return compute(*inputs)

    def mixer(self, mix: Callable[..., Any], *inputs: Any) -> Any:
        return _recomputed(mix, inputs) if self.mode == "attention" else mix(*inputs)


def activation_checkpointing(
    layout: LayoutConfig, layer_index: int, layers: int, swap: SwapStreams | None
) -> ActivationCheckpointing:
    """layers: of the whole model."""
    if layer_index % layout.recompute_every:
        return ActivationCheckpointing()
    if layout.recompute not in SWAPS:
        return ActivationCheckpointing(layout.recompute)
    if layer_index >= layers - layout.num_layers_on_device:
        return ActivationCheckpointing()
    share = 1.0 if layout.recompute == "swap" else layout.offloaded_token_fraction
    assert share is not None, "the planner chooses it before the model is built"
    return ActivationCheckpointing(layout.recompute, share, swap)


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

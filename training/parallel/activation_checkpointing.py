"""Activation checkpointing: which activations a layer saves for the backward pass, and which it recomputes."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from gristmill.training.config.layout import SWAPS, LayoutConfig, Recompute
from gristmill.training.parallel.offload.swap import SwappedLayer, SwapStreams

# Saved under recompute: operators: results of matmuls and attention; all other operators are cheap to recompute.
# Collectives are not listed: torch refuses to keep the result of an in-place one.
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
    swapped_tokens: float = 1.0
    swap: SwapStreams | None = None

    def layer(self, compute: Callable[..., Any], *inputs: Any) -> Any:
        if self.mode == "full":
            return _recomputed(compute, inputs)
        if self.mode == "operators":
            return _recomputed(compute, inputs, context_fn=partial(create_selective_checkpoint_contexts, _policy))
        if self.mode in SWAPS and torch.is_grad_enabled():
            assert self.swap is not None
            x_BTD, metadata, state = inputs
            return SwappedLayer(compute, x_BTD, metadata, self.swapped_tokens, self.swap)(x_BTD, state)
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
    if layer_index >= layers - layout.unswapped_layers:
        return ActivationCheckpointing()
    share = 1.0 if layout.recompute == "swap" else layout.swapped_tokens
    assert share is not None, "the planner chooses it before the model is built"
    return ActivationCheckpointing(layout.recompute, share, swap)


def _recomputed(function: Callable[..., Any], inputs: tuple[Any, ...], **options: Any) -> Any:
    return checkpoint(function, *inputs, use_reentrant=False, preserve_rng_state=False, **options)


def _policy(context: Any, operator: Any, *_: Any, **__: Any) -> CheckpointPolicy:
    return CheckpointPolicy.MUST_SAVE if operator in _KEPT_OPERATORS else CheckpointPolicy.PREFER_RECOMPUTE

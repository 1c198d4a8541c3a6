"""Activation checkpointing: which activations a layer saves for the backward pass, and which it recomputes."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from gristmill.training.layout_config import LayoutConfig, Recompute

# Saved under recompute: operators: results of matmuls and attention; all other operators are cheap to recompute.
# Collectives are not listed: torch refuses to keep the result of an in-place one.
_KEPT_OPERATORS = (
    torch.ops.aten.mm.default,
    torch.ops.aten.addmm.default,
    torch.ops.aten._scaled_dot_product_flash_attention.default,
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default,
    torch.ops.aten._scaled_dot_product_efficient_attention.default,
    torch.ops.aten._scaled_dot_product_cudnn_attention.default,
)


@dataclass(frozen=True)
class ActivationCheckpointing:
    """The policy of one layer. Recomputation needs no random state: dropout masks are hashes."""

    mode: Recompute = "none"

    def layer(self, compute: Callable[..., Any], *inputs: Any) -> Any:
        if self.mode == "full":
            return _recomputed(compute, inputs)
        if self.mode == "operators":
            return _recomputed(compute, inputs, context_fn=partial(create_selective_checkpoint_contexts, _policy))
        return compute(*inputs)

    def mixer(self, mix: Callable[..., Any], *inputs: Any) -> Any:
        return _recomputed(mix, inputs) if self.mode == "attention" else mix(*inputs)


def activation_checkpointing(layout: LayoutConfig, layer_index: int) -> ActivationCheckpointing:
    return ActivationCheckpointing(layout.recompute if layer_index % layout.recompute_every == 0 else "none")


def _recomputed(function: Callable[..., Any], inputs: tuple[Any, ...], **options: Any) -> Any:
    return checkpoint(function, *inputs, use_reentrant=False, preserve_rng_state=False, **options)


def _policy(context: Any, operator: Any, *_: Any, **__: Any) -> CheckpointPolicy:
    return CheckpointPolicy.MUST_SAVE if operator in _KEPT_OPERATORS else CheckpointPolicy.PREFER_RECOMPUTE

"""Our own transformer as evaluation uses it: any positions, any mask, a key/value state."""

from typing import Any

import torch
from torch import Tensor

from gristmill.training.model.attention_mask import (
    AttentionMetadata,
    alibi_bias,
    alibi_masks,
    causal_masks,
    rotary_angles,
)
from gristmill.training.model.transformer import Transformer

# B rows, T tokens, S tokens before them and they, D width, V vocabulary, N picked positions


class TransformerBackbone:
    """A whole model in one process. Nothing in it learns or drops out."""

    def __init__(self, model: Transformer, context: int):
        self.model = model.eval().requires_grad_(False)
        self.context = context
        self.vocab_size = model.vocab_size
        self.device = model.head.weight.device

    def hidden(
        self, tokens_BT: Tensor, positions_BT: Tensor | None = None, visible_BTT: Tensor | None = None
    ) -> Tensor:
        if positions_BT is None or visible_BTT is None:
            tokens = tokens_BT.shape[1]
            positions_BT = torch.arange(tokens, device=self.device).unsqueeze(0)
            masks = causal_masks(self._windows(), tokens, 0, None, self.device)
            if self.model.config.positions == "alibi":
                masks = alibi_masks(masks, tokens, 0, self.model.slopes(self.device))
        else:
            masks = self._masks(positions_BT, positions_BT, visible_BTT)
        hidden_BTD, _ = self._run(tokens_BT, self._plan(positions_BT, masks, keep_state=False), None)
        return hidden_BTD

    def head(self, hidden_ND: Tensor) -> Tensor:
        return self.model.head(hidden_ND.unsqueeze(0), None, None)[0]

    def extend(
        self,
        tokens_BT: Tensor,
        positions_BT: Tensor,
        visible_BTS: Tensor,
        state: tuple[Tensor, tuple[Any, ...]] | None,
    ) -> tuple[Tensor, tuple[Tensor, tuple[Any, ...]]]:
        """The state is (positions_BS of what it holds, one value a layer)."""
        seen_BS = positions_BT if state is None else torch.cat([state[0], positions_BT], dim=1)
        plan = self._plan(positions_BT, self._masks(positions_BT, seen_BS, visible_BTS), keep_state=True)
        hidden_BTD, layers = self._run(tokens_BT, plan, None if state is None else state[1])
        return hidden_BTD, (seen_BS, layers)

    def _run(
        self, tokens_BT: Tensor, plan: AttentionMetadata, states: tuple[Any, ...] | None
    ) -> tuple[Tensor, tuple[Any, ...]]:
        x_BTD, grown = through_layers(self.model, embedded(self.model, tokens_BT, plan), plan, states)
        return self.model.final_norm(x_BTD), grown

    def _plan(
        self, positions_BT: Tensor, masks: dict[int | None, Tensor | None], keep_state: bool
    ) -> AttentionMetadata:
        config = self.model.config
        rotation = None
        if config.positions == "rope":
            rotation = rotary_angles(positions_BT, config.head_dim, config.rope_base, self.model.dtype)
        return AttentionMetadata(positions_BT, masks, rotation, keep_state=keep_state)

    def _masks(self, asking_BT: Tensor, seen_BS: Tensor, visible_BTS: Tensor) -> dict[int | None, Tensor | None]:
        """Windows and ALiBi count in positions, not in columns: in a tree, neighbours may be far apart in depth."""
        back_BTS = asking_BT.unsqueeze(2) - seen_BS.unsqueeze(1)
        masks = {
            window: visible_BTS if window is None else visible_BTS & (back_BTS < window) for window in self._windows()
        }
        if self.model.config.positions != "alibi":
            return masks
        slopes_H = self.model.slopes(self.device)
        return {window: alibi_bias(mask_BTS, back_BTS, slopes_H) for window, mask_BTS in masks.items()}

    def _windows(self) -> set[int | None]:
        return {layer.window for layer in self.model.config.layer_list}


def embedded(model: Transformer, tokens_BT: Tensor, plan: AttentionMetadata) -> Tensor:
    x_BTD = model.embedding(tokens_BT)
    if model.embedding_norm is not None:
        x_BTD = model.embedding_norm(x_BTD)
    return x_BTD if model.positions is None else x_BTD + model.positions(plan.positions_BT, x_BTD.dtype)


def through_layers(
    part: Transformer, x_BTD: Tensor, plan: AttentionMetadata, states: tuple[Any, ...] | None
) -> tuple[Tensor, tuple[Any, ...]]:
    """The stream after the layers of a part, and what their mixers remember, a value a layer."""
    grown = []
    layers = part.layers.values()
    for layer, state in zip(layers, states or [None] * len(layers), strict=True):
        x_BTD, state = layer(x_BTD, plan, state)
        grown.append(state)
    return x_BTD, tuple(grown)

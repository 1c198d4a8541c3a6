"""The transformer, or a run of its layers: embedding, layers, head. It knows no parallelism but the layers it is made
of."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from gristmill.training.config import LayoutConfig, ModelConfig
from gristmill.training.loss import Scoring, losses
from gristmill.training.model.attention_mask import (
    AttentionMetadata,
    alibi_masks,
    alibi_slopes,
    block_masks,
    causal_masks,
    rotary_angles,
)
from gristmill.training.model.dropout import Dropout
from gristmill.training.model.layer import Layer
from gristmill.training.model.norm import Norm
from gristmill.training.parallel.activation_checkpointing import retention
from gristmill.training.parallel.mesh import Mesh, single_process
from gristmill.training.parallel.tensor import Sharding, TensorAxis, VocabularyEmbedding

# B batch, T tokens, D width, V vocabulary; Vt = this tensor rank's share of it


@dataclass(frozen=True)
class StageSpec:
    """The layers first to last - 1, with the embedding before them and the head after them where they are at an end."""

    first: int
    last: int
    embeds: bool
    scores: bool


class Head(nn.Module):
    """Hidden states to logits, or straight to losses. Tied, its weight is the embedding's."""

    def __init__(self, config: ModelConfig, vocab_size: int, tensor: TensorAxis, z_loss: float):
        super().__init__()
        self.tensor = tensor
        self.weight = tensor.parameter((vocab_size, config.width), Sharding.ROWS)
        scale = config.mup_base_width / config.width if config.initialisation == "mup" else 1.0
        self.scoring = Scoring(tensor, vocab_size, scale, config.logit_softcap, z_loss)

    def forward(self, x_BTD: Tensor, targets_BT: Tensor | None, weights_BT: Tensor | None) -> Tensor:
        hidden_BTD = self.tensor.enter(x_BTD)
        if targets_BT is None:
            return self.scoring.logits(hidden_BTD, self.tensor.local(self.weight, Sharding.ROWS, x_BTD.dtype))
        head_VtD = self.tensor.local(
            self.weight, Sharding.ROWS, self.weight.dtype
        )  # its gradient is summed in this dtype
        return losses(self.scoring, hidden_BTD, head_VtD, targets_BT, weights_BT)


class Transformer(nn.Module):
    """Parameters have one name on every layout: layers are keyed by their number in the whole model, and what a part
    lacks is None. They stand on the meta device until `initial.py` or a checkpoint fills them."""

    def __init__(
        self,
        config: ModelConfig,
        vocab_size: int,
        mesh: Mesh | None = None,
        layout: LayoutConfig | None = None,
        part: StageSpec | None = None,
        dtype: torch.dtype = torch.float32,
        z_loss: float = 0.0,
        seed: int = 0,
        float8: bool = False,
    ):
        super().__init__()
        layout = layout or LayoutConfig()
        self.config, self.vocab_size, self.dtype, self.seed = config, vocab_size, dtype, seed
        self.part = part or StageSpec(0, config.layers, embeds=True, scores=True)
        self.tensor = TensorAxis(mesh or single_process(), layout.sequence_parallel, float8)
        self.embedding = self.positions = self.embedding_norm = self.final_norm = self.head = None
        if self.part.embeds:
            self.embedding = VocabularyEmbedding(self.tensor, vocab_size, config.width, dtype)
            if config.embedding_norm:
                self.embedding_norm = Norm(config, self.tensor, config.width)
            if config.positions == "learned":
                self.positions = PositionEmbedding(self.tensor, config.context, config.width)
        indices = range(self.part.first, self.part.last)
        self.layers = nn.ModuleDict({str(i): Layer(config, i, self.tensor, retention(layout, i)) for i in indices})
        if self.part.scores:
            self.final_norm = Norm(config, self.tensor, config.width)
            self.head = Head(config, vocab_size, self.tensor, z_loss)
            if config.tied_embeddings and self.embedding is not None:
                self.head.weight = self.embedding.weight

    def forward(
        self,
        x: Tensor,
        targets: Tensor | None = None,
        weights: Tensor | None = None,
        positions: Tensor | None = None,
        documents: Tensor | None = None,
        samples: Tensor | None = None,
    ) -> Tensor:
        """tokens int64[B, T] (or, after the first part, hidden states) -> hidden states, or at the end logits float[B,
        T, Vt], or losses [B, 2] where targets are given. positions restart where documents do; both are int64[B, T].
        samples int64[B], the samples' numbers, turn dropout on."""
        plan = self.plan(x, positions, documents, samples)
        x_BTD = self._embed(x, plan)
        for layer in self.layers.values():
            x_BTD, _ = layer(x_BTD, plan)
        return x_BTD if self.head is None else self.head(self.final_norm(x_BTD), targets, weights)

    def extend(
        self, tokens_BT: Tensor, states: Sequence[Any] | None = None, past: int = 0
    ) -> tuple[Tensor, tuple[Any, ...]]:
        """Logits [B, T, V] of new tokens after `past` earlier ones, and the states to hand in with the next: one a
        layer, values that may be kept or dropped. For one process and a whole model."""
        positions_BT = torch.arange(past, past + tokens_BT.shape[1], device=tokens_BT.device).unsqueeze(0)
        plan = self.plan(tokens_BT, positions_BT, None, None, past, keep_state=True)
        x_BTD = self._embed(tokens_BT, plan)
        grown = []
        for layer, state in zip(self.layers.values(), states or [None] * len(self.layers), strict=True):
            x_BTD, state = layer(x_BTD, plan, state)
            grown.append(state)
        return self.head(self.final_norm(x_BTD), None, None), tuple(grown)

    def plan(
        self,
        x: Tensor,
        positions: Tensor | None,
        documents: Tensor | None,
        samples: Tensor | None,
        past: int = 0,
        keep_state: bool = False,
    ) -> AttentionMetadata:
        """What every layer needs to know of the whole sequence, also where x holds this rank's tokens only."""
        tokens = x.shape[1] * (1 if self.part.embeds or not self.tensor.cuts_tokens else self.tensor.size)
        place_T = torch.arange(tokens, device=x.device)
        positions_BT = place_T.unsqueeze(0) if positions is None else positions
        rotation = None
        if self.config.positions == "rope":
            rotation = rotary_angles(positions_BT, self.config.head_dim, self.config.rope_base, self.dtype)
        dropout = None
        if samples is not None and self.config.dropout:
            own_T = self.tensor.own_tokens(place_T, dim=0)
            features_D = torch.arange(self.config.width, device=x.device)
            dropout = Dropout(self.config.dropout, self.seed, samples, own_T, features_D)
        windows = [layer.window for layer in self.config.layer_list]
        if x.device.type == "cuda" and not keep_state and self.config.positions != "alibi":
            masks = block_masks(windows, tokens, documents, x.device)
        else:
            masks = causal_masks(windows, tokens, past, documents, x.device)
        if self.config.positions == "alibi":
            masks = alibi_masks(masks, tokens, past, self.slopes(x.device))
        return AttentionMetadata(positions_BT, masks, rotation, dropout, keep_state)

    def slopes(self, device: torch.device) -> Tensor:
        """ALiBi's slopes of this tensor rank's heads."""
        own = self.config.heads // self.tensor.size
        every_H = alibi_slopes(self.config.heads, self.dtype, device)
        return every_H[self.tensor.rank * own : (self.tensor.rank + 1) * own]

    def _embed(self, x: Tensor, plan: AttentionMetadata) -> Tensor:
        if self.embedding is None:
            return x
        x_BTD = self.embedding(x)
        if self.embedding_norm is not None:
            x_BTD = self.embedding_norm(x_BTD)
        if self.positions is not None:
            x_BTD = x_BTD + self.positions(plan.positions_BT, x_BTD.dtype)
        return plan.drop(x_BTD, layer=self.config.layers, site=0)


class PositionEmbedding(nn.Module):
    """Learned positions, added to this rank's tokens."""

    def __init__(self, tensor: TensorAxis, context: int, width: int):
        super().__init__()
        self.tensor = tensor
        self.weight = tensor.parameter((context, width), Sharding.WHOLE)

    def forward(self, positions_BT: Tensor, dtype: torch.dtype) -> Tensor:
        table_TD = self.tensor.local(self.weight, Sharding.WHOLE, dtype)
        return nn.functional.embedding(self.tensor.own_tokens(positions_BT), table_TD)

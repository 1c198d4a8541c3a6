"""The transformer, or one pipeline stage of it: embedding, layers, head."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from gristmill.training.costs.stage_splitting import StageSpec
from gristmill.training.distillation import Distillation, distillation_losses
from gristmill.training.layout_config import LayoutConfig
from gristmill.training.loss import Scoring, losses
from gristmill.training.model.attention_metadata import (
    AttentionMetadata,
    alibi_masks,
    alibi_slopes,
    block_masks,
    causal_masks,
    explicit_masks,
    rotary_angles,
)
from gristmill.training.model.dropout import Dropout
from gristmill.training.model.layer import Layer
from gristmill.training.model.norm import Norm
from gristmill.training.model.routing_metadata import RoutingMetadata
from gristmill.training.model_config import ModelConfig
from gristmill.training.parallel.activation_checkpointing import activation_checkpointing
from gristmill.training.parallel.mesh import Mesh, single_process
from gristmill.training.parallel.tensor import Sharding, TensorAxis, VocabularyEmbedding

# B batch, T tokens, D width, V vocabulary; Vt = this tensor rank's share of it


@dataclass(frozen=True)
class ComputeOptions:
    """How a model computes. dtype: of activations and matmuls. seed: of dropout masks. z_loss: weight of log(Z)^2 in
    the loss. float8: linear layers run in 8 bits."""

    dtype: torch.dtype = torch.float32
    seed: int = 0
    z_loss: float = 0.0
    float8: bool = False


class Head(nn.Module):
    """Hidden states to logits, or directly to losses. Tied, its weight is the embedding's."""

    def __init__(self, config: ModelConfig, vocab_size: int, tensor: TensorAxis, z_loss: float):
        super().__init__()
        self.tensor = tensor
        self.weight = tensor.parameter((vocab_size, config.width), Sharding.OUTPUT)
        scale = config.mup_base_width / config.width if config.initialisation == "mup" else 1.0
        self.distillation: Distillation | None = None
        self.scoring = Scoring(tensor, vocab_size, scale, config.logit_softcap, z_loss)

    def forward(
        self,
        x_BTD: Tensor,
        targets_BT: Tensor | None,
        weights_BT: Tensor | None,
        teacher_BTD: Tensor | None = None,
    ) -> Tensor:
        hidden_BTD = self.tensor.enter(x_BTD)
        if targets_BT is None:
            return self.scoring.logits(hidden_BTD, self.tensor.local(self.weight, Sharding.OUTPUT, x_BTD.dtype))
        head_VtD = self.tensor.local(
            self.weight, Sharding.OUTPUT, self.weight.dtype
        )  # its gradient is summed in this dtype
        losses_B2 = losses(self.scoring, hidden_BTD, head_VtD, targets_BT, weights_BT)
        if teacher_BTD is None or self.distillation is None:
            return losses_B2
        teacher_BTD = self.tensor.enter(teacher_BTD)
        taught_B = distillation_losses(self.scoring, hidden_BTD, head_VtD, teacher_BTD, weights_BT, self.distillation)
        return torch.stack([losses_B2[:, 0] + taught_B, losses_B2[:, 1]], dim=1)


class Transformer(nn.Module):
    """Parameters have one name on every layout: layers are keyed by their number in the whole model, and modules of
    other stages are None. They are on the meta device until `initialization.py` or a checkpoint fills them."""

    def __init__(
        self,
        config: ModelConfig,
        vocab_size: int,
        mesh: Mesh | None = None,
        layout: LayoutConfig | None = None,
        stage: StageSpec | None = None,
        options: ComputeOptions = ComputeOptions(),
    ):
        super().__init__()
        layout = layout or LayoutConfig()
        self.config, self.vocab_size, self.options = config, vocab_size, options
        self.stage = stage or StageSpec(0, config.layers, embeds=True, scores=True)
        self.tensor = TensorAxis(mesh or single_process(), layout.sequence_parallel, options.float8)
        self.side_loss_factor: float | None = None  # set during training passes (forward_backward.py)
        self.embedding = self.positions = self.embedding_norm = self.final_norm = self.head = None
        if self.stage.embeds:
            self.embedding = VocabularyEmbedding(self.tensor, vocab_size, config.width, options.dtype)
            if config.embedding_norm:
                self.embedding_norm = Norm(config, self.tensor, config.width)
            if config.positions == "learned":
                self.positions = PositionEmbedding(self.tensor, config.sequence_length, config.width)
        indices = range(self.stage.first, self.stage.last)
        self.layers = nn.ModuleDict(
            {
                str(i): Layer(config, i, self.tensor, activation_checkpointing(layout, i), layout.expert_tensor)
                for i in indices
            }
        )
        if self.stage.scores:
            self.final_norm = Norm(config, self.tensor, config.width)
            self.head = Head(config, vocab_size, self.tensor, options.z_loss)
            if config.tied_embeddings and self.embedding is not None:
                self.head.weight = self.embedding.weight

    def forward(
        self, x: Tensor, targets: Tensor | None = None, weights: Tensor | None = None, **fields: Tensor
    ) -> Tensor:
        """tokens int64[B, T] (or, after the first stage, hidden states) -> hidden states, or at the end logits float[B,
        T, Vt], or losses [B, 2] where targets are given.

        fields: of a batch, by name. positions and documents int64[B, T]: positions restart where documents do. samples
        int64[B], the samples' numbers, turn dropout on. teacher: final hidden states of the teacher, for the head."""
        teacher = fields.pop("teacher", None)
        metadata = self.attention_metadata(x, **fields)
        if self.side_loss_factor is not None and self.config.has_experts:
            samples = fields.get("samples", torch.arange(len(x), device=x.device))
            routing = RoutingMetadata(samples, weights, self.side_loss_factor, self.options.seed)
            metadata = replace(metadata, routing=routing)
        hidden_BTD, _ = self.hidden_states(x, metadata)
        return hidden_BTD if self.head is None else self.head(hidden_BTD, targets, weights, teacher)

    @property
    def dtype(self) -> torch.dtype:
        """Of activations and matmuls."""
        return self.options.dtype

    def hidden_states(
        self, x: Tensor, metadata: AttentionMetadata, caches: Sequence[Any] | None = None
    ) -> tuple[Tensor, tuple[Any, ...]]:
        """Hidden states [B, T, D] after the layers, and after the final norm at the end of the model.

        x: tokens int64[B, T], or, after the first stage, hidden states. caches: one a layer, as the call before
        returned them; the second value holds them with the new tokens added if the metadata asks for it."""
        x_BTD = self._embed(x, metadata)
        new_caches = []
        for layer, cache in zip(self.layers.values(), caches or [None] * len(self.layers), strict=True):
            x_BTD, cache = layer(x_BTD, metadata, cache)
            new_caches.append(cache)
        return x_BTD if self.final_norm is None else self.final_norm(x_BTD), tuple(new_caches)

    def attention_metadata(
        self,
        x: Tensor,
        positions: Tensor | None = None,
        documents: Tensor | None = None,
        samples: Tensor | None = None,
        flex: bool = True,
    ) -> AttentionMetadata:
        """Causal attention over whole sequences, also where x holds this rank's tokens only.

        flex: use the flex kernels on GPUs, which are compiled for each sequence length."""
        tokens = x.shape[1] * (1 if self.stage.embeds or not self.tensor.shards_tokens else self.tensor.size)
        token_index_T = torch.arange(tokens, device=x.device)
        positions_BT = token_index_T.unsqueeze(0) if positions is None else positions
        dropout = None
        if samples is not None and self.config.dropout:
            own_T = self.tensor.local_tokens(token_index_T, dim=0)
            features_D = torch.arange(self.config.width, device=x.device)
            dropout = Dropout(self.config.dropout, self.options.seed, samples, own_T, features_D)
        if flex and x.device.type == "cuda" and self.config.positions != "alibi":
            masks = block_masks(self._windows(), tokens, documents, x.device)
        else:
            masks = causal_masks(self._windows(), tokens, documents, x.device)
        if self.config.positions == "alibi":
            masks = alibi_masks(masks, tokens, self.slopes(x.device))
        return AttentionMetadata(positions_BT, masks, self._rotation(positions_BT), dropout)

    def masked_attention_metadata(
        self, positions_BT: Tensor, key_positions_BS: Tensor, visible_BTS: Tensor, keep_state: bool = False
    ) -> AttentionMetadata:
        """Attention under an explicit mask: trees of continuations, or new tokens after those in a KV cache.

        key_positions_BS: positions of the cached tokens, then of the new ones. visible_BTS: bool, which of them each
        new token attends to."""
        slopes_H = self.slopes(positions_BT.device) if self.config.positions == "alibi" else None
        masks = explicit_masks(self._windows(), positions_BT, key_positions_BS, visible_BTS, slopes_H)
        return AttentionMetadata(positions_BT, masks, self._rotation(positions_BT), keep_state=keep_state)

    def _windows(self) -> set[int | None]:
        return {layer.window for layer in self.config.layer_list}

    def _rotation(self, positions_BT: Tensor) -> tuple[Tensor, Tensor] | None:
        if self.config.positions != "rope":
            return None
        return rotary_angles(positions_BT, self.config.head_dim, self.config.rope_base, self.options.dtype)

    def slopes(self, device: torch.device) -> Tensor:
        """ALiBi's slopes of this tensor rank's heads."""
        own = self.config.heads // self.tensor.size
        every_H = alibi_slopes(self.config.heads, self.options.dtype, device)
        return every_H[self.tensor.rank * own : (self.tensor.rank + 1) * own]

    def _embed(self, x: Tensor, metadata: AttentionMetadata) -> Tensor:
        if self.embedding is None:
            return x
        x_BTD = self.embedding(x)
        if self.embedding_norm is not None:
            x_BTD = self.embedding_norm(x_BTD)
        if self.positions is not None:
            x_BTD = x_BTD + self.positions(metadata.positions_BT, x_BTD.dtype)
        return metadata.drop(x_BTD, layer=self.config.layers, site=0)


class PositionEmbedding(nn.Module):
    """Learned positions, added to this rank's tokens."""

    def __init__(self, tensor: TensorAxis, sequence_length: int, width: int):
        super().__init__()
        self.tensor = tensor
        self.weight = tensor.parameter((sequence_length, width), Sharding.REPLICATED)

    def forward(self, positions_BT: Tensor, dtype: torch.dtype) -> Tensor:
        table_TD = self.tensor.local(self.weight, Sharding.REPLICATED, dtype)
        return nn.functional.embedding(self.tensor.local_tokens(positions_BT), table_TD)

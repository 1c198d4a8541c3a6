"""The transformer, or one pipeline stage of it: embedding, layers, head."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from gristmill.training.config.layout import SWAPS, LayoutConfig, StageSpec
from gristmill.training.config.model import ModelConfig
from gristmill.training.model.attention.metadata import (
    AttentionMetadata,
    Mask,
    RoutingMetadata,
    Segments,
    alibi_masks,
    alibi_slopes,
    block_masks,
    causal_masks,
    document_masks,
    documents_of_chains,
    explicit_masks,
)
from gristmill.training.model.attention.ring_plan import context_metadata, ring_plans
from gristmill.training.model.decoding_cache import SlotRows
from gristmill.training.model.heads import Head, ModelOutput, NamedOutputs, TeacherStage
from gristmill.training.model.layer import Layer, build_hook
from gristmill.training.model.modules import Dropout, Norm, TokenTable, rotary_angles
from gristmill.training.parallel.mesh import Mesh, single_process
from gristmill.training.parallel.offload.swap import SwapStreams
from gristmill.training.parallel.tensor import TensorAxis, VocabularyEmbedding

# B batch, T tokens, D width, V vocabulary; Vt = this tensor rank's share of it

INPUT_FIELDS = ("positions", "documents", "segments")  # of a batch, that the forward pass reads beside the tokens


@dataclass(frozen=True)
class ComputeOptions:
    """How a model computes. dtype: of activations and matmuls. seed: of dropout masks. z_loss: weight of log(Z)^2 in
    the loss. float8: linear layers run in 8 bits."""

    dtype: torch.dtype = torch.float32
    seed: int = 0
    z_loss: float = 0.0
    float8: bool = False


def flex_serves(config: ModelConfig, dtype: torch.dtype) -> bool:
    """Whether flex attention's kernels take the model's heads: 16 wide at least and not in float64 (torch 2.11)."""
    values = config.mixers.get("latent_attention", {}).get("value_width", config.head_dim)
    return config.positions != "alibi" and min(config.head_dim, values) >= 16 and dtype != torch.float64


Fields = Mapping[str, Tensor]  # of a batch, by name, each [samples, ...]
OutputFunction = Callable[[ModelOutput, Fields], Any]


class Transformer(nn.Module):
    """Parameters have one name on every layout: layers are keyed by their number in the whole model, and modules of
    other stages are None. They are on the meta device until `model/init.py` or a checkpoint fills them."""

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
        self.context, self.context_method = layout.context, layout.context_method
        # Properties of the configuration that the forward pass reads, computed once.
        self.windows, self.has_experts = frozenset(config.attention_windows), config.has_experts
        self.carries_state = bool(config.stateful_mixers)
        self.rope_width = (config.rope_width or config.head_dim) if config.has_attention else None
        # A number of the stream's precision, as Gemma has it.
        self.embedding_scale = torch.tensor(config.scales.embedding, dtype=options.dtype, device="cpu").item()
        self.stage = stage or StageSpec(0, config.layers, has_embedding=True, has_head=True)
        self.tensor = TensorAxis(
            mesh or single_process(), layout.sequence_parallel, options.float8, layout.async_tensor_parallel
        )
        self.side_loss_factor: float | Tensor | None = None  # set during training passes (engine/passes.py)
        self.output: OutputFunction | None = None  # set during training and evaluation passes (engine/passes.py)
        # Documents of the next pass on the host, for a context axis (engine/passes.py): FSDP moves inputs to the GPU.
        self.host_documents: Tensor | None = None
        self.teacher: TeacherStage | None = None
        self.run_layers, self.layers_at_once = run_layers, max(1, config.layers)  # `train.compile` changes both
        self.embedding = self.positions = self.segments = self.embedding_norm = None
        self.final_norm = self.head = self.outputs = None
        if self.stage.has_embedding:
            self.embedding = VocabularyEmbedding(self.tensor, vocab_size, config.width, options.dtype)
            if config.embedding_norm:
                self.embedding_norm = Norm(config, self.tensor, config.width)
            if config.positions == "learned":
                self.positions = TokenTable(self.tensor, config.sequence_length + config.position_offset, config.width)
            if config.segments:
                self.segments = TokenTable(self.tensor, config.segments, config.width)
        indices = range(self.stage.first, self.stage.last)
        swap = SwapStreams((mesh or single_process()).device) if layout.recompute in SWAPS else None
        hooks = [build_hook(layout, i, config.layers, swap) for i in indices]
        self.layers: Mapping[str, Layer] = nn.ModuleDict(  # type: ignore[assignment]
            {
                str(i): Layer(config, i, self.tensor, hook, layout.expert_tensor)
                for i, hook in zip(indices, hooks, strict=True)
            }
        )
        if self.stage.has_head:
            self.final_norm = Norm(config, self.tensor, config.width) if config.final_norm else None
            self.head = Head(config, vocab_size, self.tensor, options.z_loss)
            if config.tied_embeddings and self.embedding is not None:
                self.head.weight = self.embedding.weight
            if config.outputs:
                self.outputs = NamedOutputs(config, self.tensor)

    def forward(self, x: Tensor, **batch: Tensor) -> Any:
        """tokens int64[B, T], or [B, R, T] of R rows a sample (or, after the first stage, hidden states) -> hidden
        [B x R, T, D], or at the end `output` of them, or logits float[B, T, Vt] where there is no output.

        batch: fields by name. positions, documents, segments int64, shaped as tokens: each token sees its own document;
        positions restart where documents do. samples int64[B], the samples' numbers, turn dropout on. The others are
        for `output`."""
        x = x.flatten(0, -2) if self.stage.has_embedding else x
        rows = {name: batch[name].flatten(0, -2) for name in INPUT_FIELDS if name in batch}
        if "samples" in batch:
            rows["samples"] = _row_numbers(batch["samples"], len(x))
        segments_BT = rows.pop("segments", None)
        metadata = self.attention_metadata(x, rows.get("positions"), rows.get("documents"), rows.get("samples"))
        if self.side_loss_factor is not None and self.has_experts:
            samples_B = rows.get("samples", torch.arange(len(x), device=x.device))
            weights_BT = batch["weights"].flatten(0, -2)
            factor, seed = self.side_loss_factor, self.options.seed
            routing = RoutingMetadata(samples_B, weights_BT, factor, seed, metadata.shares, rows.get("documents"))
            metadata = replace(metadata, routing=routing)
        hidden_BTD, _ = self.hidden_states(x, metadata, segments_BT=segments_BT)
        if self.output is not None:
            stage: Any = self  # the last one, which has a head
            return self.output(ModelOutput(stage, hidden_BTD, batch, metadata.shares), batch)
        return hidden_BTD if self.head is None else self.head(hidden_BTD)

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of activations and matmuls."""
        return self.options.dtype

    def hidden_states(
        self,
        x: Tensor,
        metadata: AttentionMetadata,
        caches: Sequence[Any] | None = None,
        segments_BT: Tensor | None = None,
        some: range | None = None,
    ) -> tuple[Tensor, tuple[Any, ...]]:
        """Hidden states [B, T, D] after the layers, and after the final norm at the end of the model.

        x: tokens int64[B, T], or, after the first stage, hidden states. caches: one a layer, as the call before
        returned them; the second value holds them with the new tokens added if the metadata asks for it. some: the
        layers to run, by their number here; behind the first of all x are hidden states of the layer before."""
        some = range(len(self.layers)) if some is None else some
        x_BTD = x if some.start else self.embed(x, metadata, segments_BT)
        layers, new_caches = list(self.layers.values()), []
        for first in some[:: self.layers_at_once]:
            group = range(first, min(first + self.layers_at_once, some.stop))
            known = [None if caches is None else caches[number] for number in group]
            x_BTD, after = self.run_layers(layers[group.start : group.stop], x_BTD, metadata, known)
            new_caches += after
        if self.final_norm is not None and some.stop == len(layers):
            x_BTD = self.final_norm(x_BTD)
        return x_BTD, tuple(new_caches)

    def attention_metadata(
        self,
        x: Tensor,
        positions: Tensor | None = None,
        documents: Tensor | None = None,
        samples: Tensor | None = None,
        flex: bool = True,
    ) -> AttentionMetadata:
        """Attention over whole sequences, also where x holds this rank's tokens only.

        flex: use the flex kernels on GPUs, which are compiled for each sequence length."""
        tokens = x.shape[1] if self.stage.has_embedding else x.shape[1] * self.context * self._tensor_parts
        token_index_T = torch.arange(tokens, device=x.device)
        positions_BT = token_index_T.unsqueeze(0) if positions is None else positions
        shares, ring, segments = None, None, None
        if self.context > 1:
            axis = self.tensor.mesh.context
            on_host, self.host_documents = self.host_documents, None
            if documents is not None:
                on_host = documents.cpu() if on_host is None else on_host.flatten(0, -2)
            shares, visible = context_metadata(self.config, axis, self.context_method, on_host, x, tokens)
            ring = ring_plans(visible, shares, self.slopes(x.device) if self.config.positions == "alibi" else None)
            token_index_T, positions_BT = shares.own_T, shares.own(positions_BT)
            segments = Segments(shares, documents) if self.carries_state else None
        masks = {} if ring is not None else self._masks(tokens, documents, x.device, flex)
        dropout = None
        if samples is not None and self.config.dropout:
            own_T = self.tensor.local_tokens(token_index_T, dim=0)
            features_D = torch.arange(self.config.width, device=x.device)
            dropout = Dropout(self.config.dropout, self.options.seed, samples, own_T, features_D)
        return AttentionMetadata(
            positions_BT,
            masks,
            self._rotation(positions_BT),
            dropout,
            causal=self.causal,
            documents_BT=documents,
            window_rotation_BTK=self._window_rotation(positions_BT),
            shares=shares,
            segments=segments,
            ring=ring,
        )

    @property
    def _tensor_parts(self) -> int:
        return self.tensor.size if self.tensor.shards_tokens else 1

    def _masks(self, tokens: int, documents: Tensor | None, device: torch.device, flex: bool) -> dict[int | None, Mask]:
        """The masks of whole sequences by window."""
        if not self.causal:
            return document_masks(documents)
        if flex and device.type == "cuda" and flex_serves(self.config, self.options.dtype):
            plain = self.config.attention_softcap is None
            return dict(block_masks(self.windows, tokens, documents, device, plain=plain))
        masks = causal_masks(self.windows, tokens, documents, device)
        return alibi_masks(masks, tokens, self.slopes(device)) if self.config.positions == "alibi" else masks

    def masked_attention_metadata(self, positions_BT: Tensor, visible_BTT: Tensor) -> AttentionMetadata:
        """Attention under an explicit mask, such as that of a tree of continuations.

        visible_BTT: bool, which tokens each token attends to. Mixers that carry a state read the tokens that the last
        one attends to, in their order: raises ValueError where a token attends to others."""
        slopes_H = self.slopes(positions_BT.device) if self.config.positions == "alibi" else None
        masks = explicit_masks(self.windows, positions_BT, positions_BT, visible_BTT, slopes_H)
        documents_BT = documents_of_chains(visible_BTT) if self.config.stateful_mixers else None
        return AttentionMetadata(
            positions_BT,
            masks,
            self._rotation(positions_BT),
            documents_BT=documents_BT,
            window_rotation_BTK=self._window_rotation(positions_BT),
        )

    def slot_attention_metadata(self, rows: SlotRows) -> AttentionMetadata:
        """Attention of tokens to those of their slots up to themselves. Mixers that carry a state return it."""
        positions_BT = rows.positions_BT.clamp(min=0) if rows.padded else rows.positions_BT
        tokens, device = positions_BT.shape[1], positions_BT.device
        slopes_H = self.slopes(device) if self.config.positions == "alibi" else None
        if rows.reads_itself_only:
            masks = causal_masks(self.windows, tokens, None, device)
            masks = masks if slopes_H is None else alibi_masks(masks, tokens, slopes_H)
        else:
            columns_1S = torch.arange(rows.span, device=device).unsqueeze(0)
            visible_BTS = columns_1S <= positions_BT.unsqueeze(2)
            masks = explicit_masks(self.windows, positions_BT, columns_1S, visible_BTS, slopes_H)
        return AttentionMetadata(
            positions_BT,
            masks,
            self._rotation(positions_BT),
            keep_state=True,
            documents_BT=(rows.positions_BT >= 0).long() if rows.padded else None,
            window_rotation_BTK=self._window_rotation(positions_BT),
        )

    def unmasked_metadata(self, positions_BT: Tensor) -> AttentionMetadata:
        """Positions and rotary angles, for attention that needs no masks."""
        return AttentionMetadata(
            positions_BT,
            {},
            self._rotation(positions_BT),
            window_rotation_BTK=self._window_rotation(positions_BT),
        )

    @property
    def causal(self) -> bool:
        return self.config.attention == "causal"

    def _rotation(self, positions_BT: Tensor) -> tuple[Tensor, Tensor] | None:
        if self.config.positions != "rope" or self.rope_width is None:
            return None
        base, scaling = self.config.rope_base, self.config.rope_scaling
        return rotary_angles(positions_BT, self.rope_width, base, self.options.dtype, scaling)

    def _window_rotation(self, positions_BT: Tensor) -> tuple[Tensor, Tensor] | None:
        base = self.config.window_rope_base
        if base is None or self.rope_width is None or self.windows <= {None}:
            return None
        return rotary_angles(positions_BT, self.rope_width, base, self.options.dtype)

    def slopes(self, device: torch.device) -> Tensor:
        """ALiBi's slopes of the heads whose attention this rank computes."""
        own_H = alibi_slopes(self.config.heads, self.options.dtype, device).chunk(self.tensor.size)[self.tensor.rank]
        if self.context > 1 and self.context_method == "all_to_all":
            return own_H.chunk(self.context)[self.tensor.mesh.context.rank]
        return own_H

    def embed(self, x: Tensor, metadata: AttentionMetadata, segments_BT: Tensor | None = None) -> Tensor:
        """The stream before the first layer, of tokens int64[B, T]."""
        if self.embedding is None:
            return x
        if metadata.shares is not None:
            x = metadata.shares.own(x)
            segments_BT = None if segments_BT is None else metadata.shares.own(segments_BT)
        x_BTD = self.embedding(x)
        if self.embedding_scale != 1:
            x_BTD = x_BTD * self.embedding_scale
        if self.embedding_norm is not None and self.config.embedding_norm != "sum":
            x_BTD = self.embedding_norm(x_BTD)
        if self.positions is not None:
            x_BTD = x_BTD + self.positions(metadata.positions_BT + self.config.position_offset, x_BTD.dtype)
        if self.segments is not None:
            x_BTD = x_BTD + self.segments(torch.zeros_like(x) if segments_BT is None else segments_BT, x_BTD.dtype)
        if self.embedding_norm is not None and self.config.embedding_norm == "sum":
            x_BTD = self.embedding_norm(x_BTD)
        return metadata.drop(x_BTD, layer=self.config.layers, site=0)


def run_layers(
    layers: Sequence[Layer], x_BTD: Tensor, metadata: AttentionMetadata, caches: Sequence[Any]
) -> tuple[Tensor, list[Any]]:
    """The stream behind these layers, and the state of each one's mixer if the metadata keeps it. caches: the states
    before, or None each."""
    states = []
    for layer, cache in zip(layers, caches, strict=True):
        x_BTD, state = layer(x_BTD, metadata, cache)
        states.append(state)
    return x_BTD, states


def _row_numbers(samples_B: Tensor, rows: int) -> Tensor:
    """A number for each row, from the samples' numbers. [4, 7] with 4 rows in all -> [8, 9, 14, 15]."""
    rows_per_sample = rows // len(samples_B)
    return (samples_B.unsqueeze(1) * rows_per_sample + torch.arange(rows_per_sample, device=samples_B.device)).flatten()

"""Peak memory of each rank by part, in bytes; the tables print GiB (2**30)."""

from dataclasses import dataclass, replace

from gristmill.training.config.layout import ON_DEVICE, SWAPS, OffloadConfig
from gristmill.training.planner.activations import (
    ROUNDING_BUFFERS,
    ElementSizes,
    SwapBytes,
    boundary_bytes,
    ends_bytes,
    layer_bytes,
    logits_bytes,
    swap_bytes,
)
from gristmill.training.planner.costs.model_shape import ModelShape
from gristmill.training.planner.costs.parameters import (
    ExpertSharding,
    Weight,
    block_weights,
    chunk_length,
    embedding_weights,
    head_weights,
    sharded_count,
)
from gristmill.training.planner.framework import Framework
from gristmill.training.planner.hardware import GIB
from gristmill.training.planner.layout import Layout, RankLayers, live_chunks

BF16_CUDA = ElementSizes()
# CUDA context, NCCL's channels and cuBLAS workspaces: about 1.5 GiB on A100 and H100 before a model is loaded.
CUDA_CONTEXT_BYTES = 1.5 * GIB
LAYERS_HELD = 2  # of streamed weights, on the device at once (training/parallel/offload/weight_stream.py)
CHUNK_ELEMENTS = (
    1 << 20
)  # of a gradient of earlier micro-batches that is read at once (training/parallel/offload/weight_stream.py)
# Share of what comes and goes that the caching allocator loses to gaps.
FRAGMENTATION = 0.05


@dataclass(frozen=True)
class Memory:
    """Bytes of one rank. buffers: gathered weights, unsharded gradients, what collectives copy through. host, disk: in
    host memory and in a file on disk, beside the total."""

    parameters: float = 0.0
    gradients: float = 0.0
    optimizer: float = 0.0
    activations: float = 0.0
    logits: float = 0.0
    buffers: float = 0.0
    cuda_context: float = 0.0
    fragmentation: float = 0.0
    host: float = 0.0
    disk: float = 0.0

    @property
    def moving(self) -> float:
        """Bytes of activations, logits and buffers: allocated and freed within a step."""
        return self.activations + self.logits + self.buffers + self.cuda_context + self.fragmentation

    @property
    def total(self) -> float:
        return self.parameters + self.gradients + self.optimizer + self.moving


class MemoryModel:
    """Memory of each rank for layouts of one model. Parameter counts are cached, so that a search is fast."""

    def __init__(
        self,
        shape: ModelShape,
        framework: Framework,
        sizes: ElementSizes = BF16_CUDA,
        offload: OffloadConfig = ON_DEVICE,
        device_share: float = 0.0,
    ) -> None:
        """device_share: of the parameters that offload keeps in host memory, those that the device updates."""
        self.device_share = device_share
        self.shape, self.framework, self.sizes, self.offload = shape, framework, sizes, offload
        self._counts: dict[tuple[object, ...], int] = {}
        self._layers: dict[tuple[object, ...], list[tuple[float, float]]] = {}

    def weights(self, rank_layers: RankLayers) -> list[Weight]:
        """Every parameter that a pipeline rank holds; a tied table on both ends of one rank once."""
        shape = self.shape
        weights = [
            weight
            for block, count in zip(shape.distinct, rank_layers.kinds, strict=True)
            for _ in range(count)
            for weight in block_weights(block)
        ]
        weights += embedding_weights(shape) if rank_layers.embeds else []
        return weights + (head_weights(shape, not (shape.tied and rank_layers.embeds)) if rank_layers.scores else [])

    def count(self, layout: Layout, rank_layers: RankLayers, sharded: bool) -> int:
        """Number of parameters on the first rank of a shard group, which holds the most rows of each."""
        shard = layout.shard * layout.context if sharded else 1
        experts = layout.expert_sharding if self.shape.has_experts else ExpertSharding()
        key = (layout.tensor, rank_layers, shard, sharded, experts)
        if key not in self._counts:
            shape, kv_heads = self.shape, self.shape.model.num_kv_heads
            parts = [
                (block_weights(block), count)
                for block, count in zip(shape.distinct, rank_layers.kinds, strict=True)
                if count
            ]
            parts.append((embedding_weights(shape) if rank_layers.embeds else [], 1))
            parts.append(
                (head_weights(shape, not (shape.tied and rank_layers.embeds)) if rank_layers.scores else [], 1)
            )
            self._counts[key] = sum(
                times
                * (
                    sharded_count(weights, layout.tensor, 0, kv_heads, shard)
                    + (experts.sharded_count(weights) if sharded else experts.count(weights))
                )
                for weights, times in parts
            )
        return self._counts[key]

    def rank(self, layout: Layout, rank_layers: RankLayers, place: int, microbatches: int) -> Memory:
        """Memory of the pipeline rank `place` with `rank_layers`."""
        static = self._static(layout, rank_layers, microbatches)
        activations = self._activations(layout, rank_layers, place, microbatches)
        logits = logits_bytes(self.shape, layout, self.framework, self.sizes) if rank_layers.scores else 0.0
        moving = activations + logits + static["buffers"]
        swapped = self.swapped_layers(layout, rank_layers, place, microbatches)
        static["host"] += swapped * max(
            (self.swap_bytes(layout, kind).of_share(layout.token_share) for kind in _present(rank_layers)), default=0.0
        )
        return Memory(
            **static,
            activations=activations,
            logits=logits,
            cuda_context=CUDA_CONTEXT_BYTES if self.sizes.cuda else 0.0,
            fragmentation=FRAGMENTATION * moving if self.sizes.cuda else 0.0,
        )

    def swap_bytes(self, layout: Layout, kind: int) -> SwapBytes:
        """Swapped bytes of one layer of the kind."""
        return swap_bytes(self.shape.distinct[kind], self.shape, layout, self.framework, self.sizes)

    def swapped_layers(self, layout: Layout, rank_layers: RankLayers, place: int, microbatches: int) -> float:
        """Layers of a rank whose activations are in host memory, times the micro-batches alive: fewer on later ranks of
        a pipeline."""
        if layout.recompute not in SWAPS:
            return 0.0
        live = (
            live_chunks(layout.pipeline_schedule, layout.pipeline, layout.virtual, microbatches, place) / layout.virtual
        )
        kept = layout.num_layers_on_device if rank_layers.scores else 0
        return live * max(0, sum(rank_layers.kinds) - kept)

    def ranks(self, layout: Layout, rank_layers: list[RankLayers], microbatches: int) -> list[Memory]:
        """Memory of every pipeline rank: of its tensor and data rank that needs the most."""
        return [self.rank(layout, stage_layers, place, microbatches) for place, stage_layers in enumerate(rank_layers)]

    def fullest(self, layout: Layout, rank_layers: list[RankLayers], microbatches: int) -> Memory:
        """Memory of the rank that needs the most, with the most host memory of any. Of equal middle ranks the first
        needs the most, so few are evaluated."""
        seen: dict[RankLayers, int] = {}
        for place, stage_layers in enumerate(rank_layers):
            seen.setdefault(stage_layers, place)
        ranks = [self.rank(layout, stage_layers, place, microbatches) for stage_layers, place in seen.items()]
        return replace(max(ranks, key=lambda memory: memory.total), host=max(memory.host for memory in ranks))

    def _static(self, layout: Layout, rank_layers: RankLayers, microbatches: int) -> dict[str, float]:
        framework, unsharded = self.framework, self.count(layout, rank_layers, sharded=False)
        if self.offload.streams_weights:
            return self._streamed(layout, rank_layers, microbatches)
        if framework.data_parallel == "fsdp":
            return self._fsdp(layout, rank_layers, microbatches, unsharded)
        share = layout.data * layout.context if framework.data_parallel == "optimizer_shard" else 1
        return {
            "parameters": framework.weight_bytes * unsharded,
            "gradients": framework.gradient_bytes * unsharded,
            "optimizer": 0.0
            if self.offload.active
            else (framework.master_bytes + framework.moments_bytes) * unsharded / share,
            "buffers": 0.0,
            "disk": 0.0,
            "host": (framework.master_bytes + framework.moments_bytes) * unsharded / share * self.offload.active,
        }

    def _fsdp(self, layout: Layout, rank_layers: RankLayers, microbatches: int, unsharded: int) -> dict[str, float]:
        """FSDP2: fp32 weights, gradients and moments are sharded; the copies in computation precision are not.

        A rank keeps copies of all its weights from the first forward to the last backward pass; resharded, of the ends
        and two layers (the current and the prefetched one). Gradients of several micro-batches are summed unsharded,
        unless each micro-batch's are reduced: then those of a layer, the embedding or the head are at once."""
        compute, exact = self.sizes.compute, self.sizes.statistics
        sharded = self.count(layout, rank_layers, sharded=True)
        layers = sum(rank_layers.kinds)
        one_layer, ends = self._layer_and_ends(layout, rank_layers, sharded=False)
        copies = min(unsharded, ends + 2 * one_layer) if layout.reshard and layers else unsharded
        sums = max(one_layer, self._largest_end(layout, rank_layers, ends))
        sums = unsharded if microbatches > 1 and not layout.reduce_each else sums
        moments, gradients, host = self._moments_bytes(layout, rank_layers), 1.0, 0.0
        updated = float(sharded)
        if self.offload.active:
            # Two subgroups' state is on the device; a pipeline's gradients are complete only at its end.
            host = (moments + 2 * exact * (1 - self.device_share)) * sharded
            updated = min(updated, 2.0 * self.offload.subgroup_parameters) if self.device_share else 0.0
            gradients = self.device_share if layout.pipeline == 1 else 1.0
        second_table, sharded_table = (
            self._second_table(layout, rank_layers, shard) for shard in (1, layout.shard * layout.context)
        )
        saved = 0.0
        if self.sizes.float8:  # of what is gathered; the shard in 8 bits is kept to the next update
            own = sharded - self._layer_and_ends(layout, rank_layers, sharded=True)[1]
            saved = (compute - 1) * (copies - ends + one_layer) - own
        gathered = compute * (copies + second_table + one_layer) - saved
        return {
            "parameters": exact * (sharded + sharded_table),
            "gradients": exact * (gradients * sharded + sharded_table),
            "optimizer": moments * updated,
            "host": host,
            "disk": 0.0,
            "buffers": gathered + exact * (sums + second_table + one_layer),
        }

    def _streamed(self, layout: Layout, rank_layers: RankLayers, microbatches: int) -> dict[str, float]:
        """Weights of the layers in host memory or on disk: of a rank's shards, embedding and head with their gradients
        and two layers' weights are on the device; the moments, and all of the other layers, are not.

        FSDP gathers the current layer and the next one, and sums a layer's gradients at once. In one process each
        gradient is given up as it is completed, so that the largest counts, with the part of its earlier micro-batches
        that it is added to."""
        exact, compute = self.sizes.statistics, self.sizes.compute
        moments = self._moments_bytes(layout, rank_layers)
        layer_weights, ends = self._layer_and_ends(layout, rank_layers, sharded=True)
        layers = self.count(layout, rank_layers, sharded=True) - ends
        resident = min(layers, LAYERS_HELD * layer_weights)
        if layout.gpus == 1:
            gradient = max((self._largest_weight(kind) for kind in _present(rank_layers)), default=0)
            gradient += min(CHUNK_ELEMENTS, gradient) * (microbatches > 1)
            buffers = compute * layer_weights if compute != exact else 0.0
        else:
            gradient = layer_weights
            layer, whole_ends = self._layer_and_ends(layout, rank_layers, sharded=False)
            buffers = compute * (whole_ends + 3 * layer) + exact * max(layer, whole_ends)
        stored = (2 * exact + moments) * layers + moments * ends
        on_disk = self.offload.parameters == "disk"
        return {
            "parameters": exact * (ends + resident),
            "gradients": exact * (ends + gradient),
            "optimizer": 0.0,
            "host": 0.0 if on_disk else stored,
            "disk": stored if on_disk else 0.0,
            "buffers": buffers,
        }

    def _moments_bytes(self, layout: Layout, rank_layers: RankLayers) -> float:
        """Bytes of the moments of an average parameter on this rank. Muon has one moment where AdamW has two: in the
        layers (but for their vectors, which are few)."""
        both = self.framework.moments_bytes * self.sizes.statistics / 4
        if self.framework.optimizer == "adamw":
            return both
        _, ends = self._layer_and_ends(layout, rank_layers, sharded=True)
        return both / 2 * (1 + ends / self.count(layout, rank_layers, sharded=True))

    def _layer_and_ends(self, layout: Layout, rank_layers: RankLayers, sharded: bool) -> tuple[int, int]:
        """Parameters of the rank's largest layer, and of embedding, final norm and head."""
        counts = {kind: self.count(layout, _only(rank_layers, kind), sharded) for kind in _present(rank_layers)}
        layers = sum(rank_layers.kinds[kind] * count for kind, count in counts.items())
        return max(counts.values(), default=0), self.count(layout, rank_layers, sharded) - layers

    def _largest_end(self, layout: Layout, rank_layers: RankLayers, ends: int) -> int:
        """Parameters of embedding or head, the larger one, whose gradients are reduced apart unless they share the
        table."""
        if self.shape.tied or not (rank_layers.embeds and rank_layers.scores):
            return ends
        none = RankLayers((0,) * len(rank_layers.kinds), True, False)
        embedding = self.count(layout, none, sharded=False)
        return max(embedding, ends - embedding)

    def _largest_weight(self, kind: int) -> int:
        return max(weight.count for weight in block_weights(self.shape.distinct[kind]))

    def _second_table(self, layout: Layout, rank_layers: RankLayers, shard: int) -> int:
        """With a V-shaped schedule a tied table is on its rank twice, in two stages; only one copy is updated."""
        if not (self.shape.tied and rank_layers.embeds and rank_layers.scores and layout.pipeline > 1):
            return 0
        return chunk_length(chunk_length(self.shape.vocab, layout.tensor, 0), shard, 0) * self.shape.width

    def held(self, layout: Layout, rank_layers: RankLayers, place: int, microbatches: int) -> float:
        """Bytes on the device that the micro-batches alive keep from their forward to their backward pass, without what
        comes and goes within one layer."""
        extra = max(
            (
                transient
                for count, (_, transient) in zip(rank_layers.kinds, self._layer_bytes(layout), strict=True)
                if count
            ),
            default=0.0,
        )
        kept_bytes = self._activations(layout, rank_layers, place, microbatches) - extra
        if layout.recompute in SWAPS and rank_layers.scores:  # the last layers, which fill the buffers
            kept_bytes += min(layout.num_layers_on_device, sum(rank_layers.kinds)) * extra / ROUNDING_BUFFERS
        return kept_bytes

    def _activations(self, layout: Layout, rank_layers: RankLayers, place: int, microbatches: int) -> float:
        layers = self._layer_bytes(layout)
        chunk_bytes = sum(count * kept for count, (kept, _) in zip(rank_layers.kinds, layers, strict=True))
        extra = max(
            (transient for count, (_, transient) in zip(rank_layers.kinds, layers, strict=True) if count), default=0.0
        )
        first, last = ends_bytes(self.shape, layout, self.framework, self.sizes)
        live = (
            live_chunks(layout.pipeline_schedule, layout.pipeline, layout.virtual, microbatches, place) / layout.virtual
        )
        chunk_bytes += first if rank_layers.embeds else 0.0
        if layout.pipeline > 1:
            chunk_bytes += layout.virtual * boundary_bytes(self.shape, layout, self.framework, self.sizes)
        # The last stage runs each backward pass at once, so the head keeps one micro-batch.
        return live * chunk_bytes + extra + (last if rank_layers.scores else 0.0)

    def _layer_bytes(self, layout: Layout) -> list[tuple[float, float]]:
        key = (
            layout.tensor,
            layout.context,
            layout.context_method,
            layout.micro_batch,
            layout.sequence_parallel,
            layout.recompute,
            layout.expert,
            layout.expert_tensor,
        )
        if key not in self._layers:
            self._layers[key] = [
                layer_bytes(block, self.shape, layout, self.framework, self.sizes) for block in self.shape.distinct
            ]
        return self._layers[key]


def _present(rank_layers: RankLayers) -> list[int]:
    """Kinds of which the rank has a layer."""
    return [kind for kind, count in enumerate(rank_layers.kinds) if count]


def _only(rank_layers: RankLayers, kind: int) -> RankLayers:
    """One layer of one kind."""
    return RankLayers(tuple(int(k == kind) for k in range(len(rank_layers.kinds))), False, False)

"""Bytes on each rank by part, at the schedule's peak. Units: bytes; the tables print GiB (2**30)."""

from dataclasses import dataclass

from gristmill.training.costs.model_shape import ModelShape
from gristmill.training.costs.parameters import Weight, block_weights, first_weights, last_weights, run, sharded_count
from gristmill.training.planner.activations import (
    Numbers,
    boundary_bytes,
    ends_bytes,
    layer_bytes,
    logits_bytes,
)
from gristmill.training.planner.framework import Framework
from gristmill.training.planner.hardware import GIB
from gristmill.training.planner.layout import Layout
from gristmill.training.planner.rank_layers import RankLayers
from gristmill.training.planner.schedule import live_chunks

BF16_CUDA = Numbers()
# CUDA context, NCCL's channels and cuBLAS workspaces: about 1.5 GiB on A100 and H100 before a model is loaded.
FRAMEWORK_BYTES = 1.5 * GIB
# Share of what comes and goes that the caching allocator loses to gaps.
FRAGMENTATION = 0.05


@dataclass(frozen=True)
class Memory:
    """Bytes of one rank. buffers: gathered weights, unsharded gradients, what collectives copy through."""

    parameters: float = 0.0
    gradients: float = 0.0
    optimizer: float = 0.0
    activations: float = 0.0
    logits: float = 0.0
    buffers: float = 0.0
    framework: float = 0.0
    fragmentation: float = 0.0

    @property
    def moving(self) -> float:
        """What comes and goes within a step."""
        return self.activations + self.logits + self.buffers + self.framework + self.fragmentation

    @property
    def total(self) -> float:
        return self.parameters + self.gradients + self.optimizer + self.moving


class MemoryModel:
    """Weighs layouts of one model. Counts are remembered, so that a search is quick."""

    def __init__(
        self, shape: ModelShape, software: Framework, numbers: Numbers = BF16_CUDA, offload: bool = False
    ) -> None:
        self.shape, self.software, self.numbers, self.offload = shape, software, numbers, offload
        self._counts: dict[tuple[int, RankLayers, int], int] = {}
        self._layers: dict[tuple[object, ...], list[tuple[float, float]]] = {}

    def weights(self, held: RankLayers) -> list[Weight]:
        """Every parameter that a pipeline rank holds; a tied table on both ends of one rank once."""
        shape = self.shape
        found = [
            weight
            for block, count in zip(shape.distinct, held.kinds, strict=True)
            for _ in range(count)
            for weight in block_weights(block)
        ]
        found += first_weights(shape) if held.embeds else []
        return found + (last_weights(shape, not (shape.tied and held.embeds)) if held.scores else [])

    def count(self, layout: Layout, held: RankLayers, shard: int) -> int:
        """Numbers on the fullest rank of the group, each parameter's rows dealt over `shard` ranks."""
        key = (layout.tensor, held, shard)
        if key not in self._counts:
            shape, kv_heads = self.shape, self.shape.model.num_kv_heads
            parts = [
                (block_weights(block), count) for block, count in zip(shape.distinct, held.kinds, strict=True) if count
            ]
            parts.append((first_weights(shape) if held.embeds else [], 1))
            parts.append((last_weights(shape, not (shape.tied and held.embeds)) if held.scores else [], 1))
            self._counts[key] = sum(
                times * sharded_count(weights, layout.tensor, 0, kv_heads, shard) for weights, times in parts
            )
        return self._counts[key]

    def rank(self, layout: Layout, held: RankLayers, place: int, microbatches: int) -> Memory:
        """Of the pipeline rank `place`, which holds `held`."""
        static = self._static(layout, held, microbatches)
        activations = self._activations(layout, held, place, microbatches)
        logits = logits_bytes(self.shape, layout, self.software, self.numbers) if held.scores else 0.0
        moving = activations + logits + static["buffers"]
        return Memory(
            **static,
            activations=activations,
            logits=logits,
            framework=FRAMEWORK_BYTES if self.numbers.cuda else 0.0,
            fragmentation=FRAGMENTATION * moving if self.numbers.cuda else 0.0,
        )

    def ranks(self, layout: Layout, held: list[RankLayers], microbatches: int) -> list[Memory]:
        """Of every pipeline rank (of its fullest tensor and data rank)."""
        return [self.rank(layout, one, place, microbatches) for place, one in enumerate(held)]

    def fullest(self, layout: Layout, held: list[RankLayers], microbatches: int) -> Memory:
        """Of the rank that needs most. Ranks between the ends need less the later they are, so few are weighed."""
        seen: dict[RankLayers, int] = {}
        for place, one in enumerate(held):
            seen.setdefault(one, place)
        return max((self.rank(layout, one, place, microbatches) for one, place in seen.items()), key=lambda m: m.total)

    def _static(self, layout: Layout, held: RankLayers, microbatches: int) -> dict[str, float]:
        software, whole = self.software, self.count(layout, held, 1)
        if software.data_parallel == "fsdp":
            return self._fsdp(layout, held, microbatches, whole)
        share = layout.data * layout.context if software.data_parallel == "optimizer_shard" else 1
        return {
            "parameters": software.weight_bytes * whole,
            "gradients": software.gradient_bytes * whole,
            "optimizer": 0.0 if self.offload else (software.master_bytes + software.moments_bytes) * whole / share,
            "buffers": 0.0,
        }

    def _fsdp(self, layout: Layout, held: RankLayers, microbatches: int, whole: int) -> dict[str, float]:
        """FSDP2: fp32 weights, gradients and moments are cut; the computation's copies stand whole.

        Copies of a rank's weights stand from the first forward to the last backward pass, or, resharded, of the ends
        and two layers (the one at work and the one fetched ahead). Gradients of several micro-batches add up whole."""
        compute, exact = self.numbers.compute, self.numbers.exact
        cut = self.count(layout, held, layout.shard * layout.context)
        layers = sum(held.kinds)
        one_layer = max(
            (self.count(layout, _only(held, kind), 1) for kind, count in enumerate(held.kinds) if count), default=0
        )
        ends = whole - sum(
            count * self.count(layout, _only(held, kind), 1) for kind, count in enumerate(held.kinds) if count
        )
        copies = min(whole, ends + 2 * one_layer) if layout.reshard and layers else whole
        sums = whole if microbatches > 1 else max(one_layer, ends)
        moments = 0.0 if self.offload else self.software.moments_bytes * exact / 4
        twin, twin_cut = (self._second_table(layout, held, shard) for shard in (1, layout.shard * layout.context))
        return {
            "parameters": exact * (cut + twin_cut),
            "gradients": exact * (cut + twin_cut),
            "optimizer": moments * cut,
            "buffers": compute * (copies + twin + one_layer) + exact * (sums + twin + one_layer),
        }

    def _second_table(self, layout: Layout, held: RankLayers, shard: int) -> int:
        """A tied table at both ends of a V stands twice on its rank, in two stages; only one is updated."""
        if not (self.shape.tied and held.embeds and held.scores and layout.pipeline > 1):
            return 0
        return run(run(self.shape.vocab, layout.tensor, 0), shard, 0) * self.shape.width

    def _activations(self, layout: Layout, held: RankLayers, place: int, microbatches: int) -> float:
        layers = self._layer_bytes(layout)
        one = sum(count * kept for count, (kept, _) in zip(held.kinds, layers, strict=True))
        extra = max((again for count, (_, again) in zip(held.kinds, layers, strict=True) if count), default=0.0)
        first, last = ends_bytes(self.shape, layout, self.software, self.numbers)
        live = live_chunks(layout.schedule, layout.pipeline, layout.virtual, microbatches, place) / layout.virtual
        one += first if held.embeds else 0.0
        if layout.pipeline > 1:
            one += layout.virtual * boundary_bytes(self.shape, layout, self.software, self.numbers)
        # The head's stage runs its backward pass at once, so one micro-batch of it stands.
        return live * one + extra + (last if held.scores else 0.0)

    def _layer_bytes(self, layout: Layout) -> list[tuple[float, float]]:
        key = (layout.tensor, layout.context, layout.micro_batch, layout.sequence_parallel, layout.recompute)
        if key not in self._layers:
            model = self.shape.model
            self._layers[key] = [
                layer_bytes(
                    block,
                    layout,
                    self.shape.sequence_length,
                    self.software,
                    self.numbers,
                    model.dropout > 0,
                    model.norm,
                )
                for block in self.shape.distinct
            ]
        return self._layers[key]


def _only(held: RankLayers, kind: int) -> RankLayers:
    """One layer of one kind."""
    return RankLayers(tuple(int(k == kind) for k in range(len(held.kinds))), False, False)

"""Peak memory of each rank by part, in bytes; the tables print GiB (2**30). Checks that the state of a model fits."""

import shutil
from collections import Counter
from dataclasses import dataclass, replace
from operator import attrgetter
from pathlib import Path

from gristmill.foundation.errors import InputError
from gristmill.training.config.layout import ON_DEVICE, SWAPS, OffloadConfig
from gristmill.training.config.model import ModelConfig
from gristmill.training.config.train import TrainConfig
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
from gristmill.training.planner.costs.host_update import WEIGHT_BYTES, host_bytes_per_parameter
from gristmill.training.planner.costs.model_shape import ModelShape, shape_of
from gristmill.training.planner.costs.parameters import (
    ExpertSharding,
    block_weights,
    chunk_length,
    embedding_weights,
    expert_parameter_count,
    head_weights,
    parameter_count,
    sharded_count,
)
from gristmill.training.planner.engine_profile import GRISTMILL, EngineProfile
from gristmill.training.planner.hardware import GIB
from gristmill.training.planner.layout import Layout, RankLayers, from_config, live_chunks
from gristmill.training.planner.layout_checks import micro_batch_size

BF16_CUDA = ElementSizes()
# CUDA context, NCCL's channels and cuBLAS workspaces: about 1.5 GiB on A100 and H100 before a model is loaded.
CUDA_CONTEXT_BYTES = 1.5 * GIB
LAYERS_HELD = 2  # of streamed weights, on the device at once (training/parallel/offload/weight_stream.py)
CHUNK_ELEMENTS = 1 << 20  # of a gradient of earlier micro-batches that is read at once (the same file)
# Share of what comes and goes that the caching allocator loses to gaps.
FRAGMENTATION = 0.05
LAYER_FIELDS = attrgetter(  # of a layout: what decides the bytes of a layer
    *("tensor", "context", "context_method", "micro_batch", "sequence_parallel", "recompute", "expert", "expert_tensor")
)


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
        framework: EngineProfile,
        sizes: ElementSizes = BF16_CUDA,
        offload: OffloadConfig = ON_DEVICE,
        device_share: float = 0.0,
    ) -> None:
        """device_share: of the parameters that offload keeps in host memory, those that the device updates."""
        self.device_share = device_share
        self.shape, self.framework, self.sizes, self.offload = shape, framework, sizes, offload
        self._counts: dict[tuple[object, ...], int] = {}
        self._layers: dict[tuple[object, ...], list[tuple[float, float]]] = {}

    def count(self, layout: Layout, rank_layers: RankLayers, sharded: bool) -> int:
        """Number of parameters on the first rank of a shard group, which holds the most rows of each."""
        shard = layout.shard * layout.context if sharded else 1
        experts = layout.expert_sharding if self.shape.has_experts else ExpertSharding()
        key = (layout.tensor, rank_layers, shard, sharded, experts)
        if key not in self._counts:
            shape, kv_heads = self.shape, self.shape.model.num_kv_heads
            blocks = zip(shape.distinct, rank_layers.kinds, strict=True)
            parts = [(block_weights(block), count) for block, count in blocks if count]
            parts.append((embedding_weights(shape) if rank_layers.has_embedding else [], 1))
            parts.append(
                (head_weights(shape, not (shape.tied and rank_layers.has_embedding)) if rank_layers.has_head else [], 1)
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
        logits = logits_bytes(self.shape, layout, self.framework, self.sizes) if rank_layers.has_head else 0.0
        moving = activations + logits + static["buffers"]
        swapped = self.swapped_layers(layout, rank_layers, place, microbatches)
        if swapped:
            static["host"] += swapped * max(
                self.swap_bytes(layout, kind).of_share(layout.token_share) for kind in _present(rank_layers)
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
        kept = layout.num_layers_on_device if rank_layers.has_head else 0
        return _live(layout, place, microbatches) * max(0, sum(rank_layers.kinds) - kept)

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
        if self.shape.tied or not (rank_layers.has_embedding and rank_layers.has_head):
            return ends
        none = RankLayers((0,) * len(rank_layers.kinds), True, False)
        embedding = self.count(layout, none, sharded=False)
        return max(embedding, ends - embedding)

    def _largest_weight(self, kind: int) -> int:
        return max(weight.count for weight in block_weights(self.shape.distinct[kind]))

    def _second_table(self, layout: Layout, rank_layers: RankLayers, shard: int) -> int:
        """With a V-shaped schedule a tied table is on its rank twice, in two stages; only one copy is updated."""
        if not (self.shape.tied and rank_layers.has_embedding and rank_layers.has_head and layout.pipeline > 1):
            return 0
        return chunk_length(chunk_length(self.shape.vocab, layout.tensor, 0), shard, 0) * self.shape.width

    def held(self, layout: Layout, rank_layers: RankLayers, place: int, microbatches: int) -> float:
        """Bytes on the device that the micro-batches alive keep from their forward to their backward pass, without what
        comes and goes within one layer."""
        extra = self._transient(layout, rank_layers)
        kept_bytes = self._activations(layout, rank_layers, place, microbatches) - extra
        if layout.recompute in SWAPS and rank_layers.has_head:  # the last layers, which fill the buffers
            kept_bytes += min(layout.num_layers_on_device, sum(rank_layers.kinds)) * extra / ROUNDING_BUFFERS
        return kept_bytes

    def _activations(self, layout: Layout, rank_layers: RankLayers, place: int, microbatches: int) -> float:
        layers = self._layer_bytes(layout)
        chunk_bytes = sum(count * kept for count, (kept, _) in zip(rank_layers.kinds, layers, strict=True))
        first, last = ends_bytes(self.shape, layout, self.framework, self.sizes)
        chunk_bytes += first if rank_layers.has_embedding else 0.0
        if layout.pipeline > 1:
            chunk_bytes += layout.virtual * boundary_bytes(self.shape, layout, self.framework, self.sizes)
        # The last stage runs each backward pass at once, so the head keeps one micro-batch.
        live = _live(layout, place, microbatches)
        return live * chunk_bytes + self._transient(layout, rank_layers) + (last if rank_layers.has_head else 0.0)

    def _transient(self, layout: Layout, rank_layers: RankLayers) -> float:
        """Bytes that come and go within the rank's largest layer."""
        return max((self._layer_bytes(layout)[kind][1] for kind in _present(rank_layers)), default=0.0)

    def _layer_bytes(self, layout: Layout) -> list[tuple[float, float]]:
        key = LAYER_FIELDS(layout)
        if key not in self._layers:
            self._layers[key] = [
                layer_bytes(block, self.shape, layout, self.framework, self.sizes) for block in self.shape.distinct
            ]
        return self._layers[key]


def _live(layout: Layout, place: int, microbatches: int) -> float:
    """Micro-batches alive on a pipeline rank."""
    chunks = live_chunks(layout.pipeline_schedule, layout.pipeline, layout.virtual, microbatches, place)
    return chunks / layout.virtual


def _present(rank_layers: RankLayers) -> list[int]:
    """Kinds of which the rank has a layer."""
    return [kind for kind, count in enumerate(rank_layers.kinds) if count]


def _only(rank_layers: RankLayers, kind: int) -> RankLayers:
    """One layer of one kind."""
    return RankLayers(tuple(int(k == kind) for k in range(len(rank_layers.kinds))), False, False)


# Checks before allocation that the state of a model fits in memory.

# Weights, gradients and one moment of the optimizer, four bytes each (fp32; training/engine/local_model.py). AdamW has
# a second moment, and activations come on top: what is refused for this could not be trained in any case.
MIN_BYTES_PER_PARAMETER = 12
PRECISION_BYTES = {"bf16": (2, 4), "fp16": (2, 4), "fp32": (4, 4), "fp64": (8, 8)}  # computation, stored
LARGEST_DEVICE_BYTES = 2**40  # no accelerator has a TiB of its own; where the device is not known, this is refused


def min_process_bytes(model: ModelConfig, train: TrainConfig, vocab_size: int) -> int:
    """Minimum bytes of one process's parameters, gradients and optimizer state on its device, sharded evenly. 1e9 over
    4 -> 3e9; with the state in host memory 1e9; with the layers' weights there or on disk, that of embedding, head and
    two layers."""
    if train.layout.offload.streams_weights:
        stated = stated_memory(model, train, vocab_size)
        return int(stated.parameters + stated.gradients)
    parameter_bytes = WEIGHT_BYTES if train.layout.offload.active else MIN_BYTES_PER_PARAMETER
    return int(process_parameters(model, train, vocab_size) * parameter_bytes)


def process_parameters(model: ModelConfig, train: TrainConfig, vocab_size: int) -> float:
    """Parameters of one process, sharded evenly."""
    layout, shape = train.layout, shape_of(model, vocab_size)
    experts = expert_parameter_count(shape)
    shares = layout.tensor * layout.pipeline * layout.shard
    expert_shares = layout.pipeline * layout.stage_ranks // layout.expert_replicate
    return (parameter_count(shape) - experts) / shares + experts / expert_shares


def check_memory(model: ModelConfig, train: TrainConfig, vocab_size: int, memory_bytes: int) -> None:
    """Raises InputError if the model cannot be trained in memory_bytes of a process's device."""
    needed = min_process_bytes(model, train, vocab_size)
    if needed > memory_bytes:
        raise InputError(
            f"the model has {parameter_count(shape_of(model, vocab_size)):,} parameters: its weights, gradients and "
            f"optimizer take at least {needed / 2**30:,.1f} GiB on each process, which has {memory_bytes / 2**30:,.1f} "
            "GiB; lower model.layers or model.width, or use more processes (`gristmill layout` proposes a layout)"
        )


def stated_memory(model: ModelConfig, train: TrainConfig, vocab_size: int, cuda: bool = False) -> Memory:
    """The forecast memory of the rank that needs the most, by part: with the layers' weights in host memory or on disk
    what the run states before its first step. On a CPU it is what the process takes beyond its libraries."""
    layout = train.layout
    shape, micro_batch = shape_of(model, vocab_size), micro_batch_size(model, train)
    float8 = train.float8 and not train.compile and not model.has_experts  # weights of experts are gathered in 16 bits
    sizes = ElementSizes(*PRECISION_BYTES[train.precision], cuda=cuda, float8=float8)
    memories = MemoryModel(shape, GRISTMILL.with_optimizer(train.optimizer.name), sizes, layout.offload)
    ranks = [RankLayers(tuple(Counter(shape.kinds)[kind] for kind in range(len(shape.distinct))), True, True)]
    planned = from_config(layout, micro_batch)
    return memories.fullest(planned, ranks, planned.microbatches(train.batch_tokens // model.sequence_length))


def check_host_memory(
    model: ModelConfig, train: TrainConfig, vocab_size: int, processes: int, memory_bytes: int
) -> None:
    """Raises InputError if what `layout.offload` keeps in host memory does not fit beside the other processes of this
    machine."""
    parameters = process_parameters(model, train, vocab_size)
    if train.layout.offload.streams_weights:
        needed = stated_memory(model, train, vocab_size).host
        _check_fits(needed, parameters, processes, memory_bytes, "host memory")
        return
    parameter_bytes = host_bytes_per_parameter(train, parameters)
    if parameters * parameter_bytes * processes <= memory_bytes:
        return
    fits = int(memory_bytes / parameter_bytes / processes)
    raise InputError(
        f"layout.offload keeps {parameters * parameter_bytes / 2**30:,.1f} GiB of optimizer state in host memory for "
        f"each of {processes} processes ({parameters:,.0f} parameters, {parameter_bytes:g} bytes each), and this "
        "machine has "
        f"{memory_bytes / 2**30:,.1f} GiB; at most {fits:,} parameters a process fit: shard the model over more "
        "machines (data, tensor, pipeline), lower model.layers or model.width, or set offload.optimizer: none"
    )


def check_disk(model: ModelConfig, train: TrainConfig, vocab_size: int, processes: int) -> None:
    """Raises InputError if weights on disk do not fit in their folder's free space beside those of the other processes
    of this machine."""
    needed, folder = stated_memory(model, train, vocab_size).disk, Path(train.layout.offload.folder or ".").absolute()
    if not needed:
        return
    while not folder.exists():
        folder = folder.parent
    free = shutil.disk_usage(folder).free
    _check_fits(needed, process_parameters(model, train, vocab_size), processes, free, f"the disk of {folder}")


def _check_fits(needed: float, parameters: float, processes: int, free: int, place: str) -> None:
    if needed * processes <= free:
        return
    fits = int(free / processes / needed * parameters)
    raise InputError(
        f"layout.offload.parameters keeps {needed / 2**30:,.1f} GiB of weights, gradients and optimizer state of each "
        f"of {processes} processes ({parameters:,.0f} parameters) on {place}, which has {free / 2**30:,.1f} GiB; at "
        f"most {fits:,} parameters a process fit: shard the model over more machines (data, tensor), lower "
        "model.layers or model.width, or take another place (offload.parameters, offload.folder)"
    )


def memory_statement(memory: Memory) -> str:
    """Sentence that a run with streamed weights prints before its first step."""
    place, size = ("on disk", memory.disk) if memory.disk else ("in host memory", memory.host)
    parts = {
        f"embedding, head and {LAYERS_HELD} layers": memory.parameters,
        "gradients": memory.gradients,
        "activations": memory.activations,
        "logits": memory.logits,
        "buffers": memory.buffers,
    }
    return (
        f"the layers' weights are {place} ({size / GIB:.2f} GiB with gradients and optimizer state), at most "
        f"{LAYERS_HELD} layers' at a time on the device. Stated peak memory, beside the libraries' own: "
        f"{memory.total / GIB:.3f} GiB ({', '.join(f'{name} {part / GIB:.3f}' for name, part in parts.items())})"
    )

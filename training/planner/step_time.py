"""Time of one training step of a layout: compute, communication, bubble, optimizer."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from math import log2

from gristmill.training.config.layout import ON_DEVICE, SWAPS, OffloadConfig
from gristmill.training.planner.activations import ElementSizes, swap_bytes
from gristmill.training.planner.block_time import (
    BlockTimes,
    TimeParts,
    block_times,
    embedding_times,
    head_times,
    orthogonal_seconds,
)
from gristmill.training.planner.costs.host_update import host_rates, offloaded_update
from gristmill.training.planner.costs.model_shape import BlockShape, ModelShape
from gristmill.training.planner.costs.stage_splitting import split_by_cost, split_evenly, stages_at
from gristmill.training.planner.engine_profile import EngineProfile
from gristmill.training.planner.hardware import Rates
from gristmill.training.planner.layout import Layout, RankLayers, RankParameters, bubble_seconds, layers_by_rank
from gristmill.training.planner.network import (
    AxisLinks,
    GroupLink,
    all_reduce_seconds,
    gather_seconds,
    group_link,
    send_seconds,
)

# Share of a GPU that a collective takes from the compute it overlaps with: 20 of 132 multiprocessors (DeepSeek-V3,
# arXiv 2412.19437, section 3.2.2).
CONTENTION = 20 / 132


@dataclass(frozen=True)
class StepTime:
    """Seconds of the slowest pipeline rank. *_overlap: communication overlapped with compute, not in the total;
    contention: by how much that slows compute."""

    matmul: float = 0.0
    attention: float = 0.0
    memory: float = 0.0
    recompute: float = 0.0
    tensor: float = 0.0
    context: float = 0.0
    expert: float = 0.0
    pipeline: float = 0.0
    bubble: float = 0.0
    data: float = 0.0
    optimizer: float = 0.0
    contention: float = 0.0
    other: float = 0.0
    tensor_overlap: float = 0.0
    pipeline_overlap: float = 0.0
    data_overlap: float = 0.0

    @property
    def total(self) -> float:
        compute = self.matmul + self.attention + self.memory + self.recompute
        exposed = self.tensor + self.context + self.expert + self.pipeline + self.bubble + self.data
        return compute + exposed + self.optimizer + self.contention + self.other


def default_links(layout: Layout, rates: Rates) -> AxisLinks:
    """Links for ranks in the mesh's order, the last axis fastest: pipeline, replicate, shard, context, tensor."""
    beside_shard = layout.tensor * layout.context
    beside_replicate = beside_shard * layout.shard

    def link(size: int, stride: int) -> GroupLink:
        return group_link(rates, size, stride, layout.gpus)

    return AxisLinks(
        tensor=link(layout.tensor, 1),
        context=link(layout.context, layout.tensor),
        shard=link(layout.shard * layout.context, layout.tensor),
        replicate=link(layout.replicate, beside_replicate),
        data=link(layout.data * layout.context, layout.tensor),
        pipeline=link(layout.pipeline, beside_shard * layout.data),
        expert=link(layout.expert_ranks, 1),
        expert_data=link(beside_shard * layout.data // layout.expert_ranks, layout.expert_ranks),
    )


class StepModel:
    """Step times of layouts of one model on one machine. Times of blocks are cached, so that a search is fast."""

    def __init__(
        self, shape: ModelShape, rates: Rates, framework: EngineProfile, offload: OffloadConfig = ON_DEVICE
    ) -> None:
        self.shape, self.rates, self.framework, self.offload = shape, rates, framework, offload
        self.device_share, self._offloaded_update = offloaded_update(offload, host_rates(rates.hardware))
        self.parameters = RankParameters(shape)
        self._block_times: dict[tuple[object, ...], tuple[list[BlockTimes], BlockTimes, BlockTimes]] = {}
        self._rank_layers: dict[tuple[object, ...], list[RankLayers]] = {}

    def split_points(self, layout: Layout) -> tuple[int, ...]:
        """Split points that the framework uses by default."""
        if self.framework.layers == "even" or layout.pipeline == 1:
            return split_evenly(len(self.shape.blocks), layout.stages)
        return split_by_cost(self.shape, layout.stages)

    def rank_layers(self, layout: Layout, split_points: Sequence[int] | None = None) -> list[RankLayers]:
        """Layers of each pipeline rank; at the framework's default split points where none are given."""
        key = (
            layout.pipeline,
            layout.virtual,
            layout.pipeline_schedule,
            tuple(split_points) if split_points is not None else None,
        )
        if key not in self._rank_layers:
            stages = stages_at(
                self.split_points(layout) if split_points is None else split_points, len(self.shape.blocks)
            )
            self._rank_layers[key] = layers_by_rank(self.shape.kinds, stages, layout)
        return self._rank_layers[key]

    def block_times(self, layout: Layout, links: AxisLinks) -> tuple[list[BlockTimes], BlockTimes, BlockTimes]:
        """Times of each kind of block, of the embedding, and of the head, for one micro-batch."""
        key = (
            layout.tensor,
            layout.context,
            layout.context_method,
            layout.micro_batch,
            layout.sequence_parallel,
            layout.async_tensor,
            links.tensor,
            links.context,
            layout.expert,
            layout.expert_tensor,
            links.expert,
        )
        if key not in self._block_times:
            length = self.shape.sequence_length
            blocks = [
                block_times(block, layout, length, self.framework, self.rates, links) for block in self.shape.distinct
            ]
            first = embedding_times(self.shape, layout, length, self.rates, links.tensor)
            last = head_times(self.shape, layout, length, self.framework, self.rates, links.tensor)
            self._block_times[key] = (blocks, first, last)
        return self._block_times[key]

    def step(
        self,
        layout: Layout,
        samples: int,
        split_points: Sequence[int] | None = None,
        links: AxisLinks | None = None,
        speeds: Sequence[float] = (),
    ) -> StepTime:
        """Time of one step over `samples` samples. speeds: of each pipeline rank's machines, relative to the
        profile's."""
        links = links or default_links(layout, self.rates)
        rank_layers = self.rank_layers(layout, split_points)
        passes = self.block_times(layout, links)
        microbatches = layout.microbatches(samples)
        distinct = Counter(zip(rank_layers, speeds or [1.0] * len(rank_layers), strict=True))
        works = {key: self._work(key[0], layout, passes, key[1], microbatches) for key in distinct}
        sends, overlapped_sends = self._sends(layout, links, min(w[0].seconds + w[1].seconds for w in works.values()))
        times = {key: sum(part.seconds for part in work) + sends for key, work in works.items()}
        slowest = max(times, key=times.__getitem__)
        forward, backward, recomputed = works[slowest]
        mean = sum(times[key] * count for key, count in distinct.items()) / len(rank_layers)
        ahead = forward.seconds + sends / 2
        behind = times[slowest] - ahead
        scale = mean / times[slowest]
        bubble = bubble_seconds(
            layout.pipeline_schedule, layout.pipeline, layout.virtual, ahead * scale, behind * scale, microbatches
        )
        data, data_overlap = self._data(layout, slowest[0], links, backward.seconds, times[slowest], microbatches)
        parts = forward.plus(backward)
        return StepTime(
            matmul=parts.matmul * microbatches,
            attention=parts.attention * microbatches,
            memory=parts.memory * microbatches,
            recompute=recomputed.seconds * microbatches,
            tensor=parts.tensor * microbatches,
            context=parts.context * microbatches,
            expert=parts.expert * microbatches,
            pipeline=sends * microbatches,
            bubble=bubble,
            data=data,
            optimizer=self._optimizer(layout, slowest[0], backward.seconds)
            + self._weight_copies(layout, slowest[0], times[slowest], microbatches),
            contention=CONTENTION * (parts.overlapped * microbatches + data_overlap),
            other=self.framework.step_seconds,
            tensor_overlap=parts.overlapped * microbatches,
            pipeline_overlap=overlapped_sends * microbatches,
            data_overlap=data_overlap,
        )

    def rank_seconds(self, layout: Layout, samples: int, split_points: Sequence[int] | None = None) -> list[float]:
        """Seconds of a step that each pipeline rank computes, without communication and waiting."""
        passes, microbatches = self.block_times(layout, default_links(layout, self.rates)), layout.microbatches(samples)
        works = [self._work(rank, layout, passes, 1.0, microbatches) for rank in self.rank_layers(layout, split_points)]
        return [microbatches * sum(part.matmul + part.attention + part.memory for part in work) for work in works]

    def _work(
        self,
        rank_layers: RankLayers,
        layout: Layout,
        passes: tuple[list[BlockTimes], BlockTimes, BlockTimes],
        speed: float,
        microbatches: int,
    ) -> tuple[TimeParts, TimeParts, TimeParts]:
        """Forward, backward and recomputation times of one micro-batch on a pipeline rank."""
        blocks, first, last = passes
        forward, backward, recomputed = TimeParts(), TimeParts(), TimeParts()
        for block, times, count in zip(self.shape.distinct, blocks, rank_layers.kinds, strict=True):
            forward, backward = forward.plus(times.forward, count), backward.plus(times.backward, count)
            if layout.recompute == "full":
                recomputed = recomputed.plus(times.full, count)
            elif layout.recompute == "attention":
                recomputed = recomputed.plus(times.selective, count)
            elif layout.recompute in SWAPS:
                recomputed = recomputed.plus(
                    self._swap(block, times, layout), count * self._swapped_part(rank_layers, layout)
                )
            elif layout.recompute == "operators":
                products = self.framework.products_again * times.full.matmul
                scan = 0.0 if block.heads else times.full.attention
                in_ring = block.heads and layout.context_method == "ring"  # what came around it is kept
                context = 0.0 if in_ring else times.full.context
                recomputed = recomputed.plus(
                    TimeParts(products, scan, times.full.memory, times.full.tensor, context), count
                )
        for present, end in ((rank_layers.has_embedding, first), (rank_layers.has_head, last)):
            if present:
                forward, backward = forward.plus(end.forward), backward.plus(end.backward)
        if microbatches > 1 and not layout.reduce_each:
            added = self.parameters.all(layout, rank_layers) * self.framework.accumulate_bytes
            backward = backward.plus(TimeParts(memory=self.rates.memory(added) * (microbatches - 1) / microbatches))
        if layout.gpus > 1 and self.framework.unshard_bytes:
            copied = self.parameters.all(layout, rank_layers) * self.framework.unshard_bytes
            backward = backward.plus(
                TimeParts(memory=self.rates.memory(copied)), 1 if layout.reshard else 1 / microbatches
            )
        if speed != 1.0:
            forward, backward, recomputed = (
                TimeParts().plus(part, 1 / speed) for part in (forward, backward, recomputed)
            )
        return forward, backward, recomputed

    def _swap(self, block: BlockShape, times: BlockTimes, layout: Layout) -> TimeParts:
        """Time that a swapped layer adds: the recomputation of the tokens that are not swapped, and what copying takes
        beyond the forward pass, and back beyond the backward pass."""
        left = 1 - layout.token_share
        recomputed = TimeParts().plus(times.by_token, left)
        sizes = swap_bytes(block, self.shape, layout, self.framework, ElementSizes())
        seconds = sizes.of_share(layout.token_share) / self.rates.hardware.host_link.bytes_per_second
        exposed = max(0.0, seconds - times.forward.seconds) + max(
            0.0, seconds - times.backward.seconds - recomputed.seconds
        )
        return recomputed.plus(TimeParts(memory=exposed))

    def _swapped_part(self, rank_layers: RankLayers, layout: Layout) -> float:
        """Share of the layers of a rank that are swapped."""
        layers = sum(rank_layers.kinds)
        return max(0, layers - layout.num_layers_on_device) / layers if rank_layers.has_head and layers else 1.0

    def _sends(self, layout: Layout, links: AxisLinks, compute: float) -> tuple[float, float]:
        """(exposed, hidden) seconds of one micro-batch's sends: one forward and one backward for each stage of a rank.

        arXiv 2104.04473, section 4.1: each tensor rank sends its slice b s h / t, and the node gathers it."""
        if layout.pipeline == 1:
            return 0.0, 0.0
        whole = 2 * layout.micro_batch * self.shape.sequence_length // layout.context * self.shape.width
        seconds = self.send(layout, links, whole) * 2 * layout.virtual
        hidden = 0.0
        if layout.pipeline_schedule != "1f1b" and layout.pipeline_schedule != "gpipe":
            hidden = min(seconds * self.framework.pipeline_overlap, compute)
        return seconds - hidden, hidden

    def send(self, layout: Layout, links: AxisLinks, whole: float) -> float:
        """Seconds of sending one micro-batch's activations of `whole` bytes to the next stage."""
        if layout.sequence_parallel:
            return send_seconds(whole / layout.tensor, links.pipeline)
        if self.framework.scatter_gather and layout.tensor > 1:
            gather = gather_seconds(whole, layout.tensor, links.tensor)
            return send_seconds(whole / layout.tensor, links.pipeline) + gather
        return send_seconds(whole, links.pipeline)

    def _data(
        self,
        layout: Layout,
        rank_layers: RankLayers,
        links: AxisLinks,
        backward: float,
        microbatch: float,
        microbatches: int,
    ) -> tuple[float, float]:
        """(exposed, hidden) seconds of a step's gradient and weight traffic, tied tables over the pipeline included.

        Gradients overlap with the backward pass that they are reduced in, gathered weights with each pass that reads
        them. fsdp: reduce-scatter over the shard ranks, all-reduce of the shard over the replicate ranks; weights are
        gathered once with a pipeline, else in each forward pass; the layers' again in each backward pass where they are
        resharded (ZeRO-3)."""
        framework, dense = self.framework, self.parameters.dense(layout.tensor, rank_layers)
        groups = [(dense, layout.shard * layout.context, layout.replicate, links.shard, links.data)]
        experts = self.parameters.experts(layout, rank_layers)
        if experts:
            shard, copies = layout.expert_sharding.shard, layout.expert_replicate
            groups.append((experts, shard, copies, links.expert_data, links.expert_data))
        reduce = gather = 0.0
        for count, shard, copies, shard_link, link in groups:
            ranks = shard * copies
            reduced, weights = count * framework.reduce_bytes, count * framework.weight_bytes
            if self.rates.float8 and framework.gathers_float8:
                layers = RankLayers(rank_layers.kinds, False, False)
                weights -= (framework.weight_bytes - 1) * self.parameters.dense(layout.tensor, layers)
            if framework.data_parallel == "replicate":
                reduce += all_reduce_seconds(reduced, ranks, link)
            elif framework.data_parallel == "optimizer_shard":
                reduce += gather_seconds(reduced, ranks, link)
                gather += gather_seconds(weights, ranks, link)
            else:
                reduce += gather_seconds(reduced, shard, shard_link)
                reduce += all_reduce_seconds(reduced / shard, copies, links.replicate)
                if ranks > 1:
                    gather += sum(rank_layers.kinds) * microbatches * self.rates.data_layer_seconds
                gather += self._gather_weights(layout, rank_layers, weights, shard, shard_link, microbatches)
        reductions = microbatches if layout.reduce_each else 1
        reduce *= reductions
        share = framework.data_overlap if layout.pipeline == 1 else framework.data_overlap_in_pipeline
        max_overlap = microbatch * microbatches if layout.pipeline == 1 or layout.reshard else microbatch - backward
        overlapped = min(share * reduce, backward * reductions) + min(share * gather, max_overlap)
        tied = 0.0
        if self.shape.tied and layout.pipeline > 1 and rank_layers.has_embedding != rank_layers.has_head:
            table = self.shape.vocab * self.shape.width / layout.tensor * framework.reduce_bytes
            tied = all_reduce_seconds(table, 2, links.pipeline)
        return reduce + gather - overlapped + tied, overlapped

    def _gather_weights(
        self, layout: Layout, rank_layers: RankLayers, weights: float, shard: int, link: GroupLink, microbatches: int
    ) -> float:
        """Seconds of a step's all-gathers of so many bytes of weights under FSDP, one message for each layer."""
        seconds = gather_seconds(weights, shard, link)
        if shard > 1:
            seconds += (sum(rank_layers.kinds) - 1) * link.latency * log2(shard)
        if layout.pipeline > 1 and not layout.reshard:
            return seconds
        layers = self.parameters.all(layout, RankLayers(rank_layers.kinds, False, False))
        regathered = layers / self.parameters.all(layout, rank_layers) if layout.reshard else 0.0
        return seconds * microbatches * (1 + regathered)

    def _weight_copies(self, layout: Layout, rank_layers: RankLayers, seconds: float, microbatches: int) -> float:
        """Seconds by which copying streamed weights outlasts the passes of so many seconds: of each micro-batch they
        come in twice and the gradients leave, and from the second on meet those before; on disk the update reads and
        writes all state."""
        if not self.offload.streams_weights:
            return 0.0
        layers = self.parameters.all(layout, RankLayers(rank_layers.kinds, False, False)) / layout.shard
        hardware, layer_bytes = self.rates.hardware, 4 * layers
        link, _ = self.rates.link(hardware.host_link)
        copied = layer_bytes * (3 * microbatches + (microbatches - 1))
        if self.offload.parameters == "host":
            return max(0.0, copied / link - microbatches * seconds)
        disk = hardware.disk_gb_per_second * 1e9
        return max(0.0, copied / min(link, disk) - microbatches * seconds) + 7 * layer_bytes / disk

    def _optimizer(self, layout: Layout, rank_layers: RankLayers, backward: float) -> float:
        """Seconds of clipping, the update and the cast of what this rank updates; with Muon also of Newton-Schulz.

        Offloaded: the simulated step of host_update.py, and what copying fp32 gradients to the host takes beyond the
        backward pass of the last micro-batch."""
        data, shard = layout.data * layout.context, layout.shard * layout.context
        shares = {"replicate": 1, "optimizer_shard": data, "fsdp": shard}
        count = self.parameters.dense(layout.tensor, rank_layers) / shares[self.framework.data_parallel]
        experts = self.parameters.experts(layout, rank_layers)
        if experts:
            sharded = layout.expert_sharding.shard
            shares = {"replicate": 1, "optimizer_shard": sharded * layout.expert_replicate, "fsdp": sharded}
            count += experts / shares[self.framework.data_parallel]
        muon = self.framework.optimizer == "muon"
        orthogonal = orthogonal_seconds(self.shape, layout, rank_layers, self.rates) if muon else 0.0
        if self.offload.streams_weights:
            return orthogonal + count / host_rates(self.rates.hardware).host_updates
        if not self.offload.active:
            return orthogonal + self.rates.memory(count * self.framework.optimizer_bytes)
        bandwidth, _ = self.rates.link(self.rates.hardware.host_link)
        flush = 4 * count * (1 - self.device_share) / bandwidth
        return orthogonal + max(0.0, flush - backward) + count * self._offloaded_update

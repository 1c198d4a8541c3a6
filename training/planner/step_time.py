"""Seconds of one training step by part, for a layout: the sum of what the other files count."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from math import log2

from gristmill.training.costs.model_shape import ModelShape
from gristmill.training.costs.parameters import block_weights, first_weights, last_weights, rank_count
from gristmill.training.costs.stage_splitting import split_by_cost, split_evenly, stages_at
from gristmill.training.planner.block_time import BlockTimes, TimeParts, block_passes, embedding_passes, head_passes
from gristmill.training.planner.framework import Framework
from gristmill.training.planner.layout import Layout
from gristmill.training.planner.network import Wire, all_reduce_seconds, gather_seconds, group_wire, send_seconds
from gristmill.training.planner.rank_layers import RankLayers, layers_by_rank
from gristmill.training.planner.rates import Rates
from gristmill.training.planner.schedule import bubble_seconds

# Share of a GPU that a collective takes from the compute it hides behind: 20 of 132 multiprocessors (DeepSeek-V3, arXiv
# 2412.19437, section 3.2.2).
CONTENTION = 20 / 132
# An eighth of the 200 GB/s of memory bandwidth of a two-socket host of 2020 with 8 GPUs (8 channels of DDR4-3200 each).
HOST_BYTES_PER_SECOND = 25e9


@dataclass(frozen=True)
class StepTime:
    """Seconds of the slowest pipeline rank. *_hidden stand behind compute and are not in the total; contention is what
    they take from it."""

    matmul: float = 0.0
    attention: float = 0.0
    memory: float = 0.0
    recompute: float = 0.0
    tensor: float = 0.0
    context: float = 0.0
    pipeline: float = 0.0
    bubble: float = 0.0
    data: float = 0.0
    optimizer: float = 0.0
    contention: float = 0.0
    other: float = 0.0
    tensor_hidden: float = 0.0
    pipeline_hidden: float = 0.0
    data_hidden: float = 0.0

    @property
    def total(self) -> float:
        compute = self.matmul + self.attention + self.memory + self.recompute
        exposed = self.tensor + self.context + self.pipeline + self.bubble + self.data
        return compute + exposed + self.optimizer + self.contention + self.other


@dataclass(frozen=True)
class Wires:
    """The wires of each axis's groups: consecutive ranks are tensor, then context, shard, replicate, pipeline."""

    tensor: Wire
    context: Wire
    shard: Wire
    replicate: Wire
    data: Wire
    pipeline: Wire


def default_wires(layout: Layout, rates: Rates) -> Wires:
    """With ranks in the mesh's order, the last axis fastest: pipeline, replicate, shard, context, tensor."""
    beside_shard = layout.tensor * layout.context
    beside_replicate = beside_shard * layout.shard

    def wire(size: int, stride: int) -> Wire:
        return group_wire(rates, size, stride, layout.gpus)

    return Wires(
        tensor=wire(layout.tensor, 1),
        context=wire(layout.context, layout.tensor),
        shard=wire(layout.shard * layout.context, layout.tensor),
        replicate=wire(layout.replicate, beside_replicate),
        data=wire(layout.data * layout.context, layout.tensor),
        pipeline=wire(layout.pipeline, beside_shard * layout.data),
    )


class StepModel:
    """Times layouts of one model on one machine. Costs of blocks are remembered, so that a search is quick."""

    def __init__(self, shape: ModelShape, rates: Rates, software: Framework, offload: bool = False) -> None:
        self.shape, self.rates, self.software, self.offload = shape, rates, software, offload
        self._passes: dict[tuple[object, ...], tuple[list[BlockTimes], BlockTimes, BlockTimes]] = {}
        self._counts: dict[tuple[int, RankLayers], int] = {}
        self._held: dict[tuple[object, ...], list[RankLayers]] = {}

    def cuts(self, layout: Layout) -> tuple[int, ...]:
        """Where the program cuts the layers when it is not told."""
        if self.software.layers == "even" or layout.pipeline == 1:
            return split_evenly(len(self.shape.blocks), layout.stages)
        return split_by_cost(self.shape, layout.stages)

    def held(self, layout: Layout, cuts: Sequence[int] | None = None) -> list[RankLayers]:
        """What each pipeline rank holds; the program's own cuts where none are given."""
        key = (layout.pipeline, layout.virtual, layout.schedule, tuple(cuts) if cuts is not None else None)
        if key not in self._held:
            stages = stages_at(self.cuts(layout) if cuts is None else cuts, len(self.shape.blocks))
            self._held[key] = layers_by_rank(self.shape.kinds, stages, layout)
        return self._held[key]

    def passes(self, layout: Layout, wires: Wires) -> tuple[list[BlockTimes], BlockTimes, BlockTimes]:
        """Of each kind of block, of the embedding, and of the head, for one micro-batch."""
        key = (layout.tensor, layout.context, layout.micro_batch, layout.sequence_parallel, wires.tensor, wires.context)
        if key not in self._passes:
            context = self.shape.sequence_length
            blocks = [
                block_passes(block, layout, context, self.software, self.rates, wires.tensor, wires.context)
                for block in self.shape.distinct
            ]
            first = embedding_passes(self.shape, layout, context, self.rates, wires.tensor)
            last = head_passes(self.shape, layout, context, self.software, self.rates, wires.tensor)
            self._passes[key] = (blocks, first, last)
        return self._passes[key]

    def local_parameters(self, tensor: int, held: RankLayers) -> int:
        """Numbers on tensor rank 0 of a pipeline rank, before the data axis cuts them."""
        key = (tensor, held)
        if key not in self._counts:
            shape, kv_heads = self.shape, self.shape.model.num_kv_heads
            total = sum(
                count * rank_count(block_weights(block), tensor, 0, kv_heads)
                for block, count in zip(shape.distinct, held.kinds, strict=True)
            )
            if held.embeds:
                total += rank_count(first_weights(shape), tensor, 0, kv_heads)
            if held.scores:
                total += rank_count(last_weights(shape, not (shape.tied and held.embeds)), tensor, 0, kv_heads)
            self._counts[key] = total
        return self._counts[key]

    def step(
        self,
        layout: Layout,
        samples: int,
        cuts: Sequence[int] | None = None,
        wires: Wires | None = None,
        speeds: Sequence[float] = (),
    ) -> StepTime:
        """One step over `samples` samples. speeds: of each pipeline rank's machines, relative to the profile's."""
        wires = wires or default_wires(layout, self.rates)
        held = self.held(layout, cuts)
        passes = self.passes(layout, wires)
        microbatches = layout.microbatches(samples)
        distinct = Counter(zip(held, speeds or [1.0] * len(held), strict=True))
        works = {key: self._work(key[0], layout, passes, key[1], microbatches) for key in distinct}
        sends, sends_hidden = self._sends(layout, wires, min(w[0].seconds + w[1].seconds for w in works.values()))
        times = {key: sum(part.seconds for part in work) + sends for key, work in works.items()}
        slowest = max(times, key=times.__getitem__)
        forward, backward, again = works[slowest]
        mean = sum(times[key] * count for key, count in distinct.items()) / len(held)
        ahead = forward.seconds + sends / 2
        behind = times[slowest] - ahead
        scale = mean / times[slowest]
        bubble = bubble_seconds(
            layout.schedule, layout.pipeline, layout.virtual, ahead * scale, behind * scale, microbatches
        )
        data, data_hidden = self._data(layout, slowest[0], wires, backward.seconds, times[slowest], microbatches)
        parts = forward.plus(backward)
        return StepTime(
            matmul=parts.matmul * microbatches,
            attention=parts.attention * microbatches,
            memory=parts.memory * microbatches,
            recompute=again.seconds * microbatches,
            tensor=parts.tensor * microbatches,
            context=parts.context * microbatches,
            pipeline=sends * microbatches,
            bubble=bubble,
            data=data,
            optimizer=self._optimizer(layout, slowest[0]),
            contention=CONTENTION * (parts.hidden * microbatches + data_hidden),
            other=self.software.step_seconds,
            tensor_hidden=parts.hidden * microbatches,
            pipeline_hidden=sends_hidden * microbatches,
            data_hidden=data_hidden,
        )

    def _work(
        self,
        held: RankLayers,
        layout: Layout,
        passes: tuple[list[BlockTimes], BlockTimes, BlockTimes],
        speed: float,
        microbatches: int,
    ) -> tuple[TimeParts, TimeParts, TimeParts]:
        """Forward, backward and recomputed, of one micro-batch through what a rank holds."""
        blocks, first, last = passes
        forward, backward, again = TimeParts(), TimeParts(), TimeParts()
        for one, count in zip(blocks, held.kinds, strict=True):
            forward, backward = forward.plus(one.forward, count), backward.plus(one.backward, count)
            if layout.recompute == "full":
                again = again.plus(one.full, count)
            elif layout.recompute == "attention":
                again = again.plus(one.selective, count)
            elif layout.recompute == "operators":
                products = self.software.products_again * one.full.matmul
                again = again.plus(TimeParts(matmul=products, memory=one.full.memory, tensor=one.full.tensor), count)
        for present, end in ((held.embeds, first), (held.scores, last)):
            if present:
                forward, backward = forward.plus(end.forward), backward.plus(end.backward)
        if microbatches > 1:
            added = self.local_parameters(layout.tensor, held) * self.software.accumulate_bytes
            backward = backward.plus(TimeParts(memory=self.rates.memory(added) * (microbatches - 1) / microbatches))
        if speed != 1.0:
            forward, backward, again = (TimeParts().plus(part, 1 / speed) for part in (forward, backward, again))
        return forward, backward, again

    def _sends(self, layout: Layout, wires: Wires, compute: float) -> tuple[float, float]:
        """(exposed, hidden) seconds of one micro-batch's sends: one forward and one backward for each stage of a rank.

        arXiv 2104.04473, section 4.1: each tensor rank sends its slice b s h / t, and the node gathers it."""
        if layout.pipeline == 1:
            return 0.0, 0.0
        whole = 2 * layout.micro_batch * self.shape.sequence_length // layout.context * self.shape.width
        seconds = self.send(layout, wires, whole) * 2 * layout.virtual
        hidden = 0.0
        if layout.schedule != "1f1b" and layout.schedule != "gpipe":
            hidden = min(seconds * self.software.pipeline_hidden, compute)
        return seconds - hidden, hidden

    def send(self, layout: Layout, wires: Wires, whole: float) -> float:
        """Seconds of handing one micro-batch's activations of `whole` bytes to the next stage."""
        if layout.sequence_parallel:
            return send_seconds(whole / layout.tensor, wires.pipeline)
        if self.software.scatter_gather and layout.tensor > 1:
            gather = gather_seconds(whole, layout.tensor, wires.tensor)
            return send_seconds(whole / layout.tensor, wires.pipeline) + gather
        return send_seconds(whole, wires.pipeline)

    def _data(
        self, layout: Layout, held: RankLayers, wires: Wires, backward: float, one: float, microbatches: int
    ) -> tuple[float, float]:
        """(exposed, hidden) seconds of a step's gradient and weight traffic, tied tables over the pipeline included.

        Gradients can hide behind the last micro-batch's backward pass, gathered weights behind each pass that reads
        them. fsdp: reduce-scatter over the shard ranks, all-reduce of the shard over the replicate ranks; weights are
        gathered once with a pipeline, else in each forward pass; the layers' again in each backward pass where they are
        resharded (ZeRO-3)."""
        software, count = self.software, self.local_parameters(layout.tensor, held)
        ranks = layout.data * layout.context
        reduced, weights = count * software.reduce_bytes, count * software.weight_bytes
        layers = self.local_parameters(layout.tensor, RankLayers(held.kinds, False, False))
        gather = 0.0
        if software.data_parallel == "replicate":
            reduce = all_reduce_seconds(reduced, ranks, wires.data)
        elif software.data_parallel == "optimizer_shard":
            reduce = gather_seconds(reduced, ranks, wires.data)
            gather = gather_seconds(weights, ranks, wires.data)
        else:
            shard = layout.shard * layout.context
            reduce = gather_seconds(reduced, shard, wires.shard)
            reduce += all_reduce_seconds(reduced / shard, layout.replicate, wires.replicate)
            gather = gather_seconds(weights, shard, wires.shard)
            if shard > 1:  # one message for each layer
                gather += (sum(held.kinds) - 1) * wires.shard.latency * log2(shard)
            if layout.pipeline == 1:
                gather *= microbatches * (1 + layers / count if layout.reshard else 1)
        share = software.data_hidden if layout.pipeline == 1 else software.data_hidden_in_pipeline
        room = one * microbatches if layout.pipeline == 1 else one - backward
        hidden = min(share * reduce, backward) + min(share * gather, room)
        tied = 0.0
        if self.shape.tied and layout.pipeline > 1 and held.embeds != held.scores:
            table = self.shape.vocab * self.shape.width / layout.tensor * software.reduce_bytes
            tied = all_reduce_seconds(table, 2, wires.pipeline)
        return reduce + gather - hidden + tied, hidden

    def _optimizer(self, layout: Layout, held: RankLayers) -> float:
        """Clipping, the update and the cast, over what this rank updates.

        Offloaded: fp32 gradients go to the host and fp32 weights come back (ZeRO-Offload, arXiv 2101.06840, section
        4), and the host's Adam reads and writes its state at HOST_BYTES_PER_SECOND for each GPU."""
        data, shard = layout.data * layout.context, layout.shard * layout.context
        shares = {"replicate": 1, "optimizer_shard": data, "fsdp": shard}
        count = self.local_parameters(layout.tensor, held) / shares[self.software.data_parallel]
        if not self.offload:
            return self.rates.memory(count * self.software.optimizer_bytes)
        bandwidth, _ = self.rates.link(self.rates.hardware.host_link)
        return 8 * count / bandwidth + count * self.software.optimizer_bytes / HOST_BYTES_PER_SECOND

"""Seconds of one block, of the embedding and of the head, for one micro-batch on one rank, forward and backward.

n tokens of a micro-batch on this context rank; u = n x width numbers of the residual stream, divided by the tensor size
under sequence parallelism; f, q, kv = this rank's share of the mlp, query and key/value widths. Bytes of
element-wise work are counted pass by pass over 16-bit numbers: read 2, write 2, a mask 1.
"""

from collections.abc import Iterator
from math import gcd, log2, prod
from typing import NamedTuple

from gristmill.training.config.mixer import Share
from gristmill.training.planner.costs.model_shape import BlockShape, ModelShape, attention_flops
from gristmill.training.planner.costs.parameters import block_weights
from gristmill.training.planner.engine_profile import EngineProfile
from gristmill.training.planner.hardware import Rates
from gristmill.training.planner.layout import Layout, RankLayers
from gristmill.training.planner.network import (
    AxisLinks,
    GroupLink,
    all_reduce_seconds,
    context_numbers,
    exchange_seconds,
    gather_seconds,
    group_link,
)


class TimeParts(NamedTuple):
    """Seconds by kind. tensor, context and expert (the exchange of tokens): exposed collectives, not overlapped with
    compute."""

    matmul: float = 0.0
    attention: float = 0.0
    memory: float = 0.0
    tensor: float = 0.0
    context: float = 0.0
    overlapped: float = 0.0
    expert: float = 0.0

    def plus(self, other: "TimeParts", times: float = 1.0) -> "TimeParts":
        return TimeParts(*(a + times * b for a, b in zip(self, other, strict=True)))

    @property
    def seconds(self) -> float:
        return self.matmul + self.attention + self.memory + self.tensor + self.context + self.expert


class BlockTimes(NamedTuple):
    """Forward and backward of one block, and its recomputation: full, selective (attention only), or by_token: all that
    is computed token by token."""

    forward: TimeParts
    backward: TimeParts
    full: TimeParts = TimeParts()
    selective: TimeParts = TimeParts()
    by_token: TimeParts = TimeParts()


class ShardSizes(NamedTuple):
    """One rank's share of a block."""

    tokens: int
    residual: float
    query: int
    key_value: int
    ffn_hidden_size: int
    heads: int
    routed_tokens: float = 0.0


def shard_sizes(block: BlockShape, layout: Layout, sequence_length: int) -> ShardSizes:
    """tokens: of the micro-batch on this context rank; routed_tokens: those that this tensor rank sends to experts.
    Tensor ranks that share a key/value head each compute it."""
    tokens = layout.micro_batch * sequence_length // layout.context
    share = layout.tensor if layout.sequence_parallel else 1
    return ShardSizes(
        tokens=tokens,
        residual=tokens * block.width / share,
        query=block.query_width // layout.tensor,
        key_value=block.kv_width // gcd(block.kv_heads or 1, layout.tensor),
        ffn_hidden_size=-(-block.ffn_hidden_size // layout.tensor),
        heads=max(1, block.heads // layout.tensor),
        routed_tokens=tokens / layout.tensor,
    )


def block_times(
    block: BlockShape,
    layout: Layout,
    sequence_length: int,
    framework: EngineProfile,
    rates: Rates,
    links: AxisLinks,
) -> BlockTimes:
    """Times of one block for one micro-batch."""
    w = shard_sizes(block, layout, sequence_length)
    linear_forward, linear_backward = _linears(block, layout, w, rates, framework)
    core_forward, core_backward = _attention(block, layout, w, sequence_length, framework, rates)
    light, heavy = _elementwise(block, w, framework)
    comm_forward, comm_backward, overlapped = _tensor_comm(block, w, layout, framework, links.tensor, linear_forward)
    context, context_back = _context_comm(block, w, layout, links.context, (core_forward, core_backward))
    around = rates.layer_seconds + rates.tensor_layer_seconds * (layout.tensor > 1)
    light_seconds, heavy_seconds = rates.memory(light) + around / 3, rates.memory(heavy) + around * 2 / 3
    forward = TimeParts(linear_forward, core_forward, light_seconds, comm_forward, context, overlapped)
    backward = TimeParts(linear_backward, core_backward, heavy_seconds, comm_backward, context_back, overlapped)
    # torch stops recomputing at the last tensor it needs: the last all-reduce (or scatter) of a layer is not repeated.
    sharded, comm_recomputed = layout.sequence_parallel, comm_forward
    if framework.selective != "core":
        comm_recomputed *= 0.75 if sharded else 0.5
    by_token = TimeParts(linear_forward, memory=light_seconds, tensor=comm_recomputed)
    if block.experts:
        experts_forward, experts_backward = _experts(block, layout, w, rates, framework, links.expert)
        forward, backward = forward.plus(experts_forward), backward.plus(experts_backward)
    full = forward._replace(tensor=comm_recomputed)
    if framework.selective == "core":
        return BlockTimes(forward, backward, full, TimeParts(attention=core_forward, context=context), by_token)
    mixer = _mixer_linears(block, layout, w, rates)
    gathered = comm_forward * (0.25 if sharded else 0.0)
    selective = TimeParts(mixer, core_forward, rates.memory(light / 2), gathered, context)
    return BlockTimes(forward, backward, full, selective, by_token)


def _experts(
    block: BlockShape, layout: Layout, w: ShardSizes, rates: Rates, framework: EngineProfile, link: GroupLink
) -> tuple[TimeParts, TimeParts]:
    """(forward, backward) of the router, the exchange of tokens and the experts, on the busiest rank. Shared experts
    are the block's MLP.

    Each rank sends its tokens' top_k copies to every rank that shares the expert, and gets as many back: two
    all-to-alls each way, which move S (g-1)/g through a rank's link as an all-gather does. Rows are copied at each sort
    (2 + 2 bytes a number: into expert order, after the exchange, before and after the way back) and summed by token. In
    8 bits the products' inputs and gradients are read for their scale, read again, written, and written transposed; our
    engine computes gradients of weights in 16 bits."""
    routed, gain = rates.routed, rates.product_gain
    copies = w.routed_tokens * block.top_k * routed.imbalance
    rows, experts = copies * layout.expert_tensor, block.experts // layout.expert
    hidden = block.expert_ffn_hidden_size // layout.expert_tensor
    inner, expert_rows = hidden * (2 if block.gated else 1), max(1, round(rows / experts))
    up = rates.matmul(expert_rows, block.width, inner, experts)
    down = rates.matmul(expert_rows, hidden, block.width, experts)
    by_inputs = rates.matmul(expert_rows, inner, block.width, experts)
    by_inputs += rates.matmul(expert_rows, block.width, hidden, experts)
    by_weights = rates.matmul(inner, expert_rows, block.width, experts)
    by_weights += rates.matmul(block.width, expert_rows, hidden, experts)
    router = rates.matmul(max(1, round(w.routed_tokens)), block.width, block.experts)
    sorts = 4 if layout.expert_ranks > 1 else 2
    light = rates.memory((4 * sorts + 3) * copies * block.width / routed.copies)
    heavy = rates.memory((4 * sorts + 4) * copies * block.width / routed.copies)
    light += rates.memory((6 if block.gated else 4) * rows * hidden)
    heavy += rates.memory((10 if block.gated else 6) * rows * hidden)
    if gain > 1:
        light += rates.memory(6 * rows * (block.width + hidden) / routed.casts)
        heavy += rates.memory(6 * rows * (block.width + inner) / routed.casts)
    launches = experts * routed.expert_microseconds * 1e-6
    exchange = 2 * exchange_seconds(2 * rows * block.width, layout.expert_ranks, link) * (1 - framework.expert_overlap)
    forward = TimeParts(matmul=(up + down) / gain + router, memory=light + launches / 3, expert=exchange)
    back = by_inputs / gain + by_weights / (1 if framework.is_ours else gain) + 2 * router
    return forward, TimeParts(matmul=back, memory=heavy + launches * 2 / 3, expert=exchange)


def embedding_times(
    shape: ModelShape, layout: Layout, sequence_length: int, rates: Rates, link: GroupLink
) -> BlockTimes:
    """Look-up and positions forward, scatter-add backward; partial rows are summed over the tensor ranks."""
    numbers = layout.micro_batch * sequence_length // layout.context * shape.width
    comm = all_reduce_seconds(2 * numbers, layout.tensor, link) / (2 if layout.sequence_parallel else 1)
    behind = comm if layout.sequence_parallel else 0.0  # a scatter's mirror is a gather, a sum's is nothing
    return BlockTimes(
        forward=TimeParts(memory=rates.memory(15 * numbers), tensor=comm),
        backward=TimeParts(memory=rates.memory(8 * numbers), tensor=behind),
    )


def head_times(
    shape: ModelShape, layout: Layout, sequence_length: int, framework: EngineProfile, rates: Rates, link: GroupLink
) -> BlockTimes:
    """Logits over this rank's share of the vocabulary and the cross entropy, which never gathers them."""
    tokens = layout.micro_batch * sequence_length // layout.context
    vocab = -(-shape.vocab // layout.tensor)
    forward, *backward = head_products(tokens, shape.width, vocab, rates)
    # whole: to fp32 2+4, maximum 4, subtract 8, exp 8, sum 4, divide 8; back: 8 twice, to 16 bits 6. fused: 2; back 4.
    light, heavy = (38, 22) if framework.loss == "unfused" else (4, 6)
    logits = tokens * vocab  # where they are measured, all in the forward pass, in which our engine takes the gradient
    comm = all_reduce_seconds(2 * tokens * shape.width, layout.tensor, link)
    comm_forward, comm_backward = (comm / 2, comm / 2) if layout.sequence_parallel else (0.0, comm)
    sums = all_reduce_seconds(12 * tokens, layout.tensor, link)
    return BlockTimes(
        TimeParts(matmul=forward, memory=rates.logits(logits, light * logits), tensor=comm_forward + sums),
        TimeParts(matmul=sum(backward), memory=rates.logits(0, heavy * logits), tensor=comm_backward),
    )


def head_products(tokens: int, width: int, vocab: int, rates: Rates) -> tuple[float, float, float]:
    """Seconds of the logits, and of the gradients of hidden states and table."""
    back = rates.matmul(tokens, vocab, width), rates.matmul(vocab, tokens, width)
    return rates.matmul(tokens, width, vocab), *back


def _linears(
    block: BlockShape, layout: Layout, w: ShardSizes, rates: Rates, framework: EngineProfile
) -> tuple[float, float]:
    """Query, key and value are packed into one product, gate and up into another; backward is two products for each."""
    inner = w.ffn_hidden_size * (2 if block.gated else 1)
    linears = (
        (block.width, w.query + 2 * w.key_value),
        (w.query, block.width),
        (block.width, inner),
        (w.ffn_hidden_size, block.width),
        *declared_linears(block, layout),
    )
    shapes = [shape for shape in linears if all(shape)]  # a mixture may have no MLP beside its experts
    cast = framework.float8_cast_bytes
    forward = sum(rates.linear(w.tokens, depth, columns, cast) for depth, columns in shapes)
    inputs = sum(rates.linear(w.tokens, columns, depth, cast) for depth, columns in shapes)
    weights = sum(rates.linear(columns, w.tokens, depth, cast) for depth, columns in shapes)
    return forward, inputs + weights


def declared_linears(block: BlockShape, layout: Layout) -> list[tuple[int, int]]:
    """(inputs, outputs) of the matrices of a mixer that is not attention, on one tensor rank."""
    if block.heads or block.mixer is None:
        return []
    linears = []
    for parameter in block.mixer.parameters(block.width):
        if parameter.is_matrix:
            outputs, inputs = parameter.shape
            linears.append(
                (inputs // layout.tensor, outputs)
                if parameter.sharding == "input"
                else (inputs, max(1, outputs // layout.tensor))
            )
    return linears


def _mixer_linears(block: BlockShape, layout: Layout, w: ShardSizes, rates: Rates) -> float:
    """Forward seconds of the mixer's projections only."""
    if not block.heads:
        return sum(rates.linear(w.tokens, depth, columns) for depth, columns in declared_linears(block, layout))
    packed = rates.linear(w.tokens, block.width, w.query + 2 * w.key_value)
    return packed + rates.linear(w.tokens, w.query, block.width)


def _attention(
    block: BlockShape, layout: Layout, w: ShardSizes, sequence_length: int, framework: EngineProfile, rates: Rates
) -> tuple[float, float]:
    """Scores, softmax and product with the values; or a scan."""
    if not block.heads:
        return _scan(block, layout, sequence_length, rates)
    rows, batch = sequence_length // layout.context, layout.micro_batch
    if framework.attention == "flash":
        flops = (
            batch * attention_flops(block, sequence_length, causal=True) * w.query / block.query_width / layout.context
        )
        width_share = flash_width_share(block.head_dim)
        # The backward pass does 5 products for the forward's 2.
        second = framework.flash == "second"
        forward = rates.flash(flops / width_share, sequence_length, second=second)
        return forward, rates.flash(2.5 * flops / width_share, sequence_length, backward=True, second=second)
    pairs = batch * w.heads
    scores = rates.matmul(rows, block.head_dim, sequence_length, pairs)
    values = rates.matmul(rows, sequence_length, block.head_dim, pairs)
    columns = rates.matmul(sequence_length, rows, block.head_dim, pairs)
    numbers = pairs * rows * sequence_length
    # softmax reads and writes 2, dropout reads and writes 2 and writes its mask; backward softmax 6, dropout 5.
    light, heavy = (9, 11) if framework.dropout else (4, 6)
    forward = scores + values + rates.memory(light * numbers)
    return forward, scores + values + 2 * columns + rates.memory(heavy * numbers)


def flash_width_share(head_dim: int) -> float:
    """Share of the rate of heads of 128: heads of 64 reach nine tenths (FlashAttention-2, figures 4 and 5)."""
    return head_dim / (head_dim + 16) * 9 / 8


def _scan(block: BlockShape, layout: Layout, sequence_length: int, rates: Rates) -> tuple[float, float]:
    """Seconds of a mixer that is not attention: its FLOPs at the rate of matmuls, and what it keeps for the backward
    pass written and read once. The backward pass does twice the FLOPs and as much traffic."""
    if block.mixer is None:
        return 0.0, 0.0
    share = Share(layout.micro_batch, sequence_length // layout.context, layout.tensor)
    flops = share.rows * block.mixer.scan_flops(block.width, share.tokens) / layout.tensor
    traffic = rates.memory(2 * block.mixer.activation_bytes(block.width, share))
    return flops / rates.matmul_rate + traffic, 2 * flops / rates.matmul_rate + traffic


def _elementwise(block: BlockShape, w: ShardSizes, framework: EngineProfile) -> tuple[float, float]:
    """Bytes forward and backward of norms, residuals, activations, rotary positions, biases and copies."""
    # Of a layer with one of mixer and MLP, half of the norms and additions; a scan reads and writes as q, k and v do.
    u = w.residual * (block.has_mixer + block.has_mlp) / 2
    f, qkv = w.tokens * w.ffn_hidden_size, w.tokens * (w.query + 2 * w.key_value)
    rotary = w.tokens * (w.query + w.key_value) if block.rope else 0
    query = w.tokens * w.query
    if framework.kernels == "fused":
        # norm with residual: read 2+2, write 2+2; backward read 2+2+2, write 2 and the gain's partial sums.
        light = 16 * u + (6 if block.gated else 4) * f + 4 * rotary
        heavy = 18 * u + (10 if block.gated else 6) * f + 4 * rotary
        sums = (u + f) * block.biases + qkv * block.qkv_biases + u * block.output_biases
        return light, heavy + 2 * sums
    # norm 2+2, residual with bias 2+2+2 and the mask of dropout; GeLU 2+2; copies of the attention's output 2+2.
    light = 2 * (4 + 6 + framework.dropout) * u + (10 if block.gated else 4) * f + 4 * query + 12 * rotary
    # norm: gradient 2+2+2, gain and bias 2+2, joining the residual's gradient 2+2+2: 16; mask 2+1+2; bias sums 2.
    heavy = (
        2 * (16 + 5 * framework.dropout + 2) * u + (14 if block.gated else 6) * f + 4 * query + 4 * qkv + 12 * rotary
    )
    return light, heavy + 2 * f * block.biases + 2 * qkv * block.qkv_biases


def _tensor_comm(
    block: BlockShape, w: ShardSizes, layout: Layout, framework: EngineProfile, link: GroupLink, compute: float
) -> tuple[float, float, float]:
    """(exposed forward, exposed backward, overlapped in each): two all-reduces each way, or as much in halves.

    arXiv 1909.08053, figure 4, and 2205.05198, figure 5. Overlap is with the linear layers' matmuls."""
    if layout.tensor == 1:
        return 0.0, 0.0, 0.0
    all_reduce = all_reduce_seconds(2 * w.tokens * block.width, layout.tensor, link) * _tensor_layers(block, layout) / 2
    share = framework.tensor_hidden_async if layout.async_tensor else framework.tensor_overlap
    overlapped = min(2 * all_reduce * share, compute)
    regather = 0.0
    if layout.sequence_parallel and framework.regather_in_backward:
        regather = (1 - share) * 2 * gather_seconds(2 * w.tokens * block.width, layout.tensor, link)
    return 2 * all_reduce - overlapped, 2 * all_reduce - overlapped + regather, overlapped


def _tensor_layers(block: BlockShape, layout: Layout) -> float:
    """How many pairs of column- and row-parallel layers a block has: attention and the MLP. A mixture without an MLP
    beside its experts has one; without sequence parallelism its results are gathered, half an all-reduce. A mixer or an
    MLP alone is one."""
    if not block.experts:
        return float(block.has_mixer + block.has_mlp)
    return float(block.has_mixer) + bool(block.ffn_hidden_size) + (0.0 if layout.sequence_parallel else 0.5)


def _context_comm(
    block: BlockShape, w: ShardSizes, layout: Layout, link: GroupLink, core: tuple[float, float]
) -> tuple[float, float]:
    """Exposed (forward, backward). Keys and values go around the ring while attention computes the block before, which
    takes `core` over all blocks; the exchanges of heads wait for the projections and attention for them, and so do
    the states and tokens that other mixers pass on."""
    if layout.context == 1 or not block.has_mixer:
        return 0.0, 0.0
    forward, backward = context_numbers(block, layout, w.tokens, layout.micro_batch)
    sent = [2 * numbers.compute + 4 * numbers.statistics for numbers in (forward, backward)]
    if not block.heads:
        gathered = [numbers / link.bandwidth + link.latency * log2(layout.context) for numbers in sent]
        return gathered[0], gathered[1]
    if layout.context_method == "all_to_all":
        exchanged = [numbers / link.bandwidth + 4 * link.latency * log2(layout.context) for numbers in sent]
        return exchanged[0], exchanged[1]
    hops = [numbers / link.bandwidth + layout.context * link.latency for numbers in sent]
    return max(0.0, hops[0] - core[0]), max(0.0, hops[1] - core[1])


# Seconds that Muon takes to make the matrices of a rank's layers orthogonal (training/optim/muon.py).

ROUNDS = 5  # of Newton-Schulz
SENT_BYTES = 2  # of a number on the link: bfloat16


def orthogonal_seconds(shape: ModelShape, layout: Layout, rank_layers: RankLayers, rates: Rates) -> float:
    """The matrices are balanced over the ranks of a pipeline rank, but none is divided; one all-to-all brings a rank
    its matrices' shards, another takes the results to all copies of the shards."""
    ranks = layout.gpus // layout.pipeline
    total, longest, elements = 0.0, 0.0, 0
    for number, rows, columns in _matrices(shape, rank_layers):
        seconds = newton_schulz_seconds(rows, columns, rates)
        total, longest = total + number * seconds, max(longest, seconds)
        elements += number * rows * columns
    link = group_link(rates, ranks, 1, layout.gpus)
    sent = SENT_BYTES * elements / ranks
    exchange = gather_seconds(sent, ranks, link) + gather_seconds(sent * layout.replicate, ranks, link)
    return max(total / ranks, longest) + exchange


def newton_schulz_seconds(rows: int, columns: int, rates: Rates) -> float:
    """x <- a x + (b s + c s s) x with s = x x^T, five times: three products, and passes over the sums of m x m and
    m x n numbers."""
    m, n = sorted((rows, columns))
    products = rates.matmul(m, n, m) + rates.matmul(m, m, m) + rates.matmul(m, m, n)
    return ROUNDS * (products + rates.memory(SENT_BYTES * 3 * (m * m + m * n)))


def _matrices(shape: ModelShape, rank_layers: RankLayers) -> Iterator[tuple[int, int, int]]:
    """(number, rows, columns) of the matrices of the rank's layers; each expert's are matrices of their own."""
    for block, count in zip(shape.distinct, rank_layers.kinds, strict=True):
        for weight in block_weights(block) if count else ():
            if len(weight.shape) > 1 and not weight.name.endswith("bias"):
                yield count * prod(weight.shape[:-2]), weight.shape[-2], weight.shape[-1]
